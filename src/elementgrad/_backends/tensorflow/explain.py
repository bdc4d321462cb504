"""Explanations on TensorFlow: a traced run of a function, or a report on a training step that runs as it is.

Both run the user's code eagerly under a recorder, with compiled functions as plain Python. `op_graph` connects what was
recorded by the gradient functions of the operations. Sweeps over the same records follow tangents, cotangents and
masks of elements, one operation at a time.
"""

import math
import traceback
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import tensorflow as tf

from elementgrad._backends.autodiff import TensorFunction
from elementgrad._backends.source_location import location_text
from elementgrad._backends.tensorflow._compat import is_about_gradients, is_tape_used_up, op_type_without_gradient
from elementgrad._backends.tensorflow.autodiff import came_through_function, copy_tensor, run_functions_as_python
from elementgrad._backends.tensorflow.explain_rules import (
    TensorflowOp,
    cause_at_bound,
    cause_of_cut,
    cause_of_zero_tangent,
    is_differentiable,
    is_random,
    max_abs,
    out_of_range,
    zeros_like,
)
from elementgrad._backends.tensorflow.isolate import isolated, without_log
from elementgrad._backends.tensorflow.names import KerasModel
from elementgrad._backends.tensorflow.trace import Leaf, TapeRequest, TensorflowOpRecorder, is_user_file
from elementgrad._cleanup import assign, enter, scope
from elementgrad._explain.backend import ExplainBackend
from elementgrad._explain.trace import (
    MOVING_STATISTIC,
    CotangentSizes,
    FiniteFlags,
    Hint,
    LiveReport,
    Op,
    OpGraph,
    ReachOverlap,
    TangentSizes,
    Trace,
    Verdict,
    cannot_follow,
    largest_where,
    uneven_weights,
)
from elementgrad.errors import ElementgradError, FrameworkError, UnconnectedError

Tensor = Any
GapCause = Callable[[int, TensorflowOp], str | None]
"""Returns why a tape did not record the operation at an index, or None if it did."""
SLICING = ("indexing", "gather", "slice", "reshape")


class TensorflowTrace(Trace):
    """A function that ran eagerly on a tape; the records serve all sweeps."""

    def __init__(self, run: TensorFunction, source: Tensor | None, probe: bool):
        _require_eager()
        self._run = run
        self._argument = source
        self._holds_source = run.held[0]
        self._later_ids: Sequence[int] = ()
        """Of a source that is a variable, the values after writes to it."""
        try:
            recorder = self._record(run_functions_as_python())
        except FrameworkError:
            if not self._explain_inner_tape():  # the function returns what its own tape gave, and that is None
                raise
            return
        except ElementgradError:
            raise
        except Exception as error:  # some code runs only where it is compiled; then such a function is one operation
            if not came_through_function(error):
                raise
            recorder = self._record(nullcontext())
        self._target_id = recorder.value_id(self.target)
        self._ops: Sequence[TensorflowOp] = [*recorder.ops, *self._unrecorded_paths(recorder, probe)]
        handle = getattr(self.source, "handle", None)
        self._later_ids = () if handle is None else recorder.variable_values[handle._id]
        self.graph = op_graph(
            self._ops,
            self._source_id,
            self._target_id,
            lambda _, op: None if op.recorded else "outside-tape",
            _frozen_hints(run, source),
            self._later_ids,
        )

    def _record(self, stage: Any, change: Callable[[Tensor], Tensor] | None = None) -> TensorflowOpRecorder:
        """Run the function, with a changed source if `change` is given."""
        self._recorder = recorder = TensorflowOpRecorder(self._run.model, TensorflowTrace._record.__code__)
        self._tape = tf.GradientTape(persistent=True, watch_accessed_variables=False)

        def start(x: Tensor) -> Tensor:
            if self._holds_source and change is not None:
                x.assign(change(x))
            self.source = x if self._holds_source else copy_tensor(x if change is None else change(x))
            self._tape.watch(self.source)
            self._source_id = recorder.new_id(getattr(self.source, "handle", self.source))
            return self.source

        with isolated():
            enter(self._tape)
            source: Any = start if self._argument is None else start(self._argument)
            with stage, recorder.record_thread():
                (target,) = self._run(None if self._holds_source else source)  # it reads its own variable itself
                self.target = tf.convert_to_tensor(target)
        if recorder.error is not None:
            raise recorder.error
        return recorder

    def _explain_inner_tape(self) -> bool:
        """Trace the gradient for the source that a tape of the user's did not give, if there is one."""
        for request in self._recorder.tapes.requests:
            if request.result is None and request.source_id == self._source_id:
                self._ops, self.target, self._target_id = request.ops, request.target, request.target_id
                self.graph = _request_graph(request)
                self._tape = None
                return True
        return False

    def _unrecorded_paths(self, recorder: TensorflowOpRecorder, probe: bool) -> list[TensorflowOp]:
        """Return operations for ways from the source that none shows: through NumPy, or around the function."""
        dependent, leading = {self._source_id}, {self._target_id}
        for op in recorder.ops:
            if not dependent.isdisjoint(op.inputs):
                dependent.update(op.outputs)
        exits = [op for op in recorder.ops if op.cut_cause is not None and not op.branches]
        if self._target_id in dependent or any(not dependent.isdisjoint(op.inputs) for op in exits):
            return []
        for op in reversed(recorder.ops):
            if not leading.isdisjoint(op.outputs):
                leading.update(op.inputs)
        outside = [leaf for leaf in recorder.outside_tensors() if leaf[0] in leading and self._is_source(leaf[1])]
        if outside:
            return [_closure_op(self._source_id, value, where) for value, _, where in outside]
        imported = [leaf for leaf in recorder.imported_tensors() if probe and leaf[0] in leading]
        return [
            TensorflowOp("", "numpy", where, "", (self._source_id,), (value,), cut_cause="left-framework")
            for value, _, where in (self._filter_dependent(imported) if imported else ())
        ]

    def _is_source(self, x: Tensor) -> bool:
        """Return True if a tensor from before the run is the source itself, or cut out of it."""
        if any(x is other for other in self._run.others):
            return False
        source: Any = self._argument
        if x is source:
            return True
        if not hasattr(source, "_id") or x._id < source._id:
            return False
        return bool(np.isin(x.numpy(), source.numpy()).all())

    def _filter_dependent(self, imported: Sequence[Leaf]) -> list[Leaf]:
        """Return the tensors made of plain numbers that change in a run with a slightly different source."""
        try:
            with scope():
                for name in ("source", "target", "_tape", "_source_id"):
                    assign(self, name, getattr(self, name))
                recorder = self._record(run_functions_as_python(), _nudge)
        except Exception:  # it is the user's function, at numbers that were not theirs
            return []
        after = {value: x.numpy() for value, x, _ in recorder.imported_tensors()}
        return [
            (value, x, where)
            for value, x, where in imported
            if value in after and not np.array_equal(x.numpy(), after[value], equal_nan=True)
        ]

    def gradient(self, of: np.ndarray, weights: np.ndarray) -> Tensor | None:
        if self._tape is None:
            return None
        with isolated():
            seed = _values_at(self.target, of, weights)
            gradient = self._tape.gradient(self.target, self.source, output_gradients=seed)
        return None if gradient is None else tf.convert_to_tensor(gradient)

    def hint_for_error(self, error: Exception) -> Hint | None:
        if not isinstance(error, (LookupError, NotImplementedError)):
            return None
        op = next((op for op in self.graph.ops if op.cut_cause == "no-rule"), None)
        return Hint("no-rule", str(error).strip("'\""), op)

    def tangent_sizes(self, wrt: np.ndarray) -> tuple[Sequence[TangentSizes | None], np.ndarray] | None:
        seed = _values_at(self.source, wrt, uneven_weights(len(wrt)))
        tangents = dict.fromkeys([self._source_id, *self._later_ids], seed)
        try:
            with isolated(), without_log():
                sizes = push_tangents(self._ops, self.graph.connected, tangents)
        except (LookupError, NotImplementedError, TypeError, ValueError, tf.errors.OpError):
            return None  # a gradient function has no derivative of its own
        tangent = tangents.get(self._target_id)
        return sizes, np.zeros(tuple(self.target.shape)) if tangent is None else tf.cast(tangent, tf.float64).numpy()

    def cotangent_sizes(
        self, of: np.ndarray, weights: np.ndarray, wrt: np.ndarray
    ) -> Sequence[CotangentSizes | None] | None:
        cotangents = {self._target_id: _values_at(self.target, of, weights)}
        with isolated(), without_log():
            return pull_cotangents(self._ops, self.graph.connected, cotangents, (self._source_id, wrt))

    def reach_overlap(self, of: np.ndarray, weights: np.ndarray, wrt: np.ndarray) -> ReachOverlap | None:
        cotangents = {self._target_id: _values_at(self.target, of, weights)}
        with isolated(), without_log():
            pull_cotangents(self._ops, self.graph.connected, cotangents)
            masks = dict.fromkeys([self._source_id, *self._later_ids], _mask_at(self.source, wrt))
            spread_masks(self._ops, masks)
        alive = {n for n, mask in masks.items() if n in cotangents and cotangents[n].numpy()[mask].any()}
        return ReachOverlap(set(masks), alive)

    def finite_flags(self) -> Sequence[FiniteFlags | None] | None:
        return [_finite_flags(op) for op in self._ops]


class TensorflowExplain(ExplainBackend):
    name = "tensorflow"

    def trace(self, run: TensorFunction, source: Tensor | None, probe: bool) -> Trace:
        return TensorflowTrace(run, source, probe)

    def run_at(self, run: TensorFunction, tensors: Sequence[Tensor | None]) -> Sequence[Tensor]:
        with isolated():
            return run(*tensors)

    def report_step(self, function: Callable[[], Any], wrt: Tensor | None) -> LiveReport:
        # It reports on the first gradient that is None, or else the last one for `wrt`.
        _require_eager()
        recorder = TensorflowOpRecorder(KerasModel(function), TensorflowExplain.report_step.__code__)
        try:
            with run_functions_as_python(), recorder.record_thread():
                function()
        except Exception as error:
            report = _report_error(recorder, error, wrt)
            if report is None:
                raise
            return report
        requests = _requests_for(recorder, wrt)
        missing = [request for request in requests if request.result is None]
        if recorder.error is not None:
            return _report_unfollowed("unconnected" if missing else "flows", recorder.error)
        if wrt is not None and not requests:
            return LiveReport("unconnected", None, Hint("unused", "no tape was asked for it"), wrt="the tensor")
        if missing:
            return _report_request(missing[0])
        return LiveReport("flows") if wrt is None else _report_request(requests[-1])


implementation = TensorflowExplain()


def _require_eager() -> None:
    if not tf.executing_eagerly():
        raise FrameworkError("eg.explain inside tf.function, where there are no numbers yet; call it outside")


def _report_error(recorder: TensorflowOpRecorder, error: Exception, wrt: Tensor | None) -> LiveReport | None:
    if is_tape_used_up(error):
        return LiveReport("unconnected", None, Hint("freed-graph", "", Op("tape.gradient", _user_line_of(error))))
    op_type = op_type_without_gradient(error)
    if op_type is not None:
        ops = [Op(op.operation, op.where, op.module) for op in recorder.ops if op.op_type == op_type]
        return LiveReport("unconnected", None, Hint("no-rule", str(error).strip("'\""), ops[-1] if ops else None))
    missing = [request for request in _requests_for(recorder, wrt) if request.result is None]
    if recorder.error is not None and missing:
        return _report_unfollowed("unconnected", recorder.error)
    if missing and (isinstance(error, UnconnectedError) or is_about_gradients(error)):
        return _report_request(missing[0])
    return None


def _report_unfollowed(verdict: Verdict, error: Exception) -> LiveReport:
    return LiveReport(verdict, None, Hint(None, cannot_follow(error)))


def _requests_for(recorder: TensorflowOpRecorder, wrt: Tensor | None) -> Sequence[TapeRequest]:
    requests, handle = recorder.tapes.requests, getattr(wrt, "handle", wrt)
    return [each for each in requests if wrt is None or getattr(each.source, "handle", each.source) is handle]


def _report_request(request: TapeRequest) -> LiveReport:
    graph = _request_graph(request)
    wrt = getattr(request.source, "path", None) or "the tensor"
    if request.result is None:
        hints = [hint for hint in graph.hints if hint.cause != "custom-rule"]
        return LiveReport("unconnected", graph, hints[0] if hints else None, wrt=wrt)
    value = tf.convert_to_tensor(request.result)
    finite = bool(tf.reduce_all(tf.math.is_finite(tf.abs(value))))
    verdict: Verdict = "nonfinite" if not finite else "flows" if bool(tf.reduce_any(value != 0)) else "zero"
    if verdict == "flows":
        return LiveReport("flows", value=value, wrt=wrt)
    sizes = pull_cotangents(request.ops, graph.connected, {request.target_id: tf.ones_like(request.target)})
    return LiveReport(verdict, graph, None, value=value, cotangents=sizes, wrt=wrt)


def _user_line_of(error: Exception) -> str | None:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_user_file(frame.filename)]
    return location_text(frames[-1].filename, frames[-1].lineno or 0) if frames else None


def _request_graph(request: TapeRequest) -> OpGraph:
    """Return the operations from a tape's source to its target, and where the tape lost the path."""
    tape, source = request.tape, request.source_id
    watched_from = 0 if hasattr(request.source, "handle") else tape.watched.get(source, 0)
    closures = [_closure_op(source, value, where) for value, where in request.slices]

    def gap_cause(index: int, op: TensorflowOp) -> str | None:
        index -= len(closures)
        if not tape.records_at(index):
            return "inner-gradient" if op.in_gradient else tape.gap_cause(index)
        if not op.recorded:
            return "outside-tape"
        return "not-tracked" if index < watched_from and source in op.inputs else None

    hint = _source_hint(request)
    hints = [] if hint is None else [hint]
    return op_graph([*closures, *request.ops], source, request.target_id, gap_cause, hints)


def _closure_op(source: int, value: int, where: str | None) -> TensorflowOp:
    """Return the operation that stands for a tensor that was cut out of the source before the run."""
    return TensorflowOp("", "a closed-over tensor", where, "", (source,), (value,), cut_cause="outside-tape")


def _source_hint(request: TapeRequest) -> Hint | None:
    """Return the cause that shows in a tape's source alone."""
    source, tape = request.source, request.tape.tape
    dtype = tf.as_dtype(source.dtype)
    if not dtype.is_floating and not dtype.is_complex:
        return Hint("integer", f"it is of dtype {dtype.name}")
    if hasattr(source, "handle"):
        if any(variable.handle is source.handle for variable in tape.watched_variables()):
            return None
        if not tape._watch_accessed_variables:
            return Hint("not-tracked", "the tape has watch_accessed_variables=False")
        return None if source.trainable else Hint("not-tracked", "its trainable is False")
    tracked = _tracked_values(request)
    if request.source_id in tracked:
        return None
    maker = next((op for op in request.ops if request.source_id in op.outputs), None)
    if maker is not None and maker.operation in SLICING and maker.inputs[0] in tracked:
        return Hint("resliced", "", Op(maker.operation, maker.where, maker.module))
    if any(request.source_id in op.inputs for op in request.ops):
        return Hint("not-tracked", "the tape does not watch it")
    if request.is_slice:
        return Hint("resliced", "it was cut out of what the tape watches before, and is not used itself")
    return Hint("unused", "no step takes it")


def _tracked_values(request: TapeRequest) -> set[int]:
    """Return the values that a tape watches, and those computed from them while it recorded."""
    tape = request.tape
    tracked = set(tape.watched)
    for variable in tape.tape.watched_variables():
        tracked.update(request.variable_values.get(variable.handle._id, ()))
    for index, op in enumerate(request.ops):
        if tape.records_at(index) and not tracked.isdisjoint(op.inputs):
            tracked.update(op.outputs)
    return tracked


def _frozen_hints(run: TensorFunction, source: Tensor | None) -> list[Hint]:
    if not isinstance(source, tf.Variable):
        return []
    variables = run.model._variables() if isinstance(run.model, KerasModel) else ()
    frozen = [
        (kind, variable) for _, kind, variable in variables if variable._value is source and not variable.trainable
    ]
    if not frozen and source.trainable:
        return []
    is_statistic = any(kind == "buffer" for kind, _ in frozen)  # unfreezing a layer does not train it
    return [Hint("not-tracked", "its trainable is False", Op(MOVING_STATISTIC) if is_statistic else None)]


def op_graph(
    ops: Sequence[TensorflowOp],
    source: int,
    target: int,
    gap_cause: GapCause,
    hints: Sequence[Hint] = (),
    aliases: Collection[int] = (),
) -> OpGraph:
    """Connect the values that lead from the source, or from its `aliases`, and note why the others do not."""
    connected = {source, *aliases}
    with without_log():
        graph_ops = [_graph_op(index, op, connected, gap_cause) for index, op in enumerate(ops)]
    reading = [(op, record) for op, record in zip(graph_ops, ops, strict=True) if not connected.isdisjoint(op.inputs)]
    custom = [op for op, _ in reading if op.custom_gradient and not connected.isdisjoint(op.outputs)]
    hints = [*hints, *[Hint("custom-rule", "", op) for op in custom]]
    hints += [Hint("out-of-range", note, op) for op, record in reading if (note := out_of_range(record))]
    return OpGraph(graph_ops, source, target, frozenset(connected), hints, any(map(is_random, ops)))


def _graph_op(index: int, op: TensorflowOp, connected: set[int], gap_cause: GapCause) -> Op:
    cut_cause, note = op.cut_cause, ""
    if cut_cause is None and not connected.isdisjoint(op.inputs):
        cut_cause, note = _connect(index, op, connected, gap_cause)
    return Op(
        "tape.gradient" if cut_cause == "inner-gradient" else op.operation,
        op.where,
        op.module,
        tuple(sorted(op.inputs, key=lambda value: value not in connected)),  # the path goes through the first
        op.outputs,
        cut_cause,
        note,
        op.custom_gradient,
        op.branches,
        op.from_python,
        opaque=op.op_type == "Identity",
    )


def _connect(index: int, op: TensorflowOp, connected: set[int], gap_cause: GapCause) -> tuple[str | None, str]:
    """Add the outputs that have a derivative to `connected`; return why the others have none, and an observation."""
    if not op.results:
        return "assigned-state", "a variable keeps numbers and not where they came from"
    gap = gap_cause(index, op)
    if gap is not None and any(map(is_differentiable, op.results)):
        return ("detached", "") if op.op_type == "StopGradient" else (gap, "")
    try:
        passing = op.differentiable_operands
    except (LookupError, NotImplementedError) as error:
        return "no-rule", (str(error).strip("'\" ").splitlines() or [""])[0]
    if any(value in connected and passes for value, passes in zip(op.inputs, passing, strict=False)):
        connected.update([n for n, y in zip(op.outputs, op.results, strict=True) if is_differentiable(y)])
    if not any(value in connected for value in op.outputs):
        return cause_of_cut(op)
    discrete = [y for y in op.results if not is_differentiable(y)]  # such as the indices beside the largest
    return ("discrete", f"{discrete[0].dtype.name} comes out") if discrete else (None, "")


def push_tangents(
    ops: Sequence[TensorflowOp], connected: Collection[int], tangents: dict[int, Tensor]
) -> list[TangentSizes | None]:
    """Push tangents through the operations, adding those of other values; return their sizes at each operation."""
    sizes: list[TangentSizes | None] = []
    for op in ops:
        arriving = [tangents.get(value) for value in op.inputs]
        at_inputs = max([max_abs(t) for t in arriving if t is not None], default=0.0)
        if not op.operands or at_inputs == 0:
            sizes.append(TangentSizes(0.0, 0.0) if op.operands else None)
            continue
        if not op.results:  # a write to a variable, which keeps only numbers
            sizes.append(TangentSizes(at_inputs, 0.0))
            continue
        leaving: list[Tensor | None] = [None] * len(op.results)
        if not set(op.outputs).isdisjoint(connected):
            leaving = op.jvp(arriving)
        tangents.update({n: t for n, t in zip(op.outputs, leaving, strict=False) if t is not None})
        at_outputs = max([max_abs(t) for t in leaving if t is not None], default=0.0)
        cause = cause_of_zero_tangent(op, arriving) if at_outputs == 0 else cause_at_bound(op, arriving)
        sizes.append(TangentSizes(at_inputs, at_outputs, cause))
    return sizes


def pull_cotangents(
    ops: Sequence[TensorflowOp],
    connected: Collection[int],
    cotangents: dict[int, Tensor],
    chosen: tuple[int, np.ndarray] | None = None,
) -> list[CotangentSizes | None]:
    """Pull cotangents back through the operations, adding those of other values; return their sizes at each operation.

    With `chosen`, a value and flat positions, only those elements of the value count.
    """
    sizes: list[CotangentSizes | None] = [None] * len(ops)
    for index, op in reversed(list(enumerate(ops))):
        arriving = [cotangents.get(value) for value in op.outputs]
        if (
            all(g is None for g in arriving)
            or set(op.inputs).isdisjoint(connected)
            or not op.results
            or not op.operands
        ):
            continue
        seeds = [zeros_like(y) if g is None else g for g, y in zip(arriving, op.results, strict=True)]
        leaving = op.vjp(seeds) if not set(op.outputs).isdisjoint(connected) else [None] * len(op.operands)
        at_outputs = _max_or_nan([max_abs(g) for g in arriving if g is not None])
        at_inputs, where_nonfinite = 0.0, None
        for value, g in zip(op.inputs, leaving, strict=False):
            if g is None or value not in connected:
                continue
            cotangents[value] = cotangents[value] + g if value in cotangents else g
            if chosen is not None and chosen[0] == value:
                g = tf.where(_mask_at(g, chosen[1]), g, tf.zeros_like(g))
            size = max_abs(g)
            at_inputs = _max_or_nan([at_inputs, size])
            if not math.isfinite(size):
                bad = ~np.isfinite(np.abs(g.numpy()))
                first = arriving[0]
                there = None if first is None else largest_where(np.abs(tf.cast(first, tf.float64).numpy()), bad)
                where_nonfinite = max(where_nonfinite or 0.0, at_outputs if there is None else there)
        where_nonfinite = at_outputs if where_nonfinite is None else where_nonfinite
        sizes[index] = CotangentSizes(at_outputs, at_inputs, where_nonfinite, at_outputs == 0)
    return sizes


def spread_masks(ops: Sequence[TensorflowOp], masks: dict[int, np.ndarray]) -> None:
    """Add masks of the elements of other values that can move with those in `masks`, at some numbers."""
    for op in ops:
        if any(value in masks for value in op.inputs):
            dependent = op.dependent_outputs([masks.get(value) for value in op.inputs])
            masks.update({n: mask for n, mask in zip(op.outputs, dependent, strict=False) if mask.any()})


def _finite_flags(op: TensorflowOp) -> FiniteFlags | None:
    if not op.operands:
        return None
    operands, results = list(filter(is_differentiable, op.operands)), list(filter(is_differentiable, op.results))
    overflows = all(np.all(x.numpy()) for x in operands) and not any(np.isnan(y.numpy()).any() for y in results)
    return FiniteFlags(all(map(_is_finite, operands)), all(map(_is_finite, results)), overflows)


def _is_finite(x: Tensor) -> bool:
    return bool(tf.reduce_all(tf.math.is_finite(tf.abs(x))))


def _max_or_nan(sizes: Sequence[float]) -> float:
    return math.nan if any(map(math.isnan, sizes)) else max(sizes, default=0.0)


def _values_at(like: Tensor, positions: np.ndarray, values: np.ndarray) -> Tensor:
    """Return values at flat positions of a tensor like another, and zeros elsewhere."""
    flat = np.zeros(math.prod(like.shape))
    flat[positions] = values
    return tf.cast(flat.reshape(tuple(like.shape)), like.dtype)


def _mask_at(like: Tensor, positions: np.ndarray) -> np.ndarray:
    mask = np.zeros(math.prod(like.shape), bool)
    mask[positions] = True
    return mask.reshape(tuple(like.shape))


def _nudge(x: Tensor) -> Tensor:
    return tf.convert_to_tensor(x) * tf.cast(1.0078125, x.dtype) + tf.cast(0.0078125, x.dtype)
