"""A training step of the user's, run as it is: why it raises, or what becomes of a tensor's gradient."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from elementgrad.backends.torch.explaining import live
from elementgrad.backends.torch.explaining.refusals import CHANGED, TWICE, UNTRACKED, UNUSED, Refused
from elementgrad.backends.torch.explaining.watch import Watch
from elementgrad.backends.witness import Account, Remark, Step, Told, Verdict, unfollowed
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
        if watch.failed is not None:
            return _unfollowed("unconnected", watch.failed)
        if error.leaf is None:
            return _untracked(watch, root, watch.number(error.loss))
        numbers = watch.number(error.leaf), watch.number(error.loss)
        return Told("unconnected", Account(watch.steps, *numbers, frozenset(watch.connected)), None, **PARTS)
    except RuntimeError as error:
        if watch.failed is not None and any(text in str(error) for text in (UNTRACKED, UNUSED, TWICE, CHANGED)):
            return _unfollowed("unconnected", watch.failed)
        if UNTRACKED in str(error) and watch.asking.target is not None:
            return _untracked(watch, root, watch.asking.target)
        if UNUSED in str(error) and watch.asking.sides is not None:
            return _apart(watch, *watch.asking.sides)
        remark = Refused.after(watch).remark(error)
        if remark is None:
            raise
        account = Account(watch.steps, root, watch.asking.target or root, frozenset(watch.connected))
        return Told("unconnected", account, remark, **NAMES)
    except (AttributeError, TypeError) as error:  # what is None is used as if it were a gradient
        if not _read(watch, wrt) or "NoneType" not in str(error):
            raise
    if watch.failed is not None and watch.asking.target is not None:
        gone = wrt is not None and watch.asking.gradient is None
        return _unfollowed("unconnected" if gone else "flows", watch.failed)
    if watch.asking.missing is not None and _read(watch, wrt):
        remark = Remark("non-leaf", "its is_leaf is False", watch.asking.missing[1])
        return Told("unconnected", None, remark, of="the loss", wrt="the tensor")
    return _ran(watch, root, wrt)


def _unfollowed(verdict: Verdict, error: Exception) -> Told:
    """What is known of a step that could not be watched to its end."""
    return Told(verdict, None, Remark(None, unfollowed(error)), **NAMES)


def _read(watch: Watch, wrt: Tensor | None) -> bool:
    """Whether the .grad was read, and is None, of a tensor that keeps none: of the one asked about, or of any."""
    return watch.asking.missing is not None and (wrt is None or wrt is watch.asking.missing[0])


def _apart(watch: Watch, asked: Sequence[Sequence[Tensor]], where: str) -> Told:
    """Which of the tensors that `torch.autograd.grad` was asked for is not used."""
    (y, *_), inputs = asked
    apart = [x for x in inputs if not live.leads(y, x)]
    told = live.told((y, None), (apart[0], None)) if apart else None
    if told is None or told.remark is None:
        return Told("unconnected", None, Remark(None, "PyTorch says that one of them is not used", Step("grad", where)))
    if told.remark.cause is None:  # the graph does not tell, and the steps may
        account = Account(watch.steps, watch.number(apart[0]), watch.number(y), frozenset(watch.connected))
        return replace(told, account=account, remark=None)
    return replace(told, remark=replace(told.remark, step=told.remark.step or Step("grad", where)))


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
    if watch.asking.target is None:
        raise PlaceError(
            "the step ran and did not call backward(), so there is nothing to explain; to ask about a function give "
            "its arguments, as in eg.explain(f, x)"
        )
    if wrt is None:
        return Told("flows", **NAMES)
    names: dict[str, Any] = {"of": "the loss", "wrt": "the tensor"}
    if watch.asking.gradient is not None:
        remark = None
        if watch.asking.accumulated is not None:
            remark = Remark("accumulated", "its .grad held a gradient before", watch.asking.accumulated)
        return Told("mismatch" if remark else "flows", None, remark, value=watch.asking.gradient, **names)
    account = Account(watch.steps, root, watch.asking.target, frozenset(watch.connected))
    if not wrt.requires_grad:
        return Told("unconnected", account, Remark("not-tracked", "its requires_grad is False"), **names)
    if not wrt.is_leaf and not wrt.retains_grad:
        return Told("unconnected", account, Remark("non-leaf", "is_leaf is False"), **names)
    return Told("unconnected", account, None, **names)
