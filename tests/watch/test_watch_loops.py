"""Watching loops of PyTorch that are put together in other ways: nested watches, several optimizers, none at all."""

# ruff: noqa: PT012 (the block is what is watched)

import pytest
import torch

import elementgrad as eg
from elementgrad._backends.torch import _compat


def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))


def test_a_model_that_two_blocks_watch_is_explained(tmp_path):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    outer = eg.watch(model, optimizer, capture=tmp_path / "nan.capture")
    with pytest.raises(eg.WatchError) as caught, outer, eg.watch(model, optimizer, capture=None):
        for step in range(3):
            optimizer.zero_grad()
            x = torch.ones(2, 4)
            x[0, 1] = float("inf") if step == 1 else 1.0
            model(x).sum().backward()
            optimizer.step()
    error = caught.value
    assert (error.step, error.place, error.cause) == (1, "input[0, 1]", "bad-input"), str(error)
    assert outer.replay().same


def test_optimizers_that_step_one_after_the_other_take_the_same_step(tmp_path):
    model = net()
    first = torch.optim.SGD(model[0].parameters(), lr=0.1)
    second = torch.optim.Adam(model[2].parameters(), lr=0.1)
    with pytest.raises(eg.WatchError) as caught, eg.watch(model, [first, second], capture=tmp_path / "c") as watch:
        for step in range(4):
            first.zero_grad()
            second.zero_grad()
            model(torch.ones(2, 4)).square().sum().backward()
            first.step()
            if step == 2:
                second.state[model[2].weight]["exp_avg_sq"][1, 2] = -3.0
            second.step()
    error = caught.value
    assert (error.step, error.place, error.cause) == (2, "2.weight[1, 2]", "update"), str(error)
    replay = watch.replay()  # from the parameters before the first of them stepped
    assert replay.same, replay.differing
    assert "updated:0" in replay.results


def test_a_bad_gradient_is_seen_before_an_optimizer_that_was_not_given_steps():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hooks = dict(_compat.all_optimizers_hooks())  # those of models that train elsewhere
    with pytest.raises(eg.WatchError) as caught, eg.watch(model, capture=None):
        for step in range(3):
            optimizer.zero_grad()
            torch.sqrt(model(torch.ones(2, 4)).square() * (0.0 if step == 1 else 1.0)).sum().backward()
            optimizer.step()
    assert caught.value.cause == "outside", str(caught.value)
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert dict(_compat.all_optimizers_hooks()) == hooks


class Box:
    def __init__(self, x):
        self.x = x


class Boxed(torch.nn.Linear):
    def forward(self, x):
        return Box(torch.sqrt(super().forward(x) * 0))


def test_a_result_in_which_no_tensor_is_found_is_named():
    model = Boxed(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = eg.watch(model, optimizer, capture=None)
    with pytest.raises(eg.WatchError, match="the model returns Box, in which no tensor"), watch:
        model(torch.ones(2, 4)).x.sum().backward()
        optimizer.step()


def test_a_loss_that_raises_does_not_keep_the_model_from_being_followed():
    def loss(output):
        raise RuntimeError("no such class")

    model, x = net(), torch.ones(2, 4)
    x[1, 3] = float("nan")
    with pytest.raises(eg.WatchError) as caught, eg.watch(model, capture=None, loss=loss):
        model(x)
    assert (caught.value.place, caught.value.cause) == ("input[1, 3]", "bad-input")
    assert "the loss could not be followed: RuntimeError: no such class" in caught.value.evidence


def test_what_is_no_path_and_no_step_is_said():
    with pytest.raises(eg.OptionError, match=r"3 is not a path; give the name of a file, such as 'nan\.capture'"):
        eg.watch(net()).replay(3)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.LBFGS])
def test_each_gradient_of_a_closure_is_looked_at_where_no_call_of_the_model_is_seen(optimizer):
    model = net()
    optimizer = optimizer(model.parameters(), lr=0.1)
    steps = []

    def closure():
        optimizer.zero_grad()
        loss = model[2](model[0](torch.ones(2, 4))).square().mean()
        loss = loss * float("nan") if len(steps) == 2 else loss
        loss.backward()
        return loss

    with pytest.raises(eg.WatchError) as caught, eg.watch(model, optimizer, capture=None):
        for step in range(4):
            steps.append(step)
            optimizer.step(closure)
    error = caught.value
    assert (error.step, error.place, error.cause) == (1, "0.weight[0, 0]", "unseen"), str(error)
    assert str(error).startswith("step 1: the gradient of 0.weight[0, 0] is nan")
    assert "no call of the model was seen" in str(error)


def test_a_gradient_that_a_hook_of_the_optimizer_spoils_is_not_said_to_be_finite():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def spoil(*_):
        model[2].bias.grad[1] = float("nan")

    with pytest.raises(eg.WatchError) as caught, eg.watch(model, optimizer, capture=None):
        optimizer.register_step_pre_hook(spoil)
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    error = caught.value
    assert (error.place, error.cause) == ("2.bias[1]", "unseen"), str(error)
    assert "after it was looked at, as by a hook of the optimizer" in str(error)
