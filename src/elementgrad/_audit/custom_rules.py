"""Compare derivative rules that users wrote with differences of what they are the rules of.

Only such a rule can give a gradient that is neither missing nor zero, and wrong. Each is looked at by itself, at the
numbers of the recorded run: one element of a result is differentiated by the rule, the element of an operand on which
it depends the most is moved, and the operation runs again.

Some rules differ on purpose. A function that returns its operand as it is, whatever the numbers are, exists for its
rule alone, as one that reverses, scales or clips gradients does. And where a function stands still, a rule that does
not is a surrogate, as the straight-through ones of quantisers are; where it moves, the rule has to be its slope. Only
a function that jumps has none that is worth following, even where it moves between the jumps, as binary weights do
with the mean size by which they are scaled, and a quantiser with its scale.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from elementgrad._explain.differences import EPSILON, LineFunctions, judge_gradients
from elementgrad._explain.probe import MISMATCH
from elementgrad._explain.trace import Numbers, Op

Tensor = Any
CALLS = 2
"""The calls that are compared of one function at one line."""
ELEMENTS = 3
"""The elements that are compared of each result of a call."""
GRID = 16
"""The intervals in which jumps of a function are looked for, if its rule differs where its values move."""
WIDEST = 4
"""The intervals that are searched: those in which the values move the most."""
HALVINGS = 60
"""The halvings of an interval, unless its values turn out to move evenly."""
FIRST_HALVINGS = 8
"""The halvings after which they do, if the part that is left moves no more than twice its share of the interval."""
VISIBLE = 16.0
"""The units of rounding from which a change counts."""


def is_custom(op: Op, connected: Collection[int]) -> bool:
    """Return True for an operation with a derivative of the user's own, through which gradients go."""
    return op.custom_gradient and any(value in connected for value in op.outputs)


@dataclass(frozen=True)
class DifferingRule:
    """An operation whose own derivative is not the slope of its values."""

    index: int
    """The position of the operation."""
    operands: frozenset[int]
    """The operands by which the derivative differs."""
    evidence: str
    purpose: str | None = None
    """The sign that it differs on purpose, in words; None if there is none, so that it is wrong."""


@dataclass
class _Comparison:
    """The operands by which a rule differs, with the evidence, and the signs that it does so on purpose."""

    moving: dict[int, str] = field(default_factory=dict)
    """Operands by which it differs where the values move,"""
    standing: dict[int, str] = field(default_factory=dict)
    """and where they stand still."""
    changed: set[int] = field(default_factory=set)
    """Operands by which it differs, and which are no result as they are."""
    jumping: set[int] = field(default_factory=set)
    """Operands by which it differs, and by which the values jump somewhere."""

    def add(self, other: "_Comparison") -> None:
        self.moving = other.moving | self.moving
        self.standing = other.standing | self.standing
        self.changed |= other.changed
        self.jumping |= other.jumping

    @property
    def differing(self) -> dict[int, str]:
        return self.standing | self.moving

    @property
    def purpose(self) -> str | None:
        if not self.changed:
            return "returns its operand as it is, and so exists for its rule alone"
        if not self.changed & self.moving.keys() - self.jumping:
            return "stands still or goes in steps where the rule is not zero"
        return None


def find_differing_rules(
    ops: Sequence[Op], connected: Collection[int], numbers: Numbers, names: Collection[str]
) -> list[DifferingRule]:
    """Find the derivatives that are not the slopes of the values, among operations of these names."""
    custom = [(n, op) for n, op in enumerate(ops) if op.operation in names and is_custom(op, connected)]
    compared: dict[Any, _Comparison] = {}
    calls: Counter[Any] = Counter()
    for index, op in custom:
        key = op.operation, op.where
        calls[key] += 1
        if calls[key] <= CALLS:
            with suppress(Exception):  # it cannot run again, or not at other numbers
                compared.setdefault(key, _Comparison()).add(_compare(ops[: index + 1], connected, numbers))
    # A rule that is wrong in one call is wrong in all.
    pairs = [(index, compared.get((op.operation, op.where))) for index, op in custom]
    return [
        DifferingRule(index, frozenset(each.differing), next(iter(each.differing.values())), each.purpose)
        for index, each in pairs
        if each is not None and each.differing
    ]


def _compare(ops: Sequence[Op], connected: Collection[int], numbers: Numbers) -> _Comparison:
    """Compare the rule of the last operation with differences, by each operand that a gradient goes to."""
    op = ops[-1]
    again = op.rerun(op.operands)
    compared = _Comparison()
    if any(not np.array_equal(numbers.array(x), numbers.array(y)) for x, y in zip(again, op.results, strict=True)):
        return compared  # it returns other numbers each time
    for line in _lines(ops, connected, numbers):
        slope = line.other_slope()
        if slope is not None:
            evidence = f"its rule gives {line.gradient:.4g} for an element whose slope is {slope:.4g}"
            moves = slope and not line.is_still()
            (compared.moving if moves else compared.standing).setdefault(line.operand, evidence)
            if moves and line.operand not in compared.jumping and line.has_jump():
                compared.jumping.add(line.operand)
    compared.changed = {operand for operand in compared.differing if not _is_returned(ops, operand, numbers)}
    return compared


def _lines(ops: Sequence[Op], connected: Collection[int], numbers: Numbers) -> Iterator["_Line"]:
    """Yield lines through some elements of the results, each by the element of each operand with the most effect."""
    op = ops[-1]
    pairs = zip(op.inputs, op.operands, strict=True)
    wanted = [value in connected and numbers.is_differentiable(x) for value, x in pairs]
    inner = _inner_ops(ops)
    for result, y in enumerate(op.results):
        for position in _positions(numbers.array(y), ELEMENTS) if numbers.is_differentiable(y) else ():
            seeds: list[Tensor | None] = [None] * len(op.results)
            seeds[result] = numbers.at(y, np.array([position]), np.ones(1))
            for operand, row in enumerate(op.vjp(seeds, wanted)):
                if row is None or not wanted[operand]:
                    continue
                slopes = numbers.array(row).astype(np.float64).reshape(-1)
                if slopes.any():
                    flat = int(np.argmax(np.abs(slopes)))
                    yield _Line(inner, numbers, operand, flat, result, position, float(slopes[flat]))


def _is_returned(ops: Sequence[Op], operand: int, numbers: Numbers) -> bool:
    """Return True if a result of the last operation is an operand, in whichever shape, also at quite other numbers."""
    op = ops[-1]
    x = op.operands[operand]
    array = numbers.array(x).astype(np.float64)
    limit = np.finfo(numbers.array(x).dtype).maxexp // 2
    sizes = np.exp2(np.linspace(limit, -limit, array.size)).reshape(array.shape)
    candidates = set(op.outputs)
    for other in (array, -array, sizes, -sizes):
        moved = numbers.like(other, x)
        values = _rerun(_inner_ops(ops), {op.inputs[operand]: moved})
        flat = numbers.array(moved).reshape(-1)
        candidates = {each for each in candidates if np.array_equal(numbers.array(values[each]).reshape(-1), flat)}
    return bool(candidates)


def _positions(y: np.ndarray, count: int) -> Iterator[int]:
    """Yield some elements of a result: the largest one, and others."""
    size = y.size
    yield from dict.fromkeys([int(np.argmax(np.abs(y)))] if size else [])
    yield from {size * n // count + size // (2 * count) for n in range(count - 1) if size > count}


class _Line:
    """One element of a result of the last operation, as a function of one element of an operand."""

    def __init__(
        self,
        ops: Sequence[Op],
        numbers: Numbers,
        operand: int,
        flat: int,
        result: int,
        position: int,
        gradient: float,
    ):
        self.operand, self.gradient = operand, gradient
        self._ops, self._numbers, self._op = ops, numbers, ops[-1]
        self._flat, self._result, self._position = flat, result, position
        x, y = self._op.operands[operand], self._op.results[result]
        arrays = [numbers.array(x), numbers.array(y)]
        names = [
            "bfloat16" if numbers.dtype(t) == "bfloat16" else a.dtype.name for t, a in zip((x, y), arrays, strict=True)
        ]
        self._here, self._value = float(arrays[0].reshape(-1)[flat]), float(arrays[1].reshape(-1)[position])
        self._dtype = max(names, key=EPSILON.__getitem__)
        self._size = float(np.max(np.abs(arrays[0]), initial=0.0, where=np.isfinite(arrays[0]))) or 1.0

    def other_slope(self) -> float | None:
        """Return the slope of the values, if it is clearly another than the gradient by the rule.

        A rule of zeros stops gradients as a detach does: that is found where nothing else arrives.
        """
        gradient, unit = self.gradient, max(abs(self.gradient), abs(self._value), 1e-30)
        line = LineFunctions(self._at, np.array([self._value]), self._here, self._dtype, unit)
        (verdict,) = judge_gradients(line, [gradient], [abs(gradient)])
        far = abs(verdict.difference - gradient) > MISMATCH * max(abs(verdict.difference), abs(gradient))
        return verdict.difference if verdict.agrees is False and far else None

    def is_still(self) -> bool:
        """Return True if moves that by the rule change the value far beyond rounding do not change it at all."""
        epsilon = EPSILON[self._dtype]
        by = epsilon**0.5 * max(1.0, abs(self._here))
        visible = abs(self.gradient) * by > VISIBLE * epsilon * abs(self._value)
        return visible and all(self._at(sign * by)[0] == self._value for sign in (-1.0, 1.0))

    def has_jump(self) -> bool:
        """Return True if the value jumps where the element moves among numbers as large as those of its operand.

        An interval is halved, and the half in which the value moves more is kept. What is continuous moves less and
        less, a jump stays as large as it is, and a pole grows.
        """
        ends = np.linspace(-2 * self._size, 2 * self._size, GRID + 1)
        values = np.array([self._at(end - self._here)[0] for end in ends])
        moves = np.abs(np.diff(values))
        visible = VISIBLE * EPSILON[self._dtype] * np.max(np.abs(values), initial=0.0, where=np.isfinite(values))
        widest = [n for n in np.argsort(-moves) if visible < moves[n] < np.inf][:WIDEST]
        return any(self._jumps_within(ends[n : n + 2].copy(), values[n : n + 2].copy(), visible) for n in widest)

    def _jumps_within(self, ends: np.ndarray, values: np.ndarray, visible: float) -> bool:
        moves = [abs(values[1] - values[0])]
        for count in range(1, HALVINGS + 1):
            middle = (ends[0] + ends[1]) / 2
            value = self._at(middle - self._here)[0]
            side = int(abs(value - values[0]) > abs(values[1] - value))
            ends[side], values[side] = middle, value
            moves.append(abs(values[1] - values[0]))
            even = count == FIRST_HALVINGS and moves[-1] <= 2 * moves[0] / 2**count
            if even or not visible < moves[-1] < np.inf:
                return False
        return bool(0.5 < moves[-1] / moves[HALVINGS // 2] < 2)

    def _at(self, by: float) -> np.ndarray:
        numbers = self._numbers
        old = self._op.operands[self.operand]
        x = numbers.like(numbers.moved(old, self._flat, by), old)
        values = _rerun(self._ops, {self._op.inputs[self.operand]: x})
        moved = values[self._op.outputs[self._result]]
        return numbers.array(moved).astype(np.float64).reshape(-1)[[self._position]]


def is_flat(ops: Sequence[Op], op: Op, masks: Sequence[np.ndarray | None], numbers: Numbers) -> bool:
    """Return True if small moves of these elements of its operands do not change the results of an operation."""
    inner = _inner_ops(ops[: next(n for n, other in enumerate(ops) if other is op) + 1])
    for sign in (-1.0, 1.0):
        moved: dict[int, Tensor] = {}
        for value, x, mask in zip(op.inputs, op.operands, masks, strict=True):
            if mask is not None and numbers.is_differentiable(x):
                array = numbers.array(x)
                by = sign * EPSILON["bfloat16" if numbers.dtype(x) == "bfloat16" else array.dtype.name] ** 0.5
                moves = by * mask * np.maximum(1.0, np.abs(array))
                moved[value] = numbers.like(array.astype(np.float64) + moves, x)
        values = _rerun(inner, moved)
        for value, y in zip(op.outputs, op.results, strict=True):
            if value in values and not np.array_equal(numbers.array(values[value]), numbers.array(y)):
                return False
    return True


def _rerun(ops: Sequence[Op], values: dict[int, Tensor]) -> dict[int, Tensor]:
    """Run operations again with other values, and return these with all that follow from them."""
    for op in ops:
        if not values.keys().isdisjoint(op.inputs):
            operands = [values.get(value, old) for value, old in zip(op.inputs, op.operands, strict=True)]
            values = values | dict(zip(op.outputs, op.rerun(operands), strict=True))
    return values


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
