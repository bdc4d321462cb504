"""A patch goes from any framework to any other through a map of names and axes, and back, to the bit."""

import json
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import elementgrad as eg
from elementgrad._train.bits import BitArray
from elementgrad._train.entries import Entry, map_entries
from elementgrad._train.folder import read_weights
from elementgrad._train.weights import FileTensor, Weights
from tests.support.homes import HOMES, map_of, trained


def assert_same(found, expected):
    for key, x in found.items():
        np.testing.assert_array_equal(x, expected[key], err_msg=key)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("one", "other"), list(permutations(HOMES, 2)))
def test_a_patch_goes_there_and_back(one, other, dtype, tmp_path):
    one, other = HOMES[one], HOMES[other]
    first, second = tmp_path / "first.safetensors", tmp_path / "second.safetensors"
    there, back = map_of(one, other), map_of(other, one)
    values = trained(one, first, dtype, full=True)

    away = other.make(dtype)
    before = other.tensors(away)
    assert any((values[key] != x).any() for key, x in before.items())
    applied = eg.apply(away, first, names=there)
    assert_same(other.tensors(away, applied), values)
    assert [place.name for place in applied.places] == [other.names[key] for key in other.names]
    applied.save(second)
    applied.undo()
    assert_same(other.tensors(away, applied), before)

    home = one.make(dtype)
    returned = eg.apply(home, second, names=back)
    assert_same(one.tensors(home, returned), values)
    returned.undo()
    assert_same(one.tensors(home, returned), before)
    for entry, again in zip(eg.inspect(first).entries, map_entries(eg.inspect(second).entries, back), strict=True):
        order, after = np.argsort(entry.indices), np.argsort(again.entry.indices)
        assert entry.values.dtype == again.entry.values.dtype == "float32"  # masters of half precision too
        np.testing.assert_array_equal(entry.values.bits[order], again.entry.values.bits[after])

    resumed = eg.trainable(away, first, names=there)
    resumed.save(second)
    expected = [entry.entry.values for entry in map_entries(eg.inspect(first).entries, there)]
    assert [entry.values for entry in eg.inspect(second).entries] == expected
    other.move(resumed)
    resumed.undo()
    assert_same(other.tensors(away, resumed), before)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("one", "other"), [("torch", "keras"), ("keras", "jax"), ("jax", "torch")])
def test_a_patch_goes_into_the_shards_of_another_framework(one, other, dtype, tmp_path):
    one, other = HOMES[one], HOMES[other]
    values = trained(one, tmp_path / "patch.safetensors", dtype, full=True)
    held = other.held(other.make(dtype))
    folder, shards = tmp_path / "checkpoint", {}
    folder.mkdir()
    for number, (key, name) in enumerate(other.names.items()):
        shards[name] = f"model-{number + 1:05}-of-00004.safetensors"
        bits = np.ascontiguousarray(held[key]).view(np.uint8).reshape(held[key].size, -1)
        Weights({name: FileTensor(dtype, held[key].shape, bits)}).write(folder / shards[name])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))

    eg.apply(folder, tmp_path / "patch.safetensors", names=map_of(one, other))
    model = other.make(dtype)
    in_memory = eg.apply(model, tmp_path / "patch.safetensors", names=map_of(one, other))
    assert_same(other.tensors(model, in_memory), values)
    memory = in_memory.merge() if isinstance(model, dict) else model
    for key, name in other.names.items():
        on_disk = read_weights(folder).tensors[name].read()
        assert on_disk.tobytes() == np.ascontiguousarray(other.held(memory)[key]).tobytes()


def test_the_same_elements_train_to_the_same_values_everywhere():
    ends = {}
    for name, home in HOMES.items():
        model = home.make("float32")
        before = home.tensors(model)
        elements = eg.trainable(model, home.places)
        home.descend(model, elements, 20)
        ends[name] = {key: x.view(np.float32) for key, x in home.tensors(model, elements).items()}
        moved = {key: int((x.view(np.int32) != before[key]).sum()) for key, x in ends[name].items()}
        assert moved == {"table": 4, "fc": 4, "bias": 3, "conv": 9}
    for name in ("keras", "jax"):
        for key, x in ends[name].items():
            np.testing.assert_allclose(x, ends["torch"][key], rtol=0, atol=1e-5, err_msg=f"{name} {key}")


@pytest.fixture
def patch(tmp_path):
    path = tmp_path / "patch.safetensors"
    trained(HOMES["torch"], path)
    return path


GOOD = map_of(HOMES["torch"], HOMES["jax"])
WRONG = {
    "no map": (["fc.weight"], eg.OptionError, "is not a dict; give one from names in the patch"),
    "an unknown key": ({"fc.wieght": "x"}, eg.OptionError, "the patch holds no 'fc.wieght'.*nearest: fc.weight"),
    "an unknown name": (
        {**GOOD, "fc.bias": "fc.bais"},
        eg.PatchError,
        "no parameter named 'fc.bais'; nearest: fc.bias",
    ),
    "left out": ({}, eg.PatchError, "no parameter named 'table.weight'.*; names= says what it is called here"),
    "a number": ({**GOOD, "fc.bias": 3}, eg.OptionError, r"maps 'fc.bias' to 3; give its name here, or the name and"),
    "no axes": ({**GOOD, "fc.weight": ("fc.kernel", "T")}, eg.OptionError, r"such as \('dense/kernel', \(1, 0\)\)"),
    "axes twice": (
        {**GOOD, "fc.weight": ("fc.kernel", (1, 1))},
        eg.OptionError,
        r"the axes \(1, 1\), and it has 2; name",
    ),
    "not turned": (
        {**GOOD, "fc.weight": "fc.kernel"},
        eg.PatchError,
        r"as float32 of shape \(3, 4\), and here fc.kernel is float32 of shape \(4, 3\); names= takes the order",
    ),
    "wrongly turned": (
        {**GOOD, "conv.weight": ("conv.kernel", (3, 2, 1, 0))},
        eg.PatchError,
        r"which axes \(3, 2, 1, 0\) make \(3, 3, 2, 4\), and here conv.kernel is",
    ),
    "turned, and it fits": (
        {**GOOD, "conv.weight": ("conv.kernel", (1, 0, 3, 2))},
        eg.PatchError,
        "conv.kernel is not the tensor.*has other values there.*, and the right order of axes",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_map_is_refused(patch, case):
    names, error, message = WRONG[case]
    for verb in (eg.apply, eg.trainable):
        with pytest.raises(error, match=message) as raised:
            verb(HOMES["jax"].make("float32"), patch, names=names)
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize("home", ["torch", "keras"])
def test_a_wrong_map_leaves_the_model_as_it_is(patch, home):
    home = HOMES[home]
    model = home.make("float32")
    names = {**map_of(HOMES["torch"], home), "conv.weight": (home.names["conv"], (0, 1, 3, 2))}
    with pytest.raises(eg.PatchError):
        eg.apply(model, patch, names=names)
    assert_same(home.tensors(model), home.tensors(home.make("float32")))


def test_patches_through_maps_compose_and_are_known_by_what_was_before(tmp_path, patch):
    torch, keras = HOMES["torch"], HOMES["keras"]
    other = tmp_path / "other.safetensors"
    elements = eg.trainable(torch.make("float32"), ["fc.weight[0]", "table.weight[:3]"])
    torch.move(elements)
    elements.save(other, full=True)
    names = map_of(torch, keras)
    model = keras.make("float32")
    few = {name: names[name] for name in ("fc.weight", "table.weight")}
    first, second = eg.apply(model, patch, names=names), eg.apply(model, other, names=few)
    with pytest.raises(eg.PatchError, match=r"fc/kernel\[:, 0\] overlaps fc/kernel\[:, 0\], which was changed before"):
        eg.apply(model, other, names=few)
    first.undo()
    second.undo()
    assert_same(keras.tensors(model), torch.tensors(torch.make("float32")))


@given(st.data())
def test_mapped_places_name_the_same_elements(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    axes = tuple(data.draw(st.permutations(range(len(shape)))))
    x = np.arange(np.prod(shape)).reshape(shape)
    items = [
        data.draw(
            st.one_of(
                st.integers(-size, size - 1),
                st.sampled_from([slice(None), slice(None, None, -1), slice(0, 1)]),
                st.just([size - 1, 0] if size > 1 else [0]),
            )
        )
        for size in shape
    ]
    place = eg.at("a")[tuple(items[: data.draw(st.integers(0, len(items)))])]
    try:
        indices = place.select(shape).flat().reshape(-1)
    except eg.SelectionError:
        return  # arrays of two lengths
    values = BitArray.of(indices.astype(np.float32))
    patch = eg.Patch((Entry(str(place), "a", shape, "float32", indices, values, values, "sample:"),))
    (one,) = map_entries(patch.entries, {"a": ("b", axes)})
    turned = x.transpose(axes).reshape(-1)
    assert one.entry.shape == x.transpose(axes).shape
    assert turned[one.entry.indices].tolist() == one.entry.values.floats().tolist()
    assert sorted(turned[one.entry.indices]) == sorted(indices)
    np.testing.assert_array_equal(turned[one.to_model(np.arange(x.size))], np.arange(x.size))
    np.testing.assert_array_equal(one.to_source(np.arange(x.size)), turned)
    (again,) = map_entries([one.entry], {"b": ("a", tuple(np.argsort(axes)))})
    assert sorted(again.entry.indices) == sorted(indices)
    assert again.entry.values.floats().tolist() == again.entry.indices.tolist()
