"""Rules of convolutions, pools, resized images and attention."""

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from elementgrad._backends.torch.axis_matrices import axis_matrices, per_axis
from elementgrad._backends.torch.cone.rules import (
    Arguments,
    known_value,
    result_shape,
    rule,
)
from elementgrad._cone.boxes import Box, Interval, sizes
from elementgrad._cone.maps import (
    Along,
    AxisMap,
    Fixed,
    Group,
    Link,
    Lookup,
    Relation,
    Spread,
    Whole,
    Window,
)
from elementgrad._cone.plan import ProgramOp, ProgramValue, Rule
from elementgrad._cone.rules import CustomRule

Tensor = torch.Tensor


@rule("convolution")
def convolution_rule(op: ProgramOp, a: Arguments) -> Rule | None:
    x, weight, bias, groups, transposed = a["input"], a["weight"], a["bias"], a["groups"], a["transposed"]
    space = len(weight.shape) - 2
    result = result_shape(op)
    if len(x.shape) != space + 2 or x is weight:
        return None
    stride, padding, dilation = (per_axis(a[key], space) for key in ("stride", "padding", "dilation"))
    kind: Any = Spread if transposed else Window
    windows = [
        kind(x.shape[axis + 2], result[axis + 2], weight.shape[axis + 2], stride[axis], padding[axis], dilation[axis])
        for axis in range(space)
    ]
    by_group = Group(x.shape[1], result[1], groups)
    links = [Link((0,), (0,), Along(x.shape[0], result[0])), Link((1,), (1,), by_group)]
    links += [Link((axis + 2,), (axis + 2,), window) for axis, window in enumerate(windows)]
    kernel = [Link((axis + 2,), (), Whole((weight.shape[axis + 2],), ())) for axis in range(space)]
    per_group = result[1] // groups
    if not transposed:
        ends = [Link((0,), (1,), Along(result[1], result[1])), Link((1,), (), Whole((weight.shape[1],), ()))]
    elif groups == 1:
        ends = [Link((0,), (), Whole((weight.shape[0],), ())), Link((1,), (1,), Along(result[1], result[1]))]
    else:
        ends = [Link((0,), (1,), by_group), Link((1,), (), Whole((weight.shape[1],), ()))]
    relations: list[Relation | None] = [
        Relation(x.shape, result, tuple(links)),
        Relation(weight.shape, result, (*ends, *kernel)),
    ]
    if isinstance(bias, ProgramValue):
        relations.append(Relation(bias.shape, result, (Link((0,), (1,), Along(result[1], result[1])),)))
    work = float(prod(weight.shape[1:])) if not transposed else float(prod(weight.shape) // result[1] * groups)

    def run(regions: list[Any], needs: Sequence[Box | None], box: Box) -> Tensor:
        part, kernels = regions[0], regions[1]
        offset = regions[2] if len(regions) > 2 else None
        within = by_group.within(box[1])
        if part is None:  # windows that see padding alone
            y = torch.zeros(sizes(box), dtype=kernels.dtype, device=kernels.device)
            return y if offset is None else y + offset.reshape(1, -1, *[1] * space)
        one = within.size == 1
        if not transposed and not one and groups > 1:
            # Whole groups are computed, and the channels that were asked for are cut out.
            kernels = _fill_groups(kernels, box[1], within, per_group)
        if transposed and one and groups > 1:
            kernels = kernels[:, box[1].start - within.start * per_group : box[1].stop - within.start * per_group]
        computed = box[1] if one or groups == 1 else Interval(within.start * per_group, within.stop * per_group)
        need = needs[0]
        assert need is not None
        if transposed:
            y = torch.convolution(
                part, kernels, None, stride, [0] * space, dilation, True, [0] * space, within.size if groups > 1 else 1
            )
            cut = [
                -amount
                for window, interval, mine in reversed(list(zip(windows, box[2:], need[2:], strict=True)))
                for amount in window.overhang(interval, mine)
            ]
            y = functional.pad(y, cut)
        else:
            pads = [window.padding(interval) for window, interval in zip(windows, box[2:], strict=True)]
            if any(before != behind for before, behind in pads):
                part = functional.pad(part, [amount for pair in reversed(pads) for amount in pair])
                pads = [(0, 0)] * space
            count = within.size if groups > 1 else 1
            # The bias is added inside, as rounding to a half-precision dtype then comes after it.
            inside = offset if computed == box[1] else None
            y = torch.convolution(
                part, kernels, inside, stride, [before for before, _ in pads], dilation, False, [0] * space, count
            )
            offset = None if inside is offset else offset
        if computed != box[1]:
            y = y[:, box[1].start - computed.start : box[1].stop - computed.start]
        return y if offset is None else y + offset.reshape(1, -1, *[1] * space)

    return CustomRule(op, relations, run, work)


def _fill_groups(kernels: Tensor, part: Interval, within: Interval, per_group: int) -> Tensor:
    """Return kernels for whole groups, with zeros for channels that were not asked for."""
    before, behind = part.start - within.start * per_group, within.stop * per_group - part.stop
    return functional.pad(kernels, [0, 0] * (kernels.dim() - 1) + [before, behind])


# Pools


@rule("max_pool2d_with_indices", "max_pool3d_with_indices", "max_pool1d", "max_pool2d", "max_pool3d")
def max_pool_rule(op: ProgramOp, a: Arguments) -> Rule | None:
    x = a["self"]
    space = len(a["kernel_size"]) if len(a["kernel_size"]) > 1 else {"1": 1, "2": 2, "3": 3}[op.name[8]]
    kernel = per_axis(a["kernel_size"], space)
    stride = per_axis(a["stride"], space) if a["stride"] else kernel
    padding, dilation = per_axis(a["padding"], space), per_axis(a["dilation"], space)
    lead, result = len(x.shape) - space, result_shape(op)
    windows = [
        Window(x.shape[lead + i], result[lead + i], kernel[i], stride[i], padding[i], dilation[i]) for i in range(space)
    ]
    links = [Link((i,), (i,), Along(n, n)) for i, n in enumerate(x.shape[:lead])]
    links += [Link((lead + i,), (lead + i,), window) for i, window in enumerate(windows)]
    pool: Any = (functional.max_pool1d, functional.max_pool2d, functional.max_pool3d)[space - 1]

    def run(regions: list[Any], needs: Any, box: Box) -> Tensor:
        pads = [window.padding(interval) for window, interval in zip(windows, box[lead:], strict=True)]
        part = regions[0]
        for axis, (pad, step) in enumerate(zip(pads, dilation, strict=True), lead):
            part = _repeat_ends(part, axis, pad, step) if any(pad) else part
        return pool(part, kernel, stride, 0, dilation)

    return CustomRule(op, [Relation(x.shape, result, tuple(links))], run, float(prod(kernel)))


def _repeat_ends(x: Tensor, axis: int, pad: tuple[int, int], step: int) -> Tensor:
    """Pad an axis with copies of the outermost elements that the same windows see, which change no maximum.

    Windows see every `step`-th position. A copy is the first maximum only where its original is. No number would do
    instead: a window that is -inf all over must not find its maximum in the padding.
    """
    size = x.shape[axis]
    at = np.arange(-pad[0], size + pad[1])
    seen = np.where(at < 0, at % step, np.where(at < size, at, size - 1 - (size - 1 - at) % step))
    outside = (seen < 0) | (seen >= size)  # of windows that see padding alone
    x = x.index_select(axis, torch.from_numpy(seen.clip(0, size - 1)).to(x.device))
    if outside.any():
        x = x.index_fill(axis, torch.from_numpy(np.flatnonzero(outside)).to(x.device), -torch.inf)
    return x


RESIZES = [
    *("avg_pool1d", "avg_pool2d", "avg_pool3d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_avg_pool1d"),
    *("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d"),
    *("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d"),
    *("_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d"),
]


@rule(*RESIZES)
def resize_rule(op: ProgramOp, a: Arguments) -> Rule | None:
    """A product of each of the last axes with a matrix that is zero but for a band."""
    x, result = op.operands[0].shape, result_shape(op)
    lead = len(x) - int(op.name[-2])
    matrices = axis_matrices(op.name, a, x[lead:], result[lead:])
    if matrices is None or len(op.operands) != 1:
        return None
    links = [Link((i,), (i,), Along(n, n)) for i, n in enumerate(x[:lead])]
    for axis, matrix in enumerate(matrices, lead):
        used = (matrix != 0).numpy()
        first = used.argmax(1)
        last = used.shape[1] - 1 - used[:, ::-1].argmax(1)
        links.append(Link((axis,), (axis,), Lookup(used.shape[1], first, last)))

    def run(regions: list[Any], needs: Sequence[Box | None], box: Box) -> Tensor:
        part, need = regions[0], needs[0]
        assert need is not None
        for axis, matrix in enumerate(matrices, lead):
            weights = matrix[slice(*box[axis]), slice(*need[axis])].to(part.dtype).to(part.device)
            part = torch.tensordot(part, weights, ([axis], [1])).movedim(-1, axis)
        return part

    work = float(sum([int((matrix != 0).sum(1).max()) for matrix in matrices]))
    return CustomRule(op, [Relation(x, result, tuple(links))], run, work)


# Attention


@rule(
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention", "scaled_dot_product_attention"
)
@rule("_scaled_dot_product_efficient_attention")
def attention_rule(op: ProgramOp, a: Arguments) -> Rule | None:
    """Rows of the query are apart. They need all keys, or those up to their own where attention is causal."""
    query, key, value = a["query"], a["key"], a["value"]
    mask = a.get("attn_mask", a.get("attn_bias"))
    if a.get("dropout_p") or query.shape[:-2] != key.shape[:-2] or len({query, key, value}) < 3:
        return None
    lead, result = len(query.shape) - 2, result_shape(op)
    rows, keys, width, out = lead, key.shape[-2], query.shape[-1], value.shape[-1]
    batch = tuple([Link((i,), (i,), Along(n, n)) for i, n in enumerate(query.shape[:lead])])
    causal = bool(a.get("is_causal"))
    known = known_value(mask)
    key_map: AxisMap = Whole((keys,), (query.shape[-2],))
    if causal:
        key_map = Lookup(keys, np.zeros(query.shape[-2], int), np.minimum(np.arange(query.shape[-2]), keys - 1))
    elif known is not None:
        key_map = _visible_keys(known, query.shape[-2], keys) or key_map
    by_key = Link((lead,), (rows,), key_map)
    relations = {
        query: Relation(
            query.shape,
            result,
            (
                *batch,
                Link((lead,), (rows,), Along(*query.shape[-2:-1] * 2)),
                Link((lead + 1,), (), Whole((width,), ())),
            ),
        ),
        key: Relation(key.shape, result, (*batch, by_key, Link((lead + 1,), (), Whole((width,), ())))),
        value: Relation(value.shape, result, (*batch, by_key, Link((lead + 1,), (lead + 1,), Along(out, out)))),
    }
    if isinstance(mask, ProgramValue):
        if mask in relations:
            return None
        offset = len(result) - len(mask.shape)
        links = []
        for i, n in enumerate(mask.shape):
            at = offset + i
            if at == len(result) - 1:
                links.append(Link((i,), (rows,), key_map if n == keys != 1 else Whole((n,), (query.shape[-2],))))
            else:
                links.append(Link((i,), (at,), Fixed(0, (result[at],)) if n == 1 != result[at] else Along(n, n)))
        relations[mask] = Relation(mask.shape, result, tuple(links))

    def run(regions: list[Any], needs: Sequence[Box | None], box: Box) -> Tensor:
        parts = dict(zip(op.operands, regions, strict=True))
        allowed = parts.get(mask) if isinstance(mask, ProgramValue) else None
        if causal and box[rows].size > 1:
            shape = box[rows].size, parts[key].shape[-2]
            allowed = torch.ones(shape, dtype=torch.bool, device=parts[key].device).tril(box[rows].start)
        return functional.scaled_dot_product_attention(
            parts[query], parts[key], parts[value], attn_mask=allowed, scale=a.get("scale")
        )

    return CustomRule(op, [relations[operand] for operand in op.operands], run, 2.0 * keys)


def _visible_keys(mask: Tensor, rows: int, keys: int) -> Lookup | None:
    """Return the keys that each row may look at, by a mask that is known; None if a row may look at none."""
    allowed = mask if mask.dtype is torch.bool else mask > torch.finfo(mask.dtype).min
    if allowed.dim() < 2 or allowed.shape[-1] != keys:
        return None
    seen = allowed.expand(*allowed.shape[:-2], rows, keys).reshape(-1, rows, keys)
    if not bool(seen.any(-1).all()):
        return None
    union = seen.any(0).cpu().numpy()
    return Lookup(keys, union.argmax(1), keys - 1 - union[:, ::-1].argmax(1))
