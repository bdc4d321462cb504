"""The faults of the mutation study in models of the usual sizes, and what `eg.explain` says about each."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import elementgrad as eg
from tests.support.mutated import Mutation, draw
from tests.support.mutated_torch import MUTATIONS, DoubleConv, mutate
from tests.support.torch_resnet import ResNet18

Tensor = torch.Tensor
Made = tuple[nn.Module, Callable[[nn.Module], Tensor]]
NAMES = """
    detach|no_grad|write through data|numpy|list|argmax|comparison|integer cast|round|dead rectifier|dead bound|
    saturated sigmoid|saturated tanh|zero factor|NaN by sqrt|NaN by log|NaN by division|unused|overwritten|
    modified in place|rule of zeros|rule of None|wrong rule
"""
FAULTS = [each for each in MUTATIONS if each.name in {name.strip() for name in NAMES.split("|")}]


def minilm() -> Made:
    """A sentence encoder of 6 layers and 384 features."""
    from transformers import BertConfig, BertModel

    config = BertConfig(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536)
    ids, weights = torch.randint(1, 30_000, (2, 24)), torch.randn(2, 24, 384)
    return BertModel(config, add_pooling_layer=False), lambda model: (model(ids).last_hidden_state * weights).mean()


def resnet() -> Made:
    x, y = torch.randn(2, 3, 64, 64), torch.randint(1000, (2,))
    return ResNet18(), lambda model: nn.functional.cross_entropy(model(x), y)


class UNet(nn.Module):
    def __init__(self, sizes: tuple[int, ...] = (32, 64, 128, 256)) -> None:
        super().__init__()
        self.down = nn.ModuleList([DoubleConv(a, b) for a, b in zip((1, *sizes), sizes, strict=False)])
        pairs = list(zip(sizes[1:], sizes, strict=False))[::-1]
        self.up = nn.ModuleList([nn.ConvTranspose2d(a, b, 2, 2) for a, b in pairs])
        self.join = nn.ModuleList([DoubleConv(2 * b, b) for _, b in pairs])
        self.head = nn.Conv2d(sizes[0], 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        skipped: list[Tensor] = []
        for down in self.down:
            x = down(nn.functional.max_pool2d(x, 2) if skipped else x)
            skipped.append(x)
        for up, join, skip in zip(self.up, self.join, skipped[-2::-1], strict=True):
            x = join(torch.cat([skip, up(x)], 1))
        return self.head(x)


def unet() -> Made:
    x, y = torch.randn(1, 1, 64, 64), torch.rand(1, 1, 64, 64).round()
    return UNet(), lambda model: nn.functional.binary_cross_entropy_with_logits(model(x), y)


MODELS = {"minilm": minilm, "resnet": resnet, "unet": unet}


def explained(kind: str, fault: Mutation, seed: int) -> tuple[bool, str]:
    """Explain the weight of a layer that the seed draws, with a fault right after it; return True if that is right.

    Whatever skips the layer does not matter then: every path of its weight leads through the fault.
    """
    torch.manual_seed(seed)
    model, loss = MODELS[kind]()
    model.eval()
    layers = [name for name, module in model.named_modules() if isinstance(module, (nn.Linear, nn.Conv2d))]
    name = draw(f"{seed} {kind} {fault.name}", layers)
    mutate(model, name, fault.apply)
    found: Any = eg.explain(lambda: loss(model), of="output", wrt=f"{name}.weight", names_from=model)
    file, _, line = (found.where or "").rpartition(":")
    at_fault = fault.apply.__code__.co_filename.endswith(file) and line.isdigit() and int(line) in fault.lines
    return found.cause in fault.causes and (
        at_fault or not fault.has_line
    ), f"{kind}, {fault.name} after {name}: {found}"
