"""The account of a run, from what was recorded of it: which values a tape connects with the source."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import tensorflow as tf

from elementgrad.backends.tensorflow.explaining import words
from elementgrad.backends.tensorflow.explaining.meters import out_of_range
from elementgrad.backends.tensorflow.explaining.records import Record, differentiable, zeros
from elementgrad.backends.tensorflow.quiet import silenced
from elementgrad.backends.witness import Account, Remark, Step

Tensor = Any
Follows = Callable[[int, Record], str | None]
"""Why a tape does not follow what a record did, a cause; None where it does."""


def account(
    records: Sequence[Record],
    source: int,
    target: int,
    follows: Follows,
    remarks: Sequence[Remark] = (),
    again: Collection[int] = (),
) -> Account:
    """Whatever leads from the source, and how it ends; a variable counts with whatever it holds later, too."""
    connected = {source, *again}
    with silenced():
        steps = [_step(number, each, connected, follows) for number, each in enumerate(records)]
    own = [
        Remark("custom-rule", "", step)
        for step in steps
        if step.own and not connected.isdisjoint(step.takes) and not connected.isdisjoint(step.gives)
    ]
    own += [
        Remark("out-of-range", told, step)
        for each, step in zip(records, steps, strict=True)
        if not connected.isdisjoint(step.takes) and (told := out_of_range(each))
    ]
    draws = any(words.draws(kind) for each in records for kind in (each.kind, *each.inside))
    return Account(steps, source, target, frozenset(connected), [*remarks, *own], draws)


def _step(number: int, each: Record, connected: set[int], follows: Follows) -> Step:
    stops, note = each.stops, each.note
    if stops is None and not connected.isdisjoint(each.takes):
        stops, note = _followed(number, each, connected, follows)
    return Step(
        "tape.gradient" if stops == "inner-gradient" else each.word,
        each.where,
        each.path,
        tuple(sorted(each.takes, key=lambda value: value not in connected)),  # the way that derivatives take is shown
        each.gives,
        stops,
        note,
        each.own,
        each.word in words.DECIDES,
        each.enters,
        each.kind == "Identity",
    )


def _followed(number: int, each: Record, connected: set[int], follows: Follows) -> tuple[str | None, str]:
    """Connect what a record gave with what it took, if there is a derivative; otherwise why there is none."""
    if not each.outputs:
        return "assigned-state", "a variable keeps numbers and not where they came from"
    unfollowed = follows(number, each)
    if unfollowed is not None and any(map(differentiable, each.outputs)):
        return ("detached", "") if each.kind == "StopGradient" else (unfollowed, "")
    try:
        passes = _passes(each)
    except (LookupError, NotImplementedError) as error:
        return "no-rule", _first_line(error)
    takes = [value in connected for value in each.takes]
    if any(took and passed for took, passed in zip(takes, passes, strict=False)):
        connected.update([n for n, y in zip(each.gives, each.outputs, strict=True) if differentiable(y)])
    if any(value in connected for value in each.gives):
        whole = [y for y in each.outputs if not differentiable(y)]  # such as the indices beside the largest
        return ("discrete", f"{whole[0].dtype.name} comes out") if whole else (None, "")
    return words.why_stopped(each.kind, each.own, each.outputs, each.recorded, each.inside)


def _passes(each: Record) -> list[bool]:
    """Which of its inputs get a derivative from its outputs: the rule itself knows best."""
    if not each.passing:
        if any(map(differentiable, each.outputs)):
            seeds = [tf.ones_like(y) if differentiable(y) else zeros(y) for y in each.outputs]
            each.passing = [g is not None for g in each.pull(seeds)]
        else:
            each.passing = [False] * len(each.takes)
    return each.passing


def _first_line(error: Exception) -> str:
    return (str(error).strip("'\" ").splitlines() or [""])[0]
