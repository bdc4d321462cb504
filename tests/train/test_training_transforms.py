"""Transforms of torch.func over models in training, and made models."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import elementgrad as eg
from tests.support.made import counts
from tests.support.training_checks import HOW, assert_gradients, places_of


def functional_model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 2)).double()
    places = ["0.weight[1, :]", "0.bias[2]", "1.weight[::2]", "3.weight[[0, 1], [1, 3]]"]
    plain = copy.deepcopy(model)
    elements = eg.trainable(model, places)
    x = torch.randn(5, 3, dtype=torch.float64)
    leaves = {
        name: leaf for name, leaf in model.named_parameters() if any(leaf is other for other in elements.parameters())
    }
    assert len(leaves) == len(places)
    names = dict(zip(leaves, elements, strict=True))
    held = {name: tensor.detach() for name, tensor in plain.named_parameters()}
    return model, plain, elements, x, {name: leaf.detach() for name, leaf in leaves.items()}, names, held


def dense_entries(tensors, names):
    found = {}
    for name, place in names.items():
        tensor = tensors[place.name]
        shape = tuple(held_shape(place))
        lead = tensor.dim() - len(shape)
        at = torch.from_numpy(place.select(shape).flat().reshape(-1).copy())
        found[name] = tensor.reshape(*tensor.shape[:lead], -1)[..., at]
    return found


def held_shape(place):
    return {"0.weight": (4, 3), "0.bias": (4,), "1.weight": (4,), "3.weight": (2, 4)}[place.name]


def assert_all_close(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-10, atol=1e-13)


def called(model, tensors, x):
    return torch.func.functional_call(model, tensors, x)


@pytest.mark.parametrize("transform", ["grad", "vmap of grad", "jacrev", "jacfwd", "hessian diagonal"])
def test_transforms_over_functional_calls(transform):
    model, plain, _, x, leaves, names, held = functional_model()
    grad, vmap, jacrev, jacfwd = torch.func.grad, torch.func.vmap, torch.func.jacrev, torch.func.jacfwd

    def loss(model):
        return lambda tensors, x: called(model, tensors, x).square().sum()

    def output(model):
        return lambda tensors, x: called(model, tensors, x)

    run = {
        "grad": lambda model, tensors: grad(loss(model))(tensors, x),
        "vmap of grad": lambda model, tensors: vmap(grad(loss(model)), (None, 0))(tensors, x),
        "jacrev": lambda model, tensors: jacrev(output(model))(tensors, x),
        "jacfwd": lambda model, tensors: jacfwd(output(model))(tensors, x),
        "hessian diagonal": lambda model, tensors: grad(
            lambda t, x: sum(g.square().sum() for n, g in grad(loss(model))(t, x).items() if n in t)
        )(tensors, x),
    }[transform]
    if transform == "hessian diagonal":
        # Of the same function: the gradient of the elements alone, squared.
        def entries(tensors):
            put = {name: tensor.clone() for name, tensor in held.items()}
            for name, place in names.items():
                at = torch.from_numpy(place.select(tuple(held[place.name].shape)).flat().reshape(-1).copy())
                flat_ = put[place.name].reshape(-1).index_put((at,), tensors[name])
                put[place.name] = flat_.view(held[place.name].shape)
            return called(plain, put, x).square().sum()

        expected = grad(lambda t: sum(g.square().sum() for g in grad(entries)(t).values()))(leaves)
        assert_all_close(run(model, leaves), expected)
        return
    assert_all_close(run(model, leaves), dense_entries(run(plain, held), names))


def test_forward_mode_over_a_functional_call_and_over_the_input():
    model, plain, _, x, leaves, names, held = functional_model()
    tangents = {name: torch.randn_like(leaf) for name, leaf in leaves.items()}
    spread = {name: torch.zeros_like(tensor) for name, tensor in held.items()}
    for name, place in names.items():
        at = torch.from_numpy(place.select(tuple(held[place.name].shape)).flat().reshape(-1).copy())
        spread[place.name].view(-1)[at] = tangents[name]
    _, found = torch.func.jvp(lambda leaves: called(model, leaves, x), (leaves,), (tangents,))
    _, expected = torch.func.jvp(lambda held: called(plain, held, x), (held,), (spread,))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-13)
    along = torch.randn_like(x)
    _, found = torch.func.jvp(model, (x,), (along,))
    _, expected = torch.func.jvp(plain, (x,), (along,))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-13)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, along)
        tangent = torch.autograd.forward_ad.unpack_dual(model(dual)).tangent
    torch.testing.assert_close(tangent, expected, rtol=1e-10, atol=1e-13)


def test_transforms_over_the_input_leave_the_elements_training():
    model, plain, elements, x, _, _, _ = functional_model()
    for transform in (torch.func.jacrev, torch.func.jacfwd):
        torch.testing.assert_close(transform(model)(x), transform(plain)(x), rtol=1e-10, atol=1e-13)
    torch.testing.assert_close(torch.func.vmap(model)(x), plain(x), rtol=1e-10, atol=1e-13)
    # Per example, as the input's own gradient, with the elements' beside it.
    x.requires_grad_()
    model(x).square().sum().backward()
    assert all(leaf.grad is not None for leaf in elements.parameters())


@st.composite
def models(draw):
    """A few layers of any kinds that fit on one another, and for which seeds."""
    width = draw(st.integers(2, 5))  # a norm of one number is nothing but rounding
    layers = draw(
        st.lists(
            st.sampled_from(["linear", "bare", "norm", "rms", "conv", "depthwise", "attention", "gru", "again"]),
            min_size=1,
            max_size=4,
        )
    )
    table = draw(st.sampled_from([None, "embedding", "bag", "tied"]))
    shape = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    how = draw(st.sampled_from(HOW))
    return width, layers, table, shape, how, draw(st.integers(0, 2**31))


class Made(nn.Module):
    def __init__(self, width, layers, table):
        super().__init__()
        self.kinds, self.table = layers, table
        self.steps = nn.ModuleList()
        for kind in layers:
            self.steps.append(self._built(kind, width))
        if table is not None:
            self.tokens = nn.EmbeddingBag(6, width) if table == "bag" else nn.Embedding(6, width)
        if table == "tied":
            self.head = nn.Linear(width, 6, bias=False)
            self.head.weight = self.tokens.weight

    def _built(self, kind, width):
        if kind == "again" and len(self.steps):
            return self.steps[0]
        return {
            "linear": lambda: nn.Linear(width, width),
            "bare": lambda: nn.Linear(width, width, bias=False),
            "norm": lambda: nn.LayerNorm(width),
            "rms": lambda: nn.RMSNorm(width),
            "conv": lambda: nn.Conv1d(width, width, 3, padding="same"),
            "depthwise": lambda: nn.Conv1d(width, width, 2, padding=1, groups=width),
            "attention": lambda: nn.MultiheadAttention(width, 1, batch_first=True),
            "gru": lambda: nn.GRU(width, width, batch_first=True),
            "again": lambda: nn.Linear(width, width),
        }[kind]()

    def forward(self, ids, x):
        if self.table is not None:
            rows = self.tokens(ids)
            x = x + (rows.unsqueeze(1) if self.table == "bag" else rows)
        for step in self.steps:
            if isinstance(step, nn.Conv1d):
                y = step(x.transpose(1, 2)).transpose(1, 2)[:, : x.shape[1]]
            elif isinstance(step, nn.MultiheadAttention):
                y = step(x, x, x, need_weights=False)[0]
            else:
                y = step(x)[0] if isinstance(step, nn.GRU) else step(x)
            x = x + y.tanh()
        return self.head(x) if self.table == "tied" else x


@settings(max_examples=counts(300))
@given(models())
def test_made_models_have_the_gradients_of_the_plain_model(made):
    width, layers, table, (batch, length), how, seed = made
    torch.manual_seed(seed)
    model = Made(width, layers, table).double()
    ids, x = torch.randint(6, (batch, length)), torch.randn(batch, length, width, dtype=torch.float64)
    # Without gradients PyTorch multiplies in another order in these.
    like_frozen = not {"gru", "attention"} & set(layers)
    assert_gradients(model, places_of(model, how, seed), ids, x, like_frozen=like_frozen)
