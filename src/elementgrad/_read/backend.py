"""The interface that a backend implements for reads of derivatives: `ReadBackend`."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import numpy as np

from elementgrad._backends.autodiff import Linearization, TensorFunction, Use
from elementgrad._read.recorder import Recorder
from elementgrad._sparsity.pattern import Pattern

Tensor = Any
Read = Callable[[Tensor], tuple[Tensor | None, Tensor | None]]
"""A compressed read at an input: its values and the numbers that check them."""
Layout = Literal["csr", "coo"]


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
    def seeds(self, values: np.ndarray, like: Tensor) -> Tensor:
        """Return seeds in the dtype of `like`, as constants even while a program is being traced."""

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
