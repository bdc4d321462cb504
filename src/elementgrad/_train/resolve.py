"""Places against a model: find the trainer of a model, and resolve each place to elements of one parameter."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from elementgrad._backends import registry
from elementgrad._names.patterns import is_pattern, match_names
from elementgrad._place.index import IndexArray
from elementgrad._place.place import Place
from elementgrad._train.entries import check_no_overlap
from elementgrad._train.trainer import ResolvedPlace, Trainer
from elementgrad._train.weights import Weights, WeightsTrainer
from elementgrad.errors import DuplicateError, FrameworkError, PlaceError


def trainer_of(model: Any) -> Trainer:
    """Return the trainer of a model, or of weights in a file."""
    if isinstance(model, Weights):
        return WeightsTrainer(model)
    backend = registry.backend_of_model(model)
    if backend is None:
        raise FrameworkError(
            f"{type(model).__name__} is not a model whose elements can train; give a torch.nn.Module, a Keras model "
            "or a pytree of jax.Array, such as a dict of parameters"
        )
    return backend.load("train").trainer(model)


def resolve_all(trainer: Trainer, places: Any) -> list[ResolvedPlace]:
    """Resolve one place or several, which must not overlap."""
    single = isinstance(places, Place | str) or registry.backend_of(places) is not None
    if not single and (isinstance(places, Mapping | bytes) or not isinstance(places, Iterable)):
        raise PlaceError(
            f"{type(places).__name__} names no elements; "
            "give places, such as ['fc.weight[3, :]'], or the path of a patch"
        )
    targets = [resolve(trainer, one) for place in ([places] if single else places) for one in _expand(trainer, place)]
    if not targets:
        raise PlaceError("no places are given; name some, such as ['fc.weight[3, :]']")
    check_disjoint(targets)
    return targets


def _expand(trainer: Trainer, place: Any) -> list[Any]:
    """Return the places that a pattern matches, one for each parameter; any other place as it is."""
    parsed = Place.parse(place) if isinstance(place, str) else place
    if not isinstance(parsed, Place) or not is_pattern(parsed.name):
        return [place]
    every = list(trainer.named_parameters())
    matches = set(match_names(str(parsed.name), [name for name, _ in every]))
    first = {id(tensor): name for name, tensor in reversed(every) if name in matches}
    return [
        Place(None, name, parsed.index, parsed.kind, pointwise=parsed.pointwise)
        for name, tensor in every
        if first.get(id(tensor)) == name
    ]


def resolve(trainer: Trainer, place: Place | str) -> ResolvedPlace:
    """Resolve a place, which must name each element once."""
    if not isinstance(place, Place):
        backend = registry.backend_of(place)
        place = Place(place, backend=backend) if backend is not None else Place.parse(place)
    if place.kind not in (None, "parameter"):
        raise PlaceError(f"{place} is of kind {place.kind!r} and only parameters train")
    name = place.name or (trainer.only_parameter() if place.tensor is None else trainer.name_of(place.tensor))
    tensor = trainer.parameter(name)
    trainer.check_parameter(tensor, name)
    place = Place(None, name, place.index, None, pointwise=place.pointwise)
    shape = tuple(int(size) for size in tensor.shape)
    selection = place.select(shape)
    if not selection.size:
        raise PlaceError(f"{place} names no element of a parameter of shape {shape}")
    if not selection.unique:
        raise DuplicateError(f"{place} names element {selection.repeated} twice; name each element once")
    if any(isinstance(part, IndexArray) and part.boolean for part in place.index):
        # The text of a mask is as long as the tensor is large, so the place lists its elements instead.
        place = Place(None, name).coords(selection.coords().reshape(-1, len(shape)))
    return ResolvedPlace(place, name, tensor, shape, selection.flat().reshape(-1))


def check_disjoint(targets: Sequence[ResolvedPlace]) -> None:
    """Raise a `DuplicateError` if two places name the same element."""
    for tensor in {id(target.tensor): target.tensor for target in targets}.values():
        same = [target for target in targets if target.tensor is tensor]
        check_no_overlap(same[0].name, same[0].shape, [(str(target.place), target.positions) for target in same])
