"""What is known of a value in a derivative program that is followed."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from elementgrad._sparsity.index_sets import EMPTY, Ids, IndexSets

ROUNDS = 32
"""After so many turns of a loop in which something new was reached, all is taken to reach all."""

Value = Any
"""A known array, `UNKNOWN`, or what is `Reached`."""


class _Unknown:
    def __repr__(self) -> str:
        return "unknown"


UNKNOWN = _Unknown()
"""A value that depends on the point of the derivative, and not on the seed."""


@dataclass(frozen=True, eq=False)
class DependentValue:
    """A value that may depend on the seed: for each of its elements the number of a set of seed elements."""

    ids: Ids

    def __post_init__(self) -> None:
        object.__setattr__(self, "ids", np.asarray(self.ids))  # NumPy makes a number of an element, and not an array


def reached(values: Iterable[Value]) -> list[Ids]:
    """The sets of those of some values that may depend on the seed."""
    return [value.ids for value in values if isinstance(value, DependentValue)]


def joined(reach: IndexSets, *values: Value) -> Value:
    """What may be any of several values of one shape."""
    sets = reached(values)
    return DependentValue(reach.union(*sets)) if sets else UNKNOWN


def settled(reach: IndexSets, carried: Sequence[Value], turn: Callable[[list[Value]], Sequence[Value]]) -> list[Value]:
    """What a loop carries after any number of turns."""
    state = [joined(reach, value) for value in carried]
    for number in range(2 * ROUNDS + len(state)):
        more = [joined(reach, a, b) for a, b in zip(state, turn(state), strict=True)]
        if number >= ROUNDS:  # all is one set from here on, which grows only when another value is reached
            one = reach.all_of(*reached(more))
            more = [
                DependentValue(np.full_like(value.ids, one)) if isinstance(value, DependentValue) else UNKNOWN
                for value in more
            ]
        if all(_as_large(reach, a, b) for a, b in zip(state, more, strict=True)):
            return state
        state = more
    raise AssertionError("a loop in which no end of what is reached was found")


def _as_large(reach: IndexSets, a: Value, b: Value) -> bool:
    """Whether a value that holds another holds no more."""
    if isinstance(a, DependentValue):
        return bool((reach.sizes(a.ids) == reach.sizes(b.ids)).all())
    return not isinstance(b, DependentValue) or bool((b.ids == EMPTY).all())
