"""Rules of operations that move elements: concatenations, reversals, tiles and rows by index."""

from math import prod
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from elementgrad._backends.jax.cone.rules import (
    Array,
    PlacedRegion,
    PrimitiveRule,
    Target,
    WindowView,
    again,
    cut,
    cut_all,
    known_value,
    rule,
    see,
    take,
)
from elementgrad._cone.maps import Along, AxisMap, Link, Lookup, Relation, Whole, move_axes
from elementgrad._cone.plan import ProgramOp, Rule


@rule("concatenate")
def _concatenate(op: ProgramOp, params: dict[str, Any]) -> Rule | None:
    (result,), along = op.shapes, params["dimension"]
    relations, ends, offset = [], [], 0
    for operand in op.operands:
        links = [
            Link((axis,), (axis,), Along(size, result[axis], -offset if axis == along else 0))
            for axis, size in enumerate(operand.shape)
        ]
        relations.append(Relation(operand.shape, result, tuple(links)))
        ends.append((offset, operand.shape[along]))
        offset += operand.shape[along]

    def run(regions: list[PlacedRegion], target: Target) -> Array:
        size, first = target.sizes[along], target.starts[along]
        parts = []
        for region in regions:
            starts, sizes = list(target.starts), list(target.sizes)
            starts[along], sizes[along] = region.starts[along], region.array.shape[along]
            parts.append(PlacedRegion(cut(region, starts, tuple(sizes)), starts))
        if size == result[along]:
            return lax.concatenate([part.array for part in parts], along)
        made: Any = None
        shape = [1] * len(result)
        shape[along] = size
        position = (jnp.arange(size, dtype=jnp.int32) + first).reshape(shape)
        for part, (offset, have) in zip(parts, ends, strict=True):
            if not part.array.shape[along]:
                continue
            # A place that is far from this operand sees its padding alone.
            seen = jnp.clip(first - offset, -size, have)
            at = jnp.clip(part.starts[along], seen - part.array.shape[along], seen + size)
            views: list[WindowView | None] = [None] * len(result)
            views[along] = WindowView(
                seen - at,
                size,
                1,
                -size - part.array.shape[along],
                part.array.shape[along] + size,
                part.array.shape[along],
            )
            mine = see(PlacedRegion(part.array, (0,) * len(result)), views, 0)
            inside = (position >= offset) & (position < offset + have)
            made = mine if made is None else jnp.where(inside, mine, made)
        return made

    return PrimitiveRule(op, relations, run)


@rule("stack")
def _stack(op: ProgramOp, params: dict[str, Any]) -> Rule | None:
    (result,), along = op.shapes, params["axis"] % len(op.shapes[0])
    axes = [axis + (axis >= along) for axis in range(len(result) - 1)]
    relations = [move_axes(operand.shape, result, axes) for operand in op.operands]
    parts = cut_all(relations)

    def run(regions: list[PlacedRegion], target: Target) -> Array:
        stacked = lax.concatenate([jnp.expand_dims(x, along) for x in parts(regions, target)], along)
        starts = [0 if axis == along else at for axis, at in enumerate(target.starts)]
        return cut(PlacedRegion(stacked, starts), target.starts, target.sizes)

    return PrimitiveRule(op, relations, run)


@rule("tile")
def _tile(op: ProgramOp, params: dict[str, Any]) -> Rule | None:
    shape, (result,) = op.operands[0].shape, op.shapes
    if len(shape) != len(result) or not prod(shape):
        return None
    links = [
        Link((axis,), (axis,), Along(size, size) if size == all_ else Lookup.at(size, np.arange(all_) % size))
        for axis, (size, all_) in enumerate(zip(shape, result, strict=True))
    ]
    relation = Relation(shape, result, tuple(links))
    parts = cut_all([relation])

    def run(regions: list[PlacedRegion], target: Target) -> Array:
        (array,) = parts(regions, target)
        for axis, size in enumerate(shape):
            if size != result[axis]:
                there = (jnp.arange(target.sizes[axis], dtype=jnp.int32) + target.starts[axis]) % size
                array = take(array, there - regions[0].starts[axis], axis)
        return array

    return PrimitiveRule(op, [relation], run)


@rule("rev")
def _reverse(op: ProgramOp, params: dict[str, Any]) -> Rule | None:
    shape, turned = op.operands[0].shape, params["dimensions"]
    links = [
        Link((axis,), (axis,), Lookup.at(size, np.arange(size)[::-1]) if axis in turned else Along(size, size))
        for axis, size in enumerate(shape)
    ]
    relation = Relation(shape, shape, tuple(links))

    def run(regions: list[PlacedRegion], target: Target) -> Array:
        starts = [
            shape[axis] - at - size if axis in turned else at
            for axis, (at, size) in enumerate(zip(target.starts, target.sizes, strict=True))
        ]
        return lax.rev(cut(regions[0], starts, target.sizes), turned)

    return PrimitiveRule(op, [relation], run)


@rule("iota")
def _iota(op: ProgramOp, params: dict[str, Any]) -> Rule | None:
    if op.operands:
        return None
    along, dtype = params["dimension"], params["dtype"]

    def run(regions: list[PlacedRegion], target: Target) -> Array:
        whole_axis = lax.iota(dtype, params["shape"][along])
        part = cut(PlacedRegion(whole_axis, (0,)), [target.starts[along]], (target.sizes[along],))
        return lax.broadcast_in_dim(part, target.sizes, (along,))

    return PrimitiveRule(op, [], run)


@rule("gather")
def _gather(op: ProgramOp, params: dict[str, Any]) -> Rule | None:
    """Rows along one axis, by indices."""
    x, indices = op.operands
    (result,), numbers, sizes = op.shapes, params["dimension_numbers"], params["slice_sizes"]
    if len(numbers.collapsed_slice_dims) != 1 or numbers.collapsed_slice_dims != numbers.start_index_map:
        return None
    if getattr(numbers, "operand_batching_dims", ()) or x is indices:
        return None
    (along,) = numbers.start_index_map
    if any(size != have for axis, (size, have) in enumerate(zip(sizes, x.shape, strict=True)) if axis != along):
        return None
    offsets = list(numbers.offset_dims)
    batch = [axis for axis in range(len(result)) if axis not in offsets]
    known = known_value(indices)
    row: AxisMap = Whole((x.shape[along],), tuple([result[axis] for axis in batch]))
    if known is not None:
        if known.size == 0 or known.min() < 0 or known.max() >= x.shape[along]:
            return None
        row = Lookup.at(x.shape[along], known[..., 0].astype(np.intp))
    others = iter(offsets)
    links = [
        Link((axis,), tuple(batch), row) if axis == along else _along(axis, next(others), size)
        for axis, size in enumerate(x.shape)
    ]
    by_index = [_along(number, axis, result[axis]) for number, axis in enumerate(batch)]
    last = len(indices.shape) - 1
    relations = [
        Relation(x.shape, result, tuple(links)),
        Relation(indices.shape, result, (*by_index, Link((last,), (), Whole((1,), ())))),
    ]
    parts = cut_all(relations)

    def run(regions: list[PlacedRegion], target: Target) -> Array:
        part, rows = parts(regions, target)
        first = regions[0].starts[along]
        own = tuple([1 if axis == along else size for axis, size in enumerate(part.shape)])
        rows = rows - jnp.asarray(first, rows.dtype)
        if known is None:
            return again(op, part, rows, slice_sizes=own)
        return again(op, part, rows, slice_sizes=own, mode=lax.GatherScatterMode.CLIP)

    return PrimitiveRule(op, relations, run, variant=known is not None)


def _along(operand: int, result: int, size: int) -> Link:
    return Link((operand,), (result,), Along(size, size))
