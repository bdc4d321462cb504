"""PyTorch programs of which the remedy depends on the operation at hand. The line at fault is marked."""

import warnings

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.support.programs_broken import Table

BROKEN = Table()
X = torch.tensor([1.0, 2.0, 3.0])


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


@BROKEN.says("zero", "row-not-used", fix="padding_idx", wrt="0.weight[0, 1]")
def a_padding_row_of_zeros_that_is_squared():
    class Squares(nn.Module):
        def forward(self, x):
            return x.pow(2).sum()

    return nn.Sequential(nn.Embedding(4, 3, padding_idx=0), Squares()), torch.tensor([[0, 1, 2]])


@BROKEN.says("zero", "unused", of="output[0, 0, 2, 1]", wrt="q[0, 0, 1, 0]")
def a_query_of_another_token():
    q, k, v = torch.randn(3, 1, 1, 3, 4, generator=torch.Generator().manual_seed(0))
    return lambda q: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True), q
