"""What a framework does for elements of a model that train, and for the files they are kept in."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

Tensor = Any


class Part:
    """The elements of one place: each framework has a subclass of its own."""

    tensor: Tensor
    """The parameter they are in."""
    positions: np.ndarray
    """Where they are in it, flat."""
    leaf: Tensor
    """Their values, in one row: what an optimizer moves."""
    originals: Tensor
    """What they were, in the parameter's dtype."""
    mark: Any
    """Where their change is noted, with `bits` of the originals: to be told if these change."""


class Trainer(ABC):
    """One model whose elements train."""

    elsewhere: Mapping[str, str] = {}
    """Words of `Elements` that belong to other frameworks, and what to write here instead."""

    @abstractmethod
    def parameter(self, name: str) -> Tensor:
        """The parameter that bears a name; anything else is an error that says what fits."""

    @abstractmethod
    def named(self, tensor: Tensor) -> str:
        """The name of a parameter, given itself; another tensor is an error."""

    @abstractmethod
    def lone(self) -> str:
        """The name of the only parameter of a model that has one."""

    @abstractmethod
    def training(self, tensor: Tensor) -> Sequence[Part]:
        """Which parts of a parameter train now."""

    @abstractmethod
    def check(self, tensor: Tensor, name: str) -> None:
        """Refuse a parameter whose elements cannot train."""

    @abstractmethod
    def dtype(self, given: Any) -> Any:
        """The framework's dtype for what a user gave."""

    @abstractmethod
    def part(
        self, tensor: Tensor, positions: np.ndarray, dtype: Any, values: Any = None, originals: Any = None
    ) -> Part:
        """Elements at some positions, with their values now or with values and originals from a file."""

    @abstractmethod
    def start(self, parts: Sequence[Part]) -> None:
        """Let parts train: freeze all else, and let the layers know."""

    @abstractmethod
    def stop(self, parts: Sequence[Part]) -> None:
        """Let parts train no longer, with the values that they have; after the last the model is as it was."""

    def settle(self, part: Part) -> None:
        """Let a part's values and its parameter agree, where a write to one of them does not reach the other at once."""
        return

    @abstractmethod
    def write(self, part: Part) -> None:
        """Put a part's values into its parameter."""

    @abstractmethod
    def restore(self, part: Part) -> None:
        """Put a part's originals into its parameter, and into its values."""

    @abstractmethod
    def check_loss(self, loss: Tensor, of: str) -> None:
        """Refuse what is no loss: one number that has a gradient."""

    @abstractmethod
    def gradients(self, loss: Tensor, parts: Sequence[Part], last: bool, tape: Any = None) -> list[Tensor | None]:
        """What parts hear of a loss, None where it does not depend on one; the graph is kept unless it is the last.

        Where the framework records on tapes, by one of them.
        """

    def check_tape(self, tape: Any, losses: int) -> None:
        """Refuse a tape that cannot give the gradients of so many losses, where the framework has tapes."""
        return

    def hear(self, part: Part, gradient: Tensor, elements: np.ndarray) -> None:
        """Add some elements of a gradient to that of a part, where tensors keep their gradients."""
        raise NotImplementedError

    def heard(self, before: Tensor | None, gradient: Tensor, elements: np.ndarray) -> Tensor:
        """Some elements of a gradient added to what was heard before, where they do not."""
        raise NotImplementedError

    @abstractmethod
    def bits(self, tensor: Tensor, positions: np.ndarray | None = None) -> tuple[str, np.ndarray]:
        """The dtype of a tensor, and the bytes of its elements or of some: uint8, one row each."""

    @abstractmethod
    def names(self) -> Iterator[str]:
        """The names of all parameters."""
