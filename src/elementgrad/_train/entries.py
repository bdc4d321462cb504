"""Places of one tensor that are to have no element in common.

Places against the parameters of a model: which elements of which tensor each of them names.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from elementgrad._backends import registry
from elementgrad._place.index import IndexArray
from elementgrad._place.place import Place
from elementgrad._train.trainer import Trainer
from elementgrad._train.weights import Weights, WeightsTrainer
from elementgrad.errors import DuplicateError, FrameworkError, PlaceError


def repeated(positions: np.ndarray) -> int | None:
    """A position that stands twice."""
    ordered = np.sort(positions)
    again = ordered[1:][ordered[1:] == ordered[:-1]]
    return int(again[0]) if again.size else None


def require_apart(name: str, shape: tuple[int, ...], places: Sequence[tuple[str, np.ndarray]]) -> None:
    """Refuse an element of a tensor that two places name, for which of them would it belong to?

    >>> import numpy as np
    >>> from elementgrad._train.entries import require_apart
    >>> require_apart("fc.bias", (4,), [("fc.bias[:2]", np.array([0, 1])), ("fc.bias[1]", np.array([1]))])
    Traceback (most recent call last):
    elementgrad.errors.DuplicateError: fc.bias[1] is named by fc.bias[:2] and by fc.bias[1]; name each element once
    """
    twice = repeated(np.concatenate([np.zeros(0, np.int64), *[positions for _, positions in places]]))
    if twice is not None:
        one, other, *_ = [place for place, positions in places if twice in positions]
        raise DuplicateError(f"{element(name, shape, twice)} is named by {one} and by {other}; name each element once")


def element(name: str, shape: tuple[int, ...], position: int) -> str:
    """The text of one element of a tensor."""
    return f"{name}{[int(axis) for axis in np.unravel_index(position, shape)]}" if shape else name


Tensor = Any


@dataclass(frozen=True, eq=False)
class NamedElements:
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
    backend = registry.backend_of_model(model)
    if backend is None:
        raise FrameworkError(
            f"{type(model).__name__} is not a model whose elements can train; give a torch.nn.Module, a Keras model "
            "or a pytree of jax.Array, such as a dict of parameters"
        )
    return backend.load("train").trainer(model)


def named(trainer: Trainer, place: Place | str) -> NamedElements:
    """What a place names, each element once."""
    if not isinstance(place, Place):
        tensor = registry.backend_of(place)
        place = Place(place, backend=tensor) if tensor is not None else Place.parse(place)
    if place.kind not in (None, "parameter"):
        raise PlaceError(f"{place} is of kind {place.kind!r} and only parameters train")
    name = place.name or (trainer.only_parameter() if place.tensor is None else trainer.named(place.tensor))
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
    return NamedElements(place, name, tensor, shape, selection.flat().reshape(-1))


def all_named(trainer: Trainer, places: Any) -> list[NamedElements]:
    """What several places name; none of them may overlap."""
    single = isinstance(places, Place | str) or registry.backend_of(places) is not None
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


def require_disjoint(found: Sequence[NamedElements]) -> None:
    """Refuse an element that two places name."""
    for tensor in {id(one.tensor): one.tensor for one in found}.values():
        here = [one for one in found if one.tensor is tensor]
        require_apart(here[0].name, here[0].shape, [(str(one.place), one.positions) for one in here])
