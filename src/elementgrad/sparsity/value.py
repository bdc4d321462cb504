"""What is known of a value in a derivative program that is followed."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from elementgrad.sparsity.reach import Ids

Value = Any
"""A known array, `UNKNOWN`, or what is `Reached`."""


class _Unknown:
    def __repr__(self) -> str:
        return "unknown"


UNKNOWN = _Unknown()
"""A value that depends on the point of the derivative, and not on the seed."""


@dataclass(frozen=True, eq=False)
class Reached:
    """A value that may depend on the seed: for each of its elements the number of a set of seed elements."""

    ids: Ids


def reached(values: Iterable[Value]) -> list[Ids]:
    """The sets of those of some values that may depend on the seed."""
    return [value.ids for value in values if isinstance(value, Reached)]
