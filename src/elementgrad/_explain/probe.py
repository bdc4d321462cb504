"""Run the user's function at other numbers and in other precisions, to learn what one traced run cannot tell.

`SampledCall` is a call as a function of one of its tensors. `Probe` asks for `eg.explain` whether the target moves with
the chosen elements, whether a gradient is the slope of the values, and how large it is in another precision.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from elementgrad._backends.autodiff import Linearization
from elementgrad._backends.base import Backend
from elementgrad._explain.differences import EPSILON, DifferenceVerdict, LineFunctions, judge_gradients
from elementgrad._explain.replay import Replay
from elementgrad._explain.trace import uneven_weights
from elementgrad._names.call import BoundCall, Operand, PartialCall, TensorRef
from elementgrad.errors import TracedError

Tensor = Any
REAL = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}
"""The precision of a complex number's parts."""
COMPLEX = {real: name for name, real in REAL.items()}
ROUNDING = 64.0
"""A gradient or a change of a value below so many units of rounding may be nothing but rounding."""
MISMATCH = 0.02
"""A gradient counts as wrong if it is off by more of the slope than this."""
MOVES = (1.0, -100.0, 100.0)
"""How far elements move to see whether the target does."""
COMPILE_AFTER = 1.0
"""A function is compiled if the runs ahead would take more seconds than this."""


@dataclass(frozen=True)
class Probe:
    """A call, and the chosen elements of both sides."""

    call: BoundCall
    source: TensorRef
    target: TensorRef
    of_operand: Operand
    wrt_operand: Operand
    run_limit: int
    """How often the function may run in all."""

    @property
    def backend(self) -> Backend:
        return self.call.backend

    @property
    def dtype(self) -> str:
        """The precision in which the function is used: the coarser one of both sides."""
        names = [self.backend.dtype(operand.tensor) for operand in (self.of_operand, self.wrt_operand)]
        return max([name for name in names if name in EPSILON], key=EPSILON.__getitem__, default="float32")

    @property
    def of(self) -> np.ndarray:
        """The flat positions of the target's elements."""
        return positions(self.of_operand, self.backend)

    @property
    def wrt(self) -> np.ndarray:
        """The flat positions of the source's elements."""
        return positions(self.wrt_operand, self.backend)

    @property
    def seeds(self) -> tuple[np.ndarray, np.ndarray]:
        """The target's elements and a weight for each."""
        of = self.of
        return of, uneven_weights(len(of))

    def affords_run(self) -> bool:
        """Return True if the function may run once more."""
        return self.call.runs < self.run_limit

    def moves(self) -> bool | None:
        """Return True if the target changes when the source's elements move, by a little or by a lot.

        Several elements move by uneven amounts, since many functions see differences alone. Changes by rounding do not
        count. None if the function refuses all numbers that it is given, or has run often enough.
        """
        sampled, moves = SampledCall(self.call, self.source, self.target), None
        before = real_parts(self.backend, self.of_operand.tensor)[self.of]
        weights = uneven_weights(len(self.wrt))
        for by in MOVES:
            if not self.affords_run():
                break
            try:
                after = sampled.parts_at(sampled.move(self._base(), list(self.wrt), by * weights), self.of)
            except Exception:  # the user's function, at numbers that are not theirs
                continue
            if not np.allclose(before, after, rtol=ROUNDING * EPSILON[self.dtype], atol=0.0, equal_nan=True):
                return True
            moves = False
        return moves

    def mismatches(self, gradient: np.ndarray, replay: Replay) -> bool:
        """Return True if the largest element of the gradient is clearly not the slope of the values.

        Values of float32 are followed in float64 where all operations run in it: a small slope shows in no others.
        """
        position, entry = self._largest(gradient)
        verdict = self._compare(position, entry, replay, wide=True) if self.dtype == "float32" else None
        verdict = verdict or self._compare(position, entry, replay, wide=False)
        return verdict is not None and verdict.agrees is False and _is_off(entry, verdict.difference)

    def _largest(self, gradient: np.ndarray) -> tuple[int, float]:
        index = int(np.argmax(np.abs(gradient)))
        return int(self.wrt[index]), float(gradient[index])

    def _compare(self, position: int, entry: float, replay: Replay, wide: bool) -> DifferenceVerdict | None:
        """Compare an element of the gradient with differences; None if an operation cannot run at other numbers."""
        weights = self.seeds[1][None]
        try:
            values, numbers = [real_parts(self.backend, each.tensor) for each in (self.of_operand, self.wrt_operand)]
            unit = slope_unit(values, numbers, abs(entry))
            line = LineFunctions(
                lambda by: weights @ replay.target_at(position, by, wide),
                weights @ (replay.target_at(position, 0.0, wide) if wide else values[self.of]),
                float(numbers[position]),
                "float64" if wide else self.dtype,
                unit,
            )
            return judge_gradients(line, [entry], [abs(entry)])[0]
        except Exception:
            return None

    def mismatches_runs(self, gradient: np.ndarray) -> bool:
        """Return True if two runs of the function itself show another slope than the gradient.

        A replay knows nothing of what NumPy wrote to the memory of a tensor, which a run does again.
        """
        position, entry = self._largest(gradient)
        number = float(real_parts(self.backend, self.wrt_operand.tensor)[position])
        epsilon = EPSILON[self.dtype]
        step = epsilon ** (1 / 3) * max(1.0, abs(number))
        sampled, sides = SampledCall(self.call, self.source, self.target), []
        for by in (-step, step):
            if not self.affords_run():
                return False
            try:
                parts = sampled.parts_at(sampled.move(self._base(), [position], np.array([by])), self.of)
            except Exception:  # the user's function, at numbers that are not theirs
                return False
            sides.append(float(self.seeds[1] @ parts))
        slope = (sides[1] - sides[0]) / (2 * step)
        noise = ROUNDING * epsilon * max(map(abs, sides)) / step
        return _is_off(entry, slope, noise)

    def gradient_size(self, dtype: str = "float64") -> float | None:
        """Return the size of the gradient in another precision; None if the function does not accept it."""
        if not self.affords_run():
            return None
        try:
            gradient = SampledCall(self.call, self.source, self.target, dtype).gradient(*self.seeds)
        except Exception:  # the user's function is made for another precision
            return None
        return None if gradient is None else float(np.abs(gradient.reshape(-1)[self.wrt]).max(initial=0.0))

    def is_rounding(self, gradient: np.ndarray, largest: float, value: float) -> bool:
        """Return True if a gradient is mere rounding.

        Then the whole source has no larger one, and the size is another in another precision.
        """
        if largest > ROUNDING * EPSILON[self.dtype] * max(1.0, value):
            return False
        here = float(np.abs(gradient).max())
        if self.dtype == "float64":
            other = self.gradient_size("float32")
            return other is not None and other > 1e4 * here
        other = self.gradient_size()
        return other is not None and other < 1e-4 * here

    def _base(self) -> Tensor:
        """Return the source, or zeros to add to it where it exists only during the run."""
        like = self.wrt_operand.tensor
        return self.backend.zeros(tuple(self.backend.shape(like)), like) if self.source.computed else self.source.tensor


def _is_off(entry: float, slope: float, noise: float = 0.0) -> bool:
    return abs(slope - entry) > MISMATCH * max(abs(slope), abs(entry)) + noise


class SampledCall:
    """A call as a function of one of its tensors, with every floating one in the precision `dtype`, if it is given."""

    def __init__(self, call: BoundCall, source: TensorRef, target: TensorRef, dtype: str | None = None):
        self.backend: Backend = call.backend
        self._source = source
        others = [] if dtype is None else _other_floats(call, source)
        self._run = PartialCall(call, [source, *others], [target])
        self.tensors = [_convert(self.backend, each.tensor, dtype) for each in (source, *others)]
        self.dtype = dtype
        self._evaluate: Callable[[Tensor], Tensor] = self._run_once

    def __call__(self, x: Tensor) -> Tensor:
        """Return the target at a source of `x`; for a source that exists only during the run, `x` is added to it."""
        with self.backend.precision(self.dtype):
            return self._evaluate(x)

    def _run_once(self, x: Tensor) -> Tensor:
        (value,) = self.backend.load("explain").run_at(self._run, [x, *self.tensors[1:]])
        return value

    def find_steady(
        self, base: Tensor, runs_ahead: int, known: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the target's parts, and which of them stay the same, but for rounding, when the function runs again.

        `known` are the parts of a first run, if there was one. Where many slow runs are ahead, the function is
        compiled from here on, if that gives the same numbers.
        """
        before = real_parts(self.backend, self(base)) if known is None else known
        start = time.perf_counter()
        steady = self.is_same(before, base)
        if steady.all() and (time.perf_counter() - start) * runs_ahead > COMPILE_AFTER:
            self._evaluate = self.backend.load("explain").maybe_compile(self._run_once)
            try:
                faithful = bool(self.is_same(before, base).all())
            except Exception:  # the user's function cannot be traced
                faithful = False
            self._evaluate = self._evaluate if faithful else self._run_once
        return before, steady

    def is_same(self, before: np.ndarray, base: Tensor) -> np.ndarray:
        """Run again, and return which of the target's parts are the same as before, but for rounding."""
        value = self(base)
        after = real_parts(self.backend, value)
        tolerance = ROUNDING * EPSILON.get(precision_of(self.backend, value), 0.0)
        return np.isclose(after, before, rtol=tolerance, atol=0.0, equal_nan=True)

    def linearize(self) -> Linearization:
        with self.backend.precision(self.dtype):
            run = self._run
            single = _SingleTensorCall(run.call, run.sources[:1], run.targets, rest=(run.sources[1:], self.tensors[1:]))
            return self.backend.linearize(single, self.tensors[:1], False, 1)

    def gradient(self, of: np.ndarray, weights: np.ndarray) -> np.ndarray | None:
        """Return the gradient of a weighted sum of the target's elements; None if there is no path."""
        with self.backend.precision(self.dtype):
            gradient = weighted_gradient(self.backend, self.linearize(), of, weights)
            return None if gradient is None else self.backend.to_float64(gradient)

    def lowest_precision(self, known: str) -> str:
        """Return the lowest precision in which something is computed from the source, at most the `known` one."""
        with self.backend.precision(self.dtype):
            graph = self.backend.load("explain").record(self._run, self.tensors).trace(0, 0).graph
        pairs = [pair for op in graph.ops for pair in zip(op.outputs, op.results, strict=False)]
        names = [precision_of(self.backend, x) for value, x in pairs if value in graph.connected]
        return max([known, *[name for name in names if name in EPSILON]], key=EPSILON.__getitem__)

    def move(self, x: Tensor, parts: Sequence[int], by: float | np.ndarray) -> Tensor:
        """Return `x` with some of its real parts moved."""
        backend, shape = self.backend, self.backend.shape(x)
        dtype = np.complex128 if backend.kind(x) == "c" else np.float64
        delta = np.zeros(int(np.prod(shape, dtype=int)), dtype)
        delta.view(np.float64)[list(parts)] = by
        with backend.precision(self.dtype):
            return x + backend.cast(delta.reshape(shape), x)

    def parts_at(self, x: Tensor, of: np.ndarray) -> np.ndarray:
        """Return the target's parts at positions `of` for a source of `x`."""
        return real_parts(self.backend, self(x))[of]

    def parts_or_nan(self, x: Tensor, of: np.ndarray) -> np.ndarray:
        """Return the target's parts for a source that is not the user's; NaN where the function refuses it."""
        try:
            return self.parts_at(x, of)
        except Exception:  # as a distribution refuses a probability above one
            return np.full(len(of), np.nan)

    def source_parts(self) -> np.ndarray:
        """Return the source's parts, from its tensor or from a run that computes it."""
        if not self._source.computed:
            return real_parts(self.backend, self.tensors[0])
        run = PartialCall(self._run.call, self._run.sources, [self._source])
        with self.backend.precision(self.dtype):
            (value,) = self.backend.load("explain").run_at(run, self.tensors)
        return real_parts(self.backend, value)


def weighted_gradient(backend: Backend, linear: Linearization, of: np.ndarray, weights: np.ndarray) -> Tensor | None:
    """Return the gradient of a weighted sum of the target's elements at positions `of`; None if there is no path."""
    like = linear.value(0)
    seed = np.zeros((1, *backend.shape(like)))
    seed.reshape(-1)[of] = weights
    (gradient,) = linear.vjp(0, [0], backend.cast(seed, like))
    return None if gradient is None else backend.reshape(gradient, tuple(backend.shape(gradient))[1:])


@dataclass(frozen=True)
class _SingleTensorCall(PartialCall):
    """A call as a function of one tensor; `rest` has other numbers for others, by which there are no derivatives."""

    rest: tuple[Sequence[TensorRef], Sequence[Tensor]] = ((), ())

    def __call__(self, *tensors: Any) -> list[Tensor]:
        sources, values = self.rest
        return self.call.run([*self.sources, *sources], [*tensors, *values], self.targets, self.cuts, self.stops)


def _other_floats(call: BoundCall, source: TensorRef) -> list[TensorRef]:
    """Return the other floating inputs, and the floating tensors that the function holds."""
    inputs = [other for other in call.inputs if other != source and call.backend.kind(other.tensor) in "fc"]
    params = [
        TensorRef(name, kind, tensor)
        for name, kind, tensor in call.model.named_tensors()
        if call.backend.kind(tensor) in "fc"
    ]
    return inputs + [other for other in params if other != source]


def _convert(backend: Backend, x: Tensor | None, dtype: str | None) -> Tensor | None:
    if x is None or dtype is None:
        return x
    return backend.convert(x, COMPLEX.get(dtype, dtype) if backend.kind(x) == "c" else dtype)


def precision_of(backend: Backend, x: Tensor) -> str:
    """Return the floating dtype of a tensor's numbers, or of their real and imaginary parts."""
    name = backend.dtype(x)
    return REAL.get(name, name)


def real_parts(backend: Backend, x: Tensor) -> np.ndarray:
    """Return the values as float64 in one row; real and imaginary parts of complex numbers alternate."""
    values = backend.read(backend.convert(x, "complex128")) if backend.kind(x) == "c" else backend.to_float64(x)
    if values is None:
        raise TracedError(
            "numbers of what is checked cannot be read, since they are sparse or being traced; give dense tensors, and "
            "check outside of jit, vmap and tf.function"
        )
    if values.dtype.kind == "c":
        values = np.ascontiguousarray(values, np.complex128).view(np.float64)
    return values.reshape(-1)


def positions(operand: Operand, backend: Backend) -> np.ndarray:
    """Return the flat positions of an operand's elements."""
    return np.asarray(operand.select(..., backend).flat()).reshape(-1)


def part_positions(operand: Operand, backend: Backend) -> np.ndarray:
    """Return the positions of an operand's elements in the `real_parts` of its tensor."""
    flat = positions(operand, backend)
    return (2 * flat[:, None] + [0, 1]).reshape(-1) if backend.kind(operand.tensor) == "c" else flat


def slope_unit(values: np.ndarray, numbers: np.ndarray, gradient: float) -> float:
    """Estimate how large the slopes of a function are, by the sizes of its values, numbers and gradient.

    Numbers far below one are not taken at face value: they may be added to larger ones.
    """
    y, x = (float(np.max(np.abs(each[np.isfinite(each)]), initial=0.0)) for each in (values, numbers))
    slope = min(y / x if x else math.inf, max(1.0, y / max(1.0, x)))
    return max(slope if y else 1.0, gradient if math.isfinite(gradient) else 0.0)
