"""Compare derivative rules that users wrote with differences of what they are the rules of.

Only such a rule can give a gradient that is neither missing nor zero, and wrong. Each is looked at by itself, at the
numbers of the recorded run: one element of a result is differentiated by the rule, the element of an operand on which
it depends the most is moved, and the operation runs again. A rule for a function that goes in steps is left alone:
there it stands in for a derivative that is zero, on purpose.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from elementgrad._explain.differences import EPSILON, LineFunctions, judge_gradients
from elementgrad._explain.probe import MISMATCH
from elementgrad._explain.trace import Numbers, Op

Tensor = Any
CALLS = 2
"""So many calls of one function at one line are looked at,"""
ELEMENTS = 3
"""and so many elements of each of their results."""


def is_custom(op: Op, connected: Collection[int]) -> bool:
    """Return True for an operation with a derivative of the user's own, through which gradients go."""
    return op.custom_gradient and any(value in connected for value in op.outputs)


@dataclass(frozen=True)
class WrongRule:
    """An operation whose own derivative is not the slope of its values."""

    index: int
    """The position of the operation."""
    operands: frozenset[int]
    """The operands by which the derivative is wrong."""
    evidence: str


def find_wrong_rules(
    ops: Sequence[Op], connected: Collection[int], numbers: Numbers, names: Collection[str]
) -> list[WrongRule]:
    """Find the wrong ones among the derivatives of operations of these names."""
    custom = [(n, op) for n, op in enumerate(ops) if op.operation in names and is_custom(op, connected)]
    found: dict[Any, dict[int, str]] = {}
    calls: Counter[Any] = Counter()
    for index, op in custom:
        key = op.operation, op.where
        calls[key] += 1
        if calls[key] <= CALLS:
            with suppress(Exception):  # it cannot run again, or not at other numbers
                found.setdefault(key, {}).update(_compare(ops[: index + 1], connected, numbers))
    # A rule that is wrong in one call is wrong in all.
    pairs = [(index, found.get((op.operation, op.where))) for index, op in custom]
    return [WrongRule(index, frozenset(wrong), next(iter(wrong.values()))) for index, wrong in pairs if wrong]


def _compare(ops: Sequence[Op], connected: Collection[int], numbers: Numbers) -> dict[int, str]:
    """Return the operands of the last operation for which its rule is wrong, with the evidence."""
    op = ops[-1]
    pairs = zip(op.inputs, op.operands, strict=True)
    wanted = [value in connected and numbers.is_differentiable(x) for value, x in pairs]
    again = op.rerun(op.operands)
    if any(not np.array_equal(numbers.array(x), numbers.array(y)) for x, y in zip(again, op.results, strict=True)):
        return {}  # it returns other numbers each time
    wrong: dict[int, str] = {}
    for result, y in enumerate(op.results):
        for position in _positions(numbers.array(y)) if numbers.is_differentiable(y) else ():
            seeds: list[Tensor | None] = [None] * len(op.results)
            seeds[result] = numbers.at(y, np.array([position]), np.ones(1))
            for operand, row in enumerate(op.vjp(seeds, wanted)):
                if row is None or not wanted[operand] or operand in wrong:
                    continue
                slopes = numbers.array(row).astype(np.float64).reshape(-1)
                flat = int(np.argmax(np.abs(slopes)))
                slope = _Line(ops, numbers, operand, flat, result, position).other_slope(float(slopes[flat]))
                if slope is not None:
                    wrong[operand] = f"its rule gives {slopes[flat]:.4g} for an element whose slope is {slope:.4g}"
    return wrong


def _positions(y: np.ndarray) -> Iterator[int]:
    """Yield some elements of a result: the largest one, and others."""
    size = y.size
    yield from dict.fromkeys([int(np.argmax(np.abs(y)))] if size else [])
    yield from {size * n // ELEMENTS + size // (2 * ELEMENTS) for n in range(ELEMENTS - 1) if size > ELEMENTS}


class _Line:
    """One element of a result of the last operation, as a function of one element of an operand."""

    def __init__(self, ops: Sequence[Op], numbers: Numbers, operand: int, flat: int, result: int, position: int):
        self._ops, self._numbers = _inner_ops(ops), numbers
        self._op = ops[-1]
        self._operand, self._flat = operand, flat
        self._result, self._position = result, position

    def other_slope(self, gradient: float) -> float | None:
        """Return the slope of the values, if it is clearly another than the gradient by the rule.

        A rule of zeros stops gradients as a detach does: that is found where nothing else arrives.
        """
        numbers, x, y = self._numbers, self._op.operands[self._operand], self._op.results[self._result]
        arrays = [numbers.array(x), numbers.array(y)]
        names = [
            "bfloat16" if numbers.dtype(t) == "bfloat16" else a.dtype.name for t, a in zip((x, y), arrays, strict=True)
        ]
        here, value = float(arrays[0].reshape(-1)[self._flat]), float(arrays[1].reshape(-1)[self._position])
        dtype = max(names, key=EPSILON.__getitem__)
        line = LineFunctions(self._at, np.array([value]), here, dtype, max(abs(gradient), abs(value), 1e-30))
        (verdict,) = judge_gradients(line, [gradient], [abs(gradient)])
        far = abs(verdict.difference - gradient) > MISMATCH * max(abs(verdict.difference), abs(gradient))
        return verdict.difference if verdict.agrees is False and far and verdict.difference and gradient else None

    def _at(self, by: float) -> np.ndarray:
        numbers = self._numbers
        old = self._op.operands[self._operand]
        x = numbers.array(old).astype(np.float64)
        x.reshape(-1)[self._flat] += by
        values: dict[int, Tensor] = {self._op.inputs[self._operand]: numbers.like(x, old)}
        for op in self._ops:
            if not values.keys().isdisjoint(op.inputs):
                operands = [values.get(value, old) for value, old in zip(op.inputs, op.operands, strict=True)]
                values.update(zip(op.outputs, op.rerun(operands), strict=True))
        moved = values[self._op.outputs[self._result]]
        return numbers.array(moved).astype(np.float64).reshape(-1)[[self._position]]


def _inner_ops(ops: Sequence[Op]) -> list[Op]:
    """Return the last operation, after those that compute its results where they were recorded by themselves."""
    op = ops[-1]
    inside = {value for value, x in zip(op.inputs, op.operands, strict=True) if any(x is y for y in op.results)}
    arguments = set(op.inputs) - inside
    inner = [op]
    for other in reversed(ops[:-1] if inside else ()):
        if not inside.isdisjoint(other.outputs):
            inner.append(other)
            inside |= set(other.inputs) - arguments
    return inner[::-1]
