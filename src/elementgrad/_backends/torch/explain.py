"""The part of PyTorch in `eg.explain`: recorded runs, runs at other numbers, live tensors, and training steps.

`TorchTrace` runs a function once under a `TorchOpRecorder`, which keeps what each call read and made. Live tensors have
no record, but their autograd graph is walked (`report_live`). A training step runs as it is under a recorder
(`report_step`). `_hint_for_refusal` turns PyTorch's errors about gradients into causes.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode

from elementgrad._backends.autodiff import TensorFunction
from elementgrad._backends.source_location import is_user_code, user_line_of
from elementgrad._backends.torch import _compat
from elementgrad._backends.torch.autodiff import checkpointing_disabled
from elementgrad._backends.torch.explain_rules import COPYING, NUMBERS, dense
from elementgrad._backends.torch.isolate import (
    Freezable,
    deferred_handles,
    generators,
    in_mode,
    is_freezing_call,
    isolated,
    state,
    without_autocast,
)
from elementgrad._backends.torch.names import TorchModel
from elementgrad._backends.torch.record.history import operation_name
from elementgrad._backends.torch.record.intercept import EXPORTS, LINE_KEY, name_of, pause_recording
from elementgrad._backends.torch.trace import TorchOpRecorder
from elementgrad._backends.torch.trace_memory import Overwrite, detach, detach_all
from elementgrad._cleanup import defer, scope
from elementgrad._explain.backend import ExplainBackend, Picked
from elementgrad._explain.path import DataPath
from elementgrad._explain.replay import cotangent_sizes
from elementgrad._explain.trace import (
    LEAF_WRITE,
    MOVING_STATISTIC,
    NOTHING_TRACKED,
    CotangentSizes,
    Hint,
    LiveReport,
    Op,
    OpGraph,
    Record,
    Trace,
    uneven_weights,
)
from elementgrad._names import pytree
from elementgrad.errors import UnconnectedError

Tensor = torch.Tensor
is_user_file = partial(is_user_code, packages=["torch"])


class TorchRecord(Record):
    """A function that ran once under a mode that sees every call, with its graph kept for gradients."""

    def __init__(self, run: TensorFunction, sources: Sequence[Tensor | None], before: Any):
        self.run, self.arguments = run, sources
        # No closure holds the record itself, so that its tensors are freed with the last reference to it.
        self.paths = paths = [PathToSource() for _ in sources]
        self.recorder = recorder = TorchOpRecorder(lambda x: any(leads(x) for leads in paths), run.model, keeps=True)
        started: dict[int, tuple[int, Tensor]] = {}

        def start(index: int, x: Tensor) -> Tensor:
            with pause_recording():
                passed = _pass(x)
                paths[index].start(passed)
            recorder.add_source(passed, x if x.requires_grad and not x.is_leaf else None)
            started[index] = recorder.id_of(passed), passed
            return passed

        with isolated(run.function, before):
            random = generators()[0]
            with checkpointing_disabled(True, faithful=True), in_mode(Freezable()), self.recorder.recording():
                pairs = enumerate(sources)
                self.targets = run(*[partial(start, n) if x is None else start(n, x) for n, x in pairs])
            self.is_random = not torch.equal(random, generators()[0])
        if self.recorder.failure is not None:
            raise self.recorder.failure
        self.sources = [started[n] for n in range(len(sources))]
        self.target_ids = [self.recorder.id_of(y) for y in self.targets]
        self.ops = self.recorder.recorded_ops()
        self._last: tuple[Any, list[Tensor | None]] = None, []

    def gradients(self, target: int, of: np.ndarray, weights: np.ndarray) -> list[Tensor | None]:
        """Return the gradients of a weighted sum of a target's elements for all sources; the last ones are kept."""
        question = target, of.tobytes(), weights.tobytes()
        if self._last[0] != question:
            y, tracked = self.targets[target], [x for _, x in self.sources if x.requires_grad]
            pulled: Sequence[Any] = [None] * len(tracked)
            if y.requires_grad and tracked:
                with isolated(None), without_autocast():
                    seed = NUMBERS.at(y, of, weights)
                    pulled = torch.autograd.grad(y, tracked, seed, retain_graph=True, allow_unused=True)
            by_source = dict(zip(map(id, tracked), pulled, strict=True))
            gradients = [by_source.get(id(x)) for _, x in self.sources]
            self._last = question, [None if g is None else dense(g) for g in gradients]
        return self._last[1]

    def trace(self, source: int, target: int) -> Trace:
        return TorchTrace(self, source, target)


class UntrackedRun(Record, Trace):
    """A run of a function that PyTorch does not run with a tracked source, so that there is no gradient."""

    def trace(self, source: int, target: int) -> Trace:
        return self


@contextmanager
def following() -> Iterator[None]:
    """Run operations again without disturbing anything."""
    _compat.load_forward_rules()
    with isolated(None, attention=True), without_autocast():  # the plain kernel has forward derivatives
        yield


class TorchTrace(Trace):
    """A record, seen from one source to one target."""

    numbers = NUMBERS
    following = staticmethod(following)

    def __init__(self, record: TorchRecord, source: int, target: int):
        self._record, self._index = record, (source, target)
        self._source = record.arguments[source]
        source_id, passed = record.sources[source]
        frozen = [] if passed.requires_grad else [Hint("not-tracked", "the function sets its requires_grad to False")]
        hints = [*_hints_of_source(self._source, record.run.held[source]), *frozen, *record.recorder.hints]
        connected = record.recorder.connected_to(source_id, record.paths[source])
        self.graph = OpGraph(record.ops, source_id, record.target_ids[target], connected, hints, record.is_random)
        self.source = passed.detach() if self._source is None else self._source
        self.target = record.targets[target].detach()

    def gradient(self, of: np.ndarray, weights: np.ndarray) -> Tensor | None:
        return self._record.gradients(self._index[1], of, weights)[self._index[0]]

    def hint_for_error(self, error: Exception) -> Hint | None:
        return _hint_for_refusal(self._record.recorder, error)

    def apply_source_hooks(self, gradient: Tensor) -> Tensor:
        hooks = getattr(self._source, "_backward_hooks", None) if self._source is not None else None
        for hook in list((hooks or {}).values()):
            changed = hook(gradient)
            gradient = gradient if changed is None else changed
        return gradient


class PathToSource:
    """Tell whether gradients lead from a tensor back to the source, by a walk through the autograd graph."""

    def __init__(self) -> None:
        self._known: dict[int, bool] = {}
        self.first = 0

    def start(self, source: Tensor) -> None:
        self.first = source.grad_fn._sequence_nr()  # type: ignore[union-attr]
        self._known[self.first] = True

    def __call__(self, x: Tensor) -> bool:
        return x.requires_grad and self.node(x.grad_fn)

    def node(self, node: Any) -> bool:
        """Return True if gradients lead from a node of the graph to the source."""
        ahead, order = [node], []
        while ahead:
            here = ahead.pop()
            if here is None or hasattr(here, "variable"):
                continue
            number = here._sequence_nr()
            if number in self._known or number < self.first:
                continue
            order.append(here)
            self._known[number] = False
            ahead.extend([following for following, _ in here.next_functions])
        for here in sorted(order, key=lambda node: node._sequence_nr()):
            self._known[here._sequence_nr()] = any(self._leads(following) for following, _ in here.next_functions)
        return self._leads(node)

    def _leads(self, node: Any) -> bool:
        return node is not None and not hasattr(node, "variable") and self._known.get(node._sequence_nr(), False)


def _pass(x: Tensor) -> Tensor:
    """Return the same numbers for the function, with a node of their own in the graph."""
    with nullcontext() if not x.is_inference() else torch.inference_mode(False):
        if x.requires_grad and not x.is_leaf:  # it may be computed from another source
            return x.clone()
        return (x.clone() if x.is_inference() else x.detach()).requires_grad_().clone()


def _hints_of_source(source: Tensor | None, held: bool) -> list[Hint]:
    if source is None:
        return []
    hints = []
    if held and isinstance(source, torch.nn.Parameter) and not source.requires_grad:
        hints.append(Hint("not-tracked", "its requires_grad is False"))
    if getattr(source, "_backward_hooks", None):
        hints.append(Hint("hook", "the tensor has a hook", Op("register_hook")))
    return hints


def _hint_for_argument(error: RuntimeError) -> Hint | None:
    """Return the hint for an argument by which a function has no derivative; None for other errors.

    A batch norm has none by its statistics, and a cross entropy none by the weights of its classes.
    """
    names = _compat.argument_without_derivative(str(error))
    if names is None:
        return None
    function, argument = names
    evidence = f"PyTorch has no derivative of {function} by {argument}"
    if argument.startswith("running_"):
        return Hint("not-tracked", evidence, variant=MOVING_STATISTIC)
    return Hint("no-rule", evidence, Op(function, user_line_of(error, is_user_file)))


def _hint_for_refusal(recorder: TorchOpRecorder, error: BaseException) -> Hint | None:
    """Return why PyTorch refused to compute a gradient of what was recorded; None if the error is an unknown one."""
    for text in (str(error), str(error.__cause__ or "")):
        if _compat.is_inplace_error(text):
            write = _find_write(recorder.overwrites, text)
            return Hint("modified-in-place", "the gradient needs the numbers from before", write)
        if _compat.is_leaf_write_error(text):
            return Hint("modified-in-place", "", Op(LEAF_WRITE, user_line_of(error, is_user_file)))
        if _compat.is_freed_graph_error(text):
            return _freed_graph_hint(recorder.requests.backwards, recorder.stale)
        name = _compat.operation_without_derivative(text)
        if name is not None:
            return Hint("no-rule", "", next((op for op in recorder.ops if op.operation == name), Op(name)))
    return None


def _freed_graph_hint(backwards: Sequence[Op], stale: Op | None) -> Hint:
    if stale is not None:
        evidence = f"{stale.operation} uses a tensor that was computed before, whose graph was freed"
        return Hint("freed-graph", evidence, stale)
    earlier = [op.where for op in backwards[:-1] if op.where]
    evidence = f"backward() was called before, at {earlier[-1]}" if earlier else ""
    return Hint("freed-graph", evidence, backwards[-1] if backwards else None)


def _find_write(overwrites: Sequence[Overwrite], text: str) -> Op | None:
    """Return the write that PyTorch complains of, by the shape and the maker of the tensor if the text has them."""
    shape, maker = _compat.overwritten_shape(text), _compat.overwritten_maker(text)
    matches = [write for write in overwrites if shape is None or write.shape == shape] or overwrites
    if maker is not None:
        matches = [write for write in matches if write.maker == maker] or matches
    return matches[-1].op if matches else None


def run_at(run: TensorFunction, tensors: Sequence[Tensor | None]) -> Sequence[Tensor]:
    """Run a function at other numbers, with the first tensor tracked."""
    first = tensors[0]

    def run_once() -> Sequence[Tensor]:
        with isolated(run.function), in_mode(_LenientMode()):
            return run(None if first is None else _pass(first), *tensors[1:])

    with suppress(Exception), NoSavedTensors():  # the function may compute gradients; any other error comes again
        return run_once()
    return run_once()


class NoSavedTensors(torch.autograd.graph.saved_tensors_hooks):
    """Keep no tensors for a backward, in a run that needs none."""

    def __init__(self) -> None:
        super().__init__(lambda _: None, self._refuse)

    @staticmethod
    def _refuse(_: Any) -> Tensor:
        raise RuntimeError("nothing is kept")


WIDER = {torch.float16: torch.float64, torch.bfloat16: torch.float64, torch.float32: torch.float64}
WIDER |= {torch.complex64: torch.complex128}


class WideningMode(TorchFunctionMode):
    """Widen narrower tensors for calls with a float64 one: a function may hold tensors that no caller can convert."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        dtypes = {x.dtype for x in pytree.leaves_of((args, kwargs)) if isinstance(x, Tensor)}
        if dtypes.isdisjoint(WIDER.values()) or dtypes.isdisjoint(WIDER) or _needs_identity(name_of(func), kwargs):
            return func(*args, **kwargs)
        return func(*pytree.map_tree(args, _widen), **pytree.map_tree(kwargs, _widen))


def _needs_identity(name: str, kwargs: Any) -> bool:
    """Return True if a function is about the very tensors it gets: it writes to them, or computes their gradients."""
    writes = (name.endswith("_") and not name.endswith("__")) or name.endswith((".__set__", "__setitem__"))
    return writes or "__i" in name or name in ("grad", "backward") or kwargs.get("out") is not None


def _widen(x: Any) -> Any:
    return x.to(WIDER[x.dtype]) if isinstance(x, Tensor) and x.dtype in WIDER else x


def report_live(of: Picked, wrt: Picked) -> LiveReport:
    """Report on the gradient of one live tensor with respect to another, by the autograd graph."""
    try:
        return _follow_live(of, wrt)
    except Exception as error:
        with suppress(RuntimeError):  # where there is no gradient either, and PyTorch said why
            return _unfollowed_live(of, wrt, error)
        raise


def _unfollowed_live(of: Picked, wrt: Picked, error: Exception) -> LiveReport:
    """Report the verdict by the gradient alone, where the graph cannot be followed."""
    seed = _seed(of)
    with isolated(None), without_autocast():
        (gradient,) = torch.autograd.grad(of[0], wrt[0], seed, retain_graph=True, allow_unused=True)
    if gradient is None:
        return LiveReport.unfollowed("unconnected", error)
    value = _take(gradient, wrt[1])
    return LiveReport.unfollowed(NUMBERS.verdict(value), error, value=value)


def _unconnected(cause: str | None, evidence: str = "", op: Op | None = None) -> LiveReport:
    return LiveReport("unconnected", None, Hint(cause, evidence, op))


def _follow_live(of: Picked, wrt: Picked) -> LiveReport:
    y, x = of[0], wrt[0]
    if not (x.is_floating_point() or x.is_complex()):
        return _unconnected("integer", f"its dtype is {NUMBERS.dtype(x)}")
    if not x.requires_grad:
        return _unconnected("not-tracked", "its requires_grad is False")
    if not y.requires_grad:
        if not (y.is_floating_point() or y.is_complex()):
            evidence = f"the result is of dtype {NUMBERS.dtype(y)}"
            return _unconnected("discrete", evidence, Op("what made it"))
        evidence = "the result has no grad_fn: it was detached, computed under no_grad, or made of plain numbers"
        return _unconnected(None, evidence)
    end = get_gradient_edge(x).node
    nodes = _graph_nodes(y)
    if end in nodes:
        return _report_connected(of, wrt, _NodePath(nodes, end))
    if any(following in nodes for following, _ in end.next_functions):
        if x._is_view():
            return _unconnected("resliced", "what it is a slice of was used, and it was not")
        return _unconnected("unused", "what it is computed from was used, and it was not")
    return _unconnected(None, "it is tracked, and the graph of the result does not lead to it")


def _graph_nodes(y: Tensor) -> set[Any]:
    root = get_gradient_edge(y).node
    return _walk([root], lambda node: [following for following, _ in node.next_functions if following is not None])


def _walk(ahead: list[Any], neighbours: Callable[[Any], Iterable[Any]]) -> set[Any]:
    """Return all nodes that some lead to, themselves included."""
    nodes = set(ahead)
    while ahead:
        new = set(neighbours(ahead.pop())) - nodes
        nodes |= new
        ahead += new
    return nodes


class _NodePath:
    """The graph nodes on the way from a result to a tensor, as an `OpGraph`."""

    def __init__(self, nodes: set[Any], end: Any):
        before: dict[Any, list[Any]] = {}
        for node in nodes:
            for following, _ in node.next_functions:
                before.setdefault(following, []).append(node)
        self._leading = _walk([end], lambda node: before.get(node, ()))
        self._end = end
        self._nodes = sorted(self._leading - {end}, key=lambda node: node._sequence_nr())
        ids = {node: index for index, node in enumerate([end, *self._nodes])}
        ops = [
            Op(
                operation_name(node),
                node.metadata.get(LINE_KEY),
                inputs=tuple([ids[following] for following, _ in node.next_functions if following in ids]),
                outputs=(ids[node],),
            )
            for node in self._nodes
        ]
        self.graph = OpGraph(ops, 0, len(ids) - 1, set(ids.values()))

    def add_hooks(self, positions: np.ndarray | None) -> dict[Op, CotangentSizes]:
        """Have each node note its gradients until the scope is left; where it reads the tensor, at some elements."""
        handles = deferred_handles()
        sizes: dict[Op, CotangentSizes] = {}

        def note(op: Op, node: Any, leaving: Sequence[Tensor | None], arriving: Sequence[Tensor | None]) -> None:
            pairs = zip(node.next_functions, leaving, strict=False)
            pulled = [(end, g) for (end, _), g in pairs if end in self._leading and g is not None]
            chosen = None if positions is None or any(end is not self._end for end, _ in pulled) else ((0,), positions)
            values = [(0, dense(g.detach())) for _, g in pulled]
            sizes[op] = cotangent_sizes([dense(g.detach()) for g in arriving if g is not None], values, NUMBERS, chosen)

        for op, node in zip(self.graph.ops, self._nodes, strict=True):
            handles.extend(map(node.register_hook, [partial(note, op, node)]))
        return sizes


def _report_connected(of: Picked, wrt: Picked, path: _NodePath) -> LiveReport:
    x = wrt[0]
    keeps_grad = x.is_leaf or x.retains_grad
    seed = _seed(of)
    try:
        with isolated(None), without_autocast():
            sizes = path.add_hooks(wrt[1])
            (gradient,) = torch.autograd.grad(of[0], x, seed, retain_graph=True)
    except RuntimeError as error:
        if _compat.is_inplace_error(str(error)):
            return _unconnected("modified-in-place", "", Op("a write in place"))
        if not _compat.is_freed_graph_error(str(error)):
            raise
        if not keeps_grad:
            return _unconnected("non-leaf", "its is_leaf is False")
        if x.grad is None:
            return _unconnected("freed-graph")
        return LiveReport("flows", value=x.grad.clone())
    value = _take(gradient, wrt[1])
    cotangents = {op: sizes[op] for op in path.graph.ops if op in sizes}
    verdict = NUMBERS.verdict(value)
    if verdict != "flows":
        return LiveReport(verdict, path.graph, value=value, cotangents=cotangents)
    if not keeps_grad:
        return LiveReport("flows", None, Hint("non-leaf", "its is_leaf is False"), value=value)
    times = 1 if x.grad is None else _multiple(x.grad, gradient)
    if x.grad is not None and 1 < times <= x.grad._version + 1:  # each further call writes to it in place
        return LiveReport("mismatch", None, Hint("accumulated", f"it is {times} times the gradient"), value=value)
    return LiveReport("flows", value=value)


def _seed(of: Picked) -> Tensor:
    chosen = np.arange(of[0].numel()) if of[1] is None else of[1]
    return NUMBERS.at(of[0], chosen, uneven_weights(len(chosen)))


def _take(gradient: Tensor, positions: np.ndarray | None) -> Tensor:
    return (
        gradient if positions is None else gradient.reshape(-1)[torch.from_numpy(positions.copy()).to(gradient.device)]
    )


def _multiple(total: Tensor, gradient: Tensor) -> int:
    """Return how many times the gradient is in `total`; 1 if that is no multiple of it."""
    nonzero = gradient != 0
    times = round(float((total[nonzero] / gradient[nonzero]).flatten()[0]))
    return times if torch.allclose(total, times * gradient, rtol=1e-4) else 1


def report_step(
    function: Callable[[], Any], wrt: Tensor | None, positions: np.ndarray | None = None
) -> LiveReport | None:
    """Run a training step under a recorder, and report why it raises or what gradient a tensor gets."""

    def leads(x: Tensor) -> bool:
        # Another leaf than the tensor that is asked about has no gradient to hand on to it.
        return x.requires_grad and (wrt is None or x is wrt or not x.is_leaf)

    recorder = TorchOpRecorder(leads, TorchModel(function), keeps=wrt is not None)
    requests = recorder.requests
    root = recorder.follow(wrt)
    try:
        with recorder.recording():
            function()
    except (UnconnectedError, RuntimeError) as error:
        report = _report_error(recorder, root, error, wrt)
        if report is None:
            raise
        if recorder.failure is not None:
            return LiveReport.unfollowed("unconnected", recorder.failure)
        return report
    except (AttributeError, TypeError) as error:  # None is used as if it were a gradient
        lacks_grad = wrt is not None and requests.target is not None and wrt.grad is None
        if not (lacks_grad or _read_missing_grad(recorder, wrt)) or "NoneType" not in str(error):
            raise
    if recorder.failure is not None and requests.target is not None:
        missing = wrt is not None and requests.gradient is None
        return LiveReport.unfollowed("unconnected" if missing else "flows", recorder.failure)
    if requests.missing is not None and _read_missing_grad(recorder, wrt):
        hint = Hint("non-leaf", "its is_leaf is False", requests.missing[1])
        return LiveReport("unconnected", None, hint, wrt="the tensor")
    return _report_finished(recorder, root, wrt, positions)


def _report_error(
    recorder: TorchOpRecorder, root: int, error: UnconnectedError | RuntimeError, wrt: Tensor | None
) -> LiveReport | None:
    """Report why a step raised; None for an error that is not about gradients."""
    requests, text = recorder.requests, str(error)
    if isinstance(error, UnconnectedError):
        if error.loss is None:
            return None
        loss = recorder.id_of(error.loss)
        if error.leaf is None:
            return _report_untracked(recorder, root, loss, wrt)
        graph = _graph_of(recorder, recorder.id_of(error.leaf), loss)
        return LiveReport("unconnected", graph, wrt="the elements")
    target = requests.target
    if target is None and requests.sides is not None and requests.sides[0][0]:
        target = recorder.id_of(requests.sides[0][0][0])
    if _compat.is_untracked_error(text) and target is not None:
        return _report_untracked(recorder, root, target, wrt)
    if _compat.is_unused_error(text) and requests.sides is not None:
        return _report_unused(recorder, *requests.sides)
    hint = _hint_for_refusal(recorder, error)
    return None if hint is None else LiveReport("unconnected", _graph_of(recorder, root, requests.target or root), hint)


def _graph_of(recorder: TorchOpRecorder, source: int, target: int) -> OpGraph:
    return OpGraph(recorder.ops, source, target, frozenset(recorder.connected))


def _read_missing_grad(recorder: TorchOpRecorder, wrt: Tensor | None) -> bool:
    """Return True if the step read a .grad that is None, of a tensor that keeps none: of `wrt`, or of any."""
    missing = recorder.requests.missing
    return missing is not None and (wrt is None or wrt is missing[0])


def _report_unused(recorder: TorchOpRecorder, sides: Sequence[Sequence[Tensor]], where: str) -> LiveReport:
    """Report which input of `torch.autograd.grad` is not used."""
    (y, *_), inputs = sides
    unused = [x for x in inputs if not _leads(y, x)]
    names: Any = {"of": "the result", "wrt": "the tensor"}
    report = replace(report_live((y, None), (unused[0], None)), **names) if unused else None
    if report is None or report.hint is None:
        hint = Hint(None, "PyTorch says that one of them is not used", Op("grad", where))
        return LiveReport("unconnected", None, hint)
    if report.hint.cause is None:  # the autograd graph does not tell, and the recorded operations may
        graph = _graph_of(recorder, recorder.id_of(unused[0]), recorder.id_of(y))
        return replace(report, graph=graph, hint=None)
    return replace(report, hint=replace(report.hint, op=report.hint.op or Op("grad", where)))


def _leads(y: Tensor, x: Tensor) -> bool:
    return y.requires_grad and x.requires_grad and get_gradient_edge(x).node in _graph_nodes(y)


def _report_untracked(recorder: TorchOpRecorder, root: int, target: int, wrt: Tensor | None) -> LiveReport:
    hint = None
    if not recorder.any_tracked and (wrt is None or not wrt.requires_grad):
        evidence = "nothing that the step computes with requires gradients"
        hint = Hint("not-tracked", evidence, _first_op(recorder, target), NOTHING_TRACKED)
    return LiveReport("unconnected", _graph_of(recorder, root, target), hint)


def _first_op(recorder: TorchOpRecorder, target: int) -> Op | None:
    """Return the first operation that a value is computed from."""
    needed = DataPath(_graph_of(recorder, target, target)).to_target
    return next((op for op in recorder.ops if op.inputs and not needed.isdisjoint(op.outputs)), None)


def _hidden_write(recorder: TorchOpRecorder, root: int) -> Hint | None:
    """Return a hint at a write that autograd did not see, to numbers that the gradient was computed from."""
    assert recorder.requests.target is not None
    path = DataPath(_graph_of(recorder, root, recorder.requests.target))
    differentiated = path.from_source & path.to_target & recorder.connected
    for write in recorder.hidden_before_gradient:
        readers = [op for op in recorder.ops[: write.position] if not write.overwritten.isdisjoint(op.inputs)]
        if any(not differentiated.isdisjoint(op.outputs) for op in readers):
            return write.hint
    return None


def _report_finished(
    recorder: TorchOpRecorder, root: int, wrt: Tensor | None, positions: np.ndarray | None
) -> LiveReport | None:
    """Report what a step that raised nothing did to the gradient of a tensor; None if it computed no gradient."""
    requests = recorder.requests
    if requests.target is None:
        return None
    if wrt is None:
        return LiveReport("flows")
    if requests.gradient is not None:
        value = _take(dense(requests.gradient), positions)
        if requests.accumulated is not None:
            before = Hint("accumulated", "its .grad contained a gradient before", requests.accumulated)
            return LiveReport("mismatch", None, before, value=value, wrt="the tensor")
        verdict, suspect = NUMBERS.verdict(value), _hidden_write(recorder, root)
        step = None if verdict == "flows" else _step_trace(recorder, root)
        return LiveReport(verdict, value=value, step=step, positions=positions, wrt="the tensor", suspect=suspect)
    hint: Hint | None = None
    if not wrt.requires_grad:
        normed = any(op.operation in NORMS and root in op.inputs for op in recorder.ops)
        statistic = normed and not isinstance(wrt, torch.nn.Parameter)
        hint = Hint("not-tracked", "its requires_grad is False", variant=MOVING_STATISTIC if statistic else None)
    elif not wrt.is_leaf and not wrt.retains_grad:
        hint = Hint("non-leaf", "is_leaf is False")
    return LiveReport("unconnected", _graph_of(recorder, root, requests.target), hint, wrt="the tensor")


NORMS = ("batch_norm", "instance_norm")
"""Operations that read the moving statistics of a layer."""


def _step_trace(recorder: TorchOpRecorder, root: int) -> Trace | None:
    """Return a step, from a tensor to the last loss that it got a gradient from; None if that was not recorded."""
    ops, target = recorder.recorded_ops(), recorder.requests.differentiated
    reached = DataPath(_graph_of(recorder, root, root)).from_source
    values = {n: x for op in ops for n, x in zip((*op.inputs, *op.outputs), (*op.operands, *op.results), strict=False)}
    if root not in values or target not in values:
        return None
    graph = OpGraph(ops, root, target, reached & recorder.connected)
    return Trace(graph, NUMBERS, values[root], values[target], following)


class TorchExplain(ExplainBackend):
    name = "torch"
    run_at = staticmethod(run_at)
    report_live = staticmethod(report_live)
    report_step = staticmethod(report_step)

    @contextmanager
    def without_number_checks(self) -> Iterator[None]:
        with scope():
            defer(torch.set_anomaly_enabled, torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled())
            torch.set_anomaly_enabled(False)
            yield

    def record(self, run: TensorFunction, sources: Sequence[Tensor | None]) -> Record:
        before = state()
        try:
            return TorchRecord(run, sources, before)
        except RuntimeError as error:
            hint = _hint_for_argument(error)
            if hint is None or len(sources) > 1 or sources[0] is None:
                raise
            with isolated(run.function, before), torch.no_grad():
                (target,) = run(sources[0].detach())
            return UntrackedRun(OpGraph([], 0, 1, frozenset([0]), [hint]), NUMBERS, sources[0], target.detach())


implementation = TorchExplain()


class _LenientMode(TorchFunctionMode):
    """Let tracked tensors leave PyTorch and be frozen, as the user's own plain ones can."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_freezing_call(func, args, kwargs or {}):
            return args[0].detach_()
        name = name_of(func)
        if name in EXPORTS:
            args = detach_all(args)
        elif name in COPYING:
            args = pytree.map_tree(args, detach)
        return func(*args, **(kwargs or {}))
