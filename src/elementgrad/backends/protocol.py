"""What a framework must supply. Everything that can be built from these operations is built above them, once."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Protocol

import numpy as np

if TYPE_CHECKING:
    from elementgrad.selection import Selection

Tensor = Any
Kind = Literal["b", "i", "f", "c", "o"]
"""What a dtype holds: booleans, integers, floats, complex numbers or something else."""


class Backend(Protocol):
    """One framework."""

    name: str

    def owns(self, kind: type) -> bool:
        """Whether this type is a tensor of the framework."""

    def shape(self, x: Tensor) -> tuple[int, ...]:
        """The shape; an axis whose size is not known while tracing is None."""

    def kind(self, x: Tensor) -> Kind:
        """What the dtype holds."""

    def read(self, x: Tensor) -> np.ndarray | None:
        """The values, or None if they are traced and nobody can know them."""

    def refuse(self, traced: Tensor, why: str) -> NoReturn:
        """Raise `TracedError`, or what makes a compiler go on without compiling: these values must be read."""

    def compiling(self) -> bool:
        """Whether a compiler is interpreting Python code right now, so that no Python value can be relied on."""

    def uncompiled(self, function: Callable[..., Tensor], *arguments: Any) -> Tensor:
        """Call a function that no such compiler may look into."""

    def cast(self, value: Any, like: Tensor) -> Tensor:
        """A number, array or tensor as a tensor with the dtype of `like`, where `like` lives."""

    def take(self, x: Tensor, selection: "Selection") -> Tensor:
        """The selected elements, `x[index]`."""

    def put(self, x: Tensor, selection: "Selection", value: Any) -> Tensor:
        """A copy of x with the selected elements replaced by a number, or by a tensor of x's dtype that broadcasts."""

    def accumulate(self, x: Tensor, selection: "Selection", value: Any, multiply: bool) -> Tensor:
        """A copy of x with values added or multiplied at traced indices, which may repeat."""

    def where(self, mask: Any, x: Tensor, y: Tensor) -> Tensor:
        """x where the mask is true and y elsewhere, without arithmetic."""

    def stop(self, x: Tensor) -> Tensor:
        """The same values, cut off from gradients."""

    def reshape(self, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        """x in another shape of the same size."""

    def broadcast(self, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        """x repeated to a larger shape."""

    def soft_choice(self, x: Tensor, logits: Tensor, axis: int) -> Tensor:
        """The mean of x along an axis, weighted by the softmax of the logits, in x's dtype."""

    def hard_choice(self, x: Tensor, logits: Tensor, axis: int) -> Tensor:
        """The elements of x along an axis where the logits are largest."""

    def graft(self, value: Tensor, slope: Tensor) -> Tensor:
        """The value of the one with the derivatives of the other."""
