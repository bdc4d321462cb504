"""The gradient of elements is that of the whole parameter there: every kind of layer, every way to compute it."""

from functools import partial
from itertools import product

import pytest
import torch
from torch import nn
from torch.nn import functional

from elementgrad._backends.torch.train import kernels
from tests.support.training_checks import WAYS, assert_layer, numbers, tokens_below

INPUTS = {
    "vector": (numbers(4), lambda x: x),
    "matrix": (numbers(5, 4), lambda x: x),
    "three axes": (numbers(2, 3, 4), lambda x: x),
    "no rows": (numbers(0, 4), lambda x: x),
    "transposed": (numbers(4, 5), lambda x: x.t()),
    "permuted": (numbers(4, 2, 3), lambda x: x.permute(1, 2, 0)),
    "every second": (numbers(5, 8), lambda x: x[:, ::2]),
    "expanded": (numbers(1, 4), lambda x: x.expand(3, 4)),
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
    assert_layer(lambda: nn.Linear(70, 50, bias=False), [numbers(9, 70)])


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
    monkeypatch.setattr(kernels, "MULTIPLIED", 0.0 if whole else 1e9)
    monkeypatch.setattr(kernels, "SELECTED", 0.0)
    build, shape = CONVOLUTIONS[kind]
    assert_layer(build, [numbers(*shape)])


@pytest.mark.parametrize("whole", [False, True], ids=["offset by offset", "whole channels"])
@pytest.mark.parametrize("weight", [False, True], ids=["images", "images and weight"])
def test_convolutions_with_channels_last(monkeypatch, whole, weight):
    monkeypatch.setattr(kernels, "MULTIPLIED", 0.0 if whole else 1e9)

    def build():
        model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Softplus(), nn.Conv2d(4, 2, 3, groups=2))
        return model.to(memory_format=torch.channels_last) if weight else model

    assert_layer(build, [lambda dtype: torch.randn(2, 3, 5, 6, dtype=dtype).to(memory_format=torch.channels_last)])


LOOKUPS = {
    "embedding": (lambda: nn.Embedding(6, 4), [tokens_below(6, 2, 5)]),
    "one token": (lambda: nn.Embedding(6, 4), [tokens_below(6)]),
    "no tokens": (lambda: nn.Embedding(6, 4), [tokens_below(6, 0)]),
    "int32 tokens": (lambda: nn.Embedding(6, 4), [lambda dtype: torch.randint(6, (2, 5), dtype=torch.int32)]),
    "tokens that lie apart": (lambda: nn.Embedding(6, 4), [lambda dtype: torch.randint(6, (5, 4)).t()[::2]]),
    "padding": (lambda: nn.Embedding(6, 4, padding_idx=2), [tokens_below(6, 2, 9)]),
    "padding from the end": (lambda: nn.Embedding(6, 4, padding_idx=-1), [tokens_below(6, 2, 9)]),
    "by frequency": (lambda: nn.Embedding(4, 4, scale_grad_by_freq=True), [tokens_below(4, 2, 9)]),
    "by frequency with padding": (lambda: nn.Embedding(4, 4, 1, scale_grad_by_freq=True), [tokens_below(4, 2, 9)]),
    "sparse": (lambda: nn.Embedding(6, 4, sparse=True), [tokens_below(6, 2, 5)]),
    "wide": (lambda: nn.Embedding(300, 20), [tokens_below(300, 40)]),
}


@pytest.mark.parametrize("crowded", [False, True], ids=["all rows", "rows that occur"])
@pytest.mark.parametrize("kind", LOOKUPS)
def test_lookups(monkeypatch, kind, crowded):
    monkeypatch.setattr(kernels, "SMALL_TABLE", -(10**9) if crowded else 10**9)
    assert_layer(*LOOKUPS[kind])


OFFSETS = [lambda dtype: torch.tensor([0, 2, 2, 5])]
WEIGHTS = {
    "rows": [tokens_below(6, 3, 4)],
    "offsets": [tokens_below(6, 9), *OFFSETS],
    "int32": [lambda dtype: torch.randint(6, (9,), dtype=torch.int32), lambda dtype: torch.tensor([0, 2, 5]).int()],
    "weighted": [tokens_below(6, 9), *OFFSETS, numbers(9)],
    "weighted rows": [tokens_below(6, 3, 4), lambda dtype: None, numbers(3, 4)],
    "no tokens": [tokens_below(6, 0), lambda dtype: torch.tensor([0, 0])],
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
    monkeypatch.setattr(kernels, "SMALL_TABLE", -(10**9) if crowded else 10**9)
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
