"""Explanations on JAX: a run of a function on its numbers, which can be followed again.

The records of one call of a public function, such as `jax.nn.softmax`, are merged into one. JAX's own rules tell which
results have a derivative. Sweeps over the same records follow tangents, cotangents and masks of elements, one operation
at a time.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from elementgrad._backends.autodiff import TensorFunction, reason
from elementgrad._backends.jax.autodiff import JaxLinearization, plain_errors
from elementgrad._backends.jax.explain_rules import (
    RANDOM_OPS,
    JaxOp,
    cause_of_cut,
    cause_of_zero_tangent,
    is_bound,
    is_differentiable,
    max_abs,
    max_or_nan,
    to_float64,
    user_line_of,
)
from elementgrad._backends.jax.trace import JaxOpRecorder, value_of
from elementgrad._explain.backend import ExplainBackend
from elementgrad._explain.trace import (
    CotangentSizes,
    FiniteFlags,
    Hint,
    Op,
    OpGraph,
    ReachOverlap,
    TangentSizes,
    Trace,
    largest_where,
    uneven_weights,
)
from elementgrad.errors import TracedError

Array = Any
LOOPS = {"while", "scan"}
"""Loops count their iterations in integers, which says nothing about their other results."""


class JaxTrace(Trace):
    """A function that ran on its numbers; the records serve all sweeps."""

    def __init__(self, run: TensorFunction, source: Array | None):
        if any(isinstance(x, jax.core.Tracer) for x in (source, *run.others)):
            raise TracedError("explain looks at numbers, and code that is traced has none; call it outside of jax.jit")
        self._run = run
        self._argument = source
        recorder = JaxOpRecorder(run.others)
        with plain_errors(), recorder.record_thread():
            (target,) = run(recorder.trace_source if source is None else recorder.trace_source(source))
        self.source, self.target = recorder.source.value, value_of(target)
        self._source_id, self._target_id = recorder.source.value_id, recorder.value_id(target)
        self._ops = merge_calls(recorder.ops, self._target_id)
        is_random = any(not RANDOM_OPS.isdisjoint({op.op_type, *op.inner}) for op in recorder.ops)
        self.graph = op_graph(self._ops, self._source_id, self._target_id, is_random)

    @cached_property
    def _linearization(self) -> JaxLinearization:
        return JaxLinearization.of(self._run, [self._argument])

    def gradient(self, of: np.ndarray, weights: np.ndarray) -> Array | None:
        (gradient,) = self._linearization.vjp(0, [0], _values_at(self.target, of, weights)[None])
        return None if gradient is None else gradient[0]

    def hint_for_error(self, error: Exception) -> Hint | None:
        why = f"jax refuses to differentiate it: {reason(error)}"
        exits = [op for op in self.graph.ops if op.cut_cause == "left-framework" and not op.branches]
        if isinstance(error, jax.errors.JAXTypeError) and exits:
            return Hint("left-framework", why, exits[0])
        for op, graph_op in zip(self._ops, self.graph.ops, strict=True):
            missing = self._vjp_error(op)
            if missing is not None:
                return Hint(graph_op.cut_cause or "no-rule", reason(missing), graph_op)
        # The function itself ran without an error, so that this one comes from tracing it.
        return Hint(None, why, Op("a transformation of jax", user_line_of(error)))

    def _vjp_error(self, op: JaxOp) -> Exception | None:
        """Return why an operation cannot be differentiated in reverse, if it cannot."""
        active = _active_operands(op, self.graph.connected)
        results = [n for n, value in enumerate(op.outputs) if value in self.graph.connected]
        if op.error is not None or not active or not results:
            return op.error
        try:
            op.vjp({n: jnp.zeros_like(op.results[n]) for n in results}, active)
        except Exception as error:
            return error
        return None

    def tangent_sizes(self, wrt: np.ndarray) -> tuple[Sequence[TangentSizes | None], np.ndarray] | None:
        tangents = {self._source_id: _values_at(self.source, wrt, uneven_weights(len(wrt)))}
        sizes = push_tangents(self._ops, self.graph.connected, tangents)
        if sizes is None:
            return None
        tangent = tangents.get(self._target_id)
        return sizes, np.zeros(self.target.shape) if tangent is None else np.asarray(tangent, np.float64)

    def cotangent_sizes(
        self, of: np.ndarray, weights: np.ndarray, wrt: np.ndarray
    ) -> Sequence[CotangentSizes | None] | None:
        cotangents = {self._target_id: _values_at(self.target, of, weights)}
        return pull_cotangents(self._ops, self.graph.connected, cotangents, (self._source_id, wrt))

    def reach_overlap(self, of: np.ndarray, weights: np.ndarray, wrt: np.ndarray) -> ReachOverlap | None:
        cotangents = {self._target_id: _values_at(self.target, of, weights)}
        if pull_cotangents(self._ops, self.graph.connected, cotangents) is None:
            return None
        masks = {self._source_id: _mask_at(self.source, wrt)}
        spread_masks(self._ops, masks)
        alive = {n for n, mask in masks.items() if n in cotangents and to_float64(cotangents[n])[mask].any()}
        return ReachOverlap(set(masks), alive)

    def finite_flags(self) -> Sequence[FiniteFlags | None] | None:
        return [_finite_flags(op) for op in self._ops]


class JaxExplain(ExplainBackend):
    name = "jax"

    def trace(self, run: TensorFunction, source: Array | None, probe: bool) -> Trace:
        return JaxTrace(run, source)

    def run_at(self, run: TensorFunction, tensors: Sequence[Array | None]) -> Sequence[Array]:
        return run(*tensors)

    def maybe_compile(self, function: Callable[[Array], Array]) -> Callable[[Array], Array]:
        return jax.jit(function)


implementation = JaxExplain()


def merge_calls(ops: Sequence[JaxOp], target: int) -> list[JaxOp]:
    """Make one operation of those that follow each other in one call.

    What such a function does inside is then its own business: a softmax subtracts its largest element without a
    derivative, and is differentiable all the same.
    """
    calls = [list(call) for _, call in groupby(ops, key=lambda op: id(op) if op.call is None else op.call)]
    last_use = {value: index for index, call in enumerate(calls) for op in call for value in op.inputs}
    last_use[target] = len(calls)
    return [call[0] if len(call) == 1 else _merge(call, index, last_use) for index, call in enumerate(calls)]


def _merge(call: Sequence[JaxOp], index: int, last_use: Mapping[int, int]) -> JaxOp:
    made = {value: x for op in call for value, x in zip(op.outputs, op.results, strict=True)}
    operands = {v: x for op in call for v, x in zip(op.inputs, op.operands, strict=True) if v not in made}
    results = {value: x for value, x in made.items() if last_use.get(value, -1) > index}

    def function(*xs: Array) -> list[Array]:
        values = dict(zip(operands, xs, strict=True))
        for op in call:
            values.update(zip(op.outputs, op.function(*[values[v] for v in op.inputs]), strict=True))
        return [values[v] for v in results]

    first = call[0]
    whole = JaxOp("call", first.operation, first.where, function, list(operands), list(operands.values()))
    whole.outputs, whole.results, whole.module = list(results), list(results.values()), first.module
    whole.inner = frozenset(name for op in call for name in op.inner)
    whole.unsafe = any(op.unsafe for op in call)
    whole.discrete_values = [x for op in call for x in op.results if not is_differentiable(x)]
    whole.written = _written_values(call)
    whole.hidden = all(op.hidden for op in call)
    whole.note = next((op.note for op in call if op.note), "")
    return whole


def _written_values(call: Sequence[JaxOp]) -> frozenset[int]:
    """Return the ids of the values that lead to an array that one of the operations writes into."""
    written: set[int] = set()
    for op in reversed(call):
        written |= op.written
        if not written.isdisjoint(op.outputs) and not op.written:
            written.update(op.inputs)
    return frozenset(written)


def op_graph(ops: Sequence[JaxOp], source: int, target: int, is_random: bool) -> OpGraph:
    """Connect the values that lead from the source by JAX's derivative, and note why the others do not."""
    # This waits until the run is over: it calls rules that the user wrote, which may expect to be called once in a run.
    connected = {source}
    for op in ops:
        active = [n for n, value in enumerate(op.inputs) if value in connected]
        if not active or op.cut_cause is not None:
            continue
        results = op.connected_results(active)
        connected.update([op.outputs[n] for n in results])
        if not results:
            op.cut_cause, note = cause_of_cut(op)
            op.note = op.note or note
        elif not op.note and op.op_type not in LOOPS and not all(map(is_differentiable, op.results)):
            op.cut_cause = "discrete"  # for the other results, such as the indices beside the largest
    graph_ops = [_graph_op(op) for op in ops]
    hints = [Hint("custom-rule", "", op) for op in graph_ops if op.custom_gradient and connected & set(op.outputs)]
    hints += [Hint("out-of-range", op.note, op) for op in graph_ops if op.note and op.cut_cause is None]
    return OpGraph(graph_ops, source, target, frozenset(connected), hints, is_random)


def _graph_op(op: JaxOp) -> Op:
    return Op(
        op.operation,
        op.where,
        op.module,
        tuple(op.inputs),
        tuple(op.outputs),
        op.cut_cause,
        op.note,
        op.custom_gradient,
        op.branches,
        hidden=op.hidden,
    )


def push_tangents(
    ops: Sequence[JaxOp], connected: Collection[int], tangents: dict[int, Array]
) -> list[TangentSizes | None] | None:
    """Push tangents through the operations, adding those of other values; return their sizes at each operation.

    None if an operation on the way has no rule.
    """
    sizes: list[TangentSizes | None] = []
    for op in ops:
        values = enumerate(op.inputs)
        arriving = {n: tangents[x] for n, x in values if x in tangents and is_differentiable(op.operands[n])}
        at_inputs = max_or_nan(map(max_abs, arriving.values()))
        leaving: dict[int, Array] = {}
        if at_inputs and any(value in connected for value in op.outputs):
            try:
                leaving = op.jvp(arriving)
            except Exception:
                return None
        at_outputs = max_or_nan(map(max_abs, leaving.values()))
        tangents.update({op.outputs[n]: tangent for n, tangent in leaving.items()})
        cause = cause_of_zero_tangent(op, arriving) if at_inputs > 0 and (at_outputs == 0 or is_bound(op)) else None
        sizes.append(TangentSizes(at_inputs, at_outputs, cause))
    return sizes


def pull_cotangents(
    ops: Sequence[JaxOp],
    connected: Collection[int],
    cotangents: dict[int, Array],
    chosen: tuple[int, np.ndarray] | None = None,
) -> list[CotangentSizes | None] | None:
    """Pull cotangents back through the operations, adding those of other values; return their sizes at each operation.

    With `chosen`, a value and flat positions, only those elements of the value count. None if an operation on the way
    has no rule.
    """
    sizes: list[CotangentSizes | None] = [None] * len(ops)
    for index, op in reversed(list(enumerate(ops))):
        arriving = {n: cotangents[value] for n, value in enumerate(op.outputs) if value in cotangents}
        active = _active_operands(op, connected)
        if not arriving or not active:
            continue
        try:
            leaving = op.vjp(arriving, active)
        except Exception:
            return None
        counted: list[Array] = []
        for n, g in leaving.items():
            value = op.inputs[n]
            cotangents[value] = cotangents[value] + g if value in cotangents else g
            if chosen is not None and chosen[0] == value:
                g = np.where(_mask_at(g, chosen[1]), to_float64(g), 0)
            counted.append(g)
        at_outputs, at_inputs = max_or_nan(map(max_abs, arriving.values())), max_or_nan(map(max_abs, counted))
        where_nonfinite = _size_where_nonfinite(list(arriving.values()), counted, at_outputs)
        sizes[index] = CotangentSizes(at_outputs, at_inputs, where_nonfinite, at_outputs == 0)
    return sizes


def _active_operands(op: JaxOp, connected: Collection[int]) -> list[int]:
    return [n for n, value in enumerate(op.inputs) if value in connected and is_differentiable(op.operands[n])]


def _size_where_nonfinite(arriving: Sequence[Array], leaving: Sequence[Array], at_outputs: float) -> float:
    """Return the largest cotangent that arrives where what leaves is not finite."""
    largest = None
    for bad in [~np.isfinite(to_float64(g)) for g in leaving]:
        if not bad.any():
            continue
        sizes = [size for g in arriving if (size := largest_where(to_float64(g), bad)) is not None]
        if not sizes:
            return at_outputs
        largest = max(largest or 0.0, max_or_nan(sizes))
    return at_outputs if largest is None else largest


def spread_masks(ops: Sequence[JaxOp], masks: dict[int, np.ndarray]) -> None:
    """Add masks of the elements of other values that can move with those in `masks`, at some numbers."""
    for op in ops:
        if any(value in masks for value in op.inputs):
            dependent = op.dependent_outputs([masks.get(value) for value in op.inputs])
            masks.update({n: mask for n, mask in zip(op.outputs, dependent, strict=True) if mask.any()})


def _finite_flags(op: JaxOp) -> FiniteFlags:
    operands = [to_float64(x) for x in op.operands if is_differentiable(x)]
    results = [to_float64(x) for x in op.results if is_differentiable(x)]
    overflows = all(x.all() for x in operands) and not any(np.isnan(x).any() for x in results)
    inputs, outputs = [all(np.isfinite(x).all() for x in values) for values in (operands, results)]
    return FiniteFlags(inputs, outputs, bool(overflows))


def _values_at(like: Array, positions: np.ndarray, values: np.ndarray) -> Array:
    """Return values at flat positions of an array like another, and zeros elsewhere."""
    flat = np.zeros(like.size)
    flat[positions] = values
    return jnp.asarray(flat.reshape(like.shape), like.dtype)


def _mask_at(like: Array, positions: np.ndarray) -> np.ndarray:
    mask = np.zeros(like.size, bool)
    mask[positions] = True
    return mask.reshape(like.shape)
