"""The same function in another precision and at other numbers, to hold a gradient against."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from elementgrad.backends import Backend
from elementgrad.backends.linear import Linear
from elementgrad.backends.witness import weights
from elementgrad.errors import TracedError
from elementgrad.source import Source
from elementgrad.trace import Call, Run

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
    values = backend.read(backend.convert(x, "complex128")) if backend.kind(x) == "c" else backend.floats(x)
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


class Sampled:
    """A call as a function of one of its tensors, with every floating one in a precision of choice."""

    def __init__(self, call: Call, source: Source, target: Source, dtype: str | None = None):
        self.backend: Backend = call.backend
        self._source = source
        others = [] if dtype is None else _floats(call, source)
        self._run = Run(call, [source, *others], [target])
        self.tensors = [_in(self.backend, each.tensor, dtype) for each in (source, *others)]
        self.dtype = dtype
        self._sample: Callable[[Tensor], Tensor] = self._once

    def __call__(self, x: Tensor) -> Tensor:
        """The target, for a source that is given; for one that the run meets, what is added to it."""
        with self.backend.precision(self.dtype):
            return self._sample(x)

    def _once(self, x: Tensor) -> Tensor:
        (value,) = self.backend.sample(self._run, [x, *self.tensors[1:]])
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
            self._sample = self.backend.swift(self._once)
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
        if not self._source.met:
            return parts(self.backend, self.tensors[0])
        run = Run(self._run.call, self._run.sources, [self._source])
        with self.backend.precision(self.dtype):
            (value,) = self.backend.sample(run, self.tensors)
        return parts(self.backend, value)


def unit(values: np.ndarray, numbers: np.ndarray, gradient: float) -> float:
    """Return about how large the slopes of a function are, by the sizes of its values, numbers and gradient.

    Numbers that are far below one are not taken at their word: what they are added to may not be.
    """
    y, x = (float(np.max(np.abs(each[np.isfinite(each)]), initial=0.0)) for each in (values, numbers))
    slope = min(y / x if x else math.inf, max(1.0, y / max(1.0, x)))
    return max(slope if y else 1.0, gradient if math.isfinite(gradient) else 0.0)


@dataclass(frozen=True)
class _Alone(Run):
    """A call as a function of one tensor, in which others have other numbers and no derivatives: some cannot."""

    rest: tuple[Sequence[Source], Sequence[Tensor]] = ((), ())

    def __call__(self, *tensors: Any) -> list[Tensor]:
        sources, values = self.rest
        return self.call.run([*self.sources, *sources], [*tensors, *values], self.targets, self.cuts)


def _floats(call: Call, source: Source) -> list[Source]:
    """The floating inputs, and what the function holds."""
    found = [other for other in call.inputs if other != source and call.backend.kind(other.tensor) in "fc"]
    held = [Source(name, kind, tensor) for name, kind, tensor in call.model.held() if call.backend.kind(tensor) in "fc"]
    return found + [other for other in held if other != source]


def _in(backend: Backend, x: Tensor | None, dtype: str | None) -> Tensor | None:
    if x is None or dtype is None:
        return x
    return backend.convert(x, COMPLEX.get(dtype, dtype) if backend.kind(x) == "c" else dtype)


def moved(sampled: Sampled, x: Tensor, places: Sequence[int], by: float | np.ndarray) -> Tensor:
    """x with some of its parts moved."""
    backend, shape = sampled.backend, sampled.backend.shape(x)
    made_of = np.complex128 if backend.kind(x) == "c" else np.float64
    delta = np.zeros(int(np.prod(shape, dtype=int)), made_of)
    delta.view(np.float64)[list(places)] = by
    with backend.precision(sampled.dtype):
        return x + backend.cast(delta.reshape(shape), x)


def moves(sampled: Sampled, base: Tensor, of: np.ndarray, wrt: Sequence[int], dtype: str) -> bool | None:
    """Whether the target's elements are others when the source's are moved, by a little or by a lot.

    Several are moved by uneven amounts: many functions are of differences alone. What rounding makes of it counts for
    nothing. None if the function refuses all that it is given.
    """
    before = sampled.read(base, of)
    amounts = weights(len(wrt))
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
