"""Whether a gradient is the slope of values along a line: differences of several widths tell, or do not."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from elementgrad.explaining.precision import EPSILON, SIZES, SLACK

USUAL = (1.0, 0.75, 0.5)
"""Widths that decide mostly, as parts of the usual size."""
WIDE = tuple([eighths * 2.0**-7 for eighths in (8, 7, 6, 5, 4, 3)])
"""Wider than the steps in which a function goes that rounds to any floating dtype on its way."""
NARROWER = 8.0
"""Below the usual widths each is so many times narrower than the one before."""
SETTLED = 0.1
"""The error of a difference that decides is at most so much of what is compared."""
CLOSE = 16.0
"""A narrow width that is looked at early is so many times the narrowest."""
ALIKE = 1e-3
"""Slopes that differ by no more of their size are the same."""
STEPS = "the values go in steps there, by which no slope is told"
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
    def of(cls, at: Callable[[float], np.ndarray], middle: np.ndarray, widths: Sequence[float], dtype: str) -> "Slopes":
        """Evaluate both sides at every width."""
        up, down = (np.stack([at(sign * width) for width in widths]) for sign in (1.0, -1.0))
        h = np.array(widths)[:, None]
        with np.errstate(all="ignore"):
            right, left = (up - middle) / h, (middle - down) / h
            sides = [np.where(np.isfinite(side), side, np.nan) for side in ((right + left) / 2, right, left)]
            largest = np.fmax(np.fmax(np.abs(up), np.abs(down)), np.abs(middle))
        central = np.where(np.isnan(sides[0]), np.where(np.isnan(sides[1]), sides[2], sides[1]), sides[0])
        still = (up == middle) & (down == middle)
        return cls(h[:, 0], central, sides[2], sides[1], 2 * EPSILON[dtype] * largest / h, still)

    def joined(self, *others: "Slopes") -> "Slopes":
        """These and others, the widest first."""
        order = np.argsort(-np.concatenate([each.widths for each in (self, *others)]), kind="stable")
        names = ("widths", "central", "left", "right", "rounding", "still")
        return Slopes(*[np.concatenate([getattr(e, name) for e in (self, *others)])[order] for name in names])

    def column(self, number: int) -> "Slopes":
        """Those of one function."""
        parts = (self.central, self.left, self.right, self.rounding, self.still)
        return Slopes(self.widths, *[part[:, number] for part in parts])


def verdicts(
    at: Callable[[float], np.ndarray],
    middle: np.ndarray,
    gradients: Sequence[float],
    largest: Sequence[float],
    here: float,
    dtype: str,
) -> list[Verdict]:
    """Hold gradients of several functions of one number against differences; `at` moves the number from `here`.

    `largest` are the largest sizes of the same functions' gradients by other numbers, beside which those are rounded.

    The usual widths mostly do. Where one of them does not agree, wider and narrower ones tell whether it is the
    gradient, or the width, or steps in the values. A gradient differs only if it does at narrow widths too.
    """
    scale = 2.0 ** math.floor(math.log2(max(1.0, abs(here))))  # so that moving a number by it is exact
    usual = [part * 2.0 ** math.floor(math.log2(SIZES[dtype])) * scale for part in USUAL]
    lowest = min(EPSILON[dtype] ** 0.65 * scale, 1e-4 * abs(here) or math.inf)
    numbers = range(len(gradients))
    slopes = Slopes.of(at, middle, usual[:-1], dtype)
    found = [_clearly_off(slopes.column(n), gradients[n]) for n in numbers]
    if any(found):
        near = _near(at, middle, CLOSE * lowest, dtype)
        found = [
            verdict if verdict and _keeps(verdict, gradients[n], near[:, n]) else None
            for n, verdict in enumerate(found)
        ]
    if not all(found):
        slopes = slopes.joined(Slopes.of(at, middle, usual[-1:], dtype))
        sizes = np.abs(middle) / scale
        found = [found[n] or _plainly(slopes.column(n), gradients[n], sizes[n], dtype) for n in numbers]
    if all(found):
        return [verdict for verdict in found if verdict]
    narrow = [usual[-1] / NARROWER**n for n in range(1, 2 + math.ceil(math.log(usual[-1] / lowest, NARROWER)))]
    wide = [width * scale for width in WIDE if width * scale > usual[0]]
    slopes = slopes.joined(*[Slopes.of(at, middle, widths, dtype) for widths in (wide, narrow) if widths])
    last = [_carefully(slopes.column(n), gradients[n], largest[n], abs(middle[n]) / scale, dtype) for n in numbers]
    return [before or after for before, after in zip(found, last, strict=True)]


def _plainly(slopes: Slopes, gradient: float, size: float, dtype: str) -> Verdict | None:
    """Agreement, if the usual widths say so."""
    if gradient == 0 and slopes.still.all():
        return Verdict(True, 0.0, 0.0)
    bound = float(np.ptp(slopes.central) + slopes.rounding[-1])
    at = len(slopes.widths) - 1
    if _decides(bound, slopes.central[at], gradient, size, dtype) and _within(slopes, at, bound, gradient, dtype):
        return Verdict(True, float(slopes.central[at]), bound)
    return None


def _near(at: Callable[[float], np.ndarray], middle: np.ndarray, width: float, dtype: str) -> np.ndarray:
    """The slopes to one side at a narrow width, and what rounding of the values may make of them."""
    beside = at(width)
    with np.errstate(all="ignore"):
        rounding = 2 * EPSILON[dtype] * np.fmax(np.abs(beside), np.abs(middle)) / width
        return np.stack([(beside - middle) / width, rounding])


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


def _carefully(slopes: Slopes, gradient: float, largest: float, size: float, dtype: str) -> Verdict:
    """The width at which neighbouring ones agree best, and whether it is to be believed."""
    central = slopes.central
    with np.errstate(all="ignore"):
        apart = np.abs(np.diff(central))
        errors = np.fmax(np.append(np.nan, apart), np.append(apart, np.nan)) + slopes.rounding
    if not np.isfinite(gradient):
        finite = central[np.isfinite(central)]
        return Verdict(False, float(finite[-1]) if len(finite) else math.nan, math.inf)
    if np.isnan(errors).all():
        return Verdict(None, math.nan, math.inf, "the function has no finite values near by")
    best = int(np.nanargmin(errors / np.fmax(np.abs(central), _nothing(size, dtype))))
    found, bound = float(central[best]), float(errors[best])
    if not _decides(bound, found, gradient, size, dtype):
        return Verdict(None, found, bound, UNSETTLED)
    if _within(slopes, best, bound, gradient, dtype):
        return Verdict(None, found, bound, TWO_SLOPES) if _turned(slopes, gradient) else Verdict(True, found, bound)
    if _turns(slopes, found, gradient):
        return Verdict(None, found, bound, TWO_SLOPES)
    coarse = 4 * EPSILON["bfloat16"] * largest
    flat = slopes.still[len(WIDE) - 1 :].all() and abs(gradient) > coarse  # further than steps of rounding are wide
    if flat or not _rough(slopes, best, bound):
        return Verdict(False, found, bound)
    wide = central[: len(WIDE)][np.isfinite(central[: len(WIDE)])]
    if len(wide) < len(WIDE):
        return Verdict(None, found, bound, STEPS)
    found, bound = float(np.median(wide)), float(np.ptp(wide))
    slack = 2 * bound + SLACK["bfloat16"] * abs(found) + coarse
    if not wide.min() - slack <= gradient <= wide.max() + slack:
        return Verdict(False, found, bound)
    enough = bound <= 2 * SETTLED * max(abs(found), abs(gradient))
    return Verdict(True, found, bound) if enough else Verdict(None, found, bound, STEPS)


def _decides(bound: float, slope: float, gradient: float, size: float, dtype: str) -> bool:
    """Whether an error is small: beside what is compared, or so small that both are nothing beside the value."""
    return bound <= max(SETTLED * max(abs(slope), abs(gradient)), _nothing(size, dtype))


def _nothing(size: float, dtype: str) -> float:
    return EPSILON[dtype] ** 0.5 * max(1.0, size)


def _within(slopes: Slopes, at: int, bound: float, gradient: float, dtype: str) -> bool:
    """Whether a gradient is the slope at a width; at a kink any slope between the two sides is."""
    around = [float(slopes.central[at])]
    gaps = np.abs(slopes.right - slopes.left)
    if at and gaps[at] > 0.75 * gaps[at - 1]:  # curvature makes it narrower with the width
        around += [float(slopes.left[at]), float(slopes.right[at])]
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
    off = abs(gradient - slope) > SETTLED * max(abs(gradient), abs(slope))
    smooth = gaps[-1] <= max(0.75 * gaps[0], ALIKE * abs(slope))
    return off and bool(smooth and np.ptp(wide) <= SETTLED * abs(slope))


def _rough(slopes: Slopes, best: int, bound: float) -> bool:
    """Whether the slope where widths agree best is not what wider ones lead to and narrower ones keep to."""
    off = np.abs(slopes.central - slopes.central[best])
    wide, narrow = off[: len(WIDE)], slice(best + 1, None)
    leads = bool(np.all(np.diff(wide) <= 2 * bound) and wide[-1] <= 0.5 * wide[0] + 2 * bound)
    keeps = bool(np.all(~(off[narrow] > 2 * bound + 8 * slopes.rounding[narrow])))
    return not leads or not keeps or bool(slopes.still[-1] and not slopes.still.all())
