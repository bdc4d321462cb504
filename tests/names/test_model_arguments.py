"""The gradient of a loss by one weight of a model: the model as an argument, or one that the function closes over."""

from contextlib import suppress
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
import tensorflow as tf
import torch
from torch import nn

import elementgrad as eg
from tests.support.frameworks import TENSORFLOW, TORCH

X = np.random.default_rng(0).normal(size=(4, 3))
Y = np.random.default_rng(1).normal(size=(4, 2))


class TorchNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 2)
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x):
        return torch.tanh(self.norm(self.fc(x)))


class KerasNet(keras.Model):
    def __init__(self):
        super().__init__()
        self.fc = keras.layers.Dense(2, name="fc")
        self.norm = keras.layers.BatchNormalization(name="norm")

    def call(self, x, training=None):
        return tf.tanh(self.norm(self.fc(x), training=training))


@jax.tree_util.register_dataclass
@dataclass
class JaxNet:
    weight: jax.Array
    bias: jax.Array

    def __call__(self, x):
        return jnp.tanh(eg.tag(x @ self.weight + self.bias, "hidden"))


class Case:
    """A net of one framework, its data, its loss, the name of its weight, and the framework's own gradient."""

    def __init__(self, fw):
        torch.manual_seed(0)
        keras.utils.set_random_seed(0)
        self.fw, self.x, self.y = fw, fw.tensor(X), fw.tensor(Y)
        if fw is TORCH:
            self.net, self.weight, self.layer = TorchNet().double(), "fc.weight", "fc"
            self.parameter = self.net.fc.weight
        elif fw is TENSORFLOW:
            self.net, self.weight, self.layer = KerasNet(), "fc/kernel", "fc"
            self.x, self.y = fw.tensor(X, "float32"), fw.tensor(Y, "float32")
            self.net(self.x)
            self.parameter = self.net.fc.kernel
        else:
            self.net, self.weight = JaxNet(jnp.asarray(X[:3, :2]), jnp.asarray(Y[0])), "weight"

    def loss(self, y):
        return ((y - self.y) ** 2).mean() if self.fw is not TENSORFLOW else tf.reduce_mean((y - self.y) ** 2)

    def gradient(self):
        if self.fw is TORCH:
            state = {name: tensor.clone() for name, tensor in self.net.state_dict().items()}
            (gradient,) = torch.autograd.grad(self.loss(self.net(self.x)), [self.parameter])
            self.net.load_state_dict(state)
            return gradient.numpy()
        if self.fw is TENSORFLOW:
            with tf.GradientTape() as tape:
                loss = self.loss(self.net(self.x))
            return tape.gradient(loss, self.parameter).numpy()
        return np.asarray(jax.grad(lambda net: self.loss(net(self.x)))(self.net).weight)

    def close(self, left, right):
        np.testing.assert_allclose(self.fw.numpy(left), right, rtol=1e-4 if self.fw is TENSORFLOW else 1e-9, atol=1e-7)


@pytest.fixture
def case(fw):
    return Case(fw)


@pytest.fixture(params=[TORCH, TENSORFLOW], ids=lambda fw: fw.name)
def held(request):
    """A case of a framework whose models hold their parameters."""
    return Case(request.param)


def test_a_model_is_an_argument_like_any_other(case):
    gradient = case.gradient()
    read = eg.grad(lambda model: case.loss(model(case.x)), case.net, wrt=f"model.{case.weight}[0, 1]")
    case.close(read, gradient[0, 1])
    J = eg.jacobian(lambda model: case.loss(model(case.x)), case.net, wrt=f"model.{case.weight}")
    case.close(J[..., :], gradient)


def test_several_models_have_their_names_behind_their_arguments(held):
    other = Case(held.fw)

    def f(first, models, x):
        return held.loss(first(x)) + 3 * held.loss(models["second"](x))

    names = [f"first.{held.weight}[0, 1]", f"models.second.{held.weight}[0, 1]"]
    first, second = eg.grad(f, held.net, {"second": other.net}, held.x, wrt=names)
    held.close(first, held.gradient()[0, 1])
    held.close(second, 3 * other.gradient()[0, 1])


def test_every_verb_knows_the_names_of_a_model_argument(held):
    f, place = (lambda model, x: held.loss(model(x))), f"model.{held.weight}[0, 1]"
    gradient = held.gradient()[0, 1]
    assert eg.explain(f, held.net, held.x, wrt=place).verdict == "flows"
    assert eg.check(f, held.net, held.x, wrt=place)
    held.close(eg.contributions(f, held.net, held.x, wrt=place).total, gradient)
    by_hand = eg.hessian(lambda x: held.loss(held.net(x)), held.x, wrt=eg.at(held.parameter)[0, :])
    held.close(eg.hessian(f, held.net, held.x, wrt=f"model.{held.weight}[0, :]")[0, 1], held.fw.numpy(by_hand[0, 1]))
    assert eg.grad(f, held.net, held.x, of="model[0, 0]", wrt="model.fc").shape == (4, 2)
    assert eg.grad(f, held.net, held.x, wrt="model.input").shape == (4, 3)
    kinds = {row.name: row.kind for row in eg.names(f, held.net, held.x)}
    assert kinds[f"model.{held.weight}"] == "parameter"
    assert kinds["model.fc"] == kinds["model.norm"] == kinds["model"] == "activation"
    assert kinds["x"] == "input"
    assert "buffer" in kinds.values()


def test_a_live_parameter_that_the_function_closes_over_is_a_place(held):
    gradient = held.gradient()
    held.close(eg.grad(lambda x: held.loss(held.net(x)), held.x, wrt=eg.at(held.parameter)[0, 1]), gradient[0, 1])
    held.close(eg.grad(lambda x: held.loss(held.net(x)), held.x, wrt=held.parameter), gradient)
    held.close(eg.grad(lambda: held.loss(held.net(held.x)), wrt=held.parameter), gradient)
    J = eg.jacobian(lambda x: held.net(x), held.x, wrt=held.parameter)
    direct = eg.jacobian(held.net, held.x, wrt=held.weight)
    held.close(J[:, (0, 1)], held.fw.numpy(direct[:, (0, 1)]))
    held.close(J[(0, 0), :], held.fw.numpy(direct[(0, 0), :]))
    assert eg.check(lambda x: held.loss(held.net(x)), held.x, wrt=eg.at(held.parameter)[0, 1])
    assert eg.explain(lambda x: held.loss(held.net(x)), held.x, wrt=eg.at(held.parameter)[0, 1]).verdict == "flows"


def test_names_from_gives_the_names_of_a_closed_over_model(held):
    f = lambda x: held.loss(held.net(x))  # noqa: E731
    held.close(eg.grad(f, held.x, wrt=f"{held.weight}[0, 1]", names_from=held.net), held.gradient()[0, 1])
    held.close(eg.grad(f, held.x, wrt=f"net.{held.weight}[0, 1]", names_from={"net": held.net}), held.gradient()[0, 1])
    assert eg.explain(f, held.x, of="fc[0, 0]", names_from=held.net).verdict == "flows"
    assert "norm" in [row.name for row in eg.names(f, held.x, names_from=held.net)]
    with pytest.raises(eg.OptionError, match=r"names_from= is for a function .* leave it out"):
        eg.grad(held.net, held.x, names_from=held.net)
    with pytest.raises(eg.OptionError, match=r"names_from=3 is not a model of PyTorch or Keras"):
        eg.grad(f, held.x, names_from=3)
    with pytest.raises(eg.PlaceError, match=r"no tensor is named .* that the function closes over, give names_from="):
        eg.grad(f, held.x, wrt=f"{held.weight}[0, 1]")


def test_jax_names_the_way_for_a_closed_over_array():
    w, x = jnp.ones(3), jnp.arange(3.0)
    with pytest.raises(eg.PlaceError, match=r"none of the inputs x, and .* constant on JAX; pass it to"):
        eg.grad(lambda x: (x * w).sum(), x, wrt=eg.at(w)[0])
    for verb in (eg.grad, eg.explain):
        with pytest.raises(eg.PlaceError, match=r"not an input, and .* constant on JAX; pass it to the function"):
            verb(lambda: (x * w).sum(), wrt=w)
    with pytest.raises(eg.OptionError, match="On JAX pass it to the function"):
        eg.grad(lambda x: (x * w).sum(), x, names_from={"w": w})


def test_nothing_of_a_model_argument_is_disturbed():
    case = Case(TORCH)
    net, state = case.net, {name: tensor.clone() for name, tensor in case.net.state_dict().items()}
    place = "model.fc.weight[0, 1]"
    for f in (lambda model: case.loss(model(case.x)), lambda model: 1 / 0 + model(case.x)):
        for verb in (eg.grad, eg.explain, eg.check, eg.contributions):
            with suppress(ZeroDivisionError):
                verb(f, net, wrt=place)
        with suppress(ZeroDivisionError):
            eg.grad(lambda x, f=f: f(net), case.x, wrt=eg.at(net.fc.weight)[0, 1])
    assert all(torch.equal(tensor, state[name]) for name, tensor in net.state_dict().items())
    assert net.fc.weight.grad is None
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())
    assert net.training


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 2


@pytest.mark.parametrize(
    "use",
    [
        lambda w, x: (w * x).sum(),
        lambda w, x: Doubled.apply(w).sum() + w[0],
        lambda w, x: torch.func.vmap(lambda w, x: w * x)(w, x).sum(),
        lambda w, x: torch.stack([w, w * 2]).sum(),
        lambda w, x: torch.func.grad(lambda x: (w * x**2).sum())(x).sum(),
        lambda w, x: w.T.sum() + w.clone().mul_(3).sum(),
    ],
    ids=["product", "custom function", "vmap", "list", "inner gradient", "properties and writes"],
)
def test_a_bare_parameter_is_a_place_wherever_it_is_used(use):
    w, x = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]).double()), torch.tensor([4.0, 5.0, 6.0]).double()
    (expected,) = torch.autograd.grad(use(w, x), [w])
    assert torch.equal(eg.grad(lambda x: use(w, x), x, wrt=w), expected)
    w.requires_grad_(False)
    assert torch.equal(eg.grad(lambda x: use(w, x), x, wrt=eg.at(w)[1]), expected[1])
    assert w.grad is None
    assert not w.requires_grad


def test_a_parameter_that_is_not_used_is_unconnected():
    w, x = nn.Parameter(torch.ones(3)), torch.ones(3)
    with pytest.raises(eg.UnconnectedError):
        eg.grad(lambda x: x.sum(), x, wrt=w)
    with pytest.raises(eg.PlaceError, match="none of the inputs"):
        eg.grad(lambda x: x.sum(), x, wrt=torch.ones(3))


def test_a_model_argument_without_wrt_shows_a_name(held):
    with pytest.raises(eg.PlaceError, match=rf"no input tensor; name a tensor.* wrt='model.{held.weight}'"):
        eg.grad(lambda model: held.loss(model(held.x)), held.net)
    with pytest.raises(eg.PlaceError, match=rf"nearest: model.{held.weight}"):
        eg.grad(lambda model: held.loss(model(held.x)), held.net, wrt=f"model.{held.weight}s")


def test_modules_of_flax_are_arguments_too():
    nnx = pytest.importorskip("flax.nnx")
    net = nnx.Linear(3, 2, rngs=nnx.Rngs(0), param_dtype=jnp.float32)
    x = jnp.asarray(X, jnp.float32)
    gradient = eg.grad(lambda model: (model(x) ** 2).sum(), net, wrt="model.kernel[0, 1]")
    expected = nnx.grad(lambda model: (model(x) ** 2).sum())(net)
    np.testing.assert_allclose(gradient, expected["kernel"][0, 1], rtol=1e-5)


def test_inputs_of_a_model_argument_have_the_names_of_its_parameters():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, rows, scale=None):
            return self.fc(rows) * scale

    net, rows, scale = Scaled(), torch.randn(2, 3), torch.randn(2, 3)

    def loss(model):
        return model(rows, scale=scale).sum()

    for wrt in ("model.rows", "model.input:rows", "model.input:0"):
        torch.testing.assert_close(eg.grad(loss, net, wrt=wrt), scale @ net.fc.weight)
    for wrt in ("model.scale", "model.input:scale", "model.input:1"):
        torch.testing.assert_close(eg.grad(loss, net, wrt=wrt), net.fc(rows))
    with pytest.raises(eg.PlaceError, match=r"no tensor is named 'model.other'"):
        eg.grad(loss, net, wrt="model.other")
    keras_net = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    found = eg.grad(lambda model: tf.reduce_sum(model(X)), keras_net, wrt="model.inputs")
    expected = eg.grad(lambda model: tf.reduce_sum(model(X)), keras_net, wrt="model.input")
    np.testing.assert_array_equal(found, expected)


def test_a_function_without_arguments_is_explained_by_a_parameter_that_it_closes_over(held):
    def loss():
        return held.loss(held.net(held.x))

    for place in (held.parameter, eg.at(held.parameter)[0, 1]):
        assert eg.explain(loss, wrt=place).verdict == "flows"
    assert eg.explain(loss, wrt=f"{held.weight}[0, 1]", names_from=held.net).verdict == "flows"
    with pytest.raises(eg.PlaceError, match="names no live tensor"):
        eg.explain(loss, wrt=held.weight)


def test_a_first_run_that_builds_a_keras_model_says_to_call_again():
    net = KerasNet()

    def loss(model):
        return tf.reduce_sum(model(tf.constant(X, tf.float32)))

    with pytest.raises(eg.PlaceError, match="call again"):
        eg.grad(loss, net, wrt="model.fc.kernel")
    assert eg.grad(loss, net, wrt="model.fc.kernel").shape == (3, 2)
