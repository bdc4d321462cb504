"""Tracked tensors that leave PyTorch as if they were plain, as those are that the user gave."""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from elementgrad import tree
from elementgrad.backends.torch.calls import EXPORTS, name_of
from elementgrad.backends.torch.explaining.words import COPIES
from elementgrad.backends.torch.freezable import freezes

Tensor = torch.Tensor


class Lenient(TorchFunctionMode):
    """Lets them out, and be frozen."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if freezes(func, args, kwargs or {}):
            return args[0].detach_()
        name = name_of(func)
        if name in EXPORTS:
            args = plain(args)
        elif name in COPIES:
            args = tree.mapped(args, plainly)
        return func(*args, **(kwargs or {}))


def plain(args: Any) -> list[Any]:
    """Arguments without their derivatives."""
    return [plainly(x) for x in args]


def plainly(x: Any) -> Any:
    """A tensor without its derivative, and anything else as it is."""
    return x.detach() if isinstance(x, Tensor) and x.requires_grad else x
