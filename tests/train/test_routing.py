"""Each loss to its own elements."""

import pytest
import torch
from torch import nn

import elementgrad as eg


class Counted(torch.autograd.Function):
    """Counts how often a gradient comes by."""

    count = 0

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        Counted.count += 1
        return gradient


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(8, 4), nn.Linear(4, 6)

    def forward(self, tokens):
        return Counted.apply(self.head(self.table(tokens)))


@pytest.fixture
def model():
    torch.manual_seed(0)
    Counted.count = 0
    return Model().double()


TOKENS = torch.tensor([0, 1, 5, 0])


def alone(model, elements, place, loss):
    (gradient,) = torch.autograd.grad(loss, elements[place], retain_graph=True)
    return gradient


def test_each_place_gets_the_gradient_of_its_own_loss_alone(model):
    elements = eg.trainable(model, ["table.weight[0, 2]", "table.weight[1, 3]", "head.bias"])
    losses = nn.functional.cross_entropy(model(TOKENS), TOKENS, reduction="none")
    expected = [
        alone(model, elements, "table.weight[0, 2]", losses[0]),
        alone(model, elements, "table.weight[1, 3]", losses[1]),
    ]
    Counted.count = 0
    elements.backward({"table.weight[0, 2]": losses[0], "table.weight[1, 3]": losses[1]})
    assert torch.equal(elements["table.weight[0, 2]"].grad, expected[0])
    assert torch.equal(elements["table.weight[1, 3]"].grad, expected[1])
    assert elements["head.bias"].grad is None
    assert Counted.count == 2


def test_one_backward_for_each_distinct_loss(model):
    places = ["table.weight[0]", "head.weight[1]", "head.bias"]
    elements = eg.trainable(model, places)
    output = model(TOKENS)
    one, other = output[0].sum(), output.square().sum()
    expected = [alone(model, elements, place, loss) for place, loss in zip(places, (one, other, one), strict=True)]
    Counted.count = 0
    elements.backward({("table.weight[0]", "head.bias"): one, "head.weight[1]": other})
    for place, gradient in zip(places, expected, strict=True):
        assert torch.equal(elements[place].grad, gradient)
    assert Counted.count == 2
    elements.backward({"table.weight[0]": (loss := model(TOKENS).sum()), "head.bias": loss})
    assert Counted.count == 3


def test_a_part_of_a_place_may_have_its_own(model):
    elements = eg.trainable(model, "table.weight[:2]")
    output = model(TOKENS)
    rows = alone(model, elements, "table.weight[:2]", output[0].sum()).view(2, 4)
    other = alone(model, elements, "table.weight[:2]", output[1].square().sum()).view(2, 4)
    elements.backward({"table.weight[0]": output[0].sum(), "table.weight[1, 1:3]": output[1].square().sum()})
    expected = torch.zeros(2, 4, dtype=torch.float64)
    expected[0], expected[1, 1:3] = rows[0], other[1, 1:3]
    assert torch.equal(elements["table.weight[:2]"].grad.view(2, 4), expected)


def test_gradients_accumulate_as_in_pytorch(model):
    elements = eg.trainable(model, "head.bias")
    elements.backward({"head.bias": model(TOKENS).sum()})
    once = elements["head.bias"].grad.clone()
    elements.backward(model(TOKENS).sum())
    assert torch.equal(elements["head.bias"].grad, 2 * once)


def test_routed_losses_reach_no_other_parameter(model):
    elements = eg.trainable(model, ["table.weight[0]"])
    model.head.requires_grad_(True)
    probe = torch.ones(4, 6, dtype=torch.float64, requires_grad=True)
    elements.backward({"table.weight[0]": (model(TOKENS) * probe).sum()})
    assert probe.grad is None
    assert model.head.weight.grad is None


BAD = {
    "not in training": ({"head.weight[0]": "sum"}, eg.PlaceError, "has elements that do not train here"),
    "unknown": ({"haed.bias": "sum"}, eg.PlaceError, "no parameter named 'haed.bias'; nearest: head.bias"),
    "overlapping": ({"table.weight[0]": "sum", "table.weight[:, 1]": "other"}, eg.DuplicateError, "is named by"),
    "no number": ({"head.bias": "vector"}, eg.OptionError, r"has shape \(4, 6\); give one number"),
    "no tensor": ({"head.bias": "float"}, eg.FrameworkError, "is float; give a torch.Tensor"),
    "no gradient": ({"head.bias": "detached"}, eg.UnconnectedError, "has no gradient"),
    "another graph": (
        {"table.weight": "sum", "head.bias": "apart"},
        eg.UnconnectedError,
        "does not depend on head.bias",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_routes_change_no_gradient(model, case):
    elements = eg.trainable(model, ["table.weight", "head.bias"])
    elements.backward(model(TOKENS).sum())
    before = [leaf.grad.clone() for leaf in elements.parameters()]
    output = model(TOKENS)
    losses = {
        "sum": output.sum(),
        "other": output.square().sum(),
        "vector": output,
        "float": 1.0,
        "detached": output.sum().detach(),
        "apart": torch.ones((), requires_grad=True) * 2,
    }
    routes, error, says = BAD[case]
    with pytest.raises(error, match=says):
        elements.backward({place: losses[loss] for place, loss in routes.items()})
    for leaf, gradient in zip(elements.parameters(), before, strict=True):
        assert torch.equal(leaf.grad, gradient)


def test_a_graph_is_kept_when_asked_for(model):
    elements = eg.trainable(model, ["head.bias"])
    loss = model(TOKENS).sum()
    elements.backward({"head.bias": loss}, retain_graph=True)
    elements.backward(loss)
    with pytest.raises(RuntimeError, match="second time"):
        elements.backward(loss)


@pytest.mark.parametrize("empty", [{}, {(): "loss"}])
def test_losses_without_a_place_are_refused(model, empty):
    elements = eg.trainable(model, ["head.bias"])
    loss = model(TOKENS).sum()
    with pytest.raises(eg.PlaceError, match=r"no losses are given|given to no place"):
        elements.backward(dict.fromkeys(empty, loss))
