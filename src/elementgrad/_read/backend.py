"""The interfaces that a backend implements for reads: `ReadBackend`, and the `Recorder` of `eg.record`."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from elementgrad._backends.autodiff import Linearization, TensorFunction, Use
from elementgrad._sparsity.pattern import Pattern
from elementgrad.errors import PlaceError

Tensor = Any
Read = Callable[[Tensor], tuple[Tensor | None, Tensor | None, Tensor]]
"""A compressed read at an input: its values and the numbers that check them."""
Layout = Literal["csr", "coo"]


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


class ReadBackend(ABC):
    """Seeds and products of sweeps, sparse results, contributions, recordings and worker processes."""

    @abstractmethod
    def one_hot_seeds(self, like: Tensor, positions: np.ndarray, batch: int) -> Tensor:
        """Return a stack of seeds for a tensor, one per position: ones there in each of `batch` examples."""

    @abstractmethod
    def transpose(self, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        """Return x with its axes in another order."""

    @abstractmethod
    def matmul(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the product of two matrices, or of two stacks of them."""

    def materialize(self, x: Tensor) -> Tensor:
        """Return a result as an ordinary tensor that stores every number itself, and no others; x if it is one."""
        return x

    def free_memory(self, like: Tensor) -> int | None:
        """Return the free bytes on the device of a tensor, if it has memory of its own."""
        return None

    @abstractmethod
    def rounding(self, like: Tensor) -> str:
        """Name the version and the number of threads that decide how sums round on the device of a tensor.

        Empty if results may round differently from one process to the next.
        """

    @abstractmethod
    def index(self, positions: np.ndarray, like: Tensor) -> Any:
        """Return positions in a vector, prepared for `gather` on the device of `like`."""

    @abstractmethod
    def gather(self, x: Tensor, index: Any) -> Tensor:
        """Return the elements of a vector at positions that `index` prepared."""

    @abstractmethod
    def sparse(self, pattern: Pattern, layout: Layout | None, like: Tensor) -> Callable[[Tensor], Any]:
        """Return a function from the values of all entries, by rows, to the framework's own sparse matrix.

        Its layout is the one that the framework prefers unless one is given. The indices are prepared once, on the
        device of `like`.
        """

    def maybe_compile(self, read: Read) -> Read:
        """Return a read that is called many times, compiled where that is faster and possible."""
        return read

    @abstractmethod
    def uses(self, run: TensorFunction, inputs: Sequence[Tensor], input: int) -> tuple[Linearization, list[Use]]:
        """Linearize a function by all the uses that it makes of one of its inputs, each an input of its own."""

    @abstractmethod
    def recorder(self, tensors: Sequence[Tensor]) -> Recorder:
        """Return a recorder for eager code that uses `tensors`."""

    def ambient_state(self, linear: Linearization) -> Any:
        """Return what an evaluation depended on beside its arguments, such as random states, to be pickled."""
        return None

    def restore_ambient_state(self, state: Any) -> AbstractContextManager[Any]:
        """Run what is inside from such a state, here or in another process."""
        return nullcontext()

    def reducers(self) -> Mapping[type, Callable[[Any], tuple[Any, ...]]]:
        """Return functions that pickle the framework's wrappers of functions, where they cannot pickle themselves."""
        return {}
