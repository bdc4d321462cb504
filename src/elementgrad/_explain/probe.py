"""What is tried out about a gradient: does the value move, is it the slope, what is it in another precision.

Which elements of what a step gives can move with some elements of what it takes, at whatever numbers.

A rectifier that is flat here, or a factor that is zero here, hides what its output is computed from. So the step is run
again on other numbers, twice, with nothing but those elements moved in between. Indices stay, truths do not.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from elementgrad._backends.base import Backend
from elementgrad._explain.differences import (
    EPSILON,
    LARGEST,
    LineFunctions,
    SampledCall,
    moved,
    moves,
    parts,
    unit,
    verdicts,
)
from elementgrad._explain.trace import weights
from elementgrad._names.call import BoundCall, Operand, TensorRef

Tensor = Any
SUSPICIOUS = 64.0
"""A gradient below so many units of rounding of the value may be what is left of a sum that cancels."""
APART = 0.02
"""A gradient counts as wrong if it is off by more of the slope than this."""


@dataclass(frozen=True)
class Probe:
    """A call, and the elements asked about on both sides."""

    call: BoundCall
    source: TensorRef
    target: TensorRef
    to: Operand
    since: Operand

    @property
    def backend(self) -> Backend:
        """The framework."""
        return self.call.backend

    @property
    def dtype(self) -> str:
        """The precision that the function is used in: the coarser one of both sides."""
        names = [self.backend.dtype(side.tensor) for side in (self.to, self.since)]
        return max([name for name in names if name in EPSILON], key=EPSILON.__getitem__, default="float32")

    @property
    def of(self) -> np.ndarray:
        """The flat positions of the target's elements."""
        return _positions(self.to, self.backend)

    @property
    def wrt(self) -> np.ndarray:
        """The flat positions of the source's elements."""
        return _positions(self.since, self.backend)

    @property
    def seeds(self) -> tuple[np.ndarray, np.ndarray]:
        """The target's elements and a weight for each."""
        positions = self.of
        return positions, weights(len(positions))

    def moves(self) -> bool | None:
        """Whether the target's elements are others when the source's are moved; None if the function refuses that."""
        try:
            return moves(self._sampled(), self._base(None), self.of, list(self.wrt), self.dtype)
        except Exception:  # it is the user's function, at numbers that are not theirs
            return None

    def mismatches(self, gradient: np.ndarray) -> bool:
        """Whether the largest of the gradient is clearly not the slope of the values, which can be had near by."""
        try:
            return self._is_off(gradient)
        except Exception:  # it is the user's function, at numbers that are not theirs
            return False

    def _is_off(self, gradient: np.ndarray) -> bool:
        positions, share = self.seeds
        sampled, dtype, known = self._finest()
        base = self._base(None if sampled.dtype is None else dtype)
        number = int(np.argmax(np.abs(gradient)))
        place = int(self.wrt[number])
        middle, steady = sampled.steady(base, 0, known)

        def at(by: float) -> np.ndarray:
            return share[None] @ sampled.read(moved(sampled, base, [place], by), positions)

        numbers, held = sampled.numbers(), float(gradient[number])
        line = LineFunctions(
            at, share[None] @ middle[positions], float(numbers[place]), dtype, unit(middle, numbers, abs(held))
        )
        (found,) = verdicts(line, [held], [abs(held)])
        apart = abs(found.difference - held) > APART * max(abs(found.difference), abs(held))
        return found.agrees is False and apart and bool(steady[positions].all())

    def precise(self, dtype: str = "float64") -> float | None:
        """The size of the gradient in another precision; None if the function does not accept it."""
        positions, share = self.seeds
        seed = np.zeros(math.prod(self.backend.shape(self.to.tensor)))
        seed[positions] = share
        try:
            found = self._sampled(dtype).gradient(seed)
        except Exception:  # it is the user's function, and made for another precision
            return None
        return None if found is None else float(np.abs(found.reshape(-1)[self.wrt]).max(initial=0.0))

    def overflows(self) -> bool:
        """Whether the gradient is finite in float64, and too large for the precision that the function is used in."""
        size = self.precise()
        return size is not None and LARGEST[self.dtype] < size < math.inf

    def is_rounding(self, gradient: np.ndarray, largest: float, value: float) -> bool:
        """Whether a gradient is mere rounding: the whole source has no more, and other precisions have other sizes."""
        if largest > SUSPICIOUS * EPSILON[self.dtype] * max(1.0, value):
            return False
        here = float(np.abs(gradient).max())
        if self.dtype == "float64":
            other = self.precise("float32")
            return other is not None and other > 1e4 * here
        other = self.precise()
        return other is not None and other < 1e-4 * here

    def _sampled(self, dtype: str | None = None) -> SampledCall:
        return SampledCall(self.call, self.source, self.target, dtype)

    def _finest(self) -> tuple[SampledCall, str, np.ndarray | None]:
        """The function in float64 if it accepts that, and what it gave then."""
        try:
            sampled = self._sampled("float64")
            value = sampled(self._base("float64"))
            if self.backend.dtype(value) == "float64":
                return sampled, "float64", parts(self.backend, value)
        except Exception:  # it is the user's function, and made for another precision
            pass
        return self._sampled(), self.dtype, None

    def _base(self, dtype: str | None) -> Tensor:
        """The source, or zeros to add to it where the run meets it."""
        like = self.since.tensor
        x = self.backend.zeros(tuple(self.backend.shape(like)), like) if self.source.computed else self.source.tensor
        return x if dtype is None else self.backend.convert(x, dtype)


def _positions(side: Operand, backend: Backend) -> np.ndarray:
    return np.asarray(side.select(..., backend).flat()).reshape(-1)


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
