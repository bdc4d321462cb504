"""The pattern of a Jacobian, from one sweep that is watched."""

from collections.abc import Callable
from typing import Any

import torch

from elementgrad.backends.torch.quiet import plainly, undisturbed
from elementgrad.backends.torch.reaching.mode import Reaching
from elementgrad.backends.torch.reaching.rules import RULES
from elementgrad.sparsity.pattern import Pattern

Tensor = torch.Tensor


Evaluate = Callable[[], tuple[list[Any], list[Tensor]]]
"""The function once more: where its gradients end, and its outputs."""
MISSING = "is not implemented"
"""Stands in the errors about derivatives that an operation does not have."""


def found(
    evaluate: Evaluate,
    push: Callable[[Tensor], Any],
    y: Tensor,
    output: int,
    x: Tensor | None,
    input: int,
    local: bool,
) -> Pattern | None:
    """By a reverse sweep, or by a forward one where an operation has no rule for that; None without a path."""
    try:
        return _by_reverse(_watching(y.numel(), x, local), evaluate, output, input)
    except (NotImplementedError, RuntimeError) as error:
        if x is None or (MISSING not in str(error) and not isinstance(error, NotImplementedError)):
            raise
    return _by_forward(_watching(x.numel(), x, local), push, x)


def _watching(size: int, x: Tensor | None, local: bool) -> Reaching:
    """Someone to watch a sweep from a seed of so many elements.

    Nothing but what varies with `x` is unknown: other constants count with their values, and zeros among them cut
    dependences off. Without `x` no constant counts as known, and with `local` all do.
    """
    mode = Reaching(size, RULES, trusting=local or x is not None)
    if x is not None and not local:
        mode.memory.vary(x)
    return mode


def _by_reverse(mode: Reaching, evaluate: Evaluate, output: int, input: int) -> Pattern | None:
    """Evaluate a function once more and sweep back from an output to an input; None without a path."""
    with mode.watching():
        leaves, outputs = evaluate()
    y = outputs[output]
    if not y.requires_grad:
        return None
    seed = torch.ones_like(y, requires_grad=False, memory_format=torch.contiguous_format)
    mode.memory.write(seed, mode.reach.start(tuple(seed.shape)))
    with undisturbed(None), plainly(), mode.watching():
        (swept,) = torch.autograd.grad(y, leaves[input], seed, allow_unused=True)
    return None if swept is None else _pattern(mode, swept).T


def _by_forward(mode: Reaching, push: Callable[[Tensor], Any], x: Tensor) -> Pattern:
    """Sweep forward from an input."""
    seed = torch.ones_like(x, requires_grad=False, memory_format=torch.contiguous_format)
    mode.memory.write(seed, mode.reach.start(tuple(seed.shape)))
    with mode.watching():
        (swept,) = push(seed[None])
    return _pattern(mode, swept[0])


def _pattern(mode: Reaching, swept: Tensor) -> Pattern:
    ids = mode.memory.ids(swept)
    if ids is None:
        return Pattern.from_entries([], [], (swept.numel(), mode.reach.size))
    return mode.reach.pattern(ids)
