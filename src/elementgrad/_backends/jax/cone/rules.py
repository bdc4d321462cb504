"""Rules by which JAX's primitives run on regions of their operands.

A rule relates a result to its operands by the maps of `_cone/maps.py`, and computes a region of the result. Regions
have sizes that are fixed and starts that may be traced. The region of an operand holds all that the region of the
result needs of it, and often more; `cut` and `see` take out of it what an operation needs.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from elementgrad._backends.jax._compat import jaxprs_in_params
from elementgrad._backends.jax.program import bind
from elementgrad._backends.jax.sparsity import ELEMENTWISE
from elementgrad._cone.boxes import Shape
from elementgrad._cone.maps import (
    Along,
    AxisMap,
    Fixed,
    Link,
    Lookup,
    Prefix,
    Relation,
    Whole,
    axis_groups,
    broadcast_axes,
    move_axes,
    reduce_axes,
    regroup_axes,
)
from elementgrad._cone.plan import ProgramOp, ProgramValue, Rule
from elementgrad._cone.rules import OpaqueRule, RuleTable

Array = Any
Starts = Sequence[Any]
MOST_KNOWN = 1_000_000
"""Arrays of more elements are not looked into for indices and zeros."""


class PlacedRegion(NamedTuple):
    """A part of a tensor, and where it starts along each axis: an int, or a traced number."""

    array: Array
    starts: Starts


class Target(NamedTuple):
    """The part of a result that is to be computed."""

    starts: Starts
    sizes: Shape


Run = Callable[[list[PlacedRegion], Target], Array]


WHOLE = "whole"
"""The variant of operations without a rule, which are right for all constants."""


class RegionRule(Rule):
    """A rule that is compiled.

    What was compiled for a program serves all programs with the same equations, whatever their constants are. A rule
    that looks at the numbers of a constant, to decide how it runs, therefore says in `variant` what it decided.
    """

    variant: Hashable = None


class PrimitiveRule(RegionRule):
    """Relations of a primitive, and a function that computes a region of its result."""

    def __init__(
        self,
        op: ProgramOp,
        relations: Sequence[Relation | None],
        run: Run,
        work: float = 1.0,
        variant: Hashable = None,
    ):
        self.relations = [list(relations)]
        self.work = work
        self.variant = variant
        self._run = run

    def run(self, regions: Any, needs: Any, boxes: Any) -> list[Array]:
        return [self._run(regions, boxes[0])]


class SeparateRule(RegionRule):
    """A primitive with several results, each of which depends on all operands in a way of its own."""

    def __init__(
        self, relations: Sequence[Sequence[Relation]], run: Callable[[list[PlacedRegion], list[Any]], list[Any]]
    ):
        self.relations = relations
        self._run = run

    def run(self, regions: Any, needs: Any, boxes: Any) -> list[Array]:
        return self._run(regions, boxes)


class WholeRule(OpaqueRule, RegionRule):
    """A primitive on whole operands, of whose results regions are cut out."""

    variant = WHOLE

    def run(self, regions: Any, needs: Any, boxes: Any) -> list[Any]:
        results = bind(self._op.details, [region.array for region in regions])
        if self._op.name == "dynamic_slice" or next(jaxprs_in_params(self._op.details.params), None):
            results = [_apart(y) for y in results]
        return [
            None if target is None else cut(PlacedRegion(y, (0,) * y.ndim), target.starts, target.sizes)
            for y, target in zip(results, boxes, strict=True)
        ]


# Parts of regions


@jax.custom_jvp
def _apart(x: Array) -> Array:
    """Return an array of which XLA does not merge the parts with what computes it.

    XLA makes one dynamic slice of two and adds their starts. A start that lies too far has to be moved inside before
    that, or other elements are read. The starts of ours are inside, and those of the user may not be.
    """
    return lax.optimization_barrier(x)


_apart.defjvp(lambda primals, tangents: (_apart(*primals), *tangents))  # type: ignore[no-untyped-call]


def cut(region: PlacedRegion, starts: Starts, sizes: Shape) -> Array:
    """Return a part of a region that is inside of it."""
    array = region.array
    if tuple(array.shape) == tuple(sizes):
        return array
    offsets = [
        0 if have == size else start - at
        for have, size, start, at in zip(array.shape, sizes, starts, region.starts, strict=True)
    ]
    if all(isinstance(offset, int) for offset in offsets):
        return lax.slice(array, offsets, [o + size for o, size in zip(offsets, sizes, strict=True)])
    return lax.dynamic_slice(array, [jnp.asarray(offset, jnp.int32) for offset in offsets], sizes)


class WindowView(NamedTuple):
    """Along one axis: `size` positions of an operand with `step - 1` gaps between them, from `first` in that grid.

    `lowest` and `highest` are the least and the greatest `first` there can be. What lies in a gap or outside of the
    operand is padding.
    """

    first: Any
    size: int
    step: int
    lowest: int
    highest: int
    operand: int


def see(region: PlacedRegion, views: Sequence[WindowView | None], padding: Any) -> Array:
    """Return what windows see of a region along each axis, with padding around it; None for an axis as it is."""
    array = region.array
    pads, offsets, sizes = [], [], []
    for axis, view in enumerate(views):
        have = array.shape[axis]
        if view is None:
            pads.append((0, 0, 0))
            offsets.append(0)
            sizes.append(have)
            continue
        step, at = view.step, region.starts[axis]
        # The region is spaced first. Its element u is then at (u + at) * step of the grid, and it is padded so far that
        # every view lies inside. A view that leaves the operand does so by no more than at its first or last place.
        before = max(0, -view.lowest) + step - 1
        spaced = (have - 1) * step + 1 if have else 0
        behind = max(0, view.highest + view.size - ((view.operand - 1) * step + 1)) + step - 1
        behind += max(0, view.size - before - spaced - behind)
        offset = view.first - at * step + before
        pads.append((before, behind, step - 1 if have else 0))
        offsets.append(offset)
        sizes.append(view.size)
    if any(map(any, pads)):
        array = lax.pad(array, jnp.asarray(padding, array.dtype), pads)
    return cut(PlacedRegion(array, (0,) * array.ndim), offsets, tuple(sizes))


# Known values


def known_value(value: ProgramValue) -> np.ndarray | None:
    """Return the numbers of a value that depends on constants alone, such as indices; None for others."""
    if value.known is not None or prod(value.shape) > MOST_KNOWN:
        return value.known
    if value.maker is None:
        value.known = None if value.constant is None else np.asarray(value.constant)
        return value.known
    operands = [known_value(operand) for operand in value.maker.operands]
    if any(operand is None for operand in operands) or value.maker.name.startswith(("random", "threefry")):
        return None
    with jax.ensure_compile_time_eval():
        results = bind(value.maker.details, [jnp.asarray(operand) for operand in operands])
    for result, y in zip(value.maker.results, results, strict=True):
        if result is not None:
            result.known = np.asarray(y)
    return value.known


# The table

RULES = RuleTable()
rule = RULES.register


def find_rule(op: ProgramOp) -> Rule:
    """Return the rule of an equation."""
    make = RULES.get(op.name)
    found = None if make is None else make(op, op.details.params)
    return found or WholeRule(op)


def again(op: ProgramOp, *operands: Array, **params: Any) -> Any:
    """Evaluate a primitive with some of its parameters changed."""
    equation = op.details
    return bind(equation.replace(params={**equation.params, **params}) if params else equation, operands)[0]


def cut_all(relations: Sequence[Relation | None]) -> Callable[[list[PlacedRegion], Target], list[Array]]:
    """Return a function that cuts each region to what relations of single positions or whole axes need."""

    def parts(regions: list[PlacedRegion], target: Target) -> list[Array]:
        arrays = []
        for region, relation in zip(regions, relations, strict=True):
            starts, sizes = list(region.starts), list(region.array.shape)
            for link in [] if relation is None else relation.links:
                if isinstance(link.map, Along):
                    starts[link.operand[0]] = target.starts[link.result[0]] + link.map.offset
                    sizes[link.operand[0]] = target.sizes[link.result[0]]
                elif isinstance(link.map, Fixed):
                    starts[link.operand[0]], sizes[link.operand[0]] = link.map.position, 1
            arrays.append(cut(region, starts, tuple(sizes)))
        return arrays

    return parts


def _plain(op: ProgramOp, relations: Sequence[Relation | None], work: float = 1.0, **params: Any) -> Rule:
    """Return the rule of a primitive that runs as it is on the parts that its relations need."""
    parts = cut_all(relations)

    def run(regions: list[PlacedRegion], target: Target) -> Array:
        return again(op, *parts(regions, target))

    return PrimitiveRule(op, relations, run, work)


SCALAR = ()
_broadcast_axes = lru_cache(maxsize=4096)(broadcast_axes)  # a program has the same shapes many times


@rule(*[name for name in ELEMENTWISE.split() if name not in ("optimization_barrier", "sharding_constraint")])
@rule("mul", "select_n", "copy_p")
def _elementwise(op: ProgramOp, params: dict[str, Any]) -> Rule | None:
    (result,) = op.shapes
    relations = []
    for operand in op.operands:
        # Newer versions of JAX broadcast axes of size 1 inside of an operation.
        if operand.shape != SCALAR and len(operand.shape) != len(result):
            return None
        relations.append(_broadcast_axes(operand.shape, result))
    return _plain(op, relations)


@rule("broadcast_in_dim")
def _broadcast(op: ProgramOp, params: dict[str, Any]) -> Rule | None:
    if len(op.operands) > 1:
        return None
    (operand,), (result,), axes = op.operands, op.shapes, params["broadcast_dimensions"]
    links = []
    for axis, (size, at) in enumerate(zip(operand.shape, axes, strict=True)):
        axis_map: AxisMap = Fixed(0, (result[at],)) if size == 1 != result[at] else Along(size, size)
        links.append(Link((axis,), (at,), axis_map))
    relation = Relation(operand.shape, result, tuple(links))
    parts = cut_all([relation])

    def run(regions: list[PlacedRegion], target: Target) -> Array:
        return lax.broadcast_in_dim(parts(regions, target)[0], target.sizes, axes)

    return PrimitiveRule(op, [relation], run)


@rule("transpose")
def _transpose(op: ProgramOp, params: dict[str, Any]) -> Rule | None:
    order = params["permutation"]
    axes = [order.index(axis) for axis in range(len(order))]
    return _plain(op, [move_axes(op.operands[0].shape, op.shapes[0], axes)])


@rule("squeeze")
def _squeeze(op: ProgramOp, params: dict[str, Any]) -> Rule | None:
    shape = op.operands[0].shape
    dropped = {axis % len(shape) for axis in params["dimensions"]}
    remaining = iter(range(len(shape)))
    axes = [None if axis in dropped else next(remaining) for axis in range(len(shape))]
    return _plain(op, [move_axes(shape, op.shapes[0], axes)])


@rule("reshape")
def _reshape(op: ProgramOp, params: dict[str, Any]) -> Rule | None:
    before, (after,) = op.operands[0].shape, op.shapes
    if len(op.operands) > 1 or params.get("dimensions") is not None or not prod(before):
        return None
    relation = regroup_axes(before, after)

    def run(regions: list[PlacedRegion], target: Target) -> Array:
        (region,) = regions
        flat: list[int] = []
        picks: list[Any] = []
        for left, right in axis_groups(before, after):
            have = [region.array.shape[axis] for axis in left]
            want = [target.sizes[axis] for axis in right]
            flat.append(prod(have))
            picks.append(None)
            if all(have[i] == before[axis] for i, axis in enumerate(left)) and want == [after[axis] for axis in right]:
                continue
            # The flat positions of the wanted elements, as positions in the region.
            position: Any = jnp.zeros((1,) * len(want), jnp.int32)
            for number, axis in enumerate(right):
                shape = [1] * len(want)
                shape[number] = want[number]
                along = (jnp.arange(want[number], dtype=jnp.int32) + target.starts[axis]).reshape(shape)
                position = position * after[axis] + along
            inside: Any = 0
            remaining = position
            coordinates = []
            for axis in reversed(left):
                coordinates.append(remaining % before[axis])
                remaining = remaining // before[axis]
            for axis, size, coordinate in zip(left, have, reversed(coordinates), strict=True):
                inside = inside * size + coordinate - region.starts[axis]
            picks[-1] = jnp.broadcast_to(inside, want).reshape(-1)
        array = region.array.reshape(flat)
        for axis, pick in enumerate(picks):
            if pick is not None:
                array = take(array, pick, axis)
        return array.reshape(target.sizes)

    return PrimitiveRule(op, [relation], run)


def take(array: Array, positions: Array, axis: int) -> Array:
    if positions.shape[0] == array.shape[axis] == 1:
        return array
    return jnp.take(array, positions, axis=axis, mode="clip")


@rule(
    *["reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "reduce_xor", "argmax"],
    "argmin",
)
def _reduce(op: ProgramOp, params: dict[str, Any]) -> Rule | None:
    shape = op.operands[0].shape
    return _plain(
        op,
        [reduce_axes(shape, op.shapes[0], params["axes"], False)],
        float(prod([shape[axis] for axis in params["axes"]])),
    )


@rule("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
def _cumulative(op: ProgramOp, params: dict[str, Any]) -> Rule | None:
    shape, along = op.operands[0].shape, params["axis"]
    links = [
        Link((axis,), (axis,), Prefix(size, params["reverse"]) if axis == along else Along(size, size))
        for axis, size in enumerate(shape)
    ]
    relation = Relation(shape, shape, tuple(links))
    parts = cut_all([relation])

    def run(regions: list[PlacedRegion], target: Target) -> Array:
        y = again(op, *parts(regions, target))
        starts = [regions[0].starts[along] if axis == along else at for axis, at in enumerate(target.starts)]
        return cut(PlacedRegion(y, starts), target.starts, target.sizes)

    return PrimitiveRule(op, [relation], run)


@rule("sort", "top_k")
def _sort(op: ProgramOp, params: dict[str, Any]) -> Rule | None:
    shape, (result, *_) = op.operands[0].shape, op.shapes
    along = params["dimension"] if op.name == "sort" else len(shape) - 1
    links = [
        Link((axis,), (axis,), Whole((size,), (result[axis],)) if axis == along else Along(size, size))
        for axis, size in enumerate(shape)
    ]
    relation = Relation(shape, result, tuple(links))
    parts = cut_all([relation] * len(op.operands))

    def run(regions: list[PlacedRegion], targets: list[Any]) -> list[Any]:
        # All results are sorted together, so each of them is computed for its own part.
        found: list[Any] = []
        for number, target in enumerate(targets):
            if target is None:
                found.append(None)
                continue
            y = bind(op.details, parts(regions, target))[number]
            starts = [0 if axis == along else at for axis, at in enumerate(target.starts)]
            found.append(cut(PlacedRegion(y, starts), target.starts, target.sizes))
        return found

    return SeparateRule([[relation] * len(op.operands) for _ in op.results], run)


@rule("split")
def _split(op: ProgramOp, params: dict[str, Any]) -> Rule | None:
    shape, along = op.operands[0].shape, params["axis"]
    rows, offset = [], 0
    for result in op.shapes:
        links = [
            Link((axis,), (axis,), Along(size, result[axis], offset if axis == along else 0))
            for axis, size in enumerate(shape)
        ]
        rows.append([Relation(shape, result, tuple(links))])
        offset += result[along]

    def run(regions: list[PlacedRegion], targets: list[Any]) -> list[Any]:
        return [
            None if target is None else cut_all(row)(regions, target)[0]
            for row, target in zip(rows, targets, strict=True)
        ]

    return SeparateRule(rows, run)


@rule("dot_general")
def _dot(op: ProgramOp, params: dict[str, Any]) -> Rule | None:
    (contracted, batch), (result,) = params["dimension_numbers"], op.shapes
    shapes = [operand.shape for operand in op.operands]
    relations: list[Relation] = []
    at = len(batch[0])
    free: list[dict[int, int]] = []
    for side, shape in enumerate(shapes):
        links, own = [], {}
        for axis, size in enumerate(shape):
            if axis in contracted[side]:
                links.append(Link((axis,), (), Whole((size,), ())))
            elif axis in batch[side]:
                links.append(Link((axis,), (list(batch[side]).index(axis),), Along(size, size)))
            else:
                links.append(Link((axis,), (at,), Along(size, size)))
                own[axis] = at
                at += 1
        relations.append(Relation(shape, result, tuple(links)))
        free.append(own)
    work = float(prod([shapes[0][axis] for axis in contracted[0]]))
    return _banded(op, params, shapes, relations, free, work) or _plain(op, relations, work)


def _banded(
    op: ProgramOp,
    params: dict[str, Any],
    shapes: Sequence[Shape],
    relations: list[Relation],
    free: Sequence[dict[int, int]],
    work: float,
) -> Rule | None:
    """Return the rule of a product with a known matrix that is zero outside of a band, as in a resized image."""
    (contracted, batch) = params["dimension_numbers"]
    for side in (1, 0):
        if (
            len(contracted[side]) != 1
            or len(shapes[side]) != 2
            or batch[side]
            or op.operands[side] is op.operands[1 - side]
        ):
            continue
        (rows,), (across,) = free[side], contracted[side]
        numbers = known_value(op.operands[side])
        if numbers is None or not prod(numbers.shape):
            continue
        matrix = numbers.T if across == 0 else numbers
        used = matrix != 0
        if not used.any(1).all():
            continue
        size = matrix.shape[1]
        band = Lookup(size, used.argmax(1), size - 1 - used[:, ::-1].argmax(1))
        if int((band.last - band.first).max()) + 1 >= size:
            continue
        other, (along,) = 1 - side, contracted[1 - side]
        links = [
            Link((along,), (free[side][rows],), band) if link.operand == (along,) else link
            for link in relations[other].links
        ]
        found = list(relations)
        found[other] = Relation(shapes[other], op.shapes[0], tuple(links))
        parts = cut_all(found)

        def run(
            regions: list[PlacedRegion], target: Target, other: int = other, side: int = side, parts: Any = parts
        ) -> Array:
            arrays = parts(regions, target)
            along, across = contracted[other][0], contracted[side][0]
            starts, sizes = [0] * 2, list(arrays[side].shape)
            starts[across], sizes[across] = regions[other].starts[along], arrays[other].shape[along]
            arrays[side] = cut(PlacedRegion(arrays[side], (0, 0)), starts, tuple(sizes))
            return again(op, *arrays)

        return PrimitiveRule(op, found, run, float((band.last - band.first).max() + 1), side)
    return None
