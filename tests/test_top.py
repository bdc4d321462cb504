"""The elements with the largest scores are those of a dense computation; nothing is disturbed, nothing piles up."""

import copy
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import elementgrad as eg
from elementgrad.backends.torch import scores as torch_scores
from elementgrad.train import ranking
from tests.made import counts

HOW = ("gradient", "fisher")


def dense(model, loss_fn, by):
    """Scores of all elements, by plain autograd on a copy of the model."""
    model = copy.deepcopy(model)
    floating = [(name, p.requires_grad_()) for name, p in model.named_parameters() if p.is_floating_point()]
    names, parameters = zip(*floating, strict=True)
    returned = loss_fn(model)
    losses = [returned] if isinstance(returned, torch.Tensor) else list(returned)
    numbers = [number for loss in losses for number in loss.reshape(-1)]
    numbers = numbers if by == "fisher" else [sum(numbers)]
    scores: dict = {}
    for number in numbers:
        gradients = torch.autograd.grad(number, parameters, retain_graph=True, allow_unused=True)
        for name, gradient in zip(names, gradients, strict=True):
            if gradient is not None:
                size = gradient.to_dense().double().abs()
                scores[name] = scores.get(name, 0) + (size**2 if by == "fisher" else size)
    return {name: scores[name] for name in names if name in scores}


def best(scores, k, allowed=lambda name, position: True):
    """Of equal ones the first, by parameter and position."""
    rows = [
        (-score, number, position, name)
        for number, (name, values) in enumerate(scores.items())
        for position, score in enumerate(values.reshape(-1).tolist())
        if allowed(name, position)
    ]
    return sorted((number, name, position) for _, number, position, name in sorted(rows)[:k])


def named(places, model):
    """The same for what `top` gave, which must be in order."""
    shapes = {name: (number, tuple(p.shape)) for number, (name, p) in enumerate(model.named_parameters())}
    found = []
    for place in places:
        number, shape = shapes[place.name]
        assert place.tensor is None
        assert place.pointwise == bool(shape)
        positions = place.select(shape).flat().reshape(-1).tolist()
        assert positions == sorted(set(positions))
        found += [(number, place.name, position) for position in positions]
    assert found == sorted(found)
    assert len({place.name for place in places}) == len(places)
    return found


def assert_best(model, loss_fn, k, by, **options):
    scores = dense(model, loss_fn, by)
    given = named(eg.top(model, loss_fn, k, by, **options), model)
    assert [element[1:] for element in given] == [element[1:] for element in best(scores, k)]


def mlp():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x, y = torch.randn(6, 5).double(), torch.tensor([0, 1, 2, 0, 1, 2])
    return model, lambda model: cross_entropy(model(x), y, reduction="none")


def conv():
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(12, 3)
    ).double()
    model[0].to(memory_format=torch.channels_last)  # positions count in the order of the axes all the same
    x, y = torch.randn(4, 2, 4, 4).double(), torch.tensor([0, 1, 2, 0])

    def loss_fn(model):
        torch.manual_seed(3)
        return cross_entropy(model(x), y, reduction="none")

    return model, loss_fn


def gru():
    torch.manual_seed(2)
    model = nn.ModuleDict({"rnn": nn.GRU(2, 3, num_layers=2, bidirectional=True), "head": nn.Linear(6, 2)}).double()
    x = torch.randn(4, 3, 2).double()
    return model, lambda model: model["head"](model["rnn"](x)[0][-1]).square().sum(1)


def gpt2():
    transformers = pytest.importorskip("transformers", reason="Hugging Face's models come with the newest packages")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2, n_embd=8, n_head=2, vocab_size=11, n_positions=8, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config).double().eval()
    ids = torch.tensor([[3, 1, 4, 1, 5], [2, 7, 1, 8, 2]])
    return model, lambda model: [model(row[None], labels=row[None]).loss for row in ids]


def frozen():
    model, loss_fn = mlp()
    model[0].requires_grad_(False)
    return model, loss_fn


def bf16():
    model, _ = mlp()
    x, y = torch.randn(6, 5).bfloat16(), torch.tensor([0, 1, 2, 0, 1, 2])
    return model.bfloat16(), lambda model: cross_entropy(model(x).float(), y)


class Sparse(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.table = nn.Embedding(9, 3, **options)
        self.scale = nn.Parameter(torch.tensor(3.0))
        self.steps = nn.Parameter(torch.tensor(3), requires_grad=False)
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.other = nn.Linear(3, 3)  # which nobody calls

    def forward(self, ids):
        return self.table(ids).sum(-1) * self.scale + self.empty.sum()


def sparse():
    torch.manual_seed(4)
    return Sparse(sparse=True).double(), lambda model: model(torch.tensor([1, 1, 4])).square()


def renormed():
    torch.manual_seed(4)
    return Sparse(max_norm=0.1).double(), lambda model: model(torch.tensor([1, 1, 4])).square()


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh())
        self.head = nn.Linear(4, 2)
        self.reentrant = reentrant

    def forward(self, x):
        return self.head(checkpoint(self.block, x, use_reentrant=self.reentrant))


def checkpointed(reentrant):
    torch.manual_seed(5)
    x = torch.randn(3, 4).double().requires_grad_()
    return Checkpointed(reentrant).double(), lambda model: model(x).square().sum(1)


MODELS = {
    "mlp": mlp,
    "conv": conv,
    "gru": gru,
    "gpt2": gpt2,
    "frozen": frozen,
    "bf16": bf16,
    "sparse": sparse,
    "renormed": renormed,
    "checkpoint": lambda: checkpointed(False),
}


@pytest.mark.parametrize("by", HOW)
@pytest.mark.parametrize("which", MODELS)
def test_the_largest_gradients_are_those_of_a_dense_computation(which, by):
    model, loss_fn = MODELS[which]()
    size = sum(values.numel() for values in dense(model, loss_fn, by).values())
    for k in (1, 7, size // 2, size):
        assert_best(model, loss_fn, k, by)


def test_reentrant_checkpoints_too():
    (model, loss_fn), (other, other_loss) = checkpointed(True), checkpointed(False)
    assert eg.top(model, loss_fn, 9, "fisher") == eg.top(other, other_loss, 9, "fisher")


@pytest.mark.parametrize("by", HOW)
@pytest.mark.parametrize("which", ["mlp", "conv", "gru"])
def test_losses_may_come_as_a_number_a_vector_a_list_or_one_by_one(which, by, monkeypatch):
    model, vector = MODELS[which]()
    for loss_fn in (
        lambda model: vector(model).sum(),
        lambda model: list(vector(model)),
        lambda model: (vector(model)[i] for i in range(3)),
        lambda model: iter([vector(model)[:2], vector(model)[2]]),
        lambda model: (vector(model)[:2], vector(model)[2]),
    ):
        assert_best(model, loss_fn, 11, by)


@settings(max_examples=counts(40))
@given(st.data())
def test_made_models(data):
    torch.manual_seed(data.draw(st.integers(0, 99)))
    widths = data.draw(st.lists(st.integers(1, 4), min_size=2, max_size=4))
    layers = [nn.Linear(a, b, bias=data.draw(st.booleans())) for a, b in pairwise(widths)]
    model = nn.Sequential(*[part for layer in layers for part in (layer, nn.ReLU())]).double()  # ties: dead units
    if data.draw(st.booleans()) and layers[0].weight.shape == layers[-1].weight.shape:
        layers[0].weight = layers[-1].weight
    for p in model.parameters():
        p.requires_grad_(data.draw(st.booleans()))
        p.data = p.data.mul(4).round()  # more ties
    x = torch.randint(-2, 3, (data.draw(st.integers(1, 3)), widths[0])).double()
    by = data.draw(st.sampled_from(HOW))
    lazy = data.draw(st.booleans())

    def loss_fn(model):
        return (model(row).sum() for row in x) if lazy else model(x).sum(1)

    k = data.draw(st.integers(1, sum(p.numel() for p in model.parameters())))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_scores, "PIECE", data.draw(st.integers(1, 5)))
        patch.setattr(ranking, "ROOM", data.draw(st.integers(0, 3)))
        assert_best(model, loss_fn, k, by)


@given(st.lists(st.integers(-3, 3), max_size=40), st.integers(1, 50), st.integers(1, 9), st.integers(0, 3))
def test_the_largest_of_a_tensor_and_the_first_of_equal_ones(values, count, piece, floor):
    x = torch.tensor(values, dtype=torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_scores, "PIECE", piece)
        sizes, positions = torch_scores.largest(x, count, floor, None)
    order = sorted((i for i in range(len(x)) if abs(values[i]) >= floor), key=lambda i: (-abs(values[i]), i))[:count]
    assert positions.tolist() == sorted(order)
    assert sizes.tolist() == [abs(values[i]) for i in sorted(order)]


def test_magnitude_and_how_far_elements_have_moved():
    model, _ = mlp()
    sizes = {name: p.detach().abs() for name, p in model.named_parameters()}
    assert named(eg.top(model, None, 9, "magnitude"), model) == best(sizes, 9)
    before, state = copy.deepcopy(model), copy.deepcopy(model.state_dict())
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p))
    moved = {name: (p.detach() - state[name]).abs() for name, p in model.named_parameters()}
    expected = best(moved, 9)
    for since in (before, state, dict(before.named_parameters()), {**state, "head.weight": torch.ones(1), 3: None}):
        assert named(eg.top(model, None, 9, by="magnitude", since=since), model) == expected
    half = eg.top(model.bfloat16(), print, 9, by="magnitude", since=state)
    moved = {name: (p.detach().double() - state[name]).abs() for name, p in model.named_parameters()}
    assert named(half, model) == best(moved, 9)


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


@pytest.mark.parametrize("by", HOW)
def test_among_some_parameters_or_some_of_their_elements(by):
    model, loss_fn = mlp()
    scores = dense(model, loss_fn, by)
    cases = [
        ("0.weight", lambda name, at: name == "0.weight"),
        (["4.bias", eg.at("0.weight")[1]], lambda name, at: name == "4.bias" or (name == "0.weight" and at // 5 == 1)),
        (model[2].weight, lambda name, at: name == "2.weight"),
        ({"0.bias[2:]", "0.bias[[3, 3, 0]]"}, lambda name, at: name == "0.bias" and at != 1),
        ([eg.at(model[0].weight).coords([[1, 1], [0, 4], [2, 3]])], lambda name, at: (name, at) in POINTS),
        ((f"{name} (parameter)" for name, _ in model[:2].named_parameters()), lambda name, at: name[0] == "0"),
        (["2.bias[0]", "2.bias"], lambda name, at: name == "2.bias"),
        ("0.weight[:, ::-2]", lambda name, at: name == "0.weight" and at % 5 % 2 == 0),
    ]
    numbers = {name: number for number, (name, _) in enumerate(model.named_parameters())}
    for among, allowed in cases:
        expected = [(numbers[name], name, at) for _, name, at in best(scores, 3, allowed)]
        assert named(eg.top(model, loss_fn, 3, by, among=among), model) == expected


POINTS = {("0.weight", 6), ("0.weight", 4), ("0.weight", 13)}


def test_parameters_without_axes_are_named_whole_and_unreached_ones_never():
    model, loss_fn = sparse()
    places = eg.top(model, loss_fn, 28)
    assert [place.name for place in places] == ["scale", "table.weight"]
    assert places[0] == eg.at("scale")
    bare = nn.ParameterDict({"x": torch.tensor(2.0)})
    assert eg.top(bare, lambda model: model["x"], 1) == [eg.at("x")]  # a loss that is a parameter itself
    assert eg.top(bare, None, 1, "magnitude") == [eg.at("x")]


def test_k_may_be_an_int_of_numpy():
    model, loss_fn = mlp()
    assert eg.top(model, loss_fn, np.int64(3)) == eg.top(model, loss_fn, 3)


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
