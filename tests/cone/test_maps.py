"""Maps of axes against the dependence that they stand for, written out as a matrix."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elementgrad._cone.boxes import Box, Interval, around, is_empty, whole
from elementgrad._cone.maps import (
    Along,
    AxisMap,
    Fixed,
    Group,
    Lookup,
    Prefix,
    Spread,
    Whole,
    Window,
    broadcast_axes,
    move_axes,
    reduce_axes,
    regroup_axes,
    run_reshape,
)
from elementgrad._cone.plan import ProgramOp, ProgramValue
from elementgrad._cone.rules import OpaqueRule


def dependence(result: int, operand: int, depends: Callable[[int, int], bool]) -> np.ndarray:
    return np.array([[depends(p, q) for q in range(operand)] for p in range(result)], bool).reshape(result, operand)


def windows(width: int, stride: int, low: int, dilation: int) -> Callable[[int, int], bool]:
    return lambda p, q: q in [p * stride - low + dilation * k for k in range(width)]


SINGLE: dict[str, tuple[AxisMap, int, int, Callable[[int, int], bool]]] = {
    "along": (Along(6, 6), 6, 6, lambda p, q: p == q),
    "slice": (Along(9, 4, 3), 9, 4, lambda p, q: q == p + 3),
    "padding": (Along(4, 9, -2), 4, 9, lambda p, q: q == p - 2),
    "whole": (Whole((4,), (3,)), 4, 3, lambda p, q: True),
    "broadcast": (Fixed(0, (5,)), 1, 5, lambda p, q: True),
    "selected": (Fixed(2, (5,)), 4, 5, lambda p, q: q == 2),
    "conv": (Window(9, 9, 3, 1, 1), 9, 9, windows(3, 1, 1, 1)),
    "strided conv": (Window(11, 5, 3, 2, 0), 11, 5, windows(3, 2, 0, 1)),
    "dilated conv": (Window(12, 7, 3, 2, 3, 2), 12, 7, windows(3, 2, 3, 2)),
    "step": (Window(10, 3, 1, 3, -1), 10, 3, windows(1, 3, -1, 1)),
    "transposed conv": (Spread(5, 10, 4, 2, 1), 5, 10, lambda p, q: windows(4, 2, 1, 1)(q, p)),
    "transposed with gaps": (Spread(4, 13, 2, 4, 0), 4, 13, lambda p, q: windows(2, 4, 0, 1)(q, p)),
    "groups": (Group(6, 4, 2), 6, 4, lambda p, q: p // 2 == q // 3),
    "prefix": (Prefix(5), 5, 5, lambda p, q: q <= p),
    "suffix": (Prefix(5, reverse=True), 5, 5, lambda p, q: q >= p),
    "lookup": (Lookup.at(5, [4, 0, 0, 3]), 5, 4, lambda p, q: q == [4, 0, 0, 3][p]),
    "ranges": (
        Lookup(6, np.array([0, 1, 3]), np.array([1, 4, 5])),
        6,
        3,
        lambda p, q: (0, 1, 3)[p] <= q <= (1, 4, 5)[p],
    ),
}
EXACT = set(SINGLE) - {"step", "dilated conv", "transposed with gaps", "lookup"}
"""Maps whose parts have no holes, so that the smallest interval has no position too many."""


def intervals(size: int) -> list[Interval]:
    return [Interval(start, stop) for start in range(size) for stop in range(start + 1, size + 1)]


@pytest.mark.parametrize("name", SINGLE)
def test_need_and_reach_are_the_smallest_intervals_around_what_depends(name):
    axis_map, operand, result, depends = SINGLE[name]
    matrix = dependence(result, operand, depends)
    for part in intervals(result):
        used = matrix[part.start : part.stop].any(0).nonzero()[0]
        (need,) = axis_map.need([part])
        assert set(used) <= set(range(*need)), (part, need)
        if name in EXACT and len(used):
            assert (need.start, need.stop) == (used.min(), used.max() + 1)
    for part in intervals(operand):
        touched = matrix[:, part.start : part.stop].any(1).nonzero()[0]
        (reach,) = axis_map.reach([part])
        assert set(touched) <= set(range(*reach)), (part, reach)
        if name in EXACT and len(touched):
            assert (reach.start, reach.stop) == (touched.min(), touched.max() + 1)


@pytest.mark.parametrize("name", ["conv", "strided conv", "dilated conv"])
def test_padding_is_how_far_windows_stand_out(name):
    window, _, result, _ = SINGLE[name]
    assert isinstance(window, Window)
    for part in intervals(result):
        seen = [p * window.stride - window.low + window.dilation * k for p in range(*part) for k in range(window.width)]
        (need,) = window.need([part])
        assert window.padding(part) == (need.start - min(seen), max(seen) + 1 - need.stop)


def boxes(shape: tuple[int, ...]) -> list[Box]:
    return list(itertools.product(*map(intervals, shape)))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((6,), (2, 3)),
        ((2, 3), (6,)),
        ((2, 6), (4, 3)),
        ((2, 2, 3), (3, 4)),
        ((1, 6), (6,)),
        ((3, 1, 2), (3, 2)),
        ((), (1,)),
    ],
)
def test_reshapes_need_what_they_show(before, after):
    x = np.arange(int(np.prod(before))).reshape(before)
    y = x.reshape(after)
    relation = regroup_axes(before, after)
    for box in boxes(after):
        need = relation.need(box)
        part = run_reshape(x[tuple([slice(*i) for i in need])], relation, box)
        np.testing.assert_array_equal(part, y[tuple([slice(*i) for i in box])])
    for box in boxes(before):
        reach = relation.reach(box)
        inside = np.isin(y, x[tuple([slice(*i) for i in box])])
        assert not inside.any() or _contains(reach, around(inside.nonzero()))


def _contains(outer: Box, inner: Box) -> bool:
    return all(one.start <= other.start and other.stop <= one.stop for one, other in zip(outer, inner, strict=True))


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.data())
def test_broadcasts_moves_and_reductions_follow_numpy(shape, data):
    shape = tuple(shape)
    axes = data.draw(st.permutations(range(len(shape))))
    ids = np.arange(int(np.prod(shape))).reshape(shape)
    turned = ids.transpose(axes)
    relation = move_axes(shape, turned.shape, [list(axes).index(axis) for axis in range(len(shape))])
    box = data.draw(st.sampled_from(boxes(turned.shape)))
    need = relation.need(box)
    assert set(turned[tuple([slice(*i) for i in box])].flat) == set(ids[tuple([slice(*i) for i in need])].flat)
    assert relation.reach(need) == box

    small = tuple([1 if data.draw(st.booleans()) else size for size in shape])
    wide = broadcast_axes(small, shape)
    source = np.arange(int(np.prod(small))).reshape(small)
    box = data.draw(st.sampled_from(boxes(shape)))
    shown = np.broadcast_to(source, shape)[tuple([slice(*i) for i in box])]
    assert set(shown.flat) == set(source[tuple([slice(*i) for i in wide.need(box)])].flat)

    summed = [axis for axis in range(len(shape)) if data.draw(st.booleans())]
    result = tuple([size for axis, size in enumerate(shape) if axis not in summed])
    need = reduce_axes(shape, result, summed, keepdim=False).need(whole(result))
    assert need == whole(shape)


def test_an_empty_part_needs_and_reaches_nothing():
    relation = broadcast_axes((3, 1), (3, 4))
    assert is_empty(relation.reach((Interval(1, 1), Interval(0, 1))))


def test_an_operation_without_a_rule_costs_its_whole_result():
    op = ProgramOp("unknown", [ProgramValue((4,))], [ProgramValue((4, 5))], OpaqueRule)
    assert op.rule.cost([(Interval(0, 1), Interval(2, 3))]) == 20
    assert op.rule.needs([(Interval(0, 1), Interval(2, 3))]) == [whole((4,))]
