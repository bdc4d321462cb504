"""One question about a function at its arguments: the verdict first, then who is to blame."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from elementgrad.backends import holder
from elementgrad.backends.witness import Account, Remark, Verdict, Witness, unfollowed
from elementgrad.errors import DtypeError, ElementgradError, SelectionError
from elementgrad.explaining.blind import UNSEEN, Blind, Guarded
from elementgrad.explaining.diagnosis import Diagnosis
from elementgrad.explaining.following import spelled, why_nonfinite, why_unconnected
from elementgrad.explaining.precision import EPSILON
from elementgrad.explaining.trail import Finding, Trail
from elementgrad.explaining.trials import Trials
from elementgrad.explaining.vanishing import Asked, why_zero
from elementgrad.explaining.variants import CONSTANT
from elementgrad.place import Place
from elementgrad.source import ONLY_OUTPUT, Source
from elementgrad.trace import Call, Run

Tensor = Any
SUSPECT = ("modified-through-data", "hook", "custom-rule")
"""Remarks for which a gradient that flows is held against differences, the likeliest first."""


def suspected(account: Account) -> list[Remark]:
    """What may make a gradient wrong, the likeliest first."""
    found = [remark for remark in account.remarks if remark.cause in SUSPECT]
    return sorted(found, key=lambda remark: SUSPECT.index(str(remark.cause)))


def blamed(suspects: Sequence[Remark]) -> Finding:
    """Who makes a gradient wrong; of several sorts of suspects none."""
    if len({remark.cause for remark in suspects}) == 1:
        return Finding.of_remark(suspects[0])
    words = {remark.cause: remark.step.operation if remark.step is not None else "" for remark in suspects}
    return Finding(None, None, [f"it may be {cause}: {operation}" for cause, operation in words.items()])


class Inquiry:
    """A function at its arguments, and both sides by their places."""

    def __init__(self, call: Call, place: Place, target_place: Place, probe: bool):
        self._call = call
        self._backend = call.backend
        self._place = place
        self._target_place = target_place
        self._probe = probe
        self._target = call.target(target_place)
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
            return self._made("unconnected", Finding("integer", None, [evidence]))
        if source.tensor is not None:
            self._refuse_complex(source.name, source.tensor)
        self._refuse_empty(source.name, source.tensor)
        witness = self._witness(source)
        self._refuse_empty(source.name, witness.source)
        trail = Trail(witness.account)
        since = self._call.side(self._place, source, 0, witness.source, batch=False)
        if self._backend.kind(witness.target) not in "fc":
            finding = Finding(None) if isinstance(witness, Blind) else why_unconnected(trail, None)
            return self._made("unconnected", finding, trail)
        to = self._call.side(self._target_place, self._target, 0, witness.target, batch=False)
        self._refuse_complex(since.name, witness.source)
        self._refuse_complex(to.name, witness.target)
        self._names = _indexed(to.name, self._target_place), self._names[1]
        trials = Trials(self._call, source, self._target, to, since)
        try:
            gradient, largest = self._gradient(witness, trials)
        except Exception as error:
            remark = witness.refusal(error)
            if remark is None:
                raise
            return self._made("unconnected", Finding.of_remark(remark), trail)
        return self._judged(witness, trail, trials, gradient, largest)

    def _refuse_complex(self, name: str, x: Tensor) -> None:
        """Zero and rounding are told of real numbers only."""
        if self._backend.kind(x) == "c":
            raise DtypeError(
                f"{name} is complex, and gradients are explained between real tensors only; take z.real and z.imag as "
                "arguments, give the output's real or imaginary part, or use eg.check"
            )

    def _judged(
        self, witness: Witness, trail: Trail, trials: Trials, gradient: np.ndarray | None, largest: float
    ) -> Diagnosis:
        if isinstance(witness, Blind):
            return self._unexplained(trail, gradient)
        decided = any(remark.cause == "not-tracked" for remark in witness.account.remarks)
        if gradient is None or decided:
            open_ = gradient is None and not trail.cuts() and not decided and self._probe
            return self._made("unconnected", why_unconnected(trail, trials.moves() if open_ else None), trail)
        value = self._floats(witness.target)[trials.of]
        if not np.isfinite(gradient).all():
            finite = bool(np.isfinite(value).all())
            pulled = witness.pull(*trials.seeds, trials.wrt) if finite else None
            push = lambda: (witness.push(trials.wrt) or (None,))[0]  # noqa: E731
            finding = why_nonfinite(trail, witness.values(), pulled, finite, push, trials.overflows)
            return self._made("nonfinite", finding, trail)
        suspects = suspected(witness.account)
        if suspects and self._probe and trials.mismatches(gradient):
            verdict: Verdict = "mismatch" if gradient.any() else "zero"
            return self._made(verdict, blamed(suspects), trail)
        rounding = bool(gradient.any()) and trials.is_rounding(gradient, largest, float(np.abs(value).max(initial=0.0)))
        if rounding or not gradient.any():
            return self._made("zero", self._zero(witness, trail, trials, rounding), trail)
        return self._flowing(trail, gradient)

    def _unexplained(self, trail: Trail, gradient: np.ndarray | None) -> Diagnosis:
        """The verdict by the derivative alone."""
        if gradient is None:
            return self._made("unconnected", Finding(None), trail)
        if not np.isfinite(gradient).all():
            return self._made("nonfinite", Finding(None), trail)
        return self._flowing(trail, gradient) if gradient.any() else self._made("zero", Finding(None), trail)

    def _flowing(self, trail: Trail, gradient: np.ndarray) -> Diagnosis:
        evidence = []
        dead = int((gradient == 0).sum())
        if dead:
            evidence.append(f"{dead} of {gradient.size} elements have a gradient of zero")
        evidence += dict.fromkeys([f"one path of several is cut by {spelled(step)}" for step in trail.cuts()])
        evidence += [remark.evidence for remark in trail.account.remarks if remark.cause == "out-of-range"]
        if not trail.joined and not self._failures and trail.closed() is None:
            evidence.append(UNSEEN)
        evidence += dict.fromkeys(self._failures)
        of, wrt = self._names
        return Diagnosis("flows", path=tuple(trail.line()), evidence=tuple(evidence), value=self._value, of=of, wrt=wrt)

    def _zero(self, witness: Witness, trail: Trail, trials: Trials, rounding: bool) -> Finding:
        """Why it is zero; what is left by rounding is so in every precision, and none is too coarse for it.

        Random numbers are others in another precision, and with them what is masked: then it tells nothing.
        """
        pushed = witness.push(trials.wrt)
        reaches, elsewhere = None, False
        if pushed is not None:
            reaches = float(np.abs(pushed[1].reshape(-1)[trials.of]).max(initial=0.0))
            elsewhere = bool(pushed[1].any())
        asked = Asked(
            lambda: witness.pull(*trials.seeds, trials.wrt),
            (lambda: None) if rounding or witness.account.draws else trials.precise,
            trials.moves if self._probe else lambda: None,
            lambda: witness.meet(*trials.seeds, trials.wrt),
            rounding,
        )
        steps = None if pushed is None else pushed[0]
        return why_zero(trail, steps, reaches, elsewhere, EPSILON[trials.dtype], asked)

    def _refuse_empty(self, name: str, x: Tensor | None) -> None:
        if x is not None and 0 in self._backend.shape(x):
            shape = tuple(self._backend.shape(x))
            raise SelectionError(f"{name} is empty, of shape {shape}, and only elements have gradients; give it some")

    def _found(self) -> Source:
        try:
            return self._call.source(self._place)
        except DtypeError:  # no input is floating point
            if self._place.name is not None or self._place.tensor is not None or len(self._call.inputs) != 1:
                raise SelectionError(
                    "no input is floating point; name the one that is meant, as in wrt='ids'"
                ) from None
            return self._call.inputs[0]

    def _witness(self, source: Source) -> Witness:
        """Run the function under the eyes of the backend; an output without gradients is one too."""
        try:
            return self._followed(source)
        except DtypeError:
            if self._target is not ONLY_OUTPUT:
                raise
        self._target = Source("output", "output")
        return self._followed(source)

    def _followed(self, source: Source) -> Witness:
        """The run, step by step; if the function runs and cannot be followed, its derivative alone."""
        run = Run(self._call, [source], [self._target])
        try:
            witness = Guarded(self._backend.witness(run, source.tensor, self._probe))
        except ElementgradError:
            raise
        except Exception as error:
            try:
                blind = Blind(self._backend, run, source.tensor)
            except Exception:  # it is the function that raises
                raise error from None
            self._failures.append(unfollowed(error))
            return blind
        self._failures = witness.failures
        return witness

    def _gradient(self, witness: Witness, trials: Trials) -> tuple[np.ndarray | None, float]:
        """The gradient of what was asked for, as float64, and the largest of the whole; None if there is no path."""
        positions, share = trials.seeds
        whole = witness.gradient(positions, share)
        if whole is None:
            return None, 0.0
        whole = witness.arriving(whole)
        if len(positions) == 1:
            wanted = trials.since.base
            self._value = whole if wanted is None else self._backend.take(whole, wanted)
        values = self._floats(whole)
        return values[trials.wrt], float(np.abs(values).max(initial=0.0))

    def _floats(self, x: Tensor) -> np.ndarray:
        values = self._backend.floats(x)
        assert values is not None
        return values.reshape(-1)

    def _made(self, verdict: Verdict, finding: Finding, trail: Trail | None = None) -> Diagnosis:
        if finding.cause == "unused" and verdict == "unconnected" and self._lone():
            finding.variant = CONSTANT
        if finding.cause is None and trail is not None:
            finding.evidence += [remark.evidence for remark in trail.account.remarks if remark.cause is None]
        finding.evidence += self._failures
        return Diagnosis.made(verdict, finding, trail, self._backend.name, *self._names, value=self._value)

    def _lone(self) -> bool:
        """Whether nothing else is given that the target could be computed from."""
        return len(self._call.inputs) == 1 and holder(self._call.function) is None


def _indexed(name: str, place: Place) -> str:
    """The text of a place, with the name that its tensor turned out to have."""
    return str(Place(None, name, place.index, None, pointwise=place.pointwise)) if place.index else name
