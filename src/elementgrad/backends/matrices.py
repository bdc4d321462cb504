"""What a framework supplies for sparse matrices."""

from abc import ABC, abstractmethod
from typing import Any, Literal

import numpy as np

from elementgrad.errors import FrameworkError
from elementgrad.sparsity.pattern import Pattern

Tensor = Any
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

    def sparse(self, values: Tensor, pattern: Pattern, layout: Layout | None) -> Any:
        """The framework's own sparse matrix of a pattern's entries, in the layout it likes best unless told.

        `values` has one number for each entry, by rows.
        """
        raise FrameworkError(f'sparse matrices of {self.name} are not made yet; use J.sparse("scipy")')
