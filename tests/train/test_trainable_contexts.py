"""Models in training under functional calls, checkpoints, autocast and the compiler."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import elementgrad as eg
from tests.support.tagger import PLACES, TOKENS, Tagger, state, train


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Tagger()


def test_substituted_values_change_the_output(model):
    eg.trainable(model, ["fold[1]", "table.weight[3]"])
    plain = model(TOKENS)
    for name, value in dict(model.named_parameters()).items():
        if "_elements_" in name:
            other = torch.func.functional_call(model, {name: value.detach() * 3}, (TOKENS,))
            assert not torch.allclose(other, plain)
            with torch.no_grad():
                assert torch.equal(torch.func.functional_call(model, {name: value.detach() * 3}, (TOKENS,)), other)
    assert torch.equal(model(TOKENS), plain)


def test_a_whole_parameter_still_has_its_gradient(model):
    plain = copy.deepcopy(model)
    eg.trainable(model, PLACES)
    values = {name: tensor.detach() for name, tensor in plain.named_parameters()}

    def loss(of):
        return lambda values: torch.func.functional_call(of, values, (TOKENS,)).square().mean()

    expected, found = torch.func.grad(loss(plain))(values), torch.func.grad(loss(model))(values)
    for name, gradient in expected.items():
        assert torch.allclose(found[name], gradient, rtol=1e-5, atol=1e-7), name
    model.requires_grad_(True)
    model(TOKENS).square().mean().backward()
    held = dict(model.named_parameters())
    for name, gradient in expected.items():
        assert torch.allclose(held[name].grad, gradient, rtol=1e-5, atol=1e-7), name


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_layers(model, reentrant):
    elements = eg.trainable(model, PLACES)
    model(TOKENS).square().mean().backward()
    expected = [leaf.grad.clone() for leaf in elements.parameters()]
    for leaf in elements.parameters():
        leaf.grad = None
    wish = torch.zeros(1, requires_grad=True)
    checkpoint(lambda tokens, _: model(tokens), TOKENS, wish, use_reentrant=reentrant).square().mean().backward()
    for leaf, gradient in zip(elements.parameters(), expected, strict=True):
        assert torch.allclose(leaf.grad, gradient, rtol=1e-5, atol=1e-8)


def test_accumulation_clipping_and_schedules(model):
    elements = eg.trainable(model, PLACES)
    model(TOKENS).square().mean().backward()
    once = [leaf.grad.clone() for leaf in elements.parameters()]
    model(TOKENS).square().mean().backward()
    for leaf, gradient in zip(elements.parameters(), once, strict=True):
        assert torch.allclose(leaf.grad, 2 * gradient)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    assert norm == pytest.approx(torch.cat([2 * gradient for gradient in once]).norm().item(), rel=1e-5)
    optimizer = torch.optim.SGD(elements.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    before = elements["head.bias[2]"].item()
    optimizer.step()
    schedule.step()
    assert model.head.bias[2].item() != before


def test_autocast_and_scaled_losses(model):
    elements = eg.trainable(model, PLACES)
    model(TOKENS).square().mean().backward()
    expected = [leaf.grad.clone() for leaf in elements.parameters()]
    optimizer = torch.optim.SGD(elements.parameters(), lr=0.1)
    optimizer.zero_grad()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(TOKENS).float().square().mean()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    for leaf, gradient in zip(elements.parameters(), expected, strict=True):
        assert torch.allclose(leaf.grad, gradient, rtol=0.1, atol=0.02 * float(gradient.abs().max() + 1))
    scaler.step(optimizer)
    assert torch.equal(model.head.bias[2:3], elements["head.bias[2]"])


class Compiled(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.mix, self.head = nn.Embedding(12, 8), nn.Conv2d(1, 4, 3, padding=1), nn.Linear(8, 3)

    def forward(self, tokens):
        return self.head(self.mix(self.table(tokens).unsqueeze(1)).relu_().mean((1, 2)))


@pytest.mark.parametrize("places", [["table.weight[3, 5]", "mix.weight[1]", "head.weight[2, 3]", "head.bias"], "head"])
def test_compiled_as_one_graph(places):
    torch.manual_seed(0)
    model = Compiled()
    places = ["head.weight", "table.weight", "mix.weight", "mix.bias[1]"] if places == "head" else places
    elements = eg.trainable(model, places)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    optimizer = torch.optim.SGD(elements.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        model(TOKENS).square().mean().backward()
        expected = [leaf.grad.clone() for leaf in elements.parameters()]
        optimizer.zero_grad()
        compiled(TOKENS).square().mean().backward()
        for leaf, gradient in zip(elements.parameters(), expected, strict=True):
            assert torch.allclose(leaf.grad, gradient, rtol=1e-5, atol=1e-8)
        optimizer.step()
        assert torch.allclose(compiled(TOKENS), model(TOKENS), rtol=1e-6, atol=1e-7)
    with torch.no_grad():
        next(elements.parameters()).add_(1.0)
    assert torch.allclose(compiled(TOKENS), model(TOKENS), rtol=1e-6, atol=1e-7)


def test_derivatives_of_a_model_in_training(model):
    plain = copy.deepcopy(model)
    eg.trainable(model, PLACES)
    for wrt in ("fold[2:4, 1]", "head.weight[3]", "mix"):
        expected = eg.grad(plain, TOKENS, of="output[0, 1, 2]", wrt=wrt)
        assert torch.allclose(eg.grad(model, TOKENS, of="output[0, 1, 2]", wrt=wrt), expected, rtol=1e-5, atol=1e-7)
    assert not [row.name for row in eg.names(model, TOKENS) if "_elements_" in row.name]


def test_chosen_places_train(model):
    def loss(model):
        return functional.cross_entropy(model(TOKENS).flatten(0, 1), TOKENS.flatten())

    elements = eg.trainable(model, eg.top(model, loss, 20))
    before = state(model)
    train(model, elements)
    assert sum(int((p != before[name]).sum()) for name, p in model.named_parameters() if name in before) == 20
