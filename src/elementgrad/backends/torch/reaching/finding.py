"""The pattern of a Jacobian, from one reverse sweep that is watched."""

from collections.abc import Callable
from typing import Any

import torch

from elementgrad.backends.torch.quiet import plainly, undisturbed
from elementgrad.backends.torch.reaching.mode import Reaching, Reading
from elementgrad.backends.torch.reaching.rules import RULES
from elementgrad.sparsity.pattern import Pattern

Tensor = torch.Tensor


def found(
    evaluate: Callable[[], tuple[list[Any], list[Tensor]]],
    like: Tensor,
    x: Tensor | None,
    output: int,
    input: int,
    local: bool,
) -> Pattern | None:
    """Evaluate a function once more and sweep back from an output, `like` the one given, to an input.

    Nothing but what varies with `x` is unknown: other constants count with their values, and zeros among them cut
    dependences off. Without `x` no constant counts as known, and with `local` all do.
    """
    mode = Reaching(like.numel(), RULES, trusting=local or x is not None)
    if x is not None and not local:
        mode.memory.vary(x)
    with Reading(mode), mode:
        leaves, outputs = evaluate()
    y = outputs[output]
    if not y.requires_grad:
        return None
    seed = torch.ones_like(y, requires_grad=False, memory_format=torch.contiguous_format)
    mode.memory.write(seed, mode.reach.start(tuple(seed.shape)))
    with undisturbed(None), plainly(), Reading(mode), mode:
        (swept,) = torch.autograd.grad(y, leaves[input], seed, allow_unused=True)
    if swept is None:
        return None
    ids = mode.memory.ids(swept)
    if ids is None:
        return Pattern.from_entries([], [], (y.numel(), swept.numel()))
    return mode.reach.pattern(ids).T
