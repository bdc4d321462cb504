"""Ranking elements of PyTorch's models: tied weights, wrappers and modes around."""

import copy

import pytest
import torch
from torch import nn

import elementgrad as eg
from tests.support.ranked import best, named
from tests.support.ranked_torch import RankedTorch, checkpointed, gpt2, mlp, sparse


def test_reentrant_checkpoints_too():
    (model, loss_fn), (other, other_loss) = checkpointed(True), checkpointed(False)
    assert eg.top(model, loss_fn, 9, "fisher") == eg.top(other, other_loss, 9, "fisher")


def test_tied_weights_count_once_and_may_have_been_saved_under_either_name():
    model, loss_fn = gpt2()
    size = sum(p.numel() for p in model.parameters())
    places = eg.top(model, loss_fn, size)
    assert sum(place.select(model.get_parameter(place.name).shape).size for place in places) == size
    assert "lm_head.weight" not in [place.name for place in places]
    (place,) = eg.top(model, loss_fn, 2, among="lm_head.weight[3]")
    assert place.name == "transformer.wte.weight"
    state = copy.deepcopy(model.state_dict())
    del state["transformer.wte.weight"]
    with torch.no_grad():
        model.lm_head.weight[4, 2] += 9
    (place,) = eg.top(model, None, 1, "magnitude", since=state)
    assert str(place) == "transformer.wte.weight[[4], [2]]"


def test_methods_and_wrappers_of_models():
    model, loss_fn = mlp()
    expected = eg.top(model, loss_fn, 5)
    assert eg.top(nn.DataParallel(model), loss_fn, 5) == expected
    assert eg.top(torch.compile(model, backend="eager"), loss_fn, 5) == expected
    assert eg.top(model.forward, lambda forward: loss_fn(forward), 5) == expected


def test_autocast_and_no_grad_and_inference_mode_around():
    model, loss_fn = mlp()
    expected = eg.top(model, loss_fn, 5, "fisher")
    for around in (torch.no_grad, torch.inference_mode):
        with around():
            assert eg.top(model, loss_fn, 5, "fisher") == expected
            assert not torch.is_grad_enabled()
    with torch.inference_mode():
        inside = copy.deepcopy(model)
    assert eg.top(inside, loss_fn, 5, "fisher") == expected
    model, x = nn.Linear(3, 2), torch.tensor([[1.0, -5.0, 2.0]])
    with torch.autocast("cpu", torch.bfloat16):
        (place,) = eg.top(model, lambda model: (model(x[[i]])[0, 1] for i in (0, 0)), 1)
    assert str(place) == "weight[[1], [1]]"


def test_how_far_elements_have_moved_in_another_precision():
    model, _ = mlp()
    state = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p))
    half = eg.top(model.bfloat16(), print, 9, by="magnitude", since=state)
    moved = {name: (p.detach().double() - state[name]).abs() for name, p in model.named_parameters()}
    assert named(half, RankedTorch(), model) == best(moved, 9)


def test_a_model_that_is_one_number():
    bare = nn.ParameterDict({"x": torch.tensor(2.0)})
    assert eg.top(bare, lambda model: model["x"], 1) == [eg.at("x")]
    assert eg.top(bare, None, 1, "magnitude") == [eg.at("x")]


def test_non_finite_values_outside_of_among_do_not_matter():
    model, _ = mlp()
    with torch.no_grad():
        model[0].bias[2] = float("inf")
    with pytest.raises(eg.PlaceError, match=r"0.bias\[\[2\]\] has a value of inf"):
        eg.top(model, None, 3, "magnitude")
    assert len(eg.top(model, None, 3, "magnitude", among=["0.bias[:2]", "0.weight"])) >= 1


def test_integer_parameters_are_not_ranked():
    model, _ = sparse()
    assert "steps" not in [place.name for place in eg.top(model, None, 40, "magnitude")]
