"""Maps of axes: which part of an operand's axis a part of the result's axis depends on, and the other way round.

Every map has two directions. `need` goes from intervals of the result to those of the operand, and misses nothing that
the result depends on. `reach` goes from intervals of the operand to those of the result that may depend on them. Both
return the smallest intervals they can; `Along`, `Window`, `Spread`, `Lookup` and `Group` are exact.

A map takes as many intervals as it has axes on that side. Most have one on each; `Regroup` has several (a reshape), and
`Whole` has none on the side of the result where an axis is summed over.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, Protocol

import numpy as np

from elementgrad._cone.boxes import Box, Interval, Shape, is_empty, meet, volume, whole

Intervals = Sequence[Interval]


class AxisMap(Protocol):
    """A relation between some axes of a result and some axes of an operand."""

    def need(self, result: Intervals) -> Box:
        """Return the part of the operand that a part of the result depends on."""

    def reach(self, operand: Intervals) -> Box:
        """Return the part of the result that may depend on a part of the operand."""

    def computed(self, result: Intervals) -> Box:
        """Return the part of the result that comes out of the operation on what a part of the result needs."""
        return tuple(result)


@dataclass(frozen=True)
class Along(AxisMap):
    """The same position, moved by an offset: elementwise operations, slices, parts of a concatenation, padding.

    Position `p` of the result is position `p + offset` of the operand, where the operand has that position.
    """

    operand: int
    result: int
    offset: int = 0

    def need(self, result: Intervals) -> Box:
        return (result[0].shift(self.offset).clip(self.operand),)

    def reach(self, operand: Intervals) -> Box:
        return (operand[0].shift(-self.offset).clip(self.result),)


@dataclass(frozen=True)
class Whole(AxisMap):
    """Everything depends on everything: summed, normalized and sorted axes, and operations without a rule."""

    operand: Shape
    result: Shape

    @cached_property
    def _all(self) -> Box:
        return whole(self.operand)

    def need(self, result: Intervals) -> Box:
        return self._all

    def reach(self, operand: Intervals) -> Box:
        return whole(self.result)

    def computed(self, result: Intervals) -> Box:
        return whole(self.result)


@dataclass(frozen=True)
class Fixed(AxisMap):
    """One position of the operand, for all of the result: a selected row, or an axis of size 1 that is broadcast."""

    position: int
    result: Shape = ()

    def need(self, result: Intervals) -> Box:
        return (Interval(self.position, self.position + 1),)

    def reach(self, operand: Intervals) -> Box:
        inside = operand[0].start <= self.position < operand[0].stop
        return whole(self.result) if inside else tuple([Interval(0, 0)] * len(self.result))


@dataclass(frozen=True)
class Window(AxisMap):
    """Position `p` of the result sees `p * stride - low + dilation * k` of the operand, for `k` in `range(width)`.

    Convolutions, pools, and slices with a step. Positions outside of the operand are padding; `padding` says how much
    of it a part of the result sees on both sides.
    """

    operand: int
    result: int
    width: int
    stride: int = 1
    low: int = 0
    dilation: int = 1

    @property
    def span(self) -> int:
        return self.dilation * (self.width - 1)

    def _seen(self, part: Interval) -> Interval:
        start = part.start * self.stride - self.low
        return Interval(start, (part.stop - 1) * self.stride - self.low + self.span + 1)

    def need(self, result: Intervals) -> Box:
        return (self._seen(result[0]).clip(self.operand) if result[0].size else Interval(0, 0),)

    def padding(self, result: Interval) -> tuple[int, int]:
        """Return how far the windows of a part of the result stand out of the operand, before and behind it."""
        seen = self._seen(result)
        inside = seen.clip(self.operand)
        return inside.start - seen.start, seen.stop - inside.stop

    def reach(self, operand: Intervals) -> Box:
        return (_covering(operand[0], self.span, self.low, self.stride).clip(self.result),)


@dataclass(frozen=True)
class Spread(AxisMap):
    """A window read the other way, as in a transposed convolution: each position of the operand writes a window.

    Position `p` of the operand writes `p * stride - low + dilation * k` of the result, for `k` in `range(width)`.
    """

    operand: int
    result: int
    width: int
    stride: int = 1
    low: int = 0
    dilation: int = 1

    @cached_property
    def _window(self) -> Window:
        return Window(self.result, self.operand, self.width, self.stride, self.low, self.dilation)

    def need(self, result: Intervals) -> Box:
        return self._window.reach(result)

    def reach(self, operand: Intervals) -> Box:
        return self._window.need(operand)

    def overhang(self, result: Interval, operand: Interval) -> tuple[int, int]:
        """Return how far what a part of the operand writes stands out of a part of the result, on both sides."""
        written = self._window._seen(operand)
        return result.start - written.start, written.stop - result.stop


def _covering(part: Interval, span: int, low: int, stride: int) -> Interval:
    """Return the positions whose windows touch a part."""
    if not part.size:
        return Interval(0, 0)
    return Interval(-(-(part.start + low - span) // stride), (part.stop - 1 + low) // stride + 1)


@dataclass(frozen=True)
class Group(AxisMap):
    """Channels in groups: a group of the result depends on all of the same group of the operand."""

    operand: int
    result: int
    groups: int

    def need(self, result: Intervals) -> Box:
        return (self._across(result[0], self.result, self.operand),)

    def reach(self, operand: Intervals) -> Box:
        return (self._across(operand[0], self.operand, self.result),)

    def computed(self, result: Intervals) -> Box:
        return (self._across(result[0], self.result, self.result),)

    def within(self, part: Interval) -> Interval:
        """Return the groups that a part of the result is of."""
        size = self.result // self.groups
        return Interval(part.start // size, -(-part.stop // size))

    def _across(self, part: Interval, size: int, other: int) -> Interval:
        if not part.size:
            return Interval(0, 0)
        each, there = size // self.groups, other // self.groups
        return Interval(part.start // each * there, -(-part.stop // each) * there)


@dataclass(frozen=True)
class Prefix(AxisMap):
    """Everything up to a position, itself included: cumulative sums, causal attention; `reverse` from the end."""

    size: int
    reverse: bool = False

    def need(self, result: Intervals) -> Box:
        part = result[0]
        return (Interval(part.start, self.size) if self.reverse else Interval(0, part.stop),)

    def reach(self, operand: Intervals) -> Box:
        part = operand[0]
        return (Interval(0, part.stop) if self.reverse else Interval(part.start, self.size),)

    def computed(self, result: Intervals) -> Box:
        return self.need(result)


@dataclass(frozen=True, eq=False)
class Lookup(AxisMap):
    """Positions that are known beforehand: result `p` depends on the operand's `first[p]` to `last[p]`.

    Reflected, replicated and rolled axes, repeats, resized images, and rows that known indices pick. `first` and `last`
    may have several axes, those of the indices.
    """

    operand: int
    first: np.ndarray
    last: np.ndarray

    @classmethod
    def at(cls, operand: int, positions: Any) -> "Lookup":
        """Return a map by one position for each element of the result."""
        positions = np.asarray(positions)
        return cls(operand, positions, positions)

    def need(self, result: Intervals) -> Box:
        index = tuple([slice(*part) for part in result])
        first, last = self.first[index], self.last[index]
        return (Interval(int(first.min()), int(last.max()) + 1) if first.size else Interval(0, 0),)

    def reach(self, operand: Intervals) -> Box:
        if not self.first.ndim:
            return ()
        touched = np.nonzero((self.last >= operand[0].start) & (self.first < operand[0].stop))
        if not len(touched[0]) or not operand[0].size:
            return tuple([Interval(0, 0)] * self.first.ndim)
        return tuple([Interval(int(axis.min()), int(axis.max()) + 1) for axis in touched])


@dataclass(frozen=True)
class Regroup(AxisMap):
    """Axes that a reshape merges and cuts, in the order of memory."""

    operand: Shape
    result: Shape

    def need(self, result: Intervals) -> Box:
        return box_around(*flat_range(self.cover(result), self.result), self.operand)

    def reach(self, operand: Intervals) -> Box:
        return box_around(*flat_range(operand, self.operand), self.result)

    def cover(self, result: Intervals) -> Box:
        """Return the smallest box around a part of the result that is one piece of memory."""
        return box_around(*flat_range(result, self.result), self.result)


def flat_range(box: Intervals, shape: Shape) -> tuple[int, int]:
    """Return the first and behind the last position of a box in a flattened tensor."""
    if is_empty(tuple(box)):
        return 0, 0
    first = last = 0
    for interval, size in zip(box, shape, strict=True):
        first, last = first * size + interval.start, last * size + interval.stop - 1
    return first, last + 1


def box_around(start: int, stop: int, shape: Shape) -> Box:
    """Return the smallest box that holds an interval of a flattened tensor.

    >>> from elementgrad._cone.maps import box_around
    >>> box_around(7, 9, (3, 5)), box_around(7, 12, (3, 5))
    ((Interval(start=1, stop=2), Interval(start=2, stop=4)), (Interval(start=1, stop=3), Interval(start=0, stop=5)))
    """
    if start >= stop:
        return tuple([Interval(0, 0)] * len(shape))
    box: list[Interval] = []
    inner = prod(shape)
    for axis, size in enumerate(shape):
        inner //= size
        first, last = start // inner, (stop - 1) // inner
        box.append(Interval(first, last + 1))
        if first != last:
            return (*box, *whole(shape[axis + 1 :]))
        start, stop = start - first * inner, stop - first * inner
    return tuple(box)


@dataclass(frozen=True)
class Link:
    """A map between axes of an operand and axes of a result."""

    operand: tuple[int, ...]
    result: tuple[int, ...]
    map: AxisMap


@dataclass(frozen=True)
class Relation:
    """The dependence of a result on one operand: links that cover each axis of the operand once."""

    operand: Shape
    result: Shape
    links: tuple[Link, ...]

    # Most axes of most operands are those of the result, and are copied: plans are made anew for every read.

    @cached_property
    def _kept(self) -> tuple[int | None, ...]:
        """The same axis of the result for each axis of the operand, where there is one."""
        kept = {link.operand[0]: link.result[0] for link in self.links if keeps_positions(link.map)}
        return tuple([kept.get(axis) for axis in range(len(self.operand))])

    @cached_property
    def _changed(self) -> list[Link]:
        return [link for link in self.links if not keeps_positions(link.map)]

    @cached_property
    def keeps_boxes(self) -> bool:
        """True if every part of the result needs the same part of the operand, as elementwise operations do."""
        return self.operand == self.result and self._kept == tuple(range(len(self.result)))

    @cached_property
    def _widened(self) -> list[Link]:
        return [link for link in self.links if type(link.map).computed is not AxisMap.computed]

    def need(self, result: Box) -> Box:
        """Return the part of the operand that a part of the result depends on."""
        if self.keeps_boxes:
            return result
        box: list[Any] = [None if axis is None else result[axis] for axis in self._kept]
        for link in self._changed:
            intervals = link.map.need([result[axis] for axis in link.result])
            for axis, interval in zip(link.operand, intervals, strict=True):
                box[axis] = interval
        return tuple(box)

    def computed(self, result: Box) -> Box:
        """Return the part of the result that comes out of the operation on what a part of the result needs."""
        if not self._widened:
            return result
        box = list(result)
        for link in self._widened:
            intervals = link.map.computed([result[axis] for axis in link.result])
            for axis, interval in zip(link.result, intervals, strict=True):
                box[axis] = box[axis].join(interval)
        return tuple(box)

    def reach(self, operand: Box) -> Box:
        """Return the part of the result that may depend on a part of the operand."""
        box = whole(self.result)
        if is_empty(operand):
            return tuple([Interval(0, 0)] * len(box))
        for link in self.links:
            intervals = link.map.reach([operand[axis] for axis in link.operand])
            place = dict(zip(link.result, intervals, strict=True))
            box = meet(box, tuple([place.get(axis, interval) for axis, interval in enumerate(box)]))
            if not link.result and not _touches(link, operand):
                return tuple([Interval(0, 0)] * len(box))
        return box


def keeps_positions(axis_map: AxisMap) -> bool:
    """Return True for a map that leaves every interval as it is."""
    return type(axis_map) is Along and axis_map.offset == 0 and axis_map.operand == axis_map.result


def _touches(link: Link, operand: Box) -> bool:
    """Return True if a link without an axis of the result looks at a part of the operand at all."""
    needed = link.map.need([])
    return not is_empty(meet(needed, tuple([operand[axis] for axis in link.operand])))


def relate_all(operand: Shape, result: Shape) -> Relation:
    """Return the relation of an operation that has no rule: everything depends on everything."""
    link = Link(tuple(range(len(operand))), tuple(range(len(result))), Whole(operand, result))
    return Relation(operand, result, (link,))


def broadcast_axes(operand: Shape, result: Shape) -> Relation:
    """Return the relation of an elementwise operation, in which the operand broadcasts to the result."""
    lead = len(result) - len(operand)
    links = []
    for axis, size in enumerate(operand):
        other = result[lead + axis]
        axis_map: AxisMap = Fixed(0, (other,)) if size == 1 != other else Along(size, other)
        links.append(Link((axis,), (lead + axis,), axis_map))
    return Relation(operand, result, tuple(links))


def reduce_axes(operand: Shape, result: Shape, axes: Sequence[int], keepdim: bool) -> Relation:
    """Return the relation of a reduction over some axes."""
    links, at = [], 0
    for axis, size in enumerate(operand):
        if axis in axes:
            links.append(Link((axis,), (at,) if keepdim else (), Whole((size,), (1,) if keepdim else ())))
            at += keepdim
        else:
            links.append(Link((axis,), (at,), Along(size, size)))
            at += 1
    return Relation(operand, result, tuple(links))


def mix_axes(shape: Shape, axes: Sequence[int]) -> Relation:
    """Return the relation of an operation that keeps the shape and mixes all of some axes, such as softmax."""
    links = []
    for axis, size in enumerate(shape):
        axis_map: AxisMap = Whole((size,), (size,)) if axis in axes else Along(size, size)
        links.append(Link((axis,), (axis,), axis_map))
    return Relation(shape, shape, tuple(links))


def move_axes(operand: Shape, result: Shape, axes: Sequence[int | None]) -> Relation:
    """Return the relation of an operation that moves axes: `axes` has the axis of the result for each of the operand.

    None stands for an axis of size 1 that is dropped.
    """
    links = []
    for axis, (size, at) in enumerate(zip(operand, axes, strict=True)):
        links.append(Link((axis,), () if at is None else (at,), Fixed(0) if at is None else Along(size, size)))
    return Relation(operand, result, tuple(links))


def regroup_axes(operand: Shape, result: Shape) -> Relation:
    """Return the relation of a reshape, with axes in groups of equal size on both sides.

    >>> from elementgrad._cone.maps import regroup_axes
    >>> [(link.operand, link.result) for link in regroup_axes((2, 6, 5), (2, 3, 2, 5)).links]
    [((0,), (0,)), ((1,), (1, 2)), ((2,), (3,))]
    """
    if not prod(operand):
        return relate_all(operand, result)
    links: list[Link] = []
    for left, right in axis_groups(operand, result):
        before, after = tuple([operand[axis] for axis in left]), tuple([result[axis] for axis in right])
        same = len(left) == len(right) == 1
        axis_map: AxisMap = Along(before[0], after[0]) if same else Regroup(before, after)
        links.append(Link(tuple(left), tuple(right), axis_map))
    return Relation(operand, result, tuple(links))


def axis_groups(before: Shape, after: Shape) -> list[tuple[list[int], list[int]]]:
    """Return the axes of two shapes of one size that belong together."""
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(before) or j < len(after):
        left, right, p, q = [], [], 1, 1
        if i < len(before):
            left, p, i = [i], before[i], i + 1
        if j < len(after):
            right, q, j = [j], after[j], j + 1
        while p != q:
            if (p < q and i < len(before)) or j >= len(after):
                left.append(i)
                p, i = p * before[i], i + 1
            else:
                right.append(j)
                q, j = q * after[j], j + 1
        groups.append((left, right))
    return groups


def run_reshape(x: Any, relation: Relation, result: Box) -> Any:
    """Return a part of a reshaped tensor, of the part of the tensor that it needs.

    Inside of a group of axes the needed elements are flattened, cut to the range that the result covers, and cut again
    to the box: a box of the result is not always a box of the operand.
    """
    needed = relation.need(result)
    flat, cuts, outer, last = [], [], [], []
    for link in relation.links:
        before = [needed[axis] for axis in link.operand]
        after = [result[axis] for axis in link.result]
        operand = tuple([relation.operand[axis] for axis in link.operand])
        there = tuple([relation.result[axis] for axis in link.result])
        if isinstance(link.map, Along):
            flat.append(after[0].size)
            cuts.append(slice(None))
            outer.append(after[0].size)
            last.append(slice(None))
            continue
        around = Regroup(operand, there).cover(after)
        start, stop = flat_range(around, there)
        first, _ = flat_range(before, operand)
        flat.append(volume(tuple(before)))
        cuts.append(slice(start - first, stop - first))
        outer.extend([interval.size for interval in around])
        last.extend([slice(one.start - o.start, one.stop - o.start) for one, o in zip(after, around, strict=True)])
    return x.reshape(flat)[tuple(cuts)].reshape(outer)[tuple(last)]
