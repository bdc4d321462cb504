"""PyTorch programs whose cause or remedy is easily mistaken for another. The line at fault is marked."""

import warnings

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.programs_broken import Table

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


@BROKEN.says("nonfinite", "singular", fix="acos(x.clamp(", wrt="x")
def an_angle_between_the_same():
    return lambda x: torch.acos(x), torch.tensor(1.0)  # <- here


@BROKEN.says("nonfinite", "singular", fix="log(x + 1e-12)", wrt="x")
def a_logarithm_of_zero():
    return lambda x: torch.log(x).sum(), torch.tensor([0.0, 1.0])  # <- here


@BROKEN.says("nonfinite", "singular", fix="y + 1e-12", wrt="x")
def a_division_by_zero():
    return lambda x: (1 / x).sum(), torch.tensor([0.0, 1.0])  # <- here


@BROKEN.says("nonfinite", "singular", fix="sqrt(x + 1e-12)", wrt="x")
def a_norm_at_zero():
    return lambda x: torch.sqrt((x**2).sum()), torch.zeros(2)  # <- here


@BROKEN.says("nonfinite", "singular", fix="pow(x + 1e-12", wrt="x")
def a_power_below_one():
    return lambda x: (x**0.3).sum(), torch.zeros(2)  # <- here


@BROKEN.says("nonfinite", "masked-branch", fix="log(torch.where(ok, x, 1.0))", wrt="x")
def a_masked_logarithm():
    return lambda x: torch.where(x > 0, torch.log(x), 0.0).sum(), torch.tensor([0.0, 1.0])  # <- here


@BROKEN.says("nonfinite", "masked-branch", fix="/ torch.where(ok, y, 1.0)", wrt="x")
def a_masked_division():
    return lambda x: torch.where(x > 0, 1 / x, 0.0).sum(), torch.tensor([0.0, 1.0])  # <- here


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.Embedding(10, 3, padding_idx=0)

    def forward(self, ids):
        return self.e(ids).sum()


@BROKEN.says("unconnected", "integer", fix="weight", wrt="ids")
def the_ids_of_an_embedding():
    return Words(), torch.tensor([[1, 2, 0]])


@BROKEN.says("zero", "row-not-used", fix="padding_idx", wrt="e.weight[0]")
def a_padding_row_in_the_batch():
    return Words(), torch.tensor([[1, 2, 0]])


@BROKEN.says("zero", "row-not-used", wrt="e.weight[7]")
def a_row_beside_it():
    return Words(), torch.tensor([[1, 2, 0]])


@BROKEN.says("unconnected", "non-leaf", fix="retain_grad()")
def a_leaf_that_is_cast():
    w = torch.randn(3, requires_grad=True).double()

    def step():
        (w**2).sum().backward()
        return w.grad * 0.1  # <- here

    return step


@BROKEN.says("unconnected", "resliced", fix="keep the slice in a variable")
def a_slice_that_is_taken_twice():
    y = X.clone().requires_grad_()

    def step():
        torch.autograd.grad(y[0] ** 2, y[0])  # <- here

    return step


@BROKEN.says("unconnected", "freed-graph", fix="h = h.detach()")
def a_state_that_is_carried_over():
    cell = nn.RNNCell(2, 2)
    state = {"h": torch.zeros(1, 2)}

    def step():
        for _ in range(2):
            state["h"] = cell(torch.ones(1, 2), state["h"])
            state["h"].sum().backward()

    return step


@BROKEN.says("unconnected", "modified-in-place", fix="clone()")
def an_item_assigned_too_late():
    w = nn.Parameter(torch.ones(3))

    def step():
        y = torch.exp(w)
        y[0] = 1.0  # <- here
        y.sum().backward()

    return step


@BROKEN.says("unconnected", "modified-in-place", fix="x = x + y")
def a_sum_in_place():
    w = nn.Parameter(torch.ones(3))

    def step():
        y = torch.sigmoid(w)
        y += 1  # <- here
        y.sum().backward()

    return step


@BROKEN.says("unconnected", "modified-in-place", fix="optimizer.step()")
def an_optimizer_between_two_losses():
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        out = model(X)
        out.sum().backward(retain_graph=True)
        optimizer.step()  # <- here
        (out**2).sum().backward()

    return step


@BROKEN.says("unconnected", "no-grad", fix="use_reentrant=False", wrt="w")
def a_reentrant_checkpoint():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))

        def forward(self, x):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return checkpoint(lambda x: x * self.w, x, use_reentrant=True).sum()  # <- here

    return Net(), X


@BROKEN.says("unconnected", "left-framework", fix="torch.stack", wrt="x")
def a_tensor_of_tensors():
    return lambda x: torch.tensor([x[0], x[1]]).sum(), X  # <- here


@BROKEN.says("zero", "dead-relu", fix="hinge", wrt="x[2]")
def a_hinge():
    return lambda x: torch.maximum(torch.zeros(3), 1 - x).sum(), X  # <- here
