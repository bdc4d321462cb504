"""The parameters that a choice is made among, and what they were before."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from elementgrad import backends
from elementgrad.backends import Backend
from elementgrad.backends.model import Model
from elementgrad.errors import DtypeError, FrameworkError, OptionError, PlaceError
from elementgrad.place import Place
from elementgrad.read import parsed
from elementgrad.text import nearest

Tensor = Any


@dataclass(frozen=True, eq=False)
class Candidate:
    """A parameter, and which of its elements may be chosen."""

    name: str
    tensor: Tensor
    shape: tuple[int, ...]
    positions: np.ndarray | None = None
    """In the flattened tensor, rising; None for all."""

    @property
    def size(self) -> int:
        """How many elements may be chosen."""
        return math.prod(self.shape) if self.positions is None else len(self.positions)


def candidates(model: Model, among: Any, backend: Backend) -> list[Candidate]:
    """The floating-point parameters of a model that somebody names, in the model's order; all of them for None."""
    held = [(name, tensor) for name, kind, tensor in model.held() if kind == "parameter"]
    floating = [(name, x) for name, x in held if backend.kind(x) == "f"]
    if not floating:
        raise DtypeError("the model has no floating-point parameter to choose from; give one that has")
    if among is None:
        return [Candidate(name, x, tuple(backend.shape(x))) for name, x in floating]
    single = isinstance(among, str | Place) or not isinstance(among, Iterable) or backends.owner(among) is not None
    named: dict[int, list[Place]] = {}
    for place in map(parsed, [among] if single else among):
        named.setdefault(_number(place, held, model, backend), []).append(place)
    if not named:
        raise PlaceError("among names no parameter; name some, or leave it out to choose among all")
    return [_narrowed(*held[number], named[number], backend) for number in sorted(named)]


def earlier(since: Any, found: list[Candidate], model: Model, backend: Backend) -> list[Tensor]:
    """What each parameter was then, by a state dict or another model."""
    if backends.holder(since) is backend:
        names = [name for name, kind, _ in backend.model(since).held() if kind == "parameter"]
        then = {candidate.name: _parameter(backend.model(since), candidate.name) for candidate in found}
    elif isinstance(since, Mapping):
        # By any of its names: of tied parameters a file may hold the second one alone.
        aliases = [(name, model.bearing(name)) for name in since if isinstance(name, str)]
        known = {id(x): since[name] for name, bearers in aliases for kind, x in bearers if kind == "parameter"}
        then = {candidate.name: known.get(id(candidate.tensor)) for candidate in found}
        names = [name for name in since if isinstance(name, str)]
    else:
        raise OptionError(
            f"since={type(since).__name__} holds no earlier parameters; give a state dict or a model of {backend.name}"
        )
    for candidate in found:
        tensor = then[candidate.name]
        if tensor is None:
            raise PlaceError(f"since holds no {candidate.name!r}; {nearest(candidate.name, names)}")
        if backends.owner(tensor) is not backend:
            raise FrameworkError(
                f"since holds {candidate.name} as {type(tensor).__name__}; give a tensor of {backend.name}"
            )
        if tuple(backend.shape(tensor)) != candidate.shape:
            raise OptionError(
                f"since holds {candidate.name} of shape {tuple(backend.shape(tensor))} and the model of shape "
                f"{candidate.shape}; give what it was before, of the same architecture"
            )
    return [then[candidate.name] for candidate in found]


def _number(place: Place, held: list[tuple[str, Tensor]], model: Model, backend: Backend) -> int:
    """Which parameter a place is about."""
    if place.write is not None:
        raise PlaceError(f"{place!r} is about a write in a recording, and this is a model; leave write out")
    if place.tensor is None and place.name is None:
        raise PlaceError(f"{place} says which elements and not of which parameter; name it, as in {held[0][0]}{place}")
    names = [name for name, _ in held]
    if place.name in names and place.kind in (None, "parameter"):
        return names.index(place.name)
    tensor = _parameter(model, place.name) if place.tensor is None else backend.bare(place.tensor)
    for number, (_, other) in enumerate(held):
        if other is tensor and place.kind in (None, "parameter"):
            return number
    if place.name is None:
        raise PlaceError(f"the tensor is no parameter of the model; name one, {nearest('', names)}")
    raise PlaceError(f"no parameter is named {place.name!r}; {nearest(place.name, names)}")


def _parameter(model: Model, name: str | None) -> Tensor | None:
    return next((x for kind, x in model.bearing(name or "") if kind == "parameter"), None)


def _narrowed(name: str, tensor: Tensor, places: list[Place], backend: Backend) -> Candidate:
    """A parameter with the elements that one or more places name of it."""
    if backend.kind(tensor) != "f":
        raise DtypeError(f"{name} is of dtype {backend.dtype(tensor)}; choose among floating-point parameters")
    shape = tuple(backend.shape(tensor))
    chosen = [Place(None, name, place.index, pointwise=place.pointwise).select(shape) for place in places]
    if any(selection.whole for selection in chosen):
        return Candidate(name, tensor, shape)
    positions = np.unique(np.concatenate([selection.flat().reshape(-1) for selection in chosen]))
    return Candidate(name, tensor, shape, positions)
