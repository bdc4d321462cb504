"""How sets go through products of matrices, convolutions, pools and Fourier transforms."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from elementgrad.backends.torch.reaching.mode import Call
from elementgrad.sparsity.reach import Ids, Reach

Tensor = torch.Tensor
MOST = 2 * 10**7
"""More products than this are not looked at one by one for known zeros."""
Sizes = Sequence[int]


def product(left: str, right: str, plus: str | None = None) -> Callable[[Call], Any]:
    """The product of two matrices, or of two stacks of them, and what is added to it."""

    def rule(call: Call) -> Sequence[Ids | None]:
        a, b = call[left], call[right]
        vector = b.ndim == 1
        parts = []
        ids = call.ids(a)
        if ids is not None:
            ids = ids[None] if a.ndim == 1 else ids
            mask = _mask(call, b)
            found = _through(call.reach, ids, mask[..., None] if vector and mask is not None else mask, _width(b))
            parts.append(found[..., 0] if vector else found)
        ids = call.ids(b)
        if ids is not None:
            ids = ids[:, None] if vector else ids
            mask = _mask(call, a[None] if a.ndim == 1 else a)
            turned = np.swapaxes(ids, -1, -2)
            found = _through(call.reach, turned, None if mask is None else np.swapaxes(mask, -1, -2), _height(a))
            parts.append(np.swapaxes(found, -1, -2)[..., 0] if vector else np.swapaxes(found, -1, -2))
        if a.ndim == 1:
            parts = [part[0] for part in parts]
        added = call.ids(call[plus]) if plus else None
        if added is not None and call.arguments.get("beta", 1) != 0:
            parts.append(added)
        return [call.reach.union(*parts)]

    return rule


def _width(b: Tensor) -> int:
    return 1 if b.ndim == 1 else b.shape[-1]


def _height(a: Tensor) -> int:
    return 1 if a.ndim == 1 else a.shape[-2]


def _mask(call: Call, x: Tensor) -> np.ndarray | None:
    """Where a known factor is not zero; None if it is not known, or nowhere zero."""
    known = call.known(x)
    if known is None:
        return None
    mask = (known != 0).numpy(force=True)
    return None if mask.all() else mask


def _through(reach: Reach, ids: Ids, mask: np.ndarray | None, width: int) -> Ids:
    """The product of ids with a matrix (or a stack of them) of so many columns, whose zeros may be known."""
    if mask is not None and ids.shape[-2] * int(mask.sum()) <= MOST:
        if mask.ndim == 2:
            return reach.through(ids, mask)
        return np.stack([reach.through(one, part) for one, part in zip(ids, mask, strict=True)])
    whole = reach.over(ids, [-1], keepdims=True)
    return np.broadcast_to(whole, (*whole.shape[:-1], width))


def dot(call: Call) -> Sequence[Ids | None]:
    """Of two vectors."""
    sets = []
    for one, two in (("self", "tensor"), ("tensor", "self")):
        other = call[one if one in call.arguments else "other"], call[two if two in call.arguments else "other"]
        ids = call.ids(other[0])
        if ids is not None:
            mask = _mask(call, other[1])
            sets.append(call.reach.over(ids if mask is None else ids[mask], [0]))
    return [call.reach.union(*sets)]


def convolved(
    reach: Reach,
    ids: Ids,
    mask: np.ndarray,
    stride: Sizes,
    padding: Sequence[tuple[int, int]],
    dilation: Sizes,
    spacing: Sizes,
    groups: int,
) -> Ids:
    """Windows over channels and space. `mask` is of shape (out, in of a group, *window): where weights are not zero."""
    dims = mask.ndim - 2
    out, each = mask.shape[0] // groups, mask.shape[1]
    results = []
    for group in range(groups):
        mine = ids[:, group * each : (group + 1) * each]
        weights = mask[group * out : (group + 1) * out]
        if weights.all():
            mine, weights = reach.over(mine, [1], keepdims=True), weights[:, :1]
        kinds, inverse = np.unique(weights.reshape(out, -1), axis=0, return_inverse=True)
        size = (mine.shape[1], *mask.shape[2:])
        steps = [1, *stride], [(0, 0), *padding], [1, *dilation], [1, *spacing]
        found = [reach.windows(mine, size, *steps, mask=kind.reshape(size)) for kind in kinds]
        results.append(np.concatenate(found, 1)[:, inverse.reshape(-1)])
    assert results[0].ndim == dims + 2
    return np.concatenate(results, 1)


def _weights(call: Call, weight: Tensor) -> np.ndarray:
    known = call.known(weight)
    if known is None:
        return np.ones(tuple(weight.shape), dtype=bool)
    return (known != 0).numpy(force=True)


def _ahead(call: Call, ids: Ids, mask: np.ndarray, groups: int) -> Ids:
    stride, padding, dilation = (_each(call[name], mask.ndim - 2) for name in ("stride", "padding", "dilation"))
    pads = [(pad, pad) for pad in padding]
    return convolved(call.reach, ids, mask, stride, pads, dilation, [1] * len(stride), groups)


def _back(call: Call, ids: Ids, mask: np.ndarray, groups: int, size: Sizes) -> Ids:
    """The transpose of a convolution, to a tensor of a size; `mask` is that of the convolution."""
    dims = mask.ndim - 2
    stride, padding, dilation = (_each(call[name], dims) for name in ("stride", "padding", "dilation"))
    apart = mask.reshape(groups, mask.shape[0] // groups, *mask.shape[1:])
    turned = np.swapaxes(apart, 1, 2).reshape(-1, apart.shape[1], *mask.shape[2:])
    turned = np.flip(turned, tuple(range(2, turned.ndim)))
    pads = []
    for axis in range(dims):
        span = dilation[axis] * (mask.shape[2 + axis] - 1)
        spread = (ids.shape[2 + axis] - 1) * stride[axis] + 1
        low = span - padding[axis]
        pads.append((low, size[axis] + span - spread - low))
    return convolved(call.reach, ids, turned, [1] * dims, pads, dilation, stride, groups)


def _each(sizes: Sizes, dims: int) -> list[int]:
    sizes = list(sizes)
    return sizes * dims if len(sizes) == 1 else sizes


def convolution(call: Call) -> Sequence[Ids | None] | None:
    """A convolution, or its transpose."""
    x, weight = call["input"], call["weight"]
    parts = []
    ids = call.ids(x)
    if ids is not None:
        mask, groups = _weights(call, weight), call["groups"]
        size = call.outputs[0].shape[2:]
        parts.append(_back(call, ids, mask, groups, size) if call["transposed"] else _ahead(call, ids, mask, groups))
    ids = call.ids(weight)
    if ids is not None:
        if call["transposed"]:
            return None
        parts.append(call.reach.over(ids, range(1, ids.ndim)).reshape(-1, *[1] * (ids.ndim - 2)))
    ids = call.ids(call["bias"])
    if ids is not None:
        parts.append(ids.reshape(-1, *[1] * (x.ndim - 2)))
    return [call.reach.union(*parts)]


def convolution_backward(call: Call) -> Sequence[Ids | None] | None:
    """To the input, the weight and the bias."""
    ids, x, weight = call.ids(call["grad_output"]), call["input"], call["weight"]
    if ids is None or call.ids(x) is not None or call.ids(weight) is not None:
        return None
    results: list[Ids | None] = []
    others = [0, *range(2, ids.ndim)]
    for wanted, kind in zip(call["output_mask"], ("input", "weight", "bias"), strict=True):
        if not wanted:
            continue
        if kind == "input":
            mask, groups = _weights(call, weight), call["groups"]
            ahead = call["transposed"]
            results.append(_ahead(call, ids, mask, groups) if ahead else _back(call, ids, mask, groups, x.shape[2:]))
        elif kind == "bias":
            results.append(call.reach.over(ids, others))
        elif call["transposed"]:
            results.append(np.full(tuple(weight.shape), call.reach.all_of(ids)))
        else:
            united = call.reach.over(ids, others).reshape(-1, *[1] * (ids.ndim - 1))
            results.append(np.broadcast_to(united, tuple(weight.shape)))
    return results


def unpooled(dims: int) -> Callable[[Call], Any]:
    """From windows back to the elements that are in them, whichever of them was taken."""

    def rule(call: Call) -> Sequence[Ids | None] | None:
        grad = call["grad_output"]
        ids = call.ids(grad)
        if ids is None:
            return None
        size = _each(call["kernel_size"], dims)
        stride = _each(call["stride"] or size, dims)
        padding, dilation = _each(call["padding"], dims), _each(call.arguments.get("dilation", [1]), dims)
        return [_unpool(call, ids, size, stride, padding, dilation)]

    return rule


def _unpool(call: Call, ids: Ids, size: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes) -> Ids:
    dims, shape = len(size), call["self"].shape
    lead = ids.ndim - dims
    pads = []
    for axis in range(dims):
        span = dilation[axis] * (size[axis] - 1)
        spread = (ids.shape[lead + axis] - 1) * stride[axis] + 1
        low = span - padding[axis]
        pads.append((low, shape[lead + axis] + span - spread - low))
    return call.reach.windows(ids, size, [1] * dims, pads, dilation, stride)


def transformed(call: Call) -> Sequence[Ids | None] | None:
    """Fourier transforms mix all along their axes."""
    ids = call.ids(call["self"])
    if ids is None:
        return None
    united = call.reach.over(ids, call["dim"], keepdims=True)
    return [np.broadcast_to(united, tuple(call.outputs[0].shape))]


def by_matrices(call: Call) -> Sequence[Ids | None] | None:
    """Linear algebra on a stack of matrices keeps them apart."""
    several = [ids for x in call.tensors if (ids := call.ids(x)) is not None]
    stacks = {x.shape[:-2] for x in (*call.tensors, *call.outputs) if x.is_floating_point() or x.is_complex()}
    if len(stacks) != 1 or not math.prod(next(iter(stacks))):
        return None
    united = call.reach.union(*[call.reach.over(ids, [-1, -2], keepdims=True) for ids in several])
    return [np.broadcast_to(united, tuple(x.shape)) for x in call.outputs]


PRODUCTS: dict[str, Callable[[Call], Any]] = {
    "mm": product("self", "mat2"),
    "bmm": product("self", "mat2"),
    "mv": product("self", "vec"),
    "addmm": product("mat1", "mat2", "self"),
    "baddbmm": product("batch1", "batch2", "self"),
    "addmv": product("mat", "vec", "self"),
    "dot": dot,
    "vdot": dot,
    "convolution": convolution,
    "convolution_backward": convolution_backward,
    "avg_pool2d_backward": unpooled(2),
    "avg_pool3d_backward": unpooled(3),
    "max_pool2d_with_indices_backward": unpooled(2),
    "max_pool3d_with_indices_backward": unpooled(3),
    "_fft_c2c": transformed,
    "_fft_r2c": transformed,
    "_fft_c2r": transformed,
    "linalg_solve_triangular": by_matrices,
}
