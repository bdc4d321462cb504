"""What one element costs by its cone, against the best plain way: forward to the layer, backward to the input."""

from collections.abc import Iterator
from typing import Any

import elementgrad as eg
from benchmarks.harness import Row
from benchmarks.jacobians import agree

SIDE, LARGE = 512, 1024
FIRST, OTHER = 1 / 40, 1 / 200
"""Bounds for six convolutions: a recording and one element, and one more element of the same recording."""
JAX_OTHER = 1 / 50
"""The bound on JAX, for another element than the one that was compiled for, traced anew."""
FIRST_OF_GRAPH, OTHER_OF_GRAPH = 1, 1 / 50
"""The same for TensorFlow, where the first element waits for the graph to be traced."""
MIXING = 1.25
"""The bound where a cone does not pay, and the recording is dropped."""


def torch_rows() -> Iterator[Row]:
    import torch
    from torch import nn

    torch.manual_seed(0)

    def convolutions() -> Any:
        layers = [nn.Conv2d(3 if i == 0 else 16, 16, 3, padding=1) for i in range(6)]
        return nn.Sequential(*[module for layer in layers for module in (layer, nn.ELU())])

    def plain(model: Any, x: Any, place: tuple[int, ...]) -> Any:
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad(model(leaf)[place], leaf)[0]

    model = convolutions()
    for size in (SIDE, LARGE):
        x, place = torch.randn(1, 3, size, size), (0, 3, size // 2, size // 2)
        jacobian = eg.jacobian(model, x, cone=True)

        def first(x: Any = x, place: Any = place) -> Any:
            return eg.grad(model, x, of=eg.at("output")[place], wrt="input")

        def other(jacobian: Any = jacobian, place: Any = place) -> Any:
            return jacobian[place, :]

        def whole(x: Any = x, place: Any = place) -> Any:
            return plain(model, x, place)

        name = f"torch six convolutions, {size} pixels"
        limit = 20 if size == LARGE else None
        peer = "forward and backward"
        yield agree(Row(f"{name}, first element", first, whole, peer, FIRST, most_mb=limit, repeats=5))
        yield agree(Row(f"{name}, another element", other, whole, peer, OTHER, repeats=5))

    mixer = nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Softmax(0), nn.Linear(512, 512))
    x = torch.randn(512, 512)

    def mixed() -> Any:
        return eg.grad(mixer, x, of="output[3, 4]", wrt="input")

    def by_hand() -> Any:
        return plain(mixer, x, (3, 4))

    yield agree(Row("torch an element that depends on all", mixed, by_hand, "forward and backward", MIXING))


def jax_rows() -> Iterator[Row]:
    import jax
    import jax.numpy as jnp

    keys = jax.random.split(jax.random.key(0), 7)
    weights = [jax.random.normal(keys[i], (16, 16 if i else 3, 3, 3)) * 0.1 for i in range(6)]
    x = jax.random.normal(keys[6], (1, 3, SIDE, SIDE))

    def model(x: Any) -> Any:
        for weight in weights:
            x = jax.nn.elu(jax.lax.conv_general_dilated(x, weight, (1, 1), "SAME"))
        return x

    sweep = jax.jit(lambda x, i: jax.vjp(lambda x: model(x)[0, 3, i, i], x)[1](jnp.ones(()))[0])

    def other() -> Any:
        return eg.grad(model, x, of=eg.at("output")[0, 3, SIDE // 2, SIDE // 2]).block_until_ready()

    def whole() -> Any:
        return sweep(x, SIDE // 2).block_until_ready()

    eg.grad(model, x, of="output[0, 3, 7, 9]")  # compiled for another element
    name = f"jax six convolutions, {SIDE} pixels, another element"
    yield agree(Row(name, other, whole, "jitted jax.vjp", JAX_OTHER, repeats=5))


def tensorflow_rows() -> Iterator[Row]:
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(0)
    layers = [keras.layers.Conv2D(16, 3, padding="same", activation="elu") for _ in range(6)]
    model = keras.Sequential([keras.layers.Input((SIDE, SIDE, 3)), *layers])
    x, place = tf.random.normal((1, SIDE, SIDE, 3)), (0, SIDE // 2, SIDE // 2, 3)
    jacobian = eg.jacobian(model, x, cone=True)

    @tf.function
    def compiled(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = model(x)[place]
        return tape.gradient(y, x)

    def other() -> Any:
        return jacobian[place, :]

    def first() -> Any:
        return eg.grad(model, x, of=eg.at("output")[place])

    def whole() -> Any:
        return compiled(x)

    name, peer = f"tensorflow six convolutions, {SIDE} pixels", "tf.function of forward and backward"
    yield agree(Row(f"{name}, first element", first, whole, peer, FIRST_OF_GRAPH, repeats=5))
    yield agree(Row(f"{name}, another element", other, whole, peer, OTHER_OF_GRAPH, repeats=5))


SUITES = {"cone-torch": torch_rows, "cone-tensorflow": tensorflow_rows, "cone-jax": jax_rows}
