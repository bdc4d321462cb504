"""PyTorch programs whose gradient is wrong or not finite, or zero for more than one reason. The line is marked."""

import torch
from torch import nn

import elementgrad as eg
from tests.support.programs_broken import Table

BROKEN = Table()
X = torch.tensor([[0.5, -1.0, 2.0], [1.5, 0.3, -0.7]])


@BROKEN.says("zero", "hook", wrt="x")
def a_hook_that_returns_zero():
    def f(x):
        h = torch.tanh(x)
        h.register_hook(lambda g: torch.zeros_like(g))  # <- here
        return h.sum()

    return f, X


@BROKEN.says("mismatch", "hook", wrt="weight[0, 0]")
def a_hook_on_a_parameter():
    model = nn.Linear(3, 1)
    model.weight.register_hook(lambda g: g * 0.1)
    return nn.Sequential(model, nn.Flatten(0))[0], X[:1]


@BROKEN.says("zero", "custom-rule", wrt="x")
def a_rule_that_returns_zero():
    class Step(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.sigmoid()

        @staticmethod
        def backward(ctx, g):
            return torch.zeros_like(g)

    def f(x):
        return Step.apply(x).sum()  # <- here

    return f, X


@BROKEN.says("mismatch", "custom-rule", wrt="x[0, 2]")
def a_rule_with_the_wrong_sign():
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**2

        @staticmethod
        def backward(ctx, g):
            return -2 * ctx.saved_tensors[0] * g

    def f(x):
        h = torch.tanh(x)
        return Square.apply(h).sum()  # <- here

    return f, X


@BROKEN.says("mismatch", "modified-through-data", wrt="x")
def a_write_behind_the_back():
    def f(x):
        h = x * 2
        y = h**2
        h.data.mul_(0.5)  # <- here
        return y.sum()

    return f, X


@BROKEN.says("nonfinite", "masked-branch", wrt="x[0]")
def a_safe_square_root_that_is_not():
    def f(x):
        return torch.where(x > 0, torch.sqrt(x), torch.zeros_like(x)).sum()  # <- here

    return f, torch.tensor([0.0, 4.0])


@BROKEN.says("nonfinite", "masked-branch", wrt="x[1]")
def a_masked_logarithm():
    def f(x):
        logs = torch.log(x)  # <- here
        return torch.where(x > 0, x * logs, 0.0).sum()

    return f, torch.tensor([2.0, 0.0])


@BROKEN.says("nonfinite", "singular", wrt="x[0]")
def a_distance_of_zero():
    def f(x):
        return (x - torch.ones(2)).pow(2).sum().sqrt()  # <- here

    return f, torch.ones(2)


@BROKEN.says("nonfinite", "singular", wrt="x[1]")
def a_logarithm_of_zero():
    def f(x):
        return -torch.log(x).mean()  # <- here

    return f, torch.tensor([0.5, 0.0])


@BROKEN.says("nonfinite", "singular", wrt="scale")
def a_division_by_zero():
    def f(x, scale):
        return (x / scale).sum()  # <- here

    return f, X, torch.tensor(0.0)


@BROKEN.says("nonfinite", "overflow", wrt="x[0]")
def half_precision_that_overflows():
    def f(x):
        energy = (x.half() * 300) * 300  # <- here
        return energy.float().pow(2).log()[0]

    return f, torch.tensor([2.0])


@BROKEN.says("zero", "masked", wrt="x[0, 1]")
def a_dead_unit_before_a_mask():
    def f(x):
        y = torch.relu(x) + 3 * x
        return (y * torch.zeros(2, 3)).sum()  # <- here

    return f, X


@BROKEN.says("nonfinite", "singular", wrt="x[0]")
def two_roots_of_which_one_matters():
    def f(x):
        first = torch.sqrt(x[:1])  # <- here
        second = torch.sqrt(x[1:])
        return first.sum() + second.sum()

    return f, torch.zeros(2)


@BROKEN.says("zero", "dead-relu", wrt="x[0, 1]")
def behind_a_rule_without_forward_mode():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, g):
            return 2 * g

    def f(x):
        return torch.relu(Twice.apply(x)).sum()  # <- here

    return f, X


@BROKEN.says("zero", "masked", wrt="x[0, 1]")
def a_weight_of_zero():
    def f(x):
        return x @ torch.tensor([1.0, 0.0, 1.0]) @ torch.ones(2)  # <- here

    return f, X


@BROKEN.says("zero", "detached", wrt="x[0, 1]")
def an_element_that_is_stopped():
    def f(x):
        return (eg.at(x)[0, 1].stop() ** 2).sum()  # <- here

    return f, X


@BROKEN.says("mismatch", "custom-rule", wrt="x[0, 2]")
def a_wrong_rule_of_a_slope_that_is_small_beside_the_value():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, g):
            return -g

    def f(x):
        return 1e-5 * Double.apply(x).sum() + 1e4  # <- here

    return f, X


@BROKEN.says("zero", "masked", wrt="x[0, 2]")
def a_factor_of_zero_before_a_rectifier():
    def f(x):
        h = x * torch.zeros(3)  # <- here
        return torch.relu(h - 0.5).sum()

    return f, X
