"""Models that several processes train together, and which of their elements."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH, WORDS, BATCH = 6, 10, 8
PLACES = [
    "table.weight[3]",
    "table.weight[9, 2]",
    "blocks.0.linear.weight[1, [0, 4]]",
    "blocks.1.linear.bias[5]",
    "norm.weight[2]",
    "shift[[0, 5]]",
]
ONE, OTHER, SILENT = PLACES[0], PLACES[2], PLACES[4]
SIZE = 6 + 1 + 2 + 1 + 1 + 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + nn.functional.gelu(self.linear(x))


class Model(nn.Module):
    """A table that is the head too, blocks, a norm and a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.head.weight = self.table.weight
        self.blocks, self.norm = nn.ModuleList([Block(), Block()]), nn.LayerNorm(WIDTH)
        self.shift = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, words):
        x = self.table(words)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x) + self.shift)


class Whole(nn.Module):
    """A model whose arithmetic is exact, in whole numbers and halves of halves: sums are the same in any order."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.head.weight = self.table.weight
        with torch.no_grad():
            for tensor in self.parameters():
                tensor.copy_(
                    torch.randint(-2, 3, tensor.shape, generator=torch.Generator().manual_seed(tensor.numel()))
                )

    def forward(self, words):
        return self.head(nn.functional.relu(self.table(words)))


class Layers(nn.Module):
    """Layers with kernels of their own, one of them computed again going back."""

    def __init__(self):
        super().__init__()
        self.conv, self.attention = nn.Conv2d(1, WIDTH, 3, padding=1), nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.again, self.norm = nn.Linear(WIDTH, WIDTH), nn.RMSNorm(WIDTH)

    def forward(self, images):
        x = self.conv(images).flatten(2).mT
        x = x + self.attention(x, x, x)[0]
        return self.norm(checkpoint(self.again, x, use_reentrant=False))


def made(kind=Model, dtype=torch.float32):
    torch.manual_seed(0)
    return kind().to(dtype)
