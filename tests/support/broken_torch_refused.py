"""PyTorch programs without a gradient: nobody tracks or uses the source, or PyTorch refuses. The line is marked."""

import torch
from torch import nn

from tests.support.programs_broken import Table

BROKEN = Table()
X = torch.tensor([[0.5, -1.0, 2.0], [1.5, 0.3, -0.7]])


@BROKEN.says("unconnected", "unused", wrt="y")
def an_argument_that_is_not_used():
    return lambda x, y: (x**2).sum(), X, torch.ones(2)


@BROKEN.says("unconnected", "unused", wrt="skip.weight")
def a_layer_whose_result_is_dropped():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.main, self.skip = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            skipped = self.skip(x)
            del skipped
            return self.main(x).sum()

    return Net(), X


@BROKEN.says("unconnected", "not-tracked", wrt="0.weight[1, 0]")
def a_frozen_layer():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    for parameter in model[0].parameters():
        parameter.requires_grad = False
    return nn.Sequential(model[0], model[1], model[2], nn.Flatten(0)), X[:1]


@BROKEN.says("unconnected", "integer", wrt="ids")
def tokens_as_the_source():
    table = nn.Embedding(5, 2)
    return lambda ids: table(ids).sum(), torch.tensor([1, 2])


@BROKEN.says("unconnected", "custom-rule", wrt="x")
def a_function_that_marks_its_result():
    class Quantise(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            y = torch.round(x * 4) / 4
            ctx.mark_non_differentiable(y)
            return y

        @staticmethod
        def backward(ctx, g):
            return g

    def f(x):
        return Quantise.apply(x).sum()  # <- here

    return f, X


@BROKEN.says("unconnected", "inner-gradient", wrt="x")
def a_gradient_penalty_without_create_graph():
    critic = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))

    def f(x):
        (g,) = torch.autograd.grad(critic(x).sum(), x)  # <- here
        return (g.norm(dim=1) - 1).pow(2).mean()

    return f, X


@BROKEN.says("unconnected", "modified-in-place", wrt="x")
def an_activation_changed_in_place():
    def f(x):
        h = torch.sigmoid(x)
        y = h * 2
        h += 1  # <- here
        return (y * h).sum()

    return f, X


@BROKEN.says("unconnected", "modified-in-place", wrt="w")
def a_weight_updated_too_early():
    def f(x, w):
        h = torch.exp(x @ w)
        out = h.sum()
        h.mul_(0.9)  # <- here
        return out + (h**2).sum()

    return f, X, torch.ones(3)


@BROKEN.says("unconnected", "assigned-state", wrt="x")
def a_value_kept_in_a_parameter():
    memory = nn.Parameter(torch.zeros(2, 3))

    def f(x):
        memory.data = x * 2  # <- here
        return (memory**2).sum()

    return f, X


@BROKEN.says("unconnected", "detached", wrt="x")
def a_detach_behind_a_mask():
    def f(x):
        keep = x > 0
        return torch.where(keep, x.detach(), 0.0).sum()  # <- here

    return f, X


@BROKEN.says("unconnected", "left-framework", wrt="x")
def a_metric_and_a_loss_that_leave():
    def f(x):
        if x.mean() > 100:
            return x.sum()
        return torch.tensor(x.pow(2).mean().item())  # <- here

    return f, X


@BROKEN.says("unconnected", None, wrt="x[1]")
def a_transform_that_nobody_can_look_into():
    return lambda x: torch.func.vmap(lambda row: torch.relu(row.detach()))(x).sum(), torch.tensor([1.0, -9.0])


@BROKEN.says("unconnected", "no-rule", wrt="x")
def a_function_without_a_derivative():
    def f(x):
        bins = x // 0.25  # <- here
        return bins.sum()

    return f, X


@BROKEN.says("unconnected", "modified-in-place", "torch.no_grad()")
def an_update_by_hand():
    w = torch.tensor([1.0, 2.0], requires_grad=True)

    def step():
        (w * w).sum().backward()
        w.sub_(0.1 * w.grad)  # <- here

    return step


@BROKEN.says("unconnected", "detached")
def a_gradient_by_features_that_are_detached():
    w = torch.tensor([1.0, 2.0], requires_grad=True)
    v = torch.tensor([3.0, 4.0], requires_grad=True)

    def step():
        features = (w * w).detach()  # <- here
        return torch.autograd.grad((features * v).sum(), [v, w])

    return step
