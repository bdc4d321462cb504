"""One network in the three frameworks, each with names and an order of axes of its own, and how it trains there."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import keras
import numpy as np
import tensorflow as tf
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import elementgrad as eg

RNG = np.random.default_rng(0)
SHAPES = {"table": (10, 4), "fc": (3, 4), "bias": (3,), "conv": (4, 2, 3, 3)}
ARRAYS = {key: RNG.standard_normal(shape).astype(np.float32) for key, shape in SHAPES.items()}
"""The tensors as PyTorch lays them out."""
PLAIN = {key: tuple(range(len(shape))) for key, shape in SHAPES.items()}
TOKENS, TARGETS = np.array([3, 0, 3, 7]), np.array([0, 1, 2, 0])
IMAGES = RNG.standard_normal((4, 2, 5, 5)).astype(np.float32)
TINY = 1e-12
"""Adam's epsilon, which Keras adds before it corrects for the bias and the others after it: so small, it is alike."""


class Home(NamedTuple):
    """A framework, and how it holds the network."""

    names: dict[str, str]
    axes: dict[str, tuple[int, ...]]
    """Which axis of PyTorch's each axis is."""
    places: list[str]
    """The same elements in each home."""
    make: Callable[[str], Any]
    """The network in some dtype."""
    held: Callable[[Any], dict[str, np.ndarray]]
    """The bits of its tensors."""
    move: Callable[[Any], None]
    """Adds to the values of elements."""
    descend: Callable[[Any, Any, int], None]
    """Steps of Adam."""

    def tensors(self, model: Any, elements: Any = None) -> dict[str, np.ndarray]:
        """The bits of its tensors as PyTorch lays them out; in JAX, those that the elements are merged into."""
        model = elements.merge() if elements is not None and isinstance(model, dict) else model
        return {key: x.transpose(np.argsort(self.axes[key])) for key, x in self.held(model).items()}


def bits(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).view(np.int16 if x.itemsize == 2 else np.int32)


class Torch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.fc, self.conv = nn.Embedding(10, 4), nn.Linear(4, 3), nn.Conv2d(2, 4, 3, bias=False)

    def forward(self, tokens, images):
        return self.fc(self.table(tokens) + self.conv(images).tanh().mean((2, 3)))


TORCH_NAMES = {"table": "table.weight", "fc": "fc.weight", "bias": "fc.bias", "conv": "conv.weight"}


def torch_make(dtype):
    model = Torch()
    with torch.no_grad():
        for key, name in TORCH_NAMES.items():
            model.get_parameter(name).copy_(torch.tensor(ARRAYS[key]))
    return model.to(getattr(torch, dtype))


def torch_held(model):
    tensors = {key: model.get_parameter(name).detach().clone() for key, name in TORCH_NAMES.items()}
    return {key: x.view(torch.int16 if x.itemsize == 2 else torch.int32).numpy() for key, x in tensors.items()}


def torch_move(elements):
    with torch.no_grad():
        for leaf in elements.parameters():
            leaf.add_(0.1)


def torch_descend(model, elements, steps):
    optimizer = torch.optim.Adam(elements.parameters(), lr=0.05, eps=TINY)
    for _ in range(steps):
        optimizer.zero_grad()
        cross_entropy(model(torch.tensor(TOKENS), torch.tensor(IMAGES)), torch.tensor(TARGETS)).backward()
        optimizer.step()


class Keras(keras.Model):
    def __init__(self, dtype):
        super().__init__(dtype=dtype)
        self.table = keras.layers.Embedding(10, 4, name="table", dtype=dtype)
        self.fc = keras.layers.Dense(3, name="fc", dtype=dtype)
        self.conv = keras.layers.Conv2D(4, 3, name="conv", dtype=dtype, use_bias=False)
        self.table.build(())
        self.fc.build((None, 4))
        self.conv.build((None, 5, 5, 2))
        self.built = True

    def call(self, inputs):
        tokens, images = inputs
        return self.fc(self.table(tokens) + tf.reduce_mean(tf.tanh(self.conv(images)), [1, 2]))


KERAS_NAMES = {"table": "table/embeddings", "fc": "fc/kernel", "bias": "fc/bias", "conv": "conv/kernel"}
KERAS_AXES = {**PLAIN, "fc": (1, 0), "conv": (2, 3, 1, 0)}


def keras_variables(model):
    paths = {key: name.split("/") for key, name in KERAS_NAMES.items()}
    return {key: getattr(getattr(model, layer), attribute) for key, (layer, attribute) in paths.items()}


def keras_make(dtype):
    model = Keras(dtype)
    for key, variable in keras_variables(model).items():
        variable.assign(ARRAYS[key].transpose(KERAS_AXES[key]))
    return model


def keras_move(elements):
    for variable in elements.variables:
        variable.assign_add(tf.fill(variable.shape, tf.cast(0.1, variable.dtype)))


def keras_descend(model, elements, steps):
    optimizer = keras.optimizers.Adam(0.05, epsilon=TINY)
    inputs = tf.constant(TOKENS), tf.constant(IMAGES.transpose(0, 2, 3, 1))
    for _ in range(steps):
        with tf.GradientTape() as tape:
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)(TARGETS, model(inputs))
        optimizer.apply(tape.gradient(loss, elements.variables), elements.variables)


JAX_NAMES = {"table": "table.embedding", "fc": "fc.kernel", "bias": "fc.bias", "conv": "conv.kernel"}
JAX_AXES = {**PLAIN, "fc": (1, 0), "conv": (1, 0, 2, 3)}


def jax_make(dtype):
    params: dict[str, Any] = {}
    for key, name in JAX_NAMES.items():
        layer, kind = name.split(".")
        params.setdefault(layer, {})[kind] = jnp.asarray(ARRAYS[key].transpose(JAX_AXES[key]), dtype)
    return params


def jax_held(params):
    paths = {key: name.split(".") for key, name in JAX_NAMES.items()}
    return {key: bits(np.asarray(params[layer][kind])) for key, (layer, kind) in paths.items()}


def jax_move(elements):
    elements.values = {place: value + jnp.float32(0.1) for place, value in elements.values.items()}


def jax_loss(params):
    shapes = ("NCHW", "IOHW", "NCHW")
    seen = jax.lax.conv_general_dilated(IMAGES, params["conv"]["kernel"], (1, 1), "VALID", dimension_numbers=shapes)
    hidden = params["table"]["embedding"][TOKENS] + jnp.tanh(seen).mean((2, 3))
    logits = hidden @ params["fc"]["kernel"] + params["fc"]["bias"]
    return -jax.nn.log_softmax(logits)[np.arange(4), TARGETS].mean()


def jax_descend(params, elements, steps):
    def step(carried, number):
        values, first, second = carried
        gradient = elements.grad(jax_loss, values)
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, gradient)
        second = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g**2, second, gradient)
        values = jax.tree.map(lambda x, m, v: adam(x, m, v, number), values, first, second)
        return (values, first, second), None

    def adam(x, m, v, number):
        return x - 0.05 * (m / (1 - 0.9**number)) / (jnp.sqrt(v / (1 - 0.999**number)) + TINY)

    zeros = jax.tree.map(jnp.zeros_like, elements.values)
    start = elements.values, zeros, zeros
    elements.values = jax.jit(lambda: jax.lax.scan(step, start, jnp.arange(1, steps + 1, dtype="float32"))[0][0])()


HOMES = {
    "torch": Home(
        TORCH_NAMES,
        PLAIN,
        ["table.weight[3]", "fc.weight[1:, :2]", "fc.bias", "conv.weight[2, 0]"],
        torch_make,
        torch_held,
        torch_move,
        torch_descend,
    ),
    "keras": Home(
        KERAS_NAMES,
        KERAS_AXES,
        ["table/embeddings[3]", "fc/kernel[:2, 1:]", "fc/bias", "conv/kernel[..., 0, 2]"],
        keras_make,
        lambda model: {key: bits(x.numpy()) for key, x in keras_variables(model).items()},
        keras_move,
        keras_descend,
    ),
    "jax": Home(
        JAX_NAMES,
        JAX_AXES,
        ["table.embedding[3]", "fc.kernel[[[0], [1]], [1, 2]]", "fc.bias", "conv.kernel[0, 2]"],
        jax_make,
        jax_held,
        jax_move,
        jax_descend,
    ),
}


def map_of(one: Home, other: Home) -> dict[str, Any]:
    """Return a user's map between two layouts: names of the one to names of the other, with axes where needed."""
    found: dict[str, Any] = {}
    for key in SHAPES:
        axes = tuple(one.axes[key].index(axis) for axis in other.axes[key])
        found[one.names[key]] = other.names[key] if axes == PLAIN[key] else (other.names[key], axes)
    return found


def trained(home: Home, path: Any, dtype: str = "float32", **options: Any) -> dict[str, np.ndarray]:
    """A patch made with the network, and its tensors afterwards."""
    model = home.make(dtype)
    elements = eg.trainable(model, home.places)
    home.move(elements)
    elements.save(path, **options)
    return home.tensors(model, elements)
