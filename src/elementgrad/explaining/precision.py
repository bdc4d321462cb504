"""The same function in another precision, and central differences: numbers to hold a gradient against."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from elementgrad.backends import Backend
from elementgrad.backends.linear import Linear
from elementgrad.source import Source
from elementgrad.trace import Call, Run

Tensor = Any
SIZES = {"float64": 1e-5, "float32": 4e-3, "float16": 3e-2, "bfloat16": 6e-2}
"""How far an element is moved for a difference: about the third root of the precision."""
WIDTHS = (0.5, 0.77, 1.0)
"""Of that, for several differences: how they spread tells of curvature and of rounding inside of the function."""
EPSILON = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
LARGEST = {"float64": 1.79e308, "float32": 3.4e38, "float16": 65504.0, "bfloat16": 3.38e38}
"""About the largest numbers that there are."""


class Sampled:
    """A call as a function of one of its tensors, with every floating one in a precision of choice."""

    def __init__(self, call: Call, source: Source, target: Source, dtype: str | None = None):
        self.backend: Backend = call.backend
        self._source = source
        others = [] if dtype is None else _floats(call, source)
        self._run = Run(call, [source, *others], [target])
        self.tensors = [_in(self.backend, each.tensor, dtype) for each in (source, *others)]
        self.dtype = dtype

    def __call__(self, x: Tensor) -> Tensor:
        """The target, for a source that is given; for one that the run meets, what is added to it."""
        with self.backend.precision(self.dtype):
            (value,) = self.backend.sample(self._run, [x, *self.tensors[1:]])
        return value

    def linear(self) -> Linear:
        """The function ready for sweeps."""
        with self.backend.precision(self.dtype):
            run = self._run
            alone = _Alone(run.call, run.sources[:1], run.targets, rest=(run.sources[1:], self.tensors[1:]))
            return self.backend.linearize(alone, self.tensors[:1], False, 1)

    def gradient(self, weights: np.ndarray) -> np.ndarray | None:
        """The gradient of a weighted sum of the target's elements; None if there is no path."""
        with self.backend.precision(self.dtype):
            linear = self.linear()
            like = linear.value(0)
            seed = self.backend.cast(weights.reshape(self.backend.shape(like)), like)
            (pulled,) = linear.pull(0, [0], self.backend.reshape(seed, (1, *self.backend.shape(like))))
            return None if pulled is None else self.backend.floats(pulled)

    def read(self, x: Tensor, of: np.ndarray) -> np.ndarray:
        """The target's elements at some flat positions, as float64."""
        values = self.backend.floats(self(x))
        assert values is not None
        return values.reshape(-1)[of]


@dataclass(frozen=True)
class _Alone(Run):
    """A call as a function of one tensor, in which others have other numbers and no derivatives: some cannot."""

    rest: tuple[Sequence[Source], Sequence[Tensor]] = ((), ())

    def __call__(self, *tensors: Any) -> list[Tensor]:
        sources, values = self.rest
        return self.call.run([*self.sources, *sources], [*tensors, *values], self.targets, self.cuts)


def _floats(call: Call, source: Source) -> list[Source]:
    """The floating inputs, and what the function holds."""
    found = [other for other in call.inputs if other != source and call.backend.kind(other.tensor) == "f"]
    held = [Source(name, kind, tensor) for name, kind, tensor in call.model.held() if call.backend.kind(tensor) == "f"]
    return found + [other for other in held if other != source]


def _in(backend: Backend, x: Tensor | None, dtype: str | None) -> Tensor | None:
    return x if x is None or dtype is None else backend.convert(x, dtype)


@dataclass(frozen=True)
class Differences:
    """Central differences of some elements of the target by one element of the source."""

    central: np.ndarray
    right: np.ndarray
    left: np.ndarray
    bound: np.ndarray
    """How far off the central ones may be, by rounding and by curvature."""


def differences(
    sampled: Sampled,
    base: np.ndarray | None,
    like: Tensor,
    of: np.ndarray,
    position: int,
    dtype: str,
    widths: Sequence[float] = WIDTHS,
    middle: np.ndarray | None = None,
) -> Differences:
    """Move one element both ways, by several widths."""
    here = 0.0 if base is None else float(base.reshape(-1)[position])
    size = SIZES[dtype] * max(1.0, abs(here))
    middle = sampled.read(_moved(sampled, like, [position], 0.0), of) if middle is None else middle
    sizes = [size * part for part in widths]
    pairs = [[sampled.read(_moved(sampled, like, [position], by), of) for by in (h, -h)] for h in sizes]
    slopes = [(up - down) / (2 * h) for h, (up, down) in zip(sizes, pairs, strict=True)]
    largest = np.maximum.reduce([np.abs(value) for pair in (*pairs, [middle]) for value in pair])
    bound = np.ptp(slopes, axis=0) + 8 * EPSILON[dtype] * largest / size
    (up, down), near = pairs[0], sizes[0]
    return Differences(slopes[0], (up - middle) / near, (middle - down) / near, bound)


def _moved(sampled: Sampled, x: Tensor, positions: Sequence[int], by: float) -> Tensor:
    shape = sampled.backend.shape(x)
    delta = np.zeros(int(np.prod(shape, dtype=int)))
    delta[list(positions)] = by
    with sampled.backend.precision(sampled.dtype):
        return x + sampled.backend.cast(delta.reshape(shape), x)


def moves(sampled: Sampled, base: Tensor, of: np.ndarray, wrt: Sequence[int], dtype: str) -> bool:
    """Whether the target's elements are others when the source's are moved, by a little or by a lot."""
    before = sampled.read(base, of)
    for size in (SIZES[dtype], 1.0):
        for sign in (1.0, -1.0):
            after = sampled.read(_moved(sampled, base, wrt, sign * size), of)
            if not np.array_equal(before, after, equal_nan=True):
                return True
    return False
