"""`eg.explain`: a function, live tensors or a training step in, a `Diagnosis` out.

The verdict comes first, from the framework's own gradient; then the operation to blame for it.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, cached_property, partial
from typing import Any, TypeVar

import numpy as np

from elementgrad._backends import registry
from elementgrad._backends.base import Backend
from elementgrad._backends.registry import not_compiled
from elementgrad._cleanup import enter, scope
from elementgrad._explain.backend import Picked, backend_for_step
from elementgrad._explain.blame import (
    UNRELATED_CAUSES,
    Evidence,
    describe,
    unknown,
    why_nonfinite,
    why_unconnected,
    why_zero,
)
from elementgrad._explain.causes import CONSTANT
from elementgrad._explain.diagnosis import Diagnosis
from elementgrad._explain.differences import EPSILON
from elementgrad._explain.path import CauseFinding, DataPath
from elementgrad._explain.probe import Probe, weighted_gradient
from elementgrad._explain.replay import Replay
from elementgrad._explain.trace import (
    Hint,
    LiveReport,
    Numbers,
    OpGraph,
    Record,
    Trace,
    Verdict,
    cannot_follow,
)
from elementgrad._names import pytree
from elementgrad._names.arguments import NOTHING, gather_arguments, option_error
from elementgrad._names.call import ONLY_OUTPUT, BoundCall, PartialCall, TensorRef
from elementgrad._names.names import expand_patterns
from elementgrad._place.place import Place, parse_place, parse_target
from elementgrad.errors import DtypeError, ElementgradError, PlaceError, SelectionError, quoted

Tensor = Any
T = TypeVar("T")
SUSPECT_CAUSES = ("modified-through-data", "hook", "custom-rule")
"""With a hint of these, a gradient that flows is compared with differences; the likeliest first."""
RUNS = {False: 2, True: 4}
"""How often the function runs at most, without and with a probe."""
UNSEEN = "no operation on the path of the gradient was recorded, so the path is not known"


@not_compiled
def explain(
    f: Callable[..., Any] | None = None,
    *args: Any,
    kwargs: Mapping[str, Any] = NOTHING,
    of: Any = None,
    wrt: Any = None,
    probe: bool = True,
    names_from: Any = None,
    **arguments: Any,
) -> Any:
    """Explain why the gradient of `of` with respect to `wrt` is missing, zero, NaN or wrong: cause, line and fix.

    Give a function or model with its arguments, and name both sides as for `eg.grad`. On PyTorch also live tensors,
    `eg.explain(of=loss, wrt=x)`. On PyTorch and TensorFlow also a training step that takes nothing, `eg.explain(step)`,
    which is run as it is: the answer says why it raises, or why the gradient of `wrt`, a tensor or some elements of
    one, is None, zero or not finite.

    Args:
        f: The function or model; left out for live tensors.
        *args: Its arguments.
        kwargs: Its keyword arguments.
        of: What is differentiated, by name or place; the only floating output if left out. A list, tuple or dict asks
            about several, from one run of the function, and so does a pattern such as `"h.*.attn"`.
        wrt: What it is differentiated by; the only floating input if left out. Likewise.
        probe: False to try nothing out by moving an element: the function then runs at most twice, and otherwise at
            most four times.
        names_from: A model that `f` calls, as for `eg.jacobian`.
        arguments: More keyword arguments of `f`.

    Returns:
        The diagnosis. `print` it; it is true if nothing is wrong. For a list, tuple or dict the same structure of
        them, for a pattern a dict by the places that it matches, and where both sides are such a structure, one like
        `of` of structures like `wrt`.

    Raises:
        PlaceError: If a name fits nothing, or a live tensor is needed and none is given.
        DtypeError: If a side is complex.

    >>> import torch, elementgrad as eg
    >>> def f(x):
    ...     return torch.relu(x).sum()
    >>> eg.explain(f, torch.tensor([1.0, -2.0]), wrt="x[1]").cause
    'dead-relu'
    >>> eg.explain(f, torch.tensor([1.0, -2.0]), wrt="x[0]").verdict
    'flows'
    """
    if not isinstance(probe, bool):
        raise option_error("probe", probe, "is neither True nor False; give one of them")
    if f is None:
        return _explain_live(of, wrt)
    f, args, kwargs = gather_arguments(explain, f, args, kwargs, arguments, names_from)
    if not args and not kwargs and of is None and names_from is None and registry.backend_of_model(f) is None:
        diagnosis = _explain_step(f, wrt)
        if diagnosis is not None:
            return diagnosis
    places = [] if wrt is None else pytree.leaves_of(pytree.map_tree(wrt, parse_place))
    return explain_together(BoundCall(f, args, kwargs, places), of, wrt, probe)


def explain_together(call: BoundCall, of: Any, wrt: Any, probe: bool) -> Any:
    """Answer one question, or the same structure of answers as `of` and `wrt` have, all from one run."""
    targets, places = expand_patterns(call, pytree.map_tree(of, parse_target), pytree.map_tree(wrt, parse_place))
    with scope():
        enter(call.backend.load("explain").without_number_checks())
        return _explain_each(call, targets, places, probe)


def _explain_each(call: BoundCall, targets: Any, places: Any, probe: bool) -> Any:
    recording = SharedRun(call)

    def ask(target: Place) -> Any:
        return pytree.map_tree(places, lambda place: Explanation(call, place, target, probe, recording))

    questions = pytree.map_tree(targets, ask)
    for question in pytree.leaves_of(questions):
        recording.add(question)
    return pytree.map_tree(questions, Explanation.diagnosis)


class SharedRun:
    """One run of a function that serves several questions, or one run for each where that is not possible."""

    def __init__(self, call: BoundCall):
        self._call = call
        self._sources: list[TensorRef] = []
        self._targets: list[TensorRef] = []
        self._questions = 0

    def add(self, question: "Explanation") -> None:
        """Have the run serve a question too."""
        source, target = question.source, question.target
        self._questions += 1
        if source.tensor is None or self._call.backend.kind(source.tensor) in "fc":
            self._sources += [source] if source not in self._sources else []
        self._targets += [target] if target not in self._targets else []

    @cached_property
    def _shared(self) -> Record | None:
        if self._questions < 2 or not self._sources:
            return None
        try:
            return self._record(self._sources, self._targets)
        except Exception:  # each question then has a run of its own, which raises what is to be raised
            return None

    def _record(self, sources: Sequence[TensorRef], targets: Sequence[TensorRef]) -> Record:
        run = PartialCall(self._call, sources, targets, stops=False)
        return self._call.backend.load("explain").record(run, [source.tensor for source in sources])

    def trace(self, source: TensorRef, target: TensorRef) -> Trace:
        """Return the run, seen from a source to a target."""
        if self._shared is not None:
            return self._shared.trace(self._sources.index(source), self._targets.index(target))
        return self._record([source], [target]).trace(0, 0)


class Explanation(pytree.Leaf):
    """An explanation in the making: a function at its arguments, and the places of both sides."""

    def __init__(
        self, call: BoundCall, place: Place, target_place: Place, probe: bool, recording: SharedRun | None = None
    ):
        self._recording = recording or SharedRun(call)
        self._call = call
        self._backend = call.backend
        self._place = place
        self._target_place = target_place
        self._may_probe = probe
        self.target = call.find_target(target_place)
        self._value: Tensor = None
        self._failures: list[str] = []
        """Evidence that the run could not be followed, with the reasons."""
        self._names = _with_index(target_place.name or "output", target_place), ""

    def diagnosis(self) -> Diagnosis:
        source = self.source
        self._run_limit = self._call.runs + RUNS[self._may_probe]
        self._names = self._names[0], _with_index(source.name, self._place)
        if source.tensor is not None and self._backend.kind(source.tensor) not in "fc":
            evidence = f"{source.name} is of dtype {self._backend.dtype(source.tensor)}"
            return self._diagnosis("unconnected", CauseFinding("integer", None, [evidence]))
        if source.tensor is not None:
            self._require_real(source.name, source.tensor)
        self._require_elements(source.name, source.tensor)
        trace = self._trace(source)
        self._require_elements(source.name, trace.source)
        path = DataPath(trace.graph)
        wrt = self._call.operand(self._place, source, 0, trace.source, batch=False)
        if self._backend.kind(trace.target) not in "fc":
            finding = CauseFinding(None) if isinstance(trace, OpaqueTrace) else why_unconnected(path, None)
            return self._diagnosis("unconnected", finding, path)
        of = self._call.operand(self._target_place, self.target, 0, trace.target, batch=False)
        self._require_real(wrt.name, trace.source)
        self._require_real(of.name, trace.target)
        self._names = _with_index(of.name, self._target_place), self._names[1]
        probe = Probe(self._call, source, self.target, of, wrt, self._run_limit)
        replay = Replay(trace, *probe.seeds, probe.wrt)
        try:
            gradient, largest = self._gradient(replay, probe)
        except Exception as error:
            hint = trace.hint_for_error(error)
            if hint is None:
                raise
            return self._diagnosis("unconnected", CauseFinding.of_hint(hint), path)
        return self._judge(replay, path, probe, gradient, largest)

    @cached_property
    def source(self) -> TensorRef:
        """The tensor that is differentiated by."""
        try:
            return self._call.find_source(self._place)
        except DtypeError:  # no input is floating point
            if self._place.name is not None or self._place.tensor is not None or len(self._call.inputs) != 1:
                raise SelectionError("no input is floating point; name one, as in wrt='ids'") from None
            return self._call.inputs[0]

    def _require_real(self, name: str, x: Tensor) -> None:
        if self._backend.kind(x) == "c":
            raise DtypeError(
                f"{name} is complex, and gradients are explained between real tensors only; take z.real and z.imag as "
                "arguments, give the output's real or imaginary part, or use eg.check"
            )

    def _require_elements(self, name: str, x: Tensor | None) -> None:
        if x is not None and 0 in self._backend.shape(x):
            shape = tuple(self._backend.shape(x))
            raise SelectionError(f"{name} is empty, of shape {shape}, and only elements have gradients; give it some")

    def _trace(self, source: TensorRef) -> Trace:
        """Run the function under the backend's recorder; a single output that has no gradients will do as well."""
        try:
            return self._trace_or_opaque(source)
        except DtypeError:
            if self.target is not ONLY_OUTPUT:
                raise
        self.target = TensorRef("output", "output")
        return self._trace_or_opaque(source)

    def _trace_or_opaque(self, source: TensorRef) -> Trace:
        """Trace the run. If the function runs and cannot be followed, return a trace with its derivative alone."""
        try:
            return self._recording.trace(source, self.target)
        except ElementgradError:
            raise
        except Exception as error:
            with suppress(Exception):  # where it is the function that raises, as it did before
                trace = OpaqueTrace(self._backend, PartialCall(self._call, [source], [self.target]), source.tensor)
                self._failures.append(cannot_follow(error))
                return trace
            raise

    def _follow(self, follow: Callable[[], T | None]) -> T | None:
        """Follow the run again, or note why that fails."""
        try:
            return follow()
        except Exception as error:
            self._failures.append(cannot_follow(error))
            return None

    def _gradient(self, replay: Replay, probe: Probe) -> tuple[np.ndarray | None, float]:
        """Return the gradient at the chosen elements as float64 (None without a path), and the largest of all."""
        gradient = replay.gradient()
        if gradient is None:
            return None, 0.0
        gradient = replay.trace.apply_source_hooks(gradient)
        if len(probe.of) == 1:
            selection = probe.wrt_operand.base
            self._value = gradient if selection is None else self._backend.take(gradient, selection)
        values = self._floats(gradient)
        return values[probe.wrt], float(np.abs(values).max(initial=0.0))

    def _judge(
        self, replay: Replay, path: DataPath, probe: Probe, gradient: np.ndarray | None, largest: float
    ) -> Diagnosis:
        trace = replay.trace
        if isinstance(trace, OpaqueTrace):
            return self._judge_without_path(path, gradient)
        untracked = any(hint.cause == "not-tracked" for hint in trace.graph.hints)
        if gradient is None or untracked:
            undecided = gradient is None and not path.cuts() and not untracked
            moves = probe.moves() if undecided and self._may_probe else None
            return self._diagnosis("unconnected", why_unconnected(path, moves), path)
        value = self._floats(trace.target)[probe.of]
        if not np.isfinite(gradient).all():
            evidence = self._evidence(replay, probe, finite=bool(np.isfinite(value).all()))
            return self._diagnosis("nonfinite", why_nonfinite(path, evidence), path)
        suspects = suspect_hints(trace.graph)
        written_outside = any(hint.op is not None and hint.op.cut_cause == "left-framework" for hint in suspects)
        mismatch = bool(suspects) and self._may_probe and probe.mismatches(gradient, replay)
        if mismatch or (written_outside and self._may_probe and probe.mismatches_runs(gradient)):
            return self._diagnosis("mismatch" if gradient.any() else "zero", blame_hints(suspects), path)
        rounding = bool(gradient.any()) and probe.is_rounding(gradient, largest, float(np.abs(value).max(initial=0.0)))
        if rounding or not gradient.any():
            return self._diagnosis("zero", why_zero(path, self._evidence(replay, probe, rounding=rounding)), path)
        return self._diagnose_flowing(path, gradient)

    def _judge_without_path(self, path: DataPath, gradient: np.ndarray | None) -> Diagnosis:
        if gradient is not None and np.isfinite(gradient).all() and gradient.any():
            return self._diagnose_flowing(path, gradient)
        verdict: Verdict = "zero" if gradient is not None else "unconnected"
        verdict = "nonfinite" if gradient is not None and gradient.any() else verdict
        return self._diagnosis(verdict, CauseFinding(None), path)

    def _evidence(self, replay: Replay, probe: Probe, finite: bool = True, rounding: bool = False) -> Evidence:
        """Return the evidence of the run and, where that is not enough, of further runs of the function."""
        evidence = evidence_of(replay, probe.dtype, finite, rounding, self._follow)

        def precise() -> float | None:
            size = evidence.precise()
            return probe.gradient_size() if size is None else size

        return replace(
            evidence,
            precise=unknown if evidence.precise is unknown else cache(precise),
            moves=cache(probe.moves) if self._may_probe else unknown,
        )

    def _diagnose_flowing(self, path: DataPath, gradient: np.ndarray) -> Diagnosis:
        evidence = []
        zeros = int((gradient == 0).sum())
        if zeros:
            evidence.append(f"{zeros} of {gradient.size} elements have a gradient of zero")
        evidence += dict.fromkeys([f"one path of several is cut by {describe(op)}" for op in path.cuts()])
        evidence += [hint.evidence for hint in path.graph.hints if hint.cause == "out-of-range"]
        if not path.reaches_target and not self._failures and path.opaque_finding() is None:
            evidence.append(UNSEEN)
        evidence += dict.fromkeys(self._failures)
        of, wrt = self._names
        operations = tuple(path.operations())
        return Diagnosis("flows", path=operations, evidence=tuple(evidence), value=self._value, of=of, wrt=wrt)

    def _diagnosis(self, verdict: Verdict, finding: CauseFinding, path: DataPath | None = None) -> Diagnosis:
        if finding.cause == "unused" and verdict == "unconnected" and self._has_single_input():
            finding.variant = CONSTANT
        if finding.cause is None and path is not None:
            finding.evidence += [hint.evidence for hint in path.graph.hints if hint.cause is None]
        if path is not None and finding.cause != "out-of-range":
            finding.evidence += dict.fromkeys([op.misses for op in path.graph.ops if op.misses and path.is_between(op)])
        finding.evidence += self._failures
        return Diagnosis.made(verdict, finding, path, self._backend.name, *self._names, value=self._value)

    def _has_single_input(self) -> bool:
        """Return True if there is nothing else that the target could be computed from."""
        return len(self._call.inputs) == 1 and not self._call.is_model

    def _floats(self, x: Tensor) -> np.ndarray:
        values = self._backend.to_float64(x)
        assert values is not None
        return values.reshape(-1)


class OpaqueTrace(Trace):
    """The derivative of a run of which no operation was seen, as when a framework has changed."""

    def __init__(self, backend: Backend, run: PartialCall, source: Tensor | None):
        with backend.isolated(run.function):
            run((lambda x: x) if source is None else source)  # for its own error, which a rule of its own may skip
        self._backend, self._linear = backend, backend.linearize(run, [source], False, 1)
        self.graph, self.numbers = OpGraph((), 0, 1, frozenset((0, 1))), Numbers(backend)
        self.source = self._linear.inputs[0] if source is None else source
        self.target = self._linear.value(0)

    def gradient(self, of: np.ndarray, weights: np.ndarray) -> Tensor | None:
        return weighted_gradient(self._backend, self._linear, of, weights)


def suspect_hints(graph: OpGraph) -> list[Hint]:
    """Return the hints that may make a gradient wrong, the likeliest first."""
    suspects = [hint for hint in graph.hints if hint.cause in SUSPECT_CAUSES]
    return sorted(suspects, key=lambda hint: SUSPECT_CAUSES.index(str(hint.cause)))


def blame_hints(suspects: Sequence[Hint]) -> CauseFinding:
    """Blame the first suspect; leave the cause open if there are suspects of several causes."""
    if len({hint.cause for hint in suspects}) == 1:
        return CauseFinding.of_hint(suspects[0])
    operations = {hint.cause: hint.op.operation if hint.op is not None else "" for hint in suspects}
    return CauseFinding(None, None, [f"it may be {cause}: {operation}" for cause, operation in operations.items()])


def _with_index(name: str, place: Place) -> str:
    """Return the text of a place with the name that its tensor turned out to have."""
    return str(Place(None, name, place.index, None, pointwise=place.pointwise)) if place.index else name


def _explain_step(f: Callable[[], Any], wrt: Any) -> Diagnosis | None:
    """Return why a training step raises, or None for a function that computes no gradients itself."""
    place = Place() if wrt is None else parse_place(wrt)
    if wrt is not None and place.tensor is None:
        raise PlaceError(
            f"wrt={quoted(wrt)} names no live tensor; for a step without arguments give the tensor itself, and for a "
            "function that calls a model names_from=model"
        )
    backend = backend_for_step(f, place.tensor)
    report = backend.load("explain").report_step(f, *_tensor_and_positions(place))
    if report is None and wrt is None:
        raise PlaceError(
            "the step ran and computed no gradient, so there is nothing to explain; to explain a function give its "
            "arguments, as in eg.explain(f, x), or the tensor, as in eg.explain(f, wrt=model.weight)"
        )
    return None if report is None else _from_report(report, backend.name)


def _explain_live(of: Any, wrt: Any) -> Diagnosis:
    if of is None or wrt is None:
        raise PlaceError("eg.explain without a function needs both tensors, as in eg.explain(of=loss, wrt=x)")
    places = [parse_place(side) for side in (of, wrt)]
    for place in places:
        if place.tensor is None:
            raise PlaceError(f"{place} names no live tensor; give a tensor, or the function and its arguments")
    backend = registry.require_backend(places[0].tensor)
    report = backend.load("explain").report_live(*[_tensor_and_positions(place) for place in places])
    return _from_report(replace(report, of="the result", wrt="the tensor"), backend.name)


def _tensor_and_positions(place: Place) -> Picked:
    return place.tensor, np.asarray(place.select().flat()).reshape(-1) if place.index else None


def _from_report(report: LiveReport, framework: str) -> Diagnosis:
    graph = report.step.graph if report.step is not None else report.graph
    path = DataPath(graph) if graph is not None else None
    names = {"of": report.of, "wrt": report.wrt}
    if report.verdict == "flows" and (report.hint is None or report.hint.cause is None):
        evidence = [] if report.hint is None else [report.hint.evidence]
        if report.suspect is not None and report.suspect.op is not None:
            seen = f"{describe(report.suspect.op)}: {report.suspect.evidence}"
            evidence.append(f"{seen}, and the gradient may be that of other numbers")
        return Diagnosis("flows", value=report.value, evidence=tuple(evidence), **names)
    if report.hint is not None:
        finding = CauseFinding.of_hint(report.hint)
    elif path is None:
        finding = CauseFinding(None)
    elif report.step is not None:
        finding = _follow_step(report, report.step, path)
    elif report.verdict == "zero":
        finding = why_zero(path, Evidence(cotangents=lambda: report.cotangents))
        if finding.cause in UNRELATED_CAUSES:  # a detach leaves no trace in a graph
            seen = f"in the graph other elements are taken, in {describe(finding.op)}" if finding.op else ""
            finding = CauseFinding(
                None, None, [seen, "the graph does not show where it was cut; explain the function instead"]
            )
    elif report.verdict == "nonfinite":
        finding = why_nonfinite(path, Evidence(cotangents=lambda: report.cotangents))
    else:
        finding = why_unconnected(path, None)
    return Diagnosis.made(report.verdict, finding, path, framework, value=report.value, **names)


def _follow_step(report: LiveReport, step: Trace, path: DataPath) -> CauseFinding:
    """Find why the gradient that a step computed is zero or not finite, by its operations alone."""
    numbers = step.numbers
    size = int(np.prod(tuple(step.target.shape), dtype=int))
    positions = report.positions
    if positions is None:
        positions = np.arange(int(np.prod(tuple(step.source.shape), dtype=int)))
    replay = Replay(step, np.arange(size), np.ones(size), positions)
    finite = bool(np.isfinite(numbers.array(step.target)).all())
    evidence = evidence_of(replay, numbers.dtype(step.source), finite)
    if report.verdict == "nonfinite":
        return why_nonfinite(path, evidence)
    tangents = evidence.tangents()
    if tangents is not None and tangents.reached and report.suspect is not None:
        return CauseFinding.of_hint(report.suspect)  # by the numbers that the operations had it is not zero
    return why_zero(path, replace(evidence, tangents=lambda: tangents))


def evidence_of(
    replay: Replay,
    dtype: str,
    finite: bool = True,
    rounding: bool = False,
    follow: Callable[[Callable[[], Any]], Any] = lambda run: run(),
) -> Evidence:
    """Return the evidence of a recorded run.

    Rounding remains in every precision, so none is too coarse for it. Nor does a higher precision say anything about a
    run with random numbers, which are others there, and with them what is masked.
    """
    return Evidence(
        flags=partial(follow, replay.finite_flags),
        tangents=partial(follow, replay.tangents),
        cotangents=partial(follow, replay.cotangents),
        overlap=partial(follow, replay.overlap),
        precise=unknown if rounding or replay.is_random else cache(replay.gradient_size_in_float64),
        overflows=lambda op: replay.is_finite_in_float64(op, finite),
        finite=finite,
        rounding=rounding,
        epsilon=EPSILON.get(dtype, EPSILON["float32"]),
    )
