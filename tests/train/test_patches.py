"""A patch as a value, without its file: numbers by their bits, entries that fit, fingerprints of the original."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import elementgrad as eg
from elementgrad._train.bits import BitArray
from elementgrad._train.entries import Entry
from elementgrad._train.fingerprint import CHUNK, SAMPLE, _sample, fingerprint, fits
from elementgrad._train.history import BitsAt
from elementgrad._train.patch import Patch
from tests.support.made import counts

EVERY = np.arange(1 << 16, dtype="<u2")


def row(place="w[0, :2]", at=(0, 1), new=(1.0, 2.0), old=(0.0, 0.0), shape=(3, 4), name="w", dtype="float32"):
    numbers = [BitArray.of(np.array(values, np.float32)) for values in (new, old)]
    return Entry(place, name, shape, dtype, np.array(at, dtype=np.int64), *numbers, "sample:")


def test_every_bfloat16_is_decoded_as_others_decode_it():
    ours = BitArray("bfloat16", EVERY.view(np.uint8).reshape(-1, 2))
    theirs = EVERY.view(ml_dtypes.bfloat16)
    with np.errstate(invalid="ignore"):
        expected = theirs.astype(np.float64)
    assert np.array_equal(ours.floats(), expected, equal_nan=True)
    assert np.array_equal(np.signbit(ours.floats()), np.signbit(expected))
    assert BitArray.of(theirs) == ours


@pytest.mark.parametrize(
    "dtype", ["float16", "float32", "float64", "complex64", "complex128", "int8", "uint64", "bool"]
)
@pytest.mark.parametrize("order", ["<", ">"])
def test_numbers_of_an_array_are_its_values_in_either_byte_order(dtype, order):
    values = np.array([[0, 1], [1, 0]]).astype(np.dtype(dtype).newbyteorder(order))
    numbers = BitArray.of(values)
    assert numbers.dtype == dtype
    assert numbers.floats().tolist() == [0, 1, 1, 0]
    assert numbers == BitArray.of(np.array([0, 1, 1, 0], dtype))
    assert BitArray.of(values.T[::-1]) == BitArray.of(values.T[::-1].copy())
    assert len(BitArray.of(values[:0])) == 0
    assert len(BitArray.of(values[0, 0])) == 1


def test_numbers_are_equal_only_bit_by_bit():
    payload = np.array([0x7FC00001], "<u4").view("<f4")
    assert BitArray.of(np.float32([np.nan])) == BitArray.of(np.float32([np.nan]))
    assert BitArray.of(np.float32([np.nan])) != BitArray.of(payload)
    assert BitArray.of(np.float32([0.0])) != BitArray.of(np.float32([-0.0]))
    assert BitArray.of(np.float32([0.0])) != BitArray.of(np.int32([0]))
    assert BitArray.of(np.float32([0.0])) != "0.0"


def test_values_of_a_patch_are_read_only():
    bits = np.zeros((1, 4), np.uint8)
    numbers = BitArray("float32", bits)
    bits[:] = 1
    assert numbers.floats().tolist() == [0.0]
    with pytest.raises(ValueError, match="read-only"):
        numbers.bits[0] = 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        numbers.dtype = "int32"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BitArray("float32", np.zeros((2, 2), np.uint8)), "a float32 has 4 bytes, and the rows of bits have 2"),
        (lambda: BitArray("float32", np.zeros(4, np.uint8)), r"bits of float32 are uint8 of shape \(4,\); give uint8"),
        (lambda: BitArray("float32", np.zeros((1, 4))), "bits of float32 are float64"),
        (lambda: BitArray.of(np.array(["a"])), "an array of str.* has no numbers to keep; there are: float64"),
        (lambda: BitArray.of(np.array([None])), "an array of object has no numbers"),
        (lambda: BitArray("float8_e4m3fn", np.zeros((1, 1), np.uint8)).floats(), "cannot be turned to floats here"),
    ],
)
def test_values_that_are_no_numbers_are_refused(make, message):
    with pytest.raises(eg.ElementgradError, match=message):
        make()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"at": (0, 0)}, eg.DuplicateError, "position 0 occurs twice among the indices"),
        ({"at": (0, 12)}, eg.PatchError, "position 12 is out of range for 12 elements"),
        ({"at": (1, 0)}, eg.PatchError, "the place names 2 of 12 elements, and the 2 indices are not theirs"),
        ({"at": ((0, 1),)}, eg.PatchError, r"indices are int64 of shape \(1, 2\); give positions in one row"),
        ({"place": "w[3, :2]"}, eg.SelectionError, "index 3 is out of range for axis 0 of size 3"),
        ({"place": "w[0, :2"}, eg.ParseError, "found the end"),
        ({"place": "[0, :2]"}, eg.PatchError, "the place names no tensor"),
        ({"new": (1.0,)}, eg.PatchError, "2 indices, 1 values and 2 originals"),
        ({"dtype": "bfloat16"}, eg.PatchError, "the originals are float32 and the tensor is bfloat16"),
        ({"shape": 12}, eg.PatchError, "12 is not a shape; give a tuple of sizes"),
    ],
)
def test_an_entry_at_odds_with_itself_is_refused(change, error, message):
    with pytest.raises(error, match=message):
        row(**change)


def test_an_entry_keeps_the_order_of_its_place():
    entry = row("w[[2, 0], [1, 1]]", (9, 1))
    assert entry.indices.tolist() == [9, 1]
    assert not entry.indices.flags.writeable


def test_places_that_overlap_are_refused_and_disjoint_ones_are_not():
    patch = Patch((row(), row("w[0, 2:]", (2, 3)), row(name="v")))
    assert patch.size == 6
    with pytest.raises(eg.DuplicateError, match=r"w\[0, 1\] is named by w\[0, :2\] and by w\[0, 1:3\]; name each"):
        Patch((row(), row("w[0, 1:3]", (1, 2))))
    with pytest.raises(eg.PatchError, match=r"w is float32 of shape \(4, 3\) for .* and float32 of shape \(3, 4\) for"):
        Patch((row(), row("w[1, 0:2]", (3, 4), shape=(4, 3))))


def test_a_patch_prints_as_a_table():
    long = f"w[{list(range(30))}]"
    eighth = BitArray("float8_e5m2", np.zeros((1, 1), np.uint8))
    other = Entry("b\x07[0]", "b", (2,), "float8_e5m2", np.array([0]), eighth, eighth, "")
    printed = str(
        Patch(
            (
                row(new=(0.25, -3.0)),
                row(long, range(30), [np.nan] + [1.0] * 29, [1.0] * 30, (30,), "v"),
                row("s", (0,), (np.inf,), (np.inf,), (), "s"),
                other,
            )
        )
    )
    assert printed == (
        "place                                             elements  shape  dtype        largest change\n"
        "w[0, :2]                                          2         3x4    float32      3\n"
        "w[[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, ...  30        30     float32      nan\n"
        "s                                                 1         ()     float32      0\n"
        "b [0]                                             1         2      float8_e5m2  -"
    )


def reads(array):
    return lambda at: array.reshape(-1)[at].reshape(-1, 1).view(np.uint8)


def test_fingerprints_are_stable_across_versions():
    """Files are checked by them, so no version of NumPy or of this library may change them."""
    tensor = np.arange(1000, dtype="<f4").reshape(20, 50)
    assert fingerprint((20, 50), "float32", reads(tensor)) == (
        "sample:25d446e14273cdaebd86defe2e3b2e5f2dd40c302ff8fc16cb3333d7f834c5b5"
    )
    assert fingerprint((20, 50), "float32", reads(tensor), full=True) == (
        "full:fb59075c091bd1324f7929201df6f1bb52b3c6a74dad1249fb310da2b1979e62"
    )


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("shape", [(), (0,), (5,), (8, 8), (65,), (40, 30)])
def test_a_fingerprint_sees_shape_dtype_and_elements(shape, full):
    tensor = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    text = fingerprint(shape, "float32", reads(tensor), full=full)
    assert fits(text, shape, "float32", reads(tensor))
    assert text.startswith("full:" if full else "sample:")
    assert not fits(text, (1, *shape), "float32", reads(tensor))
    assert not fits(text, shape, "int32", reads(tensor))
    assert fits(text, shape, "float32", reads(tensor + 1)) == (tensor.size == 0)


def test_a_full_fingerprint_sees_every_element_and_a_sample_few():
    tensor = np.zeros(CHUNK + 100, np.float32)
    full, sampled = (fingerprint(tensor.shape, "float32", reads(tensor), full=full) for full in (True, False))
    missed = next(at for at in range(CHUNK, tensor.size) if at not in _sample(tensor.size))
    tensor[missed] = 1.0
    assert not fits(full, tensor.shape, "float32", reads(tensor))
    assert fits(sampled, tensor.shape, "float32", reads(tensor))
    known = BitsAt(np.array([missed]), np.zeros((1, 4), np.uint8))
    assert fits(full, tensor.shape, "float32", reads(tensor), known)


def test_a_sample_reads_few_elements_of_a_tensor_of_any_size():
    for size in (1, SAMPLE, SAMPLE + 1, 10**6, 10**18):
        at = _sample(size)
        assert 40 <= len(at) <= SAMPLE or len(at) == size
        assert np.all((at >= 0) & (at < size))
        assert np.unique(at).size == at.size
    spread = np.histogram(_sample(10**12), bins=4, range=(0, 10**12))[0]
    assert spread.min() > 5


@pytest.mark.parametrize("full", [False, True])
def test_made_disjoint_changes_leave_the_fingerprint_in_any_order(full):
    @settings(max_examples=counts(60))
    @given(st.integers(1, 300), st.data())
    def composes(size, data):
        original = np.random.default_rng(size).normal(size=size)
        order = data.draw(st.permutations(range(size)))
        cuts = sorted(data.draw(st.lists(st.integers(0, size), min_size=2, max_size=2)))
        parts = [np.array(part, np.int64) for part in (order[: cuts[0]], order[cuts[0] : cuts[1]])]
        before = fingerprint((size,), "float64", reads(original), full=full)
        for first, second in (parts, parts[::-1]):
            tensor = original.copy()
            known = np.zeros(0, np.int64)
            for part in (first, second):
                tensor[part] += 1.0
                known = np.concatenate([known, part])
                assert fits(before, (size,), "float64", reads(tensor), BitsAt(known, reads(original)(known)))

    composes()


def test_an_invalid_fingerprint_is_refused():
    with pytest.raises(eg.PatchError, match="'md5:1' is not a fingerprint, which is sample: or full:"):
        fits("md5:1", (1,), "float32", reads(np.zeros(1)))
    with pytest.raises(eg.PatchError, match="give one row of bits per position"):
        fingerprint((1,), "float32", reads(np.zeros(1)), BitsAt(np.array([0]), np.zeros((0, 4), np.uint8)))
