"""Rules of operations that move, pick and write elements."""

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from elementgrad._backends.torch.cone.rules import (
    Arguments,
    known_value,
    result_shape,
    rule,
)
from elementgrad._cone.boxes import Box, sizes
from elementgrad._cone.maps import (
    Along,
    AxisMap,
    Fixed,
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
from elementgrad._cone.plan import ProgramOp, ProgramValue, Rule
from elementgrad._cone.rules import CustomRule, PartRule, SplitRule

Tensor = torch.Tensor

# Moves of elements


@rule("view", "reshape", "_unsafe_view", "_reshape_alias", "squeeze", "unsqueeze", "view_copy", "flatten")
def reshape_rule(op: ProgramOp, arguments: Arguments) -> Rule | None:
    relation = regroup_axes(op.operands[0].shape, result_shape(op))
    if not prod(op.operands[0].shape):
        return None
    return CustomRule(op, [relation], lambda regions, needs, box: run_reshape(regions[0], relation, box), 0.0)


@rule("permute", "transpose", "t", "numpy_T", "movedim")
def permutation_rule(op: ProgramOp, arguments: Arguments) -> Rule | None:
    x = op.operands[0]
    rank = len(x.shape)
    name = op.name.rstrip("_").removesuffix("_copy")
    if name == "permute":
        order = [axis % rank for axis in arguments["dims"]]
    elif name == "transpose" and rank:
        order = list(range(rank))
        one, other = arguments["dim0"] % rank, arguments["dim1"] % rank
        order[one], order[other] = order[other], order[one]
    elif name == "t":
        order = list(range(rank))[::-1]
    else:
        return None
    return PartRule(op, [move_axes(x.shape, result_shape(op), [order.index(axis) for axis in range(rank)])], 0.0)


@rule("expand")
def expand_rule(op: ProgramOp, arguments: Arguments) -> Rule | None:
    relation = broadcast_axes(op.operands[0].shape, result_shape(op))
    return CustomRule(op, [relation], lambda regions, needs, box: regions[0].expand(sizes(box)), 0.0)


@rule("slice")
def slice_rule(op: ProgramOp, a: Arguments) -> Rule | None:
    x, result, axis, step = a["self"], result_shape(op), a["dim"] % len(a["self"].shape), a["step"]
    start = 0 if a["start"] is None else a["start"]
    start = min(max(start + x.shape[axis] if start < 0 else start, 0), x.shape[axis])
    links = [Link((i,), (i,), Along(n, n)) for i, n in enumerate(x.shape) if i != axis]
    links.append(Link((axis,), (axis,), Window(x.shape[axis], result[axis], 1, step, -start)))
    index = (slice(None),) * axis + (slice(None, None, step),)
    return CustomRule(op, [Relation(x.shape, result, tuple(links))], lambda r, needs, box: r[0][index], 0.0)


def _select_relation(shape: tuple[int, ...], result: tuple[int, ...], axis: int, position: int) -> Relation:
    links = [Link((axis,), (), Fixed(position))]
    links += [Link((i,), (i - (i > axis),), Along(n, n)) for i, n in enumerate(shape) if i != axis]
    return Relation(shape, result, tuple(links))


@rule("select")
def select_rule(op: ProgramOp, a: Arguments) -> Rule | None:
    x = a["self"]
    axis = a["dim"] % len(x.shape)
    relation = _select_relation(x.shape, result_shape(op), axis, a["index"] % x.shape[axis])
    return CustomRule(op, [relation], lambda regions, needs, box: regions[0].select(axis, 0), 0.0)


@rule("unbind")
def unbind_rule(op: ProgramOp, a: Arguments) -> Rule | None:
    x = a["self"]
    axis = a["dim"] % len(x.shape)
    relations = [_select_relation(x.shape, shape, axis, position) for position, shape in enumerate(op.shapes)]
    return SplitRule(op, relations, lambda part: part.select(axis, 0))


@rule("split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes", "chunk", "unsafe_chunk")
def split_rule(op: ProgramOp, a: Arguments) -> Rule | None:
    x = a["self"]
    axis, start, relations = a["dim"] % len(x.shape), 0, []
    for shape in op.shapes:
        links = [Link((i,), (i,), Along(n, shape[i], start if i == axis else 0)) for i, n in enumerate(x.shape)]
        relations.append(Relation(x.shape, shape, tuple(links)))
        start += shape[axis]
    return SplitRule(op, relations, lambda part: part)


@rule("cat")
def cat_rule(op: ProgramOp, a: Arguments) -> Rule | None:
    result = result_shape(op)
    axis = a["dim"] % max(1, len(result))
    relations: list[Relation | None] = []
    start = 0
    for value in op.operands:
        if len(value.shape) != len(result):  # an empty vector, which PyTorch passes over
            relations.append(None)
            continue
        links = [Link((i,), (i,), Along(n, result[i], -start if i == axis else 0)) for i, n in enumerate(value.shape)]
        relations.append(Relation(value.shape, result, tuple(links)))
        start += value.shape[axis]

    def run(regions: list[Any], needs: Any, box: Box) -> Tensor:
        return torch.cat([region for region in regions if region is not None], axis)

    return CustomRule(op, relations, run, 0.0)


@rule("constant_pad_nd")
def constant_pad_rule(op: ProgramOp, a: Arguments) -> Rule | None:
    x, result, pad = a["self"], result_shape(op), list(a["pad"])
    before = [0] * len(x.shape)
    for i in range(len(pad) // 2):
        before[len(x.shape) - 1 - i] = pad[2 * i]
    links = [Link((i,), (i,), Along(n, result[i], -before[i])) for i, n in enumerate(x.shape)]
    relation = Relation(x.shape, result, tuple(links))
    value = op.details.arguments["value"]

    def run(regions: list[Any], needs: Sequence[Box | None], box: Box) -> Tensor:
        if regions[0] is None:
            dtype = x.dtype
            return torch.full(sizes(box), value, dtype=dtype)
        need = needs[0]
        assert need is not None
        amounts = []
        for i in reversed(range(len(box))):
            seen = box[i].shift(-before[i])
            amounts += [need[i].start - seen.start, seen.stop - need[i].stop]
        return functional.pad(regions[0], amounts, value=value)

    return CustomRule(op, [relation], run, 0.0)


def _pick_rule(op: ProgramOp, positions: dict[int, Any], expand: bool = False) -> Rule:
    """Return the rule of an operation that picks known positions along some axes of the result."""
    x, result = op.operands[0], result_shape(op)
    lead = len(result) - len(x.shape)
    picks = {axis: np.asarray(each) for axis, each in positions.items()}
    links = []
    for i, n in enumerate(x.shape):
        at = lead + i
        axis_map: AxisMap = Lookup.at(n, picks[i]) if i in picks else Along(n, n)
        links.append(Link((i,), (at,), axis_map))

    def run(regions: list[Any], needs: Sequence[Box | None], box: Box) -> Tensor:
        part, need = regions[0], needs[0]
        assert need is not None
        for i, each in picks.items():
            here = torch.from_numpy(each[slice(*box[lead + i])] - need[i].start).to(part.device)
            part = part.index_select(i, here)
        return part.expand(sizes(box)) if expand else part

    return CustomRule(op, [Relation(x.shape, result, tuple(links))], run, 0.0)


@rule("roll")
def roll_rule(op: ProgramOp, a: Arguments) -> Rule | None:
    x, shifts, dims = a["self"], a["shifts"], a["dims"]
    if not dims or not x.shape:
        return None
    positions: dict[int, Any] = {}
    for shift, dim in zip(shifts, dims, strict=True):
        n = x.shape[dim % len(x.shape)]
        old = positions.get(dim % len(x.shape), np.arange(n))
        positions[dim % len(x.shape)] = np.roll(old, shift)
    return _pick_rule(op, positions)


@rule("flip")
def flip_rule(op: ProgramOp, a: Arguments) -> Rule | None:
    x = a["self"]
    return _pick_rule(op, {dim % len(x.shape): np.arange(x.shape[dim])[::-1].copy() for dim in a["dims"]})


@rule("repeat")
def repeat_rule(op: ProgramOp, a: Arguments) -> Rule | None:
    x, result = a["self"], result_shape(op)
    lead = len(result) - len(x.shape)
    if 0 in result:
        return None
    return _pick_rule(op, {i: np.arange(result[lead + i]) % n for i, n in enumerate(x.shape)}, expand=True)


@rule("reflection_pad1d", "reflection_pad2d", "reflection_pad3d")
def reflection_rule(op: ProgramOp, a: Arguments) -> Rule | None:
    return _pad_rule(op, a, "reflect")


@rule("replication_pad1d", "replication_pad2d", "replication_pad3d")
def replication_rule(op: ProgramOp, a: Arguments) -> Rule | None:
    return _pad_rule(op, a, "edge")


def _pad_rule(op: ProgramOp, a: Arguments, mode: Any) -> Rule | None:
    x, pad = a["self"], list(a["padding"])
    positions = {}
    for i in range(len(pad) // 2):
        axis = len(x.shape) - 1 - i
        before, behind = pad[2 * i], pad[2 * i + 1]
        if min(before, behind) < 0:
            return None
        positions[axis] = np.pad(np.arange(x.shape[axis]), (before, behind), mode=mode)
    return _pick_rule(op, positions)


@rule("tril", "triu")
def triangle_rule(op: ProgramOp, a: Arguments) -> Rule | None:
    x, keep = a["self"], torch.tril if op.name.startswith("tril") else torch.triu

    def run(regions: list[Any], needs: Any, box: Box) -> Tensor:
        return keep(regions[0], a["diagonal"] + box[-2].start - box[-1].start)

    return CustomRule(op, [broadcast_axes(x.shape, x.shape)], run)


@rule("diagonal")
def diagonal_rule(op: ProgramOp, a: Arguments) -> Rule | None:
    x, result, rank = a["self"], result_shape(op), len(a["self"].shape)
    one, other = a["dim1"] % rank, a["dim2"] % rank
    starts = {one: max(0, -a["offset"]), other: max(0, a["offset"])}
    others = [axis for axis in range(rank) if axis not in starts]
    links = [Link((axis,), (at,), Along(x.shape[axis], x.shape[axis])) for at, axis in enumerate(others)]
    links += [Link((axis,), (rank - 2,), Along(x.shape[axis], result[-1], start)) for axis, start in starts.items()]
    return CustomRule(
        op, [Relation(x.shape, result, tuple(links))], lambda r, needs, box: r[0].diagonal(0, one, other), 0.0
    )


@rule("unfold")
def unfold_rule(op: ProgramOp, a: Arguments) -> Rule | None:
    x, result = a["self"], result_shape(op)
    if not x.shape:
        return None
    axis, width, step = a["dimension"] % len(x.shape), a["size"], a["step"]
    links = [Link((i,), (i,), Along(n, n)) for i, n in enumerate(x.shape) if i != axis]
    links.append(Link((axis,), (axis,), Window(x.shape[axis], result[axis], width, step)))

    def run(regions: list[Any], needs: Any, box: Box) -> Tensor:
        return regions[0].unfold(axis, width, step)[..., slice(*box[-1])]

    return CustomRule(op, [Relation(x.shape, result, tuple(links))], run, 0.0)


# Lookups by indices


@rule("embedding")
def embedding_rule(op: ProgramOp, a: Arguments) -> Rule | None:
    weight, indices = a["weight"], a["indices"]
    return _lookup(op, weight, 0, indices, list(range(len(indices.shape))), a["padding_idx"])


@rule("index_select")
def index_select_rule(op: ProgramOp, a: Arguments) -> Rule | None:
    x, index = a["self"], a["index"]
    if not x.shape or len(index.shape) != 1:
        return None
    axis = a["dim"] % len(x.shape)
    return _lookup(op, x, axis, index, [axis], -1)


@rule("index")
def index_rule(op: ProgramOp, a: Arguments) -> Rule | None:
    """One index array along one axis; several are whole."""
    given = [(axis, index) for axis, index in enumerate(a["indices"]) if index is not None]
    if len(given) != 1 or known_value(given[0][1]) is None:
        return None
    axis, index = given[0]
    known = known_value(index)
    if known is None or known.dtype in (torch.bool, torch.uint8):
        return None
    return _lookup(op, a["self"], axis, index, list(range(axis, axis + len(index.shape))), -1)


def _lookup(
    op: ProgramOp, table: ProgramValue, axis: int, index: ProgramValue, at: list[int], padding: int
) -> Rule | None:
    """Return the rule of rows that are picked along one axis, by indices whose axes are `at` in the result."""
    if table is index or len(op.operands) != 2:
        return None
    result, count = result_shape(op), table.shape[axis]
    known = known_value(index)
    rows: AxisMap = Whole((count,), tuple([result[i] for i in at]))
    if known is not None and 0 not in index.shape:
        positions = known.cpu().numpy()
        rows = Lookup.at(count, np.where(positions < 0, positions + count, positions))
    links = [Link((axis,), tuple(at), rows)]
    for i, n in enumerate(table.shape):
        if i != axis:
            links.append(Link((i,), (i if i < axis else i + len(at) - 1,), Along(n, n)))
    places = tuple([Link((i,), (j,), Along(index.shape[i], index.shape[i])) for i, j in enumerate(at)])
    relations = {
        id(table): Relation(table.shape, result, tuple(links)),
        id(index): Relation(index.shape, result, places),
    }
    first = op.operands[0] is table

    def run(regions: list[Any], needs: Sequence[Box | None], box: Box) -> Tensor:
        part, here = regions if first else regions[::-1]
        need = needs[0 if first else 1]
        assert need is not None
        here = torch.where(here < 0, here + count, here) - need[axis].start
        skipped = padding - need[axis].start
        if padding >= 0 and 0 <= skipped < part.shape[axis]:
            return functional.embedding(here, part, padding_idx=skipped)
        picked = part.index_select(axis, here.reshape(-1))
        return picked.reshape(sizes(box))

    return CustomRule(op, [relations[id(value)] for value in op.operands], run, 0.0)


@rule("gather")
def gather_rule(op: ProgramOp, a: Arguments) -> Rule | None:
    x, index = a["self"], a["index"]
    if x is index or not x.shape:
        return None
    axis, result = a["dim"] % len(x.shape), result_shape(op)
    known = known_value(index)
    positions = None if known is None or not prod(index.shape) else known.cpu().numpy()
    everything = tuple(range(len(result)))
    along = (
        Link((axis,), (axis,), Whole((x.shape[axis],), (result[axis],)))
        if positions is None
        else Link((axis,), everything, Lookup.at(x.shape[axis], positions))
    )
    links = [Link((i,), (i,), Along(n, result[i])) for i, n in enumerate(x.shape) if i != axis]
    relation = Relation(x.shape, result, (*links, along))

    def run(regions: list[Any], needs: Sequence[Box | None], box: Box) -> Tensor:
        need = needs[0]
        assert need is not None
        return torch.gather(regions[0], axis, regions[1] - need[axis].start)

    return CustomRule(op, [relation, broadcast_axes(index.shape, result)], run, 0.0)


# Writes, as functionalization makes them


@rule("slice_scatter")
def slice_scatter_rule(op: ProgramOp, a: Arguments) -> Rule | None:
    x, source, step = a["self"], a["src"], a["step"]
    if x is source:
        return None
    axis, result = a["dim"] % len(x.shape), result_shape(op)
    n = x.shape[axis]
    start = 0 if a["start"] is None else a["start"]
    start = min(max(start + n if start < 0 else start, 0), n)
    links = [Link((i,), (i,), Along(m, m)) for i, m in enumerate(x.shape) if i != axis]
    links.append(Link((axis,), (axis,), Spread(source.shape[axis], n, 1, step, -start)))
    relations = [broadcast_axes(x.shape, result), Relation(source.shape, result, tuple(links))]

    def run(regions: list[Any], needs: Sequence[Box | None], box: Box) -> Tensor:
        base, written, need = regions[0], regions[1], needs[1]
        if written is None or need is None:
            return base
        first = start + need[axis].start * step - box[axis].start
        last = first + (need[axis].size - 1) * step + 1
        return torch.slice_scatter(base, written, axis, first, last, step)

    return CustomRule(op, relations, run)


@rule("select_scatter")
def select_scatter_rule(op: ProgramOp, a: Arguments) -> Rule | None:
    x, source = a["self"], a["src"]
    if x is source:
        return None
    axis, result = a["dim"] % len(x.shape), result_shape(op)
    position = a["index"] % x.shape[axis]
    links = [Link((i - (i > axis),), (i,), Along(n, n)) for i, n in enumerate(x.shape) if i != axis]
    relations = [broadcast_axes(x.shape, result), Relation(source.shape, result, tuple(links))]

    def run(regions: list[Any], needs: Any, box: Box) -> Tensor:
        inside = box[axis].start <= position < box[axis].stop
        return torch.select_scatter(regions[0], regions[1], axis, position - box[axis].start) if inside else regions[0]

    return CustomRule(op, relations, run)
