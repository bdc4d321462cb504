"""PyTorch programs in which the element asked about is cut off or dead while others flow. The line is marked."""

import torch
import torch.nn.functional as F
from torch import nn

import elementgrad as eg
from tests.support.programs_broken import Table

BROKEN = Table()
X = torch.tensor([1.0, 2.0, 3.0])
ROWS = torch.tensor([1.0, -1.0])
W = torch.tensor(2.0)


@BROKEN.says("zero", "detached", wrt="x[0]")
def one_factor_detached():
    def loss(x):
        scale = x[0].detach()  # <- here
        return x[1] * scale

    return loss, X


@BROKEN.says("zero", "left-framework", wrt="x[0]")
def one_factor_as_a_number():
    def loss(x):
        scale = x[0].item()  # <- here
        return x[1] * scale

    return loss, X


@BROKEN.says("zero", "no-grad", wrt="x[0]")
def one_factor_without_gradients():
    def loss(x):
        first = x[0]
        with torch.no_grad():
            scale = first * 2  # <- here
        return x[1] * scale

    return loss, X


@BROKEN.says("zero", "detached", wrt="x[0]")
def a_stack_with_a_detached_part():
    return lambda x: torch.stack([x[0].detach(), x[1]]).prod(), X  # <- here


@BROKEN.says("zero", "detached", wrt="x[0]")
def a_detached_prefix():
    def loss(x):
        prefix = x[:1].detach()  # <- here
        return torch.cat([prefix, x[1:]]).sum()

    return loss, X


@BROKEN.says("zero", "detached", wrt="x[0]")
def a_state_detached_in_every_turn():
    def last(x):
        h = torch.zeros(())
        for t in range(3):
            h = torch.tanh(h.detach() + x[t])  # <- here
        return h

    return last, X


@BROKEN.says("zero", "detached", wrt="x[0]")
def a_branch_that_is_detached():
    def loss(x):
        kept = x.detach()  # <- here
        return torch.where(x > 0, kept, x).sum()

    return loss, X


@BROKEN.says("zero", None)
def live_tensors_with_a_cut_that_no_graph_shows():
    w = torch.tensor([1.0, 2.0], requires_grad=True)
    return {"of": w[1] * w[0].detach(), "wrt": eg.at(w)[0]}


@BROKEN.says("zero", "discrete", wrt="x[0]")
def an_element_that_only_decides():
    return lambda x: x[1] if x[0] > 0 else x[2], X  # <- here


@BROKEN.says("zero", "unused", wrt="x[0]")
def an_element_that_is_not_used():
    return lambda x: (x * 2)[1:].prod(), X  # <- here


@BROKEN.says("zero", "dead-relu", of="output[1]", wrt="w")
def a_row_that_is_dead():
    return lambda x, w: torch.relu(x * w), ROWS, W  # <- here


@BROKEN.says("zero", "dead-relu", of="output[1]", wrt="w")
def a_row_below_a_maximum():
    return lambda x, w: torch.maximum(x * w, torch.zeros(())), ROWS, W  # <- here


@BROKEN.says("zero", "dead-relu", of="output[1]", wrt="w")
def a_row_that_is_dead_twice():
    def layers(x, w):
        hidden = torch.relu(x * w) - 5
        return torch.relu(hidden)  # <- here

    return layers, torch.tensor([4.0, -1.0]), W


@BROKEN.says("zero", "clamped", of="output[1]", wrt="w")
def a_row_out_of_bounds():
    return lambda x, w: (x * w).clamp(0, 5), ROWS, W  # <- here


@BROKEN.says("zero", "saturated", of="output[1]", wrt="w")
def a_row_that_is_saturated():
    return lambda x, w: torch.sigmoid(x * w * 1000), ROWS, W  # <- here


@BROKEN.says("zero", "masked", of="output[1]", wrt="w")
def a_row_times_zero():
    mask = torch.tensor([1.0, 0.0])
    return lambda x, w: x * w * mask, ROWS, W  # <- here


@BROKEN.says("zero", "dead-relu", of="output[1, 0]", wrt="0.weight[1, 0]")
def a_unit_that_is_dead_for_one_example():
    model = nn.Sequential(nn.Linear(1, 2), nn.ReLU(), nn.Linear(2, 1))
    with torch.no_grad():
        model[0].weight.fill_(1.0)
        model[0].bias.zero_()
    return model, ROWS[:, None]


@BROKEN.says("zero", "dead-relu", of="output[0, 0, 0]", wrt="linear1.weight[0, 0]")
def a_unit_of_a_transformer_that_is_dead_for_one_token():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    with torch.no_grad():
        layer.linear1.weight[0] = torch.eye(8)[0]
        layer.linear1.bias[0] = 0.0
    return layer, torch.stack([-5 * torch.eye(8)[0], 5 * torch.eye(8)[0]])[None]


@BROKEN.says("zero", "masked", of="output[1, 0]", wrt="x[2, 0]")
def a_token_of_the_future():
    query, key, value = [torch.randn(2, 2) for _ in range(3)]

    def attention(x):
        scores = (x @ query) @ (x @ key).T
        future = torch.ones(3, 3, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(future, float("-inf"))  # <- here
        return scores.softmax(-1) @ (x @ value)

    return attention, torch.randn(3, 2)


@BROKEN.says("zero", "masked", of="output[0, 1, 0]", wrt="v[0, 2, 0]")
def a_token_of_the_future_in_one_call():
    def attention(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)  # <- here

    return attention, *[torch.randn(1, 3, 4) for _ in range(3)]


# Older versions of PyTorch give NaN there, newer ones zero.
SLOPE = torch.func.grad(torch.atan2)(torch.tensor(0.0), torch.tensor(0.0))


@BROKEN.says(*(("nonfinite", "singular") if SLOPE.isnan() else ("zero", "kink")), wrt="x[0]")
def an_angle_at_the_origin():
    return lambda x: torch.atan2(x[0], x[1]), torch.zeros(2)  # <- here


@BROKEN.says("zero", "not-selected", wrt="x[0]")
def the_smallest_of_a_sorted_list():
    return lambda x: torch.sort(x).values[0], torch.tensor([3.0, 1.0, 2.0])  # <- here


@BROKEN.says("zero", "unused", of="output[0]", wrt="x[2]")
def an_index_in_the_shape_of_what_is_added():
    def scatter(x):
        source = x * 2
        index = torch.tensor(1).expand_as(source)
        return torch.zeros_like(x).scatter_add(0, index, source)

    return scatter, X
