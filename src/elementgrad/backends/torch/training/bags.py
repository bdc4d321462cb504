"""Sums and means of rows of a table, whose elements get their gradients from the tokens that looked them up."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from elementgrad.backends.torch.training.products import again

Tensor = torch.Tensor


class ByBag(torch.autograd.Function):
    """What an embedding bag computes; each token hears the gradient of its bag, times its weight there."""

    @staticmethod
    def forward(
        ctx: Any,
        lookup: Any,
        sizes: Sequence[int],
        run: Callable[[Tensor, Tensor | None], Tensor],
        tokens: Tensor,
        bags: Tensor,
        share: Tensor,
        often: Tensor | None,
        table: Tensor,
        weights: Tensor | None,
        *leaves: Tensor,
    ) -> Tensor:
        ctx.lookup, ctx.sizes = lookup, sizes
        ctx.rows = table.shape
        needed = (table, weights, *leaves) if ctx.needs_input_grad[8] else (None, weights)
        ctx.save_for_backward(tokens, bags, share, often, *needed)
        return run(table, weights)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        tokens, bags, share, often, table, weights, *values = ctx.saved_tensors
        heard = gradient.index_select(0, bags) * share.unsqueeze(1)
        known = tokens.clamp(min=0)
        of_weights = None
        if ctx.needs_input_grad[8]:
            table = ctx.lookup.connected(table, torch.cat(values)) if again() else table
            of_weights = (heard * table.index_select(0, known)).sum(1).reshape(weights.shape)
        if weights is not None:
            heard = heard * weights.reshape(-1, 1)
        if often is not None:
            heard = heard / often.unsqueeze(1)
        of_table = None
        if ctx.needs_input_grad[7]:
            of_table = gradient.new_zeros(ctx.rows).index_add(0, known, heard.masked_fill((tokens < 0).unsqueeze(1), 0))
        leaves = ctx.lookup(tokens, heard).split_with_sizes(ctx.sizes)
        return None, None, None, None, None, None, None, of_table, of_weights, *leaves


def bag(
    layer: Any,
    run: Callable[[Tensor, Tensor | None], Tensor],
    use: Any,
    table: Tensor,
    ids: Tensor,
    offsets: Tensor | None,
    weights: Tensor | None,
) -> Tensor:
    """The layer's output for a table that trains in part."""
    tokens = ids.reshape(-1)
    bags = _bags(ids, offsets, layer.include_last_offset)
    if layer.padding_idx is not None:
        tokens = tokens.where(tokens != layer.padding_idx, -1)
    counted = (tokens >= 0).to(table.dtype)
    share = counted
    if layer.mode == "mean":
        count = len(ids) if offsets is None else len(offsets) - layer.include_last_offset
        share = counted / counted.new_zeros(count).index_add(0, bags, counted).clamp(min=1).index_select(0, bags)
    often = None
    if layer.scale_grad_by_freq:
        _, place, count_of = tokens.unique(return_inverse=True, return_counts=True)
        often = count_of[place]
    leaves = use.weight.leaves
    return ByBag.apply(use.kernel, use.weight.sizes, run, tokens, bags, share, often, table, weights, *leaves)


def _bags(ids: Tensor, offsets: Tensor | None, closed: bool) -> Tensor:
    """Which bag each token is in."""
    if offsets is None:
        return torch.arange(len(ids), device=ids.device).repeat_interleave(ids.shape[1])
    starts = offsets[:-1] if closed else offsets
    return torch.searchsorted(starts, torch.arange(len(ids), device=ids.device).to(starts.dtype), right=True) - 1
