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
        if kinds.isdisjoint(WIDER.values()) or kinds.isdisjoint(WIDER) or _means_itself(name_of(func), kwargs):
            return func(*args, **kwargs)
        return func(*tree.mapped(args, _wide), **tree.mapped(kwargs, _wide))


def _means_itself(name: str, kwargs: Any) -> bool:
    """Whether a function is about the very tensors that it is given: it writes to them, or asks for their gradients."""
    writes = (name.endswith("_") and not name.endswith("__")) or name.endswith((".__set__", "__setitem__"))
    return writes or "__i" in name or name in ("grad", "backward") or kwargs.get("out") is not None


def _wide(x: Any) -> Any:
    return x.to(WIDER[x.dtype]) if isinstance(x, Tensor) and x.dtype in WIDER else x
