"""Rules of operations that move and pick elements."""

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import tensorflow as tf

from elementgrad._backends.tensorflow.cone.rules import cut, known, rule
from elementgrad._cone.boxes import Box, Interval, sizes
from elementgrad._cone.maps import (
    Along,
    AxisMap,
    Fixed,
    Intervals,
    Link,
    Lookup,
    Relation,
    Spread,
    Whole,
    Window,
    broadcast_axes,
    move_axes,
    regroup_axes,
    run_reshape,
)
from elementgrad._cone.plan import ProgramOp, Rule
from elementgrad._cone.rules import CustomRule, PartRule, SplitRule

Tensor = Any


class _Reshaped:
    """A tensor with the two methods of NumPy by which parts are reshaped."""

    def __init__(self, x: Tensor):
        self.x = x

    def reshape(self, shape: Sequence[int]) -> "_Reshaped":
        return self if list(self.x.shape) == list(shape) else _Reshaped(tf.reshape(self.x, shape))

    def __getitem__(self, index: tuple[slice, ...]) -> "_Reshaped":
        shape = [int(size) for size in self.x.shape]
        spans = [part.indices(size)[:2] for part, size in zip(index, shape, strict=True)]
        if all(span == (0, size) for span, size in zip(spans, shape, strict=True)):
            return self
        return _Reshaped(tf.slice(self.x, [start for start, _ in spans], [stop - start for start, stop in spans]))


@rule("Reshape", "Squeeze", "ExpandDims")
def reshape_rule(op: ProgramOp) -> Rule | None:
    x, result = op.operands[0], op.shapes[0]
    if not prod(x.shape):
        return None
    relation = regroup_axes(x.shape, result)

    def run(regions: list[Any], needs: Any, box: Box) -> Tensor:
        return run_reshape(_Reshaped(regions[0]), relation, box).x

    return CustomRule(op, [relation, *[None] * (len(op.operands) - 1)], run, 0.0)


@rule("Transpose")
def transpose_rule(op: ProgramOp) -> Rule | None:
    x, order = op.operands[0], known(op.operands[1])
    if order is None:
        return None
    positions = [list(order % max(1, len(x.shape))).index(axis) for axis in range(len(x.shape))]
    return PartRule(op, [move_axes(x.shape, op.shapes[0], positions), None], 0.0)


@rule("BroadcastTo")
def broadcast_rule(op: ProgramOp) -> Rule | None:
    relation = broadcast_axes(op.operands[0].shape, op.shapes[0])
    return CustomRule(op, [relation, None], lambda regions, needs, box: tf.broadcast_to(regions[0], sizes(box)), 0.0)


@rule("Fill")
def fill_rule(op: ProgramOp) -> Rule | None:
    relation = broadcast_axes((), op.shapes[0])
    return CustomRule(op, [None, relation], lambda regions, needs, box: tf.fill(sizes(box), regions[1]), 0.0)


def pick_rule(op: ProgramOp, positions: dict[int, Any]) -> Rule:
    """Return the rule of an operation that picks known positions along some axes of its first operand."""
    x, result = op.operands[0], op.shapes[0]
    picks = {axis: np.asarray(each) for axis, each in positions.items()}
    links = []
    for axis, size in enumerate(x.shape):
        axis_map: AxisMap = Lookup.at(size, picks[axis]) if axis in picks else Along(size, size)
        links.append(Link((axis,), (axis,), axis_map))

    def run(regions: list[Any], needs: Sequence[Box | None], box: Box) -> Tensor:
        part, need = regions[0], needs[0]
        assert need is not None
        for axis, each in picks.items():
            here = each[slice(*box[axis])] - need[axis].start
            if not np.array_equal(here, np.arange(need[axis].size)):
                part = tf.gather(part, here, axis=axis)
        return part

    return CustomRule(op, [Relation(x.shape, result, tuple(links)), *[None] * (len(op.operands) - 1)], run, 0.0)


@rule("Tile")
def tile_rule(op: ProgramOp) -> Rule | None:
    x, result = op.operands[0], op.shapes[0]
    if 0 in result:
        return None
    return pick_rule(op, {i: np.arange(result[i]) % n for i, n in enumerate(x.shape) if result[i] != n})


@rule("MirrorPad")
def mirror_rule(op: ProgramOp) -> Rule | None:
    x, paddings = op.operands[0], known(op.operands[1])
    if paddings is None:
        return None
    mode: Any = "reflect" if op.details.attribute("mode") == "REFLECT" else "symmetric"
    return pick_rule(
        op, {i: np.pad(np.arange(n), tuple(paddings[i]), mode=mode) for i, n in enumerate(x.shape) if paddings[i].any()}
    )


@rule("ReverseV2")
def reverse_rule(op: ProgramOp) -> Rule | None:
    x, axes = op.operands[0], known(op.operands[1])
    if axes is None:
        return None
    rank = len(x.shape)
    return pick_rule(op, {int(axis) % rank: np.arange(x.shape[int(axis) % rank])[::-1] for axis in axes})


@rule("Roll")
def roll_rule(op: ProgramOp) -> Rule | None:
    x, shifts, axes = op.operands[0], known(op.operands[1]), known(op.operands[2])
    if shifts is None or axes is None:
        return None
    positions: dict[int, Any] = {}
    for shift, axis in zip(np.atleast_1d(shifts), np.atleast_1d(axes), strict=True):
        at = int(axis) % len(x.shape)
        positions[at] = np.roll(positions.get(at, np.arange(x.shape[at])), int(shift))
    return pick_rule(op, positions)


@rule("Pad", "PadV2")
def pad_rule(op: ProgramOp) -> Rule | None:
    x, paddings = op.operands[0], known(op.operands[1])
    if paddings is None or (paddings < 0).any():
        return None
    before, result = [int(each) for each in paddings[:, 0]], op.shapes[0]
    links = [Link((i,), (i,), Along(n, result[i], -before[i])) for i, n in enumerate(x.shape)]
    relations: list[Relation | None] = [Relation(x.shape, result, tuple(links)), None]
    if op.name == "PadV2":
        relations.append(Relation((), result, ()))

    def run(regions: list[Any], needs: Sequence[Box | None], box: Box) -> Tensor:
        value = regions[2] if len(regions) > 2 else tf.zeros([], x.dtype)
        need = needs[0]
        if regions[0] is None or need is None:
            return tf.fill(sizes(box), value)
        amounts = []
        for i, interval in enumerate(box):
            seen = interval.shift(-before[i])
            amounts.append((need[i].start - seen.start, seen.stop - need[i].stop))
        return tf.raw_ops.PadV2(input=regions[0], paddings=np.array(amounts, np.int32), constant_values=value)

    return CustomRule(op, relations, run, 0.0)


@rule("Slice")
def slice_rule(op: ProgramOp) -> Rule | None:
    x, begin, result = op.operands[0], known(op.operands[1]), op.shapes[0]
    if begin is None:
        return None
    links = [Link((i,), (i,), Along(n, result[i], int(begin[i]))) for i, n in enumerate(x.shape)]
    relation = Relation(x.shape, result, tuple(links))
    return CustomRule(op, [relation, None, None], lambda regions, needs, box: tf.identity(regions[0]), 0.0)


@rule("StridedSlice")
def strided_slice_rule(op: ProgramOp) -> Rule | None:
    x, result = op.operands[0], op.shapes[0]
    bounds: list[Any] = [known(value) for value in op.operands[1:4]]
    if any(each is None for each in bounds) or 0 in result or 0 in x.shape:
        return None
    masks = {
        name: int(op.details.attribute(f"{name}_mask"))
        for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")
    }
    index = _index_of(bounds, masks, len(x.shape))
    links: list[Link] = []
    again: list[Any] = []
    axis = at = 0
    for part in index:
        if part is None:
            again.append(tf.newaxis)
            at += 1
        elif isinstance(part, slice):
            start, _, step = part.indices(x.shape[axis])
            axis_map: AxisMap
            if step == 1:
                axis_map = Along(x.shape[axis], result[at], start)
            elif step > 0:
                axis_map = Window(x.shape[axis], result[at], 1, step, -start)
            else:
                axis_map = Lookup.at(x.shape[axis], start + step * np.arange(result[at]))
            links.append(Link((axis,), (at,), axis_map))
            again.append(slice(None, None, step))
            axis, at = axis + 1, at + 1
        else:
            links.append(Link((axis,), (), Fixed(part % x.shape[axis])))
            again.append(0)
            axis += 1
    relation = Relation(x.shape, result, tuple(links))
    plain = all(part == slice(None, None, 1) for part in again)

    def run(regions: list[Any], needs: Any, box: Box) -> Tensor:
        return tf.identity(regions[0]) if plain else regions[0][tuple(again)]

    return CustomRule(op, [relation, None, None, None], run, 0.0)


def _index_of(bounds: Sequence[Any], masks: dict[str, int], rank: int) -> list[Any]:
    """Return an index as Python writes it: a slice, a number or None for each entry, one for each axis."""
    begin, end, strides = bounds
    index: list[Any] = []
    for i in range(len(begin)):
        bit = 1 << i
        if masks["ellipsis"] & bit:
            index.append(...)
        elif masks["new_axis"] & bit:
            index.append(None)
        elif masks["shrink_axis"] & bit:
            index.append(int(begin[i]))
        else:
            start = None if masks["begin"] & bit else int(begin[i])
            index.append(slice(start, None if masks["end"] & bit else int(end[i]), int(strides[i])))
    used = sum([part is not None and part is not ... for part in index])
    if ... not in index:
        index.append(...)
    at = index.index(...)
    return [*index[:at], *[slice(None, None, 1)] * (rank - used), *index[at + 1 :]]


# Several operands or results


@rule("Concat", "ConcatV2")
def concat_rule(op: ProgramOp) -> Rule | None:
    first = op.name == "Concat"
    parts = op.operands[1:] if first else op.operands[:-1]
    axis, result, start = known(op.operands[0 if first else -1]), op.shapes[0], 0
    if axis is None:
        return None
    along = int(axis) % len(result)
    relations: list[Relation | None] = []
    for value in parts:
        links = [Link((i,), (i,), Along(n, result[i], -start if i == along else 0)) for i, n in enumerate(value.shape)]
        relations.append(Relation(value.shape, result, tuple(links)))
        start += value.shape[along]
    none: list[Relation | None] = [None]

    def run(regions: list[Any], needs: Any, box: Box) -> Tensor:
        given = [region for region in (regions[1:] if first else regions[:-1]) if region is not None]
        return tf.concat(given, along) if len(given) > 1 else tf.identity(given[0])

    return CustomRule(op, none + relations if first else relations + none, run, 0.0)


class Placed(AxisMap):
    """An operand that has one position of an axis of the result, and no such axis itself."""

    def __init__(self, position: int):
        self.position = position

    def need(self, result: Intervals) -> Box:
        return ()

    def reach(self, operand: Intervals) -> Box:
        return (Interval(self.position, self.position + 1),)


class PackRule(CustomRule):
    """Tensors on top of each other, of which those are needed whose position is."""

    def __init__(self, op: ProgramOp, axis: int):
        result = op.shapes[0]
        relations = []
        for position, value in enumerate(op.operands):
            links = [Link((i,), (i + (i >= axis),), Along(n, n)) for i, n in enumerate(value.shape)]
            links.append(Link((), (axis,), Placed(position)))
            relations.append(Relation(value.shape, result, tuple(links)))

        def run(regions: list[Any], needs: Any, box: Box) -> Tensor:
            return tf.stack([regions[position] for position in range(*box[axis])], axis)

        super().__init__(op, relations, run, 0.0)
        self._axis = axis

    def needs(self, boxes: Sequence[Box | None]) -> list[Box | None]:
        needs = super().needs(boxes)
        assert boxes[0] is not None
        inside = range(*boxes[0][self._axis])
        return [need if position in inside else None for position, need in enumerate(needs)]


@rule("Pack")
def pack_rule(op: ProgramOp) -> Rule | None:
    return PackRule(op, op.details.attribute("axis") % len(op.shapes[0]))


@rule("Unpack")
def unpack_rule(op: ProgramOp) -> Rule | None:
    x = op.operands[0]
    axis = op.details.attribute("axis") % len(x.shape)
    relations = []
    for position, shape in enumerate(op.shapes):
        links = [Link((axis,), (), Fixed(position))]
        links += [Link((i,), (i - (i > axis),), Along(n, n)) for i, n in enumerate(x.shape) if i != axis]
        relations.append(Relation(x.shape, shape, tuple(links)))
    return SplitRule(op, relations, lambda part: tf.squeeze(part, axis))


@rule("Split", "SplitV")
def split_rule(op: ProgramOp) -> Rule | None:
    operand, at = (1, 0) if op.name == "Split" else (0, 2)
    x, axis, start = op.operands[operand], known(op.operands[at]), 0
    if axis is None:
        return None
    along, relations = int(axis) % len(x.shape), []
    for result in op.results:
        if result is None:
            return None
        links = [Link((i,), (i,), Along(n, result.shape[i], start if i == along else 0)) for i, n in enumerate(x.shape)]
        relations.append(Relation(x.shape, result.shape, tuple(links)))
        start += result.shape[along]
    return SplitRule(op, relations, lambda part: part, operand)


@rule("GatherV2", "Gather", "ResourceGather")
def gather_rule(op: ProgramOp) -> Rule | None:
    table, index = op.operands[:2]
    axis = known(op.operands[2]) if len(op.operands) > 2 else np.array(0)
    if axis is None or table is index or (op.name != "Gather" and op.details.attribute("batch_dims")):
        return None
    along, result, positions = int(axis) % len(table.shape), op.shapes[0], known(index)
    at = list(range(along, along + len(index.shape)))
    count = table.shape[along]
    rows: AxisMap = Whole((count,), tuple([result[i] for i in at]))
    if positions is not None and positions.size and positions.min() >= 0 and positions.max() < count:
        rows = Lookup.at(count, positions)
    links = [Link((along,), tuple(at), rows)]
    links += [
        Link((i,), (i if i < along else i + len(at) - 1,), Along(n, n)) for i, n in enumerate(table.shape) if i != along
    ]
    places = [Link((i,), (j,), Along(index.shape[i], index.shape[i])) for i, j in enumerate(at)]
    relations = [
        Relation(table.shape, result, tuple(links)),
        Relation(index.shape, result, tuple(places)),
        *[None] * (len(op.operands) - 2),
    ]

    def run(regions: list[Any], needs: Sequence[Box | None], box: Box) -> Tensor:
        need = needs[0]
        assert need is not None
        return tf.gather(regions[0], regions[1] - need[along].start, axis=along)

    return CustomRule(op, relations, run, 0.0)


@rule("SpaceToDepth")
def space_to_depth_rule(op: ProgramOp) -> Rule | None:
    x, result, block = op.operands[0], op.shapes[0], int(op.details.attribute("block_size"))
    if op.details.attribute("data_format") != "NHWC":
        return None
    links = [Link((0,), (0,), Along(x.shape[0], x.shape[0])), Link((3,), (3,), Whole((x.shape[3],), (result[3],)))]
    links += [Link((i,), (i,), Window(x.shape[i], result[i], block, block)) for i in (1, 2)]
    return PartRule(op, [Relation(x.shape, result, tuple(links))], 0.0)


@rule("DepthToSpace")
def depth_to_space_rule(op: ProgramOp) -> Rule | None:
    x, result, block = op.operands[0], op.shapes[0], int(op.details.attribute("block_size"))
    if op.details.attribute("data_format") != "NHWC":
        return None
    links = [Link((0,), (0,), Along(x.shape[0], x.shape[0])), Link((3,), (3,), Whole((x.shape[3],), (result[3],)))]
    links += [Link((i,), (i,), Spread(x.shape[i], result[i], block, block)) for i in (1, 2)]

    def run(regions: list[Any], needs: Any, box: Box) -> Tensor:
        need = needs[0]
        written = [Interval(need[i].start * block, need[i].stop * block) for i in (1, 2)]
        return cut(op.details.run(regions[0])[0], box, (box[0], *written, Interval(0, result[3])))

    return CustomRule(op, [Relation(x.shape, result, tuple(links))], run, 0.0)


@rule("SpaceToBatchND")
def space_to_batch_rule(op: ProgramOp) -> Rule | None:
    """Positions that a dilated window sees together become one image of a batch."""
    x, block, paddings, result = op.operands[0], known(op.operands[1]), known(op.operands[2]), op.shapes[0]
    if block is None or paddings is None or 0 in x.shape:
        return None
    space = len(block)
    links = [Link((0,), (0,), Whole((x.shape[0],), (result[0],)))]
    windows = [
        Window(x.shape[i + 1], result[i + 1], int(block[i]), int(block[i]), int(paddings[i, 0])) for i in range(space)
    ]
    links += [Link((i,), (i,), window) for i, window in enumerate(windows, 1)]
    links += [Link((i,), (i,), Along(x.shape[i], x.shape[i])) for i in range(space + 1, len(x.shape))]

    def run(regions: list[Any], needs: Any, box: Box) -> Tensor:
        if regions[0] is None:
            return tf.zeros(sizes(box), x.dtype)
        pads = [window.padding(interval) for window, interval in zip(windows, box[1:], strict=False)]
        made = tf.space_to_batch(regions[0], block, np.array(pads))
        return cut(made, box, (Interval(0, result[0]), *box[1:]))

    return CustomRule(op, [Relation(x.shape, result, tuple(links)), None, None], run, 0.0)


@rule("BatchToSpaceND")
def batch_to_space_rule(op: ProgramOp) -> Rule | None:
    x, block, crops, result = op.operands[0], known(op.operands[1]), known(op.operands[2]), op.shapes[0]
    if block is None or crops is None or 0 in x.shape or 0 in result:
        return None
    space = len(block)
    links = [Link((0,), (0,), Whole((x.shape[0],), (result[0],)))]
    links += [
        Link((i + 1,), (i + 1,), Spread(x.shape[i + 1], result[i + 1], int(block[i]), int(block[i]), int(crops[i, 0])))
        for i in range(space)
    ]
    links += [Link((i,), (i,), Along(x.shape[i], x.shape[i])) for i in range(space + 1, len(x.shape))]

    def run(regions: list[Any], needs: Any, box: Box) -> Tensor:
        need = needs[0]
        made = tf.batch_to_space(regions[0], block, np.zeros((space, 2), int))
        written = [
            Interval(need[i + 1].start * int(block[i]), need[i + 1].stop * int(block[i])).shift(-int(crops[i, 0]))
            for i in range(space)
        ]
        return cut(made, box, (Interval(0, result[0]), *written, *box[space + 1 :]))

    return CustomRule(op, [Relation(x.shape, result, tuple(links)), None, None], run, 0.0)
