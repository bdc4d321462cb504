"""The graph of one evaluation: where gradients end, and how large they get on their way."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

Tensor = torch.Tensor
End = Tensor | GradientEdge
ALONE = ("CdistBackward0",)
"""Reverse rules that give wrong numbers, and no error, for a stack of seeds under `torch.func.vmap`."""


class Passing:
    """Where gradients end at a value that the function computes, from where it passes.

    What goes on is a copy of it: the function may have the value by another way as well, which is none of ours, and may
    write to it in place, which would leave no trace of a view.
    """

    end: GradientEdge | None
    """None for what has no gradients, such as ints."""
    like: Tensor
    """Zeros of its shape, to which forward sweeps add their seeds."""

    def __call__(self, x: Tensor) -> Tensor:
        """What goes on in the place of the value."""
        self.like = torch.zeros_like(x, requires_grad=False)
        if not (x.is_floating_point() or x.is_complex()):
            self.end = None
            return x
        copy = (x if x.requires_grad else x.detach().requires_grad_()).clone()
        self.end = get_gradient_edge(copy)
        return copy


def node_of(end: End) -> Any:
    """The node of the graph at which gradients end; for a leaf, to which its node leads, the tensor itself."""
    return end.node if isinstance(end, GradientEdge) else end if end.grad_fn is None else end.grad_fn


def alone(starts: Sequence[Any]) -> str | None:
    """A reverse rule behind nodes of the graph that must get its seeds one by one, if there is any."""
    ahead = list(starts)
    seen = set(ahead)
    while ahead:
        node = ahead.pop()
        if node.name() in ALONE:
            return str(node.name())
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                ahead.append(following)
    return None


def largest(start: Any, ends: set[Any]) -> int:
    """The bytes of the largest derivative on the way from a node of the graph to some others, or to leaves."""
    before: dict[Any, list[Any]] = {}  # who leads to a node
    leading: set[Any] = set()  # parameters of a model hang on the graph as well
    ahead = [start] if start is not None else []
    seen = set(ahead)
    while ahead:
        node = ahead.pop()
        after = node.next_functions
        if not after and getattr(node, "variable", None) in ends:
            leading.add(node)
        for following, _ in after:
            if following is not None:
                before.setdefault(following, []).append(node)
                if following not in seen:
                    seen.add(following)
                    ahead.append(following)
    leading |= ends & seen
    ahead = list(leading)
    while ahead:
        for node in before.get(ahead.pop(), ()):
            if node not in leading:
                leading.add(node)
                ahead.append(node)
    sizes = [math.prod(made.shape) * made.dtype.itemsize for node in leading for made in node._input_metadata]
    return max(sizes, default=0)
