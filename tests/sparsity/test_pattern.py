"""Patterns as values: made, joined, drawn, written down and read again."""

import resource

import numpy as np
import pytest
import scipy.sparse
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import elementgrad as eg

masks = arrays.arrays(bool, st.tuples(st.integers(0, 12), st.integers(0, 12)))
BAND = np.eye(6) + np.eye(6, k=1)


@given(masks)
def test_a_pattern_is_the_same_from_a_mask_from_entries_and_from_scipy(mask):
    pattern = eg.Pattern.from_dense(mask)
    np.testing.assert_array_equal(pattern.dense(), mask)
    rows, columns = mask.nonzero()
    assert pattern == eg.Pattern.from_entries(rows[::-1], columns[::-1], mask.shape)
    assert pattern == eg.Pattern.from_entries([*rows, *rows], [*columns, *columns], mask.shape)
    assert pattern == eg.Pattern.from_scipy(scipy.sparse.csc_array(mask.astype(float)))
    np.testing.assert_array_equal(pattern.to_scipy().toarray(), mask)
    np.testing.assert_array_equal(pattern.T.dense(), mask.T)
    assert pattern == pattern.T.T
    assert hash(pattern.T.T) == hash(pattern)
    assert pattern.size == mask.sum()


@given(masks, st.data())
def test_a_union_holds_the_entries_of_both(mask, data):
    other = data.draw(arrays.arrays(bool, mask.shape))
    one, two = eg.Pattern.from_dense(mask), eg.Pattern.from_dense(other)
    np.testing.assert_array_equal((one | two).dense(), mask | other)
    assert one <= one | two
    assert (two <= one) == bool((mask | ~other).all())


@given(masks)
def test_places_are_found_among_the_entries(mask):
    pattern = eg.Pattern.from_dense(mask)
    where = pattern.positions(*np.indices(mask.shape))
    np.testing.assert_array_equal(where >= 0, mask)
    np.testing.assert_array_equal(where[mask], np.arange(pattern.size))


def test_a_file_gives_the_pattern_back(tmp_path):
    pattern = eg.Pattern.from_dense(BAND)
    pattern.save(tmp_path / "band.npz")
    assert eg.Pattern.load(tmp_path / "band.npz") == pattern
    np.savez(tmp_path / "other.npz", shape=[1, 2])
    (tmp_path / "text.npz").write_text("nothing")
    for name in ("other.npz", "text.npz"):
        with pytest.raises(eg.OptionError, match=r"holds no pattern .*; give a file that Pattern\.save wrote"):
            eg.Pattern.load(tmp_path / name)


def test_a_file_stays_as_it_was_where_there_is_no_room(tmp_path):
    path, (soft, hard) = tmp_path / "band.npz", resource.getrlimit(resource.RLIMIT_FSIZE)
    eg.Pattern.from_dense(BAND).save(path)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            eg.Pattern.from_dense(BAND.T).save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert eg.Pattern.load(path) == eg.Pattern.from_dense(BAND)
    assert list(tmp_path.iterdir()) == [path]


def test_a_picture_is_bounded_and_shows_every_entry():
    pattern = eg.Pattern.from_dense(BAND)
    assert str(pattern) == "Pattern (6, 6): 11 of 36 entries, 30.6 %\n⠙⢦⡀\n⠀⠀⠙"
    large = eg.Pattern.from_entries([0, 10**6 - 1], [10**6 - 1, 0], (10**6, 10**6))
    lines = large.picture()
    assert len(lines) == 16
    assert {len(line) for line in lines} == {32}
    assert [sum(ch != "⠀" for ch in line) for line in (lines[0], lines[7], lines[-1])] == [1, 0, 1]
    assert "2 of 1000000000000 entries" in large._repr_html_()
    assert str(eg.Pattern.from_dense(np.zeros((0, 3)))).startswith("Pattern (0, 3): 0 of 0 entries")
