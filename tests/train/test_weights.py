"""Weights in files: read, patched and written by their bytes."""

import copy
import json
import mmap
import os
import stat
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import elementgrad as eg
from elementgrad._cli import main
from elementgrad._train.bits import BitArray
from elementgrad._train.match import reverse_patch
from elementgrad._train.weights import FileTensor, Weights


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_numbers_are_rounded_as_the_framework_rounds_them(dtype):
    bits = torch.randint(-(2**31), 2**31, (20_000,), generator=torch.Generator().manual_seed(0)).int()
    ties = torch.arange(0, 2**31, 2**15).int()[:60_000:7]
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), 3.5e38, 65519.0, 65520.0, 1e-45]).view(torch.int32)
    values = torch.cat([bits, ties, special]).view(torch.float32)
    values = values[~values.isnan()]
    rounded = BitArray.of(values.numpy()).round_to(dtype)
    assert rounded == BitArray(dtype, values.to(getattr(torch, dtype)).view(torch.uint8).numpy().reshape(-1, 2))
    assert np.isnan(BitArray.of(np.float32([np.nan])).round_to(dtype).floats()).all()


@pytest.mark.parametrize("ending", [".npz", ".safetensors"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_patch_goes_into_a_file_and_out_of_it(ending, dtype, tmp_path):
    model = torch.nn.Linear(4, 3).to(getattr(torch, dtype))
    before, path = {name: tensor.clone() for name, tensor in model.state_dict().items()}, tmp_path / f"w{ending}"
    if ending == ".npz":
        np.savez(path, steps=np.int64(3), **{name: tensor.numpy() for name, tensor in before.items()})
    else:
        save_file(before | {"steps": torch.tensor(3), "empty": torch.zeros(0)}, path)
    elements = eg.trainable(model, ["weight[1:, 2]", "bias"])
    with torch.no_grad():
        elements["bias"].fill_(2.5)
    elements.save(tmp_path / "p.safetensors", full=True)
    weights = Weights.read(path)
    applied = eg.apply(weights, tmp_path / "p.safetensors")
    weights.write(tmp_path / f"new{ending}")
    again = Weights.read(tmp_path / f"new{ending}")
    assert np.frombuffer(again.tensors["bias"].bits.tobytes(), dtype).tolist() == [2.5, 2.5, 2.5]
    assert again.tensors["steps"].bits.tolist() == [[3, 0, 0, 0, 0, 0, 0, 0]]
    with pytest.raises(eg.PatchError, match="which was changed before"):
        eg.apply(weights, tmp_path / "p.safetensors")
    applied.undo()
    eg.apply(again, reverse_patch(again, [eg.inspect(tmp_path / "p.safetensors")]))
    for held in (weights, again):
        for name, tensor in before.items():
            assert held.tensors[name].bits.tobytes() == tensor.numpy().tobytes()


def test_another_file_is_refused_and_stays_as_it_is(tmp_path):
    model = torch.nn.Linear(4, 3)
    elements = eg.trainable(model, "weight[0, 0]")
    elements.save(tmp_path / "p.safetensors")
    patch = eg.inspect(tmp_path / "p.safetensors")
    np.savez(tmp_path / "other.npz", weight=np.zeros((4, 3), np.float32), ids=np.arange(3))
    other = Weights.read(tmp_path / "other.npz")
    for use in (eg.apply, lambda weights, patch: reverse_patch(weights, [patch])):
        with pytest.raises(eg.PatchError, match=r"the patch is for weight as float32 of shape \(3, 4\)"):
            use(other, patch)
    with pytest.raises(eg.PatchError, match="no tensor named 'weight'; there are: ids"):
        eg.apply(Weights({"ids": other.tensors["ids"]}), patch)
    for place in ("weight[0, 0]", "ids[0]"):
        with pytest.raises(eg.FrameworkError, match="weights in a file do not train"):
            eg.trainable(other, place)
    held = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    held["weight"] = held["weight"].copy()
    held["weight"][2, 3] += 1.0
    np.savez(tmp_path / "near.npz", **held)
    with pytest.raises(eg.PatchError, match="other elements of it differ"):
        reverse_patch(Weights.read(tmp_path / "near.npz"), [patch])


def test_damaged_files_are_no_weights(tmp_path):
    path = tmp_path / "w.safetensors"
    save_file({"w": torch.ones(4)}, path)
    whole = path.read_bytes()
    head = json.dumps({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 99]}}).encode()
    for content in (b"", whole[:5], whole[:20], b"\xff" * 16, len(head).to_bytes(8, "little") + head + bytes(16)):
        path.write_bytes(content)
        with pytest.raises(eg.PatchError, match=r"not a safetensors file|is damaged"):
            Weights.read(path)
    np.savez_compressed(tmp_path / "w.npz", w=np.arange(100.0), texts=np.array(["a"]))
    whole = (tmp_path / "w.npz").read_bytes()
    flipped = bytearray(whole)
    flipped[60] ^= 255
    for content in (b"text", b"", whole[:50], whole[:-30], bytes(flipped), whole):
        (tmp_path / "w.npz").write_bytes(content)
        with pytest.raises(eg.PatchError, match="holds no weights: "):
            Weights.read(tmp_path / "w.npz")


NAMES = ["file", "allow_pickle", "kwds", "args", "w", "w.npy", "w.npy.npy", "a/b", "/a", "../up", "..", "", "arr_0"]
NAMES += ["ü☃", "a b", "a\\b", "a\0b", ".npy", "__metadata", "x" * 300, "=1+1", "end/"]


def test_tensors_of_every_name_are_kept_in_npz(tmp_path):
    held = {name: np.float32([number, -0.0]) for number, name in enumerate(NAMES)}
    path = tmp_path / "w.npz"
    Weights({name: FileTensor.of(array) for name, array in held.items()}).write(path)
    once = path.read_bytes()
    again = Weights.read(path)
    assert list(again.tensors) == NAMES
    for name, array in held.items():
        assert again.tensors[name].bits.tobytes() == array.tobytes()
    again.write(path)
    assert path.read_bytes() == once
    with np.load(path) as theirs:
        for name in set(NAMES) - {"w.npy", "w.npy.npy", ".npy", "a\0b"}:  # which NumPy takes for others
            assert theirs[name].tobytes() == held[name].tobytes(), name
    assert os.listdir(tmp_path) == ["w.npz"]


def test_names_that_npz_cannot_hold_are_refused_before_anything_is_written(tmp_path):
    for name, says in (("\ud800", "is no text that .npz has a place for"), ("x" * 70_000, "70004 bytes is too long")):
        with pytest.raises(eg.PatchError, match=says):
            Weights({name: FileTensor.of(np.float32(1))}).write(tmp_path / "w.npz")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["file", "allow_pickle", "w.npy"])
def test_a_patch_goes_into_npz_tensors_of_every_name(tmp_path, name):
    before = {name: np.float32([1, 2]), "w": np.float32([3, 4])}
    Weights({name: FileTensor.of(array) for name, array in before.items()}).write(tmp_path / "w.npz")
    model = torch.nn.ParameterDict({"x": torch.tensor([1.0, 2.0])})
    elements = eg.trainable(model, "x[1]")
    with torch.no_grad():
        elements["x[1]"].fill_(7.0)
    elements.save(tmp_path / "p.safetensors")
    weights = Weights.read(tmp_path / "w.npz")
    eg.apply(weights, tmp_path / "p.safetensors", names={"x": name})
    weights.write(tmp_path / "w.npz")
    after = Weights.read(tmp_path / "w.npz").tensors
    assert [after[each].bits.view("<f4").reshape(-1).tolist() for each in (name, "w")] == [[1, 7], [3, 4]]


def test_out_may_be_a_pipe(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    np.savez("w.npz", w=np.float32([1, 2]))
    eg.Patch(()).write("p.safetensors")
    os.mkfifo("pipe.npz")
    with ThreadPoolExecutor(1) as reader:
        read = reader.submit(Path("pipe.npz").read_bytes)
        assert main(["patch", "apply", "w.npz", "p.safetensors", "--out", "pipe.npz"]) == 0
        Path("got.npz").write_bytes(read.result(timeout=60))
    assert np.load("got.npz")["w"].tolist() == [1, 2]
    assert stat.S_ISFIFO(os.stat("pipe.npz").st_mode)
    assert "pipe.npz is written" in capsys.readouterr().err


def safetensors_of(header: str, size: int) -> bytes:
    return len(header.encode()).to_bytes(8, "little") + header.encode() + bytes(size)


def test_tensors_that_overlap_in_a_file_are_refused(tmp_path):
    path = tmp_path / "w.safetensors"
    for one, other in (((0, 8), (4, 12)), ((4, 12), (0, 8)), ((0, 8), (0, 8)), ((0, 12), (4, 8))):
        described = {
            name: {"dtype": "F32", "shape": [(ends[1] - ends[0]) // 4], "data_offsets": ends}
            for name, ends in (("a", one), ("b", other), ("empty", (0, 0)))
        }
        path.write_bytes(safetensors_of(json.dumps(described), 12))
        with pytest.raises(eg.PatchError, match=r"w\.safetensors is damaged: \w and \w overlap in it"):
            Weights.read(path)
    twice = '{"a": {"dtype": "U8", "shape": [1], "data_offsets": [%d, %d]}, "a": %s}'
    path.write_bytes(safetensors_of(twice % (0, 1, '{"dtype": "U8", "shape": [1], "data_offsets": [1, 2]}'), 2))
    with pytest.raises(eg.PatchError, match="is not a safetensors file, since it names 'a' twice"):
        Weights.read(path)


def test_arrays_that_overlap_in_npz_are_refused(tmp_path):
    for name, says in (("b.npy", "'a' and 'b' overlap"), ("a.npy", "two arrays are called 'a'"), ("a", "called 'a'")):
        np.savez(tmp_path / "w.npz", a=np.ones(3))
        with zipfile.ZipFile(tmp_path / "w.npz", "a") as archive:
            other = copy.copy(archive.filelist[0])
            other.filename = name
            archive.filelist.append(other)
            archive._didModify = True
        with pytest.raises(eg.PatchError, match=f"holds no weights: .*{says}"):
            Weights.read(tmp_path / "w.npz")


@pytest.mark.parametrize(
    "wrong",
    [
        {"data_offsets": [0]},
        {"data_offsets": ["0", 8]},
        {"shape": [-2]},
        {"shape": "ab"},
        {"shape": None},
        {"dtype": "F16"},
    ],
)
def test_an_inconsistent_header_is_refused(wrong, tmp_path):
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | wrong}).encode()
    path = tmp_path / "w.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(eg.PatchError, match=r"not a safetensors file|is damaged"):
        Weights.read(path)


@pytest.mark.skipif(not hasattr(mmap, "MADV_DONTNEED"), reason="needs madvise")
def test_only_the_named_elements_are_unloaded(tmp_path):
    path, count = tmp_path / "w.safetensors", 2**16
    Weights({"w": FileTensor.of(np.ones(count, np.float32))}).write(path)
    ranges = []

    class NotedFile(mmap.mmap):
        def madvise(self, *advice):
            ranges.append(advice)
            super().madvise(*advice)

    tensor = Weights.read(path).tensors["w"]
    with path.open("rb") as file:
        tensor.file = NotedFile(file.fileno(), 0, access=mmap.ACCESS_READ)
    tensor.unload(count // 4, count // 2)
    tensor.unload(count // 2, 2 * count)
    tensor.unload()
    (_, first, length), (_, second, rest), (_, whole, size) = ranges
    assert first <= tensor.start + count < first + mmap.PAGESIZE
    assert first % mmap.PAGESIZE == 0
    assert first + length == tensor.start + 2 * count
    assert second + rest == whole + size == path.stat().st_size
    assert whole == 0
    assert (tensor.read()[:, 3] == 63).all()
