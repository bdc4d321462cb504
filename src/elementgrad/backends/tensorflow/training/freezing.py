"""Everything else holds still while elements train, and moves again when the last of them are released."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from elementgrad.backends.training import Standing
from elementgrad.cleanup import defer

Variable = Any
CLAIM = "_elementgrad_claim"


@dataclass
class _Claim:
    before: bool
    owners: set[object] = field(default_factory=set)
    """One for each call that froze the variable."""
    keepers: set[object] = field(default_factory=set)
    """Those of them that were told to keep it as it was."""


def claim(variables: Iterable[Variable], owner: object, kept: Iterable[Variable] = ()) -> None:
    """Freeze variables that nobody froze yet, but for those that are kept; what the user has let train since stays so.

    One by one, and not by `layer.trainable`, which would have BatchNormalization compute something else.
    """
    spared = {id(variable) for variable in kept}
    for variable in variables:
        held = variable.__dict__.get(CLAIM)
        if held is None:
            keep = id(variable) in spared
            held = variable.__dict__[CLAIM] = _Claim(variable._trainable, {owner}, {owner} if keep else set())
            variable._trainable = held.before and keep
            continue
        held.owners.add(owner)
        if id(variable) in spared:
            defer(setattr, variable, "_trainable", variable._trainable)
            held.keepers.add(owner)
            variable._trainable = held.before or variable._trainable


def standing(variable: Variable) -> Standing:
    """Return whether a variable trains as a whole."""
    held = variable.__dict__.get(CLAIM)
    return (
        Standing(variable._trainable) if held is None else Standing(held.before, claimed=True, kept=bool(held.keepers))
    )


def frozen(variable: Variable) -> bool:
    """Whether somebody claims it."""
    return CLAIM in variable.__dict__


def ask(variables: Iterable[Variable], trainable: bool) -> None:
    """What somebody has asked for meanwhile counts in the end."""
    for variable in variables:
        held = variable.__dict__.get(CLAIM)
        if held is not None:
            held.before = trainable


def leave(variables: Iterable[Variable], owner: object) -> None:
    """Give up the claims of an owner; after the last, what was frozen may train again."""
    for variable in variables:
        held = variable.__dict__.get(CLAIM)
        if held is None or owner not in held.owners:
            continue
        if len(held.owners) == 1:
            variable._trainable = held.before or variable._trainable
            del variable.__dict__[CLAIM]
        held.keepers.discard(owner)
        held.owners.discard(owner)
