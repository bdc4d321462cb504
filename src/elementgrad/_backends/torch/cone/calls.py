"""Calls of PyTorch operations, with values of a recorded program in place of tensors."""

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from elementgrad._backends.torch import _compat
from elementgrad._cone.boxes import Box, slices
from elementgrad._cone.plan import ProgramValue
from elementgrad._cone.rules import ProgramCall

Tensor = torch.Tensor


def flatten_call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], Any]:
    """Return the arguments of an operation as one list, with the tensors of lists apart, and how to put them back.

    Operations take tensors and flat lists of tensors. PyTorch's general pytrees take ten times as long, for each of the
    numbers in a stride or a padding too.
    """
    leaves: list[Any] = []
    lengths: list[int | None] = []
    for argument in (*args, *kwargs.values()):
        listed = isinstance(argument, (list, tuple)) and any(isinstance(x, Tensor) for x in argument)
        lengths.append(len(argument) if listed else None)
        leaves += argument if listed else (argument,)
    return leaves, (lengths, len(args), tuple(kwargs))


def unflatten_call(leaves: Sequence[Any], layout: Any) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of an operation from a list made by `flatten_call`."""
    lengths, count, names = layout
    arguments, at = [], 0
    for length in lengths:
        arguments.append(leaves[at] if length is None else list(leaves[at : at + length]))
        at += 1 if length is None else length
    return arguments[:count], dict(zip(names, arguments[count:], strict=True))


class TorchCall(ProgramCall):
    """A call of PyTorch, of which parts of tensors are views."""

    func: Any = None
    """The operation; None for a user's own function."""

    @abstractmethod
    def __call__(self, *tensors: Tensor) -> Any:
        """Call it with other tensors."""

    def run(self, *tensors: Tensor) -> list[Tensor]:
        made = self(*tensors)
        return [made] if isinstance(made, Tensor) else _compat.tree_leaves(made)

    @staticmethod
    def cut(x: Tensor, box: Box, outer: Box) -> Tensor:
        return x if box == outer else x[slices(box, outer)]


class RecordedCall(TorchCall):
    """A call of one PyTorch operation, with values of the program in place of tensors."""

    def __init__(self, func: Any, leaves: Sequence[Any], layout: Any, grad: bool):
        self.func = func
        self.leaves = leaves
        self._layout = layout
        self.grad = grad
        """True if gradients were enabled."""
        self.writes = False
        """True if the first argument is written to."""
        self.random_state: Tensor | None = None
        """The state of the generator, for an operation that draws random numbers."""
        self.slots = [slot for slot, leaf in enumerate(leaves) if isinstance(leaf, ProgramValue)]

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments by name, with defaults for those that were not given."""
        args, kwargs = unflatten_call(self.leaves, self._layout)
        arguments = {}
        for position, parameter in enumerate(_compat.schema_of(self.func).arguments):
            given = args[position] if position < len(args) else kwargs.get(parameter.name, parameter.default_value)
            arguments[parameter.name] = given
        return arguments

    def __call__(self, *tensors: Tensor) -> Any:
        leaves = list(self.leaves)
        for slot, tensor in zip(self.slots, tensors, strict=True):
            leaves[slot] = tensor
        if self.writes:
            # A write without gradients changes the numbers and leaves the gradient of what was there before.
            with torch.enable_grad():
                leaves[self.slots[0]] = tensors[0].clone()
        args, kwargs = unflatten_call(leaves, self._layout)
        return self.func(*args, **kwargs)


class CustomCall(TorchCall):
    """A call of a user's own `autograd.Function`, whose backward is the derivative."""

    def __init__(self, apply: Callable[..., Any], leaves: Sequence[Any], grad: bool, written: Collection[int]):
        self.leaves = leaves
        self.grad = grad
        self._written = written
        """The positions of the arguments that are written to."""
        self.slots = [slot for slot, leaf in enumerate(leaves) if isinstance(leaf, ProgramValue)]
        self._apply = apply

    def __call__(self, *tensors: Tensor) -> Any:
        leaves = list(self.leaves)
        for slot, tensor in zip(self.slots, tensors, strict=True):
            leaves[slot] = tensor.clone() if slot in self._written else tensor
        return self._apply(*leaves)

    def run(self, *tensors: Tensor) -> list[Tensor]:
        return [y for y in super().run(*tensors) if isinstance(y, Tensor)]
