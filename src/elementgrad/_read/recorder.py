"""Interface of `eg.record` that backends implement: a recorder of eager code, and requests for its derivatives."""

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
    """Elements of a live tensor whose derivatives are read."""

    tensor: Tensor
    positions: np.ndarray
    """Positions in the flattened tensor."""
    write: int | None = None
    """Which write of each element is meant; None for the last that matters."""

    def outside_error(self) -> PlaceError:
        """Return the error about a tensor that is not part of the recording."""
        shape = tuple(self.tensor.shape)
        return PlaceError(
            f"the tensor of shape {shape} is from outside the recording; give it to eg.record, or name elements of a "
            "tensor that is inside by eg.at(x)[...] instead of x[...], as in rec.grad(eg.at(z)[0], eg.at(x)[0])"
        )


@dataclass(frozen=True)
class UseFlow:
    """The derivative that flows back through one use of a tensor."""

    use: Use
    value: Tensor
    order: tuple[int, int]
    """Index of the operation, and of its slot."""


class Recorder(ABC):
    """Records one block of eager code."""

    @abstractmethod
    def start(self) -> None:
        """Record until what this registers with the innermost open scope is undone; the record stays."""

    @abstractmethod
    def linear(self, of: Sequence[ElementRequest], wrt: Sequence[ElementRequest]) -> Linearization:
        """Return the recorded code, ready for sweeps from these outputs to these inputs.

        Raises:
            PlaceError: a tensor is not part of the recording.
        """

    @abstractmethod
    def uses(self, of: ElementRequest, position: int, wrt: ElementRequest) -> list[UseFlow] | None:
        """Return the derivative of one element, split over the uses of the tensor that `wrt` names elements of.

        None where no path leads from one to the other.
        """
