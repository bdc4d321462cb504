"""A small PyTorch model with a layer of every kind whose elements train, and how its bits are compared."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import elementgrad as eg

Tensor = torch.Tensor
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Every(nn.Module):
    """Lookups, convolution, norms, attention, recurrence, a plain parameter in an einsum, and a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.bag = nn.EmbeddingBag(5, 4)
        self.conv = nn.Conv1d(4, 4, 3, padding=1)
        self.batch = nn.BatchNorm1d(4)
        self.norm = nn.LayerNorm(4)
        self.rms = nn.RMSNorm(4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.gru = nn.GRU(4, 4, batch_first=True)
        self.linear = nn.Linear(4, 4)
        self.mixing = nn.Parameter(torch.zeros(4, 4))
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.bag(tokens % 5).unsqueeze(1)
        x = self.conv(self.batch(x.transpose(1, 2))).transpose(1, 2)
        x = x + self.attention(self.norm(x), x, x, need_weights=False)[0]
        x = x + self.gru(self.rms(x))[0]
        x = self.linear(x.tanh()) + torch.einsum("bth,hk->btk", x, self.mixing)
        return self.head(x)


PLACES = (
    "embedding.weight[0, 1]",  # and of the head
    "bag.weight[2, ::2]",
    "conv.weight[1, 2, 0]",
    "batch.weight[0]",
    "norm.weight[2]",
    "rms.weight[3]",
    "attention.in_proj_weight[5, 1]",
    "attention.out_proj.weight[0, :]",
    "gru.weight_ih_l0[2, 3]",
    "linear.weight[:, 2]",
    "mixing[1, 3]",
)
MORE = (
    "embedding.weight[3, :]",
    "conv.bias[3]",
    "batch.bias[1:3]",
    "norm.bias[0]",
    "attention.in_proj_bias[9]",
    "gru.weight_hh_l0[7, 0]",
    "gru.bias_hh_l0[9]",
    "linear.bias[1]",
)


def every(training: bool = True) -> tuple[Every, Tensor]:
    """The model with no weight near zero, and tokens for it."""
    torch.manual_seed(0)
    model = Every().train(training)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    return model, torch.tensor([[0, 3, 5], [2, 1, 0]])


def bits(tensor: Tensor) -> Tensor:
    """The numbers of a tensor as integers, so that no NaN differs from itself and no -0 equals 0."""
    held = tensor.detach().clone(memory_format=torch.contiguous_format)
    held = torch.view_as_real(held) if held.is_complex() else held
    return held.view(INTEGERS[held.element_size()])


def differing(one: Tensor, other: Tensor) -> Tensor:
    """Which elements of two tensors differ in any bit."""
    differs = bits(one) != bits(other)
    return differs.any(-1) if one.is_complex() else differs


class Watched:
    """The tensors of a model as they were before elements of it train.

    They are kept themselves, because the attributes of a module in training bring what they give up to date first.
    """

    def __init__(self, model: nn.Module, places: Sequence[str]):
        self.tensors = dict(model.named_parameters())
        self.names = {id(tensor): name for name, tensor in self.tensors.items()}
        self.before = {name: tensor.detach().clone() for name, tensor in self.tensors.items()}
        self.places = [eg.Place.parse(place) for place in places]
        self.positions = [place.select(self.of(place).shape).flat().reshape(-1) for place in self.places]
        self._at = [torch.from_numpy(np.array(positions)) for positions in self.positions]

    def of(self, place: eg.Place) -> Tensor:
        return self.tensors[place.name]

    def assert_holds(self, leaves: Iterable[Tensor]) -> None:
        """The tensors hold what the leaves hold, without anything being called that could bring them up to date."""
        for place, at, leaf in zip(self.places, self._at, leaves, strict=True):
            held = self.of(place).detach().view(-1)[at]
            assert torch.equal(held, leaf.detach().to(held.dtype)), f"{place} is not current"

    def assert_frozen(self) -> None:
        """No bit has changed outside of the places."""
        for name, tensor in self.tensors.items():
            differs = differing(tensor, self.before[name]).view(-1)
            for place, at in zip(self.places, self._at, strict=True):
                if place.name == name:
                    differs[at] = False
            assert not differs.any(), f"{int(differs.sum())} frozen elements of {name} have changed"

    def assert_moved(self) -> None:
        """Some element of every place has another value, which is a number."""
        for place, at in zip(self.places, self._at, strict=True):
            differs = differing(self.of(place), self.before[place.name]).view(-1)[at]
            assert differs.any(), f"{place} has not moved"
            assert self.of(place).isfinite().all(), f"{place} is not finite"


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
