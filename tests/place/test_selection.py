"""A selection names the elements that NumPy would, whatever the index."""

import dataclasses
from collections import namedtuple

import numpy as np
import pytest
from hypothesis import given, seed, settings

import elementgrad as eg
from elementgrad._place.index import Span
from tests.support.made import NUMPY_REFUSES, counts, shapes_and_indices


@pytest.mark.parametrize("batch", range(4))
def test_made_indices_name_the_elements_that_numpy_names(batch):
    seen = set()

    @seed(batch)
    @settings(max_examples=counts(350, 5000), derandomize=False)
    @given(shapes_and_indices(wrong=batch % 2 == 1))
    def agrees(made):
        shape, index = made
        seen.add(repr(made))
        positions = np.arange(int(np.prod(shape))).reshape(shape)
        try:
            expected = positions[index]
        except NUMPY_REFUSES:
            with pytest.raises(eg.SelectionError):
                eg.Selection.resolve(index, shape)
            return
        complaint, selection = resolved(index, shape)
        if complaint:  # NumPy lets an empty mask of any shape pass
            assert "a mask of shape" in complaint
            assert any(np.size(item) == 0 for item in _items(index))
            return
        assert selection.shape == expected.shape
        assert np.array_equal(selection.flat(), expected)
        assert selection.unique == (np.unique(expected).size == expected.size)
        assert np.array_equal(positions[tuple(selection.coords().T)], expected.reshape(-1)) or not shape
        rows, block = selection.rows()
        blocks = positions.reshape(-1, *block) if block and positions.size else positions.reshape(-1)
        if positions.size:
            assert np.array_equal(blocks[rows].reshape(expected.shape), expected)

    agrees()
    assert len(seen) >= counts(200, 3000)


def resolved(index, shape):
    try:
        return None, eg.Selection.resolve(index, shape)
    except eg.SelectionError as error:
        return str(error), None


def _items(index):
    return index if isinstance(index, tuple) else (index,)


def test_a_slice_of_a_billion_elements_stays_a_slice():
    selection = eg.Selection.resolve((slice(None), slice(None, None, 2)), shape=(50_000, 40_000))
    assert selection.size == 1_000_000_000
    assert selection.unique
    assert selection.parts == (range(50_000), range(0, 40_000, 2))


def test_rows_of_a_huge_tensor_are_few_indices():
    rows, block = eg.Selection.resolve(([7, 9],), shape=(1_000_000, 1_000, 1_000)).rows()
    assert rows.tolist() == [7, 9]
    assert block == (1_000, 1_000)


def test_a_mask_over_the_whole_tensor_stays_a_mask():
    mask = np.array([[True, False], [False, True]])
    selection = eg.Selection.resolve(mask, shape=(2, 2))
    assert selection.mask is not None
    assert selection.flat().tolist() == [0, 3]


def test_a_selection_cannot_be_changed_from_outside():
    array = np.array([0, 2])
    selection = eg.Selection.resolve(array, shape=(3,))
    array[0] = 1
    assert selection.flat().tolist() == [0, 2]
    with pytest.raises(ValueError, match="read-only"):
        selection.parts[0][0] = 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        selection.of = (4,)
    for index in ((np.array([True, False, True]), 0), ([-1, 0],), (np.eye(3, dtype=bool),), (True, [0, 1])):
        again = eg.Selection.resolve(index, shape=(3, 3))
        for part in again.axes:
            if isinstance(part, np.ndarray):
                with pytest.raises(ValueError, match="read-only"):
                    part[0] = 1


@pytest.mark.parametrize(
    ("index", "repeated"),
    [
        (([1, 1],), (1,)),
        (([-1, -1],), (-1,)),
        (([0, 1], [2, 2]), None),
        (([0, 0], [2, 2]), (0, 2)),
        ((slice(None), [0, 1, 0]), (0,)),
        (([-1, 3],), None),  # nobody knows
    ],
)
def test_repeats_are_found_on_axes_of_unknown_size_too(index, repeated):
    selection = eg.Selection.resolve(index, shape=(None, 3))
    assert selection.repeated == repeated
    assert not selection.unique or repeated is None
    with pytest.raises(eg.TracedError, match="how many elements there are is not known"):
        eg.Selection.resolve(slice(None), shape=(None, 3)).size  # noqa: B018


def test_an_axis_of_unknown_size_keeps_its_slice_and_is_not_checked():
    selection = eg.Selection.resolve((slice(1, None), 3), shape=(None, 5))
    assert selection.parts == (Span(1, None, None), 3)
    assert selection.shape == (None,)
    assert selection.traced
    with pytest.raises(eg.SelectionError):
        eg.Selection.resolve((slice(None), 5), shape=(None, 5))


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.uint64, np.int8])
def test_indices_may_be_of_any_integer_dtype(dtype):
    assert eg.Selection.resolve(np.array([0, 2], dtype), shape=(3,)).flat().tolist() == [0, 2]


def test_a_named_tuple_is_a_tuple_and_what_has_an_array_is_one():
    point = namedtuple("Point", "row column")(1, 2)
    assert eg.Selection.resolve(point, shape=(3, 3)).flat() == 5

    class Series:
        def __array__(self, dtype=None, copy=None):
            return np.array([1, 2])

    assert eg.Selection.resolve(Series(), shape=(3,)).flat().tolist() == [1, 2]


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ((0, 812), "[0, 812]: index 812 is out of range for axis 1 of size 768"),
        ((-101,), "[-101]: index -101 is out of range for axis 0 of size 100"),
        (([0, 100],), "[[0, 100]]: index 100 is out of range for axis 0 of size 100"),
        (([0, -101],), "[[0, -101]]: index -101 is out of range for axis 0 of size 100"),
        ((0, 0, 0), "[0, 0, 0]: 3 indices for a tensor of 2 axes and shape (100, 768)"),
        ((..., 0, ...), "[..., 0, ...]: `...` occurs twice; one is enough"),
        ((slice(0, 9, 0),), "[0:9:0]: a slice step of 0 names nothing; use a step of at least 1, or a negative one"),
        (([0, 1], [0, 1, 2]), "[[0, 1], [0, 1, 2]]: index arrays of shapes (2,) and (3,) do not broadcast together"),
        (
            np.ones(3, bool),
            "[[true, true, true]]: a mask of shape (3,) does not fit axes of shape (100,); it must match exactly",
        ),
        (2**80, f"[{2**80}]: index {2**80} is out of range for axis 0 of size 100"),
        (np.array([2**63], np.uint64), "is out of range for axis 0 of size 100"),
        (None, "None (newaxis) adds an axis and names no element"),
        (1.0, "1.0 of type float is not an index"),
        (np.array([1.0]), "an index array of dtype float64 cannot name elements"),
        ("a", "'a' of type str is not an index"),
        (slice(0.5, 1), "slice bound 0.5 is not an int"),
        ([[0, 1], [2]], "list does not make one array; its rows must be of one length"),
        ([2**70], f"[{2**70}] holds an int that is out of range for any axis"),
        ([0, "a"], "cannot name elements"),
        ([0, None], "[0, None] holds what is not an int"),
        ({0}, "{0} of type set is not an index"),
    ],
)
def test_what_names_no_elements_is_one_sentence(index, message):
    with pytest.raises(eg.SelectionError) as caught:
        eg.Selection.resolve(index, shape=(100, 768))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, IndexError)
