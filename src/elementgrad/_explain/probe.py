"""What is tried out about a gradient: does the value move, is it the slope, what is it in another precision.

Which elements of what a step gives can move with some elements of what it takes, at whatever numbers.

A rectifier that is flat here, or a factor that is zero here, hides what its output is computed from. So the step is run
again on other numbers, twice, with nothing but those elements moved in between. Indices stay, truths do not.
"""

import math
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
from elementgrad._explain.trace import uneven_weights
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
        return positions, uneven_weights(len(positions))

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
