"""The gradient of elements in normalisation, attention, recurrent and shared layers."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations

import elementgrad as eg
from tests.support.training_checks import assert_gradients, assert_layer, numbers, tokens_below
from tests.support.training_models import MORE, PLACES, Tied, every

NORMS = {
    "layer": (lambda: nn.LayerNorm(4), (3, 4)),
    "layer over two axes": (lambda: nn.LayerNorm((3, 4)), (2, 3, 4)),
    "layer without bias": (lambda: nn.LayerNorm(4, bias=False), (2, 3, 4)),
    "layer of a vector": (lambda: nn.LayerNorm(4), (4,)),
    "layer of no rows": (lambda: nn.LayerNorm(4), (0, 4)),
    "rms": (lambda: nn.RMSNorm(4), (3, 4)),
    "rms over two axes": (lambda: nn.RMSNorm((3, 4), eps=0.1), (2, 3, 4)),
    "rms of a vector": (lambda: nn.RMSNorm(4), (4,)),
    "group": (lambda: nn.GroupNorm(2, 4), (3, 4, 5)),
    "instance": (lambda: nn.InstanceNorm1d(4, affine=True), (3, 4, 5)),
    "batch": (lambda: nn.BatchNorm1d(4), (5, 4)),
    "batch, evaluated": (lambda: nn.BatchNorm2d(4).eval(), (3, 4, 2, 2)),
}


@pytest.mark.parametrize("kind", NORMS)
def test_norms(kind):
    build, shape = NORMS[kind]
    assert_layer(build, [numbers(*shape)], close=None if "group" not in kind else 3e-6)


class ScaledEmbedding(nn.Embedding):
    """A table with another parameter beside it."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.scale = nn.Parameter(torch.ones(sizes[1]))

    def forward(self, ids):
        return super().forward(ids) * self.scale


OTHERS = {
    "embedding with a scale": (lambda: ScaledEmbedding(6, 4), [tokens_below(6, 2, 5)]),
    "bilinear": (lambda: nn.Bilinear(3, 4, 2), [numbers(5, 3), numbers(5, 4)]),
    "prelu": (lambda: nn.PReLU(4), [numbers(5, 4)]),
    "rnn": (lambda: nn.RNN(3, 4, 2), [numbers(5, 2, 3)]),
    "gru": (lambda: nn.GRU(3, 4, 2, batch_first=True, bidirectional=True), [numbers(2, 5, 3)]),
    "lstm": (lambda: nn.LSTM(3, 4, bidirectional=True), [numbers(5, 2, 3)]),
    "projected lstm": (lambda: nn.LSTM(3, 4, proj_size=2), [numbers(5, 2, 3)]),
    "gru cell": (lambda: nn.GRUCell(3, 4), [numbers(5, 3)]),
    "lstm cell": (lambda: nn.LSTMCell(3, 4), [numbers(5, 3)]),
    "transformer": (lambda: nn.TransformerEncoderLayer(4, 2, 6, 0.0, batch_first=True), [numbers(2, 3, 4)]),
    "decoder": (lambda: nn.TransformerDecoderLayer(4, 2, 6, 0.0), [numbers(2, 3, 4), numbers(5, 3, 4)]),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_layers(kind):
    close = 3e-6 if kind in ("transformer", "decoder") else None  # differences of nearly equal terms
    # Without gradients PyTorch multiplies a batch that comes first, and a GRU, in another order.
    assert_layer(*OTHERS[kind], close=close, like_frozen=kind not in ("gru", "transformer"))


def _triangle(size):
    return torch.ones(size, size, dtype=torch.bool).triu(1)


ATTENTIONS = {
    "of itself": ({}, [numbers(5, 2, 4)], lambda m, x: m(x, x, x)),
    "of itself, no weights": ({}, [numbers(5, 2, 4)], lambda m, x: m(x, x, x, need_weights=False)),
    "keys are values": ({}, [numbers(5, 2, 4), numbers(3, 2, 4)], lambda m, x, y: m(x, y, y)),
    "three inputs": ({}, [numbers(5, 2, 4), numbers(3, 2, 4), numbers(3, 2, 4)], lambda m, *xs: m(*xs)),
    "other sizes": (
        {"kdim": 3, "vdim": 5},
        [numbers(5, 2, 4), numbers(3, 2, 3), numbers(3, 2, 5)],
        lambda m, *xs: m(*xs),
    ),
    "batch first": ({"batch_first": True}, [numbers(2, 5, 4)], lambda m, x: m(x, x, x, average_attn_weights=False)),
    "unbatched": ({}, [numbers(5, 4)], lambda m, x: m(x, x, x)),
    "without bias": ({"bias": False}, [numbers(5, 2, 4)], lambda m, x: m(x, x, x)),
    "more keys": ({"add_bias_kv": True, "add_zero_attn": True}, [numbers(5, 2, 4)], lambda m, x: m(x, x, x)),
    "masked": ({}, [numbers(5, 2, 4)], lambda m, x: m(x, x, x, attn_mask=_triangle(5))),
    "causal": (
        {},
        [numbers(5, 2, 4)],
        lambda m, x: m(x, x, x, attn_mask=_triangle(5), is_causal=True, need_weights=False),
    ),
    "evaluated": ({"batch_first": True}, [numbers(2, 5, 4)], lambda m, x: m.eval()(x, x, x)),
}


@pytest.mark.parametrize("kind", ATTENTIONS)
def test_attention(kind):
    options, inputs, call = ATTENTIONS[kind]
    # Without gradients PyTorch evaluates it by a function of its own, and multiplies in another order if the batch
    # comes first.
    like_frozen = kind not in ("evaluated", "batch first")
    assert_layer(lambda: nn.MultiheadAttention(4, 2, **options), inputs, call=call, close=3e-6, like_frozen=like_frozen)


class Twice(nn.Module):
    """A module called twice."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(self.layer(x).tanh())


class Pair(nn.Module):
    """Two modules with one weight, each with a bias of its own."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(self.first(x).tanh())


class Lists(nn.Module):
    """Parameters in a list, in a dict, and in attributes that are neither."""

    def __init__(self):
        super().__init__()
        self.many = nn.ParameterList([torch.randn(4, 4), torch.randn(4)])
        self.known = nn.ParameterDict({"scale": torch.randn(4), "shift": torch.randn(4)})
        self.own = nn.Parameter(torch.randn(4, 4))
        self.kept = [self.own, {"again": self.own}]
        self.other = [self.many[1]]

    def forward(self, x):
        x = x @ self.many[0] + self.many[1] * self.other[0]
        x = x * self.known["scale"] + self.known["shift"]
        return (x @ self.kept[0]).tanh() @ self.kept[1]["again"].t()


class Reshaped(nn.Module):
    """A weight that is used through views, norms of itself and pieces."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        w = self.layer.weight
        return self.layer(x) @ w.t()[:, :1] + w.view(-1)[:1] * functional.normalize(w, dim=0).sum() + w.norm()


class Subclass(nn.Linear):
    """A layer with more to it than its kind."""

    def forward(self, x):
        return super().forward(x).tanh() + self.weight.sum()


SHARING = {
    "a module called twice": (Twice, [numbers(3, 4)]),
    "two modules with one weight": (Pair, [numbers(3, 4)]),
    "a tied head": (lambda: Tied(False), [tokens_below(6, 2, 3)]),
    "a head that is a function": (lambda: Tied(True), [tokens_below(6, 2, 3)]),
    "lists and dicts": (Lists, [numbers(3, 4)]),
    "other uses of a weight": (Reshaped, [numbers(3, 4)]),
    "a subclass": (lambda: Subclass(4, 4), [numbers(3, 4)]),
    "one block in two places": (
        lambda: (lambda block: nn.Sequential(block, nn.Tanh(), block))(nn.Conv1d(4, 4, 3, padding=1)),
        [numbers(2, 4, 5)],
    ),
    "weight norm": (lambda: parametrizations.weight_norm(nn.Linear(4, 4)), [numbers(3, 4)]),
    "weight norm of a convolution": (
        lambda: parametrizations.weight_norm(nn.Conv1d(4, 4, 3)),
        [numbers(2, 4, 5)],
    ),
    "spectral norm": (lambda: parametrizations.spectral_norm(nn.Linear(4, 4)).eval(), [numbers(3, 4)]),
}


@pytest.mark.parametrize("kind", SHARING)
def test_shared_parameters(kind):
    assert_layer(*SHARING[kind], close=3e-6)


def test_a_model_of_every_kind():
    model, tokens = every()
    assert_gradients(model, PLACES + MORE, tokens, close=1e-5, like_frozen=None)
    model, tokens = every()
    assert_gradients(model.double(), PLACES + MORE, tokens, like_frozen=None)


def test_hooks_run_as_for_the_plain_model():
    torch.manual_seed(0)
    model, heard = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)), []
    model[0].register_full_backward_hook(lambda module, given, output: heard.append(output[0].clone()))
    plain, x = copy.deepcopy(model), torch.randn(3, 4)
    elements = eg.trainable(model, ["0.weight[1, 2]", "0.bias"])
    model(x).square().sum().backward()
    plain(x).square().sum().backward()
    torch.testing.assert_close(heard[0], heard[1], rtol=1e-6, atol=0)
    torch.testing.assert_close(elements["0.bias"].grad, plain[0].bias.grad)
