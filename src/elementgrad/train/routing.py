"""Losses to the elements that are to hear them."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from elementgrad.backends.training import Trainer
from elementgrad.errors import PlaceError, UnconnectedError
from elementgrad.text import listed
from elementgrad.train.named import Named, named, require_disjoint

Tensor = Any


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
    routes = []
    for key, loss in losses.items():
        places = [named(trainer, place) for place in (key if isinstance(key, tuple) else (key,))]
        if not places:
            raise PlaceError("a loss is given to no place; name one, or leave it out")
        trainer.check_loss(loss, ", ".join(str(asked.place) for asked in places))
        routes += [(asked, loss) for asked in places]
    if not routes:
        raise PlaceError("no losses are given; write {place: loss}, or give one loss for all places")
    require_disjoint([asked for asked, _ in routes])
    hearing = [(loss, asked, heard_by(asked, members)) for asked, loss in routes]
    distinct = {id(loss): loss for loss, _, _ in hearing}
    trainer.check_tape(tape, len(distinct))
    gradients = []
    for number, loss in enumerate(distinct.values()):
        mine = [(asked, member, chosen) for other, asked, heard in hearing if other is loss for member, chosen in heard]
        parts = list({id(member): member.part for _, member, _ in mine}.values())
        last = number + 1 == len(distinct) and not keep
        found = trainer.gradients(loss, parts, last, tape)
        for asked, member, chosen in mine:
            gradient = next(each for part, each in zip(parts, found, strict=True) if part is member.part)
            if gradient is None:
                raise UnconnectedError(
                    f"the loss for {asked.place} does not depend on {member.name}; give one that was computed with it, "
                    "or put the step into a function and ask eg.explain(step), which names the line where it is cut",
                    loss,
                    member.part.leaf,
                )
            gradients.append((member.part, gradient, chosen))
    return gradients


def heard_by(asked: Named, members: Sequence[Any]) -> list[tuple[Any, np.ndarray]]:
    """Which members have the elements of a place, and which of theirs these are."""
    there = [member for member in members if member.tensor is asked.tensor]
    found = [(member, np.flatnonzero(np.isin(member.positions, asked.positions))) for member in there]
    if sum(len(chosen) for _, chosen in found) < len(asked.positions):
        raise PlaceError(
            f"{asked.place} has elements that do not train here; the places are "
            + listed([str(member.place) for member in members])
        )
    return [(member, chosen) for member, chosen in found if len(chosen)]
