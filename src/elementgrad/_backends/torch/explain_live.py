"""Live tensors: what their graph tells of a gradient, and the lines that a recording has noted in it.

A training step of the user's, run as it is: why it raises, or what becomes of a tensor's gradient.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.autograd.graph import get_gradient_edge

from elementgrad._backends.torch.explain import CHANGED, TWICE, UNTRACKED, UNUSED, RefusedCall
from elementgrad._backends.torch.explain_rules import GradientFlow, note_flow
from elementgrad._backends.torch.isolate import isolated, plainly, removed_later
from elementgrad._backends.torch.record.history import operation_name
from elementgrad._backends.torch.record.intercept import LINE_KEY
from elementgrad._backends.torch.trace import TorchOpRecorder
from elementgrad._explain.backend import Picked
from elementgrad._explain.trace import Hint, LiveReport, Op, OpGraph, Verdict, cannot_follow, uneven_weights
from elementgrad.errors import PlaceError, UnconnectedError

Tensor = torch.Tensor


def report_live(of: Picked, wrt: Picked) -> LiveReport:
    """What is to be seen of the gradient of one live tensor with respect to another."""
    try:
        return _seen(of, wrt)
    except Exception as error:
        try:
            return _unfollowed_live(of, wrt, error)
        except RuntimeError:  # there is no gradient either, and PyTorch says why
            raise error from None


def _unfollowed_live(of: Picked, wrt: Picked, error: Exception) -> LiveReport:
    """The verdict by the gradient alone, where the graph cannot be followed."""
    seed = _seed(of)
    names: dict[str, Any] = {"of": "the result", "wrt": "the tensor"}
    with isolated(None), plainly():
        (gradient,) = torch.autograd.grad(of[0], wrt[0], seed, retain_graph=True, allow_unused=True)
    remark = Hint(None, cannot_follow(error))
    if gradient is None:
        return LiveReport("unconnected", None, remark, **names)
    asked = gradient if wrt[1] is None else gradient.reshape(-1)[_index(wrt[1], gradient)]
    finite = bool(torch.isfinite(asked).all())
    verdict: Verdict = "nonfinite" if not finite else "flows" if bool(asked.any()) else "zero"
    return LiveReport(verdict, None, remark, value=asked, **names)


def _seen(of: Picked, wrt: Picked) -> LiveReport:
    y, x = of[0], wrt[0]
    if not (x.is_floating_point() or x.is_complex()):
        return _told("unconnected", "integer", f"its dtype is {_dtype(x)}")
    if not x.requires_grad:
        return _told("unconnected", "not-tracked", "its requires_grad is False")
    if not y.requires_grad:
        if not (y.is_floating_point() or y.is_complex()):
            return _told("unconnected", "discrete", f"the result is of dtype {_dtype(y)}", Op("what made it"))
        reason = "the result has no grad_fn: it was detached, computed under no_grad, or made of plain numbers"
        return _told("unconnected", None, reason)
    end = get_gradient_edge(x).node
    graph = _graph(get_gradient_edge(y).node)
    if end not in graph:
        return _apart_live(x, end, graph)
    return _joined(of, wrt, _NodePath(graph, end))


def leads(y: Tensor, x: Tensor) -> bool:
    """Whether the graph of one tensor leads to another."""
    return y.requires_grad and x.requires_grad and get_gradient_edge(x).node in _graph(get_gradient_edge(y).node)


def _told(verdict: Verdict, cause: str | None, evidence: str = "", step: Op | None = None, **more: Any) -> LiveReport:
    return LiveReport(verdict, None, Hint(cause, evidence, step), "the result", "the tensor", **more)


def _dtype(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def _graph(node: Any) -> set[Any]:
    found, ahead = {node}, [node]
    while ahead:
        for following, _ in ahead.pop().next_functions:
            if following is not None and following not in found:
                found.add(following)
                ahead.append(following)
    return found


def _apart_live(x: Tensor, end: Any, graph: set[Any]) -> LiveReport:
    """No way leads from the result to the tensor: it may be a second slice of what was used."""
    before = [following for following, _ in end.next_functions]
    if any(following in graph for following in before):
        if x._is_view():
            return _told("unconnected", "resliced", "what it is a slice of was used, and it was not")
        return _told("unconnected", "unused", "what it is computed from was used, and it was not")
    return _told("unconnected", None, "it is tracked, and the graph of the result does not lead to it")


class _NodePath:
    """The nodes on the way from a result to a tensor, as the steps of an account."""

    def __init__(self, graph: set[Any], end: Any):
        before: dict[Any, list[Any]] = {}
        for node in graph:
            for following, _ in node.next_functions:
                before.setdefault(following, []).append(node)
        leading, ahead = {end}, [end]
        while ahead:
            for node in before.get(ahead.pop(), ()):
                if node not in leading:
                    leading.add(node)
                    ahead.append(node)
        self.end = end
        self.nodes = sorted(leading - {end}, key=lambda node: node._sequence_nr())
        numbers = {node: number for number, node in enumerate([end, *self.nodes])}
        steps = [
            Op(
                operation_name(node),
                node.metadata.get(LINE_KEY),
                inputs=tuple(self._taken(node, numbers)),
                outputs=(numbers[node],),
            )
            for node in self.nodes
        ]
        self.graph = OpGraph(steps, 0, len(numbers) - 1, set(numbers.values()))
        self._leading = leading

    def _taken(self, node: Any, numbers: dict[Any, int]) -> list[int]:
        return [numbers[following] for following, _ in node.next_functions if following in numbers]

    def watch(self, positions: np.ndarray | None, flows: list[GradientFlow]) -> None:
        """Have each node note what comes by until the scope is left; where it takes the tensor, at some elements."""
        handles = removed_later()
        for node in self.nodes:
            flows.append(GradientFlow())
            slots = [slot for slot, (following, _) in enumerate(node.next_functions) if following in self._leading]
            first = all(node.next_functions[slot][0] is self.end for slot in slots)
            hook = note_flow(flows[-1], True, slots, positions if first else None)
            handles.extend(map(node.register_hook, [hook]))


def _joined(of: Picked, wrt: Picked, way: _NodePath) -> LiveReport:
    x = wrt[0]
    kept = x.is_leaf or x.retains_grad
    flows: list[GradientFlow] = []
    try:
        gradient = _gradient(of, wrt, way, flows)
    except RuntimeError as error:
        if CHANGED in str(error):
            return _told("unconnected", "modified-in-place", "", Op("a write in place"))
        if TWICE not in str(error):
            raise
        if not kept:
            return _told("unconnected", "non-leaf", "its is_leaf is False")
        if x.grad is None:
            return _told("unconnected", "freed-graph")
        return LiveReport("flows", value=x.grad.clone(), of="the result", wrt="the tensor")
    asked = gradient if wrt[1] is None else gradient.reshape(-1)[_index(wrt[1], gradient)]
    names: dict[str, Any] = {"value": asked, "of": "the result", "wrt": "the tensor"}
    pulled = [flow.pulled() for flow in flows]
    if not bool(torch.isfinite(asked).all()):
        return LiveReport("nonfinite", way.graph, None, cotangents=pulled, **names)
    if not bool(asked.any()):
        return LiveReport("zero", way.graph, None, cotangents=pulled, **names)
    if not kept:
        return _told("flows", "non-leaf", "its is_leaf is False", value=asked)
    times = 1 if x.grad is None else _times(x.grad, gradient)
    if x.grad is not None and 1 < times <= x.grad._version + 1:  # each further call writes to it in place
        return _told("mismatch", "accumulated", f"it is {times} times the gradient", value=asked)
    return LiveReport("flows", **names)


def _seed(of: Picked) -> Tensor:
    y, positions = of
    seed = torch.zeros_like(y, requires_grad=False).reshape(-1)
    chosen = np.arange(seed.numel()) if positions is None else positions
    seed[_index(chosen, seed)] = torch.from_numpy(uneven_weights(len(chosen))).to(seed)
    return seed.reshape(y.shape)


def _gradient(of: Picked, wrt: Picked, way: _NodePath, flows: list[GradientFlow]) -> Tensor:
    seed = _seed(of)
    with isolated(None), plainly():
        way.watch(wrt[1], flows)
        return torch.autograd.grad(of[0], wrt[0], seed, retain_graph=True)[0]


def _index(positions: np.ndarray, x: Tensor) -> Tensor:
    return torch.from_numpy(positions.copy()).to(x.device)


def _times(held: Tensor, gradient: Tensor) -> int:
    """How many times the gradient is in what .grad holds; 1 if it is no multiple."""
    some = gradient != 0
    times = round(float((held[some] / gradient[some]).flatten()[0]))
    return times if torch.allclose(held, times * gradient, rtol=1e-4) else 1


NAMES: dict[str, Any] = {"of": "the loss", "wrt": "its inputs"}
PARTS: dict[str, Any] = {"of": "the loss", "wrt": "the elements"}


def report_step(function: Callable[[], Any], wrt: Tensor | None) -> LiveReport:
    """Run a step under the eyes of a watch."""
    watch = TorchOpRecorder(lambda x: x.requires_grad, function)
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
        return LiveReport("unconnected", OpGraph(watch.steps, *numbers, frozenset(watch.connected)), None, **PARTS)
    except RuntimeError as error:
        if watch.failed is not None and any(text in str(error) for text in (UNTRACKED, UNUSED, TWICE, CHANGED)):
            return _unfollowed("unconnected", watch.failed)
        if UNTRACKED in str(error) and watch.asking.target is not None:
            return _untracked(watch, root, watch.asking.target)
        if UNUSED in str(error) and watch.asking.sides is not None:
            return _apart(watch, *watch.asking.sides)
        remark = RefusedCall.after(watch).remark(error)
        if remark is None:
            raise
        account = OpGraph(watch.steps, root, watch.asking.target or root, frozenset(watch.connected))
        return LiveReport("unconnected", account, remark, **NAMES)
    except (AttributeError, TypeError) as error:  # what is None is used as if it were a gradient
        if not _read(watch, wrt) or "NoneType" not in str(error):
            raise
    if watch.failed is not None and watch.asking.target is not None:
        gone = wrt is not None and watch.asking.gradient is None
        return _unfollowed("unconnected" if gone else "flows", watch.failed)
    if watch.asking.missing is not None and _read(watch, wrt):
        remark = Hint("non-leaf", "its is_leaf is False", watch.asking.missing[1])
        return LiveReport("unconnected", None, remark, of="the loss", wrt="the tensor")
    return _ran(watch, root, wrt)


def _unfollowed(verdict: Verdict, error: Exception) -> LiveReport:
    """What is known of a step that could not be watched to its end."""
    return LiveReport(verdict, None, Hint(None, cannot_follow(error)), **NAMES)


def _read(watch: TorchOpRecorder, wrt: Tensor | None) -> bool:
    """Whether the .grad was read, and is None, of a tensor that keeps none: of the one asked about, or of any."""
    return watch.asking.missing is not None and (wrt is None or wrt is watch.asking.missing[0])


def _apart(watch: TorchOpRecorder, asked: Sequence[Sequence[Tensor]], where: str) -> LiveReport:
    """Which of the tensors that `torch.autograd.grad` was asked for is not used."""
    (y, *_), inputs = asked
    apart = [x for x in inputs if not leads(y, x)]
    told = report_live((y, None), (apart[0], None)) if apart else None
    if told is None or told.hint is None:
        return LiveReport(
            "unconnected", None, Hint(None, "PyTorch says that one of them is not used", Op("grad", where))
        )
    if told.hint.cause is None:  # the graph does not tell, and the steps may
        account = OpGraph(watch.steps, watch.number(apart[0]), watch.number(y), frozenset(watch.connected))
        return replace(told, graph=account, hint=None)
    return replace(told, hint=replace(told.hint, op=told.hint.op or Op("grad", where)))


def _untracked(watch: TorchOpRecorder, root: int, target: int) -> LiveReport:
    account = OpGraph(watch.steps, root, target, frozenset(watch.connected))
    remark = None
    if not watch.tracked:
        remark = Hint("not-tracked", "nothing that the step computes with requires gradients", _first(watch, target))
    return LiveReport("unconnected", account, remark, **NAMES)


def _first(watch: TorchOpRecorder, target: int) -> Op | None:
    """The first step that a result is computed from."""
    needed, first = {target}, None
    for step in reversed(watch.steps):
        if step.inputs and not needed.isdisjoint(step.outputs):
            needed.update(step.inputs)
            first = step
    return first


def _ran(watch: TorchOpRecorder, root: int, wrt: Tensor | None) -> LiveReport:
    """What a step that went well did to the gradient of a tensor."""
    if watch.asking.target is None:
        raise PlaceError(
            "the step ran and did not call backward(), so there is nothing to explain; to ask about a function give "
            "its arguments, as in eg.explain(f, x)"
        )
    if wrt is None:
        return LiveReport("flows", **NAMES)
    names: dict[str, Any] = {"of": "the loss", "wrt": "the tensor"}
    if watch.asking.gradient is not None:
        remark = None
        if watch.asking.accumulated is not None:
            remark = Hint("accumulated", "its .grad held a gradient before", watch.asking.accumulated)
        return LiveReport("mismatch" if remark else "flows", None, remark, value=watch.asking.gradient, **names)
    account = OpGraph(watch.steps, root, watch.asking.target, frozenset(watch.connected))
    if not wrt.requires_grad:
        return LiveReport("unconnected", account, Hint("not-tracked", "its requires_grad is False"), **names)
    if not wrt.is_leaf and not wrt.retains_grad:
        return LiveReport("unconnected", account, Hint("non-leaf", "is_leaf is False"), **names)
    return LiveReport("unconnected", account, None, **names)
