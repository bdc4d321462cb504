"""One question about a function at its arguments: the verdict first, then who is to blame.

`explain`: a function, live tensors or a training step in, a diagnosis out.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from elementgrad._backends import registry
from elementgrad._backends.registry import backend_of_model, not_compiled
from elementgrad._explain.backend import backend_for_step
from elementgrad._explain.blame import APART, FurtherEvidence, spelled, why_nonfinite, why_unconnected, why_zero
from elementgrad._explain.causes import CONSTANT
from elementgrad._explain.diagnosis import Diagnosis
from elementgrad._explain.differences import EPSILON
from elementgrad._explain.path import UNSEEN, CauseFinding, CheckedTrace, DataPath, OpaqueTrace
from elementgrad._explain.probe import Probe
from elementgrad._explain.trace import Hint, LiveReport, OpGraph, Trace, Verdict, cannot_follow
from elementgrad._names.call import ONLY_OUTPUT, BoundCall, PartialCall, TensorRef, require_callable
from elementgrad._place.place import Place
from elementgrad._read.api import NOTHING, parse_place, parse_target
from elementgrad.errors import DtypeError, ElementgradError, OptionError, PlaceError, SelectionError, quoted

Tensor = Any
SUSPECT = ("modified-through-data", "hook", "custom-rule")
"""Remarks for which a gradient that flows is held against differences, the likeliest first."""


def suspected(account: OpGraph) -> list[Hint]:
    """What may make a gradient wrong, the likeliest first."""
    found = [remark for remark in account.hints if remark.cause in SUSPECT]
    return sorted(found, key=lambda remark: SUSPECT.index(str(remark.cause)))


def blamed(suspects: Sequence[Hint]) -> CauseFinding:
    """Who makes a gradient wrong; of several sorts of suspects none."""
    if len({remark.cause for remark in suspects}) == 1:
        return CauseFinding.of_remark(suspects[0])
    words = {remark.cause: remark.op.operation if remark.op is not None else "" for remark in suspects}
    return CauseFinding(None, None, [f"it may be {cause}: {operation}" for cause, operation in words.items()])


class Explanation:
    """A function at its arguments, and both sides by their places."""

    def __init__(self, call: BoundCall, place: Place, target_place: Place, probe: bool):
        self._call = call
        self._backend = call.backend
        self._place = place
        self._target_place = target_place
        self._probe = probe
        self._target = call.find_target(target_place)
        self._value: Tensor = None
        self._failures: list[str] = []
        """Why the run could not be followed, if it could not."""
        self._names = _indexed(target_place.name or "output", target_place), ""

    def diagnosis(self) -> Diagnosis:
        """The answer."""
        source = self._found()
        self._names = self._names[0], _indexed(source.name, self._place)
        if source.tensor is not None and self._backend.kind(source.tensor) not in "fc":
            evidence = f"{source.name} is of dtype {self._backend.dtype(source.tensor)}"
            return self._made("unconnected", CauseFinding("integer", None, [evidence]))
        if source.tensor is not None:
            self._refuse_complex(source.name, source.tensor)
        self._refuse_empty(source.name, source.tensor)
        witness = self._witness(source)
        self._refuse_empty(source.name, witness.source)
        trail = DataPath(witness.graph)
        since = self._call.operand(self._place, source, 0, witness.source, batch=False)
        if self._backend.kind(witness.target) not in "fc":
            finding = CauseFinding(None) if isinstance(witness, OpaqueTrace) else why_unconnected(trail, None)
            return self._made("unconnected", finding, trail)
        to = self._call.operand(self._target_place, self._target, 0, witness.target, batch=False)
        self._refuse_complex(since.name, witness.source)
        self._refuse_complex(to.name, witness.target)
        self._names = _indexed(to.name, self._target_place), self._names[1]
        trials = Probe(self._call, source, self._target, to, since)
        try:
            gradient, largest = self._gradient(witness, trials)
        except Exception as error:
            remark = witness.hint_for_error(error)
            if remark is None:
                raise
            return self._made("unconnected", CauseFinding.of_remark(remark), trail)
        return self._judged(witness, trail, trials, gradient, largest)

    def _refuse_complex(self, name: str, x: Tensor) -> None:
        """Zero and rounding are told of real numbers only."""
        if self._backend.kind(x) == "c":
            raise DtypeError(
                f"{name} is complex, and gradients are explained between real tensors only; take z.real and z.imag as "
                "arguments, give the output's real or imaginary part, or use eg.check"
            )

    def _judged(
        self, witness: Trace, trail: DataPath, trials: Probe, gradient: np.ndarray | None, largest: float
    ) -> Diagnosis:
        if isinstance(witness, OpaqueTrace):
            return self._unexplained(trail, gradient)
        decided = any(remark.cause == "not-tracked" for remark in witness.graph.hints)
        if gradient is None or decided:
            open_ = gradient is None and not trail.cuts() and not decided and self._probe
            return self._made("unconnected", why_unconnected(trail, trials.moves() if open_ else None), trail)
        value = self._floats(witness.target)[trials.of]
        if not np.isfinite(gradient).all():
            finite = bool(np.isfinite(value).all())
            pulled = witness.cotangent_sizes(*trials.seeds, trials.wrt) if finite else None
            push = lambda: (witness.tangent_sizes(trials.wrt) or (None,))[0]  # noqa: E731
            finding = why_nonfinite(trail, witness.finite_flags(), pulled, finite, push, trials.overflows)
            return self._made("nonfinite", finding, trail)
        suspects = suspected(witness.graph)
        if suspects and self._probe and trials.mismatches(gradient):
            verdict: Verdict = "mismatch" if gradient.any() else "zero"
            return self._made(verdict, blamed(suspects), trail)
        rounding = bool(gradient.any()) and trials.is_rounding(gradient, largest, float(np.abs(value).max(initial=0.0)))
        if rounding or not gradient.any():
            return self._made("zero", self._zero(witness, trail, trials, rounding), trail)
        return self._flowing(trail, gradient)

    def _unexplained(self, trail: DataPath, gradient: np.ndarray | None) -> Diagnosis:
        """The verdict by the derivative alone."""
        if gradient is None:
            return self._made("unconnected", CauseFinding(None), trail)
        if not np.isfinite(gradient).all():
            return self._made("nonfinite", CauseFinding(None), trail)
        return self._flowing(trail, gradient) if gradient.any() else self._made("zero", CauseFinding(None), trail)

    def _flowing(self, trail: DataPath, gradient: np.ndarray) -> Diagnosis:
        evidence = []
        dead = int((gradient == 0).sum())
        if dead:
            evidence.append(f"{dead} of {gradient.size} elements have a gradient of zero")
        evidence += dict.fromkeys([f"one path of several is cut by {spelled(step)}" for step in trail.cuts()])
        evidence += [remark.evidence for remark in trail.graph.hints if remark.cause == "out-of-range"]
        if not trail.joined and not self._failures and trail.closed() is None:
            evidence.append(UNSEEN)
        evidence += dict.fromkeys(self._failures)
        of, wrt = self._names
        return Diagnosis("flows", path=tuple(trail.line()), evidence=tuple(evidence), value=self._value, of=of, wrt=wrt)

    def _zero(self, witness: Trace, trail: DataPath, trials: Probe, rounding: bool) -> CauseFinding:
        """Why it is zero; what is left by rounding is so in every precision, and none is too coarse for it.

        Random numbers are others in another precision, and with them what is masked: then it tells nothing.
        """
        pushed = witness.tangent_sizes(trials.wrt)
        reaches, elsewhere = None, False
        if pushed is not None:
            reaches = float(np.abs(pushed[1].reshape(-1)[trials.of]).max(initial=0.0))
            elsewhere = bool(pushed[1].any())
        asked = FurtherEvidence(
            lambda: witness.cotangent_sizes(*trials.seeds, trials.wrt),
            (lambda: None) if rounding or witness.graph.is_random else trials.precise,
            trials.moves if self._probe else lambda: None,
            lambda: witness.reach_overlap(*trials.seeds, trials.wrt),
            rounding,
        )
        steps = None if pushed is None else pushed[0]
        return why_zero(trail, steps, reaches, elsewhere, EPSILON[trials.dtype], asked)

    def _refuse_empty(self, name: str, x: Tensor | None) -> None:
        if x is not None and 0 in self._backend.shape(x):
            shape = tuple(self._backend.shape(x))
            raise SelectionError(f"{name} is empty, of shape {shape}, and only elements have gradients; give it some")

    def _found(self) -> TensorRef:
        try:
            return self._call.find_source(self._place)
        except DtypeError:  # no input is floating point
            if self._place.name is not None or self._place.tensor is not None or len(self._call.inputs) != 1:
                raise SelectionError(
                    "no input is floating point; name the one that is meant, as in wrt='ids'"
                ) from None
            return self._call.inputs[0]

    def _witness(self, source: TensorRef) -> Trace:
        """Run the function under the eyes of the backend; an output without gradients is one too."""
        try:
            return self._followed(source)
        except DtypeError:
            if self._target is not ONLY_OUTPUT:
                raise
        self._target = TensorRef("output", "output")
        return self._followed(source)

    def _followed(self, source: TensorRef) -> Trace:
        """The run, step by step; if the function runs and cannot be followed, its derivative alone."""
        run = PartialCall(self._call, [source], [self._target])
        try:
            witness = CheckedTrace(self._backend.load("explain").trace(run, source.tensor, self._probe))
        except ElementgradError:
            raise
        except Exception as error:
            try:
                blind = OpaqueTrace(self._backend, run, source.tensor)
            except Exception:  # it is the function that raises
                raise error from None
            self._failures.append(cannot_follow(error))
            return blind
        self._failures = witness.failures
        return witness

    def _gradient(self, witness: Trace, trials: Probe) -> tuple[np.ndarray | None, float]:
        """The gradient of what was asked for, as float64, and the largest of the whole; None if there is no path."""
        positions, share = trials.seeds
        whole = witness.gradient(positions, share)
        if whole is None:
            return None, 0.0
        whole = witness.apply_source_hooks(whole)
        if len(positions) == 1:
            wanted = trials.since.base
            self._value = whole if wanted is None else self._backend.take(whole, wanted)
        values = self._floats(whole)
        return values[trials.wrt], float(np.abs(values).max(initial=0.0))

    def _floats(self, x: Tensor) -> np.ndarray:
        values = self._backend.to_float64(x)
        assert values is not None
        return values.reshape(-1)

    def _made(self, verdict: Verdict, finding: CauseFinding, trail: DataPath | None = None) -> Diagnosis:
        if finding.cause == "unused" and verdict == "unconnected" and self._lone():
            finding.variant = CONSTANT
        if finding.cause is None and trail is not None:
            finding.evidence += [remark.evidence for remark in trail.graph.hints if remark.cause is None]
        finding.evidence += self._failures
        return Diagnosis.made(verdict, finding, trail, self._backend.name, *self._names, value=self._value)

    def _lone(self) -> bool:
        """Whether nothing else is given that the target could be computed from."""
        return len(self._call.inputs) == 1 and backend_of_model(self._call.function) is None


def _indexed(name: str, place: Place) -> str:
    """The text of a place, with the name that its tensor turned out to have."""
    return str(Place(None, name, place.index, None, pointwise=place.pointwise)) if place.index else name


@not_compiled
def explain(
    f: Callable[..., Any] | None = None,
    *args: Any,
    kwargs: Mapping[str, Any] = NOTHING,
    of: Any = None,
    wrt: Any = None,
    probe: bool = True,
) -> Diagnosis:
    """Why the gradient of `of` with respect to `wrt` is missing, zero, NaN or wrong: the cause, the line and the fix.

    Give a function or model with its arguments, and name both sides as for `eg.grad`. On PyTorch also live tensors,
    `eg.explain(of=loss, wrt=x)`. On PyTorch and TensorFlow also a training step that takes nothing, `eg.explain(step)`,
    which is run as it is: the answer tells why it raises, or why its tape gives None. With `probe=False` nothing is
    tried out by moving an element, which takes more runs.

    >>> import torch, elementgrad as eg
    >>> def f(x):
    ...     return torch.relu(x).sum()
    >>> eg.explain(f, torch.tensor([1.0, -2.0]), wrt="x[1]").cause
    'dead-relu'
    >>> eg.explain(f, torch.tensor([1.0, -2.0]), wrt="x[0]").verdict
    'flows'
    """
    if not isinstance(probe, bool):
        raise OptionError(f"probe={quoted(probe)} is neither True nor False; give one of them")
    if f is None:
        return _live(of, wrt)
    require_callable(f)
    if not args and not kwargs and of is None and registry.backend_of_model(f) is None:
        return _step(f, wrt)
    place, target_place = parse_place(wrt), parse_target(of)
    call = BoundCall(f, args, kwargs)
    return Explanation(call, place, target_place, probe).diagnosis()


def _step(f: Callable[[], Any], wrt: Any) -> Diagnosis:
    tensor = None if wrt is None else parse_place(wrt).tensor
    if wrt is not None and tensor is None:
        raise PlaceError(
            f"wrt={quoted(wrt)} names no live tensor; a step without arguments is asked about a tensor itself"
        )
    backend = backend_for_step(f, tensor)
    return _from_told(backend.load("explain").report_step(f, tensor), backend.name)


def _live(of: Any, wrt: Any) -> Diagnosis:
    if of is None or wrt is None:
        raise PlaceError("eg.explain without a function needs both tensors, as in eg.explain(of=loss, wrt=x)")
    places = [parse_place(side) for side in (of, wrt)]
    for place in places:
        if place.tensor is None:
            raise PlaceError(f"{place} names no live tensor; give a tensor, or the function and its arguments")
    backend = registry.require_backend(places[0].tensor)
    return _from_told(backend.load("explain").report_live(*[_picked(place) for place in places]), backend.name)


def _picked(place: Place) -> tuple[Tensor, np.ndarray | None]:
    """A live tensor, and the flat positions of the elements that are meant; None for all."""
    return place.tensor, np.asarray(place.select().flat()).reshape(-1) if place.index else None


def _from_told(told: LiveReport, framework: str) -> Diagnosis:
    trail = DataPath(told.graph) if told.graph is not None else None
    names = {"of": told.of, "wrt": told.wrt}
    if told.hint is None and told.verdict == "flows":
        return Diagnosis("flows", value=told.value, **names)
    if told.hint is not None and told.hint.cause is None and told.verdict == "flows":
        return Diagnosis("flows", value=told.value, evidence=(told.hint.evidence,), **names)
    if told.hint is not None:
        finding = CauseFinding.of_remark(told.hint)
    elif trail is None:
        finding = CauseFinding(None)
    elif told.verdict == "zero":
        finding = why_zero(trail, None, None, False, 0.0, FurtherEvidence(lambda: told.cotangents))
        if finding.cause in APART:  # a detach leaves no trace in a graph
            seen = f"in the graph other elements are taken, in {spelled(finding.step)}" if finding.step else ""
            finding = CauseFinding(
                None, None, [seen, "a cut leaves no trace in the graph; ask about the function instead"]
            )
    elif told.verdict == "nonfinite":
        finding = why_nonfinite(trail, None, told.cotangents, finite=True)
    else:
        finding = why_unconnected(trail, None)
    return Diagnosis.made(told.verdict, finding, trail, framework, value=told.value, **names)
