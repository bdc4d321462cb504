"""Explanations on TensorFlow: a traced run of a function, or a report on a training step that runs as it is.

Both run the user's code eagerly under a recorder, with compiled functions as plain Python. `op_graph` connects what was
recorded by the gradient functions of the operations.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from elementgrad._backends.autodiff import TensorFunction
from elementgrad._backends.source_location import user_line_of
from elementgrad._backends.tensorflow._compat import is_about_gradients, is_tape_used_up, op_type_without_gradient
from elementgrad._backends.tensorflow.autodiff import came_through_function, copy_tensor, run_functions_as_python
from elementgrad._backends.tensorflow.explain_rules import (
    CUTS,
    NUMBERS,
    TensorflowOp,
    is_random,
)
from elementgrad._backends.tensorflow.isolate import isolated, without_log
from elementgrad._backends.tensorflow.names import KerasModel
from elementgrad._backends.tensorflow.trace import TapeRequest, TensorflowOpRecorder, is_user_file
from elementgrad._cleanup import enter
from elementgrad._explain.backend import ExplainBackend
from elementgrad._explain.connect import Cut, connect
from elementgrad._explain.path import DataPath
from elementgrad._explain.trace import (
    MOVING_STATISTIC,
    Hint,
    LiveReport,
    Op,
    OpGraph,
    Record,
    Trace,
)
from elementgrad.errors import ElementgradError, FrameworkError, UnconnectedError

Tensor = Any
SLICING = ("indexing", "gather", "gather_nd", "embedding_lookup", "slice", "reshape")


class TensorflowRecord(Record):
    """A function that ran eagerly on a tape."""

    def __init__(self, run: TensorFunction, sources: Sequence[Tensor | None]):
        _require_eager()
        self.run, self.arguments = run, sources
        self.error: FrameworkError | None = None
        compiles = False
        try:
            self.recorder = self.record(run_functions_as_python())
        except FrameworkError as error:  # it may return what its own tape gave, and that is None
            if not any(request.result is None for request in self.recorder.tapes.requests):
                raise
            self.error = error
        except ElementgradError:
            raise
        except Exception as error:  # some code runs only where it is compiled; then such a function is one operation
            if not came_through_function(error):
                raise
            compiles = True
        if compiles:
            self.recorder = self.record(nullcontext())

    def record(self, stage: Any) -> TensorflowOpRecorder:
        """Run the function."""
        self.recorder = recorder = TensorflowOpRecorder(self.run.model, TensorflowRecord.record.__code__)
        self.tape = tf.GradientTape(persistent=True, watch_accessed_variables=False)
        self.started = started = dict[int, tuple[Tensor, int]]()

        def start(index: int, x: Tensor) -> Tensor:
            source = x if self.run.held[index] else copy_tensor(x)
            self.tape.watch(source)
            handle = getattr(source, "handle", source)
            known = self.arguments[index] is None
            started[index] = source, recorder.value_id(handle) if known else recorder.new_id(handle)
            return source

        with isolated():
            enter(self.tape)
            pairs = enumerate(self.arguments)
            starts: list[Any] = [partial(start, n) if x is None else start(n, x) for n, x in pairs]
            given = [None if held else x for held, x in zip(self.run.held, starts, strict=True)]
            with stage, recorder.record_thread():
                # A variable that the function holds it reads itself.
                targets = self.run(*given)
                self.targets = [tf.convert_to_tensor(y) for y in targets]
                self.sources = [started[n] for n in range(len(given))]
        if recorder.error is not None:
            raise recorder.error
        return recorder

    def trace(self, source: int, target: int) -> Trace:
        return TensorflowTrace(self, source, target)


@contextmanager
def _following() -> Iterator[None]:
    with isolated(), without_log():
        yield


class TensorflowTrace(Trace):
    """A record, seen from one source to one target."""

    graph: OpGraph[TensorflowOp]
    numbers = NUMBERS
    following = staticmethod(_following)

    def __init__(self, record: TensorflowRecord, source: int, target: int):
        self._record, self._index = record, source
        self._run, self._argument, self._recorder = record.run, record.arguments[source], record.recorder
        self._tape: Any = record.tape
        if record.error is not None:
            self._explain_inner_tape(record.error)
            return
        self.target = record.targets[target]
        self.source, self._source_id = record.sources[source]
        target_id = self._recorder.value_id(self.target)
        handle = getattr(self.source, "handle", None)
        self.later_ids = () if handle is None else self._recorder.variable_values[handle._id]
        self.graph = op_graph(
            [*self._recorder.ops, *self._closures(target_id)],
            (self._source_id, *self.later_ids),
            target_id,
            lambda _, op: None if op.recorded else ("outside-tape", "no tape records there"),
            _frozen_hints(self._run, self._argument),
        )

    def _explain_inner_tape(self, error: FrameworkError) -> None:
        """Trace the gradient for the source that a tape of the user's did not give, or raise the error."""
        self.source, self._source_id = self._record.started[self._index]
        for request in self._recorder.tapes.requests:
            if request.result is None and request.source_id == self._source_id:
                self.target, self.graph = request.target, _request_graph(request)
                self._tape = None
                return
        raise error

    def _closures(self, target: int) -> list[TensorflowOp]:
        """Return operations for tensors that the function takes from outside, and that are the source or cut out of it.

        They count only where nothing else leads to the target.
        """
        recorder = self._recorder
        path = DataPath(OpGraph(recorder.ops, self._source_id, target, frozenset()))
        if path.reaches_target or any(not op.branches for op in path.exits()):
            return []
        return [
            _closure_op(self._source_id, value, where)
            for value, x, where in recorder.outside_tensors()
            if value in path.to_target and self._is_source(x)
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

    def gradient(self, of: np.ndarray, weights: np.ndarray) -> Tensor | None:
        if self._tape is None:
            return None
        with isolated():
            seed = self.numbers.at(self.target, of, weights)
            gradient = self._tape.gradient(self.target, self.source, output_gradients=seed)
        return None if gradient is None else tf.convert_to_tensor(gradient)

    def hint_for_error(self, error: Exception) -> Hint | None:
        if not isinstance(error, (LookupError, NotImplementedError)):
            return None
        op = next((op for op in self.graph.ops if op.cut_cause == "no-rule"), None)
        return Hint("no-rule", str(error).strip("'\""), op)


class TensorflowExplain(ExplainBackend):
    name = "tensorflow"

    def record(self, run: TensorFunction, sources: Sequence[Tensor | None]) -> Record:
        return TensorflowRecord(run, sources)

    def run_at(self, run: TensorFunction, tensors: Sequence[Tensor | None]) -> Sequence[Tensor]:
        with isolated():
            return run(*tensors)

    def report_step(
        self, function: Callable[[], Any], wrt: Tensor | None, positions: np.ndarray | None = None
    ) -> LiveReport | None:
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
        if wrt is not None and not recorder.tapes.requests:
            return None
        if recorder.error is not None:
            return LiveReport.unfollowed("unconnected" if missing else "flows", recorder.error)
        if wrt is not None and not requests:
            return LiveReport("unconnected", None, Hint(None, "no tape was asked for its gradient"), wrt="the tensor")
        if missing:
            return _report_request(missing[0])
        return LiveReport("flows") if wrt is None else _report_request(requests[-1], positions)


implementation = TensorflowExplain()


def _require_eager() -> None:
    if not tf.executing_eagerly():
        raise FrameworkError("eg.explain inside tf.function, where there are no numbers yet; call it outside")


def _report_error(recorder: TensorflowOpRecorder, error: Exception, wrt: Tensor | None) -> LiveReport | None:
    if is_tape_used_up(error):
        return LiveReport(
            "unconnected", None, Hint("freed-graph", "", Op("tape.gradient", user_line_of(error, is_user_file)))
        )
    op_type = op_type_without_gradient(error)
    if op_type is not None:
        ops = [op for op in recorder.ops if op.op_type == op_type]
        return LiveReport("unconnected", None, Hint("no-rule", str(error).strip("'\""), ops[-1] if ops else None))
    missing = [request for request in _requests_for(recorder, wrt) if request.result is None]
    if recorder.error is not None and missing:
        return LiveReport.unfollowed("unconnected", recorder.error)
    if missing and (isinstance(error, UnconnectedError) or is_about_gradients(error)):
        return _report_request(missing[0])
    return None


def _requests_for(recorder: TensorflowOpRecorder, wrt: Tensor | None) -> Sequence[TapeRequest]:
    requests, handle = recorder.tapes.requests, getattr(wrt, "handle", wrt)
    return [each for each in requests if wrt is None or getattr(each.source, "handle", each.source) is handle]


def _report_request(request: TapeRequest, positions: np.ndarray | None = None) -> LiveReport:
    graph = _request_graph(request)
    wrt = getattr(request.source, "path", None) or "the tensor"
    if request.result is None:
        hints = [hint for hint in graph.hints if hint.cause != "custom-rule"]
        return LiveReport("unconnected", graph, hints[0] if hints else None, wrt=wrt)
    value = tf.convert_to_tensor(request.result)
    if positions is not None:
        value = tf.gather(tf.reshape(value, [-1]), positions)
    verdict = NUMBERS.verdict(value)
    if verdict == "flows":
        return LiveReport("flows", value=value, wrt=wrt)
    later = _values_of_variable(request)
    held = {n: x for op in graph.ops for n, x in zip(op.outputs, op.results, strict=False)}
    source = next((held[n] for n in later if n in held), request.source)
    step = Trace(graph, NUMBERS, tf.convert_to_tensor(source), request.target, _following, later)
    return LiveReport(verdict, value=value, wrt=wrt, step=step, positions=positions)


def _values_of_variable(request: TapeRequest) -> Sequence[int]:
    """Return the values that a source had in the step, if it is a variable."""
    handle = getattr(request.source, "handle", None)
    return () if handle is None else request.variable_values.get(handle._id, ())


def _request_graph(request: TapeRequest) -> OpGraph[TensorflowOp]:
    """Return the operations from a tape's source to its target, and where the tape lost the path."""
    tape, source = request.tape, request.source_id
    watched_from = 0 if hasattr(request.source, "handle") else tape.watched.get(source, 0)
    closures = [_closure_op(source, value, where) for value, where in request.slices]

    def gap(index: int, op: TensorflowOp) -> Cut | None:
        index -= len(closures)
        if not tape.records_at(index):
            return "inner-gradient" if op.in_gradient else tape.gap_cause(index), ""
        if not op.recorded:
            return "outside-tape", ""
        return ("not-tracked", "") if index < watched_from and source in op.inputs else None

    hint = _source_hint(request)
    hints = [] if hint is None else [hint]
    ops = [*closures, *request.ops]
    return op_graph([*ops, *_unseen_exits(request, ops)], (source,), request.target_id, gap, hints)


def op_graph(
    ops: Sequence[TensorflowOp],
    sources: Sequence[int],
    target: int,
    gap: Callable[[int, TensorflowOp], Cut | None],
    hints: Sequence[Hint],
) -> OpGraph[TensorflowOp]:
    """Connect the values by the gradient functions of the operations."""
    with without_log():
        graph = connect(ops, sources, target, NUMBERS, CUTS, gap, hints, any(map(is_random, ops)))
    for op in graph.ops:
        op.operation = "tape.gradient" if op.cut_cause == "inner-gradient" else op.operation
    return graph


def _unseen_exits(request: TapeRequest, ops: Sequence[TensorflowOp]) -> list[TensorflowOp]:
    """Return operations for numbers that left by a way that is not seen, such as a function of SciPy.

    Such code reads the memory of a tensor. What shows is that operations of the source lead nowhere, and that the
    target is computed from plain numbers alone.
    """
    path = DataPath(OpGraph(ops, request.source_id, request.target_id, frozenset()))
    imports = {value: where for value, _, where in request.imports if value in path.to_target}
    ends = path.from_source.difference(*[op.inputs for op in ops])
    others = (path.to_target - imports.keys()).difference(*[op.outputs for op in ops])
    if path.exits() or others or not imports or not ends or not path.from_source.isdisjoint(path.to_target):
        return []
    return [
        TensorflowOp("numpy", where, "", (min(ends),), (value,), "left-framework") for value, where in imports.items()
    ]


def _closure_op(source: int, value: int, where: str | None) -> TensorflowOp:
    """Return the operation that stands for a tensor that was cut out of the source before the run."""
    return TensorflowOp("a closed-over tensor", where, "", (source,), (value,), "outside-tape")


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
        statistic = str(source.name).rpartition("/")[2].startswith("moving_")
        hint = Hint("not-tracked", "its trainable is False", variant=MOVING_STATISTIC if statistic else None)
        return None if source.trainable else hint
    tracked = _tracked_values(request)
    maker = next((op for op in request.ops if request.source_id in op.outputs), None)
    cut = maker if maker is not None and maker.operation in SLICING and maker.inputs[0] in tracked else None
    if request.source_id in tracked:
        return Hint("resliced", "", cut) if cut is not None and _only_the_whole_is_used(request, cut) else None
    if cut is not None:
        return Hint("resliced", "", cut)
    if any(request.source_id in op.inputs for op in request.ops):
        return Hint("not-tracked", "the tape does not watch it")
    if request.is_slice:
        return Hint("resliced", "it was cut out of what the tape watches before, and is not used itself")
    return Hint("unused", "no operation uses it")


def _only_the_whole_is_used(request: TapeRequest, maker: TensorflowOp) -> bool:
    """Return True if the target is computed from what the source was cut out of, and not from the source."""
    leading = DataPath(OpGraph(request.ops, request.source_id, request.target_id, frozenset())).to_target
    return request.source_id not in leading and maker.inputs[0] in leading


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
    return [Hint("not-tracked", "its trainable is False", variant=MOVING_STATISTIC if is_statistic else None)]
