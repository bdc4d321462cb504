"""A tensor that has a name, before anybody has run the function that it belongs to."""

from dataclasses import dataclass
from typing import Any

from elementgrad import tree
from elementgrad.tap import Wanted

Tensor = Any


@dataclass(frozen=True, eq=False)
class Source(tree.Leaf):
    """A tensor that has a name: an input by its number, what a model holds by its name, or what a run will meet."""

    name: str
    kind: str | None
    tensor: Tensor = None
    """None for what is met."""
    number: int | None = None
    whole: bool = False
    """Whether a layer is known to bear all of the name."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Source) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> tuple[Any, ...]:
        """One tensor that a model holds under two names is one."""
        return ("held", id(self.tensor)) if self.held else (self.name, self.kind, self.number)

    @property
    def wanted(self) -> Wanted:
        """Its name, for a run to meet it."""
        return Wanted(self.name, self.kind, self.whole)

    @property
    def met(self) -> bool:
        """Whether its tensor is there only once the function has run."""
        return self.tensor is None

    @property
    def held(self) -> bool:
        """Whether the function holds it itself, as a model does its parameters."""
        return self.tensor is not None and self.number is None

    @property
    def outside(self) -> bool:
        """Whether it is an argument or an output, so that nobody must look inside the function."""
        return self.number is not None or (self.kind == "output" and self.tensor is None)


ONLY_OUTPUT = Source("", "output")
"""The only floating output, whatever it is called."""
