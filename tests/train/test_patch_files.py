"""The file of a patch gives back every bit, is replaced as a whole, and is refused when anything about it is wrong."""

import hashlib
import json
import os
import re
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

import elementgrad as eg
from elementgrad._files import replace_file
from elementgrad._train import patch_file as storage
from elementgrad._train.bits import BitArray
from elementgrad._train.entries import Entry
from elementgrad._train.patch import Patch
from elementgrad._train.weights import FileTensor, Weights
from tests.support.made import LONG, counts, shapes_and_indices

WIDTHS = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "complex64": 8, "complex128": 16, "float8_e4m3fn": 1}
SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, 1.0]
NAMES = st.text(st.characters(exclude_characters="[]()\n"), min_size=1).filter(lambda name: name.strip() == name)


MARK = "sample:" + 16 * "12ab"
"""A fingerprint."""
SECOND_VERSION = "15ddc6498477fbfabd11dd5581b3c29ba4adb47f05a4dda66d86478f3ff2f1be"
"""The checksum of a file of version 2."""


def entry(place="fc.weight[1, ::2]", shape=(3, 5), dtype="float32", wide=None, fill=1, mark=MARK):
    where = eg.Place.parse(place)
    at = where.select(shape).flat().reshape(-1)
    new, old = (
        BitArray(kind, np.full((at.size, WIDTHS[kind]), byte, np.uint8))
        for kind, byte in ((wide or dtype, fill + 1), (dtype, fill))
    )
    return Entry(place, where.name, shape, dtype, at, new, old, mark)


def some(mark=MARK):
    first, second = entry(mark=mark), entry("bias[0]", (4,), "bfloat16", "float32", mark=mark)
    return Patch((first, second, entry("scale", (), "complex64", mark=mark)))


def scattered(count=200, name="scattered", order=None):
    """An entry of elements that no short text names."""
    at = np.arange(count) ** 2 % 4001 if order == "mixed" else np.arange(count) ** 2
    new, old = (BitArray.of(np.full(count, number, np.float16)) for number in (1.5, 0.5))
    return Entry(None, name, (count, count), "float16", at, new, old, MARK)


@st.composite
def numbers(draw, dtype, count):
    width = WIDTHS[dtype]
    bits = draw(st.binary(min_size=count * width, max_size=count * width))
    made = np.frombuffer(bits, np.uint8).reshape(count, width)
    if dtype.startswith(("float", "complex")) and width > 1 and draw(st.booleans()):
        return BitArray.of(np.array(draw(st.lists(st.sampled_from(SPECIAL), min_size=count, max_size=count)), dtype))
    return BitArray(dtype, made)


@st.composite
def patches(draw):
    entries = []
    for name in draw(st.lists(NAMES, max_size=4, unique=True)):
        shape, index = draw(shapes_and_indices())
        place = eg.at(name)[index]
        try:
            at = place.select(shape).flat().reshape(-1)
        except eg.SelectionError:  # an axis of size 0, or arrays that do not broadcast
            at = np.zeros(2)
        if np.unique(at).size < at.size:
            place, at = eg.at(name), np.arange(int(np.prod(shape)))
        if not at.size:
            place, shape, at = eg.at(name), (), np.arange(1)
        dtype = draw(st.sampled_from(list(WIDTHS)))
        wide = draw(st.sampled_from([other for other in WIDTHS if other.startswith("c") == dtype.startswith("c")]))
        new, old = draw(numbers(wide, at.size)), draw(numbers(dtype, at.size))
        mark = f"{draw(st.sampled_from(['sample', 'full']))}:{draw(st.integers(0, 2**256 - 1)):064x}"
        entries.append(Entry(str(place), name, shape, dtype, at, new, old, mark))
    return Patch(tuple(entries))


def test_made_patches_come_back_from_their_file_bit_by_bit(tmp_path):
    path = tmp_path / "patch.safetensors"

    @settings(max_examples=counts(150))
    @given(patches())
    def comes_back(patch):
        patch.write(path)
        again = Patch.read(path)
        assert again == patch
        assert hash(again) == hash(patch)
        for one, other in zip(again.entries, patch.entries, strict=True):
            assert one.values.bits.tobytes() == other.values.bits.tobytes()
            assert one.originals.bits.tobytes() == other.originals.bits.tobytes()
        assert again.size == sum(len(each.indices) for each in patch.entries)
        assert len(repr(again).splitlines()) == len(patch.entries) + 1

    comes_back()


def test_an_empty_patch_comes_back(tmp_path):
    Patch(()).write(tmp_path / "p")
    assert eg.inspect(tmp_path / "p") == Patch(())


def test_many_entries_keep_their_order(tmp_path):
    patch = Patch(tuple(entry(f"w[{row}]", (300, 2), fill=row % 200) for row in reversed(range(300))))
    patch.write(tmp_path / "p")
    assert eg.inspect(str(tmp_path / "p")) == patch


def first_version(patch):
    """The parts of a file as version 1 had them."""
    tensors, descriptions = {}, []
    for number, each in enumerate(patch.entries):
        positions = storage.StoredTensor("I64", each.indices.shape, each.indices.tobytes())
        numbers = {"values": each.values, "originals": each.originals}
        stored = {name: storage._encode_numbers(bits) for name, bits in numbers.items()}
        tensors |= {f"{number}.{name}": tensor for name, tensor in {"indices": positions, **stored}.items()}
        fields = {"place": each.place, "name": each.name, "shape": each.shape, "dtype": each.dtype}
        descriptions.append({**fields, "values": each.values.dtype, "fingerprint": each.fingerprint})
    return {"version": "1", "entries": json.dumps(descriptions)}, tensors


def test_files_of_the_first_version_are_read(tmp_path):
    """The checksum is that of the file that was written when the format was made."""
    content = b"".join(storage.pack(*first_version(some("sample:"))))
    assert hashlib.sha256(content).hexdigest() == "0b57ae35d1849e020a7891e29422e83fc195ad7dfe601959137a4c50d4e78c6c"
    (tmp_path / "p").write_bytes(b"".join(storage.pack(*first_version(some()))))
    assert eg.inspect(tmp_path / "p") == some()
    assert [each.place for each in eg.inspect(tmp_path / "p").entries] == [each.place for each in some().entries]


def test_the_same_patch_gives_the_same_bytes_in_every_version(tmp_path):
    """Files of version 2 stay readable: this one was written when the format was made."""
    Patch((*some().entries, scattered())).write(tmp_path / "p")
    content = (tmp_path / "p").read_bytes()
    assert hashlib.sha256(content).hexdigest() == SECOND_VERSION


def test_a_file_is_as_large_as_its_elements_are_many_and_not_as_the_tensor(tmp_path):
    Patch((entry("w[5, :1000]", (10**6, 10**9)),)).write(tmp_path / "p")
    assert (tmp_path / "p").stat().st_size < 16 * 1000 + 1000


def test_places_too_long_for_a_file_are_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "LONGEST", 500)
    with pytest.raises(eg.PatchError, match=r"the texts of the places take \d+ bytes, and a file has room for 500"):
        some().write(tmp_path / "p")
    assert not list(tmp_path.iterdir())


def test_others_can_read_the_tensors_of_a_patch(tmp_path):
    Patch((*some().entries, scattered())).write(tmp_path / "p")
    with safe_open(tmp_path / "p", framework="pt") as file:
        assert np.cumsum(file.get_tensor("3.gaps").numpy() + 1)[:15].tolist() == [n**2 + 1 for n in range(15)]
        assert str(file.get_tensor("1.originals").dtype) == "torch.bfloat16"
        assert tuple(file.get_tensor("2.values").shape) == (1, 2)
        assert file.metadata()["format"] == "elementgrad-patch"


@pytest.mark.parametrize("version", [1, 2])
def test_a_flipped_byte_never_gives_another_patch(tmp_path, version):
    patch, path = some() if version == 1 else Patch((*some().entries, scattered(70))), tmp_path / "p"
    patch.write(path)
    content = path.read_bytes() if version == 2 else b"".join(storage.pack(*first_version(patch)))
    passed = 0
    for at in range(len(content)):
        for mask in (0x01, 0xFF) if LONG else ((0x01, 0xFF)[at % 2],):
            path.write_bytes(content[:at] + bytes([content[at] ^ mask]) + content[at + 1 :])
            try:
                read = Patch.read(path)
            except eg.PatchError:
                continue
            assert read == patch, f"byte {at}"
            passed += 1
    assert passed < 24  # blanks that fill up the header, at most


def test_every_truncation_is_refused_and_so_is_an_addition(tmp_path):
    path = tmp_path / "p"
    some().write(path)
    content = path.read_bytes()
    for length in range(0, len(content), 1 if LONG else 3):
        path.write_bytes(content[:length])
        with pytest.raises(eg.PatchError, match=r"p is (cut short|empty)"):
            Patch.read(path)
    path.write_bytes(content + b"\0")
    with pytest.raises(eg.PatchError, match="p is damaged or was changed by another program"):
        Patch.read(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"import torch\n", "p is no safetensors file; give one that a patch was saved to"),
        (b"PK\3\4" + bytes(100), "p is a zip archive, such as torch.save, Keras and NumPy write, and no safetensors"),
        (b"\x80\2}q\0X\1\0\0\0aq", "p is a pickle, which is never opened here, and no safetensors file"),
        (b"\x89HDF\r\n\x1a\n0000", "p is an HDF5 file, such as Keras writes, and no safetensors file"),
        (b"\x93NUMPY\1\0v\0{'descr'", "p is a NumPy array, and no safetensors file"),
        (b"\2\0\0\0\0\0\0\0{}", "p is a safetensors file with no tensors and no patch"),
        (b"\5\0\0\0\0\0\0\0{1: 2", "p is damaged .* header does not parse"),
        (b"\0\0\0\0\0\0\0\0{}", "no safetensors file"),
        (b"\1\1\0\0\0\0\0\0" + b'{"a":' + b"[" * 252, "header does not parse"),
    ],
)
def test_files_that_are_no_patch_are_refused(tmp_path, content, message):
    (tmp_path / "p").write_bytes(content)
    with pytest.raises(eg.PatchError, match=message):
        eg.inspect(tmp_path / "p")


def test_a_model_in_safetensors_is_no_patch_and_is_not_read_to_its_end(tmp_path):
    head = json.dumps({"a.weight": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}).encode()
    (tmp_path / "p").write_bytes(len(head).to_bytes(8, "little") + head)
    os.truncate(tmp_path / "p", 1 << 42)  # takes no room on the disk
    with pytest.raises(eg.PatchError, match=r"p is a safetensors file with 1 tensors \(a.weight\) and no patch; give"):
        eg.inspect(tmp_path / "p")


def forged(path, describe=lambda entries: None, tensors=lambda tensors: None, **text):
    """A file of version 1 whose checksum is right, though it does not hold together."""
    meta, stored = first_version(some())
    entries = json.loads(meta["entries"])
    describe(entries)
    tensors(stored)
    path.write_bytes(b"".join(storage.pack({**meta, "entries": json.dumps(entries), **text}, stored)))
    return path


def put(**fields):
    return lambda entries: entries[0].update(fields)


def swap(name, *stored):
    return lambda tensors: tensors.update({name: storage.StoredTensor(*stored)})


def positions(*at):
    return swap("0.indices", "I64", (len(at),), np.array(at, "<i8").tobytes())


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (
            {"version": "3"},
            "p is a patch of format version 3, and this elementgrad reads up to version 2; update",
        ),
        ({"version": "one"}, "its version is 'one'"),
        ({"format": "pt"}, r"with 9 tensors \(.*\) and no patch"),
        ({"entries": "{"}, "p: the entries are not described as in a patch"),
        ({"entries": "[" * 100_000}, "p: the entries are not described as in a patch"),
        ({"entries": "[]"}, "p: 0 entries are described, and the tensors are"),
        ({"entries": "[1, 2, 3]"}, "p: the entries are not described as in a patch"),
        ({"describe": put(place=1)}, "not described as in a patch"),
        ({"describe": put(shape=None)}, "None is not a shape"),
        ({"describe": put(shape=[3, "5"])}, "is not a shape; give a tuple of sizes"),
        ({"describe": put(shape=[-3, -5])}, "is not a shape"),
        ({"describe": put(shape=[1 << 40, 1 << 40])}, "is not a shape"),
        ({"describe": put(shape=[1, 5])}, "p: fc.weight.*: position 5 is out of range for 5 elements"),
        ({"describe": put(shape=[3, 6])}, "the place names 3 of 18 elements, and the 3 indices are not theirs"),
        ({"describe": put(place="fc.weight[1,")}, "p: expected .* found the end"),
        ({"describe": put(place="[1, ::2]")}, "the place names no tensor"),
        ({"describe": put(place="fc.weight[7, ::2]")}, "index 7 is out of range for axis 0 of size 3"),
        ({"describe": put(place="fc.weight[0, ::2]")}, "the place names 3 of 15 elements, and the 3 indices"),
        ({"describe": put(place="fc.weight")}, "the place names 15 of 15 elements, and the 3 indices"),
        ({"describe": put(dtype="float64")}, "float64 is not stored as F32 of shape"),
        ({"describe": put(values="bfloat16")}, "bfloat16 is not stored as F32 of shape"),
        ({"describe": put(values="float8_e5m2")}, "float8_e5m2 is not stored as F32 of shape"),
        ({"describe": lambda entries: entries[0].pop("fingerprint")}, "not described as in a patch"),
        ({"tensors": positions(5, 7)}, "2 indices, 3 values and 3 originals; give one of each per element"),
        ({"tensors": positions(5, 7, 15)}, "position 15 is out of range for 15 elements"),
        ({"tensors": positions(5, 7, -1)}, "position -1 is out of range"),
        ({"tensors": positions(5, 7, 5)}, "position 5 occurs twice among the indices"),
        ({"tensors": positions(5, 9, 7)}, "the 3 indices are not theirs"),
        ({"tensors": swap("0.indices", "F64", (3,), bytes(24))}, "indices are F64 of shape"),
        ({"tensors": swap("0.values", "F32", (), bytes(4))}, "float32 is not stored as F32 of shape"),
        ({"tensors": swap("0.values", "F32", (2,), bytes(8))}, "3 indices, 2 values and 3 originals"),
        ({"tensors": swap("0.other", "U8", (1,), b"0")}, "3 entries are described, and the tensors are"),
        ({"tensors": lambda tensors: tensors.pop("1.values")}, "3 entries are described, and the tensors are"),
    ],
)
def test_inconsistent_files_with_a_valid_checksum_are_refused(tmp_path, how, message):
    with pytest.raises(eg.PatchError, match=message):
        eg.inspect(forged(tmp_path / "p", **how))


def test_impossible_indices_are_refused_by_inspect_and_apply(tmp_path):
    model = Weights(
        {"fc.weight": FileTensor.of(np.zeros((3, 5), np.float32)), "n": FileTensor.of(np.zeros(2, np.int32))}
    )
    whole, wide = BitArray.of(np.zeros(1, np.int32)), BitArray.of(np.zeros(1, np.int64))
    for bad, says in (
        (entry(mark="md5:1"), "'md5:1' is not a fingerprint, which is sample: or full:"),
        (entry(mark=MARK.upper()), "is not a fingerprint"),
        (entry("fc.weight[1, ::2](output)"), "is of kind 'output', and only parameters are patched"),
        (entry("fc.weight[:0]"), "the place names no element of a tensor of shape"),
        (entry(wide="complex64"), "values of complex64 do not fit a tensor of float32"),
        (entry(dtype="complex64", wide="float32"), "values of float32 do not fit a tensor of complex64"),
        (Entry("n[0]", "n", (2,), "int32", np.arange(1), wide, whole, MARK), "values of int64 do not fit a tensor of"),
    ):
        patch = Patch((bad,))
        patch.write(tmp_path / "p")
        for use in (eg.inspect, partial(eg.apply, model)):
            with pytest.raises(eg.PatchError, match=f"p: .*{re.escape(says)}"):
                use(tmp_path / "p")
        with pytest.raises(eg.PatchError, match=re.escape(says)):
            eg.apply(model, patch)
    with pytest.raises(eg.PatchError, match=r"are of two tensors that were called fc\.weight"):
        Patch((entry(), entry("fc.weight[0]", mark="sample:" + 64 * "0")))


def test_overlapping_entries_in_a_file_are_refused(tmp_path):
    def same(tensors):
        tensors.update({f"1.{part}": tensors[f"0.{part}"] for part in ("indices", "values", "originals")})

    forged(tmp_path / "p", lambda entries: entries.__setitem__(1, entries[0]), same)
    with pytest.raises(eg.PatchError, match=r"p: fc.weight\[1, 0\] is named by .* and by .*; name each element once"):
        eg.inspect(tmp_path / "p")


def test_missing_files_and_folders_are_pythons_own_errors(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError):
        eg.inspect(tmp_path / "missing")
    with pytest.raises(IsADirectoryError):
        eg.inspect(tmp_path)
    some().write(tmp_path / "p")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    assert eg.inspect(tmp_path / "p") == some()


def test_an_unwritable_path_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        some().write(tmp_path / "missing" / "p")
    with pytest.raises(IsADirectoryError):
        some().write(tmp_path)
    (tmp_path / "p").write_text("")
    with pytest.raises(NotADirectoryError):
        some().write(tmp_path / "p" / "p")
    assert [path.name for path in tmp_path.iterdir()] == ["p"]


@pytest.mark.skipif(getattr(os, "geteuid", lambda: 1)() == 0, reason="root may do everything")
def test_missing_permissions_are_permission_errors(tmp_path):
    (tmp_path / "p").write_text("old")
    (tmp_path / "p").chmod(0o444)
    with pytest.raises(PermissionError):
        some().write(tmp_path / "p")
    tmp_path.chmod(0o555)
    try:
        with pytest.raises(PermissionError, match=r"new'$"):
            some().write(tmp_path / "new")
    finally:
        tmp_path.chmod(0o755)


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_a_new_file_follows_the_umask_and_an_old_one_keeps_its_mode(tmp_path, umask):
    before = os.umask(umask)
    try:
        some().write(tmp_path / "p")
        assert stat.S_IMODE((tmp_path / "p").stat().st_mode) == 0o666 & ~umask
        (tmp_path / "p").chmod(0o640)
        some().write(tmp_path / "p")
        assert stat.S_IMODE((tmp_path / "p").stat().st_mode) == 0o640
    finally:
        os.umask(before)


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "far").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "far" / "p")
    some().write(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert Patch.read(tmp_path / "far" / "p") == some()


def test_a_pipe_is_written_into_and_stays_a_pipe(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    for name in ("pipe", "link"):
        with ThreadPoolExecutor(1) as reader:
            read = reader.submit((tmp_path / name).read_bytes)
            some().write(tmp_path / name)
            (tmp_path / "p").write_bytes(read.result(timeout=60))
        assert Patch.read(tmp_path / "p") == some()
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    assert (tmp_path / "link").is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["link", "p", "pipe"]


def test_a_device_is_written_into_and_stays_a_device(tmp_path):
    ours, theirs = os.openpty()  # a terminal of its own: what breaks here breaks nothing else
    try:
        device = os.ttyname(theirs)
        (tmp_path / "link").symlink_to(device)
        for path in (device, tmp_path / "link"):
            replace_file(path, b"one line")
            assert os.read(ours, 100) == b"one line"
        assert stat.S_ISCHR(os.stat(device).st_mode)
        assert (tmp_path / "link").is_symlink()
    finally:
        os.close(ours)
        os.close(theirs)


def test_standard_output_is_written_to_wherever_it_leads(tmp_path):
    code = "import sys; from elementgrad import _files; "
    code += "print(1); _files.replace_file(sys.argv[1], b'2'); print(3)"
    for name in ("/dev/stdout", "/proc/self/fd/1", "/dev/fd/1"):
        command = [sys.executable, "-c", code, name]
        assert subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout == b"1\n23\n"
        with open(tmp_path / "redirected", "wb") as file:  # as a shell does
            subprocess.run(command, stdout=file, check=True)
            assert os.fstat(file.fileno()).st_ino == (tmp_path / "redirected").stat().st_ino
        assert (tmp_path / "redirected").read_bytes() == b"1\n23\n"


def test_a_file_that_another_program_has_open_is_tried_again_and_then_said(tmp_path, monkeypatch):
    """Windows renames over no file that is open."""
    path, rename, tries = tmp_path / "p", os.replace, []

    def refuse(*paths, times):
        tries.append(paths)
        if len(tries) <= times:
            raise PermissionError(13, "Access is denied", *paths)
        rename(*paths)

    monkeypatch.setattr(os, "replace", partial(refuse, times=2))
    some().write(path)
    assert (len(tries), Patch.read(path)) == (3, some())
    monkeypatch.setattr(os, "replace", partial(refuse, times=10**6))
    monkeypatch.setattr("elementgrad._files.PATIENCE", 0.1)
    with pytest.raises(PermissionError, match="another program has it open") as raised:
        Patch((entry(),)).write(path)
    assert raised.value.filename == str(path)
    assert (os.listdir(tmp_path), Patch.read(path)) == (["p"], some())


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
@pytest.mark.parametrize("step", ["fsync", "replace", "chmod"])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, step, error):
    old, path = Patch((entry(),)), tmp_path / "p"
    old.write(path)

    def fail(*_, **__):
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(os, step, fail)
        with pytest.raises(error if isinstance(error, type) else type(error)):
            some().write(path)
    assert [other.name for other in tmp_path.iterdir()] == ["p"]
    assert Patch.read(path) == old
