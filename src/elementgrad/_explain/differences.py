"""Decide whether a gradient is the slope of a function's values along a line, by differences of several widths.

The usual widths mostly suffice. Where they do not agree with the gradient, wider and narrower ones tell whether the
gradient is wrong, or the width is, or the values go in steps; or they leave it undecided. NumPy only: the function is
given as `LineFunctions`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

STEP_SIZES = {"float64": 1e-5, "float32": 4e-3, "float16": 3e-2, "bfloat16": 6e-2}
"""The usual move of an element for a difference: about the third root of the precision."""
EPSILON = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
SLACK = {"float64": 1e-6, "float32": 1e-3, "float16": 1e-1, "bfloat16": 2e-1}
"""By how much of its size a difference may be off beyond its own bound."""
USUAL = (1.0, 0.75, 0.5)
"""Widths that mostly decide, as parts of the usual size."""
WIDE = tuple([eighths * 2.0**-7 for eighths in (8, 7, 6, 5, 4, 3)])
"""Widths beyond the steps of a function that rounds to any floating dtype on its way."""
NARROWER = 8.0
"""Below the usual widths, each is so many times narrower than the one before."""
NEAR = 16.0
"""The narrow width that is tried early is so many times the narrowest."""
NARROWEST = 1e-4
"""The narrowest width of a number that is close to zero is at most so much of it."""
SETTLED = 0.1
"""The error of a difference that decides is at most this part of what is compared."""
SAME_SLOPE = 1e-3
"""Slopes that differ by at most this part of their size are the same."""
NOISE = 64.0
"""Up to so many units of rounding of the function's slopes count as a gradient of zero."""
HAIR = 0.75
"""Stairs are looked for within this power of the precision, which is some units of rounding."""
BLURRED = 256.0
"""A gradient may be off by so many units of rounding of its summands without being wrong."""
STEPS = "the function changes in steps there, so differences say nothing"
NOT_FINITE = "the value is not finite, and cannot be varied"
NO_VALUES = "the function has no finite values nearby"
ROUNDED = "the two differ by no more than the rounding of larger terms"
LOST = "the slope is lost in the rounding of the value, which is so much larger"
STEEPER = "the slope grows without bound as the step size gets smaller"
UNSETTLED = "differences with neighbouring step sizes do not agree"
TWO_SLOPES = "small step sizes agree with the gradient and large ones with another slope"
UNSTEADY = "the function returns different values each time"


@dataclass(frozen=True)
class LineFunctions:
    """Several functions of one number, around a point."""

    at: Callable[[float], np.ndarray]
    """Evaluates all functions with the number moved by an amount."""
    middle: np.ndarray
    """The values at the number itself."""
    here: float
    """The number itself."""
    dtype: str
    unit: float = 1.0
    """About how large slopes are, relative to which gradients are rounded."""


@dataclass(frozen=True)
class DifferenceVerdict:
    """The judgement of one gradient by differences, and the difference with its error bound."""

    agrees: bool | None
    """None if undecided."""
    difference: float
    bound: float
    why: str = ""
    """The reason if it is undecided."""


@dataclass(frozen=True)
class Widths:
    """The widths for one number, the widest first.

    All are powers of two or eighths of them, so that moving by them is exact.
    """

    scale: float
    usual: list[float]
    wide: list[float]
    narrow: list[float]
    near: float
    """A narrow one that is tried early."""
    small: bool
    """True if the number is smaller than the usual widths, which may then be too wide to see its slope."""

    @classmethod
    def around(cls, here: float, dtype: str) -> "Widths":
        """Return widths for a number by its size or 1, whichever is larger, and narrower ones for a small number."""
        scale = 2.0 ** math.floor(math.log2(max(1.0, abs(here))))
        size = 2.0 ** math.floor(math.log2(STEP_SIZES[dtype])) * scale
        usual = [part * size for part in USUAL]
        narrow = _narrow_down(EPSILON[dtype] ** 0.65 * scale, usual[-1])
        narrow += [width for width in _widths_for_size(abs(here), dtype) if 2 * width < narrow[-1]]
        wide = [width * scale for width in WIDE if width * scale > usual[0]]
        return cls(scale, usual, wide, narrow, NEAR * narrow[-1], 0 < abs(here) < usual[-1])


def _narrow_down(lowest: float, width: float) -> list[float]:
    """Return ever narrower widths below `width`, until one is below `lowest`."""
    widths = [width / NARROWER]
    while widths[-1] > lowest:
        widths.append(widths[-1] / NARROWER)
    return widths


def _widths_for_size(size: float, dtype: str) -> list[float]:
    """Return widths by which a number of this size changes and keeps its sign."""
    least = max(NARROWEST, 4 * EPSILON[dtype]) * size
    if not least:
        return []
    widths = _narrow_down(least, 2.0 ** math.floor(math.log2(size)))
    return [width for width in widths if width and size + width != size]


@dataclass(frozen=True)
class DifferenceTable:
    """Differences by width (the widest first) and function; of one function after `column`."""

    widths: np.ndarray
    central: np.ndarray
    """One-sided where only one side has values, NaN where none has."""
    left: np.ndarray
    right: np.ndarray
    rounding: np.ndarray
    """The error by rounding of the values alone."""
    still: np.ndarray
    """True where the value did not move at all."""

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
        # Values that stand still do not show how coarsely the function rounds inside. At zero not even their own
        # rounding is known, so the usual size of slopes stands in.
        rounding = np.where(still, np.fmax(rounding, NOISE * epsilon * line.unit), rounding)
        return cls(h[:, 0], central, sides[2], sides[1], rounding, still)

    def join(self, *others: "DifferenceTable") -> "DifferenceTable":
        """Return a table of all widths, the widest first."""
        tables = (self, *others)
        order = np.argsort(-np.concatenate([table.widths for table in tables]), kind="stable")
        return DifferenceTable(*[np.concatenate(columns)[order] for columns in zip(*map(_arrays, tables), strict=True)])

    def rows(self, some: slice) -> "DifferenceTable":
        return DifferenceTable(*[array[some] for array in _arrays(self)])

    def column(self, index: int) -> "DifferenceTable":
        """Return the differences of one function."""
        widths, *arrays = _arrays(self)
        return DifferenceTable(widths, *[array[:, index] for array in arrays])


def _arrays(table: DifferenceTable) -> tuple[np.ndarray, ...]:
    return table.widths, table.central, table.left, table.right, table.rounding, table.still


def judge_gradients(
    line: LineFunctions, gradients: Sequence[float], largest: Sequence[float]
) -> list[DifferenceVerdict]:
    """Compare gradients of several functions of one number with differences.

    A gradient differs only if it does at narrow widths too.

    Args:
        line: The functions.
        gradients: The gradient of each.
        largest: The largest gradient of each by any number, relative to which its gradients are rounded.

    Returns:
        A verdict for each function.
    """
    if not math.isfinite(line.here):
        return [DifferenceVerdict(None, math.nan, math.inf, NOT_FINITE) for _ in gradients]
    widths, indices = Widths.around(line.here, line.dtype), range(len(gradients))
    table = DifferenceTable.of(line, widths.usual[:-1])
    verdicts = [_clearly_off(table.column(n), gradients[n]) for n in indices]
    if any(verdicts):
        nearby = _slopes_nearby(line, widths.near)
        verdicts = [
            verdict if verdict and _holds_nearby(verdict, gradients[n], nearby[:, n]) else None
            for n, verdict in enumerate(verdicts)
        ]
    sizes = np.abs(line.middle) / widths.scale
    if not all(verdicts):
        table = table.join(DifferenceTable.of(line, widths.usual[-1:]))
        judge = partial(_judge_by_usual_widths, small=widths.small, dtype=line.dtype)
        verdicts = [verdicts[n] or judge(table.column(n), gradients[n]) for n in indices]
    if not all(verdicts):
        table = table.join(*[DifferenceTable.of(line, others) for others in (widths.wide, widths.narrow) if others])
        careful = partial(_judge_by_all_widths, narrow=len(widths.narrow), dtype=line.dtype)
        last = [careful(table.column(n), gradients[n], largest[n], sizes[n]) for n in indices]
        verdicts = [before or after for before, after in zip(verdicts, last, strict=True)]
    blurs = [BLURRED * EPSILON[line.dtype] * max(largest[n], sizes[n]) for n in indices]
    sure = [
        _doubt_lost_slope(_forgive_rounding(verdict, gradient, blur), gradient, most, line.dtype)
        for verdict, gradient, blur, most in zip(verdicts, gradients, blurs, largest, strict=True)
        if verdict
    ]
    return _forgive_stairs(line, sure, gradients)


def _forgive_rounding(verdict: DifferenceVerdict, gradient: float, blur: float) -> DifferenceVerdict:
    off = abs(gradient - verdict.difference)
    return replace(verdict, agrees=None, why=ROUNDED) if verdict.agrees is False and off <= blur else verdict


def _doubt_lost_slope(verdict: DifferenceVerdict, gradient: float, largest: float, dtype: str) -> DifferenceVerdict:
    """Leave a gradient undecided that would agree only since the value is so large that any slope would.

    A gradient that is next to nothing, by itself or beside the largest, may agree.
    """
    is_small = abs(gradient) <= _negligible(largest, dtype)
    if not verdict.agrees or is_small or _is_exact_enough(verdict.bound, verdict.difference, gradient, 0.0):
        return verdict
    return replace(verdict, agrees=None, why=LOST)


def _forgive_stairs(
    line: LineFunctions, verdicts: list[DifferenceVerdict], gradients: Sequence[float]
) -> list[DifferenceVerdict]:
    """Leave a gradient of zero undecided where the values stand still within a hair, as those of a staircase do."""
    width_of = {}
    for n, verdict in enumerate(verdicts):
        if verdict.agrees is False and gradients[n] == 0 and verdict.difference:
            hair = max(abs(float(line.middle[n] / verdict.difference)), abs(line.here))
            hair *= EPSILON[line.dtype] ** HAIR
            if 0 < hair < math.inf:
                width_of[n] = 2.0 ** math.floor(math.log2(hair))
    for width in set(width_of.values()):
        still = (line.at(width) == line.middle) | (line.at(-width) == line.middle)
        for n in [n for n, own in width_of.items() if own == width and still[n]]:
            verdicts[n] = replace(verdicts[n], agrees=None, why=STEPS)
    return verdicts


def _judge_by_usual_widths(
    table: DifferenceTable, gradient: float, small: bool, dtype: str
) -> DifferenceVerdict | None:
    """Return that a gradient agrees if the usual widths say so, and are exact relative to the slopes of both sides.

    Those may cancel. For a number that is far smaller than the widths they say nothing.
    """
    at = len(table.widths) - 1
    if gradient == 0 and table.still.all():
        return DifferenceVerdict(True, 0.0, float(table.rounding[at]))
    bound = float(np.ptp(table.central) + table.rounding[at])
    sides = 0.0 if small else SETTLED * float(np.fmax(np.abs(table.left[at]), np.abs(table.right[at])))
    kinks = not small
    if _is_exact_enough(bound, table.central[at], gradient, sides) and _within(
        table, at, bound, gradient, dtype, kinks
    ):
        return DifferenceVerdict(True, float(table.central[at]), bound)
    return None


def _slopes_nearby(line: LineFunctions, width: float) -> np.ndarray:
    """Return the slopes to one side at a narrow width, and their errors by rounding."""
    beside = line.at(width)
    with np.errstate(all="ignore"):
        rounding = 2 * EPSILON[line.dtype] * np.fmax(np.abs(beside), np.abs(line.middle)) / width
        return np.stack([(beside - line.middle) / width, rounding])


def _clearly_off(table: DifferenceTable, gradient: float) -> DifferenceVerdict | None:
    """Return that a gradient differs if both sides have one slope at all widths, as stairs and kinks never have."""
    slopes = np.concatenate([table.left, table.right])
    bound = float(np.ptp(slopes) + table.rounding[-1])
    slope = float(table.central[-1])
    off = abs(gradient - slope) > SETTLED * max(abs(gradient), abs(slope))
    if slope != 0 and bound <= SAME_SLOPE * abs(slope) and off:
        return DifferenceVerdict(False, slope, bound)
    return None


def _holds_nearby(verdict: DifferenceVerdict, gradient: float, nearby: np.ndarray) -> bool:
    """Return True if a gradient differs at a narrow width too.

    A function may be another there, as x**3 / (x**2 + 1e-16) is at zero.
    """
    slope, rounding = nearby
    return bool(abs(slope - verdict.difference) + rounding <= SETTLED * abs(gradient - verdict.difference))


def _judge_by_all_widths(
    table: DifferenceTable, gradient: float, largest: float, size: float, narrow: int, dtype: str
) -> DifferenceVerdict:
    """Judge by the width at which neighbouring ones agree best, if it is to be believed."""
    central = table.central
    with np.errstate(all="ignore"):
        gaps = np.abs(np.diff(central))
        errors = np.fmax(np.append(np.nan, gaps), np.append(gaps, np.nan)) + table.rounding
    if np.isnan(errors).all():
        return DifferenceVerdict(None, math.nan, math.inf, NO_VALUES)
    negligible = _negligible(size, dtype)
    best = int(np.nanargmin(errors / np.fmax(np.abs(central), negligible)))
    local = _best_settled(errors[-narrow:], central[-narrow:])
    local = None if local is None else local + len(errors) - narrow
    if local is None:  # a number that is small relative to the usual widths may need no narrower ones
        usual = slice(len(central) - narrow - len(USUAL), len(central) - narrow)
        verdict = _judge_by_usual_widths(table.rows(usual), gradient, False, dtype)
        if verdict is not None:
            return verdict
    best = best if local is None else local
    slope, bound = float(central[best]), float(errors[best])
    if not np.isfinite(gradient):
        if math.isnan(gradient) and _is_jumpy(table):
            return DifferenceVerdict(None, slope, bound, UNSETTLED)
        steeper = math.isinf(gradient) and _grows_towards(table, gradient)
        return DifferenceVerdict(None, slope, bound, STEEPER) if steeper else DifferenceVerdict(False, slope, bound)
    if not _is_exact_enough(bound, slope, gradient, negligible):
        return DifferenceVerdict(None, slope, bound, UNSETTLED)
    if _within(table, best, bound, gradient, dtype):
        other = _wide_slope_is_other(table, gradient)
        return DifferenceVerdict(None, slope, bound, TWO_SLOPES) if other else DifferenceVerdict(True, slope, bound)
    if _is_jumpy(table):
        return DifferenceVerdict(None, slope, bound, UNSETTLED)
    if local is None and _grows_towards(table, gradient):
        return DifferenceVerdict(None, slope, bound, STEEPER)
    if _narrow_slope_is_gradient(table, slope, gradient):
        return DifferenceVerdict(None, slope, bound, TWO_SLOPES)
    coarse = 4 * EPSILON["bfloat16"] * largest
    flat = table.still[len(WIDE) - 1 :].all() and abs(gradient) > coarse  # wider than stairs made by rounding
    if flat or local is not None or not _is_rough(table, best, bound):
        return DifferenceVerdict(False, slope, bound)
    wide = central[: len(WIDE)][np.isfinite(central[: len(WIDE)])]
    if len(wide) < len(WIDE):
        return DifferenceVerdict(None, slope, bound, STEPS)
    slope, bound = float(np.median(wide)), float(np.ptp(wide) + table.rounding[len(WIDE) - 1])
    # Rounding inside the function makes the slopes spread. Where they hardly do, the gradient is hardly rounded either.
    slack = 2 * bound + min(SLACK["bfloat16"] * abs(slope) + coarse, SAME_SLOPE * abs(slope) + 8 * bound)
    if not wide.min() - slack <= gradient <= wide.max() + slack:
        sure = bound <= abs(slope)
        return DifferenceVerdict(False, slope, bound) if sure else DifferenceVerdict(None, slope, bound, UNSETTLED)
    enough = bound <= 2 * SETTLED * max(abs(slope), abs(gradient))
    return DifferenceVerdict(True, slope, bound) if enough else DifferenceVerdict(None, slope, bound, STEPS)


def _is_exact_enough(bound: float, slope: float, gradient: float, negligible: float) -> bool:
    """Return True if an error is small relative to what is compared, or both are negligible relative to the value."""
    return bound <= max(SETTLED * max(abs(slope), abs(gradient)), negligible)


def _negligible(size: float, dtype: str) -> float:
    return EPSILON[dtype] ** 0.5 * max(1.0, size)


def _within(table: DifferenceTable, at: int, bound: float, gradient: float, dtype: str, kinks: bool = True) -> bool:
    """Return True if a gradient is the slope at a width; at a kink, if it is between the slopes of both sides."""
    slopes = [float(table.central[at])]
    gaps = np.abs(table.right - table.left)
    if kinks and at and gaps[at] > 0.75 * gaps[at - 1]:  # curvature narrows the gap with the width
        slopes += [float(table.left[at]), float(table.right[at])]
        bound += float(max(np.abs(np.diff(side[at - 1 : at + 1]))[0] for side in (table.left, table.right)))
    slack = 2 * bound + SLACK[dtype] * max(map(abs, slopes))
    return min(slopes) - slack <= gradient <= max(slopes) + slack


def _narrow_slope_is_gradient(table: DifferenceTable, slope: float, gradient: float) -> bool:
    """Return True if the narrowest width has the gradient as its slope, and not that of where widths agree best."""
    near = SETTLED * abs(slope - gradient)
    return not table.still[-1] and bool(abs(table.central[-1] - gradient) + table.rounding[-1] <= near)


def _wide_slope_is_other(table: DifferenceTable, gradient: float) -> bool:
    """Return True if all wide widths have one slope, without a kink, and it is not the gradient.

    Then a part of the function that is computed in a lower precision may stand still at narrow widths.
    """
    wide, gaps = table.central[: len(WIDE)], np.abs(table.right - table.left)[: len(WIDE)]
    slope = float(np.median(wide))
    blurred = 2 * float(np.ptp(wide) + table.rounding[len(WIDE) - 1])
    off = abs(gradient - slope) > max(SETTLED * max(abs(gradient), abs(slope)), blurred)
    smooth = gaps[-1] <= max(0.75 * gaps[0], SAME_SLOPE * abs(slope))
    return off and bool(smooth and np.ptp(wide) <= SETTLED * abs(slope))


def _best_settled(errors: np.ndarray, central: np.ndarray) -> int | None:
    """Return the index of the best narrow width, if its neighbours agree with it, as those of stairs never do."""
    with np.errstate(all="ignore"):
        shares = errors / np.abs(central)
    shares = np.where(np.isnan(shares), math.inf, shares)
    shares[-1] = math.inf  # it has one neighbour, which may be chance
    best = int(np.argmin(shares))
    return best if shares[best] <= SETTLED**2 else None


def _is_jumpy(table: DifferenceTable) -> bool:
    """Return True if values change within the narrowest widths as much as further off, as in fast waves or jumps."""
    sides = np.fmax(np.abs(table.left), np.abs(table.right))
    changes, noise = sides * table.widths, NOISE * table.rounding * table.widths
    return bool(np.all(changes[-2:] > np.fmax(SETTLED * np.nanmax(changes), noise[-2:])))


def _grows_towards(table: DifferenceTable, gradient: float) -> bool:
    """Return True if the slope approaches the gradient with every width and never gets there, as of a root at zero."""
    with np.errstate(all="ignore"):
        exact = table.rounding <= SETTLED * np.abs(table.central)
    sizes = table.central[exact] * np.sign(gradient)
    return len(sizes) > 3 and bool(np.all(np.diff(sizes) > 0) and 0 < 2 * sizes[0] < sizes[-1] < abs(gradient))


def _is_rough(table: DifferenceTable, best: int, bound: float) -> bool:
    """Return True unless wider widths lead to the slope where widths agree best, and narrower ones keep to it."""
    off = np.abs(table.central - table.central[best])
    wide, narrow = off[: len(WIDE)], slice(best + 1, None)
    leads = bool(np.all(np.diff(wide) <= 2 * bound) and wide[-1] <= 0.5 * wide[0] + 2 * bound)
    keeps = bool(np.all(~(off[narrow] > 2 * bound + 8 * table.rounding[narrow])))
    return not leads or not keeps or bool(table.still[-1] and not table.still.all())
