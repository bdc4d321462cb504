"""Stopped runs of PyTorch modules with hooks, buffers, modes and random numbers."""

import pytest
import torch

import elementgrad as eg

X = torch.arange(8.0).reshape(2, 4) / 8


class Late(torch.nn.Module):
    """Fails the test if it runs."""

    def forward(self, x):
        raise AssertionError("a layer behind the target ran")


def model():
    torch.manual_seed(0)
    inner = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 4), Late())
    return torch.nn.Sequential(inner, Late())


def read(net, of="0.2#0[0, 1]"):
    torch.manual_seed(7)
    return eg.grad(net, X, of=of, wrt="input")


def test_buffers_and_random_numbers_are_as_before_and_the_mask_is_the_models():
    net = model()
    buffers = [buffer.clone() for buffer in net.buffers()]
    torch.manual_seed(7)
    x = X.clone().requires_grad_()
    layers = list(net[0])[:3]
    y = layers[2](layers[1](layers[0](x)))
    (expected,) = torch.autograd.grad(y[0, 1], x)
    for buffer, before in zip(net.buffers(), buffers, strict=True):
        buffer.data.copy_(before)
    state = torch.manual_seed(7).get_state()
    assert torch.equal(eg.grad(net, X, of="0.2#0[0, 1]", wrt="input"), expected)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(map(torch.equal, net.buffers(), buffers))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())


def test_modes_that_the_model_entered_are_left_when_it_is_stopped():
    class Modes(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inside = torch.nn.Linear(4, 4)

        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
                pass
            with torch.autocast("cpu", dtype=torch.bfloat16):
                torch.set_grad_enabled(True)
                self.inside(x)
                raise AssertionError("it went on")

    with torch.no_grad():
        eg.grad(Modes(), X, of="inside#0[0, 1]", wrt="x", cone=False)
        assert not torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("outer", [0, None], ids=["block", "root"])
def test_hooks_around_an_unfinished_call_run_to_its_end(outer):
    net = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()), torch.nn.Tanh())
    around = net if outer is None else net[outer]
    seen = []
    around.register_forward_pre_hook(lambda *_: seen.append("begin"))
    around.register_forward_hook(lambda *_: seen.append("end"))
    eg.grad(net, X, of="0.0#0[0, 1]", wrt="input", cone=False)
    assert seen == ["begin", "end"]


def test_hooks_of_other_layers_do_not_prevent_stopping():
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    seen = []
    for layer in net:
        layer.register_forward_hook(lambda layer, *_: seen.append(layer))
    eg.grad(net, X, of="0#0[0, 1]", wrt="input", cone=False)
    assert seen == [net[0]]


def test_a_forward_that_was_replaced_in_the_instance_runs_to_its_end():
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
    plain, seen = net.forward, []

    def offloaded(x):
        seen.append("load")
        y = plain(x)
        seen.append("free")
        return y

    net.forward = offloaded
    eg.value(net, X, of="0#0[0, 1]", cone=False)
    assert seen == ["load", "free"]


def test_a_read_by_a_modules_input_stops_before_it_runs():
    assert torch.equal(eg.value(torch.nn.Sequential(Late()), X, of="0.input#0[0, 1]", cone=False), X[0, 1])


def test_tags_stop_a_function():
    def f(x):
        hidden = eg.tag(x**2, "hidden")
        raise AssertionError(f"it went on to {hidden}")

    assert torch.equal(
        eg.grad(f, X, of="hidden#0[0, 1]", wrt="x"), torch.autograd.functional.jacobian(lambda x: x[0, 1] ** 2, X)
    )


def test_a_network_inside_of_a_transform_of_the_functions_own():
    def f(x):
        return torch.func.grad(lambda x: eg.tag(x * 2, "inner").sum())(x) + eg.tag(x * 3, "outer")

    assert torch.equal(
        eg.grad(f, X, of="outer#0[0, 1]", wrt="x"), 3 * torch.nn.functional.one_hot(torch.tensor(1), 8).reshape(2, 4)
    )
