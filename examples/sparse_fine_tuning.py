"""Sparse fine-tuning of a network on handwritten digits, against fine-tuning all of it.

    pip install scikit-learn
    python examples/sparse_fine_tuning.py

A network learns to read digits, and then digits seen in a mirror, of which it is given few. Some of its elements train
for that: those that move most when all of them train (as LT-SFT chooses), those with the largest gradients, those with
the largest Fisher information, and as many at random, for comparison.
"""

import argparse
import copy
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

import elementgrad as eg

SHARES = 0.005, 0.02, 0.1
RATE = 0.01
Data = tuple[torch.Tensor, torch.Tensor]


def digits() -> dict[str, Data]:
    """Real digits of 8 x 8 pixels, 1797 of them (UCI): upright ones, and others in a mirror."""
    pixels, numbers = load_digits(return_X_y=True)
    images, labels = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16, torch.tensor(numbers)
    order = torch.randperm(len(images))
    learn, adapt, test = order[:900], order[900:1200], order[1200:]
    mirrored = images.flip(3)
    return {
        "old": (images[learn], labels[learn]),
        "old test": (images[test], labels[test]),
        "new": (mirrored[adapt], labels[adapt]),
        "new test": (mirrored[test], labels[test]),
    }


def network() -> nn.Module:
    """Two convolutions and two dense layers."""
    convolutions = nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, padding=1, stride=2), nn.ReLU()
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10))


def losses(model: nn.Module, data: Data) -> torch.Tensor:
    """One loss for each digit."""
    return functional.cross_entropy(model(data[0]), data[1], reduction="none")


def train(model: nn.Module, parameters: Iterable[torch.Tensor], data: Data, steps: int, rate: float = RATE) -> None:
    """The same training for all: with fewer parameters, fewer train."""
    optimizer = torch.optim.Adam(parameters, lr=rate)
    for _ in range(steps):
        batch = torch.randint(len(data[0]), (64,))
        optimizer.zero_grad()
        losses(model, (data[0][batch], data[1][batch])).mean().backward()
        optimizer.step()


def accuracies(model: nn.Module, data: dict[str, Data]) -> tuple[float, float]:
    """How much of the new test and of the old one is right, in percent."""
    with torch.no_grad():
        new, old = (
            (model(images).argmax(1) == labels).float().mean().item()
            for images, labels in (data["new test"], data["old test"])
        )
    return 100 * new, 100 * old


def at_random(model: nn.Module, k: int) -> list[eg.Place]:
    """As many elements of the model's parameters, all equally likely."""
    sizes = [parameter.numel() for parameter in model.parameters()]
    chosen = torch.randperm(sum(sizes))[:k].sort().values.numpy()
    starts, places = np.cumsum([0, *sizes]), []
    for (name, parameter), start, end in zip(model.named_parameters(), starts[:-1], starts[1:], strict=True):
        here = chosen[(start <= chosen) & (chosen < end)] - start
        if len(here):
            places.append(eg.at(name).coords(np.stack(np.unravel_index(here, parameter.shape), axis=1)))
    return places


def chosen(by: str, k: int, model: nn.Module, tuned: nn.Module, data: Data) -> list[eg.Place]:
    """The elements to train."""
    if by == "moved most":
        return eg.top(tuned, None, k, by="magnitude", since=model)
    if by == "gradient":
        return eg.top(model, lambda model: losses(model, data).mean(), k)
    if by == "Fisher":
        some = data[0][:100], data[1][:100]
        return eg.top(model, lambda model: losses(model, some), k, by="fisher")
    return at_random(model, k)


def changed(model: nn.Module, other: nn.Module) -> int:
    """How many elements differ, by as little as a bit."""
    return sum(
        int((a != b).sum()) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True)
    )


def run(seed: int, settings: argparse.Namespace, table: dict[str, list[list[float]]], folder: Path) -> bool:
    """Everything once: rows of the table, and whether only the chosen elements moved and came back."""
    torch.manual_seed(seed)
    data, model = digits(), network()
    train(model, model.parameters(), data["old"], settings.steps, rate=0.003)
    size = sum(parameter.numel() for parameter in model.parameters())
    table.setdefault("before", []).append([*accuracies(model, data), 0, 0])
    for rate in (0.001, 0.003, RATE):
        tuned = copy.deepcopy(model)
        train(tuned, tuned.parameters(), data["new"], settings.steps, rate)
        torch.save(tuned.state_dict(), folder / "model.pt")
        row = [*accuracies(tuned, data), changed(tuned, model), (folder / "model.pt").stat().st_size]
        table.setdefault(f"all elements, rate {rate}", []).append(row)
    held = True
    for share in SHARES:
        k = round(share * size)
        for by in ("moved most", "gradient", "Fisher", "at random"):
            sparse = copy.deepcopy(model)
            elements = eg.trainable(sparse, chosen(by, k, sparse, tuned, data["new"]))
            train(sparse, elements.parameters(), data["new"], settings.steps)
            elements.save(folder / "patch.safetensors")
            row = [*accuracies(sparse, data), changed(sparse, model), (folder / "patch.safetensors").stat().st_size]
            table.setdefault(f"{share:.1%}, {by}", []).append(row)
            held &= elements.size == k and row[2] <= k
            elements.release(keep=False)
            held &= changed(sparse, model) == 0
    return held


def main(arguments: list[str] | None = None) -> int:
    """Run it; 0 if everything held that the text says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=1, help="how many runs the table is the mean of (default: 1)")
    parser.add_argument("--steps", type=int, default=200, help="steps of each training (default: 200)")
    settings = parser.parse_args(arguments)
    table: dict[str, list[list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        held = [run(seed, settings, table, Path(folder)) for seed in range(settings.seeds)]
    print(f"{'training':26}{'mirrored %':>12}{'upright %':>12}{'changed':>10}{'bytes of file':>16}")
    for name, rows in table.items():
        new, old, moved, size = np.mean(rows, axis=0)
        print(f"{name:26}{new:12.1f}{old:12.1f}{moved:10.0f}{size:16.0f}")
    print(f"\nonly the chosen elements changed, and undoing gave the first model back, to the bit: {all(held)}")
    return not all(held)


if __name__ == "__main__":
    torch.set_num_threads(1)  # the network is too small to share
    sys.exit(main())
