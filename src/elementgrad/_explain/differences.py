"""The same function in another precision and at other numbers, to hold a gradient against.

How far a number is moved for differences: the usual widths, and wider and narrower ones where those do not do.

Whether a gradient is the slope of values along a line: differences of several widths tell, or do not.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from elementgrad._backends.autodiff import Linearization
from elementgrad._backends.base import Backend
from elementgrad._explain.trace import uneven_weights
from elementgrad._names.call import BoundCall, PartialCall, TensorRef
from elementgrad.errors import TracedError

Tensor = Any
SIZES = {"float64": 1e-5, "float32": 4e-3, "float16": 3e-2, "bfloat16": 6e-2}
"""How far an element is moved for a difference: about the third root of the precision."""
EPSILON = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
ROUNDING = 64.0
"""So many units of rounding may be of no meaning."""
LARGEST = {"float64": 1.79e308, "float32": 3.4e38, "float16": 65504.0, "bfloat16": 3.38e38}
"""About the largest numbers that there are."""
SLACK = {"float64": 1e-6, "float32": 1e-3, "float16": 1e-1, "bfloat16": 2e-1}
"""By how much of its size a difference may be off beyond its own bound."""
REAL = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}
"""The precision of a complex number."""
COMPLEX = {real: name for name, real in REAL.items()}
PAYS = 1.0
"""Compiling pays if the runs ahead take so many seconds."""


def precision_of(backend: Backend, x: Tensor) -> str:
    """The floating dtype in which a tensor's numbers are kept."""
    name = backend.dtype(x)
    return REAL.get(name, name)


def parts(backend: Backend, x: Tensor) -> np.ndarray:
    """The values as float64 in one row, of a complex number its real and imaginary part in turn."""
    values = backend.read(backend.convert(x, "complex128")) if backend.kind(x) == "c" else backend.to_float64(x)
    if values is None:
        raise TracedError(
            "numbers of what is checked cannot be read, since they are sparse or being traced; give dense tensors, and "
            "check outside of jit, vmap and tf.function"
        )
    if values.dtype.kind == "c":
        values = np.ascontiguousarray(values, np.complex128).view(np.float64)
    return values.reshape(-1)


def positions_in_parts(backend: Backend, x: Tensor, positions: np.ndarray) -> np.ndarray:
    """Where elements at some flat positions are in `parts`."""
    return (2 * positions[:, None] + [0, 1]).reshape(-1) if backend.kind(x) == "c" else positions


class SampledCall:
    """A call as a function of one of its tensors, with every floating one in a precision of choice."""

    def __init__(self, call: BoundCall, source: TensorRef, target: TensorRef, dtype: str | None = None):
        self.backend: Backend = call.backend
        self._source = source
        others = [] if dtype is None else _floats(call, source)
        self._run = PartialCall(call, [source, *others], [target])
        self.tensors = [_in(self.backend, each.tensor, dtype) for each in (source, *others)]
        self.dtype = dtype
        self._sample: Callable[[Tensor], Tensor] = self._once

    def __call__(self, x: Tensor) -> Tensor:
        """The target, for a source that is given; for one that the run meets, what is added to it."""
        with self.backend.precision(self.dtype):
            return self._sample(x)

    def _once(self, x: Tensor) -> Tensor:
        (value,) = self.backend.load("explain").run_at(self._run, [x, *self.tensors[1:]])
        return value

    def steady(self, base: Tensor, ahead: int, known: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """The target's parts, and which of them are the same when the function runs again, but for rounding.

        Those of a first run may be known. Where many runs are ahead that take their time, the function is compiled if
        that gives the same numbers.
        """
        before = parts(self.backend, self(base)) if known is None else known
        start = time.perf_counter()
        steady = self.same(before, base)
        if steady.all() and (time.perf_counter() - start) * ahead > PAYS:
            self._sample = self.backend.load("explain").maybe_compile(self._once)
            try:
                swift = bool(self.same(before, base).all())
            except Exception:  # it is the user's function, and cannot be traced
                swift = False
            self._sample = self._sample if swift else self._once
        return before, steady

    def same(self, before: np.ndarray, base: Tensor) -> np.ndarray:
        """Which of the target's parts are what they were, but for rounding."""
        value = self(base)
        after = parts(self.backend, value)
        near = 64 * EPSILON.get(precision_of(self.backend, value), 0.0)
        return np.isclose(after, before, rtol=near, atol=0.0, equal_nan=True)

    def linear(self) -> Linearization:
        """The function ready for sweeps."""
        with self.backend.precision(self.dtype):
            run = self._run
            alone = _SingleTensorCall(run.call, run.sources[:1], run.targets, rest=(run.sources[1:], self.tensors[1:]))
            return self.backend.linearize(alone, self.tensors[:1], False, 1)

    def gradient(self, weights: np.ndarray) -> np.ndarray | None:
        """The gradient of a weighted sum of the target's elements; None if there is no path."""
        with self.backend.precision(self.dtype):
            linear = self.linear()
            like = linear.value(0)
            seed = self.backend.cast(weights.reshape(self.backend.shape(like)), like)
            (pulled,) = linear.vjp(0, [0], self.backend.reshape(seed, (1, *self.backend.shape(like))))
            return None if pulled is None else self.backend.to_float64(pulled)

    def read(self, x: Tensor, of: np.ndarray) -> np.ndarray:
        """Some of the target's parts."""
        return parts(self.backend, self(x))[of]

    def beside(self, x: Tensor, of: np.ndarray) -> np.ndarray:
        """Return some of the target's parts at numbers that are not the user's, NaN where the function refuses them."""
        try:
            return self.read(x, of)
        except Exception:  # as a distribution refuses a probability above one
            return np.full(len(of), np.nan)

    def numbers(self) -> np.ndarray:
        """Return the source's parts: those that it was given, or that the run computes."""
        if not self._source.computed:
            return parts(self.backend, self.tensors[0])
        run = PartialCall(self._run.call, self._run.sources, [self._source])
        with self.backend.precision(self.dtype):
            (value,) = self.backend.load("explain").run_at(run, self.tensors)
        return parts(self.backend, value)


def unit(values: np.ndarray, numbers: np.ndarray, gradient: float) -> float:
    """Return about how large the slopes of a function are, by the sizes of its values, numbers and gradient.

    Numbers that are far below one are not taken at their word: what they are added to may not be.
    """
    y, x = (float(np.max(np.abs(each[np.isfinite(each)]), initial=0.0)) for each in (values, numbers))
    slope = min(y / x if x else math.inf, max(1.0, y / max(1.0, x)))
    return max(slope if y else 1.0, gradient if math.isfinite(gradient) else 0.0)


@dataclass(frozen=True)
class _SingleTensorCall(PartialCall):
    """A call as a function of one tensor, in which others have other numbers and no derivatives: some cannot."""

    rest: tuple[Sequence[TensorRef], Sequence[Tensor]] = ((), ())

    def __call__(self, *tensors: Any) -> list[Tensor]:
        sources, values = self.rest
        return self.call.run([*self.sources, *sources], [*tensors, *values], self.targets, self.cuts)


def _floats(call: BoundCall, source: TensorRef) -> list[TensorRef]:
    """The floating inputs, and what the function holds."""
    found = [other for other in call.inputs if other != source and call.backend.kind(other.tensor) in "fc"]
    held = [
        TensorRef(name, kind, tensor)
        for name, kind, tensor in call.model.named_tensors()
        if call.backend.kind(tensor) in "fc"
    ]
    return found + [other for other in held if other != source]


def _in(backend: Backend, x: Tensor | None, dtype: str | None) -> Tensor | None:
    if x is None or dtype is None:
        return x
    return backend.convert(x, COMPLEX.get(dtype, dtype) if backend.kind(x) == "c" else dtype)


def moved(sampled: SampledCall, x: Tensor, places: Sequence[int], by: float | np.ndarray) -> Tensor:
    """x with some of its parts moved."""
    backend, shape = sampled.backend, sampled.backend.shape(x)
    made_of = np.complex128 if backend.kind(x) == "c" else np.float64
    delta = np.zeros(int(np.prod(shape, dtype=int)), made_of)
    delta.view(np.float64)[list(places)] = by
    with backend.precision(sampled.dtype):
        return x + backend.cast(delta.reshape(shape), x)


def moves(sampled: SampledCall, base: Tensor, of: np.ndarray, wrt: Sequence[int], dtype: str) -> bool | None:
    """Whether the target's elements are others when the source's are moved, by a little or by a lot.

    Several are moved by uneven amounts: many functions are of differences alone. What rounding makes of it counts for
    nothing. None if the function refuses all that it is given.
    """
    before = sampled.read(base, of)
    amounts = uneven_weights(len(wrt))
    found = None
    for by in [sign * size for size in (SIZES[dtype], 1.0, 100.0) for sign in (1.0, -1.0)]:
        try:
            after = sampled.read(moved(sampled, base, wrt, by * amounts), of)
        except Exception:  # it is the user's function, at numbers that are not theirs
            continue
        if not np.allclose(before, after, rtol=ROUNDING * EPSILON[dtype], atol=0.0, equal_nan=True):
            return True
        found = False
    return found


USUAL = (1.0, 0.75, 0.5)
"""Widths that decide mostly, as parts of the usual size."""
WIDE = tuple([eighths * 2.0**-7 for eighths in (8, 7, 6, 5, 4, 3)])
"""Wider than the steps in which a function goes that rounds to any floating dtype on its way."""
NARROWER = 8.0
"""Below the usual widths each is so many times narrower than the one before."""
CLOSE = 16.0
"""A narrow width that is looked at early is so many times the narrowest."""
LEAST = 1e-4
"""The narrowest width of a number that is close to zero is at most so much of it."""


@dataclass(frozen=True)
class Widths:
    """The widths for one number, the widest first; all are powers of two and their eighths, so that moves are exact."""

    scale: float
    usual: list[float]
    wide: list[float]
    narrow: list[float]
    near: float
    """One that is narrow, and looked at early."""
    small: bool
    """Whether the number is smaller than the usual widths, so that those may be too wide to see its slope."""

    @classmethod
    def around(cls, here: float, dtype: str) -> "Widths":
        """Return widths of the size of the number or of one, and below them those that its own size asks for."""
        scale = 2.0 ** math.floor(math.log2(max(1.0, abs(here))))
        size = 2.0 ** math.floor(math.log2(SIZES[dtype])) * scale
        usual = [part * size for part in USUAL]
        narrow = _down_to(EPSILON[dtype] ** 0.65 * scale, usual[-1])
        narrow += [width for width in _own(abs(here), dtype) if 2 * width < narrow[-1]]
        wide = [width * scale for width in WIDE if width * scale > usual[0]]
        return cls(scale, usual, wide, narrow, CLOSE * narrow[-1], 0 < abs(here) < usual[-1])


def _down_to(lowest: float, width: float) -> list[float]:
    """Return widths below one of them, until one is below the lowest."""
    found = [width / NARROWER]
    while found[-1] > lowest:
        found.append(found[-1] / NARROWER)
    return found


def _own(size: float, dtype: str) -> list[float]:
    """Return widths by which a number of this size moves, and keeps its sign."""
    least = max(LEAST, 4 * EPSILON[dtype]) * size
    if not least:
        return []
    widths = _down_to(least, 2.0 ** math.floor(math.log2(size)))
    return [width for width in widths if width and size + width != size]


SETTLED = 0.1
"""The error of a difference that decides is at most so much of what is compared."""
ALIKE = 1e-3
"""Slopes that differ by no more of their size are the same."""
NOISE = 64.0
"""So many units of rounding of the function's slopes may be left of a gradient that is zero."""
FINE = 0.75
"""Steps are looked for within this power of the precision, which is some units of rounding."""
BLURRED = 256.0
"""A gradient that is off by so many units of rounding of what it is a sum of is not known to be wrong."""
STEPS = "the values go in steps there, by which no slope is told"
NOT_FINITE = "the number is not finite, and cannot be moved"
NO_VALUES = "the function has no finite values near by"
ROUNDED = "the two differ by no more than rounding of larger numbers makes of a gradient"
STEEPER = "the slope grows as differences get narrower, without an end"
UNSETTLED = "differences of neighbouring widths do not agree"
TWO_SLOPES = "narrow differences agree with the gradient and wide ones with another slope"
UNSTEADY = "the function gives other numbers each time"


@dataclass(frozen=True)
class DifferenceVerdict:
    """What differences say of one gradient."""

    agrees: bool | None
    """None if they do not decide."""
    difference: float
    bound: float
    why: str = ""
    """Why nothing is decided."""


@dataclass(frozen=True)
class DifferenceTable:
    """Differences of some functions of one number, by width (the widest first) and function."""

    widths: np.ndarray
    central: np.ndarray
    """One-sided where the function has values on one side only, NaN where on none."""
    left: np.ndarray
    right: np.ndarray
    rounding: np.ndarray
    """What rounding of the values alone makes of them."""
    still: np.ndarray
    """Whether the value did not move at all."""

    @classmethod
    def of(cls, line: "LineFunctions", widths: Sequence[float]) -> "DifferenceTable":
        """Evaluate both sides at every width."""
        middle, epsilon = line.middle, EPSILON[line.dtype]
        up, down = (np.stack([line.at(sign * width) for width in widths]) for sign in (1.0, -1.0))
        h = np.array(widths)[:, None]
        with np.errstate(all="ignore"):
            right, left = (up - middle) / h, (middle - down) / h
            sides = [np.where(np.isfinite(side), side, np.nan) for side in (right / 2 + left / 2, right, left)]
            largest = np.fmax(np.fmax(np.abs(up), np.abs(down)), np.abs(middle))
            rounding = 2 * epsilon * largest / h
        central = np.where(np.isnan(sides[0]), np.where(np.isnan(sides[1]), sides[2], sides[1]), sides[0])
        still = (up == middle) & (down == middle)
        # Values that stand still say nothing of what the function is rounded to inside, and at zero not even how much.
        rounding = np.where(still, np.fmax(rounding, NOISE * epsilon * line.unit), rounding)
        return cls(h[:, 0], central, sides[2], sides[1], rounding, still)

    def joined(self, *others: "DifferenceTable") -> "DifferenceTable":
        """These and others, the widest first."""
        order = np.argsort(-np.concatenate([each.widths for each in (self, *others)]), kind="stable")
        names = ("widths", "central", "left", "right", "rounding", "still")
        return DifferenceTable(*[np.concatenate([getattr(e, name) for e in (self, *others)])[order] for name in names])

    def part(self, some: slice) -> "DifferenceTable":
        """Those of some widths."""
        names = ("widths", "central", "left", "right", "rounding", "still")
        return DifferenceTable(*[getattr(self, name)[some] for name in names])

    def column(self, number: int) -> "DifferenceTable":
        """Those of one function."""
        parts = (self.central, self.left, self.right, self.rounding, self.still)
        return DifferenceTable(self.widths, *[part[:, number] for part in parts])


@dataclass(frozen=True)
class LineFunctions:
    """Some functions of one number, around a point."""

    at: Callable[[float], np.ndarray]
    """The values where the number is moved by so much."""
    middle: np.ndarray
    here: float
    """The number itself."""
    dtype: str
    unit: float = 1.0
    """About how large slopes are, beside which gradients are rounded."""


def verdicts(line: LineFunctions, gradients: Sequence[float], largest: Sequence[float]) -> list[DifferenceVerdict]:
    """Hold gradients of several functions of one number against differences.

    `largest` are the largest sizes of the same functions' gradients by other numbers, beside which those are rounded.

    The usual widths mostly do. Where one of them does not agree, wider and narrower ones tell whether it is the
    gradient, or the width, or steps in the values. A gradient differs only if it does at narrow widths too.
    """
    if not math.isfinite(line.here):
        return [DifferenceVerdict(None, math.nan, math.inf, NOT_FINITE) for _ in gradients]
    widths, numbers = Widths.around(line.here, line.dtype), range(len(gradients))
    slopes = DifferenceTable.of(line, widths.usual[:-1])
    found = [_clearly_off(slopes.column(n), gradients[n]) for n in numbers]
    if any(found):
        near = _near(line, widths.near)
        found = [
            verdict if verdict and _keeps(verdict, gradients[n], near[:, n]) else None
            for n, verdict in enumerate(found)
        ]
    sizes = np.abs(line.middle) / widths.scale
    if not all(found):
        slopes = slopes.joined(DifferenceTable.of(line, widths.usual[-1:]))
        found = [found[n] or _plainly(slopes.column(n), gradients[n], widths.small, line.dtype) for n in numbers]
    if not all(found):
        slopes = slopes.joined(*[DifferenceTable.of(line, more) for more in (widths.wide, widths.narrow) if more])
        careful = partial(_carefully, narrow=len(widths.narrow), dtype=line.dtype)
        last = [careful(slopes.column(n), gradients[n], largest[n], sizes[n]) for n in numbers]
        found = [before or after for before, after in zip(found, last, strict=True)]
    blurred = [BLURRED * EPSILON[line.dtype] * max(largest[n], sizes[n]) for n in numbers]
    sure = [
        _unless_rounded(verdict, *each) for verdict, *each in zip(found, gradients, blurred, strict=True) if verdict
    ]
    return _without_steps(line, sure, gradients)


def _unless_rounded(verdict: DifferenceVerdict, gradient: float, blurred: float) -> DifferenceVerdict:
    off = abs(gradient - verdict.difference)
    return replace(verdict, agrees=None, why=ROUNDED) if verdict.agrees is False and off <= blurred else verdict


def _without_steps(
    line: LineFunctions, found: list[DifferenceVerdict], gradients: Sequence[float]
) -> list[DifferenceVerdict]:
    """Take back that a gradient of zero differs where the values stand still within a hair, as those of a staircase."""
    ask = {}
    for n, verdict in enumerate(found):
        if verdict.agrees is False and gradients[n] == 0 and verdict.difference:
            hair = max(abs(float(line.middle[n] / verdict.difference)), abs(line.here))
            hair *= EPSILON[line.dtype] ** FINE
            if 0 < hair < math.inf:
                ask[n] = 2.0 ** math.floor(math.log2(hair))
    for width in set(ask.values()):
        still = (line.at(width) == line.middle) | (line.at(-width) == line.middle)
        for n in [n for n, asked in ask.items() if asked == width and still[n]]:
            found[n] = replace(found[n], agrees=None, why=STEPS)
    return found


def _plainly(slopes: DifferenceTable, gradient: float, small: bool, dtype: str) -> DifferenceVerdict | None:
    """Agreement, if the usual widths say so, and are exact beside the slopes to both sides, which may cancel.

    The slopes of a number that is far smaller than they are wide say nothing about its own.
    """
    at = len(slopes.widths) - 1
    if gradient == 0 and slopes.still.all():
        return DifferenceVerdict(True, 0.0, float(slopes.rounding[at]))
    bound = float(np.ptp(slopes.central) + slopes.rounding[at])
    sides = 0.0 if small else SETTLED * float(np.fmax(np.abs(slopes.left[at]), np.abs(slopes.right[at])))
    kinks = not small
    if _decides(bound, slopes.central[at], gradient, sides) and _within(slopes, at, bound, gradient, dtype, kinks):
        return DifferenceVerdict(True, float(slopes.central[at]), bound)
    return None


def _near(line: LineFunctions, width: float) -> np.ndarray:
    """The slopes to one side at a narrow width, and what rounding of the values may make of them."""
    beside = line.at(width)
    with np.errstate(all="ignore"):
        rounding = 2 * EPSILON[line.dtype] * np.fmax(np.abs(beside), np.abs(line.middle)) / width
        return np.stack([(beside - line.middle) / width, rounding])


def _clearly_off(slopes: DifferenceTable, gradient: float) -> DifferenceVerdict | None:
    """Disagreement, if both sides of some widths have the same slope, as steps and kinks never have."""
    every = np.concatenate([slopes.left, slopes.right])
    bound = float(np.ptp(every) + slopes.rounding[-1])
    slope = float(slopes.central[-1])
    if slope != 0 and bound <= ALIKE * abs(slope) and abs(gradient - slope) > SETTLED * max(abs(gradient), abs(slope)):
        return DifferenceVerdict(False, slope, bound)
    return None


def _keeps(off: DifferenceVerdict, gradient: float, near: np.ndarray) -> bool:
    """Whether it is so at a narrow width too: a function may be another there, as x**3 / (x**2 + 1e-16) is at zero."""
    return bool(abs(near[0] - off.difference) + near[1] <= SETTLED * abs(gradient - off.difference))


def _carefully(
    slopes: DifferenceTable, gradient: float, largest: float, size: float, narrow: int, dtype: str
) -> DifferenceVerdict:
    """The width at which neighbouring ones agree best, and whether it is to be believed."""
    central = slopes.central
    with np.errstate(all="ignore"):
        apart = np.abs(np.diff(central))
        errors = np.fmax(np.append(np.nan, apart), np.append(apart, np.nan)) + slopes.rounding
    if np.isnan(errors).all():
        return DifferenceVerdict(None, math.nan, math.inf, NO_VALUES)
    nothing = _nothing(size, dtype)
    best = int(np.nanargmin(errors / np.fmax(np.abs(central), nothing)))
    local = _settled(errors[-narrow:], central[-narrow:])
    local = None if local is None else local + len(errors) - narrow
    if local is None:  # a number that is small beside the usual widths may do without its own
        usual = slice(len(central) - narrow - len(USUAL), len(central) - narrow)
        plain = _plainly(slopes.part(usual), gradient, False, dtype)
        if plain is not None:
            return plain
    best = best if local is None else local
    found, bound = float(central[best]), float(errors[best])
    if not np.isfinite(gradient):
        steeper = math.isinf(gradient) and _grows(slopes, gradient)
        return DifferenceVerdict(None, found, bound, STEEPER) if steeper else DifferenceVerdict(False, found, bound)
    if not _decides(bound, found, gradient, nothing):
        return DifferenceVerdict(None, found, bound, UNSETTLED)
    if _within(slopes, best, bound, gradient, dtype):
        return (
            DifferenceVerdict(None, found, bound, TWO_SLOPES)
            if _turned(slopes, gradient)
            else DifferenceVerdict(True, found, bound)
        )
    if _jumps(slopes):
        return DifferenceVerdict(None, found, bound, UNSETTLED)
    if local is None and _grows(slopes, gradient):
        return DifferenceVerdict(None, found, bound, STEEPER)
    if _turns(slopes, found, gradient):
        return DifferenceVerdict(None, found, bound, TWO_SLOPES)
    coarse = 4 * EPSILON["bfloat16"] * largest
    flat = slopes.still[len(WIDE) - 1 :].all() and abs(gradient) > coarse  # further than steps of rounding are wide
    if flat or local is not None or not _rough(slopes, best, bound):
        return DifferenceVerdict(False, found, bound)
    wide = central[: len(WIDE)][np.isfinite(central[: len(WIDE)])]
    if len(wide) < len(WIDE):
        return DifferenceVerdict(None, found, bound, STEPS)
    found, bound = float(np.median(wide)), float(np.ptp(wide) + slopes.rounding[len(WIDE) - 1])
    # Steps of rounding inside make the slopes spread; where they hardly do, the gradient is not rounded much either.
    slack = 2 * bound + min(SLACK["bfloat16"] * abs(found) + coarse, ALIKE * abs(found) + 8 * bound)
    if not wide.min() - slack <= gradient <= wide.max() + slack:
        return (
            DifferenceVerdict(False, found, bound)
            if bound <= abs(found)
            else DifferenceVerdict(None, found, bound, UNSETTLED)
        )
    enough = bound <= 2 * SETTLED * max(abs(found), abs(gradient))
    return DifferenceVerdict(True, found, bound) if enough else DifferenceVerdict(None, found, bound, STEPS)


def _decides(bound: float, slope: float, gradient: float, nothing: float) -> bool:
    """Whether an error is small: beside what is compared, or so small that both are nothing beside the value."""
    return bound <= max(SETTLED * max(abs(slope), abs(gradient)), nothing)


def _nothing(size: float, dtype: str) -> float:
    return EPSILON[dtype] ** 0.5 * max(1.0, size)


def _within(slopes: DifferenceTable, at: int, bound: float, gradient: float, dtype: str, kinks: bool = True) -> bool:
    """Whether a gradient is the slope at a width; at a kink any slope between the two sides is."""
    around = [float(slopes.central[at])]
    gaps = np.abs(slopes.right - slopes.left)
    if kinks and at and gaps[at] > 0.75 * gaps[at - 1]:  # curvature makes it narrower with the width
        around += [float(slopes.left[at]), float(slopes.right[at])]
        bound += float(max(np.abs(np.diff(side[at - 1 : at + 1]))[0] for side in (slopes.left, slopes.right)))
    slack = 2 * bound + SLACK[dtype] * max(map(abs, around))
    return min(around) - slack <= gradient <= max(around) + slack


def _turns(slopes: DifferenceTable, found: float, gradient: float) -> bool:
    """Whether the narrowest width has left the slope where widths agree best, for the gradient."""
    near = SETTLED * abs(found - gradient)
    return not slopes.still[-1] and bool(abs(slopes.central[-1] - gradient) + slopes.rounding[-1] <= near)


def _turned(slopes: DifferenceTable, gradient: float) -> bool:
    """Whether all wide widths have one slope, without a kink, and it is not the gradient.

    Then a part of the function that is computed in a narrower precision may stand still at narrow ones.
    """
    wide, gaps = slopes.central[: len(WIDE)], np.abs(slopes.right - slopes.left)[: len(WIDE)]
    slope = float(np.median(wide))
    blurred = 2 * float(np.ptp(wide) + slopes.rounding[len(WIDE) - 1])
    off = abs(gradient - slope) > max(SETTLED * max(abs(gradient), abs(slope)), blurred)
    smooth = gaps[-1] <= max(0.75 * gaps[0], ALIKE * abs(slope))
    return off and bool(smooth and np.ptp(wide) <= SETTLED * abs(slope))


def _settled(errors: np.ndarray, central: np.ndarray) -> int | None:
    """Return the best of some narrow widths, if it and its neighbours have a slope, as steps never have."""
    with np.errstate(all="ignore"):
        shares = errors / np.abs(central)
    shares = np.where(np.isnan(shares), math.inf, shares)
    shares[-1] = math.inf  # it has one neighbour, which may be chance
    best = int(np.argmin(shares))
    return best if shares[best] <= SETTLED**2 else None


def _jumps(slopes: DifferenceTable) -> bool:
    """Whether values change as much within the narrowest widths as further off, as those of fast waves and at jumps."""
    sides = np.fmax(np.abs(slopes.left), np.abs(slopes.right))
    changes, noise = sides * slopes.widths, NOISE * slopes.rounding * slopes.widths
    return bool(np.all(changes[-2:] > np.fmax(SETTLED * np.nanmax(changes), noise[-2:])))


def _grows(slopes: DifferenceTable, gradient: float) -> bool:
    """Whether the slope gets closer to the gradient with every width, and never there, as that of a root at zero."""
    with np.errstate(all="ignore"):
        seen = slopes.rounding <= SETTLED * np.abs(slopes.central)
    sizes = slopes.central[seen] * np.sign(gradient)
    return len(sizes) > 3 and bool(np.all(np.diff(sizes) > 0) and 0 < 2 * sizes[0] < sizes[-1] < abs(gradient))


def _rough(slopes: DifferenceTable, best: int, bound: float) -> bool:
    """Whether the slope where widths agree best is not what wider ones lead to and narrower ones keep to."""
    off = np.abs(slopes.central - slopes.central[best])
    wide, narrow = off[: len(WIDE)], slice(best + 1, None)
    leads = bool(np.all(np.diff(wide) <= 2 * bound) and wide[-1] <= 0.5 * wide[0] + 2 * bound)
    keeps = bool(np.all(~(off[narrow] > 2 * bound + 8 * slopes.rounding[narrow])))
    return not leads or not keeps or bool(slopes.still[-1] and not slopes.still.all())
