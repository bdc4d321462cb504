"""Routing: each loss is differentiated only for the places that it was given for."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from elementgrad._backends import registry
from elementgrad._names.call import BoundCall
from elementgrad._place.grammar import listed
from elementgrad._place.place import Place
from elementgrad._read.jacobian import Reason, explain_missing_path
from elementgrad._train.resolve import check_disjoint, resolve
from elementgrad._train.trainer import ElementGroup, ResolvedPlace, Trainer
from elementgrad.errors import PlaceError, UnconnectedError

Tensor = Any
Route = tuple[ResolvedPlace, ElementGroup, np.ndarray]
"""A place that a loss is given for, a group that has elements of it, and the indices of these in the group."""
EXPLAIN_STEP = ", or put the step into a function and call eg.explain(step), which names the line where it is cut"


def differentiate(
    trainer: Trainer,
    groups: Sequence[ElementGroup],
    losses: Mapping[Any, Tensor] | Tensor,
    retain_graph: bool = False,
    tape: Any = None,
) -> list[tuple[ElementGroup, Tensor, np.ndarray]]:
    """Differentiate losses for their places: return each group, a gradient of it, and which elements of that count."""
    if not isinstance(losses, Mapping):
        losses = {tuple([group.place for group in groups]): losses}
    routes = route_losses(trainer, groups, losses, trainer.check_loss)
    trainer.check_tape(tape, len(routes))
    gradients = []
    for number, (loss, ways) in enumerate(routes, 1):
        reached = list({id(group): group for _, group, _ in ways}.values())
        last = number == len(routes) and not retain_graph
        each = dict(zip(map(id, reached), trainer.gradients(loss, reached, last, tape), strict=True))
        for target, group, chosen in ways:
            gradient = each[id(group)]
            if gradient is None:
                raise unconnected_error(target.place, group.name, EXPLAIN_STEP, loss, group.leaf)
            gradients.append((group, gradient, chosen))
    return gradients


def route_losses(
    trainer: Trainer,
    groups: Sequence[ElementGroup],
    losses: Mapping[Any, Any],
    check: Callable[[Any, str], None],
) -> list[tuple[Any, list[Route]]]:
    """Return each loss once, with the routes to its places; `check` raises an error for what is no loss."""
    targets: list[tuple[ResolvedPlace, Any]] = []
    for key, loss in losses.items():
        places = [resolve(trainer, place) for place in (key if isinstance(key, tuple) else (key,))]
        if not places:
            raise PlaceError("a loss is given to no place; name one, or leave it out")
        check(loss, ", ".join(str(target.place) for target in places))
        targets += [(target, loss) for target in places]
    if not targets:
        raise PlaceError("no losses are given; write {place: loss}, or give one loss for all places")
    check_disjoint([target for target, _ in targets])
    routes: dict[int, tuple[Any, list[Route]]] = {}
    for target, loss in targets:
        routes.setdefault(id(loss), (loss, []))[1].extend(_routes_to(target, groups))
    return list(routes.values())


def _routes_to(target: ResolvedPlace, groups: Sequence[ElementGroup]) -> list[Route]:
    of_tensor = [group for group in groups if group.tensor is target.tensor]
    routes = [(target, group, np.flatnonzero(np.isin(group.positions, target.positions))) for group in of_tensor]
    if sum(len(chosen) for _, _, chosen in routes) < len(target.positions):
        raise PlaceError(
            f"{target.place} has elements that do not train here; the places are "
            + listed([str(group.place) for group in groups])
        )
    return [route for route in routes if len(route[2])]


def unconnected_error(
    place: Place, name: str, hint: str = "", loss: Any = None, leaf: Any = None, reason: Reason | None = None
) -> UnconnectedError:
    """Return the error for a loss that does not depend on a parameter, with the reason if it is known."""
    text = f"the loss for {place} does not depend on {name}"
    text += f"; give one that is computed with it{hint}" if reason is None else f": {reason[0]}; {reason[1]}"
    return UnconnectedError(text).about(loss, leaf)


def explain_unconnected(loss_fn: Callable[[Any], Any], params: Any, name: str) -> Reason | None:
    """Run a loss of a pytree of parameters to find out why it does not depend on one; None if that is not found."""
    backend = registry.backend_of_model(params)
    if backend is None:
        return None
    try:
        named = backend.names.model(params).named_tensors()
        tensor = next(x for other, kind, x in named if (other, kind) == (name, "parameter"))
        return explain_missing_path(BoundCall(loss_fn, (params,), {}), Place(None, "output"), Place(tensor))
    except Exception:  # the error that is about to be raised matters more
        return None
