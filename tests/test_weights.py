"""Weights in files: read, patched and written by their bytes."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import elementgrad as eg
from elementgrad.train.numbers import Numbers
from elementgrad.train.reversal import reversal
from elementgrad.train.weights import Weights


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_numbers_are_rounded_as_the_framework_rounds_them(dtype):
    bits = torch.randint(-(2**31), 2**31, (20_000,), generator=torch.Generator().manual_seed(0)).int()
    ties = torch.arange(0, 2**31, 2**15).int()[:60_000:7]
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), 3.5e38, 65519.0, 65520.0, 1e-45]).view(torch.int32)
    values = torch.cat([bits, ties, special]).view(torch.float32)
    values = values[~values.isnan()]
    rounded = Numbers.of(values.numpy()).rounded(dtype)
    assert rounded == Numbers(dtype, values.to(getattr(torch, dtype)).view(torch.uint8).numpy().reshape(-1, 2))
    assert np.isnan(Numbers.of(np.float32([np.nan])).rounded(dtype).floats()).all()


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
    eg.apply(again, reversal(again, [eg.inspect(tmp_path / "p.safetensors")]))
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
    for use in (eg.apply, lambda weights, patch: reversal(weights, [patch])):
        with pytest.raises(eg.PatchError, match=r"the patch is for weight as float32 of shape \(3, 4\)"):
            use(other, patch)
    with pytest.raises(eg.PatchError, match="no tensor named 'weight'; there are: ids"):
        eg.apply(Weights({"ids": other.tensors["ids"]}), patch)
    with pytest.raises(eg.FrameworkError, match="weights in a file do not train"):
        eg.trainable(other, "weight[0, 0]")
    with pytest.raises(eg.DtypeError, match="ids is int64, and only floats are patched"):
        eg.trainable(other, "ids[0]")
    held = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    held["weight"] = held["weight"].copy()
    held["weight"][2, 3] += 1.0
    np.savez(tmp_path / "near.npz", **held)
    with pytest.raises(eg.PatchError, match="other elements of it differ"):
        reversal(Weights.read(tmp_path / "near.npz"), [patch])


def test_damaged_files_are_no_weights(tmp_path):
    path = tmp_path / "w.safetensors"
    save_file({"w": torch.ones(4)}, path)
    whole = path.read_bytes()
    head = json.dumps({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 99]}}).encode()
    for content in (b"", whole[:5], whole[:20], b"\xff" * 16, len(head).to_bytes(8, "little") + head + bytes(16)):
        path.write_bytes(content)
        with pytest.raises(eg.PatchError, match=r"no safetensors file|is damaged"):
            Weights.read(path)
    (tmp_path / "w.npz").write_bytes(b"text")
    with pytest.raises(eg.PatchError, match="holds no weights"):
        Weights.read(tmp_path / "w.npz")


@pytest.mark.parametrize(
    "wrong", [{"data_offsets": [0]}, {"data_offsets": ["0", 8]}, {"shape": [-2]}, {"shape": "ab"}, {"shape": None}]
)
def test_a_header_that_says_nothing_of_use_is_no_weights(wrong, tmp_path):
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | wrong}).encode()
    path = tmp_path / "w.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(eg.PatchError, match=r"no safetensors file|is damaged"):
        Weights.read(path)
