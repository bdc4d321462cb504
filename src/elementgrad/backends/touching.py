"""Which elements of what a step gives can move with some elements of what it takes, at whatever numbers.

A rectifier that is flat here, or a factor that is zero here, hides what its output is computed from. So the step is run
again on other numbers, twice, with nothing but those elements moved in between. Indices stay, truths do not.
"""

from collections.abc import Callable, Sequence

import numpy as np

from elementgrad.backends.witness import weights

Again = Callable[[Sequence[np.ndarray]], Sequence[np.ndarray]]
"""A step on other numbers: one array per tensor that it takes, and one per tensor that it gives."""
DRAWS = (("around zero", 2.0), ("positive", 0.125), ("as they are", 100.0), ("as they are", 2.0), ("as they are", 0.01))
"""The numbers on which a step is run, and how far elements are moved to both sides."""


def touched(
    again: Again, taken: Sequence[np.ndarray], masks: Sequence[np.ndarray | None], shapes: Sequence[tuple[int, ...]]
) -> list[np.ndarray]:
    """Masks for what a step gives, for masks of what it takes."""
    found = [np.zeros(shape, bool) for shape in shapes]
    if any(x.dtype.kind not in "fcb" and mask is not None for x, mask in zip(taken, masks, strict=True)):
        return [np.ones(shape, bool) for shape in shapes]  # another index may lead anywhere
    tried = False
    random = np.random.default_rng(0)
    for numbers, by in DRAWS:
        base = list(zip([_drawn(x, numbers, random) for x in taken], masks, strict=True))
        sides = [[x if mask is None else _moved(x, mask, far) for x, mask in base] for far in (-by, by)]
        try:
            pairs = list(zip(*map(again, sides), strict=True))
        except Exception:  # numbers that are none of its own
            continue
        if [a.shape for a, _ in pairs] != list(shapes) or [b.shape for _, b in pairs] != list(shapes):
            continue
        tried = True
        found = [np.asarray(mask | _differ(a, b)) for mask, (a, b) in zip(found, pairs, strict=True)]
        if all(mask.all() for mask in found):
            break
    return found if tried else guessed(masks, shapes)


def ties(again: Again, taken: Sequence[np.ndarray], masks: Sequence[np.ndarray | None], coarse: Sequence[bool]) -> bool:
    """Whether some elements are level with what a choice took instead of them: the least move shows in what it gives.

    So no rule is needed for which elements stand against each other: those of a window, of an axis or of a segment.
    `coarse` says which numbers are bfloat16, held in float32.
    """
    try:
        here = again(taken)
        for way in (1.0, -1.0):
            moved = [
                x if mask is None or x.dtype.kind != "f" else _nudged(x, mask, way * (1 << 16 if rough else 1))
                for x, mask, rough in zip(taken, masks, coarse, strict=True)
            ]
            pairs = zip(here, again(moved), strict=True)
            if any(a.dtype.kind in "fc" and _differ(a, b).any() for a, b in pairs):
                return True
    except Exception:  # it cannot be run again
        pass
    return False


def _nudged(x: np.ndarray, mask: np.ndarray, units: float) -> np.ndarray:
    """Elements moved by so many units of their last place; zeros by the least number that no processor flushes."""
    moved = np.array(x)
    least = np.finfo(x.dtype).tiny
    flat = np.where(np.abs(x) < least, np.copysign(least, units), x + units * np.abs(np.spacing(x)))
    chosen = mask & np.isfinite(x)
    moved[chosen] = flat[chosen].astype(x.dtype)
    return moved


def guessed(masks: Sequence[np.ndarray | None], shapes: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
    """Masks for what is not run again, as it calls the user's code or may never end.

    What is of the same shape goes element by element, and the rest may be anything.
    """
    some = [mask for mask in masks if mask is not None]
    whole = {shape: all(mask.shape == shape for mask in some) for shape in shapes}
    return [np.logical_or.reduce(some) if whole[shape] else np.ones(shape, bool) for shape in shapes]


def _drawn(x: np.ndarray, numbers: str, random: np.random.Generator) -> np.ndarray:
    if numbers == "as they are" or x.dtype.kind not in "fcb":
        return x
    if x.dtype.kind == "b":
        return np.full(x.shape, numbers == "positive")  # both ways of a choice have their turn
    drawn = random.uniform(-1, 1, x.shape) if numbers == "around zero" else random.uniform(0.5, 1, x.shape)
    return np.asarray(drawn, x.dtype)


def _moved(x: np.ndarray, mask: np.ndarray, by: float) -> np.ndarray:
    """Elements moved by uneven amounts: many functions are of differences alone."""
    moved = np.array(x)
    with np.errstate(over="ignore"):
        moved[mask] = by > 0 if x.dtype.kind == "b" else x[mask] + by * weights(int(mask.sum()))
    return moved


def _differ(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    same = a == b
    return ~(same | ((a != a) & (b != b))) if a.dtype.kind in "fc" else ~same
