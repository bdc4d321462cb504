"""Small PyTorch models of the kinds that people ask about, in float64 and with fixed weights."""

from collections.abc import Callable

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

Tensor = torch.Tensor


class Residual(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv2(self.relu(self.bn1(self.conv1(x))))
        y += x
        return self.relu(y)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 2, 3)
        self.block1, self.block2 = Residual(2), Residual(2)
        self.pool = nn.AdaptiveAvgPool2d(2)
        self.head = nn.Linear(8, 3)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.pool(self.block2(self.block1(self.stem(image)))).flatten(1))


class Encoder(nn.Module):
    """A transformer encoder whose two layers have weights of their own."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True, activation="gelu")
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(4, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(tokens))


class Recurrent(nn.Module):
    def __init__(self, cell: type[nn.Module]):
        super().__init__()
        self.rnn = cell(2, 3, batch_first=True, bidirectional=True)
        self.head = nn.Linear(6, 2)

    def forward(self, steps: Tensor) -> dict[str, Tensor]:
        states, _ = self.rnn(steps)
        return {"last": self.head(states[:, -1]), "mean": states.mean(1)}


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(2, 3, 3, padding=1)
        self.pool = nn.MaxPool2d(2)
        self.up = nn.ConvTranspose2d(3, 2, 2, stride=2)
        self.out = nn.Conv2d(4, 1, 3, padding=1)
        self.act = nn.Softplus()

    def forward(self, image: Tensor) -> Tensor:
        skip = self.act(self.down1(image))
        deep = self.act(self.down2(self.pool(skip)))
        return self.out(torch.cat([skip, self.up(deep)], 1))


class Shared(nn.Module):
    """One block called three times, tied weights, and blocks that are computed again for their gradients."""

    def __init__(self, reentrant: bool = False):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
        self.alias = self.block
        self.decoder = nn.Linear(3, 3, bias=False)
        self.decoder.weight = self.block[0].weight
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.alias(self.block(x))
        return self.decoder(checkpoint(self.block, x, use_reentrant=self.reentrant))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "resnet": (ResNet, (2, 1, 6, 6)),
    "encoder": (Encoder, (1, 3, 4)),
    "lstm": (lambda: Recurrent(nn.LSTM), (2, 3, 2)),
    "gru": (lambda: Recurrent(nn.GRU), (2, 3, 2)),
    "unet": (UNet, (1, 1, 4, 4)),
    "shared": (Shared, (2, 3)),
    "shared and reentrant": (lambda: Shared(True), (2, 3)),
}


def made(name: str, training: bool = False) -> tuple[nn.Module, Tensor]:
    """A model and an input for it."""
    build, shape = MODELS[name]
    torch.manual_seed(0)
    model = build().double().train(training)
    for parameter in model.parameters():  # far from zero, so that nothing is small by accident
        torch.nn.init.normal_(parameter, std=0.5)
    return model, torch.randn(shape, dtype=torch.float64)
