"""Elements in half precision, under autocast, of complex parameters; second derivatives; checkpoints."""

import copy
from itertools import product

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import elementgrad as eg
from elementgrad._backends.torch.train import kernels
from tests.support.training_checks import (
    HOW,
    WAYS,
    assert_entries,
    assert_gradients,
    differentiable,
    numbers,
    places_of,
    tokens_below,
)
from tests.support.training_models import Tied


@pytest.mark.parametrize("kind", ["linear", "lookup", "convolution", "attention", "norm", "alias"])
def test_autocast(kind):
    build, inputs, call = {
        "linear": (lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)), [numbers(5, 4)], None),
        "lookup": (lambda: nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 3)), [tokens_below(6, 2, 3)], None),
        "convolution": (lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.Conv2d(4, 3, 1)), [numbers(2, 2, 5, 5)], None),
        "attention": (lambda: nn.MultiheadAttention(4, 2), [numbers(5, 2, 4)], lambda m, x: m(x, x, x)),
        "norm": (lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.RMSNorm(4)), [numbers(5, 4)], None),
        "alias": (Tied, [tokens_below(6, 2, 3)], None),
    }[kind]
    call = call or (lambda model, *inputs: model(*inputs))

    def cast(model, *inputs):
        with torch.autocast("cpu", torch.bfloat16):
            return call(model, *inputs)

    for how in HOW:
        torch.manual_seed(0)
        model = Tied(True) if build is Tied else build()
        assert_gradients(model, places_of(model, how), *[make(torch.float32) for make in inputs], call=cast, close=0.02)


@pytest.mark.parametrize("kind", ["linear", "lookup", "convolution", "bag"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_models_in_half_precision(kind, dtype):
    """The leaf is in float32, and the sums of its gradient lose no more than the dense gradient's."""
    build, inputs = {
        "linear": (lambda: nn.Linear(4, 3), [numbers(5, 4)]),
        "lookup": (lambda: nn.Embedding(6, 4), [tokens_below(6, 2, 3)]),
        "convolution": (lambda: nn.Conv1d(2, 3, 3), [numbers(2, 2, 6)]),
        "bag": (lambda: nn.EmbeddingBag(6, 4), [tokens_below(6, 2, 3)]),
    }[kind]
    for how in HOW:
        torch.manual_seed(0)
        model = build().to(dtype)
        elements = assert_gradients(model, places_of(model, how), *[make(dtype) for make in inputs], close=0.02)
        assert all(leaf.dtype == leaf.grad.dtype == torch.float32 for leaf in elements.parameters())


class Complex(nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.layer = nn.Linear(4, 3, dtype=torch.complex64) if linear else None
        self.rotation = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))

    def forward(self, x):
        x = torch.einsum("bi,ij->bj", x, self.rotation)
        return self.layer(x) if self.layer is not None else x


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=["complex64", "complex128"])
def test_complex_parameters(monkeypatch, way, dtype):
    WAYS[way](monkeypatch)
    for linear, how in product((False, True), HOW):
        torch.manual_seed(0)
        model = Complex(linear).to(dtype)
        assert_gradients(model, places_of(model, how), torch.randn(5, 4, dtype=dtype))


def test_a_complex_convolution():
    for how in HOW:
        torch.manual_seed(0)
        model = nn.Conv1d(2, 3, 3, padding=1, dtype=torch.complex128)
        assert_gradients(model, places_of(model, how), torch.randn(2, 2, 5, dtype=torch.complex128))


DOUBLE = {
    "linear": (lambda: nn.Linear(3, 2), [numbers(4, 3)]),
    "convolution": (lambda: nn.Conv1d(2, 2, 2, padding=1), [numbers(2, 2, 4)]),
    "grouped convolution": (lambda: nn.Conv1d(4, 2, 2, groups=2), [numbers(2, 4, 4)]),
    "lookup": (lambda: nn.Embedding(4, 3), [tokens_below(4, 5)]),
    "bag": (lambda: nn.EmbeddingBag(4, 3, mode="mean"), [tokens_below(4, 2, 3)]),
    "weighted bag": (
        lambda: nn.EmbeddingBag(4, 3, mode="sum"),
        [tokens_below(4, 6), lambda dtype: torch.tensor([0, 2]), numbers(6)],
    ),
    "layer norm": (lambda: nn.LayerNorm(3), [numbers(4, 3)]),
    "rms norm": (lambda: nn.RMSNorm(3), [numbers(4, 3)]),
    "attention": (lambda: nn.MultiheadAttention(4, 2), [numbers(3, 4)]),
    "alias": (lambda: nn.Bilinear(2, 3, 2), [numbers(4, 2), numbers(4, 3)]),
}


class ByRows(nn.Module):
    """A bag by other means, for PyTorch has no second derivatives of one."""

    def __init__(self, weight, mode):
        super().__init__()
        self.weight, self.mode = nn.Parameter(weight.detach().clone()), mode

    def forward(self, ids, offsets=None, weights=None):
        if offsets is None:
            rows = self.weight[ids]
            return rows.mean(1) if self.mode == "mean" else rows.sum(1)
        rows = self.weight[ids] * weights.unsqueeze(1)
        return torch.stack([part.sum(0) for part in rows.tensor_split(offsets[1:])])


@pytest.mark.parametrize("way", ["gather", "block", "sample"])
@pytest.mark.parametrize("kind", DOUBLE)
def test_second_derivatives_are_those_of_the_plain_model(monkeypatch, kind, way):
    WAYS[way](monkeypatch)
    monkeypatch.setattr(kernels, "MULTIPLIED", 0.0 if way == "block" else 1e9)
    monkeypatch.setattr(kernels, "SMALL_TABLE", -(10**9) if way == "block" else 10**9)
    build, inputs = DOUBLE[kind]
    torch.manual_seed(0)
    model = build().double()
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    plain = ByRows(model.weight, model.mode) if "bag" in kind else copy.deepcopy(model)
    places = places_of(model, "scattered")
    elements = eg.trainable(model, places)
    given = differentiable([make(torch.float64) for make in inputs])
    floats = [x for x in given if x.requires_grad]

    def second(model, parameters):
        xs = given * 3 if isinstance(model, nn.MultiheadAttention) else given
        output = model(*xs)
        output = output[0] if isinstance(output, tuple) else output
        asked = [*floats, *parameters]
        first = torch.autograd.grad(output.tanh().square().sum(), asked, create_graph=True)
        again = sum(gradient.square().sum() for gradient in first[: len(floats)])
        # Of the parameters only those elements that train, so that both mean the same.
        again = again + sum(
            (gradient.reshape(-1)[at] ** 3).sum()
            for gradient, at in zip(first[len(floats) :], where(model), strict=True)
        )
        return torch.autograd.grad(again, asked, allow_unused=True, materialize_grads=True)

    positions = [torch.from_numpy(p.select(tuple(plain.get_parameter(p.name).shape)).flat().copy()) for p in places]

    def where(other):
        return [slice(None)] * len(places) if other is model else positions

    found = second(model, list(elements.parameters()))
    expected = second(plain, [plain.get_parameter(place.name) for place in places])
    for x, same in zip(found[: len(floats)], expected[: len(floats)], strict=True):
        torch.testing.assert_close(x, same, rtol=1e-9, atol=1e-11)
    for x, same, at in zip(found[len(floats) :], expected[len(floats) :], positions, strict=True):
        torch.testing.assert_close(x, same.reshape(-1)[at], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_that_are_computed_again_for_their_gradients(reentrant):
    def call(model, ids):
        x = model[0](ids).requires_grad_()
        return model[3](checkpoint(model[1:3], x, use_reentrant=reentrant))

    for how, dtype in product(HOW, (torch.float32, torch.float64)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)).to(dtype)
        assert_gradients(model, places_of(model, how), torch.randint(6, (2, 3)), call=call)


@pytest.mark.parametrize("kind", ["linear", "lookup", "bag"])
def test_a_step_between_forward_and_backward_is_as_it_is_in_the_plain_model(kind):
    """The gradient of a first layer needs its input alone, so that its weight may have changed."""
    build, inputs = DOUBLE[kind]
    torch.manual_seed(0)
    model = build().double()
    plain = copy.deepcopy(model)
    place = places_of(model, "scattered")[0]
    elements = eg.trainable(model, place)
    xs = [make(torch.float64) for make in inputs]
    for parameters, each in ((elements.parameters(), model), (plain.parameters(), plain)):
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        one, other = each(*xs).sum(), each(*xs).square().sum()
        one.backward()
        optimizer.step()
        optimizer.zero_grad()
        other.backward()
    assert_entries(elements[place].grad, plain.get_parameter(place.name).grad, place, 1e-12)
