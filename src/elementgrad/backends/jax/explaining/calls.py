"""One call of a function of JAX's as one step, though it runs as several operations."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from elementgrad.backends.jax.explaining.steps import Taken, smooth

Array = Any


def merged(steps: Sequence[Taken], target: int) -> list[Taken]:
    """The steps, with those that follow each other in one call made one.

    So what such a function does inside of itself is its own business: a softmax subtracts its largest element, cut off
    from derivatives, and is differentiable all the same.
    """
    runs = [list(run) for _, run in groupby(steps, key=_call)]
    last = {value: number for number, run in enumerate(runs) for step in run for value in step.takes}
    last[target] = len(runs)
    return [run[0] if len(run) == 1 else _one(run, number, last) for number, run in enumerate(runs)]


def _call(step: Taken) -> Any:
    return step.group if step.group is not None else id(step)


def _one(run: Sequence[Taken], number: int, last: Mapping[int, int]) -> Taken:
    made = {value for step in run for value in step.gives}
    taken = {v: x for step in run for v, x in zip(step.takes, step.operands, strict=True) if v not in made}
    given = {v: x for step in run for v, x in zip(step.gives, step.results, strict=True) if last.get(v, -1) > number}
    takes, gives = list(taken), list(given)

    def function(*operands: Array) -> list[Array]:
        values = dict(zip(takes, operands, strict=True))
        for step in run:
            values.update(zip(step.gives, step.function(*[values[v] for v in step.takes]), strict=True))
        return [values[v] for v in gives]

    first = run[0]
    whole = Taken("call", {}, function, list(taken.values()), takes, first.where, first.word, path=first.path)
    whole.inner = frozenset(name for step in run for name in step.inner)
    whole.unsafe = any(step.unsafe for step in run)
    whole.results, whole.gives = list(given.values()), gives
    whole.passing = [x for step in run for x in step.results if not smooth(x)]
    whole.arrays = _written(run)
    whole.quiet = all(step.quiet for step in run)
    whole.note = next(_notes(run), "")
    return whole


def _written(run: Sequence[Taken]) -> frozenset[int]:
    """The values that lead to the array that one of the steps writes into."""
    found: set[int] = set()
    for step in reversed(run):
        found |= step.arrays
        if not found.isdisjoint(step.gives) and not step.arrays:
            found.update(step.takes)
    return frozenset(found)


def _notes(run: Sequence[Taken]) -> Iterator[str]:
    return (step.note for step in run if step.note)
