"""Resolves places in a model, and sends each the gradient of the losses given for it."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from elementgrad._backends import registry
from elementgrad._names.call import BoundCall
from elementgrad._names.names import expand_place
from elementgrad._place.grammar import listed
from elementgrad._place.index import IndexArray
from elementgrad._place.place import Place
from elementgrad._train.entries import check_no_overlap, place_label
from elementgrad._train.trainer import ElementGroup, ResolvedPlace, Trainer, groups_by_tensor
from elementgrad._train.weights import Weights, WeightsTrainer
from elementgrad.errors import DuplicateError, PlaceError, UnconnectedError

if TYPE_CHECKING:
    from elementgrad._read.jacobian import Reason

Tensor = Any
Route = tuple[ResolvedPlace, ElementGroup, np.ndarray]
"""A place that a loss is given for, a group that has elements of it, and the indices of these in the group."""
EXPLAIN_STEP = ", or put the step into a function and call eg.explain(step), which names the line where it is cut"


def trainer_of(model: Any) -> Trainer:
    """Return the trainer of a model, or of weights in a file."""
    if isinstance(model, Weights):
        return WeightsTrainer(model)
    backend = registry.backend_of_model(model)
    if backend is None:
        raise registry.no_model_error(model, "is not a model whose elements can train")
    return backend.load("train").trainer(model)


def resolve_all(trainer: Trainer, places: Any) -> list[ResolvedPlace]:
    """Resolve one place or several, which must not overlap."""
    single = isinstance(places, Place | str) or registry.backend_of(places) is not None
    if not single and (isinstance(places, Mapping | bytes) or not isinstance(places, Iterable)):
        raise PlaceError(
            f"{type(places).__name__} names no elements; "
            "give places, such as ['fc.weight[3, :]'], or the path of a patch"
        )
    every: list[Any] = []
    for place in [places] if single else places:
        parsed = Place.parse(place) if isinstance(place, str) else place
        if isinstance(parsed, Place):
            every += expand_place(parsed, trainer.named_parameters(), trainer.aliases)
        else:
            every.append(parsed)
    targets = list(resolve(trainer, every))
    if not targets:
        raise PlaceError("no places are given; name some, such as ['fc.weight[3, :]']")
    check_disjoint(targets)
    return targets


def resolve(trainer: Trainer, places: Iterable[Place | str]) -> Iterator[ResolvedPlace]:
    """Resolve places, each of which must name each element once."""

    @cache
    def find_parameter(name: str) -> tuple[Tensor, tuple[int, ...]]:
        tensor = trainer.parameter(name)
        trainer.check_parameter(tensor, name)
        return tensor, tuple([int(size) for size in tensor.shape])

    for place in places:
        if not isinstance(place, Place):
            backend = None if isinstance(place, str) else registry.backend_of(place)
            place = Place(place, backend=backend) if backend is not None else Place.parse(place)
        if place.kind not in (None, "parameter"):
            raise PlaceError(f"{place} is of kind {place.kind!r} and only parameters train")
        name = place.name or (trainer.only_parameter() if place.tensor is None else trainer.name_of(place.tensor))
        tensor, shape = find_parameter(name)
        place = Place(None, name, place.index, None, pointwise=place.pointwise)
        selection = place.select(shape)
        if not selection.size:
            raise PlaceError(f"{place} names no element of a parameter of shape {shape}")
        if not selection.unique:
            raise DuplicateError(f"{place} names element {selection.repeated} twice; name each element once")
        if any(isinstance(part, IndexArray) and part.boolean for part in place.index):
            # The text of a mask is as long as the tensor is large, so the place lists its elements instead.
            place = Place(None, name).coords(selection.coords().reshape(-1, len(shape)))
        yield ResolvedPlace(place, name, tensor, shape, selection.flat().reshape(-1))


def check_disjoint(targets: Sequence[ResolvedPlace]) -> None:
    """Raise a `DuplicateError` if two places name the same element."""
    for same in groups_by_tensor(targets):
        if len(same) == 1:
            continue  # a place names no element twice
        check_no_overlap(
            same[0].name, same[0].shape, [(place_label(target.place), target.positions) for target in same]
        )


def differentiate(
    trainer: Trainer,
    groups: Sequence[ElementGroup],
    losses: Mapping[Any, Tensor] | Tensor,
    retain_graph: bool = False,
    tape: Any = None,
) -> list[Tensor | None]:
    """Differentiate losses for their places: return the gradient of each group, None for one that has no loss."""
    if not isinstance(losses, Mapping):
        losses = {tuple([group.place for group in groups]): losses}
    routes = route_losses(trainer, groups, losses, trainer.check_loss)
    trainer.check_tape(tape, len(routes))
    totals: dict[int, Tensor] = {}
    for number, (loss, ways) in enumerate(routes, 1):
        reached = list({id(group): group for _, group, _ in ways}.values())
        last = number == len(routes) and not retain_graph
        each = dict(zip(map(id, reached), trainer.gradients(loss, reached, last, tape), strict=True))
        for target, group, chosen in ways:
            gradient = each[id(group)]
            if gradient is None:
                raise unconnected_error(target.place, group.name, EXPLAIN_STEP, loss, group.leaf)
            totals[id(group)] = trainer.add_gradient(totals.get(id(group)), gradient, chosen)
    return [totals.get(id(group)) for group in groups]


def route_losses(
    trainer: Trainer,
    groups: Sequence[ElementGroup],
    losses: Mapping[Any, Any],
    check: Callable[[Any, Any], None],
) -> list[tuple[Any, list[Route]]]:
    """Return each loss once, with the routes to its places; `check` raises an error for what is no loss."""
    targets: list[tuple[ResolvedPlace, Any]] = []
    for key, loss in losses.items():
        places = list(resolve(trainer, key if isinstance(key, tuple) else (key,)))
        if not places:
            raise PlaceError("a loss is given to no place; name one, or leave it out")
        check(loss, _PlaceNames(places))
        targets += [(target, loss) for target in places]
    if not targets:
        raise PlaceError("no losses are given; write {place: loss}, or give one loss for all places")
    check_disjoint([target for target, _ in targets])
    owners = {id(own[0].tensor): _GroupIndex(own) for own in groups_by_tensor(groups)}
    routes: dict[int, tuple[Any, list[Route]]] = {}
    for target, loss in targets:
        owner = owners.get(id(target.tensor))
        ways = None if owner is None else owner.routes_to(target)
        if ways is None:
            raise PlaceError(
                f"{target.place} has elements that do not train here; the places are "
                + listed([str(group.place) for group in groups])
            )
        routes.setdefault(id(loss), (loss, []))[1].extend(ways)
    return list(routes.values())


class _GroupIndex:
    """Finds the groups of one parameter that have some of its elements."""

    def __init__(self, groups: Sequence[ElementGroup]):
        self._groups = groups
        sizes = [len(group.positions) for group in groups]
        self._starts = np.cumsum([0, *sizes])
        self._group_of = np.repeat(np.arange(len(groups)), sizes)
        positions = np.concatenate([group.positions for group in groups])
        self._order = np.argsort(positions)
        self._sorted = positions[self._order]

    def routes_to(self, target: ResolvedPlace) -> list[Route] | None:
        """Return the groups that have elements of a place; None if some of them are in no group."""
        at = np.minimum(np.searchsorted(self._sorted, target.positions), len(self._sorted) - 1)
        if not np.array_equal(self._sorted[at], target.positions):
            return None
        matches = np.sort(self._order[at])
        numbers = self._group_of[matches]
        parts = np.split(matches, np.flatnonzero(np.diff(numbers)) + 1)
        chosen = [(int(self._group_of[part[0]]), part) for part in parts]
        return [(target, self._groups[number], part - self._starts[number]) for number, part in chosen]


class _PlaceNames:
    """The text of places for an error, made only when it is printed, as it may be long."""

    def __init__(self, places: Sequence[ResolvedPlace]):
        self._places = places

    def __str__(self) -> str:
        return ", ".join([place_label(each.place) for each in self._places])


def unconnected_error(
    place: Place, name: str, hint: str = "", loss: Any = None, leaf: Any = None, reason: "Reason | None" = None
) -> UnconnectedError:
    """Return the error for a loss that does not depend on a parameter, with the reason if it is known."""
    text = f"the loss for {place} does not depend on {name}"
    text += f"; give one that is computed with it{hint}" if reason is None else f": {reason[0]}; {reason[1]}"
    return UnconnectedError(text).about(loss, leaf)


def explain_unconnected(loss_fn: Callable[[Any], Any], params: Any, name: str) -> "Reason | None":
    """Run a loss of a pytree of parameters to find out why it does not depend on one; None if that is not found."""
    from elementgrad._read.jacobian import explain_missing_path  # here, as training reads no Jacobian otherwise

    backend = registry.backend_of_model(params)
    if backend is None:
        return None
    try:
        model = backend.names.model(params)
        tensor = next(x for kind, x in model.lookup(model.canonical_name(name)) if kind == "parameter")
        return explain_missing_path(BoundCall(loss_fn, (params,), {}), Place(None, "output"), Place(tensor))
    except Exception:  # the error that is about to be raised matters more
        return None
