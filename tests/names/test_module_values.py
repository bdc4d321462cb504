"""Values at a name in a module: views, layers that return their input, tied tensors, threads, inner reads."""

import copy
import threading

import pytest
import torch
from torch import nn

import elementgrad as eg
from tests.names.test_modules import assert_close
from tests.support.torch_models import made


def test_threads_capture_their_own_values():
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    inputs = [torch.randn(1, 3, dtype=torch.float64) for _ in range(4)]
    expected = [eg.grad(model, x, wrt="1") for x in inputs]
    found = [None] * 4

    def work(number):
        for _ in range(10):
            found[number] = eg.grad(copy.deepcopy(model), inputs[number], wrt="1")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for given, right in zip(found, expected, strict=True):
        assert_close(given, right)


def test_threads_may_replace_parameters_of_one_model():
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    weight, x = model[0].weight, torch.randn(1, 3, dtype=torch.float64)
    expected = eg.grad(model, x, wrt="0.weight")
    found = []

    def work():
        found.extend([eg.grad(model, x, wrt=["0.weight", "1"])[0] for _ in range(10)])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 40
    for given in found:
        assert_close(given, expected)
    assert model[0].weight is weight
    assert isinstance(model[0].weight, nn.Parameter)


def test_a_call_from_another_thread_is_not_part_of_the_run():
    class Asking(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def forward(self, x):
            thread = threading.Thread(target=self.inner, args=(x.detach(),))
            thread.start()
            thread.join()
            return self.inner(x)

    model = Asking()
    assert_close(eg.jacobian(model, torch.ones(2), wrt="inner").dense(), torch.eye(2))


def test_scripted_modules_and_children_called_module_are_unchanged():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = nn.Linear(2, 2, bias=False)

        def forward(self, left, right):
            return self.module(left) * right

    model, x = Outer(), torch.ones(2)
    J = eg.jacobian(model, x, 3 * x, wrt="left")
    assert_close(J.dense(), 3 * model.module.weight.detach())
    assert_close(eg.jacobian(model, x, 3 * x, wrt="module").dense(), 3 * torch.eye(2))
    scripted = torch.jit.script(nn.Linear(2, 2, bias=False))
    assert_close(eg.jacobian(scripted, x, of="output", wrt="input").dense(), scripted.weight.detach())


def test_module_names_with_hashes_and_colons():
    model = nn.ModuleDict({"a:b": nn.Linear(2, 2, bias=False)})
    model.forward = lambda x: model["a:b"](x) * 2
    assert_close(eg.jacobian(model, torch.ones(2), wrt="a:b").dense(), 2 * torch.eye(2))


def test_a_read_inside_of_a_model_keeps_its_values_to_itself():
    inner = nn.Linear(2, 2, bias=False)

    def f(x):
        slope = eg.jacobian(lambda y: eg.tag(inner(y) ** 2, "h"), x.detach()).dense()
        return eg.tag(slope @ x, "h").sum()

    given = eg.grad(f, torch.ones(2), wrt="h")
    assert_close(given, torch.ones(2))


@pytest.mark.parametrize("shape", [(1, 2), (1, 1, 2), (2,)], ids=str)
@pytest.mark.parametrize("frozen", [False, True])
def test_a_view_that_is_written_to_later(shape, frozen):
    class Written(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.relu = nn.Linear(2, 2), nn.ReLU(inplace=True)

        def forward(self, x):
            h = self.linear(x)  # a view of something, unless x has two axes
            before = h * 10
            return (before + self.relu(h)).sum()

    torch.manual_seed(0)
    model, x = Written().requires_grad_(not frozen), torch.rand(shape)
    model.linear.bias.data.fill_(3.0)
    model.linear.weight.data.abs_()
    assert_close(eg.grad(model, x, wrt="linear"), torch.full(shape, 11.0))
    assert_close(eg.grad(model, x, wrt=["linear", "x"])[0], torch.full(shape, 11.0))
    assert_close(eg.contributions(model, x, wrt="x", via="linear").total, eg.grad(model, x, wrt="x"))
    assert_close(eg.contributions(model, x, wrt="linear").total, torch.full(shape, 11.0))


@pytest.mark.parametrize("frozen", [False, True])
def test_a_layer_that_returns_its_input(frozen):
    class Skip(nn.Module):
        def __init__(self):
            super().__init__()
            self.before, self.inner, self.skip = nn.Linear(2, 2), nn.Linear(2, 2), nn.Identity()

        def forward(self, x):
            x = self.before(x)
            return self.inner(x) + self.skip(x)

    model, x = Skip().double().requires_grad_(not frozen), torch.ones(1, 2, dtype=torch.float64)
    for wrt in ("skip", ["skip", "x"], ["x", "skip"]):
        given = eg.grad(model, x, of="output[0, 0]", wrt=wrt)
        alone = given if wrt == "skip" else given[wrt.index("skip")]
        assert_close(alone, torch.tensor([[1.0, 0.0]], dtype=torch.float64))
    total = eg.grad(model, x, of="output[0, 0]", wrt="x")
    shares = [
        eg.contributions(model, x, of="output[0, 0]", wrt="x", **{side: "skip"}).total for side in ("via", "without")
    ]
    assert_close(shares[0] + shares[1], total)


def test_one_tensor_is_found_under_both_of_its_names():
    model, x = made("shared")
    first, second = eg.grad(model, x, of="output[0, 0]", wrt=["block.0.weight", "decoder.weight"])
    assert_close(first, second)
    assert_close(first, eg.grad(model, x, of="output[0, 0]", wrt="decoder.weight"))
