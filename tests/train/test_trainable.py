"""Elements of PyTorch models that train: the model stays what it was to everybody who looks at it."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import elementgrad as eg
from tests.support.tagger import PLACES, TOKENS, Tagger, assert_same, moved, state, train


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Tagger()


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


def test_loading_weights_of_the_same_training_keeps_the_originals(model):
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
    elements = eg.trainable(model, PLACES, keep=[])
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


def test_a_second_call_keeps_the_users_trainable_parameters(model):
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


def test_a_step_by_hand_through_data_is_seen(model):
    elements = eg.trainable(model, ["fold[0]", "head.bias"])
    for _ in range(2):
        model(TOKENS).square().mean().backward()
        for leaf in elements.parameters():
            leaf.data -= 0.1 * leaf.grad
            leaf.grad = None
        after = model(TOKENS)
        assert torch.equal(model.head.bias, elements["head.bias"])
        assert torch.equal(after, copy.deepcopy(model)(TOKENS))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float16, "bfloat16", "int32", "nonsense"])
def test_dtypes_that_cannot_hold_the_values_are_refused(model, dtype):
    before = state(model)
    with pytest.raises(eg.OptionError, match="dtype="):
        eg.trainable(model, "fold", dtype=dtype)
    assert_same(model.state_dict(), before)
    assert model.fold.requires_grad
