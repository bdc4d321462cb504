"""What cannot be ranked is said in one sentence, before any work where that is possible."""

import numpy as np
import pytest
import torch
from torch import nn

import elementgrad as eg
from tests.support.ranked import HOW
from tests.support.ranked_torch import mlp, sparse

MODEL, LOSS = mlp()
REFUSED = {
    "k is zero": ({"k": 0}, eg.OptionError, "k=0 is not a number of elements; give an int of at least 1"),
    "k is a float": ({"k": 0.1}, eg.OptionError, "k=0.1 is not a number of elements"),
    "k is a bool": ({"k": True}, eg.OptionError, "k=True is not a number of elements"),
    "k is large": ({"k": 999}, eg.OptionError, "k=999 is more than the 89 elements that there are to choose from"),
    "k is large for these": ({"k": 5, "among": "4.bias"}, eg.OptionError, "k=5 is more than the 3 elements"),
    "by": ({"by": "size"}, eg.OptionError, 'by=\'size\' is none of "gradient", "fisher", "magnitude" and "random"'),
    "by is a list": ({"by": ["fisher"]}, eg.OptionError, "is none of"),
    "loss_fn is a loss": ({"loss_fn": 3.0}, eg.OptionError, "loss_fn=3.0 cannot be called; give a function"),
    "loss_fn is left out": ({"loss_fn": None}, eg.OptionError, "loss_fn=None cannot be called"),
    "loss_fn is none for magnitude": ({"loss_fn": 3, "by": "magnitude"}, eg.OptionError, "cannot be called"),
    "since without magnitude": ({"since": {}}, eg.OptionError, 'use by="magnitude"'),
    "no model": ({"model": print}, eg.FrameworkError, "builtin_function_or_method is no model"),
    "no floating parameter": ({"model": nn.Tanh()}, eg.DtypeError, "no floating-point parameter"),
    "among an unknown": ({"among": "0.wieght"}, eg.PlaceError, "no parameter is named '0.wieght'; nearest: 0.weight"),
    "among a layer": ({"among": "0"}, eg.PlaceError, "no parameter is named '0'; nearest: 0.weight, 0.bias"),
    "among an activation": ({"among": "0.bias (activation)"}, eg.PlaceError, "no parameter is named '0.bias'"),
    "among nothing": ({"among": []}, eg.PlaceError, "among names no parameter"),
    "among a stranger": ({"among": torch.ones(2)}, eg.PlaceError, "the tensor is no parameter of the model"),
    "among no place": ({"among": [3]}, eg.PlaceError, "3 names no tensor"),
    "among one without a name": ({"among": eg.at[0]}, eg.PlaceError, r"name it, as in 0.weight\[0\]"),
    "among too far": ({"among": "0.bias[7]"}, eg.SelectionError, r"0.bias\[7\]: index 7 is out of range"),
    "among a write": ({"among": eg.at(MODEL[0].bias, write=0)}, eg.PlaceError, "leave write out"),
    "since is no state": ({"by": "magnitude", "since": 3}, eg.OptionError, "since=int holds no earlier parameters"),
    "since lacks one": (
        {"by": "magnitude", "since": {"0.weight": MODEL[0].weight, "0.bia": MODEL[0].bias}},
        eg.PlaceError,
        "since holds no '0.bias'; nearest: 0.bia",
    ),
    "since is another model": ({"by": "magnitude", "since": MODEL[0]}, eg.PlaceError, "since holds no '0.weight'"),
    "since has other shapes": (
        {"by": "magnitude", "since": {"0.bias": torch.ones(3)}, "among": "0.bias"},
        eg.OptionError,
        r"since holds 0.bias of shape \(3,\) and the model of shape \(7,\)",
    ),
    "since has arrays": (
        {"by": "magnitude", "since": {"0.bias": np.ones(7)}, "among": "0.bias"},
        eg.FrameworkError,
        "since holds 0.bias as ndarray",
    ),
    "since is now": (
        {"by": "magnitude", "since": MODEL.state_dict()},
        eg.OptionError,
        "no element has moved since then",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_come_before_any_work(case):
    options, error, message = REFUSED[case]
    ran = []
    options = {"model": MODEL, "loss_fn": ran.append, "k": 2, **options}
    with pytest.raises(error, match=message) as raised:
        eg.top(**options)
    assert "\n" not in str(raised.value)
    assert not ran


WRONG = {
    "detached": (lambda model: LOSS(model).detach(), eg.UnconnectedError, "a loss has no gradient"),
    "one of them detached": (
        lambda model: [LOSS(model), torch.ones(())],
        eg.UnconnectedError,
        "a loss has no gradient",
    ),
    "a number": (lambda model: LOSS(model).sum().item(), eg.FrameworkError, "loss_fn gave float and no loss"),
    "nothing": (lambda model: None, eg.FrameworkError, "loss_fn gave NoneType and no loss"),
    "a dict": (lambda model: {"loss": LOSS(model)}, eg.FrameworkError, "loss_fn gave dict and no loss"),
    "numbers": (lambda model: [1.0], eg.FrameworkError, "loss 0 is float and no tensor of torch"),
    "an array": (lambda model: np.ones(2), eg.FrameworkError, "loss 0 is float64 and no tensor of torch"),
    "no losses": (lambda model: [], eg.OptionError, "loss_fn gave no loss at all"),
    "none one by one": (lambda model: iter(()), eg.OptionError, "loss_fn gave no loss at all"),
    "an empty vector": (lambda model: LOSS(model)[:0], eg.OptionError, r"the loss of shape \(0,\)"),
    "a matrix": (lambda model: LOSS(model)[None], eg.OptionError, r"the loss of shape \(1, 6\) is neither a number"),
    "a matrix in a list": (lambda model: [LOSS(model), LOSS(model)[None]], eg.OptionError, r"loss 1 of shape \(1, 6\)"),
    "complex": (lambda model: LOSS(model) * 1j, eg.DtypeError, "the loss is of dtype complex128"),
    "an integer": (lambda model: torch.ones((), dtype=torch.int64), eg.DtypeError, "the loss is of dtype int64"),
    "of another": (lambda model: torch.ones(1, requires_grad=True) * 2, eg.UnconnectedError, "depends on no parameter"),
    "too few reached": (
        lambda model: model[4].bias.sum() + model[2].bias.sum(),
        eg.UnconnectedError,
        "k=20 is more than the 7 elements that the loss depends on, as it does not on 0.weight, 0.bias, 2.weight, 4.w",
    ),
    "NaN": (lambda model: LOSS(model).sum() * float("nan"), eg.PlaceError, r"4.bias\[\[0\]\] has a .* of nan, which"),
    "inf": (lambda model: steep(model[0].weight[1, 2]), eg.PlaceError, r"0.weight\[\[1\], \[2\]\] has a .* of inf"),
    "taken elsewhere": (
        lambda model: LOSS(model).sum() + FIRST.sum(),
        eg.FrameworkError,
        "the loss uses 0.weight as it was taken from the model elsewhere; take it from the model that loss_fn is given",
    ),
    "swept already": (
        lambda model: swept(LOSS(model)),
        eg.FrameworkError,
        "the graph of a loss is freed, by a backward",
    ),
    "one graph for all": (lambda model: iter(LOSS(model)), eg.FrameworkError, "the graph of a loss is freed"),
}
FIRST = MODEL[0].weight


def steep(x):
    return (x - x.detach()).sqrt()


def swept(losses):
    losses.sum().backward()
    return losses


@pytest.mark.parametrize("by", HOW)
@pytest.mark.parametrize("case", WRONG)
def test_losses_that_cannot_rank(case, by):
    loss_fn, error, message = WRONG[case]
    with pytest.raises(error, match=message) as raised:
        eg.top(MODEL, loss_fn, 20, by)
    assert "\n" not in str(raised.value)
    assert all(p.grad is None for p in MODEL.parameters())


def test_losses_that_are_others_when_asked_again():
    model, loss_fn = mlp()
    rows, batches = iter(range(20)), iter([0, 1, 2])
    changing = lambda model: (loss_fn(model)[0] * next(rows) for _ in range(2))  # noqa: E731
    for losses in (changing, lambda model: (loss_fn(model)[i] for i in batches)):
        with pytest.raises(eg.ElementgradError, match=r"gives other losses when it is asked again|no loss at all"):
            eg.top(model, losses, 5)


def test_values_that_are_not_finite_are_no_matter_where_nobody_chooses():
    model, _ = mlp()
    with torch.no_grad():
        model[0].bias[2] = float("inf")
    with pytest.raises(eg.PlaceError, match=r"0.bias\[\[2\]\] has a value of inf"):
        eg.top(model, None, 3, "magnitude")
    assert len(eg.top(model, None, 3, "magnitude", among=["0.bias[:2]", "0.weight"])) >= 1


def test_writing_to_a_parameter_is_said():
    model, loss_fn = mlp()

    def writing(model):
        with torch.no_grad():
            model[0].bias.clamp_(-0.1, 0.1)
        return loss_fn(model)

    with pytest.raises(eg.FrameworkError, match=r"loss_fn has written to 0.bias in place"):
        eg.top(model, writing, 3)


def test_integer_parameters_are_refused_by_name_and_left_out_otherwise():
    model, loss_fn = sparse()
    with pytest.raises(eg.DtypeError, match="steps is of dtype int64; choose among floating-point parameters"):
        eg.top(model, loss_fn, 1, among="steps")
    assert "steps" not in [place.name for place in eg.top(model, None, 40, "magnitude")]
