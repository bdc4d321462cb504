"""`explain`: a function, live tensors or a training step in, a diagnosis out."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from elementgrad import backends
from elementgrad.backends import plain
from elementgrad.backends.witness import Told
from elementgrad.errors import OptionError, PlaceError, quoted
from elementgrad.explaining.diagnosis import Diagnosis
from elementgrad.explaining.following import spelled, why_nonfinite, why_unconnected
from elementgrad.explaining.inquiry import Inquiry
from elementgrad.explaining.trail import Finding, Trail
from elementgrad.explaining.vanishing import APART, Asked, why_zero
from elementgrad.place import Place
from elementgrad.read import NOTHING, parsed, parsed_target
from elementgrad.trace import Call, require_callable

Tensor = Any


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
    if not args and not kwargs and of is None and backends.holder(f) is None:
        return _step(f, wrt)
    place, target_place = parsed(wrt), parsed_target(of)
    call = Call(f, args, kwargs)
    return Inquiry(call, place, target_place, probe).diagnosis()


def _step(f: Callable[[], Any], wrt: Any) -> Diagnosis:
    tensor = None if wrt is None else parsed(wrt).tensor
    if wrt is not None and tensor is None:
        raise PlaceError(
            f"wrt={quoted(wrt)} names no live tensor; a step without arguments is asked about a tensor itself"
        )
    backend = backends.eager(f, tensor)
    return _from_told(backend.step(f, tensor), backend.name)


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
    if told.remark is not None and told.remark.cause is None and told.verdict == "flows":
        return Diagnosis("flows", value=told.value, evidence=(told.remark.evidence,), **names)
    if told.remark is not None:
        finding = Finding.of_remark(told.remark)
    elif trail is None:
        finding = Finding(None)
    elif told.verdict == "zero":
        finding = why_zero(trail, None, None, False, 0.0, Asked(lambda: told.pulled))
        if finding.cause in APART:  # a detach leaves no trace in a graph
            seen = f"in the graph other elements are taken, in {spelled(finding.step)}" if finding.step else ""
            finding = Finding(None, None, [seen, "a cut leaves no trace in the graph; ask about the function instead"])
    elif told.verdict == "nonfinite":
        finding = why_nonfinite(trail, None, told.pulled, finite=True)
    else:
        finding = why_unconnected(trail, None)
    return Diagnosis.made(told.verdict, finding, trail, framework, value=told.value, **names)
