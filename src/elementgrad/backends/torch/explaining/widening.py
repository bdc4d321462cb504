"""A function in float64 that holds tensors of its own, which nobody can convert beforehand."""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from elementgrad import tree
from elementgrad.backends.torch.calls import name_of

Tensor = torch.Tensor
WIDER = {torch.float16: torch.float64, torch.bfloat16: torch.float64, torch.float32: torch.float64}
WIDER |= {torch.complex64: torch.complex128}


class Widening(TorchFunctionMode):
    """Where a tensor in float64 meets narrower ones, as the weights of a module, those are widened for the call."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kinds = {x.dtype for x in tree.flat((args, kwargs)) if isinstance(x, Tensor)}
        if kinds.isdisjoint(WIDER.values()) or kinds.isdisjoint(WIDER) or _writes(name_of(func)):
            return func(*args, **kwargs)
        return func(*tree.mapped(args, _wide), **tree.mapped(kwargs, _wide))


def _writes(name: str) -> bool:
    return (name.endswith("_") and not name.endswith("__")) or name in ("__setitem__", "data.__set__") or "__i" in name


def _wide(x: Any) -> Any:
    return x.to(WIDER[x.dtype]) if isinstance(x, Tensor) and x.dtype in WIDER else x
