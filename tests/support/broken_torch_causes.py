"""PyTorch programs whose cause or remedy is easily mistaken for another. The line at fault is marked."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.programs_broken import Table

BROKEN = Table()
X = torch.tensor([1.0, 2.0, 3.0])


@BROKEN.says("zero", "cancelled", wrt="x")
def a_softmax_that_is_summed():
    def f(x):
        p = torch.softmax(x, 0)
        return p.sum()  # <- here

    return f, X


@BROKEN.says("zero", "cancelled", wrt="x")
def a_cross_entropy_with_a_single_class():
    def f(x):
        return F.cross_entropy(x, torch.zeros(3, dtype=torch.long))  # <- here

    return f, X[:, None]


@BROKEN.says("zero", "cancelled", wrt="x")
def a_softmax_over_one_class():
    def f(x):
        return (torch.softmax(x, 1) * X[:, None]).sum()  # <- here

    return f, X[:, None]


@BROKEN.says("nonfinite", "overflow", wrt="x")
def a_square_in_half_precision():
    def f(x):
        return ((x * 300) ** 2).sum()  # <- here

    return f, X.half()


@BROKEN.says("nonfinite", "overflow", wrt="x")
def a_high_power():
    def f(x):
        return ((x * 100) ** 30).sum()  # <- here

    return f, X


@BROKEN.says("nonfinite", None, wrt="x")
def a_factor_that_is_nan():
    return lambda x: (x * float("nan")).sum(), X


@BROKEN.says("nonfinite", None, wrt="x")
def a_hook_that_gives_nan():
    model = nn.Linear(3, 1)
    model.register_forward_hook(lambda module, args, output: output * float("nan"))
    return lambda x: model(x).sum(), X


@BROKEN.says("unconnected", "detached", wrt="x")
def a_parameter_made_on_the_way():
    def f(x):
        return nn.Parameter(x * 2).sum()  # <- here

    return f, X


class Diagonal(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(3))
        self.l = nn.Linear(3, 3)

    def forward(self, x):
        self.l.weight = nn.Parameter(torch.diag(self.w))
        return self.l(x).sum()


@BROKEN.says("unconnected", "detached", wrt="w")
def a_weight_that_is_made_anew():
    return Diagonal(), X


class Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return None


class Half(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        return x * w

    @staticmethod
    def backward(ctx, g):
        return g, None


@BROKEN.says("unconnected", "custom-rule", wrt="x")
def a_backward_that_gives_none():
    def f(x):
        return Nothing.apply(x).sum()  # <- here

    return f, X


@BROKEN.says("unconnected", "custom-rule", wrt="w")
def a_backward_that_forgets_a_weight():
    def f(x, w):
        return Half.apply(x, w).sum()  # <- here

    return f, X, X + 1


@BROKEN.says("zero", "clamped", wrt="x")
def a_relu6_above_six():
    def f(x):
        return F.relu6(x).sum()  # <- here

    return f, torch.tensor([30.0])


@BROKEN.says("zero", "dead-relu", wrt="x")
def a_relu6_below_zero():
    def f(x):
        return F.relu6(x).sum()  # <- here

    return f, torch.tensor([-30.0])


@BROKEN.says("unconnected", "discrete", fix="rsample", wrt="x")
def a_draw_from_a_distribution():
    def f(x):
        return torch.distributions.Normal(x, 1.0).sample().sum()  # <- here

    return f, X


class Mean(nn.Module):
    def forward(self, x):
        return x.pow(2).mean()


@BROKEN.says("zero", "cancelled", wrt="0.0.bias")
def a_bias_before_a_normalisation():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1), nn.Flatten(0))
    return nn.Sequential(model, Mean()), torch.randn(16, 3)


@BROKEN.says("zero", "underflow", fix="float64", wrt="x")
def a_chain_of_sigmoids():
    def f(x):
        for _ in range(80):
            x = torch.sigmoid(x)
        return x.sum()

    return f, X


@BROKEN.says("nonfinite", "overflow", wrt="x")
def a_square_that_is_normalised():
    return lambda x: torch.softmax((x * 300) ** 2, 0)[0], X.half()  # <- here


@BROKEN.says("unconnected", "left-framework", wrt="x")
def a_correlation_in_numpy():
    target = np.array([3.0, 1.0, 2.0])

    def f(x):
        r = np.corrcoef(x.detach().numpy(), target)[0, 1]  # <- here
        return torch.tensor(1 - r)

    return f, X


@BROKEN.says("zero", "masked", wrt="x[0, 2]")
def a_padded_token_in_attention():
    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    padded = torch.tensor([[False, False, True]])

    def f(x):
        mixed, _ = attention(x, x, x, key_padding_mask=padded, need_weights=False)  # <- here
        return mixed[0, 0].sum()

    return f, torch.randn(1, 3, 4)


@BROKEN.says("zero", "cancelled", wrt="x")
def a_mean_behind_a_normalisation_that_the_function_holds():
    norm = nn.LayerNorm(6)

    def f(x):
        return norm(x).mean()

    return f, torch.randn(2, 6, generator=torch.Generator().manual_seed(5))


@BROKEN.says("zero", "dead-relu", "hinge", wrt="x")
def a_margin_that_is_kept():
    def f(x):
        return torch.clamp(0.2 - x, min=0).mean()  # <- here

    return f, X


@BROKEN.says("zero", "masked", "initially zero", wrt="x")
def an_adapter_that_starts_at_zero():
    down, up = torch.ones(3, 2), torch.zeros(2, 3)

    def f(x):
        return (x @ down @ up).sum()  # <- here

    return f, X
