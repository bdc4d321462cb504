"""What a framework supplies for sparse matrices."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from elementgrad.errors import FrameworkError
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

    def repeated(self, read: Read) -> Read:
        """A function that is called many times, compiled where that is faster and as it stands where it cannot be."""
        return read

    def sparse(self, pattern: Pattern, layout: Layout | None, like: Tensor) -> Callable[[Tensor], Any]:
        """What makes the framework's own sparse matrix of values, in the layout it likes best unless told.

        There is one value for each entry, by rows, and they live where `like` does.
        """
        raise FrameworkError(f'sparse matrices of {self.name} are not made yet; use J.sparse("scipy")')
