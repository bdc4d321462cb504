"""`eg.diff` finds every bit that differs, between weights of all kinds, and `eg.apply` of it gives the other ones."""

import copy
import json
import math

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.torch import save_file

import elementgrad as eg
from elementgrad._train.diff import changed_positions
from elementgrad._train.weights import Weights
from tests.support.made import counts

DTYPES = ("float32", "float16", "float64", "complex64", "complex128", "int8", "int64", "bool")


@pytest.fixture
def models():
    torch.manual_seed(0)
    before = torch.nn.Sequential(torch.nn.Embedding(60, 8), torch.nn.Linear(8, 4)).bfloat16()
    after = copy.deepcopy(before)
    with torch.no_grad():
        after[0].weight.view(-1)[::3] *= 2
        after[1].weight[2] += 1
        after[1].bias[1] = math.nan
    return before, after


def bits(state):
    return {name: np.asarray(tensor.contiguous().view(torch.uint8)).tobytes() for name, tensor in state.items()}


def sharded(folder, state, shards=2):
    """A folder with shards and an index, as Hugging Face writes it."""
    folder.mkdir()
    names = list(state)
    files = {name: f"model-{at % shards + 1:05}-of-{shards:05}.safetensors" for at, name in enumerate(names)}
    for file in dict.fromkeys(files.values()):
        save_file(
            {name: state[name] for name in names if files[name] == file}, folder / file, metadata={"format": "pt"}
        )
    index = {"metadata": {"total_size": 1}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text("{}")
    return folder


def forms(model, path):
    """The weights of a model in every form that PyTorch has."""
    state = model.state_dict()
    save_file(state, path.with_suffix(".safetensors"))
    return [model, state, path.with_suffix(".safetensors"), str(sharded(path, state))]


def test_weights_of_every_form_have_the_same_difference(models, tmp_path):
    before, after = forms(models[0], tmp_path / "before"), forms(models[1], tmp_path / "after")
    patches = [eg.diff(old, new) for old in before for new in after]
    first = patches[0]
    assert (first.size, len(first.entries)) == (160 + 8 + 1, 3)
    assert [entry.place for entry in first.entries][1:] == ["1.weight[2]", "1.bias[1]"]
    for patch in patches:
        for one, other in zip(
            *(sorted(each.entries, key=lambda entry: entry.name) for each in (patch, first)), strict=True
        ):
            assert (one.name, one.shape, one.dtype, one.fingerprint) == (
                other.name,
                other.shape,
                other.dtype,
                other.fingerprint,
            )
            assert (one.values, one.originals) == (other.values, other.originals)
            assert np.array_equal(one.indices, other.indices)


@pytest.mark.parametrize("originals", [True, False])
def test_a_difference_makes_the_one_of_the_other_and_back(models, tmp_path, originals):
    before, after = models
    eg.diff(before, after, tmp_path / "p", originals=originals)
    model = copy.deepcopy(before)
    applied = eg.apply(model, tmp_path / "p")
    assert bits(model.state_dict()) == bits(after.state_dict())
    with pytest.raises(eg.PatchError, match=r"overlaps|is not the tensor that the patch was made for"):
        eg.apply(model, tmp_path / "p")
    with pytest.raises(eg.PatchError, match="is not the tensor that the patch was made for"):
        eg.apply(copy.deepcopy(after), tmp_path / "p")  # a second time, without a history
    applied.undo()
    assert bits(model.state_dict()) == bits(before.state_dict())
    assert eg.diff(before, model).size == 0


def test_a_patch_without_originals_trains_further(models, tmp_path):
    before, after = models
    eg.diff(before, after, tmp_path / "p.safetensors", originals=False)
    elements = eg.trainable(before, tmp_path / "p.safetensors")
    assert bits(before.state_dict()) == bits(after.state_dict())
    elements.undo()
    assert eg.diff(before, after).size == 169
    elements.release()


@st.composite
def two_arrays(draw):
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5))
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    raw = [draw(st.binary(min_size=nbytes, max_size=nbytes)) for _ in range(2)]
    if dtype == "bool":
        raw = [bytes(byte & 1 for byte in each) for each in raw]
    old, new = (np.frombuffer(each, dtype).reshape(shape) for each in raw)
    keep = draw(hnp.arrays(bool, shape))
    return np.array(old), np.where(keep, old, new).astype(dtype)


def test_every_bit_counts_for_arrays_of_any_dtype(tmp_path):
    @settings(max_examples=counts(150))
    @given(two_arrays())
    def holds(arrays):
        before, after = ({"w": array} for array in arrays)
        patch = eg.diff(before, after)
        rows = [
            np.frombuffer(array.tobytes(), np.uint8).reshape(array.size, -1 if array.size else 1) for array in arrays
        ]
        assert patch.size == (rows[0] != rows[1]).any(1).sum()
        patch.write(tmp_path / "p")
        assert eg.inspect(tmp_path / "p") == patch

    holds()


def test_signed_zeros_and_payloads_of_nans_count():
    quiet, other = np.uint32([0x7FC00000]).view(np.float32), np.uint32([0x7FC00001]).view(np.float32)
    before = {"w": np.concatenate([np.float32([0.0, 1.0]), quiet, quiet])}
    after = {"w": np.concatenate([np.float32([-0.0, 1.0]), quiet, other])}
    assert eg.diff(before, after).entries[0].indices.tolist() == [0, 3]


def test_changes_in_every_chunk_are_found(monkeypatch):
    monkeypatch.setattr("elementgrad._train.diff.CHUNK", 7)
    old = np.zeros((100, 2), np.uint8)
    new = old.copy()
    new[[0, 6, 7, 55, 99], 1] = 1
    assert changed_positions(old, new).tolist() == [0, 6, 7, 55, 99]


def test_tensors_that_do_not_correspond_are_listed_or_left_out():
    before = {"gone": np.zeros(2), "shape": np.zeros(2), "dtype": np.zeros(2), "w": np.zeros(2)}
    after = {"new": np.zeros(2), "shape": np.zeros(3), "dtype": np.zeros(2, np.float32), "w": np.ones(2)}
    with pytest.raises(
        eg.PatchError, match=r"4 tensors .* gone \(gone\), shape \(float64 of .*new \(new\); only_common"
    ):
        eg.diff(before, after)
    with pytest.warns(eg.ElementgradWarning, match="4 tensors are not the same in both and are left out"):
        assert [entry.name for entry in eg.diff(before, after, only_common=True).entries] == ["w"]


def test_buffers_of_models_are_said_and_compared_in_state_dicts():
    before = torch.nn.BatchNorm1d(3)
    after = copy.deepcopy(before)
    after(torch.ones(4, 3))
    with pytest.raises(eg.PatchError, match=r"running_mean.* are buffers of the model and differ"):
        eg.diff(before, after)
    with pytest.warns(eg.ElementgradWarning, match="left out, as they are buffers"):
        assert eg.diff(before, after, only_common=True).size == 0
    patch = eg.diff(before.state_dict(), after.state_dict())
    assert [entry.name for entry in patch.entries] == ["running_mean", "running_var", "num_batches_tracked"]


def test_tied_tensors_are_compared_once_by_any_of_their_names():
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Embedding(5, 3)
            self.head = torch.nn.Linear(3, 5, bias=False)
            self.head.weight = self.table.weight

    before, after = Tied(), Tied()
    patch = eg.diff(before, after)
    assert [(entry.name, entry.tied) for entry in patch.entries] == [("table.weight", ("head.weight",))]
    assert eg.diff(before, {"head.weight": after.head.weight.detach()}).size == 15


def test_pytrees_of_jax_and_models_of_keras_differ_too():
    keras = pytest.importorskip("keras")
    before = {"dense": {"kernel": jnp.ones((2, 3), jnp.bfloat16)}, "count": jnp.array(1)}
    after = {"dense": {"kernel": before["dense"]["kernel"].at[1, 2].set(5)}, "count": jnp.array(1)}
    patch = eg.diff(before, after)
    assert [entry.place for entry in patch.entries] == ["dense.kernel[1, 2]"]
    merged = eg.apply(before, patch).merge()
    assert (merged["dense"]["kernel"] == after["dense"]["kernel"]).all()
    layers = [keras.Sequential([keras.Input((2,)), keras.layers.Dense(3, name="fc")]) for _ in range(2)]
    patch = eg.diff(*layers)
    assert [entry.name for entry in patch.entries] == ["fc/kernel"]
    eg.apply(layers[0], patch)
    assert eg.diff(*layers).size == 0


def test_files_without_weights_are_refused(tmp_path):
    with pytest.raises(eg.FrameworkError, match="after=int holds no weights; give a model, a state dict"):
        eg.diff({}, 5)
    with pytest.raises(eg.OptionError, match=r"a\.step is int, and weights are tensors or arrays"):
        eg.diff({}, {"a": {"step": 5}})
    with pytest.raises(eg.PatchError, match=r"weights\.bin is not a file of weights; give a .safetensors or .npz file"):
        eg.diff({}, tmp_path / "weights.bin")
    with pytest.raises(eg.OptionError, match="is a directory; give the name of a file"):
        eg.diff({}, {}, tmp_path)


def test_a_file_is_not_loaded_to_be_compared(tmp_path):
    """A sparse file of a terabyte: only the header and the pages that are needed are read."""
    head = {"big": {"dtype": "F32", "shape": [1 << 38], "data_offsets": [0, 1 << 40]}}
    head["small"] = {"dtype": "F32", "shape": [1], "data_offsets": [1 << 40, (1 << 40) + 4]}
    text = json.dumps(head).encode()
    (tmp_path / "w.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    with open(tmp_path / "w.safetensors", "r+b") as file:
        file.truncate(8 + len(text) + (1 << 40) + 4)
    weights = Weights.read(tmp_path / "w.safetensors")
    with pytest.warns(eg.ElementgradWarning, match=r"big \(gone\)"):
        assert eg.diff(weights, {"small": np.float32([3])}, only_common=True).size == 1


def test_a_model_is_compared_with_a_state_dict_that_lacks_a_buffer():
    model = torch.nn.Linear(3, 2)
    model.register_buffer("positions", torch.arange(3), persistent=False)
    moved = {name: tensor + 1 for name, tensor in model.state_dict().items()}
    assert eg.diff(model, moved).size == 8


def test_an_empty_tensor_at_the_end_of_a_page_is_compared(tmp_path):
    paths = []
    for number in (0, 1):
        tensors = {"a": ([4], [0, 16]), "z": ([0], [16, 16])}
        meta = {name: {"dtype": "F32", "shape": size, "data_offsets": at} for name, (size, at) in tensors.items()}
        header = json.dumps(meta).encode()
        header = header.ljust(4096 - 8 - 16)
        paths.append(tmp_path / f"{number}.safetensors")
        values = np.full(4, number, np.float32).tobytes()
        paths[-1].write_bytes(len(header).to_bytes(8, "little") + header + values)
    assert eg.diff(*paths).size == 4
