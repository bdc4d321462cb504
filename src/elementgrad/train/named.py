"""Places against the parameters of a model: which elements of which tensor each of them names."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from elementgrad import backends
from elementgrad.backends.training import Trainer
from elementgrad.errors import DuplicateError, FrameworkError, PlaceError
from elementgrad.index import IndexArray
from elementgrad.place import Place
from elementgrad.train.apart import require_apart
from elementgrad.train.weights import Weights, WeightsTrainer

Tensor = Any


@dataclass(frozen=True, eq=False)
class Named:
    """Some elements of one parameter."""

    place: Place
    name: str
    tensor: Tensor
    shape: tuple[int, ...]
    positions: np.ndarray
    """Where they are in the parameter, flat, in the order of the place."""


def trainer_of(model: Any) -> Trainer:
    """How elements of a model train in its framework."""
    if isinstance(model, Weights):
        return WeightsTrainer(model)
    backend = backends.holder(model)
    if backend is None:
        raise FrameworkError(
            f"{type(model).__name__} is not a model whose elements can train; give a torch.nn.Module, a Keras model "
            "or a pytree of jax.Array, such as a dict of parameters"
        )
    return backend.trainer(model)


def named(trainer: Trainer, place: Place | str) -> Named:
    """What a place names, each element once."""
    if not isinstance(place, Place):
        tensor = backends.owner(place)
        place = Place(place, backend=tensor) if tensor is not None else Place.parse(place)
    if place.kind not in (None, "parameter"):
        raise PlaceError(f"{place} is of kind {place.kind!r} and only parameters train")
    name = place.name or (trainer.lone() if place.tensor is None else trainer.named(place.tensor))
    tensor = trainer.parameter(name)
    trainer.check(tensor, name)
    place = Place(None, name, place.index, None, pointwise=place.pointwise)
    shape = tuple(int(size) for size in tensor.shape)
    selection = place.select(shape)
    if not selection.size:
        raise PlaceError(f"{place} names no element of a parameter of shape {shape}")
    if not selection.unique:
        raise DuplicateError(f"{place} names element {selection.repeated} twice; name each element once")
    if any(isinstance(part, IndexArray) and part.boolean for part in place.index):
        # Said by its elements, since the text of a mask is as long as the tensor is large.
        place = Place(None, name).coords(selection.coords().reshape(-1, len(shape)))
    return Named(place, name, tensor, shape, selection.flat().reshape(-1))


def all_named(trainer: Trainer, places: Any) -> list[Named]:
    """What several places name; none of them may overlap."""
    single = isinstance(places, Place | str) or backends.owner(places) is not None
    if not single and (isinstance(places, Mapping | bytes) or not isinstance(places, Iterable)):
        raise PlaceError(
            f"{type(places).__name__} names no elements; "
            "give places, such as ['fc.weight[3, :]'], or the path of a patch"
        )
    found = [named(trainer, place) for place in ([places] if single else places)]
    if not found:
        raise PlaceError("no places are given; name some, such as ['fc.weight[3, :]']")
    require_disjoint(found)
    return found


def require_disjoint(found: Sequence[Named]) -> None:
    """Refuse an element that two places name."""
    for tensor in {id(one.tensor): one.tensor for one in found}.values():
        here = [one for one in found if one.tensor is tensor]
        require_apart(here[0].name, here[0].shape, [(str(one.place), one.positions) for one in here])
