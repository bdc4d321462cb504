"""Many places of one parameter: each has its own values and gradient, and they cost little more than one place."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import elementgrad as eg

COUNT = 60
PLACES = [f"weight[{number}, {number % 5}]" for number in range(COUNT)]
CHOSEN = (np.arange(COUNT), np.arange(COUNT) % 5)
IDS = torch.tensor([3, 0, 3, 59, 17])


def table():
    torch.manual_seed(0)
    return torch.nn.Embedding(100, 5)


def loss_of(model, ids=IDS):
    return model(ids).square().sum()


def dense_gradient(model):
    plain = table()
    plain.load_state_dict(model.state_dict())
    (gradient,) = torch.autograd.grad(loss_of(plain), [plain.weight])
    return gradient[CHOSEN]


def gradients(elements):
    return torch.cat([leaf.grad for leaf in elements.parameters()])


def test_each_place_gets_its_own_gradient_in_every_forward():
    model = table()
    elements = eg.trainable(model, PLACES)
    optimizer = torch.optim.SGD(elements.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(model).backward()
        torch.testing.assert_close(gradients(elements), dense_gradient(model))
        optimizer.step()
    assert len(elements) == COUNT
    assert [elements[place].shape for place in PLACES[:2]] == [(1,), (1,)]
    elements.undo()
    assert torch.equal(model.weight, table().weight)


def test_a_place_that_is_frozen_for_a_while_gets_no_gradient_meanwhile():
    model = table()
    elements = eg.trainable(model, PLACES)
    loss_of(model).backward()
    first, second, *_ = elements.parameters()
    first.grad = second.grad = None
    first.requires_grad_(False)
    loss_of(model).backward()
    assert first.grad is None
    assert second.grad is not None
    first.requires_grad_()
    loss_of(model).backward()
    assert first.grad is not None


def test_a_copy_that_is_made_after_a_forward_trains_apart():
    model = table()
    elements = eg.trainable(model, PLACES)
    loss_of(model).backward()
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        parameter.grad = None
    loss_of(other).backward()
    mine = torch.cat([parameter.grad for parameter in other.parameters() if parameter.requires_grad])
    torch.testing.assert_close(mine, gradients(elements))


def test_second_derivatives_see_the_present_values():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    x = torch.randn(2, 4, requires_grad=True)
    elements = eg.trainable(model, ["weight[0, 1]", "weight[2, 3]", "bias[1]", "bias[0]"])
    model(x).tanh().sum().backward()
    with torch.no_grad():
        for leaf in elements.parameters():
            leaf.add_(0.5)
    (slope,) = torch.autograd.grad(model(x).tanh().sum(), [x], create_graph=True)
    found = torch.autograd.grad(slope.square().sum(), [*elements.parameters()])
    weight, bias = (parameter.detach().clone().requires_grad_() for parameter in (model.weight, model.bias))
    (slope,) = torch.autograd.grad((x @ weight.T + bias).tanh().sum(), [x], create_graph=True)
    of_weight, of_bias = torch.autograd.grad(slope.square().sum(), [weight, bias])
    expected = torch.stack([of_weight[0, 1], of_weight[2, 3], of_bias[1], of_bias[0]])
    torch.testing.assert_close(torch.cat(found), expected)


def test_routes_to_many_places_and_to_parts_of_them():
    model = table()
    elements = eg.trainable(model, ["weight[:3]", *PLACES[3:]])
    losses = {"weight[0, 1:3]": 2 * loss_of(model), tuple(PLACES[10:20]): 3 * loss_of(model)}
    elements.backward(losses)
    dense = torch.autograd.grad(loss_of(plain := table()), [plain.weight])[0]
    expected = torch.zeros(3, 5)
    expected[0, 1:3] = 2 * dense[0, 1:3]
    torch.testing.assert_close(elements["weight[:3]"].grad.view(3, 5), expected)
    torch.testing.assert_close(elements[PLACES[17]].grad, 3 * dense[17, 2:3])
    assert elements[PLACES[30]].grad is None
    with pytest.raises(eg.PlaceError, match=r"weight\[5, 1\] has elements that do not train here"):
        elements.backward({"weight[5, 1]": loss_of(model)})


@pytest.mark.parametrize("jit", [False, True])
def test_jax_places_of_one_array_have_their_own_gradients_and_one_program(jit):
    params = {"weight": jnp.asarray(table().weight.detach().numpy()), "out": jnp.ones((5, 3))}
    ids = jnp.asarray(IDS.numpy())

    def loss(params):
        return (jnp.tanh(params["weight"][ids]) @ params["out"]).sum()

    sizes = []
    for places in (PLACES[:2], PLACES):
        elements = eg.trainable(params, [*places, "out[1, 2]", "out[0, 0]"])
        grad = jax.jit(lambda values, elements=elements: elements.grad(loss, values))
        found = (grad if jit else lambda values, elements=elements: elements.grad(loss, values))(elements.values)
        dense = jax.grad(loss)(params)
        for place, gradient in found.items():
            np.testing.assert_allclose(gradient, dense[eg.at(place).name][eg.at(place).index], rtol=1e-5)
        sizes.append(len(jax.make_jaxpr(grad)(elements.values).jaxpr.eqns[0].params["jaxpr"].jaxpr.eqns))
    assert sizes[1] <= sizes[0] + 1
