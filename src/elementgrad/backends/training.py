"""What a framework does for elements of a model that train, and for the files they are kept in."""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

Tensor = Any


class Part(Protocol):
    """The elements of one place."""

    tensor: Tensor
    """The parameter they are in."""
    positions: np.ndarray
    """Where they are in it, flat."""
    leaf: Tensor
    """Their values, in one row: what an optimizer moves."""
    originals: Tensor
    """What they were, in the parameter's dtype."""


class Trainer(Protocol):
    """One model whose elements train."""

    def parameter(self, name: str) -> Tensor:
        """The parameter that bears a name; anything else is an error that says what fits."""

    def named(self, tensor: Tensor) -> str:
        """The name of a parameter, given itself; another tensor is an error."""

    def lone(self) -> str:
        """The name of the only parameter of a model that has one."""

    def training(self, tensor: Tensor) -> Sequence[Part]:
        """Which parts of a parameter train now."""

    def check(self, tensor: Tensor, name: str) -> None:
        """Refuse a parameter whose elements cannot train."""

    def dtype(self, given: Any) -> Any:
        """The framework's dtype for what a user gave."""

    def part(
        self, tensor: Tensor, positions: np.ndarray, dtype: Any, values: Any = None, originals: Any = None
    ) -> Part:
        """Elements at some positions, with their values now or with values and originals from a file."""

    def start(self, parts: Sequence[Part]) -> None:
        """Let parts train: freeze all else, and let the layers know."""

    def stop(self, parts: Sequence[Part]) -> None:
        """Let parts train no longer, with the values that they have; after the last the model is as it was."""

    def write(self, part: Part) -> None:
        """Put a part's values into its parameter."""

    def restore(self, part: Part) -> None:
        """Put a part's originals into its parameter, and into its values."""

    def check_loss(self, loss: Tensor, of: str) -> None:
        """Refuse what is no loss: one number that has a gradient."""

    def gradients(self, loss: Tensor, parts: Sequence[Part], last: bool) -> list[Tensor | None]:
        """What parts hear of a loss, None where it does not depend on one; the graph is kept unless it is the last."""

    def hear(self, part: Part, gradient: Tensor, elements: np.ndarray) -> None:
        """Add some elements of a gradient to that of a part."""

    def bits(self, tensor: Tensor, positions: np.ndarray | None = None) -> tuple[str, np.ndarray]:
        """The dtype of a tensor, and the bytes of its elements or of some: uint8, one row each."""

    def names(self) -> Iterator[str]:
        """The names of all parameters."""
