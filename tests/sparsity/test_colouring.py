"""Colourings read every requested entry in few sweeps; index sets agree with Python's sets."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from elementgrad._sparsity.coloring import Coloring, color
from elementgrad._sparsity.index_sets import IndexSets
from elementgrad._sparsity.pattern import Pattern

masks = st.tuples(st.integers(1, 12), st.integers(1, 12)).flatmap(lambda shape: arrays.arrays(bool, shape))
squares = st.integers(1, 12).flatmap(lambda size: arrays.arrays(bool, (size, size)))


def assert_reads(matrix: np.ndarray, pattern: Pattern, found: Coloring, asked: np.ndarray | None = None) -> None:
    """Check that the sweeps of a colouring give each entry of a matrix in its place."""
    sweeps = [
        (np.arange(count)[:, None] == colours).astype(float)
        for count, colours in ((found.forward, found.columns), (found.reverse, found.rows))
    ]
    swept = np.concatenate([(sweeps[0] @ matrix.T).ravel(), (sweeps[1] @ matrix).ravel()])
    wanted = matrix[pattern.rows, pattern.columns]
    np.testing.assert_array_equal(swept[found.places], wanted if asked is None else wanted[asked])


def filled(mask: np.ndarray) -> np.ndarray:
    """Whole numbers, whose sums are exact."""
    return np.where(mask, np.arange(1, mask.size + 1).reshape(mask.shape) ** 2, 0).astype(float)


def grid(size: int, wraps: bool = False) -> Pattern:
    """The five-point stencil on a square."""
    mask = np.zeros((size,) * 4, dtype=bool)
    for i, j in np.ndindex(size, size):
        for down, right in ((0, 0), (0, 1), (0, -1), (1, 0), (-1, 0)):
            k, m = i + down, j + right
            if wraps or (0 <= k < size and 0 <= m < size):
                mask[i, j, k % size, m % size] = True
    return Pattern.from_dense(mask.reshape(size**2, size**2))


def band(size: int, width: int) -> np.ndarray:
    rows, columns = np.indices((size, size))
    return np.abs(rows - columns) <= width


def arrow(size: int, column: bool) -> np.ndarray:
    mask = np.eye(size, dtype=bool)
    mask[0] = True
    mask[:, 0] |= column
    return mask


@given(masks, st.data())
def test_a_colouring_gives_the_requested_entries(mask, data):
    pattern, matrix = Pattern.from_dense(mask), filled(mask)
    asked = data.draw(arrays.arrays(bool, (pattern.size,)))
    for without in ([], ["reverse"], ["forward"]):
        whole = color(pattern, without=without)
        assert_reads(matrix, pattern, whole)
        part = color(pattern, asked, without=without)
        assert_reads(matrix, pattern, part, asked)
        assert whole.sweeps <= max(mask.shape)
        assert not (whole.reverse if without == ["reverse"] else whole.forward if without else 0)


@given(squares)
def test_a_symmetric_matrix_is_read_by_stars(mask):
    pattern, matrix = Pattern.from_dense(mask | mask.T), filled(mask)
    for without in ([], ["reverse"]):
        assert_reads(matrix + matrix.T, pattern, color(pattern, symmetric=True, without=without))


@pytest.mark.parametrize(
    ("pattern", "symmetric", "sweeps", "kind"),
    [
        (Pattern.from_dense(band(50, 1)), False, 3, "rows"),
        (Pattern.from_dense(band(50, 3)), False, 7, "rows"),
        (Pattern.from_dense(band(50, 1)), True, 3, "symmetric"),
        (grid(10), False, 5, "rows"),
        (grid(17), False, 5, "rows"),
        (grid(10), True, 5, "symmetric"),
        (Pattern.from_dense(np.eye(9)), False, 1, "rows"),
        (Pattern.from_dense(arrow(50, False)), False, 2, "rows"),
        (Pattern.from_dense(arrow(50, False).T), False, 2, "columns"),
        (Pattern.from_dense(arrow(50, True)), True, 2, "symmetric"),
        # 3n - 2 numbers are no fewer than three sweeps of n.
        (Pattern.from_dense(arrow(50, True)), False, 3, "both"),
        (Pattern.full((4, 7)), False, 4, "rows"),
        (Pattern.full((7, 4)), False, 4, "columns"),
        (Pattern.from_dense(np.zeros((3, 3))), False, 0, "rows"),
    ],
)
def test_sweeps_are_as_few_as_can_be(pattern, symmetric, sweeps, kind):
    found = color(pattern, symmetric=symmetric)
    assert (found.sweeps, found.kind) == (sweeps, kind)


def test_a_stencil_that_wraps_around_takes_few_sweeps_more():
    assert color(grid(10, wraps=True)).sweeps <= 8
    assert color(grid(10, wraps=True), symmetric=True).sweeps <= 6


@pytest.mark.parametrize("size", [10, 15])
def test_a_stencil_that_wraps_around_repeats_along_the_axes_of_its_tensor(size):
    pattern = grid(size, wraps=True)
    found = color(pattern, shapes=((size, size), (size, size)))
    assert found.sweeps == 5
    assert_reads(filled(pattern.dense()), pattern, found)


@pytest.mark.parametrize("sizes", [(9, 9), (6, 7, 8), (12, 12, 12), (40, 40, 40), (5, 6, 7, 4)], ids=str)
def test_a_stencil_in_a_flat_vector_takes_as_many_sweeps_as_it_has_points(sizes):
    cells = np.arange(np.prod(sizes)).reshape(sizes)
    rows, columns = [cells.ravel()], [cells.ravel()]
    for axis, size in enumerate(sizes):
        low, high = cells.take(range(size - 1), axis).ravel(), cells.take(range(1, size), axis).ravel()
        rows, columns = [*rows, low, high], [*columns, high, low]
    pattern = Pattern.from_entries(np.concatenate(rows), np.concatenate(columns), (cells.size, cells.size))
    found = color(pattern)
    assert found.sweeps == 2 * len(sizes) + 1
    assert len(np.unique(found.places)) == pattern.size


@given(masks, st.data())
def test_colours_that_repeat_read_everything_too(mask, data):
    pattern = Pattern.from_dense(mask)
    rows, columns = mask.shape
    shapes = data.draw(st.sampled_from([((rows,), (columns,)), ((1, rows), (columns, 1)), ((2, rows), ())]))
    assert_reads(filled(mask), pattern, color(pattern, shapes=shapes))


def test_a_few_entries_take_fewer_sweeps_than_all():
    pattern = Pattern.from_dense(band(60, 4))
    assert color(pattern).sweeps == 9
    apart = (pattern.rows == pattern.columns) & (pattern.rows % 5 == 0)
    assert color(pattern, apart).sweeps == 1


def test_a_long_band_is_coloured_in_linear_memory():
    numbers = np.arange(200_000)
    pattern = Pattern.from_entries(
        np.append(numbers, numbers[1:]), np.append(numbers, numbers[:-1]), (len(numbers),) * 2
    )
    assert color(pattern).sweeps == 2


@given(st.lists(st.lists(st.integers(0, 9), max_size=6), min_size=1, max_size=8), st.data())
def test_unions_are_those_of_pythons_sets(groups, data):
    reach = IndexSets(10)
    sets: dict[int, set[int]] = {0: set(), reach.full: set(range(10))} | {i + 1: {i} for i in range(10)}

    def known(ids: np.ndarray, wanted: list[set[int]]) -> None:
        rows = reach.pattern(ids).dense()
        assert [set(np.flatnonzero(row).tolist()) for row in rows] == wanted
        for number, elements in zip(ids.tolist(), wanted, strict=True):
            assert sets.setdefault(number, elements) == elements

    owners = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    ids = np.array([element + 1 for group in groups for element in group], dtype=np.int64)
    known(reach.union_by_owner(owners, ids, len(groups)), [set(group) for group in groups])
    for _ in range(3):
        names = st.lists(st.sampled_from(sorted(sets)), min_size=4, max_size=4)
        one, two = data.draw(names), data.draw(names)
        wanted = [sets[a] | sets[b] for a, b in zip(one, two, strict=True)]
        known(reach.union(np.array(one), np.array(two)), wanted)
        table = np.array([one, two])
        known(reach.reduce(table, [0]), wanted)
        known(reach.cumulative(table, 1)[0], [set().union(*(sets[a] for a in one[: i + 1])) for i in range(4)])
        known(np.array([reach.union_all(table)]), [set().union(*wanted)])


@given(st.integers(3, 9), st.integers(1, 3), st.integers(1, 2), st.integers(1, 2), st.integers(0, 2), st.integers(1, 2))
def test_windows_are_those_of_a_convolution(length, size, stride, dilation, pad, spacing):
    reach = IndexSets(length)
    spread = (length - 1) * spacing + 1
    count = (spread + 2 * pad - (size - 1) * dilation - 1) // stride + 1
    if count < 1:
        return
    ids = reach.windows(reach.seed_ids((length,)), [size], [stride], [(pad, pad)], [dilation], [spacing])
    wanted = np.zeros((count, length), dtype=bool)
    for out in range(count):
        for tap in range(size):
            place = out * stride + tap * dilation - pad
            if 0 <= place < spread and place % spacing == 0:
                wanted[out, place // spacing] = True
    np.testing.assert_array_equal(reach.pattern(ids).dense(), wanted)


@given(arrays.arrays(bool, (4, 5)))
def test_a_product_with_known_zeros_reaches_through_the_others_alone(mask):
    reach = IndexSets(8)
    ids = reach.matmul(reach.seed_ids((2, 4)), mask, mask.shape[1])
    wanted = np.kron(np.eye(2), mask.T) != 0
    np.testing.assert_array_equal(reach.pattern(ids).dense(), wanted)
