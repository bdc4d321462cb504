"""Made programs of PyTorch on six numbers: steps of every sort that a pattern has to follow."""

from collections.abc import Callable

import torch
from hypothesis import strategies as st
from torch.nn import functional

Tensor = torch.Tensor
Step = Callable[[Tensor, int], Tensor]
SIZE = 6
MASK = torch.tensor([True, False, True, True, False, True])
BAND = torch.diag(torch.full((SIZE,), 0.5)) + torch.diag(torch.full((SIZE - 1,), -0.5), 1)
KERNEL = torch.tensor([[[0.5, 0.0, -0.5]]], dtype=torch.float64)
BAND = BAND.double()


class Through(torch.autograd.Function):
    """Rounded ahead, and as it is on the way back."""

    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Turned(torch.autograd.Function):
    """A rule that is no derivative: what element i hears comes from its neighbour."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.sin(x)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient.roll(1) * x


def written(x: Tensor, k: int) -> Tensor:
    y = x.clone()
    y[k] = x[k - 1] * x[k - 2]
    y[: k + 1] *= 0.5
    y.view(2, 3)[0] += 1
    return y


def hooked(x: Tensor, k: int) -> Tensor:
    y = x * 1
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient + gradient.flip(0))
    return y


def attended(x: Tensor, k: int) -> Tensor:
    rows = x.view(1, 3, 2)
    return functional.scaled_dot_product_attention(rows, rows, rows).reshape(-1)


STEPS: dict[str, Step] = {
    "sine": lambda x, k: torch.sin(x + k),
    "square": lambda x, k: x * x / 2,
    "by another": lambda x, k: x * x[k],
    "neighbours": lambda x, k: x * x.roll(k),
    "flip": lambda x, k: x - x.flip(0),
    "shift": lambda x, k: functional.pad(x[1:], (0, 1)),
    "relu": lambda x, k: torch.relu(x),
    "clip": lambda x, k: x.clamp(-0.5, 0.5) + 0.1 * x,
    "where": lambda x, k: torch.where(x > 0, x, x.flip(0)),
    "fixed mask": lambda x, k: torch.where(MASK, x * x, x.roll(k)),
    "filled": lambda x, k: x.masked_fill(MASK, 0.5),
    "sum of rows": lambda x, k: (x.view(2, 3) - x.view(2, 3).sum(1, keepdim=True) / 3).reshape(-1),
    "softmax": lambda x, k: x.view(3, 2).softmax(0).reshape(-1),
    "cumulated": lambda x, k: x.cumsum(0) / 3,
    "largest": lambda x, k: x - 0.5 * x.max(),
    "sorted": lambda x, k: x.sort().values,
    "ranked": lambda x, k: x.view(2, 3).gather(1, x.view(2, 3).argsort(1)).reshape(-1),
    "band": lambda x, k: BAND @ x,
    "rows by band": lambda x, k: (x.view(2, 3) @ BAND[:3, :3]).reshape(-1),
    "squared matrix": lambda x, k: (x.view(2, 3) @ x.view(3, 2)).repeat(2, 1)[:3].reshape(-1) / 2,
    "convolved": lambda x, k: functional.conv1d(x.view(1, 1, SIZE), KERNEL, padding=1).view(-1),
    "pooled": lambda x, k: functional.max_pool1d(functional.pad(x, (1, 1)).view(1, 1, -1), 3, 1).view(-1),
    "averaged": lambda x, k: functional.avg_pool1d(x.view(1, 1, -1), 3, 1, 1).view(-1),
    "taken": lambda x, k: x[[k, 0, k, 5, 1, 2]],
    "added at": lambda x, k: x.index_add(0, torch.tensor([k, k, 0]), x[:3]),
    "scattered": lambda x, k: x.scatter(0, torch.tensor([k, 1]), x[4:]),
    "joined": lambda x, k: torch.cat([x[k:], x[:k] ** 2]),
    "turned": lambda x, k: x.view(2, 3).t().reshape(-1),
    "transform": lambda x, k: torch.fft.fft(x.view(2, 3)).imag.reshape(-1) + x,
    "complex": lambda x, k: torch.view_as_real(torch.view_as_complex(x.view(3, 2)) ** 2).reshape(-1) / 2,
    "half stopped": lambda x, k: x * x.detach().roll(k),
    "stopped": lambda x, k: torch.cat([x[:k], x[k:].detach()]),
    "through": lambda x, k: Through.apply(x) * 0.5,
    "turned rule": lambda x, k: Turned.apply(x),
    "written": written,
    "hooked": hooked,
    "attended": attended,
    "gradient": lambda x, k: torch.func.grad(lambda y: (y[1:] * y[:-1] ** 2).sum())(x) / 2,
    "mapped": lambda x, k: torch.func.vmap(lambda row: row * row.sum())(x.view(3, 2)).reshape(-1),
    "normed": lambda x, k: functional.layer_norm(x.view(2, 3), (3,)).reshape(-1),
}
programs = st.lists(st.tuples(st.sampled_from(list(STEPS)), st.integers(0, SIZE - 1)), min_size=1, max_size=6)


def run(program: list[tuple[str, int]], x: Tensor) -> Tensor:
    for name, k in program:
        x = STEPS[name](x, k)
    return x
