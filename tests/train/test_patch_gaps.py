"""Positions as gaps, and files of version 2: small, exact, and refused when anything about them is wrong."""

import hashlib
import json
import sys

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import elementgrad as eg
from elementgrad._train import patch_file as storage
from elementgrad._train.bits import BitArray
from elementgrad._train.entries import Entry
from elementgrad._train.gaps import decode_gaps, encode_gaps
from elementgrad._train.patch import Patch
from tests.support.made import counts
from tests.train.test_patch_files import MARK, scattered

LARGEST = 2**63 - 1


@settings(max_examples=counts(300))
@given(st.lists(st.one_of(st.integers(0, 600), st.integers(0, 2**17), st.integers(0, 2**34)), unique=True))
@example([0])
@example([254, 255, 510, 511, 766, 2**16, 2**16 + 1])
def test_gaps_give_back_the_positions(positions):
    positions = np.array(sorted(positions), np.int64)
    codes = encode_gaps(positions)
    size = int(positions.max(initial=0)) + 1
    assert np.array_equal(decode_gaps(codes, len(positions), size), positions)
    if len(positions):
        with pytest.raises(eg.PatchError, match="beyond the"):
            decode_gaps(codes, len(positions), size - 1)
        with pytest.raises(eg.PatchError, match="not those of"):
            decode_gaps(codes, len(positions) + 1, size)


def test_gaps_across_chunks_and_in_the_largest_tensor(monkeypatch):
    monkeypatch.setattr("elementgrad._train.gaps.CHUNK", 3)
    for positions in (np.arange(0, 5000, 173), np.array([1, 2, 70_000, 70_001, 2**40, LARGEST - 1])):
        codes = encode_gaps(positions)
        assert np.array_equal(decode_gaps(codes, len(positions), LARGEST), positions)


def test_codes_that_would_wrap_around_are_refused():
    for codes in ([2**64 - 2, 5], [2**63 - 2, 2**63 - 2, 2**63 - 2], [2**64 - 1, 2**64 - 1]):
        with pytest.raises(eg.PatchError, match=r"beyond the|not those of"):
            decode_gaps(np.array(codes, np.uint64), len(codes), LARGEST)


def test_scattered_halves_take_five_bytes_each_or_three(tmp_path):
    """One in a hundred of ten million elements: at most 5.2 bytes each with the originals, and 3.2 without."""
    size = 10**7
    at = np.sort(np.random.default_rng(0).choice(size, size // 100, replace=False))
    number = BitArray("bfloat16", np.zeros((len(at), 2), np.uint8))
    for originals, sha256, limit in ((number, None, 5.2), (None, 64 * "0", 3.2)):
        entry = Entry(None, "w", (size,), "bfloat16", at, number, originals, MARK, sha256=sha256)
        Patch((entry,)).write(tmp_path / "p")
        assert (tmp_path / "p").stat().st_size <= limit * len(at)
        assert eg.inspect(tmp_path / "p") == Patch((entry,))


@pytest.mark.parametrize("order", [None, "mixed"])
def test_scattered_elements_keep_their_order_and_have_a_place(tmp_path, order):
    patch = Patch((scattered(order=order),))
    patch.write(tmp_path / "p")
    again = eg.inspect(tmp_path / "p")
    assert again == patch
    (entry,) = again.entries
    assert np.array_equal(eg.Place.parse(entry.place).select(entry.shape).flat(), entry.indices)
    assert "scattered[[0, 0, 0, ...], [0, 1, 4, ...]]" in repr(again)


def test_one_tensor_is_read_and_checked_without_the_others(tmp_path):
    Patch((scattered(name="a"), scattered(name="b"))).write(tmp_path / "p")
    content = bytearray((tmp_path / "p").read_bytes())
    file = storage.PatchFile(tmp_path / "p")
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    content[start + header["1.values"]["data_offsets"][0]] ^= 1
    (tmp_path / "q").write_bytes(content)
    file = storage.PatchFile(tmp_path / "q")
    assert [entry.name for entry in file.entries(lambda name: name == "a")] == ["a"]
    with pytest.raises(eg.PatchError, match=r"q: the file is damaged .*the checksum of 1\.values is not"):
        list(file.entries(lambda name: name == "b"))
    with pytest.raises(eg.PatchError, match="damaged"):
        eg.inspect(tmp_path / "q")


def forged(path, describe=lambda entry: None, tensors=lambda tensors: None):
    """A file whose checksums are right, though it does not hold together."""
    meta, stored = storage.encode_entries((scattered(),))
    entries = json.loads(meta["entries"])
    tensors(stored)
    checksums = {name.removeprefix("0."): hashlib.sha256(each.data).hexdigest() for name, each in stored.items()}
    entries[0]["checksums"] = checksums
    describe(entries[0])
    path.write_bytes(b"".join(storage.pack({"entries": json.dumps(entries)}, stored)))
    return path


def put(**fields):
    return lambda entry: entry.update(fields)


def swap(name, *stored):
    return lambda tensors: tensors.update({name: storage.StoredTensor(*stored)})


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"describe": put(shape=[100, 100])}, "the gaps lead beyond the 10000 elements of the tensor"),
        ({"describe": put(shape=[1 << 62, 1 << 62])}, "is not a shape"),
        ({"describe": put(shape=None)}, "None is not a shape"),
        ({"describe": put(place="scattered[0]")}, "there is a place, and positions as well"),
        (
            {"describe": put(place="scattered"), "tensors": lambda tensors: tensors.pop("0.gaps")},
            "the place names 40000 elements, and there are 200",
        ),
        ({"describe": put(place=5)}, "by texts"),
        ({"describe": put(name=5)}, "by texts"),
        ({"describe": put(dtype="float32")}, "float32 is not stored as F16"),
        ({"describe": put(checksums={})}, "1 entries are described, and the tensors are"),
        ({"describe": put(checksums=None)}, "not described as in a patch"),
        ({"describe": lambda entry: entry["checksums"].update(values="0")}, "the checksum of 0.values is not"),
        ({"describe": put(packed={"values": ["F16", [1 << 50]]})}, "cannot be F16 of shape|needs zstandard"),
        ({"tensors": lambda tensors: tensors.pop("0.gaps")}, "there is neither a place nor positions"),
        ({"tensors": lambda tensors: tensors.pop("0.originals")}, "no originals and no checksum of them"),
        ({"tensors": swap("0.gaps", "I64", (200,), bytes(1600))}, "gaps are I64 of shape"),
        ({"tensors": swap("0.gaps", "U8", (10, 20), bytes(200))}, "gaps are U8 of shape"),
        ({"tensors": swap("0.gaps", "U8", (199,), bytes(199))}, "not those of 200 positions"),
        ({"tensors": swap("0.gaps", "U8", (201,), bytes(200) + b"\xff")}, "not those of 200 positions"),
    ],
)
def test_inconsistent_folders_with_valid_checksums_are_refused(tmp_path, how, message):
    with pytest.raises((eg.PatchError, ImportError), match=message):
        eg.inspect(forged(tmp_path / "p", **how))


@pytest.mark.parametrize(
    "header",
    [
        {"x": {"dtype": "F32", "shape": [1 << 60], "data_offsets": [0, 1 << 62]}},
        {"x": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}},
        {"x": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}},
        {"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}},
        {"x": {"dtype": "F" + "9" * 5000, "shape": [1], "data_offsets": [0, 4]}},
        {"x": {"dtype": 5, "shape": [1], "data_offsets": [0, 4]}},
        {"x": {"dtype": "F32", "shape": 5, "data_offsets": [0, 4]}},
        {"x": {"dtype": "F32", "shape": [1.5], "data_offsets": [0, 4]}},
        {"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 8]}},
        {"x": None},
        {
            "x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
            "y": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
        },
        {},
    ],
)
def test_hostile_headers_are_refused(tmp_path, header):
    meta = {"format": "elementgrad-patch", "version": "2", "entries": "[]"}
    text = json.dumps({"__metadata__": meta, **header}).encode()
    (tmp_path / "p").write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
    with pytest.raises(eg.PatchError, match=r"p is (damaged|cut short)"):
        eg.inspect(tmp_path / "p")


def test_long_headers_are_refused_before_they_are_read(tmp_path):
    for length in (2**63, 2**32, 100_000_001):
        (tmp_path / "p").write_bytes(length.to_bytes(8, "little") + b"{}" + bytes(100))
        with pytest.raises(eg.PatchError, match=r"p is (no safetensors file|cut short)"):
            eg.inspect(tmp_path / "p")


def test_a_name_that_stands_twice_in_a_header_is_refused(tmp_path):
    Patch((scattered(),)).write(tmp_path / "p")
    content = (tmp_path / "p").read_bytes()
    length = int.from_bytes(content[:8], "little")
    head = content[8 : 8 + length].rstrip()
    twice = head[:-1] + b',"0.gaps":' + json.dumps(json.loads(head)["0.gaps"]).encode() + b"}"
    (tmp_path / "p").write_bytes(len(twice).to_bytes(8, "little") + twice + content[8 + length :])
    with pytest.raises(eg.PatchError, match="its header does not parse"):
        eg.inspect(tmp_path / "p")


def test_compressed_files_are_smaller_and_the_same(tmp_path):
    pytest.importorskip("zstandard", reason="needs zstandard")
    patch = Patch((scattered(2000), scattered(2000, "mixed", order=None)))
    patch.write(tmp_path / "plain")
    patch.write(tmp_path / "small", compress=True)
    assert (tmp_path / "small").stat().st_size < (tmp_path / "plain").stat().st_size / 2
    assert eg.inspect(tmp_path / "small") == patch
    content = (tmp_path / "small").read_bytes()
    for at in range(8, len(content), 97):
        (tmp_path / "p").write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        try:
            assert eg.inspect(tmp_path / "p") == patch
        except eg.PatchError:
            continue


def test_compressing_without_the_package_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ImportError, match="compress=True needs zstandard; pip install zstandard"):
        Patch((scattered(),)).write(tmp_path / "p", compress=True)
    assert not (tmp_path / "p").exists()
