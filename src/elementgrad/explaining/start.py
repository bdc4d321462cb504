"""`explain`: a function, live tensors or a training step in, a diagnosis out."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from elementgrad import backends
from elementgrad.backends import plain
from elementgrad.backends.witness import Told, Verdict, Witness, weights
from elementgrad.errors import DtypeError, OptionError, PlaceError, SelectionError
from elementgrad.explaining.diagnosis import Diagnosis
from elementgrad.explaining.following import Finding, Trail, why_nonfinite, why_unconnected, why_zero
from elementgrad.explaining.precision import EPSILON, Sampled, differences, moves
from elementgrad.place import Place
from elementgrad.read import NOTHING, parsed, parsed_target
from elementgrad.side import Side
from elementgrad.source import ONLY_OUTPUT, Source
from elementgrad.trace import Call, Run

Tensor = Any
SUSPECT = ("modified-through-data", "hook", "custom-rule")
"""Remarks for which a gradient that flows is held against differences."""
FEW = 4
"""How many elements are tried out for that."""
SUSPICIOUS = 64.0
"""A gradient below so many units of rounding of the value may be what is left of a sum that cancels."""


@plain
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
    `eg.explain(of=loss, wrt=x)`, and a training step that takes nothing, `eg.explain(step)`, which is run as it is: the
    answer tells why it raises. With `probe=False` nothing is tried out by moving an element, which takes more runs.

    >>> import torch, elementgrad as eg
    >>> def f(x):
    ...     return torch.relu(x).sum()
    >>> eg.explain(f, torch.tensor([1.0, -2.0]), wrt="x[1]").cause
    'dead-relu'
    >>> eg.explain(f, torch.tensor([1.0, -2.0]), wrt="x[0]").verdict
    'flows'
    """
    if not isinstance(probe, bool):
        raise OptionError(f"probe={probe!r} is neither True nor False; give one of them")
    if f is None:
        return _live(of, wrt)
    if not args and not kwargs and of is None and backends.holder(f) is None:
        backend = backends.eager()
        return _from_told(backend.step(f, None if wrt is None else parsed(wrt).tensor), backend.name)
    place, target_place = parsed(wrt), parsed_target(of)
    call = Call(f, args, kwargs)
    return Inquiry(call, place, target_place, probe).diagnosis()


def _live(of: Any, wrt: Any) -> Diagnosis:
    if of is None or wrt is None:
        raise PlaceError("eg.explain without a function needs both tensors, as in eg.explain(of=loss, wrt=x)")
    places = [parsed(side) for side in (of, wrt)]
    for place in places:
        if place.tensor is None:
            raise PlaceError(f"{place} names no live tensor; give a tensor, or the function and its arguments")
    backend = backends.find(places[0].tensor)
    return _from_told(backend.told(*[_picked(place) for place in places]), backend.name)


def _picked(place: Place) -> tuple[Tensor, np.ndarray | None]:
    """A live tensor, and the flat positions of the elements that are meant; None for all."""
    return place.tensor, np.asarray(place.select().flat()).reshape(-1) if place.index else None


def _from_told(told: Told, framework: str) -> Diagnosis:
    trail = Trail(told.account) if told.account is not None else None
    names = {"of": told.of, "wrt": told.wrt}
    if told.remark is None and told.verdict == "flows":
        return Diagnosis("flows", value=told.value, **names)
    if told.remark is not None:
        finding = Finding.of_remark(told.remark)
    elif trail is None:
        finding = Finding(None)
    elif told.verdict == "zero":
        finding = why_zero(trail, None, told.pulled, None, 0.0, None)
    elif told.verdict == "nonfinite":
        finding = why_nonfinite(trail, None, told.pulled, finite=True)
    else:
        finding = why_unconnected(trail, None)
    return Diagnosis.made(told.verdict, finding, trail, framework, value=told.value, **names)


class Inquiry:
    """One question about a function at its arguments."""

    def __init__(self, call: Call, place: Place, target_place: Place, probe: bool):
        self.call = call
        self.backend = call.backend
        self._place = place
        self._target_place = target_place
        self._probe = probe
        self._target = call.target(target_place)
        self._value: Tensor = None

    def diagnosis(self) -> Diagnosis:
        """The answer."""
        try:
            self._source = self.call.source(self._place)
        except DtypeError:
            (self._source,) = self._only_integers()
        source = self._source
        if source.tensor is not None and self.backend.kind(source.tensor) not in "fc":
            evidence = f"{source.name} is of dtype {self.backend.dtype(source.tensor)}"
            return self._made(
                "unconnected", Finding("integer", None, [evidence]), None, wrt=_spelled(self._place, source)
            )
        witness = self._witness()
        trail = Trail(witness.account)
        self._since = self.call.side(self._place, source, 0, witness.source, batch=False)
        if self.backend.kind(witness.target) not in "fc":
            return self._made("unconnected", why_unconnected(trail, None), trail)
        self._to = self.call.side(self._target_place, self._target, 0, witness.target, batch=False)
        try:
            gradient = self._gradient(witness)
        except Exception as error:
            remark = witness.refusal(error)
            if remark is None:
                raise
            return self._made("unconnected", Finding.of_remark(remark), trail)
        return self._judged(witness, trail, gradient)

    def _judged(self, witness: Witness, trail: Trail, gradient: np.ndarray | None) -> Diagnosis:
        decided = [remark for remark in witness.account.remarks if remark.cause == "not-tracked"]
        if gradient is None or decided:
            needs = gradient is None and not trail.cuts() and self._probe and not decided
            return self._made("unconnected", why_unconnected(trail, self._moves() if needs else None), trail)
        if not np.isfinite(gradient).all():
            finite = bool(np.isfinite(self._target_values(witness)).all())
            seen = None if finite else witness.values()
            return self._made(
                "nonfinite",
                why_nonfinite(trail, seen, witness.pull(*self._seeds(), self._elements(self._since)), finite),
                trail,
            )
        suspects = [remark for remark in witness.account.remarks if remark.cause in SUSPECT]
        if suspects and self._probe and self._mismatches(gradient):
            verdict: Verdict = "mismatch" if gradient.any() else "zero"
            return self._made(verdict, Finding.of_remark(suspects[0]), trail)
        if not gradient.any():
            return self._made("zero", self._zero(witness, trail), trail)
        if self._maybe_rounding(witness, gradient) and self._scales_with_precision(gradient):
            return self._made("zero", self._zero(witness, trail), trail)
        return self._flowing(trail, gradient)

    def _flowing(self, trail: Trail, gradient: np.ndarray) -> Diagnosis:
        evidence = []
        dead = int((gradient == 0).sum())
        if dead:
            evidence.append(f"{dead} of {gradient.size} elements have a gradient of zero")
        evidence += [f"one path of several is cut by {step.operation} at {step.where}" for step in trail.cuts()]
        of, wrt = self._names()
        return Diagnosis("flows", path=tuple(trail.line()), evidence=tuple(evidence), value=self._value, of=of, wrt=wrt)

    def _zero(self, witness: Witness, trail: Trail) -> Finding:
        pushed = witness.push(self._elements(self._since))
        reaches = None
        if pushed is not None:
            reached = pushed[1].reshape(-1)[self._elements(self._to)]
            reaches = float(np.abs(reached).max(initial=0.0))
        return why_zero(
            trail,
            None if pushed is None else pushed[0],
            witness.pull(*self._seeds(), self._elements(self._since)),
            reaches,
            EPSILON[self.backend.dtype(self._to.tensor)]
            if self.backend.dtype(self._to.tensor) in EPSILON
            else 2.0**-23,
            self._precise(),
        )

    def _witness(self) -> Witness:
        """Run the function under the eyes of the backend; an output without gradients is one too."""
        source = self._source
        try:
            return self.backend.witness(Run(self.call, [source], [self._target]), source.tensor)
        except DtypeError:
            if self._target is not ONLY_OUTPUT:
                raise
            self._target = Source("output", "output")
            return self.backend.witness(Run(self.call, [source], [self._target]), source.tensor)

    def _gradient(self, witness: Witness) -> np.ndarray | None:
        """The gradient of what was asked for, as float64; None if there is no path."""
        positions, share = self._seeds()
        whole = witness.gradient(positions, share)
        if whole is None:
            return None
        whole = witness.arriving(whole)
        if len(positions) == 1:
            wanted = self._since.base
            self._value = whole if wanted is None else self.backend.take(whole, wanted)
        values = self.backend.floats(whole)
        assert values is not None
        return values.reshape(-1)[self._elements(self._since)]

    def _seeds(self) -> tuple[np.ndarray, np.ndarray]:
        """The elements asked about, and a weight for each: uneven, so that several do not cancel."""
        positions = self._elements(self._to)
        return positions, weights(len(positions))

    def _elements(self, side: Side) -> np.ndarray:
        return np.asarray(side.select(..., self.backend).flat()).reshape(-1)

    def _target_values(self, witness: Witness) -> np.ndarray:
        values = self.backend.floats(witness.target)
        assert values is not None
        return values.reshape(-1)[self._elements(self._to)]

    def _sampled(self, dtype: str | None = None) -> Sampled:
        return Sampled(self.call, self._source, self._target, dtype)

    def _moves(self) -> bool:
        sampled = self._sampled()
        like = self._base()
        return moves(sampled, like, self._elements(self._to), list(self._elements(self._since)), self._dtype())

    def _base(self) -> Tensor:
        """The source, or zeros to add to it where the run meets it."""
        tensor = self._source.tensor
        return (
            self.backend.zeros(tuple(self.backend.shape(self._since.tensor)), self._since.tensor)
            if tensor is None
            else tensor
        )

    def _dtype(self) -> str:
        name = self.backend.dtype(self._since.tensor)
        return name if name in EPSILON else "float32"

    def _mismatches(self, gradient: np.ndarray) -> bool:
        """Whether some of the gradient is clearly not the slope of the values."""
        positions, share = self._seeds()
        sampled = self._sampled()
        for number, position in list(enumerate(self._elements(self._since)))[:FEW]:
            found = differences(
                sampled, self.backend.floats(self._base()), self._base(), positions, int(position), self._dtype()
            )
            slopes = [float(share @ side) for side in (found.central, found.left, found.right)]
            slack = float(np.abs(share) @ found.bound) * 4 + 0.02 * max(map(abs, slopes)) + 1e-12
            if not min(slopes) - slack <= gradient[number] <= max(slopes) + slack:
                return True
        return False

    def _maybe_rounding(self, witness: Witness, gradient: np.ndarray) -> bool:
        size = max(1.0, float(np.abs(self._target_values(witness)).max(initial=0.0)))
        return float(np.abs(gradient).max()) <= SUSPICIOUS * EPSILON[self._dtype()] * size

    def _precise(self, dtype: str = "float64") -> float | None:
        """The size of the gradient in another precision, where the function accepts it."""
        try:
            sampled = self._sampled(dtype)
            positions, share = self._seeds()
            seed = np.zeros(math.prod(self.backend.shape(self._to.tensor)))
            seed[positions] = share
            found = sampled.gradient(seed)
        except Exception:  # it is the user's function, and made for another precision
            return None
        if found is None or found.size != math.prod(self.backend.shape(self._since.tensor)):
            return None
        return float(np.abs(found.reshape(-1)[self._elements(self._since)]).max(initial=0.0))

    def _scales_with_precision(self, gradient: np.ndarray) -> bool:
        """Whether the gradient is mere rounding: in another precision it is smaller or larger by as much."""
        here, other = float(np.abs(gradient).max()), None
        if self._dtype() == "float64":
            other = self._precise("float32")
            return other is not None and other > 1e4 * here
        other = self._precise()
        return other is not None and other < 1e-4 * here

    def _only_integers(self) -> tuple[Source]:
        """The only input where all are integers."""
        if self._place.name is not None or self._place.tensor is not None or len(self.call.inputs) != 1:
            raise SelectionError("no input is floating point; name the one that is meant, as in wrt='ids'")
        return (self.call.inputs[0],)

    def _names(self) -> tuple[str, str]:
        to = getattr(self, "_to", None)
        since = getattr(self, "_since", None)
        of = to.name if to is not None else self._target_place.name or "output"
        return _indexed(of, self._target_place), _indexed(since.name, self._place) if since is not None else "the input"

    def _made(self, verdict: Verdict, finding: Finding, trail: Trail | None, wrt: str | None = None) -> Diagnosis:
        of, name = self._names()
        return Diagnosis.made(verdict, finding, trail, self.backend.name, of, wrt or name, value=self._value)


def _spelled(place: Place, source: Source) -> str:
    return _indexed(source.name, place)


def _indexed(name: str, place: Place) -> str:
    """The text of a place, with the name that its tensor turned out to have."""
    return str(Place(None, name, place.index, None, pointwise=place.pointwise)) if place.index else name
