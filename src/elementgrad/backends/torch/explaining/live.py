"""Live tensors: what their graph tells of a gradient, and the lines that a recording has noted in it."""

from typing import Any

import numpy as np
import torch
from torch.autograd.graph import get_gradient_edge

from elementgrad.backends.protocol import Picked
from elementgrad.backends.torch.calls import WHERE
from elementgrad.backends.torch.explaining.meters import Flow, note_flow
from elementgrad.backends.torch.explaining.refusals import CHANGED, TWICE
from elementgrad.backends.torch.modules import removed_later
from elementgrad.backends.torch.quiet import plainly, undisturbed
from elementgrad.backends.torch.versions import named
from elementgrad.backends.witness import Account, Remark, Step, Told, Verdict, unfollowed, weights

Tensor = torch.Tensor


def told(of: Picked, wrt: Picked) -> Told:
    """What is to be seen of the gradient of one live tensor with respect to another."""
    try:
        return _seen(of, wrt)
    except Exception as error:
        try:
            return _unfollowed(of, wrt, error)
        except RuntimeError:  # there is no gradient either, and PyTorch says why
            raise error from None


def _unfollowed(of: Picked, wrt: Picked, error: Exception) -> Told:
    """The verdict by the gradient alone, where the graph cannot be followed."""
    seed = _seed(of)
    names: dict[str, Any] = {"of": "the result", "wrt": "the tensor"}
    with undisturbed(None), plainly():
        (gradient,) = torch.autograd.grad(of[0], wrt[0], seed, retain_graph=True, allow_unused=True)
    remark = Remark(None, unfollowed(error))
    if gradient is None:
        return Told("unconnected", None, remark, **names)
    asked = gradient if wrt[1] is None else gradient.reshape(-1)[_index(wrt[1], gradient)]
    finite = bool(torch.isfinite(asked).all())
    verdict: Verdict = "nonfinite" if not finite else "flows" if bool(asked.any()) else "zero"
    return Told(verdict, None, remark, value=asked, **names)


def _seen(of: Picked, wrt: Picked) -> Told:
    y, x = of[0], wrt[0]
    if not (x.is_floating_point() or x.is_complex()):
        return _told("unconnected", "integer", f"its dtype is {_dtype(x)}")
    if not x.requires_grad:
        return _told("unconnected", "not-tracked", "its requires_grad is False")
    if not y.requires_grad:
        if not (y.is_floating_point() or y.is_complex()):
            return _told("unconnected", "discrete", f"the result is of dtype {_dtype(y)}", Step("what made it"))
        reason = "the result has no grad_fn: it was detached, computed under no_grad, or made of plain numbers"
        return _told("unconnected", None, reason)
    end = get_gradient_edge(x).node
    graph = _graph(get_gradient_edge(y).node)
    if end not in graph:
        return _apart(x, end, graph)
    return _joined(of, wrt, _Way(graph, end))


def leads(y: Tensor, x: Tensor) -> bool:
    """Whether the graph of one tensor leads to another."""
    return y.requires_grad and x.requires_grad and get_gradient_edge(x).node in _graph(get_gradient_edge(y).node)


def _told(verdict: Verdict, cause: str | None, evidence: str = "", step: Step | None = None, **more: Any) -> Told:
    return Told(verdict, None, Remark(cause, evidence, step), "the result", "the tensor", **more)


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


def _apart(x: Tensor, end: Any, graph: set[Any]) -> Told:
    """No way leads from the result to the tensor: it may be a second slice of what was used."""
    before = [following for following, _ in end.next_functions]
    if any(following in graph for following in before):
        if x._is_view():
            return _told("unconnected", "resliced", "what it is a slice of was used, and it was not")
        return _told("unconnected", "unused", "what it is computed from was used, and it was not")
    return _told("unconnected", None, "it is tracked, and the graph of the result does not lead to it")


class _Way:
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
            Step(named(node), node.metadata.get(WHERE), takes=tuple(self._taken(node, numbers)), gives=(numbers[node],))
            for node in self.nodes
        ]
        self.account = Account(steps, 0, len(numbers) - 1, set(numbers.values()))
        self._leading = leading

    def _taken(self, node: Any, numbers: dict[Any, int]) -> list[int]:
        return [numbers[following] for following, _ in node.next_functions if following in numbers]

    def watch(self, positions: np.ndarray | None, flows: list[Flow]) -> None:
        """Have each node note what comes by until the scope is left; where it takes the tensor, at some elements."""
        handles = removed_later()
        for node in self.nodes:
            flows.append(Flow())
            slots = [slot for slot, (following, _) in enumerate(node.next_functions) if following in self._leading]
            first = all(node.next_functions[slot][0] is self.end for slot in slots)
            hook = note_flow(flows[-1], True, slots, positions if first else None)
            handles.extend(map(node.register_hook, [hook]))


def _joined(of: Picked, wrt: Picked, way: _Way) -> Told:
    x = wrt[0]
    kept = x.is_leaf or x.retains_grad
    flows: list[Flow] = []
    try:
        gradient = _gradient(of, wrt, way, flows)
    except RuntimeError as error:
        if CHANGED in str(error):
            return _told("unconnected", "modified-in-place", "", Step("a write in place"))
        if TWICE not in str(error):
            raise
        if not kept:
            return _told("unconnected", "non-leaf", "its is_leaf is False")
        if x.grad is None:
            return _told("unconnected", "freed-graph")
        return Told("flows", value=x.grad.clone(), of="the result", wrt="the tensor")
    asked = gradient if wrt[1] is None else gradient.reshape(-1)[_index(wrt[1], gradient)]
    names: dict[str, Any] = {"value": asked, "of": "the result", "wrt": "the tensor"}
    pulled = [flow.pulled() for flow in flows]
    if not bool(torch.isfinite(asked).all()):
        return Told("nonfinite", way.account, None, pulled=pulled, **names)
    if not bool(asked.any()):
        return Told("zero", way.account, None, pulled=pulled, **names)
    if not kept:
        return _told("flows", "non-leaf", "its is_leaf is False", value=asked)
    times = 1 if x.grad is None else _times(x.grad, gradient)
    if x.grad is not None and 1 < times <= x.grad._version + 1:  # each further call writes to it in place
        return _told("mismatch", "accumulated", f"it is {times} times the gradient", value=asked)
    return Told("flows", **names)


def _seed(of: Picked) -> Tensor:
    y, positions = of
    seed = torch.zeros_like(y, requires_grad=False).reshape(-1)
    chosen = np.arange(seed.numel()) if positions is None else positions
    seed[_index(chosen, seed)] = torch.from_numpy(weights(len(chosen))).to(seed)
    return seed.reshape(y.shape)


def _gradient(of: Picked, wrt: Picked, way: _Way, flows: list[Flow]) -> Tensor:
    seed = _seed(of)
    with undisturbed(None), plainly():
        way.watch(wrt[1], flows)
        return torch.autograd.grad(of[0], wrt[0], seed, retain_graph=True)[0]


def _index(positions: np.ndarray, x: Tensor) -> Tensor:
    return torch.from_numpy(positions.copy()).to(x.device)


def _times(held: Tensor, gradient: Tensor) -> int:
    """How many times the gradient is in what .grad holds; 1 if it is no multiple."""
    some = gradient != 0
    times = round(float((held[some] / gradient[some]).flatten()[0]))
    return times if torch.allclose(held, times * gradient, rtol=1e-4) else 1
