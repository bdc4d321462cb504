"""Gradients that were computed apart come to their leaves as by one backward, of which wrappers of the model hear."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed

from elementgrad.cleanup import defer, scope
from elementgrad.errors import FrameworkError

Tensor = torch.Tensor


@contextmanager
def muted(leaves: Sequence[Tensor]) -> Iterator[None]:
    """Let no hook of a leaf run: those run once, when the gradient is delivered."""
    with scope():
        for held in [held for leaf in leaves if (held := leaf._backward_hooks)]:
            defer(held.update, dict(held))
            held.clear()
        yield


def deliver(gradients: Sequence[tuple[Tensor, Tensor]], every: Sequence[Tensor], losses: Sequence[Tensor]) -> None:
    """Add gradients to those of leaves, by one backward for all.

    `DistributedDataParallel` reduces when it has heard of every leaf that a forward used, and of each once: those that
    hear none of the losses hear a zero for it, and nothing remains of that.
    """
    heard = {id(leaf) for leaf, _ in gradients}
    silent: list[Tensor] = []
    if together():
        used = {id(step.variable) for loss in losses for step in _steps(loss) if hasattr(step, "variable")} - heard
        silent = [leaf for leaf in every if id(leaf) in used]
    empty = [leaf for leaf in silent if leaf.grad is None]
    leaves = [leaf for leaf, _ in gradients] + silent
    torch.autograd.backward(leaves, [each for _, each in gradients] + [torch.zeros_like(leaf) for leaf in silent])
    if any(leaf.grad is not None and leaf.grad.any() for leaf in empty):
        raise FrameworkError(
            "another process has a loss for a place that this one has none for, and they would train apart; give "
            "losses for the same places in each"
        )
    for leaf in empty:
        leaf.grad = None


def check(loss: Tensor, of: str) -> None:
    """Refuse a loss of a model whose wrapper reduces at the end of the first backward, which is not the last here."""
    if together() and any(_static(step) for step in _steps(loss)):
        raise FrameworkError(
            f"the loss for {of} is of a model in DistributedDataParallel(static_graph=True), which reduces before all "
            "losses are heard; leave static_graph out"
        )


def together() -> bool:
    """Whether there may be other processes."""
    return distributed.is_available() and distributed.is_initialized()


def _static(step: Any) -> bool:
    wrapper = getattr(step, "ddp_weakref", None)
    return wrapper is not None and bool(wrapper().static_graph)


def _steps(loss: Tensor) -> Iterator[Any]:
    """Every step of the graph that a loss was computed by."""
    waiting: list[Any] = [loss.grad_fn]
    seen = set(waiting)
    while waiting:
        step = waiting.pop()
        yield step
        for other, _ in getattr(step, "next_functions", ()):
            if other is not None and other not in seen:
                seen.add(other)
                waiting.append(other)
