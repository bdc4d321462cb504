"""Patches in models: applied, taken back, composed, refused; the model is never left half changed."""

import copy
import os
from dataclasses import replace

import pytest
import torch
from torch import nn

import elementgrad as eg
from elementgrad._train.weights import FileTensor, Weights

PLACES = ["0.weight[3]", "1.weight[2, [0, 5]]", "1.bias"]


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(100, 8), nn.Linear(8, 4))


def trained(model, places, path, value=0.5, dtype=None, full=False):
    elements = eg.trainable(model, places, dtype=dtype)
    with torch.no_grad():
        for leaf in elements.parameters():
            leaf.add_(value)
    elements.save(path, full=full)
    return elements


def assert_same(one, other):
    for (name, tensor), expected in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(tensor.view(torch.int32), expected.view(torch.int32)), name


@pytest.fixture
def patch(model, tmp_path):
    """A patch made with a copy of the model."""
    path = tmp_path / "patch.safetensors"
    trained(copy.deepcopy(model), PLACES, path)
    return path


def test_apply_leaves_a_plain_model_with_the_values(model, tmp_path):
    plain = copy.deepcopy(model)
    path = tmp_path / "patch.safetensors"
    trained(model, PLACES, path)
    before = copy.deepcopy(plain)
    applied = eg.apply(plain, path)
    assert type(plain[1]) is nn.Linear
    assert all(parameter.requires_grad for parameter in plain.parameters())
    assert_same(plain, model)
    assert [str(place) for place in applied.places] == PLACES
    assert not applied.training
    applied.undo()
    assert_same(plain, before)
    applied.undo()
    assert_same(plain, before)


def test_a_patch_is_refused_where_it_is_applied_already(model, patch):
    eg.apply(model, patch)
    before = copy.deepcopy(model)
    with pytest.raises(eg.PatchError, match="which was changed before; undo that first, or give overwrite=True"):
        eg.apply(model, patch)
    assert_same(model, before)


def test_disjoint_patches_compose_in_either_order(model, tmp_path):
    first, second = tmp_path / "first.safetensors", tmp_path / "second.safetensors"
    trained(copy.deepcopy(model), "0.weight[:50]", first)
    trained(copy.deepcopy(model), "0.weight[50:]", second, value=2.0)
    ways = []
    for order in ((first, second), (second, first)):
        other = copy.deepcopy(model)
        applied = [eg.apply(other, path) for path in order]
        ways.append(copy.deepcopy(other))
        applied[0].undo()  # in the other order too
        applied[1].undo()
        assert_same(other, model)
    assert_same(*ways)


def test_a_patch_made_beside_another_fits_the_model_without_it(model, tmp_path):
    first, second = tmp_path / "first.safetensors", tmp_path / "second.safetensors"
    other = copy.deepcopy(model)
    trained(other, "0.weight[:50]", first).release()
    trained(other, "0.weight[50:]", second, full=True)
    eg.apply(copy.deepcopy(model), second)
    eg.apply(model, first)
    eg.apply(model, second)
    assert_same(model, other)


def test_a_patch_applies_after_a_release_without_values(model, tmp_path):
    path = tmp_path / "patch.safetensors"
    elements = trained(model, "0.weight[3]", path)
    elements.undo()
    elements.release()
    eg.apply(model, path)
    with pytest.raises(eg.PatchError, match=r"0.weight\[3\] overlaps 0.weight\[3\], which was changed before"):
        eg.apply(model, path)


def test_overlapping_patches_need_an_option(model, tmp_path):
    first, second = tmp_path / "first.safetensors", tmp_path / "second.safetensors"
    before = copy.deepcopy(model)
    trained(copy.deepcopy(model), "0.weight[3]", first)
    trained(copy.deepcopy(model), "0.weight[3:5, 0]", second, value=2.0)
    one = eg.apply(model, first)
    between = copy.deepcopy(model)
    with pytest.raises(eg.PatchError, match=r"0.weight\[3:5, 0\] overlaps 0.weight\[3\]"):
        eg.apply(model, second)
    assert_same(model, between)
    other = eg.apply(model, second, overwrite=True)
    assert model[0].weight[3, 0].item() == pytest.approx(before[0].weight[3, 0].item() + 2)
    with pytest.raises(eg.PatchError, match="undo that one first"):
        one.undo()
    other.undo()
    assert_same(model, between)
    one.undo()
    assert_same(model, before)


def test_a_model_that_was_loaded_anew_is_patched_anew(model, patch):
    before = copy.deepcopy(model.state_dict())
    eg.apply(model, patch)
    model.load_state_dict(before)
    applied = eg.apply(model, patch)
    assert model[1].bias.tolist() == pytest.approx((before["1.bias"] + 0.5).tolist())
    applied.undo()


WRONG = {
    "another model": (lambda: nn.Sequential(nn.Embedding(100, 8), nn.Linear(8, 4)), "has other values there"),
    "another shape": (lambda: nn.Sequential(nn.Embedding(100, 9), nn.Linear(9, 4)), r"as float32 of shape \(100, 8\)"),
    "another dtype": (lambda: nn.Sequential(nn.Embedding(100, 8), nn.Linear(8, 4)).double(), "here it is float64"),
    "no such parameter": (lambda: nn.Linear(8, 4), "no parameter named '0.weight'"),
    "a layer of that name": (
        lambda: nn.Sequential(nn.Embedding(100, 8), nn.ModuleDict({"weight": nn.Linear(8, 4), "bias": nn.ReLU()})),
        "does not fit|has other values",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_models_are_refused_untouched(case, patch):
    make, says = WRONG[case]
    torch.manual_seed(1)
    model = make()
    before = copy.deepcopy(model.state_dict())
    for verb in (eg.apply, eg.trainable):
        with pytest.raises(eg.PatchError, match=says):
            verb(model, patch)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_model_that_differs_elsewhere_is_refused(model, tmp_path):
    sampled, full = tmp_path / "sampled.safetensors", tmp_path / "full.safetensors"
    trained(copy.deepcopy(model), "1.weight[0, 0]", sampled)
    trained(copy.deepcopy(model), "0.weight[0, 0]", full, full=True)
    with torch.no_grad():
        model[1].weight[3, 3] += 1  # small enough for all to be in the sample
        model[0].weight[99, 7] += 1
    for path in (sampled, full):
        with pytest.raises(eg.PatchError, match="other elements of it differ"):
            eg.apply(model, path)


def test_nothing_is_written_when_the_last_entry_does_not_fit(model, patch):
    with torch.no_grad():
        model[1].bias += 1
    before = copy.deepcopy(model)
    with pytest.raises(eg.PatchError, match=r"1\.bias is not the tensor"):
        eg.apply(model, patch)
    assert_same(model, before)


def test_training_goes_on_from_a_patch(model, patch):
    elements = eg.trainable(model, patch)
    assert [str(place) for place in elements] == PLACES
    assert model[1].bias.tolist() == elements["1.bias"].tolist()
    elements.release()
    again = eg.trainable(model, os.fspath(patch))  # what this model had from it already
    with torch.no_grad():
        again["1.bias"].fill_(3.0)
    assert model[1].bias.tolist() == [3.0] * 4
    again.undo()
    assert model[0].weight[3, 0] != 0


def test_undo_after_resuming_goes_back_to_the_first_originals(model, patch):
    before = copy.deepcopy(model)
    elements = eg.trainable(model, patch)
    elements.undo()
    elements.release()
    assert_same(model, before)


def test_elements_in_training_are_not_patched_over(model, patch):
    eg.trainable(model, "1.bias")
    before = copy.deepcopy(model)
    with pytest.raises((eg.DuplicateError, eg.PatchError), match=r"1\.bias"):
        eg.apply(model, patch, overwrite=True)
    assert torch.equal(model[0].weight, before[0].weight)


def test_half_precision_values_are_kept_in_full(tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(8, 8).bfloat16()
    plain = copy.deepcopy(model)
    path = tmp_path / "patch.safetensors"
    elements = trained(model, "weight[0]", path, value=1e-4)
    applied = eg.apply(plain, path)
    assert torch.equal(plain.weight, model.weight)
    again = tmp_path / "again.safetensors"
    applied.save(again)
    assert eg.inspect(again) == eg.inspect(path)
    assert eg.inspect(path).entries[0].values.dtype == "float32"
    applied.undo()
    resumed = eg.trainable(plain, path)
    assert torch.equal(resumed["weight[0]"], elements["weight[0]"])


def test_shared_weights_are_one(tmp_path):
    torch.manual_seed(0)

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
            self.head.weight = self.table.weight

        def forward(self, tokens):
            return self.head(self.table(tokens))

    model = Tied()
    plain = copy.deepcopy(model)
    path = tmp_path / "patch.safetensors"
    trained(model, ["head.weight[3]", "table.weight[4, 1]"], path)
    eg.apply(plain, path)
    assert plain.head.weight is plain.table.weight
    assert torch.equal(plain.head.weight, model.head.weight)
    with pytest.raises(eg.DuplicateError, match="is named by"):
        eg.trainable(Tied(), ["head.weight[3]", "table.weight[:, 1]"])


def tied(together, **others):
    torch.manual_seed(0)
    model = nn.ModuleDict({"table": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False), **others})
    model["head"].weight = model["table"].weight if together else nn.Parameter(model["table"].weight.detach().clone())
    return model


@pytest.mark.parametrize("verb", [eg.apply, eg.trainable])
@pytest.mark.parametrize("there", [True, False])
def test_weights_that_are_tied_on_one_side_alone_are_refused_untouched(verb, there, tmp_path):
    made, given = tied(there), tied(not there)
    elements = eg.trainable(made, "table.weight[1]")
    with torch.no_grad():
        elements["table.weight[1]"].add_(1.0)
    elements.save(tmp_path / "patch.safetensors")
    before = {name: tensor.clone() for name, tensor in given.state_dict().items()}
    text = "where table.weight and head.weight are one tensor, and here they are not" if there else "would change both"
    with pytest.raises(eg.PatchError, match=text):
        verb(given, tmp_path / "patch.safetensors")
    assert all(torch.equal(tensor, before[name]) for name, tensor in given.state_dict().items())
    same = tied(there)
    verb(same, tmp_path / "patch.safetensors")
    assert all(torch.equal(tensor, same.state_dict()[name]) for name, tensor in made.state_dict().items())


def test_weights_of_tied_names_in_a_file(tmp_path):
    model = tied(True)
    elements = eg.trainable(model, "table.weight[1]")
    elements.save(tmp_path / "patch.safetensors")
    assert eg.inspect(tmp_path / "patch.safetensors").entries[0].tied == ("head.weight",)
    held = FileTensor.of(model["table"].weight.detach().numpy())
    eg.apply(Weights({"table.weight": held}), tmp_path / "patch.safetensors")
    other = FileTensor.of(model["table"].weight.detach().numpy())
    with pytest.raises(eg.PatchError, match="leave all but one out of a file"):
        eg.apply(Weights({"table.weight": held, "head.weight": other}), tmp_path / "patch.safetensors", overwrite=True)


def test_a_patch_without_ties_is_applied(tmp_path):
    elements = eg.trainable(tied(True), "table.weight[1]")
    elements.save(tmp_path / "patch.safetensors")
    (entry,) = eg.inspect(tmp_path / "patch.safetensors").entries
    eg.Patch((replace(entry, tied=None),)).write(tmp_path / "old.safetensors")
    applied = eg.apply(tied(False), tmp_path / "old.safetensors")
    assert [str(place) for place in applied.places] == ["table.weight[1]"]


def test_masks_take_no_more_than_their_elements(model, tmp_path):
    mask = torch.zeros(100, 8, dtype=torch.bool)
    mask[5, 3] = mask[70, 1] = True
    path = tmp_path / "patch.safetensors"
    elements = trained(model, eg.at("0.weight")[mask], path)
    assert elements["0.weight[[5, 70], [3, 1]]"].shape == (2,)
    assert path.stat().st_size < 2000


def test_saving_after_values_were_overwritten_is_an_error(model, tmp_path):
    elements = trained(model, "1.bias", tmp_path / "patch.safetensors")
    elements.release()
    elements.save(tmp_path / "again.safetensors")
    with torch.no_grad():
        model[1].bias.fill_(4.0)
    with pytest.raises(eg.PatchError, match="was written over or taken back since"):
        elements.save(tmp_path / "late.safetensors")


def test_undo_does_not_overwrite_values_loaded_since(model, patch):
    applied = eg.apply(model, patch)
    model.load_state_dict({name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()})
    with pytest.raises(eg.PatchError, match="there is nothing to undo"):
        applied.undo()
    assert not model[1].bias.any()
