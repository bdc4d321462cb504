"""Training steps and live tensors of PyTorch that went wrong. The line at fault is marked."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import elementgrad as eg
from tests.support.programs_broken import Table

BROKEN = Table()
X = torch.tensor([[0.5, -1.0, 2.0], [1.5, 0.3, -0.7]])
Y = torch.tensor([0, 1])


@BROKEN.says("unconnected", "not-tracked", fix="compute the loss from the parameters")
def a_loss_of_constants():
    def step():
        F.mse_loss(torch.zeros(2, 3), X).backward()  # <- here

    return step


@BROKEN.says("unconnected", "not-tracked", fix="requires_grad_(True) on those that are frozen")
def the_famous_error():
    x = torch.tensor([1.0, 2.0, 3.0])

    def step():
        loss = (x[0] * 2) ** 2  # <- here
        loss.backward()

    return step


@BROKEN.says("unconnected", "no-grad")
def a_validation_that_trains():
    model = nn.Linear(3, 2)

    def step():
        with torch.no_grad():
            logits = model(X)  # <- here
        loss = F.cross_entropy(logits, Y)
        loss.backward()

    return step


@BROKEN.says("unconnected", "left-framework")
def a_loss_of_items():
    model = nn.Linear(3, 2)

    def step():
        losses = [F.cross_entropy(model(x[None]), y[None]) for x, y in zip(X, Y, strict=True)]
        loss = torch.tensor([loss.item() for loss in losses]).mean()  # <- here
        loss.backward()

    return step


@BROKEN.says("unconnected", "left-framework")
def a_loss_of_numpy():
    model = nn.Linear(3, 2)

    def step():
        hidden = model(X).detach().numpy()  # <- here
        loss = torch.from_numpy(np.tanh(hidden)).sum()
        loss.backward()

    return step


@BROKEN.says("unconnected", "left-framework")
def memory_of_numpy_without_gradients():
    weight = torch.ones(2, requires_grad=True)

    def step():
        with torch.no_grad():
            hidden = (weight * 2).numpy()  # <- here
        torch.from_numpy(hidden).sum().backward()

    return step


@BROKEN.says("unconnected", "left-framework")
def a_gradient_of_numpy():
    model = nn.Linear(3, 2)

    def step():
        loss = torch.tensor(np.tanh(model(X).detach().numpy()).mean())  # <- here
        return torch.autograd.grad(loss, model.weight)

    return step


_weight = torch.ones(2, requires_grad=True)


@BROKEN.says("unconnected", "left-framework", wrt=_weight)
def a_leaf_made_of_numpy():
    def step():
        hidden = torch.tensor((_weight * 2).detach().numpy(), requires_grad=True)  # <- here
        (hidden**2).sum().backward()
        _weight.grad.zero_()

    return step


@BROKEN.says("unconnected", "detached")
def a_target_network_on_the_wrong_side():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        optimizer.zero_grad()
        q = model(X).detach()  # <- here
        loss = F.mse_loss(q, torch.ones(2, 2))
        loss.backward()
        optimizer.step()

    return step


@BROKEN.says("unconnected", "discrete")
def accuracy_that_trains():
    model = nn.Linear(3, 2)

    def step():
        loss = (model(X).argmax(1) == Y).float().mean()  # <- here
        loss.backward()

    return step


@BROKEN.says("unconnected", "freed-graph")
def two_losses_over_one_graph():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))

    def step():
        logits = model(X)
        F.cross_entropy(logits, Y).backward()
        logits.pow(2).sum().backward()  # <- here

    return step


@BROKEN.says("unconnected", "freed-graph")
def a_hidden_state_carried_over():
    cell = nn.GRUCell(3, 4)
    hidden = cell(X)
    hidden.sum().backward()

    def step():
        state = cell(X, hidden)  # <- here
        state.pow(2).sum().backward()

    return step


@BROKEN.says("unconnected", "modified-in-place")
def an_update_between_forward_and_backward():
    a, b = nn.Linear(3, 3), nn.Linear(3, 1)

    def step():
        h = torch.sigmoid(a(X))
        loss = b(h).sum()
        with torch.no_grad():
            b.weight.mul_(0.9)  # <- here
        loss.backward()

    return step


_model = nn.Linear(3, 1)
_model(X).sum().backward()


@BROKEN.says("mismatch", "accumulated", wrt=_model.weight)
def a_step_without_zero_grad():
    def step():
        _model(X).sum().backward()  # <- here

    return step


@BROKEN.says("mismatch", "accumulated")
def a_gradient_asked_for_twice():
    w = torch.ones(3, requires_grad=True)
    for _ in range(3):
        (X @ w).sum().backward()
    return {"of": (X @ w).sum(), "wrt": w}


@BROKEN.says("unconnected", "not-tracked")
def a_plain_leaf():
    x, w = torch.ones(3), torch.ones(3, requires_grad=True)
    return {"of": (x * w).sum(), "wrt": x}


@BROKEN.says("unconnected", "integer")
def an_integer_leaf():
    x, w = torch.arange(3), torch.ones(3, requires_grad=True)
    return {"of": (x * w).sum(), "wrt": x}


@BROKEN.says("unconnected", "non-leaf")
def a_hidden_tensor_after_backward():
    x = torch.ones(3, requires_grad=True)
    h = x.exp()
    loss = (h**2).sum()
    loss.backward()
    return {"of": loss, "wrt": h}


@BROKEN.says("flows", "non-leaf")
def a_tensor_moved_before_use():
    x = torch.ones(3, requires_grad=True).to(torch.float64)
    return {"of": (x**2).sum(), "wrt": x}


@BROKEN.says("unconnected", "resliced")
def a_slice_taken_again():
    x = torch.ones(3, requires_grad=True)
    loss = (x[0] * 2) ** 2
    return {"of": loss, "wrt": x[0]}


@BROKEN.says("unconnected", "unused")
def a_tensor_under_the_same_name():
    x = torch.ones(3, requires_grad=True)
    loss = (x**2).sum()
    x = x + 1
    return {"of": loss, "wrt": x}


@BROKEN.says("unconnected", "freed-graph")
def a_graph_that_is_gone():
    x = torch.ones(3, requires_grad=True)
    loss = (x**2).sum()
    loss.backward()
    x.grad = None
    return {"of": loss, "wrt": x}


@BROKEN.says("zero", "dead-relu")
def a_live_relu():
    x = torch.tensor([-1.0, -2.0], requires_grad=True)
    return {"of": torch.relu(x).sum(), "wrt": x}


@BROKEN.says("nonfinite", "singular")
def a_live_root():
    x = torch.zeros(2, requires_grad=True)
    return {"of": (x.sqrt() * 3).sum(), "wrt": x}


_frozen = nn.Linear(3, 1).requires_grad_(False)
_head = nn.Linear(1, 1)


@BROKEN.says("unconnected", "not-tracked", wrt=_frozen.weight)
def a_step_that_trains_the_head_alone():
    def step():
        _head(_frozen(X)).sum().backward()

    return step


_body = nn.Linear(3, 1)


@BROKEN.says("unconnected", "detached", wrt=_body.weight)
def a_step_that_leaves_the_body_out():
    def step():
        features = _body(X).detach()  # <- here
        _head(features).sum().backward()

    return step


def _trained():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    return model, eg.trainable(model, ["0.weight[0, 1]", "2.bias[0]"])


@BROKEN.says("unconnected", "detached")
def elements_whose_loss_is_detached():
    model, elements = _trained()

    def step():
        logits = model(X).detach()  # <- here
        elements.backward({"2.bias[0]": logits.sum()})

    return step


@BROKEN.says("unconnected", "detached")
def elements_in_front_of_a_detach():
    model, elements = _trained()

    def step():
        features = model[0](X).detach()  # <- here
        elements.backward({"0.weight[0, 1]": model[2](features).sum()})

    return step


@BROKEN.says("unconnected", "unused")
def elements_that_another_model_does_not_use():
    _, elements = _trained()
    teacher = nn.Linear(3, 1)

    def step():
        mean = teacher(X).detach()  # cuts nothing off that trains
        elements.backward({"0.weight[0, 1]": (teacher(X) - mean).sum()})

    return step


_leaf = torch.tensor([1.0, -2.0], requires_grad=True)
_table = nn.Embedding(5, 2, padding_idx=0)
_late = torch.ones(2)
_stack = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
nn.init.zeros_(_stack[1].weight)
_norm = nn.BatchNorm1d(3)


@BROKEN.says("zero", "dead-relu", wrt=eg.at(_leaf)[1])
def an_element_that_a_step_rectifies():
    def step():
        _leaf.grad = None
        torch.relu(_leaf).sum().backward()  # <- here

    return step


@BROKEN.says("zero", "masked", fix="initialised randomly", wrt=_stack[0].weight)
def a_step_behind_weights_of_zero():
    optimizer = torch.optim.SGD(_stack.parameters(), lr=0.0)

    def step():
        optimizer.zero_grad()
        _stack(X).sum().backward()  # <- here
        optimizer.step()

    return step


@BROKEN.says("nonfinite", "singular", wrt=_leaf)
def a_step_with_a_root_at_zero():
    def step():
        _leaf.grad = None
        root = (_leaf * 0).sqrt()  # <- here
        root.sum().backward()

    return step


@BROKEN.says("nonfinite", "singular", wrt=_leaf)
def a_step_with_a_loss_of_nan():
    def step():
        _leaf.grad = None
        (_leaf.log() ** 2).sum().backward()  # <- here

    return step


@BROKEN.says("zero", "row-not-used", fix="padding_idx", wrt=eg.at(_table.weight)[0])
def a_step_with_the_padding_row():
    def step():
        _table.weight.grad = None
        _table(torch.tensor([0, 2])).sum().backward()  # <- here

    return step


@BROKEN.says("zero", "row-not-used", wrt=eg.at(_table.weight)[3])
def a_step_without_a_row():
    def step():
        _table.weight.grad = None
        _table(torch.tensor([0, 2])).sum().backward()  # <- here

    return step


@BROKEN.says("zero", "dead-relu", wrt=_leaf)
def a_gradient_of_zeros():
    def step():
        loss = torch.relu(_leaf - 9).sum()  # <- here
        return torch.autograd.grad(loss, _leaf)

    return step


@BROKEN.says("unconnected", "detached", wrt=_late)
def a_tensor_tracked_in_the_step_and_detached():
    def step():
        _late.requires_grad_()
        (_late.detach() * 2).sum().backward()  # <- here

    return step


@BROKEN.says("unconnected", "no-grad", wrt=_late)
def a_tensor_tracked_in_the_step_without_gradients():
    def step():
        _late.requires_grad_()
        with torch.no_grad():
            loss = (_late * 2).sum()  # <- here
        loss.backward()

    return step


@BROKEN.says("unconnected", "detached", fix="not a new Parameter", wrt=_leaf)
def a_step_with_a_new_parameter():
    def step():
        weight = nn.Parameter(_leaf.clone())  # <- here
        (weight**2).sum().backward()

    return step


@BROKEN.says("unconnected", "not-tracked", fix="model.train() mode", wrt=_norm.running_mean)
def a_step_that_asks_for_a_statistic():
    def step():
        _norm(X).pow(2).sum().backward()

    return step
