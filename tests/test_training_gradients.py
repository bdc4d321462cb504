"""The gradients of elements that train are the entries of the dense gradient, for every layer, kernel and context."""

import copy
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import elementgrad as eg
from elementgrad.backends.torch.training import correlations, lookups
from elementgrad.backends.torch.training.products import Product
from tests.made import counts
from tests.training_models import MORE, PLACES, differing, every

CLOSE = {torch.float32: 1e-6, torch.float64: 1e-12, torch.complex64: 1e-6, torch.complex128: 1e-12}


HOW = ("one", "row", "scattered", "all")


def chosen(shape, how, rng):
    """Positions in a tensor of a shape, in no order."""
    size = int(np.prod(shape))
    if how == "one":
        return rng.integers(size, size=1)
    if how == "row":
        return np.arange(size).reshape(shape)[int(rng.integers(shape[0]))].reshape(-1)
    if how == "all":
        return np.arange(size)
    return rng.permutation(size)[: max(1, size // 2)]


def places_of(model, how, seed=0):
    """A place in every parameter, each parameter once."""
    rng = np.random.default_rng(seed)
    found = {}
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        if parameter.numel():
            found[name] = eg.at(name).coords(np.stack(np.unravel_index(chosen(shape, how, rng), shape), 1))
    return list(found.values())


def assert_entries(found, dense, place, close):
    """Entries of a gradient, up to a fraction of its largest."""
    at = torch.from_numpy(place.select(tuple(dense.shape)).flat().reshape(-1).copy())
    expected = dense.reshape(-1)[at]
    largest = float(dense.abs().max()) if dense.numel() else 0.0
    difference = float((found.to(expected.dtype) - expected).abs().max())
    assert difference <= close * largest + SMALLEST[dense.dtype], (
        f"{place}: {difference / max(largest, 1e-300):.2e} of the largest gradient"
    )


SMALLEST = {dtype: 4 * torch.finfo(dtype).eps for dtype in (*CLOSE, torch.bfloat16, torch.float16)}
"""What a gradient may differ by that is zero but for rounding."""


def flat(output):
    if isinstance(output, torch.Tensor):
        return [output]
    return [tensor for part in output for tensor in flat(part)] if isinstance(output, tuple | list) else []


def differentiable(inputs):
    return [
        x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
        if isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex())
        else x
        for x in inputs
    ]


def backward(outputs):
    torch.manual_seed(1)
    outputs = [output for output in outputs if output.requires_grad]
    torch.autograd.backward(outputs, [torch.randn_like(output) for output in outputs])


def limit(close, dtype):
    """How far gradients may be apart; a wider limit is for float32 and less, where the order of sums shows."""
    return CLOSE[dtype] if close is None or dtype == torch.float64 else close


def assert_gradients(model, places, *inputs, close=None, call=None, scaled=None, like_frozen=True, of_input=True):
    """Output, gradients of the elements and of the inputs, against the plain model's."""
    call = call or (lambda model, *inputs: model(*inputs))
    plain, frozen = copy.deepcopy(model).requires_grad_(True), copy.deepcopy(model).requires_grad_(False)
    if scaled:
        plain.scale_grad_by_freq = False
    elements = eg.trainable(model, places)
    given, expected, alone = [differentiable(inputs) if of_input else inputs for _ in range(3)]
    outputs, dense = flat(call(model, *given)), flat(call(plain, *expected))
    for output, same in zip(outputs, flat(call(frozen, *alone)), strict=True):
        assert output.dtype == same.dtype
        if like_frozen:
            assert output.stride() == same.stride()
            assert not differing(output, same).any(), "the output is not the frozen model's"
        else:
            assert (output - same).abs().max() <= 10 * limit(close, same.dtype) * same.abs().max()
    backward(outputs)
    backward(dense)
    gradients = {name: tensor.grad for name, tensor in plain.named_parameters(remove_duplicate=False)}
    for place in elements:
        gradient = gradients[place.name]
        gradient = torch.zeros_like(plain.get_parameter(place.name)) if gradient is None else gradient
        gradient = gradient.to_dense() if gradient.is_sparse else gradient
        gradient = scaled(plain, gradient, inputs[0]) if scaled else gradient
        leaf = elements[place]
        found = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        assert_entries(found, gradient, place, limit(close, gradient.dtype))
    for x, same in zip(given, expected, strict=True):
        if isinstance(x, torch.Tensor) and x.requires_grad and same.grad is not None:
            largest = float(same.grad.abs().max()) if same.grad.numel() else 0.0
            assert x.grad is not None, "the input hears nothing"
            if x.numel():
                assert (
                    float((x.grad - same.grad).abs().max())
                    <= limit(close, same.dtype) * largest + SMALLEST[same.dtype]
                )
    held = dict(frozen.named_parameters(remove_duplicate=False))
    assert all(parameter.grad is None for name, parameter in model.named_parameters() if name in held)
    return elements


WAYS = {
    "as chosen": lambda patch: None,
    "gather": lambda patch: _only(patch, "gather"),
    "block": lambda patch: _only(patch, "block"),
    "sample": lambda patch: _only(patch, "sample"),
}


def _only(patch, way):
    def cheapest(self, *ways):
        return getattr(self, f"_{way if way in ways else ways[0]}")

    patch.setattr(Product, "_cheapest", cheapest)


def _randn(*shape):
    return lambda dtype: torch.randn(shape, dtype=dtype)


def _ids(rows, *shape):
    return lambda dtype: torch.randint(rows, shape)


def assert_layer(build, inputs, every_way=HOW, **options):
    """A layer with each choice of elements, in both precisions."""
    for how, dtype in product(every_way, (torch.float32, torch.float64)):
        torch.manual_seed(0)
        model = build().to(dtype)
        for parameter in model.parameters():
            nn.init.normal_(parameter)
        xs = [make(dtype) for make in inputs]
        assert_gradients(copy.deepcopy(model), places_of(model, how), *xs, **options)
        if how == "scattered":  # and the inputs ask for nothing
            assert_gradients(model, places_of(model, how), *xs, of_input=False, **options)


INPUTS = {
    "vector": (_randn(4), lambda x: x),
    "matrix": (_randn(5, 4), lambda x: x),
    "three axes": (_randn(2, 3, 4), lambda x: x),
    "no rows": (_randn(0, 4), lambda x: x),
    "transposed": (_randn(4, 5), lambda x: x.t()),
    "permuted": (_randn(4, 2, 3), lambda x: x.permute(1, 2, 0)),
    "every second": (_randn(5, 8), lambda x: x[:, ::2]),
    "expanded": (_randn(1, 4), lambda x: x.expand(3, 4)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", INPUTS)
def test_linear(monkeypatch, shape, way):
    WAYS[way](monkeypatch)
    made, seen = INPUTS[shape]
    assert_layer(lambda: nn.Linear(4, 3), [made], call=lambda model, x: model(seen(x)))


@pytest.mark.parametrize("way", WAYS)
def test_large_linear_layers(monkeypatch, way):
    WAYS[way](monkeypatch)
    assert_layer(lambda: nn.Linear(70, 50, bias=False), [_randn(9, 70)])


CONVOLUTIONS = {
    "one axis": (lambda: nn.Conv1d(2, 3, 3), (2, 2, 7)),
    "two axes": (lambda: nn.Conv2d(2, 3, 3), (2, 2, 5, 6)),
    "three axes": (lambda: nn.Conv3d(2, 3, 2), (1, 2, 3, 4, 3)),
    "uneven kernel": (lambda: nn.Conv2d(2, 3, (1, 3)), (2, 2, 5, 6)),
    "stride": (lambda: nn.Conv2d(2, 3, 3, stride=2), (2, 2, 6, 7)),
    "uneven stride": (lambda: nn.Conv2d(2, 3, 3, stride=(1, 3), padding=(2, 1)), (2, 2, 6, 7)),
    "padding": (lambda: nn.Conv2d(2, 3, 3, padding=2), (2, 2, 4, 5)),
    "more padding than kernel": (lambda: nn.Conv1d(2, 3, 2, padding=4, stride=3), (2, 2, 4)),
    "dilation": (lambda: nn.Conv2d(2, 3, 3, dilation=2, padding=1), (2, 2, 6, 7)),
    "dilation past the input": (lambda: nn.Conv1d(2, 3, 3, dilation=4, padding=4), (2, 2, 3)),
    "groups": (lambda: nn.Conv2d(4, 6, 3, groups=2, padding=1), (2, 4, 4, 4)),
    "depthwise": (lambda: nn.Conv2d(4, 4, 3, groups=4, padding=1, stride=2), (2, 4, 5, 5)),
    "one by one": (lambda: nn.Conv2d(4, 3, 1), (2, 4, 3, 3)),
    "same": (lambda: nn.Conv2d(2, 3, 3, padding="same"), (2, 2, 4, 5)),
    "same, dilated": (lambda: nn.Conv2d(2, 3, 3, padding="same", dilation=2), (2, 2, 4, 5)),
    "same, even kernel": (lambda: nn.Conv2d(2, 3, (2, 4), padding="same"), (2, 2, 4, 5)),
    "same, even and odd": (lambda: nn.Conv2d(2, 3, (3, 2), padding="same", bias=False), (2, 2, 4, 5)),
    "valid": (lambda: nn.Conv1d(2, 3, 3, padding="valid"), (2, 2, 6)),
    "circular": (lambda: nn.Conv2d(2, 3, 3, padding=(1, 2), padding_mode="circular"), (2, 2, 4, 5)),
    "reflect": (lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"), (2, 2, 4, 5)),
    "replicate": (lambda: nn.Conv1d(2, 3, 3, padding=2, padding_mode="replicate"), (2, 2, 4)),
    "circular and same": (lambda: nn.Conv1d(2, 3, 4, padding="same", padding_mode="circular"), (2, 2, 6)),
    "unbatched": (lambda: nn.Conv2d(2, 3, 3, padding=1), (2, 4, 5)),
    "unbatched, circular": (lambda: nn.Conv1d(2, 3, 3, padding=1, padding_mode="circular"), (2, 4)),
    "no images": (lambda: nn.Conv2d(2, 3, 3), (0, 2, 4, 5)),
    "transposed": (lambda: nn.ConvTranspose2d(2, 3, 3, stride=2, padding=1, output_padding=1), (2, 2, 3, 3)),
    "lazy": (lambda: _once(nn.LazyConv1d(3, 3), torch.zeros(1, 2, 7)), (2, 2, 7)),
}


def _once(model, *inputs):
    model(*inputs)
    return model


@pytest.mark.parametrize("whole", [False, True], ids=["offset by offset", "whole channels"])
@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_convolutions(monkeypatch, kind, whole):
    monkeypatch.setattr(correlations, "MULTIPLIED", 0.0 if whole else 1e9)
    monkeypatch.setattr(correlations, "SELECTED", 0.0)
    build, shape = CONVOLUTIONS[kind]
    assert_layer(build, [_randn(*shape)])


@pytest.mark.parametrize("whole", [False, True], ids=["offset by offset", "whole channels"])
@pytest.mark.parametrize("weight", [False, True], ids=["images", "images and weight"])
def test_convolutions_with_channels_last(monkeypatch, whole, weight):
    monkeypatch.setattr(correlations, "MULTIPLIED", 0.0 if whole else 1e9)

    def build():
        model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Softplus(), nn.Conv2d(4, 2, 3, groups=2))
        return model.to(memory_format=torch.channels_last) if weight else model

    assert_layer(build, [lambda dtype: torch.randn(2, 3, 5, 6, dtype=dtype).to(memory_format=torch.channels_last)])


LOOKUPS = {
    "embedding": (lambda: nn.Embedding(6, 4), [_ids(6, 2, 5)]),
    "one token": (lambda: nn.Embedding(6, 4), [_ids(6)]),
    "no tokens": (lambda: nn.Embedding(6, 4), [_ids(6, 0)]),
    "int32 tokens": (lambda: nn.Embedding(6, 4), [lambda dtype: torch.randint(6, (2, 5), dtype=torch.int32)]),
    "tokens that lie apart": (lambda: nn.Embedding(6, 4), [lambda dtype: torch.randint(6, (5, 4)).t()[::2]]),
    "padding": (lambda: nn.Embedding(6, 4, padding_idx=2), [_ids(6, 2, 9)]),
    "padding from the end": (lambda: nn.Embedding(6, 4, padding_idx=-1), [_ids(6, 2, 9)]),
    "by frequency": (lambda: nn.Embedding(4, 4, scale_grad_by_freq=True), [_ids(4, 2, 9)]),
    "by frequency with padding": (lambda: nn.Embedding(4, 4, 1, scale_grad_by_freq=True), [_ids(4, 2, 9)]),
    "sparse": (lambda: nn.Embedding(6, 4, sparse=True), [_ids(6, 2, 5)]),
    "wide": (lambda: nn.Embedding(300, 20), [_ids(300, 40)]),
}


@pytest.mark.parametrize("crowded", [False, True], ids=["all rows", "rows that occur"])
@pytest.mark.parametrize("kind", LOOKUPS)
def test_lookups(monkeypatch, kind, crowded):
    monkeypatch.setattr(lookups, "ROOM", -(10**9) if crowded else 10**9)
    assert_layer(*LOOKUPS[kind])


OFFSETS = [lambda dtype: torch.tensor([0, 2, 2, 5])]
WEIGHTS = {
    "rows": [_ids(6, 3, 4)],
    "offsets": [_ids(6, 9), *OFFSETS],
    "int32": [lambda dtype: torch.randint(6, (9,), dtype=torch.int32), lambda dtype: torch.tensor([0, 2, 5]).int()],
    "weighted": [_ids(6, 9), *OFFSETS, _randn(9)],
    "weighted rows": [_ids(6, 3, 4), lambda dtype: None, _randn(3, 4)],
    "no tokens": [_ids(6, 0), lambda dtype: torch.tensor([0, 0])],
    "padding alone": [lambda dtype: torch.full((4,), 2), lambda dtype: torch.tensor([0, 3])],
}
BAGS = {
    "plain": {},
    "padding": {"padding_idx": 2},
    "closed": {"include_last_offset": True},
    "closed with padding": {"include_last_offset": True, "padding_idx": -1},
    "by frequency": {"scale_grad_by_freq": True},
    "by frequency with padding": {"scale_grad_by_freq": True, "padding_idx": 2},
    "sparse": {"sparse": True},
}


def _closed(starts, total, dtype):
    return functional.pad(starts(dtype), (0, 1), value=total)


def by_frequency(bag, gradient, tokens):
    """PyTorch's own, on the CPU, divides by how often another token occurs (up to 2.13)."""
    often = torch.bincount(tokens.reshape(-1).long(), minlength=len(gradient)).clamp(min=1)
    return gradient / often.unsqueeze(1)


@pytest.mark.parametrize("crowded", [False, True], ids=["all rows", "rows that occur"])
@pytest.mark.parametrize("kind", BAGS)
def test_bags(monkeypatch, kind, crowded):
    monkeypatch.setattr(lookups, "ROOM", -(10**9) if crowded else 10**9)
    options = BAGS[kind]
    closed = options.get("include_last_offset", False)
    for mode, (form, inputs) in product(("sum", "mean", "max"), WEIGHTS.items()):
        if "weighted" in form and mode != "sum":
            continue  # PyTorch weighs sums alone
        if mode == "max" and (options.get("scale_grad_by_freq") or options.get("sparse")):
            continue  # and has no such maximum
        if closed and "rows" in form:
            continue
        if closed:
            total, starts = len(inputs[0](torch.float32)), inputs[1]
            inputs = [inputs[0], partial(_closed, starts, total), *inputs[2:]]
        scaled = by_frequency if options.get("scale_grad_by_freq") else None
        some = ("scattered",) if crowded else ("one", "all")
        assert_layer(lambda mode=mode: nn.EmbeddingBag(6, 4, mode=mode, **options), inputs, some, scaled=scaled)


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
    assert_layer(build, [_randn(*shape)], close=None if "group" not in kind else 3e-6)


OTHERS = {
    "bilinear": (lambda: nn.Bilinear(3, 4, 2), [_randn(5, 3), _randn(5, 4)]),
    "prelu": (lambda: nn.PReLU(4), [_randn(5, 4)]),
    "rnn": (lambda: nn.RNN(3, 4, 2), [_randn(5, 2, 3)]),
    "gru": (lambda: nn.GRU(3, 4, 2, batch_first=True, bidirectional=True), [_randn(2, 5, 3)]),
    "lstm": (lambda: nn.LSTM(3, 4, bidirectional=True), [_randn(5, 2, 3)]),
    "projected lstm": (lambda: nn.LSTM(3, 4, proj_size=2), [_randn(5, 2, 3)]),
    "gru cell": (lambda: nn.GRUCell(3, 4), [_randn(5, 3)]),
    "lstm cell": (lambda: nn.LSTMCell(3, 4), [_randn(5, 3)]),
    "transformer": (lambda: nn.TransformerEncoderLayer(4, 2, 6, 0.0, batch_first=True), [_randn(2, 3, 4)]),
    "decoder": (lambda: nn.TransformerDecoderLayer(4, 2, 6, 0.0), [_randn(2, 3, 4), _randn(5, 3, 4)]),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_layers(kind):
    close = 3e-6 if kind in ("transformer", "decoder") else None  # differences of nearly equal terms
    # PyTorch itself multiplies in another order where a weight asks for its gradient and the batch comes first.
    assert_layer(*OTHERS[kind], close=close, like_frozen="gru" not in kind)


def _triangle(size):
    return torch.ones(size, size, dtype=torch.bool).triu(1)


ATTENTIONS = {
    "of itself": ({}, [_randn(5, 2, 4)], lambda m, x: m(x, x, x)),
    "of itself, no weights": ({}, [_randn(5, 2, 4)], lambda m, x: m(x, x, x, need_weights=False)),
    "keys are values": ({}, [_randn(5, 2, 4), _randn(3, 2, 4)], lambda m, x, y: m(x, y, y)),
    "three inputs": ({}, [_randn(5, 2, 4), _randn(3, 2, 4), _randn(3, 2, 4)], lambda m, *xs: m(*xs)),
    "other sizes": (
        {"kdim": 3, "vdim": 5},
        [_randn(5, 2, 4), _randn(3, 2, 3), _randn(3, 2, 5)],
        lambda m, *xs: m(*xs),
    ),
    "batch first": ({"batch_first": True}, [_randn(2, 5, 4)], lambda m, x: m(x, x, x, average_attn_weights=False)),
    "unbatched": ({}, [_randn(5, 4)], lambda m, x: m(x, x, x)),
    "without bias": ({"bias": False}, [_randn(5, 2, 4)], lambda m, x: m(x, x, x)),
    "more keys": ({"add_bias_kv": True, "add_zero_attn": True}, [_randn(5, 2, 4)], lambda m, x: m(x, x, x)),
    "masked": ({}, [_randn(5, 2, 4)], lambda m, x: m(x, x, x, attn_mask=_triangle(5))),
    "causal": (
        {},
        [_randn(5, 2, 4)],
        lambda m, x: m(x, x, x, attn_mask=_triangle(5), is_causal=True, need_weights=False),
    ),
    "evaluated": ({"batch_first": True}, [_randn(2, 5, 4)], lambda m, x: m.eval()(x, x, x)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ATTENTIONS)
def test_attention(monkeypatch, kind, way):
    WAYS[way](monkeypatch)
    options, inputs, call = ATTENTIONS[kind]
    # A frozen model takes another way to evaluate it.
    like_frozen = kind != "evaluated"
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


class Tied(nn.Module):
    """A table that is also a head, as a module and as a function."""

    def __init__(self, functional):
        super().__init__()
        self.emb = nn.Embedding(6, 4)
        self.functional = functional
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, ids):
        h = self.emb(ids).tanh()
        return functional.linear(h, self.emb.weight) if self.functional else self.head(h)


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
    "a module called twice": (Twice, [_randn(3, 4)]),
    "two modules with one weight": (Pair, [_randn(3, 4)]),
    "a tied head": (lambda: Tied(False), [_ids(6, 2, 3)]),
    "a head that is a function": (lambda: Tied(True), [_ids(6, 2, 3)]),
    "lists and dicts": (Lists, [_randn(3, 4)]),
    "other uses of a weight": (Reshaped, [_randn(3, 4)]),
    "a subclass": (lambda: Subclass(4, 4), [_randn(3, 4)]),
    "one block in two places": (
        lambda: (lambda block: nn.Sequential(block, nn.Tanh(), block))(nn.Conv1d(4, 4, 3, padding=1)),
        [_randn(2, 4, 5)],
    ),
    "weight norm": (lambda: parametrizations.weight_norm(nn.Linear(4, 4)), [_randn(3, 4)]),
    "weight norm of a convolution": (
        lambda: parametrizations.weight_norm(nn.Conv1d(4, 4, 3)),
        [_randn(2, 4, 5)],
    ),
    "spectral norm": (lambda: parametrizations.spectral_norm(nn.Linear(4, 4)).eval(), [_randn(3, 4)]),
}


@pytest.mark.parametrize("kind", SHARING)
def test_shared_parameters(kind):
    assert_layer(*SHARING[kind], close=3e-6)


def test_a_model_of_every_kind():
    model, tokens = every()
    assert_gradients(model, PLACES + MORE, tokens, close=1e-5, like_frozen=False)
    model, tokens = every()
    assert_gradients(model.double(), PLACES + MORE, tokens, like_frozen=False)


def test_hooks_hear_what_they_hear_of_the_plain_model():
    torch.manual_seed(0)
    model, heard = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)), []
    model[0].register_full_backward_hook(lambda module, given, output: heard.append(output[0].clone()))
    plain, x = copy.deepcopy(model), torch.randn(3, 4)
    elements = eg.trainable(model, ["0.weight[1, 2]", "0.bias"])
    model(x).square().sum().backward()
    plain(x).square().sum().backward()
    torch.testing.assert_close(heard[0], heard[1], rtol=1e-6, atol=0)
    torch.testing.assert_close(elements["0.bias"].grad, plain[0].bias.grad)


@pytest.mark.parametrize("kind", ["linear", "lookup", "convolution", "attention", "norm", "alias"])
def test_autocast(kind):
    build, inputs, call = {
        "linear": (lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)), [_randn(5, 4)], None),
        "lookup": (lambda: nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 3)), [_ids(6, 2, 3)], None),
        "convolution": (lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.Conv2d(4, 3, 1)), [_randn(2, 2, 5, 5)], None),
        "attention": (lambda: nn.MultiheadAttention(4, 2), [_randn(5, 2, 4)], lambda m, x: m(x, x, x)),
        "norm": (lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.RMSNorm(4)), [_randn(5, 4)], None),
        "alias": (Tied, [_ids(6, 2, 3)], None),
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
        "linear": (lambda: nn.Linear(4, 3), [_randn(5, 4)]),
        "lookup": (lambda: nn.Embedding(6, 4), [_ids(6, 2, 3)]),
        "convolution": (lambda: nn.Conv1d(2, 3, 3), [_randn(2, 2, 6)]),
        "bag": (lambda: nn.EmbeddingBag(6, 4), [_ids(6, 2, 3)]),
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
    "linear": (lambda: nn.Linear(3, 2), [_randn(4, 3)]),
    "convolution": (lambda: nn.Conv1d(2, 2, 2, padding=1), [_randn(2, 2, 4)]),
    "grouped convolution": (lambda: nn.Conv1d(4, 2, 2, groups=2), [_randn(2, 4, 4)]),
    "lookup": (lambda: nn.Embedding(4, 3), [_ids(4, 5)]),
    "bag": (lambda: nn.EmbeddingBag(4, 3, mode="mean"), [_ids(4, 2, 3)]),
    "weighted bag": (
        lambda: nn.EmbeddingBag(4, 3, mode="sum"),
        [_ids(4, 6), lambda dtype: torch.tensor([0, 2]), _randn(6)],
    ),
    "layer norm": (lambda: nn.LayerNorm(3), [_randn(4, 3)]),
    "rms norm": (lambda: nn.RMSNorm(3), [_randn(4, 3)]),
    "attention": (lambda: nn.MultiheadAttention(4, 2), [_randn(3, 4)]),
    "alias": (lambda: nn.Bilinear(2, 3, 2), [_randn(4, 2), _randn(4, 3)]),
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
    monkeypatch.setattr(correlations, "MULTIPLIED", 0.0 if way == "block" else 1e9)
    monkeypatch.setattr(lookups, "ROOM", -(10**9) if way == "block" else 10**9)
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
    assert_gradients(model, places_of(model, how, seed), ids, x, like_frozen="gru" not in layers)


@pytest.mark.parametrize("kind", ["linear", "lookup", "bag"])
def test_a_step_between_forward_and_backward_is_as_it_is_in_the_plain_model(kind):
    """What a first layer computes its gradient by is its input alone, so that its weight may have changed."""
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
