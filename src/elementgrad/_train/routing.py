"""Losses to the elements that are to hear them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from elementgrad._backends import registry
from elementgrad._names.call import BoundCall
from elementgrad._place.grammar import listed
from elementgrad._place.place import Place
from elementgrad._read.jacobian import Reason, explain_missing_path
from elementgrad._train.entries import NamedElements, named, require_disjoint
from elementgrad._train.trainer import Trainer
from elementgrad.errors import PlaceError, UnconnectedError

Tensor = Any


STEP = ", or put the step into a function and ask eg.explain(step), which names the line where it is cut"
Hearing = tuple[NamedElements, Any, np.ndarray]
"""A place, a member that has elements of it, and which of the member's these are."""


def routes(
    trainer: Trainer, members: Sequence[Any], losses: Mapping[Any, Any], check: Callable[[Any, str], None]
) -> list[tuple[Any, list[Hearing]]]:
    """Each loss once, with all that hear it; `check` refuses what is no loss."""
    found: list[tuple[NamedElements, Any]] = []
    for key, loss in losses.items():
        places = [named(trainer, place) for place in (key if isinstance(key, tuple) else (key,))]
        if not places:
            raise PlaceError("a loss is given to no place; name one, or leave it out")
        check(loss, ", ".join(str(asked.place) for asked in places))
        found += [(asked, loss) for asked in places]
    if not found:
        raise PlaceError("no losses are given; write {place: loss}, or give one loss for all places")
    require_disjoint([asked for asked, _ in found])
    hearing: dict[int, tuple[Any, list[Hearing]]] = {}
    for asked, loss in found:
        here = [(asked, member, chosen) for member, chosen in _heard_by(asked, members)]
        hearing.setdefault(id(loss), (loss, []))[1].extend(here)
    return list(hearing.values())


def routed(
    trainer: Trainer,
    members: Sequence[Any],
    losses: Mapping[Any, Tensor] | Tensor,
    keep: bool = False,
    tape: Any = None,
) -> list[tuple[Any, Tensor, np.ndarray]]:
    """What each member hears: its part, a gradient of it, and which elements of that are meant."""
    if not isinstance(losses, Mapping):
        losses = {tuple([member.place for member in members]): losses}
    distinct = routes(trainer, members, losses, trainer.check_loss)
    trainer.check_tape(tape, len(distinct))
    gradients = []
    for number, (loss, mine) in enumerate(distinct, 1):
        parts = list({id(member): member.part for _, member, _ in mine}.values())
        found = trainer.gradients(loss, parts, number == len(distinct) and not keep, tape)
        for asked, member, chosen in mine:
            gradient = next(each for part, each in zip(parts, found, strict=True) if part is member.part)
            if gradient is None:
                raise unconnected(asked.place, member.name, STEP, loss, member.part.leaf)
            gradients.append((member.part, gradient, chosen))
    return gradients


def unconnected(
    place: Place, name: str, more: str = "", loss: Any = None, leaf: Any = None, reason: Reason | None = None
) -> UnconnectedError:
    """The error for a loss that no element of a parameter can hear, with the reason and what helps, if known."""
    told = f"the loss for {place} does not depend on {name}"
    told += f"; give one that is computed with it{more}" if reason is None else f": {reason[0]}; {reason[1]}"
    return UnconnectedError(told).about(loss, leaf)


def why_apart(loss_fn: Callable[[Any], Any], params: Any, name: str) -> Reason | None:
    """Why a function of a pytree of parameters does not depend on one of them, if that can be told by running it."""
    backend = registry.backend_of_model(params)
    if backend is None:
        return None
    try:
        held = [
            x for other, kind, x in backend.names.model(params).named_tensors() if (other, kind) == (name, "parameter")
        ]
        return explain_missing_path(BoundCall(loss_fn, (params,), {}), Place(None, "output"), Place(held[0]))
    except Exception:  # the error that is about to be raised matters more
        return None


def _heard_by(asked: NamedElements, members: Sequence[Any]) -> list[tuple[Any, np.ndarray]]:
    """Which members have the elements of a place, and which of theirs these are."""
    there = [member for member in members if member.tensor is asked.tensor]
    found = [(member, np.flatnonzero(np.isin(member.positions, asked.positions))) for member in there]
    if sum(len(chosen) for _, chosen in found) < len(asked.positions):
        raise PlaceError(
            f"{asked.place} has elements that do not train here; the places are "
            + listed([str(member.place) for member in members])
        )
    return [(member, chosen) for member, chosen in found if len(chosen)]
