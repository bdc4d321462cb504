"""Gradients that were computed apart come to their leaves as by one backward, of which wrappers of the model hear."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed

Tensor = torch.Tensor


@contextmanager
def muted(leaves: Sequence[Tensor]) -> Iterator[None]:
    """Let no hook of a leaf run: those run once, when the gradient is delivered."""
    hooks = [held for leaf in leaves if (held := leaf._backward_hooks)]
    kept = [dict(held) for held in hooks]
    for held in hooks:
        held.clear()
    try:
        yield
    finally:
        for held, before in zip(hooks, kept, strict=True):
            held.update(before)


def deliver(gradients: Sequence[tuple[Tensor, Tensor]], every: Sequence[Tensor], losses: Sequence[Tensor]) -> None:
    """Add gradients to those of leaves, by one backward for all.

    `DistributedDataParallel` reduces when it has heard of every leaf that a forward used, and of each once: those that
    hear none of the losses hear a zero for it, and nothing remains of that.
    """
    heard = {id(leaf) for leaf, _ in gradients}
    silent: list[Tensor] = []
    if distributed.is_available() and distributed.is_initialized():
        used = _used(losses) - heard
        silent = [leaf for leaf in every if id(leaf) in used]
    empty = [leaf for leaf in silent if leaf.grad is None]
    leaves = [leaf for leaf, _ in gradients] + silent
    torch.autograd.backward(leaves, [each for _, each in gradients] + [torch.zeros_like(leaf) for leaf in silent])
    for leaf in empty:
        leaf.grad = None


def _used(losses: Sequence[Tensor]) -> set[int]:
    """The leaves that losses depend on."""
    waiting: list[Any] = [loss.grad_fn for loss in losses]
    seen, found = set(waiting), set()
    while waiting:
        step = waiting.pop()
        if hasattr(step, "variable"):
            found.add(id(step.variable))
        for other, _ in getattr(step, "next_functions", ()):
            if other is not None and other not in seen:
                seen.add(other)
                waiting.append(other)
    return found
