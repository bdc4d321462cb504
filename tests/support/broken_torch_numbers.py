"""PyTorch programs whose gradient is zero, not finite or wrong. The line at fault is marked."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.support.programs_broken import Table

BROKEN = Table()
X = torch.tensor([[0.5, -1.0, 2.0], [1.5, 0.3, -0.7]])


@BROKEN.says("zero", "dead-relu", wrt="x[0, 1]")
def one_dead_unit():
    def f(x):
        return torch.relu(x).sum()  # <- here

    return f, X


@BROKEN.says("zero", "dead-relu", wrt="0.weight[1, 2]")
def a_unit_with_a_bias_far_below_zero():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1), nn.Flatten(0))
    with torch.no_grad():
        model[0].bias[1] = -50.0
    return model, X[:1]


@BROKEN.says("zero", "dead-relu", wrt="x")
def a_network_that_died():
    def f(x):
        h = x
        for _ in range(3):
            h = F.relu(h.mean(1, keepdim=True) - 9 + h)  # <- here
        return h.sum()

    return f, X


@BROKEN.says("zero", "saturated", wrt="x[0, 2]")
def a_sigmoid_far_out():
    def f(x):
        return torch.sigmoid(40 * x).mean()  # <- here

    return f, X


@BROKEN.says("zero", "saturated", wrt="gain")
def a_tanh_far_out():
    return lambda x, gain: torch.tanh(x * gain).sum(), X, torch.tensor(500.0)


@BROKEN.says("zero", "clamped", wrt="x[0, 2]")
def an_action_that_is_clamped():
    def f(x):
        action = (2 * x).clamp(-1, 1)  # <- here
        return (action**2).sum()

    return f, X


@BROKEN.says("zero", "clamped", wrt="log_std")
def a_deviation_that_is_clamped():
    def f(log_std):
        std = torch.clip(log_std, -20, 2).exp()  # <- here
        return std.sum()

    return f, torch.tensor([3.0])


@BROKEN.says("zero", "masked", wrt="x[1, 2]")
def a_mask_of_zeros():
    mask = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]])

    def f(x):
        return ((x * mask) ** 2).sum() / mask.sum()  # <- here

    return f, X


@BROKEN.says("zero", "masked", wrt="scores[0, 2]")
def a_causal_mask():
    keep = torch.tensor([[True, True, False], [True, True, True]])

    def f(scores):
        scores = scores.masked_fill(~keep, float("-inf"))  # <- here
        return (scores.softmax(-1) @ torch.arange(3.0)).sum()

    return f, X


@BROKEN.says("zero", "masked", wrt="x[0, 1]")
def a_where():
    def f(x):
        return torch.where(x > 0, x, torch.zeros_like(x)).sum()  # <- here

    return f, X


@BROKEN.says("zero", "dropped", wrt="x")
def everything_dropped():
    def f(x):
        return F.dropout(x, 1.0).sum()  # <- here

    return f, X


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 8)
        self.gru = nn.GRU(8, 6, batch_first=True)
        self.head = nn.Linear(6, 50)

    def forward(self, tokens):
        hidden, _ = self.gru(self.embedding(tokens))
        return self.head(hidden)[:, -1]


@BROKEN.says("zero", "row-not-used", of="output[0, 2]", wrt="embedding.weight[0, 5]")
def a_token_that_does_not_occur():
    return Tagger(), torch.tensor([[3, 7, 9]])


@BROKEN.says("zero", "row-not-used", wrt="weight[1]")
def the_padding_row():
    def f(weight):
        return F.embedding(torch.tensor([1, 2, 1]), weight, padding_idx=1).sum()  # <- here

    return f, torch.ones(4, 2)


@BROKEN.says("zero", "not-selected", wrt="x[0]")
def the_smaller_one():
    def f(x):
        return x.max()  # <- here

    return f, torch.tensor([1.0, 3.0, 2.0])


@BROKEN.says("zero", "not-selected", wrt="image[0, 0, 0, 0]")
def a_pixel_that_the_pool_leaves_out():
    image = torch.arange(16.0).reshape(1, 1, 4, 4)

    def f(image):
        return F.max_pool2d(image, 2).sum()  # <- here

    return f, image


@BROKEN.says("zero", "tie", wrt="x[1]")
def the_second_of_two_equals():
    def f(x):
        return torch.max(x, 0).values  # <- here

    return f, torch.tensor([2.0, 2.0, 1.0])


@BROKEN.says("zero", "unused", wrt="x[1, 0]")
def another_row():
    def f(x):
        first = x[0]  # <- here
        return first.pow(2).sum()

    return f, X


@BROKEN.says("zero", "unused", of="output[0]", wrt="x[1, 0]")
def another_row_of_the_output():
    return lambda x: (x**2).sum(1), X


@BROKEN.says("zero", "step-function", wrt="x")
def rounded_to_a_grid():
    def f(x):
        return (torch.round(x * 8) / 8).sum()  # <- here

    return f, X


@BROKEN.says("zero", "step-function", wrt="x")
def binary_weights():
    def f(x):
        return torch.sign(x).sum()  # <- here

    return f, X


@BROKEN.says("zero", "discrete", wrt="p")
def a_coin():
    def f(p):
        return torch.bernoulli(p).sum()  # <- here

    return f, torch.tensor([0.2, 0.7])


@BROKEN.says("zero", "overwritten", wrt="x[0, 1]")
def an_element_written_over():
    def f(x):
        y = x.clone()
        y[0, 1] = 4.0  # <- here
        return (y**2).sum()

    return f, X


@BROKEN.says("zero", "overwritten", wrt="x")
def a_buffer_filled_twice():
    def f(x):
        out = torch.zeros(2, 3)
        out.copy_(x)
        out.fill_(1.0)  # <- here
        return out.sum()

    return f, X


@BROKEN.says("zero", "cancelled", of="output", wrt="x[0, 1]")
def a_sum_over_a_softmax():
    def f(x):
        return F.softmax(x, dim=-1).sum()  # <- here

    return f, X


@BROKEN.says("zero", "cancelled", wrt="x")
def a_difference_of_the_same():
    def f(x):
        a, b = x * 3, 3 * x
        return (a - b).sum()  # <- here

    return f, X


@BROKEN.says("zero", "underflow", wrt="x")
def half_precision():
    def f(x):
        h = x.half() * 1e-4
        return (h * 1e-4).float().sum()  # <- here

    return f, torch.tensor([0.5, 1.0])


@BROKEN.says("zero", "stationary", wrt="x")
def at_the_minimum():
    def f(x):
        return F.mse_loss(x, torch.ones(3))  # <- here

    return f, torch.ones(3)


@BROKEN.says("zero", "kink", wrt="x[1]")
def at_the_kink():
    def f(x):
        return x.abs().sum()  # <- here

    return f, torch.tensor([1.0, 0.0])


@BROKEN.says("zero", "masked", wrt="x[0]")
def a_dropout_of_ones_own():
    def f(x):
        torch.manual_seed(0)  # in float64 another mask is drawn, which keeps it
        keep = torch.rand_like(x) > 0.5
        return (x * keep / 0.5).sum()  # <- here

    return f, torch.ones(8)


@BROKEN.says("zero", "kink", wrt="x")
def a_distance_of_nothing():
    def f(x):
        return torch.dist(x, torch.ones(3))  # <- here

    return f, torch.ones(3)


@BROKEN.says("zero", "kink", wrt="x")
def a_distance_of_equal_rows():
    def f(x):
        return F.pairwise_distance(x, torch.ones(2, 3), eps=0.0).sum()  # <- here

    return f, torch.ones(2, 3)


@BROKEN.says("zero", "stationary", wrt="x")
def a_squared_distance_of_nothing():
    def f(x):
        return torch.dist(x, torch.ones(3)) ** 2  # <- here

    return f, torch.ones(3)


@BROKEN.says("nonfinite", "singular", fix="eigenvalues", wrt="x")
def vectors_of_equal_eigenvalues():
    def f(x):
        return torch.linalg.eigh(x)[1][0, 0]  # <- here

    return f, torch.eye(3)
