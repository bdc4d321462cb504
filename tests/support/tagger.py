"""A model of many kinds of layers for tests of training, and what these tests ask of it."""

import torch
from torch import nn


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
