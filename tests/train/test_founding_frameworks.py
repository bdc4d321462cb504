"""The founding questions about training single elements, answered alike by the three frameworks."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
import tensorflow as tf
import torch
from keras import layers

import elementgrad as eg
from tests.train.test_founding_training import Sequences, of_token, seeded

TOKENS = [7, 0, 1]


class Torch:
    """The recurrent model of PyTorch, and how losses are routed to its elements."""

    table = "embedding.weight"

    def __init__(self):
        self.model = seeded(Sequences)

    def state(self):
        return {name: x.detach().clone().numpy() for name, x in self.model.state_dict().items()}

    def whole(self, tokens, target):
        """The gradient of the whole table."""
        loss = of_token(self.model, torch.tensor([tokens]), target)
        return torch.autograd.grad(loss, self.model.embedding.weight)[0].numpy()

    def start(self, places):
        self.elements = eg.trainable(self.model, places)
        self.optimizer = torch.optim.AdamW(self.elements.parameters(), lr=0.1, weight_decay=0.5)

    def step(self, tokens, targets):
        """A step in which each place hears of its own target; what each has heard."""
        self.optimizer.zero_grad()
        routes = {place: of_token(self.model, torch.tensor([tokens]), target) for place, target in targets.items()}
        self.elements.backward(routes)
        self.optimizer.step()
        return [self.elements[place].grad.item() for place in targets]


class Keras:
    """The same of Keras."""

    table = "table/embeddings"

    def __init__(self):
        keras.utils.set_random_seed(0)
        x = keras.Input((3,), dtype="int32")
        y = layers.GRU(64, name="gru")(layers.Embedding(50, 32, name="table")(x))
        self.model = keras.Model(x, layers.Dense(50, name="head")(y))

    def state(self):
        return {variable.path: variable.numpy() for variable in self.model.weights}

    def losses(self, tokens):
        return -tf.nn.log_softmax(self.model(tf.constant([tokens])))[0]

    def whole(self, tokens, target):
        with tf.GradientTape() as tape:
            loss = self.losses(tokens)[target]
        return tf.convert_to_tensor(tape.gradient(loss, self.model.get_layer("table").embeddings)).numpy()

    def start(self, places):
        self.elements = eg.trainable(self.model, places)
        self.optimizer = keras.optimizers.AdamW(0.1, weight_decay=0.5)

    def step(self, tokens, targets):
        with tf.GradientTape(persistent=True) as tape:
            losses = self.losses(tokens)
            routes = {place: losses[target] for place, target in targets.items()}
        gradients = self.elements.gradients(tape, routes)
        self.optimizer.apply(gradients, self.elements.variables)
        return [float(gradient[0]) for gradient in gradients]


class Jax:
    """The same of JAX, as a function of its parameters."""

    table = "embedding"

    def __init__(self):
        rng = np.random.default_rng(0)
        shapes = {"embedding": (50, 32), "wx": (32, 192), "wh": (64, 192), "head": (64, 50)}
        self.params = {name: jnp.array(rng.normal(size=size) / 8, "float32") for name, size in shapes.items()}

    def state(self):
        params = self.elements.merge() if hasattr(self, "elements") else self.params
        return {name: np.array(x) for name, x in params.items()}

    @staticmethod
    def loss(params, tokens, target):
        def cell(h, x):
            r, z, n = jnp.split(x @ params["wx"], 3)
            hr, hz, hn = jnp.split(h @ params["wh"], 3)
            z = jax.nn.sigmoid(z + hz)
            return z * h + (1 - z) * jnp.tanh(n + jax.nn.sigmoid(r + hr) * hn), None

        h, _ = jax.lax.scan(cell, jnp.zeros(64, "float32"), params["embedding"][tokens])
        return -jax.nn.log_softmax(h @ params["head"])[target]

    def whole(self, tokens, target):
        return np.array(jax.jit(jax.grad(self.loss))(self.params, jnp.array(tokens), target)["embedding"])

    def start(self, places):
        self.elements = eg.trainable(self.params, places)

        def gradient(values, tokens, targets):
            routes = {place: lambda p, target=target: self.loss(p, tokens, target) for place, target in targets.items()}
            return self.elements.grad(routes, values)

        self.gradient = jax.jit(gradient)

    def step(self, tokens, targets):
        values = self.elements.values
        gradient = self.gradient(values, jnp.array(tokens), targets)
        self.elements.values = {place: 0.95 * value - 0.1 * gradient[place] for place, value in values.items()}
        return [float(gradient[place][0]) for place in targets]


FRAMEWORKS = {"torch": Torch, "keras": Keras, "jax": Jax}


@pytest.fixture(params=FRAMEWORKS)
def recurrent(request):
    return FRAMEWORKS[request.param]()


def moved(before, now):
    return [(name, *at) for name in before for at in np.argwhere(before[name] != now[name]).tolist()]


def test_entries_of_a_recurrent_model_get_the_gradient_of_their_own_token(recurrent):
    of_two, of_five = (recurrent.whole(TOKENS, target) for target in (2, 5))
    first, second = f"{recurrent.table}[0, 12]", f"{recurrent.table}[1, 25]"
    before = recurrent.state()
    recurrent.start([first, second])
    heard = recurrent.step(TOKENS, {first: 2, second: 5})
    np.testing.assert_allclose(heard, [of_two[0, 12], of_five[1, 25]], rtol=1e-4)
    assert not np.isclose(heard[0], of_five[0, 12], rtol=1e-3)
    assert not np.isclose(heard[0], of_two[0, 12] + of_five[0, 12], rtol=1e-3)  # as the published sum has it
    recurrent.step(TOKENS, {first: 2, second: 5})
    assert moved(before, recurrent.state()) == [(recurrent.table, 0, 12), (recurrent.table, 1, 25)]


def test_an_entry_whose_token_does_not_occur_has_a_zero_gradient(recurrent):
    entry = f"{recurrent.table}[0, 12]"
    recurrent.start([entry])
    assert recurrent.step([7, 4, 3], {entry: 2}) == [0.0]
    assert recurrent.step([7, 0, 3], {entry: 2}) != [0.0]


class Vector(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.v = torch.nn.Parameter(torch.tensor([1.0, 2.0, 3.0, 4.0]))

    def forward(self):
        return self.v.square().sum()


def step_in_torch():
    model = Vector()
    elements = eg.trainable(model, "v[1]")
    optimizer = torch.optim.SGD(elements.parameters(), lr=0.1)
    model().backward()
    optimizer.step()
    return model.v


class KerasVector(layers.Layer):
    def build(self, shape):
        self.v = self.add_weight(shape=(4,), name="v")

    def call(self, x):
        return tf.reduce_sum(tf.square(self.v)) + 0 * x


def step_in_keras():
    layer = KerasVector()
    layer(tf.zeros(()))
    layer.v.assign([1, 2, 3, 4])
    elements = eg.trainable(layer, "v[1]")
    with tf.GradientTape() as tape:
        loss = layer(tf.zeros(()))
    keras.optimizers.SGD(0.1).apply(tape.gradient(loss, elements.variables), elements.variables)
    return layer.v


def step_in_jax():
    elements = eg.trainable({"v": jnp.array([1, 2, 3, 4], "float32")}, "v[1]")
    values = elements.values
    gradient = elements.grad(lambda params: (params["v"] ** 2).sum(), values)
    return elements.merge(jax.tree.map(lambda value, slope: value - 0.1 * slope, values, gradient))["v"]


@pytest.mark.parametrize("step", [step_in_torch, step_in_keras, step_in_jax])
def test_one_step_of_descent_on_one_element_of_a_vector(step):
    v = step()
    v = v.detach().numpy() if isinstance(v, torch.Tensor) else np.asarray(v)
    np.testing.assert_allclose(v, [1, 1.6, 3, 4], rtol=1e-6)
    assert v[[0, 2, 3]].tolist() == [1, 3, 4]
