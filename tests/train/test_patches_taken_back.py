"""Patches that are refused or taken back leave nothing behind."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

import elementgrad as eg


def patched(model, places, path):
    elements = eg.trainable(copy.deepcopy(model), places)
    with torch.no_grad():
        for number, leaf in enumerate(elements.parameters()):
            leaf.fill_(9.0 - number)
    elements.save(path)
    return path


def test_a_refused_patch_can_be_applied_later(tmp_path):
    model = nn.Linear(2, 1)
    path = patched(model, ["weight[0, 0]", "bias"], tmp_path / "p.safetensors")
    training = eg.trainable(model, "bias")
    with pytest.raises(eg.DuplicateError, match="trains already"):
        eg.apply(model, path, overwrite=True)
    training.release(keep=False)
    eg.apply(model, path)
    assert model.weight[0, 0] == 9.0


def test_names_that_are_tied_here_and_not_there_are_refused(tmp_path):
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    with torch.no_grad():
        model["b"].weight.copy_(model["a"].weight)
    path = patched(model, ["a.weight[0, 0]", "b.weight[0, 0]"], tmp_path / "p.safetensors")
    model["b"].weight = model["a"].weight
    before = model["a"].weight.detach().clone()
    for take in (eg.apply, eg.trainable):
        with pytest.raises(eg.PatchError, match=r"a\.weight and b\.weight are one tensor here"):
            take(model, path)
    silent = eg.Patch(tuple([replace(entry, tied=None) for entry in eg.inspect(path).entries]))  # as they once were
    with pytest.raises(eg.PatchError, match=r"named by a\.weight"):
        eg.apply(model, silent)
    assert torch.equal(model["a"].weight, before)


def test_an_undo_does_not_repeat_on_a_later_patch(tmp_path):
    model = nn.Linear(2, 1)
    path = patched(model, "weight[0, 0]", tmp_path / "p.safetensors")
    first = eg.apply(model, path)
    first.undo()
    eg.apply(model, path)
    first.undo()
    assert model.weight[0, 0] == 9.0


def test_releasing_twice_takes_nothing_back_twice():
    model = nn.Linear(2, 1)
    elements = eg.trainable(model, "weight[0, 0]")
    elements.release(keep=False)
    with torch.no_grad():
        model.weight.fill_(2.0)
    elements.release(keep=False)
    elements.undo()
    assert model.weight.tolist() == [[2.0, 2.0]]
