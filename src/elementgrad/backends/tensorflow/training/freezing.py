"""Everything else holds still while elements train, and moves again when the last of them are released."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

Variable = Any
CLAIM = "_elementgrad_claim"


@dataclass
class _Claim:
    before: bool
    count: int = 0


def claim(variables: Iterable[Variable]) -> None:
    """Freeze variables that nobody froze yet; what the user has let train since stays so.

    One by one, and not by `layer.trainable`, which would have BatchNormalization compute something else.
    """
    for variable in variables:
        held = variable.__dict__.get(CLAIM)
        if held is None:
            held = variable.__dict__[CLAIM] = _Claim(variable._trainable)
            variable._trainable = False
        held.count += 1


def frozen(variable: Variable) -> bool:
    """Whether somebody claims it."""
    return CLAIM in variable.__dict__


def ask(variables: Iterable[Variable], trainable: bool) -> None:
    """What somebody has asked for meanwhile counts in the end."""
    for variable in variables:
        held = variable.__dict__.get(CLAIM)
        if held is not None:
            held.before = trainable


def leave(variables: Iterable[Variable]) -> None:
    """One claim less; after the last, what was frozen may train again."""
    for variable in variables:
        held = variable.__dict__.get(CLAIM)
        if held is not None:
            held.count -= 1
            if not held.count:
                del variable.__dict__[CLAIM]
                variable._trainable = held.before or variable._trainable
