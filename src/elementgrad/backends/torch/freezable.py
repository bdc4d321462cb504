"""A function that freezes its own parameters, while computed tensors stand for them."""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

SETTER = torch.Tensor.requires_grad.__set__  # type: ignore[attr-defined]


class Freezable(TorchFunctionMode):
    """Tensors that stand for the user's parameters may be frozen as those may."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0].detach_() if freezes(func, args, kwargs or {}) else func(*args, **(kwargs or {}))


def freezes(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a call sets `requires_grad` to False on a tensor that PyTorch would refuse that for."""
    if func != torch.Tensor.requires_grad_ and func != SETTER:
        return False
    flag = args[1] if len(args) > 1 else kwargs.get("requires_grad", True)
    return not flag and not args[0].is_leaf
