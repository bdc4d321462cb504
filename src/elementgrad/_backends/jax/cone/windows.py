"""Rules of convolutions, pools, slices and padding."""

from collections.abc import Hashable, Sequence
from math import prod
from typing import Any, NamedTuple

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
    known_value,
    rule,
    see,
)
from elementgrad._cone.boxes import Box, Interval
from elementgrad._cone.maps import Along, AxisMap, Group, Intervals, Link, Relation, Whole, Window
from elementgrad._cone.plan import ProgramOp, Rule


def _dilated(operand: int, result: int, width: int, stride: int, low: int, spacing: int, dilation: int) -> AxisMap:
    if spacing == 1:
        return Window(operand, result, width, stride, low, dilation)
    return SpacedWindow(operand, result, width, stride, low, spacing, dilation)


class SpacedWindow(NamedTuple):
    """A window over an operand whose elements are spaced, as in a transposed convolution or an interior padding."""

    operand: int
    result: int
    width: int
    stride: int
    low: int
    spacing: int
    dilation: int

    def need(self, result: Intervals) -> Box:
        if not result[0].size:
            return (Interval(0, 0),)
        start = result[0].start * self.stride - self.low
        stop = (result[0].stop - 1) * self.stride - self.low + self.dilation * (self.width - 1) + 1
        return (Interval(-(-start // self.spacing), (stop - 1) // self.spacing + 1).clip(self.operand),)

    def reach(self, operand: Intervals) -> Box:
        if not operand[0].size:
            return (Interval(0, 0),)
        spread = Interval(operand[0].start * self.spacing, (operand[0].stop - 1) * self.spacing + 1)
        grid = (self.operand - 1) * self.spacing + 1
        return Window(grid, self.result, self.width, self.stride, self.low, self.dilation).reach([spread])

    def computed(self, result: Intervals) -> Box:
        return tuple(result)


def _view(window: Any, start: Any, size: int) -> WindowView:
    """Return what the windows of so many results see, from a start."""
    span = window.dilation * (window.width - 1) + 1
    return WindowView(
        start * window.stride - window.low,
        (size - 1) * window.stride + span,
        getattr(window, "spacing", 1),
        -window.low,
        (window.result - size) * window.stride - window.low,
        window.operand,
    )


@rule("slice")
def _slice(op: ProgramOp, params: dict[str, Any]) -> Rule | None:
    strides = params["strides"] or (1,) * len(op.shapes[0])
    return _strided(op, params["start_indices"], strides)


@rule("dynamic_slice")
def _dynamic_slice(op: ProgramOp, params: dict[str, Any]) -> Rule | None:
    starts = [known_value(operand) for operand in op.operands[1:]]
    shape, (result,) = op.operands[0].shape, op.shapes
    if any(start is None for start in starts) or len(starts) != len(result):
        return None
    inside = [
        min(max(int(start), 0), have - size)  # type: ignore[arg-type]
        for start, have, size in zip(starts, shape, result, strict=True)
    ]
    return _strided(op, inside, (1,) * len(result), tuple(inside))


def _strided(op: ProgramOp, first: Sequence[int], strides: Sequence[int], variant: Hashable = None) -> Rule:
    shape, (result,) = op.operands[0].shape, op.shapes
    windows = [
        Window(have, size, 1, stride, -start)
        for have, size, stride, start in zip(shape, result, strides, first, strict=True)
    ]
    links = [Link((axis,), (axis,), window) for axis, window in enumerate(windows)]
    relations: list[Relation | None] = [Relation(shape, result, tuple(links))]
    relations += [None] * (len(op.operands) - 1)

    def run(regions: list[PlacedRegion], target: Target) -> Array:
        views = [_view(*each) for each in zip(windows, target.starts, target.sizes, strict=True)]
        starts, sizes = [view.first for view in views], tuple([view.size for view in views])
        return lax.slice(cut(regions[0], starts, sizes), [0] * len(sizes), sizes, strides)

    return PrimitiveRule(op, relations, run, variant=variant)


@rule("pad")
def _pad(op: ProgramOp, params: dict[str, Any]) -> Rule | None:
    shape, (result,) = op.operands[0].shape, op.shapes
    windows = [
        SpacedWindow(have, size, 1, 1, low, interior + 1, 1)
        for have, size, (low, _, interior) in zip(shape, result, params["padding_config"], strict=True)
    ]
    links = [Link((axis,), (axis,), window) for axis, window in enumerate(windows)]
    relations = [Relation(shape, result, tuple(links)), Relation((), result, ())]

    def run(regions: list[PlacedRegion], target: Target) -> Array:
        views = [
            None
            if (window.low, window.spacing) == (0, 1) and window.operand == window.result == size == have
            else _view(window, start, size)
            for window, start, size, have in zip(
                windows, target.starts, target.sizes, regions[0].array.shape, strict=True
            )
        ]
        return see(regions[0], views, regions[1].array)

    return PrimitiveRule(op, relations, run)


class StaticGroup(NamedTuple):
    """`Group`, with a number of groups that depends on the size of a part alone, and not on where it starts."""

    operand: int
    result: int
    groups: int

    @property
    def each(self) -> int:
        return self.result // self.groups

    def count(self, size: int) -> int:
        return min(self.groups, (size + self.each - 2) // self.each + 1)

    def need(self, result: Intervals) -> Box:
        if not result[0].size:
            return (Interval(0, 0),)
        count, there = self.count(result[0].size), self.operand // self.groups
        first = min(result[0].start // self.each, self.groups - count)
        return (Interval(first * there, (first + count) * there),)

    def reach(self, operand: Intervals) -> Box:
        return Group(self.operand, self.result, self.groups).reach(operand)

    def computed(self, result: Intervals) -> Box:
        return tuple(result)


@rule("conv_general_dilated")
def _convolution(op: ProgramOp, params: dict[str, Any]) -> Rule | None:
    x, weight = op.operands
    (result,), groups = op.shapes, params["feature_group_count"]
    if params["batch_group_count"] != 1 or x is weight or not prod(x.shape) or not prod(weight.shape):
        return None
    lhs, rhs, out = params["dimension_numbers"]
    windows = [
        _dilated(x.shape[a], result[c], weight.shape[b], stride, low, spacing, dilation)
        for a, b, c, stride, (low, _), spacing, dilation in zip(
            lhs[2:],
            rhs[2:],
            out[2:],
            params["window_strides"],
            params["padding"],
            params["lhs_dilation"],
            params["rhs_dilation"],
            strict=True,
        )
    ]
    channels = result[out[1]]
    by_group = StaticGroup(x.shape[lhs[1]], channels, groups)
    kernels: AxisMap = Along(channels, channels) if groups == 1 else StaticGroup(channels, channels, groups)
    links = [
        Link((lhs[0],), (out[0],), Along(x.shape[lhs[0]], result[out[0]])),
        Link((lhs[1],), (out[1],), by_group),
        *[Link((a,), (c,), window) for a, c, window in zip(lhs[2:], out[2:], windows, strict=True)],
    ]
    others = [Link((axis,), (), Whole((weight.shape[axis],), ())) for axis in rhs[1:]]
    relations = [
        Relation(x.shape, result, tuple(links)),
        Relation(weight.shape, result, (Link((rhs[0],), (out[1],), kernels), *others)),
    ]
    work = float(prod(weight.shape) // channels)

    def run(regions: list[PlacedRegion], target: Target) -> Array:
        part, kernel = regions
        first, size = target.starts[out[1]], target.sizes[out[1]]
        count = by_group.count(size)
        group: Any = 0
        if count < groups:
            group = jnp.minimum(first // by_group.each, groups - count)
        made, made_size = (first, size) if groups == 1 else (group * by_group.each, count * by_group.each)
        starts, sizes = list(part.starts), list(part.array.shape)
        starts[lhs[0]], sizes[lhs[0]] = target.starts[out[0]], target.sizes[out[0]]
        inputs = by_group.operand // groups
        starts[lhs[1]], sizes[lhs[1]] = group * inputs, count * inputs
        array = cut(part, starts, tuple(sizes))
        views: list[WindowView | None] = [None] * array.ndim
        for a, c, window in zip(lhs[2:], out[2:], windows, strict=True):
            views[a] = _view(window, target.starts[c], target.sizes[c])
        array = see(PlacedRegion(array, starts), views, 0)
        starts, sizes = [0] * kernel.array.ndim, list(kernel.array.shape)
        starts[rhs[0]], sizes[rhs[0]] = made, made_size
        space = len(windows)
        y = again(
            op,
            array,
            cut(kernel, starts, tuple(sizes)),
            padding=((0, 0),) * space,
            lhs_dilation=(1,) * space,
            feature_group_count=count if groups > 1 else 1,
        )
        starts = list(target.starts)
        starts[out[1]] = made
        return cut(PlacedRegion(y, starts), target.starts, target.sizes)

    return PrimitiveRule(op, relations, run, work)


@rule("reduce_window_sum", "reduce_window_max", "reduce_window_min")
def _reduce_window(op: ProgramOp, params: dict[str, Any]) -> Rule | None:
    shape, (result,) = op.operands[0].shape, op.shapes
    if not prod(shape) or len(op.operands) > 1:
        return None
    windows = [
        _dilated(have, size, width, stride, low, spacing, dilation)
        for have, size, width, stride, (low, _), spacing, dilation in zip(
            shape,
            result,
            params["window_dimensions"],
            params["window_strides"],
            params["padding"],
            params["base_dilation"],
            params["window_dilation"],
            strict=True,
        )
    ]
    links = [Link((axis,), (axis,), window) for axis, window in enumerate(windows)]
    relation = Relation(shape, result, tuple(links))
    dtype = np.dtype(op.operands[0].dtype) if op.name != "reduce_window_sum" else None
    padding: Any = 0
    if dtype is not None:
        if not jnp.issubdtype(dtype, jnp.floating):
            return None
        padding = -np.inf if op.name == "reduce_window_max" else np.inf
    ones = (1,) * len(shape)

    def run(regions: list[PlacedRegion], target: Target) -> Array:
        views = [_view(*each) for each in zip(windows, target.starts, target.sizes, strict=True)]
        array = see(regions[0], views, padding)
        return again(op, array, padding=((0, 0),) * len(shape), base_dilation=ones)

    return PrimitiveRule(op, [relation], run, float(prod(params["window_dimensions"])))
