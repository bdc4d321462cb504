"""Sets of reach through products: of matrices in stacks, and of convolutions."""

from collections.abc import Sequence
from math import prod

import numpy as np

from elementgrad.sparsity.reach import Ids, Reach

PRUNED = 2 * 10**7
"""The zeros of a known factor are looked at as long as no more products than this are left."""
MASKS = 64
"""So many different masks of output channels are gone through one by one; more are taken together."""


def product(reach: Reach, ids: Ids, mask: np.ndarray | None, width: int) -> Ids:
    """Stacks of matrices, `(b, n, k)`, times others of shape `(b, k, width)`, of which `mask` tells the zeros.

    Without a mask nothing is known of the others. A stack of one serves all.

    >>> reach = Reach(4)
    >>> through = product(reach, reach.start((1, 2, 2)), np.eye(2, dtype=bool)[None], 2)
    >>> reach.pattern(through).columns.tolist()
    [0, 1, 2, 3]
    """
    stacks, rows, inner = ids.shape
    known = mask is not None and not mask.all()
    if known and np.count_nonzero(mask) * (stacks // max(1, len(mask))) * rows <= PRUNED:  # type: ignore[arg-type]
        stack, into, out = np.nonzero(np.broadcast_to(mask, (stacks, inner, width)))  # type: ignore[arg-type]
        owners = (stack * rows + np.arange(rows)[:, None]) * width + out
        unions = reach.gathered(owners.reshape(-1), ids[stack, :, into].T.reshape(-1), stacks * rows * width)
        return unions.reshape(stacks, rows, width)
    return np.broadcast_to(reach.over(ids, [2], keepdims=True), (stacks, rows, width))


def convolution(
    reach: Reach,
    ids: Ids,
    mask: np.ndarray,
    stride: Sequence[int],
    padding: Sequence[tuple[int, int]],
    dilation: Sequence[int] | None = None,
    spacing: Sequence[int] | None = None,
    groups: int = 1,
) -> Ids:
    """Images `(n, channels, *space)` with a kernel `(out, channels / groups, *space)`, of which `mask` tells the zeros.

    Of a kernel of which nothing is known the mask is true everywhere.
    """
    each, per_group = mask.shape[1], mask.shape[0] // groups
    parts = []
    for group in range(groups):
        part = ids[:, group * each : (group + 1) * each]
        kernels = mask[group * per_group : (group + 1) * per_group]
        distinct, which = np.unique(kernels.reshape(per_group, prod(mask.shape[1:])), axis=0, return_inverse=True)
        if len(distinct) > MASKS:
            distinct, which = np.any(distinct, axis=0, keepdims=True), np.zeros(per_group, dtype=np.int64)
        seen = [
            _windows(reach, part, kernel.reshape(mask.shape[1:]), stride, padding, dilation, spacing)
            for kernel in distinct
        ]
        parts.append(np.stack(seen, 1)[:, which.reshape(-1)])
    return np.concatenate(parts, 1)


def transposed_windows(
    reach: Reach,
    ids: Ids,
    shape: Sequence[int],
    size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[tuple[int, int]],
) -> Ids:
    """For each element of a tensor of this shape what the windows hold that it is in: `windows` the other way round."""
    low = [n - 1 - before for n, (before, _) in zip(size, padding, strict=True)]
    spans = [(n - 1) * step + 1 for n, step in zip(ids.shape[-len(size) :], stride, strict=True)]
    high = [
        whole - span - before + n - 1
        for whole, span, before, n in zip(shape[-len(size) :], spans, low, size, strict=True)
    ]
    return reach.windows(ids, size, [1] * len(size), list(zip(low, high, strict=True)), spacing=stride)


def _windows(
    reach: Reach,
    ids: Ids,
    mask: np.ndarray,
    stride: Sequence[int],
    padding: Sequence[tuple[int, int]],
    dilation: Sequence[int] | None,
    spacing: Sequence[int] | None,
) -> Ids:
    """One output channel. Channels count as one more axis of the window, unless all of them are in it alike."""
    if (mask == mask[:1]).all() and prod(mask.shape):
        inner = mask[0]
        return reach.windows(reach.over(ids, [1]), inner.shape, stride, padding, dilation, spacing, _some(inner))
    stride, padding = [1, *stride], [(0, 0), *padding]
    dilation, spacing = [1, *(dilation or [1] * (ids.ndim - 2))], [1, *(spacing or [1] * (ids.ndim - 2))]
    return reach.windows(ids, mask.shape, stride, padding, dilation, spacing, mask)[:, 0]


def _some(mask: np.ndarray) -> np.ndarray | None:
    return None if mask.all() else mask
