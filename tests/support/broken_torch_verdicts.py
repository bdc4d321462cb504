"""PyTorch programs in which another cause lies near: ties, masks, writes that autograd misses, new leaves, fixes."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.programs_broken import Table

BROKEN = Table()
IMAGE = torch.tensor([[[[1.0, 2.0, 2.0, 9.0], [0.0, 0.0, 0.0, 3.0], [5.0, 5.0, 2.0, 1.0], [0.0, 1.0, 1.0, 1.0]]]])
ROWS = torch.tensor([[1.0, 2.0], [2.0, 3.0]])
LEVEL = torch.tensor([[1.0, 2.0], [2.0, 2.0]])
X = torch.tensor([1.0, 2.0])
C = torch.tensor([-1.0, 2.0])


@BROKEN.says("zero", "not-selected", wrt="x[0, 0, 0, 2]")
def as_large_as_the_maximum_of_another_window():
    return lambda x: F.max_pool2d(x, 2).sum(), IMAGE  # <- here


@BROKEN.says("zero", "not-selected", of="output[0, 0, 0, 1]", wrt="input[0, 0, 0, 2]")
def a_module_with_such_a_window():
    return nn.MaxPool2d(2), IMAGE


@BROKEN.says("zero", "tie", fix="equal elements are interchangeable", wrt="x[0, 0, 2, 1]")
def a_tie_in_its_own_window():
    return lambda x: F.max_pool2d(x, 2).sum(), IMAGE  # <- here


@BROKEN.says("zero", "tie", wrt="x[0, 0, 2, 1]")
def a_tie_in_an_adaptive_window():
    return lambda x: F.adaptive_max_pool2d(x, 2, return_indices=True)[0].sum(), IMAGE  # <- here


@BROKEN.says("zero", "not-selected", wrt="x[0, 0, 0, 2]")
def a_volume():
    return lambda x: F.max_pool3d(x[None], (1, 2, 2)).sum(), IMAGE  # <- here


@BROKEN.says("zero", "not-selected", wrt="x[0, 0, 3]")
def windows_that_overlap():
    return lambda x: F.max_pool1d(x, 3, 2, 1, 1, True).sum(), torch.tensor([[[1.0, 2.0, 1.0, 1.0, 7.0]]])  # <- here


@BROKEN.says("zero", "not-selected", wrt="x[1, 0]")
def as_large_as_the_maximum_of_another_row():
    return lambda x: x.max(1).values.sum(), ROWS  # <- here


@BROKEN.says("zero", "tie", fix="amax", wrt="x[1, 1]")
def a_tie_in_its_own_row():
    return lambda x: x.max(1).values.sum(), LEVEL  # <- here


@BROKEN.says("zero", "not-selected", wrt="x[1, 0]")
def the_largest_of_another_row():
    return lambda x: x.topk(1).values.sum(), ROWS  # <- here


@BROKEN.says("zero", "tie", wrt="x[1, 1]")
def the_first_of_two_that_are_largest():
    return lambda x: x.bfloat16().topk(1).values.sum(), LEVEL  # <- here


@BROKEN.says("zero", "not-selected", wrt="x[0]")
def a_segment():
    ids = torch.tensor([0, 0, 1])
    x = torch.tensor([1.0, 2.0, 1.0])
    return lambda x: torch.zeros(2).scatter_reduce(0, ids, x, "amax", include_self=False).sum(), x  # <- here


def _written(write):
    def f(x):
        h = x * 2
        write(h)
        return (h * h).sum()

    return f, X


@BROKEN.says("mismatch", "modified-through-data", fix="a new tensor")
def other_data():
    def write(h):
        h.data = h.data * 2  # <- here

    return _written(write)


@BROKEN.says("mismatch", "modified-through-data")
def a_write_to_what_is_detached():
    return _written(lambda h: h.detach().add_(h.detach()))  # <- here


@BROKEN.says("mismatch", "modified-through-data")
def a_write_by_numpy():
    def write(h):
        numbers = h.detach().numpy()  # <- here
        numbers *= 2

    return _written(write)


@BROKEN.says("mismatch", "modified-through-data")
def a_write_by_numpy_to_what_is_saved():
    def f(x):
        h = x * 2
        numbers, y = np.asarray(h.detach()), h * h  # <- here
        del h
        numbers[:] = 7
        return y.sum()

    return f, X


@BROKEN.says("mismatch", "modified-through-data")
def a_write_by_numpy_to_what_is_added_up():
    def f(x):
        h = x * 2
        numbers = h.detach().numpy()  # <- here
        numbers *= 3
        return h.sum()

    return f, X


@BROKEN.says("mismatch", "modified-through-data")
def a_copy_without_gradients():
    def write(h):
        with torch.no_grad():
            h.copy_(h * 3)  # <- here

    return _written(write)


@BROKEN.says("mismatch", "modified-through-data")
def a_sum_without_gradients():
    def write(h):
        with torch.no_grad():
            h += h.clone()  # <- here

    return _written(write)


@BROKEN.says("mismatch", "modified-through-data", of="output[0]", wrt="weight[0, 0]")
def a_module_that_sets_data():
    class Clipped(nn.Linear):
        def forward(self, x):
            h = super().forward(x)
            h.data = h.data * 3  # <- here
            return h * h

    return Clipped(2, 1), X


@BROKEN.says("unconnected", "detached")
def a_new_leaf_that_is_detached():
    def step():
        w = torch.tensor([1.0, 2.0], requires_grad=True)
        (w * 2).detach().sum().backward()  # <- here

    return step


@BROKEN.says("unconnected", "no-grad")
def a_tensor_tracked_later_without_gradients():
    def step():
        w = torch.tensor([1.0, 2.0]).requires_grad_()
        with torch.no_grad():
            h = w * 2  # <- here
        h.sum().backward()

    return step


@BROKEN.says("unconnected", "discrete")
def a_tensor_tracked_later_that_is_counted():
    def step():
        w = torch.tensor([1.0, 2.0])
        w.requires_grad = True
        (w > 1).float().sum().backward()  # <- here

    return step


@BROKEN.says("unconnected", "not-tracked")
def a_new_leaf_beside_what_is_used():
    def step():
        torch.tensor([1.0, 2.0], requires_grad=True)
        w = torch.tensor([1.0, 2.0])
        (w * 2).sum().backward()  # <- here

    return step


@BROKEN.says("nonfinite", "masked-branch", fix="log(torch.where(ok, x, 1.0))", wrt="x[0]")
def a_constant_that_is_no_number():
    def f(x):
        c = torch.log(C)  # <- here
        return torch.where(C < 0, 0.0, x * c).sum()

    return f, X


@BROKEN.says("nonfinite", "masked-branch", wrt="x")
def one_factor_of_constants_that_are_no_numbers():
    def f(x):
        c = torch.sqrt(C)  # <- here
        return (x * c).masked_fill(C < 0, 0.0).sum()

    return f, torch.tensor(2.0)


@BROKEN.says("nonfinite", "masked-branch", fix="nan_to_num", wrt="x[0]")
def data_with_gaps():
    data = torch.tensor([float("nan"), 2.0])
    return lambda x: (x * data).nansum(), X  # <- here


@BROKEN.says("nonfinite", "masked-branch", wrt="x[0]")
def a_softplus_by_hand():
    def f(x):
        grown = torch.log1p(torch.exp(x))  # <- here
        return torch.where(x > 20, x, grown).sum()

    return f, torch.tensor([1000.0, 4.0])


@BROKEN.says("nonfinite", "singular", fix="sum of squares", wrt="x[0]")
def the_square_of_a_root():
    return lambda x: (x**2).sum().sqrt() ** 2, torch.zeros(2)  # <- here


@BROKEN.says("zero", "stationary", wrt="x[0]")
def the_square_of_a_norm():
    return lambda x: x.norm() ** 2, torch.zeros(2)  # <- here


@BROKEN.says("zero", "stationary", wrt="x[0]")
def a_norm_times_itself():
    return lambda x: x.norm() * x.norm(), torch.zeros(2)  # <- here


@BROKEN.says("unconnected", "not-tracked", fix="weight and the bias", of="output[0, 0]", wrt="1.running_mean[0]")
def statistics():
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), torch.randn(4, 2)


@BROKEN.says("unconnected", "no-rule", wrt="weight")
def weights_of_classes():
    def f(x, weight):
        return F.cross_entropy(x, torch.tensor([0, 1]), weight=weight)  # <- here

    return f, ROWS, X


@BROKEN.says("unconnected", "unused", fix="another result", of="output")
def a_result_that_is_a_constant():
    return lambda x: torch.ones(2).sum(), X


class _Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.first, self.second = nn.Linear(2, 3), nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, x):
        h = torch.tanh(self.body(x))
        return {"first": self.first(h), "second": self.second(h)}


@BROKEN.says(
    "unconnected", "unused", fix="add that result to the loss", of="output.first[0, 0]", wrt="second.weight[0, 0]"
)
def a_weight_of_another_head():
    return _Heads(), ROWS


@BROKEN.says("zero", "masked", fix="xavier_uniform_", of="output[0, 0]", wrt="0.weight[0, 0]")
def weights_that_are_all_zero():
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    return model, ROWS


@BROKEN.says("zero", "masked", fix="change the mask to keep", wrt="x[1]")
def a_mask_that_is_added():
    mask = torch.tensor([0.0, -1e9])
    return lambda x: ((x + mask).softmax(-1) * C).sum(), X  # <- here


@BROKEN.says("zero", "masked", wrt="x[0]")
def an_element_that_a_mask_of_its_own_leaves_out():
    return lambda x: x[x > 1].sum(), X  # <- here


@BROKEN.says("zero", "cancelled", fix="over several values", of="output[0, 0]", wrt="x[0, 0]")
def a_norm_over_one_number():
    return lambda x: F.layer_norm(x, (1,)), torch.ones(2, 1)  # <- here


@BROKEN.says("zero", "cancelled")
def a_mean_taken_from_itself():
    x = torch.ones(1, requires_grad=True)
    return {"of": (x - x.mean()).sum(), "wrt": x}


@BROKEN.says("nonfinite", "masked-branch", wrt="x[0, 0]")
def a_size_of_each_row_that_is_masked():
    def f(x):
        size = (x**2).sum(-1, keepdim=True)
        return torch.where(size > 0, x / size, 0.0).sum()  # <- here

    return f, torch.tensor([[0.0, 0.0], [1.0, 2.0]])
