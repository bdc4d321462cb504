"""Patches compose, invert, merge and part by laws that hold to the bit."""

import copy
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import elementgrad as eg
from elementgrad._train.fingerprint import sample_positions
from elementgrad._train.patch import Patch
from tests.support.made import counts

SHAPES = {"a": (), "b": (7,), "c": (40, 5), "d": (3, 4, 2)}
DTYPES = ("float32", "float16", "complex64", "int16")


@st.composite
def states(draw, number):
    """So many states of the same tensors, with few values, so that they often agree; NaNs and -0.0 among them."""
    dtypes = {name: draw(st.sampled_from(DTYPES)) for name in SHAPES}
    seeds = draw(st.lists(st.integers(0, 3), min_size=number, max_size=number))
    made = []
    for at, seed in enumerate(seeds):
        random = np.random.default_rng([seed, draw(st.integers(0, 1)) * at])
        values = np.array([0.0, -0.0, 1.0, np.nan, 2.0])
        state = {}
        for name, shape in SHAPES.items():
            with np.errstate(invalid="ignore"):
                array = np.array(random.choice(values, shape)).astype(dtypes[name])
            keep = random.random(shape) < 0.5
            before = made[-1][name] if made else array
            state[name] = np.where(keep, before, array).astype(dtypes[name])
        made.append(state)
    return made


def same(one, other):
    return all(one[name].tobytes() == other[name].tobytes() for name in SHAPES)


def does(patch):
    """All of a patch but by what it knows the tensors."""
    return [(each.name, each.indices.tolist(), each.values, each.originals) for each in patch.entries]


@settings(max_examples=counts(60), deadline=None)
@given(states(4))
def test_patches_compose_to_the_bit(made):
    a, b, c, d = made
    p, q, r = eg.diff(a, b), eg.diff(b, c), eg.diff(c, d)
    assert same(eg.apply(a, p), b)
    both = p.then(q)
    assert same(eg.apply(a, both), c)
    assert p.then(q).then(r) == p.then(q.then(r))
    assert same(eg.apply(a, p.then(q).then(r)), d)
    assert p.then(p.inverse()).size == 0
    assert p.inverse().then(p).size == 0
    assert same(eg.apply(b, p.inverse()), a)
    assert same(eg.apply(c, both.inverse()), a)
    assert same(eg.apply(b, p.inverse().then(both)), c)
    assert p.inverse().inverse() == p.then(Patch(()))
    assert does(q.inverse().then(p.inverse())) == does(both.inverse())


def test_patches_of_every_kind_come_back_from_a_file(tmp_path):
    @settings(max_examples=counts(30), deadline=None)
    @given(states(3))
    def holds(made):
        a, b, c = made
        for patch in (eg.diff(a, b).inverse(), eg.diff(a, b).inverse().then(eg.diff(a, c))):
            patch.write(tmp_path / "p")
            assert eg.inspect(tmp_path / "p") == patch

    holds()


@settings(max_examples=counts(60), deadline=None)
@given(states(3))
def test_merged_patches_contain_all_changes(made):
    a, b, c = made
    p, q = eg.diff(a, b), eg.diff(a, c)
    conflicts = p.conflicts(q)
    assert len(conflicts) == len(list(conflicts)) == len(repr(conflicts).splitlines()) - 1
    expected = 0
    for name in SHAPES:
        x, y, z = (
            np.frombuffer(np.array(each[name]).tobytes(), np.uint8).reshape(each[name].size, -1) for each in made
        )
        expected += ((x != y).any(1) & (x != z).any(1) & (y != z).any(1)).sum()
    assert len(conflicts) == expected
    if expected:
        with pytest.raises(eg.PatchError, match=f"{expected} elements are changed to different values, such as"):
            eg.merge([p, q])
    first, last = (eg.apply(a, eg.merge([p, q], on_conflict=rule)) for rule in ("first", "last"))
    for name in SHAPES:
        x, y, z = (np.atleast_1d(each[name]) for each in made)
        moved = [_moved(x, each) for each in (y, z)]
        assert np.where(moved[0], y, np.where(moved[1], z, x)).tobytes() == np.atleast_1d(first[name]).tobytes()
        assert np.where(moved[1], z, np.where(moved[0], y, x)).tobytes() == np.atleast_1d(last[name]).tobytes()
    assert eg.merge([q, p], on_conflict="last") == eg.merge([p, q], on_conflict="first")


def _moved(x, y):
    width = x.dtype.itemsize
    rows = [np.frombuffer(each.tobytes(), np.uint8).reshape(each.size, width) for each in (x, y)]
    return (rows[0] != rows[1]).any(1).reshape(x.shape)


def test_a_function_decides_about_conflicts():
    a, b, c = ({"w": torch.tensor(x).bfloat16()} for x in ([1.0, 2, 3, 4], [1.0, 5, 3, 6], [1.0, 7, 8, 6]))
    merged = eg.merge([eg.diff(a, b), eg.diff(a, c)], on_conflict=np.maximum)
    assert eg.apply(a, merged)["w"].tolist() == [1, 7, 8, 6]
    with pytest.raises(eg.OptionError, match=r"on_conflict gave \(\) values for \(1,\) elements of w"):
        eg.merge([eg.diff(a, b), eg.diff(a, c)], on_conflict=lambda one, other: 1.0)
    with pytest.raises(eg.OptionError, match="on_conflict='best' is none of"):
        eg.merge([], on_conflict="best")
    with pytest.raises(eg.OptionError, match="str is not a patch"):
        eg.merge(["p.safetensors"])
    assert eg.merge([]).size == 0


def test_patches_that_do_not_follow_each_other_are_refused():
    a, b, c = ({"w": np.float32(x)} for x in ([1, 2, 3], [1, 5, 6], [9, 9, 9]))
    with pytest.raises(eg.PatchError, match=r"does not fit what the first leaves: w\[1\] is another value there"):
        eg.diff(a, b).then(eg.diff(a, c))
    with pytest.raises(eg.PatchError, match="made for two tensors that were called w"):
        eg.merge([eg.diff(a, b), eg.diff(b, a)], on_conflict="last")
    other = eg.diff({"w": np.zeros(3)}, {"w": np.ones(3)})
    for combine in (Patch.then, Patch.conflicts, lambda one, other: eg.merge([one, other])):
        with pytest.raises(eg.PatchError, match=r"w is float32 of shape \(3,\) in the one patch and float64"):
            combine(eg.diff(a, b), other)
    without = eg.diff(a, b, originals=False)
    for use in (Patch.inverse, lambda patch: patch.then(patch), lambda patch: patch.restricted("w[1]")):
        with pytest.raises(eg.PatchError, match=r"has only a checksum of the originals, and .* needs them"):
            use(without)
    assert len(without.conflicts(eg.diff(a, c))) == 2


def test_parts_of_a_patch(tmp_path):
    a = {"w": np.zeros((20, 10), np.float32), "b": np.zeros(3, np.float32)}
    patch = eg.diff(a, {name: array + 1 for name, array in a.items()})
    for places, size in (
        ("w", 200),
        ("w[3]", 10),
        (["w[3]", "w[:, 0]", "b[1]"], 30),
        (eg.at("b")[:2], 2),
        ("x", 0),
        ([], 0),
    ):
        part = patch.restricted(places)
        assert part.size == size
        part.write(tmp_path / "p")
        new = eg.apply(a, tmp_path / "p")
        assert sum(array.sum() for array in new.values()) == size
    with pytest.raises(eg.OptionError, match="names no tensor; write its name in front"):
        patch.restricted("[3]")
    with pytest.raises(eg.SelectionError, match="out of range"):
        patch.restricted("b[7]")


def test_trained_patches_compose_too(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Linear(30, 20).bfloat16()
    before = copy.deepcopy(model)
    elements = eg.trainable(model, ["weight[3]", "weight[5, ::2]"])
    with torch.no_grad():
        for leaf in elements.parameters():
            leaf.add_(0.123456)
    elements.save(tmp_path / "p")
    patch = eg.inspect(tmp_path / "p")
    eg.apply(model_after := copy.deepcopy(before), patch)
    eg.apply(model_after, patch.inverse())
    assert eg.diff(model_after, before).size == 0
    assert patch.then(patch.inverse()).size == 0


def test_patches_of_a_model_are_listed_switched_off_and_on():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
    plain = copy.deepcopy(model)
    names = list(model.state_dict())
    one = {name: tensor + (name == "0.weight") for name, tensor in plain.state_dict().items()}
    two = {name: tensor * (2 if name == "1.bias" else 1) for name, tensor in plain.state_dict().items()}
    assert names[0] == "0.weight"
    p, q = eg.diff(plain, one), eg.diff(plain, two)
    eg.apply(model, p)
    eg.apply(model, q)
    three = {name: tensor - 1 for name, tensor in model.state_dict().items()}
    eg.apply(model, eg.diff(model, three))
    first, second, third = eg.patches(model)
    assert [each.size for each in (first, second, third)] == [64, 2, 64 + 8 + 16 + 2]
    assert [str(place) for place in second.places] == ["1.bias"]
    with pytest.raises(
        eg.PatchError, match=r"0\.weight was changed after 0\.weight and is over it; undo that one first"
    ):
        first.undo()
    third.undo()
    first.undo()
    assert eg.diff(model, two).size == 0
    assert [each.size for each in eg.patches(model)] == [2]
    with pytest.raises(eg.PatchError, match="was written to in the meantime; apply the patch again"):
        third.redo()
    first.redo()
    first.redo()
    third.redo()
    assert eg.diff(model, three).size == 0
    assert [each.size for each in eg.patches(model)] == [2, 64, 90]
    for each in reversed(eg.patches(model)):
        each.undo()
    assert eg.diff(model, plain).size == 0
    assert eg.patches(model) == []


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_with_takes_a_patch_back_also_after_an_error(error):
    model = torch.nn.Linear(3, 2)
    plain = copy.deepcopy(model)
    patch = eg.diff(model, {name: tensor + 1 for name, tensor in model.state_dict().items()})
    with nullcontext() if error is None else pytest.raises(error), eg.apply(model, patch) as elements:
        assert elements.size == 8
        assert eg.diff(model, plain).size == 8
        if error is not None:
            raise error
    assert eg.diff(model, plain).size == 0
    trained = eg.trainable(model, "bias")
    with pytest.raises(eg.PlaceError, match="these elements train; `with` is for patches"), trained:
        pass
    trained.release()


def test_a_patch_fits_the_model_that_it_was_made_for_whatever_was_applied_before():
    torch.manual_seed(0)
    a = torch.nn.Linear(10, 10)
    b, c = copy.deepcopy(a), copy.deepcopy(a)
    with torch.no_grad():
        b.weight += 1
        c.weight += 2
    model = copy.deepcopy(a)
    p, q = eg.diff(a, b), eg.diff(b, c)
    below = eg.apply(model, p)
    above = eg.apply(model, q)  # overlaps, and was made for just this
    assert eg.diff(model, c).size == 0
    with pytest.raises(eg.PatchError, match="overlaps"):
        eg.apply(model, p)
    above.undo()
    below.undo()
    assert eg.diff(model, a).size == 0


def test_a_second_patch_of_another_tensor_is_refused_though_they_share_no_elements():
    base, other = {"w": np.zeros(10_000, np.float32)}, {"w": np.ones(10_000, np.float32)}
    at = np.setdiff1d(np.arange(10_000), sample_positions((10_000,)))[:2]

    def changed(weights, position):
        new = weights["w"].copy()
        new[position] += 1
        return eg.diff(weights, {"w": new})

    p = changed(base, at[0])
    after = eg.apply(base, p)
    assert p.then(changed(after, at[1])).size == 2
    with pytest.raises(eg.PatchError, match="it was made for another tensor that was called w"):
        p.then(changed(other, at[1]))
