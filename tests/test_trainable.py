"""Elements of PyTorch models that train: the model stays what it was to everybody who looks at it."""

import copy
import io
import os
import pickle
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import elementgrad as eg


class Tagger(nn.Module):
    """Tokens to scores of tokens, by layers of many kinds; the first and the last share a weight."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(12, 6)
        self.mix = nn.Conv1d(6, 6, 3, padding=1)
        self.norm = nn.LayerNorm(6)
        self.attend = nn.MultiheadAttention(6, 2, batch_first=True)
        self.walk = nn.GRU(6, 6, batch_first=True)
        self.fold = nn.Parameter(torch.randn(6, 6) / 3)
        self.head = nn.Linear(6, 12)
        self.head.weight = self.table.weight

    def forward(self, tokens):
        x = self.table(tokens)
        x = x + self.mix(x.transpose(1, 2)).transpose(1, 2).relu_()
        x = self.norm(x + self.attend(x, x, x)[0])
        x = x + self.walk(x)[0] + torch.einsum("bti,ji->btj", x, self.fold)
        return self.head(x)


PLACES = [
    "table.weight[0, 5]",
    "head.weight[3, :]",
    "head.bias[2]",
    "mix.weight[1, 2]",
    "norm.weight[::2]",
    "attend.in_proj_weight[4, 2]",
    "attend.out_proj.weight[1]",
    "walk.weight_hh_l0[3, 4]",
    "fold[2:4, 1]",
]
TOKENS = torch.tensor([[0, 3, 7, 1], [2, 3, 0, 11]])


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Tagger()


def state(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same(one, other):
    assert list(one) == list(other)
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def train(model, elements, steps=3, tokens=TOKENS):
    optimizer = torch.optim.AdamW(elements.parameters(), lr=0.05, weight_decay=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(tokens).square().mean().backward()
        optimizer.step()
    return optimizer


def moved(model, before):
    return {name: int((tensor != before[name]).sum()) for name, tensor in model.state_dict().items()}


def test_only_the_named_elements_move(model):
    before = state(model)
    elements = eg.trainable(model, PLACES)
    train(model, elements)
    counts = moved(model, before)
    assert counts == dict.fromkeys(before, 0) | {
        "table.weight": 7,
        "head.weight": 7,
        "head.bias": 1,
        "mix.weight": 3,
        "norm.weight": 3,
        "attend.in_proj_weight": 1,
        "attend.out_proj.weight": 6,
        "walk.weight_hh_l0": 1,
        "fold": 2,
    }
    assert elements.size == 24
    assert [str(place) for place in elements] == PLACES


def test_the_state_dict_is_that_of_the_plain_model(model):
    plain = copy.deepcopy(model)
    elements = eg.trainable(model, PLACES)
    train(model, elements)
    assert list(model.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(model.state_dict(), strict=True)
    assert torch.allclose(plain(TOKENS), model(TOKENS), rtol=1e-6, atol=1e-6)
    model.load_state_dict(plain.state_dict(), strict=True)


def test_loaded_values_are_trained_on(model):
    elements = eg.trainable(model, PLACES)
    other = {name: tensor + 1 for name, tensor in model.state_dict().items()}
    model.load_state_dict(other)
    assert elements["fold[2:4, 1]"].tolist() == other["fold"][2:4, 1].tolist()
    train(model, elements)
    elements.undo()
    assert_same(model.state_dict(), other)


def test_a_checkpoint_of_the_same_training_keeps_the_originals(model):
    before = state(model)
    elements = eg.trainable(model, PLACES)
    train(model, elements)
    saved = state(model)
    train(model, elements)
    model.load_state_dict(saved)
    assert_same(model.state_dict(), saved)
    elements.undo()
    assert_same(model.state_dict(), before)


def test_assigning_load_is_refused(model):
    eg.trainable(model, "fold")
    with pytest.raises(RuntimeError, match="assign=False"):
        model.load_state_dict(state(model), assign=True)


def test_a_trained_parameter_cannot_be_replaced_unnoticed(model):
    eg.trainable(model, "head.weight[0]")
    with pytest.raises(AttributeError, match="cannot be replaced"):
        model.head.weight = nn.Parameter(torch.zeros(12, 6))
    model.head.weight = model.table.weight  # as it is tied already


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_train_for_themselves(model, copied):
    elements = eg.trainable(model, PLACES)
    before = state(model)
    other = copied(model)
    assert torch.equal(other(TOKENS), model(TOKENS))
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    other(TOKENS).square().mean().backward()
    optimizer.step()
    assert_same(model.state_dict(), before)
    assert all(leaf.grad is None for leaf in elements.parameters())
    assert sum(moved(other, before).values()) == elements.size + 7  # the shared weight counts under both names


def test_torch_save_and_load(model):
    eg.trainable(model, PLACES)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    other = torch.load(file, weights_only=False)
    assert torch.equal(other(TOKENS), model(TOKENS))


def test_modules_look_as_before(model):
    shown = repr(model)
    eg.trainable(model, PLACES)
    assert repr(model) == shown
    assert isinstance(model.head, nn.Linear)
    assert isinstance(model.walk, nn.GRU)


def test_release_gives_the_plain_model_back(model):
    model.mix.bias.requires_grad_(False)
    flags = {name: tensor.requires_grad for name, tensor in model.named_parameters()}
    kinds = [type(module) for module in model.modules()]
    elements = eg.trainable(model, PLACES)
    assert not any(p.requires_grad for name, p in model.named_parameters() if name in flags)
    train(model, elements)
    after = state(model)
    elements.release()
    assert {name: tensor.requires_grad for name, tensor in model.named_parameters()} == flags
    assert [type(module) for module in model.modules()] == kinds
    assert all("_trained" not in vars(module) for module in model.modules())
    assert_same(model.state_dict(), after)
    model(TOKENS).sum().backward()
    assert model.fold.grad is not None
    with pytest.raises(eg.PlaceError, match="do not train"):
        elements.parameters()


def test_release_without_the_values(model):
    before = state(model)
    elements = eg.trainable(model, PLACES)
    train(model, elements)
    elements.release(keep=False)
    assert_same(model.state_dict(), before)


def test_undo_is_exact_and_training_goes_on(model):
    before = state(model)
    elements = eg.trainable(model, PLACES)
    train(model, elements)
    elements.undo()
    assert_same(model.state_dict(), before)
    train(model, elements)
    assert sum(moved(model, before).values()) == elements.size + 7
    elements.release()
    elements.undo()
    assert_same(model.state_dict(), before)


def test_a_second_call_adds_places(model):
    before = state(model)
    first = eg.trainable(model, "fold[0]")
    second = eg.trainable(model, ["fold[1, 1]", "head.weight[2, 2]"])
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    model(TOKENS).square().mean().backward()
    optimizer.step()
    assert moved(model, before)["fold"] == 7
    first.release(keep=False)
    assert not model.norm.weight.requires_grad  # the others still train alone
    optimizer.step()
    assert moved(model, before)["fold"] == 1
    second.release()
    assert model.norm.weight.requires_grad
    assert type(model.head) is nn.Linear


def test_a_second_call_keeps_what_the_user_let_train(model):
    eg.trainable(model, "fold[0]")
    model.norm.requires_grad_(True)
    second = eg.trainable(model, "fold[1]")
    assert model.norm.weight.requires_grad
    train(model, second, steps=1)
    assert model.norm.weight.grad is not None


def test_elements_that_train_already_are_refused(model):
    before = state(model)
    eg.trainable(model, "table.weight[2]")
    with pytest.raises(eg.DuplicateError, match=r"head.weight\[2, 3\] of head.weight\[:, 3\] trains already"):
        eg.trainable(model, eg.at("head.weight")[:, 3])
    assert_same(model.state_dict(), before)


def test_every_parameter_given_by_mistake_moves_nothing_else(model):
    before = state(model)
    elements = eg.trainable(model, "table.weight[0, 5]")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        model(TOKENS).square().mean().backward()
        optimizer.step()
    assert sum(moved(model, before).values()) == 2  # one element under two names
    assert elements["head.weight[0, 5]"].item() == model.table.weight[0, 5].item()


def test_gradients_left_over_from_before_move_nothing(model):
    model(TOKENS).square().mean().backward()
    before, gradient = state(model), model.head.bias.grad
    elements = eg.trainable(model, "fold[0, 0]")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    model(TOKENS).square().mean().backward()
    optimizer.step()
    assert {name: count for name, count in moved(model, before).items() if count} == {"fold": 1}
    elements.release()
    assert model.head.bias.grad is gradient


def test_groups_of_an_optimizer_by_place(model):
    elements = eg.trainable(model, ["fold[0, 0]", "head.bias"])
    optimizer = torch.optim.SGD(
        [{"params": elements["fold[0, 0]"], "lr": 0.0}, {"params": [elements["head.bias"]], "lr": 0.1}]
    )
    before = state(model)
    model(TOKENS).square().mean().backward()
    optimizer.step()
    assert moved(model, before)["fold"] == 0
    assert moved(model, before)["head.bias"] == 12


def test_places_are_found_by_what_they_name(model):
    elements = eg.trainable(model, ["table.weight[3, :]", eg.at(model.fold)[1, [0, 2]]])
    assert elements["head.weight[3]"] is elements[eg.at("table.weight")[3]]
    assert "fold[1, [0, 2]]" in elements
    assert "fold[1]" not in elements
    with pytest.raises(eg.PlaceError, match="is not one of these places"):
        elements["fold[1]"]


def test_half_precision_keeps_its_values_in_float32():
    layer = nn.Linear(4, 4).bfloat16()
    elements = eg.trainable(layer, "weight[0, 0]")
    leaf = elements["weight[0, 0]"]
    assert leaf.dtype == torch.float32
    start = leaf.item()
    optimizer = torch.optim.SGD([leaf], lr=1.0)
    for _ in range(50):  # each step alone is lost in bfloat16
        leaf.grad = torch.tensor([-start * 2**-12])
        optimizer.step()
    assert leaf.item() == pytest.approx(start * (1 + 50 * 2**-12), rel=1e-5)
    assert layer.weight[0, 0].item() == leaf.detach().bfloat16().item() != start
    assert eg.trainable(layer, "bias", dtype="float64")["bias"].dtype == torch.float64


def test_moving_the_model_takes_the_elements_along(model):
    elements = eg.trainable(model, PLACES)
    leaf = elements["fold[2:4, 1]"]
    model.double()
    assert elements["fold[2:4, 1]"] is leaf
    assert leaf.dtype == torch.float64
    before = state(model)
    train(model, elements)
    assert sum(moved(model, before).values()) == elements.size + 7
    model.bfloat16()
    assert leaf.dtype == torch.float32
    assert model(TOKENS).dtype == torch.bfloat16


def test_values_written_by_hand_count(model):
    elements = eg.trainable(model, "head.bias[2:4]")
    with torch.no_grad():
        elements["head.bias[2:4]"].fill_(5.0)
    assert model.head.bias[2:4].tolist() == [5.0, 5.0]
    assert model.state_dict()["head.bias"][2:4].tolist() == [5.0, 5.0]
    with torch.no_grad():
        model.head.bias[3] = 7.0
    model(TOKENS)
    assert elements["head.bias[2:4]"].tolist() == [5.0, 7.0]


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


def continued(places, steps, optimizer_state=None):
    torch.manual_seed(0)
    model = Tagger().bfloat16()
    elements = eg.trainable(model, places)
    optimizer = torch.optim.AdamW(elements.parameters(), lr=0.01, weight_decay=0.1)
    if optimizer_state is not None:
        optimizer.load_state_dict(optimizer_state)
    for _ in range(steps):
        optimizer.zero_grad()
        model(TOKENS).float().square().mean().backward()
        optimizer.step()
    return elements, optimizer


def test_resuming_in_another_process_is_exact(tmp_path):
    half, optimizer = continued(PLACES, 5)
    half.save(tmp_path / "half.safetensors")
    torch.save(optimizer.state_dict(), tmp_path / "half.pt")
    script = """
        import sys, torch
        from tests.test_trainable import continued
        elements, _ = continued("half.safetensors", 5, torch.load("half.pt"))
        elements.save("rest.safetensors")
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    path = os.pathsep.join([os.path.abspath(path) for path in sys.path if path] + [os.getcwd()])
    subprocess.run(command, check=True, timeout=300, cwd=tmp_path, env=os.environ | {"PYTHONPATH": path})
    whole, _ = continued(PLACES, 10)
    whole.save(tmp_path / "whole.safetensors")
    assert eg.inspect(tmp_path / "rest.safetensors") == eg.inspect(tmp_path / "whole.safetensors")
