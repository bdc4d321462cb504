"""Small models to explore, one for each framework: two convolutions, a relu with dead elements, and a head."""

from collections.abc import Callable
from typing import Any

import numpy as np

IMAGES = np.random.default_rng(0).random((2, 8, 8)).astype("float32")
HEAD = np.random.default_rng(1).normal(size=(32, 5)).astype("float32")


def torch_net() -> tuple[Callable[..., Any], Any]:
    import torch

    torch.manual_seed(0)
    net = torch.nn.Sequential()
    net.add_module("conv1", torch.nn.Conv2d(1, 3, 3))
    net.add_module("relu", torch.nn.ReLU())
    net.add_module("conv2", torch.nn.Conv2d(3, 2, 3))
    net.add_module("tanh", torch.nn.Tanh())
    net.add_module("flat", torch.nn.Flatten())
    net.add_module("head", torch.nn.Linear(32, 5))
    return net, torch.tensor(IMAGES[:, None])


def tensorflow_net() -> tuple[Callable[..., Any], Any]:
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(0)
    net = keras.Sequential(
        [
            keras.Input((8, 8, 1), name="input"),
            keras.layers.Conv2D(3, 3, name="conv1"),
            keras.layers.ReLU(name="relu"),
            keras.layers.Conv2D(2, 3, name="conv2"),
            keras.layers.Activation("tanh", name="tanh"),
            keras.layers.Flatten(name="flat"),
            keras.layers.Dense(5, name="head"),
        ]
    )
    return net, tf.constant(IMAGES[..., None])


def jax_net() -> tuple[Callable[..., Any], Any]:
    import jax
    import jax.numpy as jnp

    import elementgrad as eg

    chance = np.random.default_rng(2)
    kernels = [jnp.array(chance.normal(size=shape), "float32") for shape in ((3, 1, 3, 3), (2, 3, 3, 3))]

    def net(image):
        conv1 = eg.tag(jax.lax.conv(image, kernels[0], (1, 1), "VALID"), "conv1")
        relu = eg.tag(jax.nn.relu(conv1), "relu")
        conv2 = eg.tag(jax.lax.conv(relu, kernels[1], (1, 1), "VALID"), "conv2")
        return eg.tag(jnp.tanh(conv2), "tanh").reshape(-1, 32) @ HEAD

    return net, jnp.array(IMAGES[:, None])


NETS = {"torch": torch_net, "tensorflow": tensorflow_net, "jax": jax_net}
