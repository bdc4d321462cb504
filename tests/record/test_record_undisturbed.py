"""Recordings of PyTorch disturb nothing: tensors, modes, models and memory are what they would be without one."""

import copy

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import elementgrad as eg


def state(x):
    return x.requires_grad, x.is_leaf, x.grad_fn, x.grad, x._version, x._backward_hooks, x.data_ptr(), x.tolist()


@pytest.mark.parametrize("requires_grad", [False, True])
def test_nothing_about_the_tensors_changes(requires_grad):
    x = torch.tensor([1.0, 2.0], requires_grad=requires_grad)
    x.grad = torch.tensor([7.0, 7.0]) if requires_grad else None
    grad, before = x.grad, state(x)[:3] + state(x)[4:]
    with eg.record(x) as rec:
        inside = state(x)[:3] + state(x)[4:]
        y = (x**3).sum()
        rec.grad(y, x)
        assert x.grad is grad
        assert torch.is_grad_enabled()
    assert inside == before
    rec.grad(y, x), rec.jacobian(y, x).dense(), rec.contributions(y, x)
    assert state(x)[:3] + state(x)[4:] == before
    assert x.grad is grad
    assert not requires_grad or grad.tolist() == [7, 7]
    y.backward()
    assert (x.grad is not None) == requires_grad


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_gradients_are_on_inside_whatever_the_mode_outside(mode):
    x = torch.tensor([1.0, 2.0])
    with mode():
        enabled = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        with eg.record(x) as rec:
            y = (x**2).sum()
        assert rec.grad(y, x).tolist() == [2, 4]
        assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == enabled
    assert rec.grad(y, x).tolist() == [2, 4]


def test_inference_tensors_are_written_to_as_well():
    with torch.inference_mode():
        x, k = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.0, 2.0, 2.0])
        with eg.record(x) as rec:
            x[0] = x[1] * 3
            k += 1
            y = (x * k).sum()
        assert x.tolist() == [6, 2, 3]
        assert k.tolist() == [3, 3, 3]
        assert rec.grad(y, x).tolist() == [3, 12, 3]


def test_values_leave_pytorch_inside_the_block_as_ever():
    x = torch.tensor([1.0, 2.0])
    with eg.record(x):
        y = x * 2
        s = y.sum()
        assert y.numpy().tolist() == np.asarray(y).tolist() == y.tolist() == [2, 4]
        assert s.item() == float(s) == 6
        assert int(s) == 6
        assert bool(s > 3)
        assert np.from_dlpack(y).tolist() == [2, 4]
        assert {x: 1}[x] == 1
        assert repr(x) == "tensor([1., 2.])"
        assert copy.deepcopy(x).tolist() == [1, 2]
        assert x.mul_(3) is x
        x += 1
        assert torch.as_tensor(x) is x
    assert x.tolist() == [4, 7]


def test_a_compiled_function_in_the_block_runs_eagerly():
    torch.compiler.reset()
    f = torch.compile(lambda x: (x**2).sum(), backend="aot_eager")
    f(torch.ones(2))
    x = torch.tensor([1.0, 2.0])
    with eg.record(x) as rec:
        y = f(x)
    assert rec.grad(y, x).tolist() == [2, 4]


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("requires_grad", [True, False])
def test_a_checkpoint_in_the_block_keeps_what_it_computes(use_reentrant, requires_grad):
    inside = []

    def part(x):
        inside.append(x * 2)
        return inside[-1].sin()

    x = torch.tensor([1.0, 2.0], requires_grad=requires_grad)
    with eg.record(x) as rec:
        y = checkpoint(part, x, use_reentrant=use_reentrant).sum()
    torch.testing.assert_close(rec.grad(y, x), 2 * torch.cos(2 * x.detach()))
    torch.testing.assert_close(rec.grad(y, inside[0]), torch.cos(2 * x.detach()))
    assert len(inside) == 1
    checkpoint(part, x, use_reentrant=False).sum()
    assert rec.contributions(y, x)[0].operation == "mul"


def test_models_are_recorded_with_their_parameters():
    torch.manual_seed(0)
    norm = torch.nn.BatchNorm1d(4)
    model = torch.nn.Sequential(
        torch.nn.Linear(3, 4), norm, torch.nn.ReLU(inplace=True), torch.nn.Linear(4, 2)
    ).double()
    reference = copy.deepcopy(model)
    x = torch.randn(5, 3, dtype=torch.float64)
    weight = model[0].weight
    with eg.record(x, weight) as rec:
        y = model(x)
    leaf = x.clone().requires_grad_()
    z = reference(leaf)
    of_x, of_weight = torch.autograd.grad(z[1, 0], [leaf, reference[0].weight])
    torch.testing.assert_close(rec.grad(eg.at(y)[1, 0], x), of_x)
    torch.testing.assert_close(rec.grad(eg.at(y)[1, 0], weight), of_weight)
    assert weight.grad is None
    torch.testing.assert_close(norm.running_mean, reference[1].running_mean)
    with pytest.raises(eg.PlaceError, match="from outside the recording"):
        rec.grad(eg.at(y)[1, 0], model[3].weight)


def test_gradients_may_be_switched_on_in_the_block():
    x = torch.tensor([1.0, 2.0])
    with eg.record(x) as rec:
        a = x * 2
        x.requires_grad_()
        y = (x**2).sum()
    y.backward(retain_graph=True)
    assert x.grad.tolist() == [2, 4]
    assert rec.grad(y, x).tolist() == [2, 4]
    assert rec.grad(eg.at(a)[0], x).tolist() == [2, 0]


def test_an_optimizer_may_step_in_the_block():
    torch.manual_seed(0)
    x, model = torch.randn(4, 3), torch.nn.Linear(3, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    with eg.record(x, model.weight) as rec:
        before = (model(x) ** 2).sum()
        before.backward(retain_graph=True)
        gradient = model.weight.grad.clone()
        optimizer.step()
        after = (model(x) ** 2).sum()
    torch.testing.assert_close(rec.grad(before, model.weight), gradient)
    torch.testing.assert_close(rec.grad(after, model.weight), 2 * model(x).detach().T @ x)
