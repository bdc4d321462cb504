"""Whether a gradient is the slope of values along a line: differences of several widths tell, or do not."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from elementgrad.explaining.precision import EPSILON, SLACK
from elementgrad.explaining.widths import USUAL, WIDE, Widths

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
class Verdict:
    """What differences say of one gradient."""

    agrees: bool | None
    """None if they do not decide."""
    difference: float
    bound: float
    why: str = ""
    """Why nothing is decided."""


@dataclass(frozen=True)
class Slopes:
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
    def of(cls, line: "Line", widths: Sequence[float]) -> "Slopes":
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

    def joined(self, *others: "Slopes") -> "Slopes":
        """These and others, the widest first."""
        order = np.argsort(-np.concatenate([each.widths for each in (self, *others)]), kind="stable")
        names = ("widths", "central", "left", "right", "rounding", "still")
        return Slopes(*[np.concatenate([getattr(e, name) for e in (self, *others)])[order] for name in names])

    def part(self, some: slice) -> "Slopes":
        """Those of some widths."""
        names = ("widths", "central", "left", "right", "rounding", "still")
        return Slopes(*[getattr(self, name)[some] for name in names])

    def column(self, number: int) -> "Slopes":
        """Those of one function."""
        parts = (self.central, self.left, self.right, self.rounding, self.still)
        return Slopes(self.widths, *[part[:, number] for part in parts])


@dataclass(frozen=True)
class Line:
    """Some functions of one number, around a point."""

    at: Callable[[float], np.ndarray]
    """The values where the number is moved by so much."""
    middle: np.ndarray
    here: float
    """The number itself."""
    dtype: str
    unit: float = 1.0
    """About how large slopes are, beside which gradients are rounded."""


def verdicts(line: Line, gradients: Sequence[float], largest: Sequence[float]) -> list[Verdict]:
    """Hold gradients of several functions of one number against differences.

    `largest` are the largest sizes of the same functions' gradients by other numbers, beside which those are rounded.

    The usual widths mostly do. Where one of them does not agree, wider and narrower ones tell whether it is the
    gradient, or the width, or steps in the values. A gradient differs only if it does at narrow widths too.
    """
    if not math.isfinite(line.here):
        return [Verdict(None, math.nan, math.inf, NOT_FINITE) for _ in gradients]
    widths, numbers = Widths.around(line.here, line.dtype), range(len(gradients))
    slopes = Slopes.of(line, widths.usual[:-1])
    found = [_clearly_off(slopes.column(n), gradients[n]) for n in numbers]
    if any(found):
        near = _near(line, widths.near)
        found = [
            verdict if verdict and _keeps(verdict, gradients[n], near[:, n]) else None
            for n, verdict in enumerate(found)
        ]
    sizes = np.abs(line.middle) / widths.scale
    if not all(found):
        slopes = slopes.joined(Slopes.of(line, widths.usual[-1:]))
        found = [found[n] or _plainly(slopes.column(n), gradients[n], widths.small, line.dtype) for n in numbers]
    if not all(found):
        slopes = slopes.joined(*[Slopes.of(line, more) for more in (widths.wide, widths.narrow) if more])
        careful = partial(_carefully, narrow=len(widths.narrow), dtype=line.dtype)
        last = [careful(slopes.column(n), gradients[n], largest[n], sizes[n]) for n in numbers]
        found = [before or after for before, after in zip(found, last, strict=True)]
    blurred = [BLURRED * EPSILON[line.dtype] * max(largest[n], sizes[n]) for n in numbers]
    sure = [
        _unless_rounded(verdict, *each) for verdict, *each in zip(found, gradients, blurred, strict=True) if verdict
    ]
    return _without_steps(line, sure, gradients)


def _unless_rounded(verdict: Verdict, gradient: float, blurred: float) -> Verdict:
    off = abs(gradient - verdict.difference)
    return replace(verdict, agrees=None, why=ROUNDED) if verdict.agrees is False and off <= blurred else verdict


def _without_steps(line: Line, found: list[Verdict], gradients: Sequence[float]) -> list[Verdict]:
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


def _plainly(slopes: Slopes, gradient: float, small: bool, dtype: str) -> Verdict | None:
    """Agreement, if the usual widths say so, and are exact beside the slopes to both sides, which may cancel.

    The slopes of a number that is far smaller than they are wide say nothing about its own.
    """
    at = len(slopes.widths) - 1
    if gradient == 0 and slopes.still.all():
        return Verdict(True, 0.0, float(slopes.rounding[at]))
    bound = float(np.ptp(slopes.central) + slopes.rounding[at])
    sides = 0.0 if small else SETTLED * float(np.fmax(np.abs(slopes.left[at]), np.abs(slopes.right[at])))
    kinks = not small
    if _decides(bound, slopes.central[at], gradient, sides) and _within(slopes, at, bound, gradient, dtype, kinks):
        return Verdict(True, float(slopes.central[at]), bound)
    return None


def _near(line: Line, width: float) -> np.ndarray:
    """The slopes to one side at a narrow width, and what rounding of the values may make of them."""
    beside = line.at(width)
    with np.errstate(all="ignore"):
        rounding = 2 * EPSILON[line.dtype] * np.fmax(np.abs(beside), np.abs(line.middle)) / width
        return np.stack([(beside - line.middle) / width, rounding])


def _clearly_off(slopes: Slopes, gradient: float) -> Verdict | None:
    """Disagreement, if both sides of some widths have the same slope, as steps and kinks never have."""
    every = np.concatenate([slopes.left, slopes.right])
    bound = float(np.ptp(every) + slopes.rounding[-1])
    slope = float(slopes.central[-1])
    if slope != 0 and bound <= ALIKE * abs(slope) and abs(gradient - slope) > SETTLED * max(abs(gradient), abs(slope)):
        return Verdict(False, slope, bound)
    return None


def _keeps(off: Verdict, gradient: float, near: np.ndarray) -> bool:
    """Whether it is so at a narrow width too: a function may be another there, as x**3 / (x**2 + 1e-16) is at zero."""
    return bool(abs(near[0] - off.difference) + near[1] <= SETTLED * abs(gradient - off.difference))


def _carefully(slopes: Slopes, gradient: float, largest: float, size: float, narrow: int, dtype: str) -> Verdict:
    """The width at which neighbouring ones agree best, and whether it is to be believed."""
    central = slopes.central
    with np.errstate(all="ignore"):
        apart = np.abs(np.diff(central))
        errors = np.fmax(np.append(np.nan, apart), np.append(apart, np.nan)) + slopes.rounding
    if np.isnan(errors).all():
        return Verdict(None, math.nan, math.inf, NO_VALUES)
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
        return Verdict(None, found, bound, STEEPER) if steeper else Verdict(False, found, bound)
    if not _decides(bound, found, gradient, nothing):
        return Verdict(None, found, bound, UNSETTLED)
    if _within(slopes, best, bound, gradient, dtype):
        return Verdict(None, found, bound, TWO_SLOPES) if _turned(slopes, gradient) else Verdict(True, found, bound)
    if _jumps(slopes):
        return Verdict(None, found, bound, UNSETTLED)
    if local is None and _grows(slopes, gradient):
        return Verdict(None, found, bound, STEEPER)
    if _turns(slopes, found, gradient):
        return Verdict(None, found, bound, TWO_SLOPES)
    coarse = 4 * EPSILON["bfloat16"] * largest
    flat = slopes.still[len(WIDE) - 1 :].all() and abs(gradient) > coarse  # further than steps of rounding are wide
    if flat or local is not None or not _rough(slopes, best, bound):
        return Verdict(False, found, bound)
    wide = central[: len(WIDE)][np.isfinite(central[: len(WIDE)])]
    if len(wide) < len(WIDE):
        return Verdict(None, found, bound, STEPS)
    found, bound = float(np.median(wide)), float(np.ptp(wide) + slopes.rounding[len(WIDE) - 1])
    # Steps of rounding inside make the slopes spread; where they hardly do, the gradient is not rounded much either.
    slack = 2 * bound + min(SLACK["bfloat16"] * abs(found) + coarse, ALIKE * abs(found) + 8 * bound)
    if not wide.min() - slack <= gradient <= wide.max() + slack:
        return Verdict(False, found, bound) if bound <= abs(found) else Verdict(None, found, bound, UNSETTLED)
    enough = bound <= 2 * SETTLED * max(abs(found), abs(gradient))
    return Verdict(True, found, bound) if enough else Verdict(None, found, bound, STEPS)


def _decides(bound: float, slope: float, gradient: float, nothing: float) -> bool:
    """Whether an error is small: beside what is compared, or so small that both are nothing beside the value."""
    return bound <= max(SETTLED * max(abs(slope), abs(gradient)), nothing)


def _nothing(size: float, dtype: str) -> float:
    return EPSILON[dtype] ** 0.5 * max(1.0, size)


def _within(slopes: Slopes, at: int, bound: float, gradient: float, dtype: str, kinks: bool = True) -> bool:
    """Whether a gradient is the slope at a width; at a kink any slope between the two sides is."""
    around = [float(slopes.central[at])]
    gaps = np.abs(slopes.right - slopes.left)
    if kinks and at and gaps[at] > 0.75 * gaps[at - 1]:  # curvature makes it narrower with the width
        around += [float(slopes.left[at]), float(slopes.right[at])]
        bound += float(max(np.abs(np.diff(side[at - 1 : at + 1]))[0] for side in (slopes.left, slopes.right)))
    slack = 2 * bound + SLACK[dtype] * max(map(abs, around))
    return min(around) - slack <= gradient <= max(around) + slack


def _turns(slopes: Slopes, found: float, gradient: float) -> bool:
    """Whether the narrowest width has left the slope where widths agree best, for the gradient."""
    near = SETTLED * abs(found - gradient)
    return not slopes.still[-1] and bool(abs(slopes.central[-1] - gradient) + slopes.rounding[-1] <= near)


def _turned(slopes: Slopes, gradient: float) -> bool:
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


def _jumps(slopes: Slopes) -> bool:
    """Whether values change as much within the narrowest widths as further off, as those of fast waves and at jumps."""
    sides = np.fmax(np.abs(slopes.left), np.abs(slopes.right))
    changes, noise = sides * slopes.widths, NOISE * slopes.rounding * slopes.widths
    return bool(np.all(changes[-2:] > np.fmax(SETTLED * np.nanmax(changes), noise[-2:])))


def _grows(slopes: Slopes, gradient: float) -> bool:
    """Whether the slope gets closer to the gradient with every width, and never there, as that of a root at zero."""
    with np.errstate(all="ignore"):
        seen = slopes.rounding <= SETTLED * np.abs(slopes.central)
    sizes = slopes.central[seen] * np.sign(gradient)
    return len(sizes) > 3 and bool(np.all(np.diff(sizes) > 0) and 0 < 2 * sizes[0] < sizes[-1] < abs(gradient))


def _rough(slopes: Slopes, best: int, bound: float) -> bool:
    """Whether the slope where widths agree best is not what wider ones lead to and narrower ones keep to."""
    off = np.abs(slopes.central - slopes.central[best])
    wide, narrow = off[: len(WIDE)], slice(best + 1, None)
    leads = bool(np.all(np.diff(wide) <= 2 * bound) and wide[-1] <= 0.5 * wide[0] + 2 * bound)
    keeps = bool(np.all(~(off[narrow] > 2 * bound + 8 * slopes.rounding[narrow])))
    return not leads or not keeps or bool(slopes.still[-1] and not slopes.still.all())
