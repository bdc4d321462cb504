"""What a framework supplies for recordings of eager code: who watches it run, and what it gives when it is asked."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from elementgrad._backends.autodiff import Linearization, Use
from elementgrad.errors import PlaceError

Tensor = Any


@dataclass(frozen=True)
class ElementRequest:
    """Elements of a live tensor that somebody asks about."""

    tensor: Tensor
    positions: np.ndarray
    """Where they are in the flattened tensor."""
    write: int | None = None
    """Which write of each of them is meant; None for the last that matters."""

    def outside(self) -> PlaceError:
        """The error about a tensor that the recording knows nothing of."""
        shape = tuple(self.tensor.shape)
        return PlaceError(
            f"the tensor of shape {shape} is from outside the recording; give it to eg.record, or name elements of a "
            "tensor that is inside by eg.at(x)[...] instead of x[...], as in rec.grad(eg.at(z)[0], eg.at(x)[0])"
        )


@dataclass(frozen=True)
class UseFlow:
    """What flows back through one use of a tensor."""

    use: Use
    value: Tensor
    order: tuple[int, int]
    """The number of the operation and of its slot."""


class Recorder(ABC):
    """Watches one piece of eager code."""

    @abstractmethod
    def start(self) -> None:
        """Watch until what this registers with the innermost open scope is undone; what was seen stays."""

    @abstractmethod
    def linear(self, of: Sequence[ElementRequest], wrt: Sequence[ElementRequest]) -> Linearization:
        """What was seen, ready for sweeps from these outputs to these inputs, or an error about one that is unknown."""

    @abstractmethod
    def uses(self, of: ElementRequest, position: int, wrt: ElementRequest) -> list[UseFlow] | None:
        """The derivative of one element, split over the uses of the tensor that `wrt` names elements of.

        None where no path leads from one to the other.
        """
