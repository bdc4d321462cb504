"""What a framework supplies for sparse matrices."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from elementgrad.sparsity.pattern import Pattern

Tensor = Any
Read = Callable[[Tensor], tuple[Tensor | None, Tensor | None]]
Layout = Literal["csr", "coo"]


class Matrices(ABC):
    """The part of a backend that makes sparse matrices of what sweeps give.

    What a framework knows of patterns is `Linear.pattern`.
    """

    name: str

    @abstractmethod
    def index(self, positions: np.ndarray, like: Tensor) -> Any:
        """Positions in a vector that lives where `like` does, ready for `gather` any number of times."""

    @abstractmethod
    def gather(self, x: Tensor, index: Any) -> Tensor:
        """The elements of a vector at positions that `index` made ready."""

    @abstractmethod
    def seeds(self, numbers: np.ndarray, like: Tensor) -> Tensor:
        """Numbers in the dtype of `like`, ready any number of times; not a part of a program that is being traced."""

    def repeated(self, read: Read) -> Read:
        """A function that is called many times, compiled where that is faster and as it stands where it cannot be."""
        return read

    @abstractmethod
    def sparse(self, pattern: Pattern, layout: Layout | None, like: Tensor) -> Callable[[Tensor], Any]:
        """From values, one number for each entry by rows, to the framework's own sparse matrix.

        It is in the layout that the framework likes best unless told; the indices are made ready once, where `like`
        lives.
        """
