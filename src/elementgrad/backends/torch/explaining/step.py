"""A training step of the user's, run as it is: why it raises, or what becomes of a tensor's gradient."""

from collections.abc import Callable
from typing import Any

import torch

from elementgrad.backends.torch.explaining.refusals import UNTRACKED, Refused
from elementgrad.backends.torch.explaining.watch import Watch
from elementgrad.backends.witness import Account, Remark, Step, Told
from elementgrad.errors import PlaceError, UnconnectedError

Tensor = torch.Tensor
NAMES: dict[str, Any] = {"of": "the loss", "wrt": "its inputs"}
PARTS: dict[str, Any] = {"of": "the loss", "wrt": "the elements"}


def told(function: Callable[[], Any], wrt: Tensor | None) -> Told:
    """Run a step under the eyes of a watch."""
    watch = Watch(lambda x: x.requires_grad, function)
    root = watch.follow(wrt)
    try:
        with watch.on():
            function()
    except UnconnectedError as error:
        if error.loss is None:
            raise
        if error.leaf is None:
            return _untracked(watch, root, watch.number(error.loss))
        numbers = watch.number(error.leaf), watch.number(error.loss)
        return Told("unconnected", Account(watch.steps, *numbers, frozenset(watch.connected)), None, **PARTS)
    except RuntimeError as error:
        if UNTRACKED in str(error) and watch.backwards.target is not None:
            return _untracked(watch, root, watch.backwards.target)
        remark = Refused.after(watch).remark(error)
        if remark is None:
            raise
        account = Account(watch.steps, root, watch.backwards.target or root, frozenset(watch.connected))
        return Told("unconnected", account, remark, **NAMES)
    return _ran(watch, root, wrt)


def _untracked(watch: Watch, root: int, target: int) -> Told:
    account = Account(watch.steps, root, target, frozenset(watch.connected))
    remark = None
    if not watch.tracked:
        remark = Remark("not-tracked", "nothing that the step computes with requires gradients", _first(watch, target))
    return Told("unconnected", account, remark, **NAMES)


def _first(watch: Watch, target: int) -> Step | None:
    """The first step that a result is computed from."""
    needed, first = {target}, None
    for step in reversed(watch.steps):
        if step.takes and not needed.isdisjoint(step.gives):
            needed.update(step.takes)
            first = step
    return first


def _ran(watch: Watch, root: int, wrt: Tensor | None) -> Told:
    """What a step that went well did to the gradient of a tensor."""
    if watch.backwards.target is None:
        raise PlaceError(
            "the step ran and did not call backward(), so there is nothing to explain; to ask about a function give "
            "its arguments, as in eg.explain(f, x)"
        )
    if wrt is None:
        return Told("flows", **NAMES)
    names: dict[str, Any] = {"of": "the loss", "wrt": "the tensor"}
    if watch.backwards.gradient is not None:
        remark = None
        if watch.backwards.accumulated is not None:
            remark = Remark("accumulated", "its .grad held a gradient before", watch.backwards.accumulated)
        return Told("mismatch" if remark else "flows", None, remark, value=watch.backwards.gradient, **names)
    account = Account(watch.steps, root, watch.backwards.target, frozenset(watch.connected))
    if not wrt.requires_grad:
        return Told("unconnected", account, Remark("not-tracked", "its requires_grad is False"), **names)
    if not wrt.is_leaf and not wrt.retains_grad:
        return Told("unconnected", account, Remark("non-leaf", "is_leaf is False"), **names)
    return Told("unconnected", account, None, **names)
