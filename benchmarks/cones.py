"""What one element costs by its cone, against the best plain way: forward to the layer, backward to the input."""

from collections.abc import Iterator
from typing import Any

import elementgrad as eg
from benchmarks.harness import Row
from benchmarks.jacobians import agree

SIDE, LARGE = 512, 1024
FIRST, OTHER = 1 / 40, 1 / 200
"""Bounds for six convolutions: a recording and one element, and one more element of the same recording."""
MIXING = 1.25
"""The bound where a cone does not pay, and the recording is dropped."""


def torch_rows() -> Iterator[Row]:
    import torch
    from torch import nn

    torch.manual_seed(0)

    def convolutions() -> Any:
        layers = [nn.Conv2d(3 if i == 0 else 16, 16, 3, padding=1) for i in range(6)]
        return nn.Sequential(*[module for layer in layers for module in (layer, nn.ELU())])

    def plain(model: Any, x: Any, place: tuple[int, ...]) -> Any:
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad(model(leaf)[place], leaf)[0]

    model = convolutions()
    for size in (SIDE, LARGE):
        x, place = torch.randn(1, 3, size, size), (0, 3, size // 2, size // 2)
        jacobian = eg.jacobian(model, x, cone=True)

        def first(x: Any = x, place: Any = place) -> Any:
            return eg.grad(model, x, of=eg.at("output")[place], wrt="input")

        def other(jacobian: Any = jacobian, place: Any = place) -> Any:
            return jacobian[place, :]

        def whole(x: Any = x, place: Any = place) -> Any:
            return plain(model, x, place)

        name = f"torch six convolutions, {size} pixels"
        limit = 20 if size == LARGE else None
        peer = "forward and backward"
        yield agree(Row(f"{name}, first element", first, whole, peer, FIRST, most_mb=limit, repeats=5))
        yield agree(Row(f"{name}, another element", other, whole, peer, OTHER, repeats=5))

    mixer = nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Softmax(0), nn.Linear(512, 512))
    x = torch.randn(512, 512)

    def mixed() -> Any:
        return eg.grad(mixer, x, of="output[3, 4]", wrt="input")

    def by_hand() -> Any:
        return plain(mixer, x, (3, 4))

    yield agree(Row("torch an element that depends on all", mixed, by_hand, "forward and backward", MIXING))


SUITES = {"cone-torch": torch_rows}
