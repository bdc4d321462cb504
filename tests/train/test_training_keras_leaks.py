"""Under every optimizer of Keras and all of its options nothing moves but the named elements."""

import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import elementgrad as eg
from tests.support import optimizers_keras

STEPS = 100
PLACES = {"table/embeddings": "table/embeddings[2, 1:]", "head/kernel": "head/kernel[::2, 1]"}
TOKENS = tf.constant(np.random.default_rng(1).integers(0, 5, (8, 2)))


def tiny():
    x = keras.Input((2,), dtype="int32")
    y = layers.Flatten()(layers.Embedding(8, 6, name="table")(x))
    return keras.Model(x, layers.Dense(3, name="head")(y))


def state(model):
    return {variable.path: variable.numpy() for variable in model.weights}


def trained(model, optimizer):
    """The elements, and a function that trains them by a step."""
    elements = eg.trainable(model, PLACES.values())
    optimizer.build(elements.variables)

    def step():
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(tf.reduce_mean((model(TOKENS, training=True) - 1.0) ** 2))
        optimizer.apply(tape.gradient(loss, elements.variables), elements.variables)

    return elements, step


def run(steps):
    """All of them in one graph, which is cheaper than one for each."""

    def body(count):
        for step in steps:
            step()
        return count + 1

    tf.function(lambda: tf.while_loop(lambda count: count < STEPS, body, [tf.constant(0)]), autograph=False)()


@pytest.mark.parametrize("name", optimizers_keras.kinds())
def test_nothing_else_moves(name):
    optimizers = optimizers_keras.made(name)
    keras.utils.set_random_seed(0)  # steps of one size might lead back to where some other element began
    models = [tiny() for _ in optimizers]
    before = [state(model) for model in models]
    training = [trained(model, optimizer) for model, optimizer in zip(models, optimizers.values(), strict=True)]
    run([step for _, step in training])
    for written, model, old, (elements, _) in zip(optimizers, models, before, training, strict=True):
        for path, values in state(model).items():
            chosen = np.zeros(values.shape, bool)
            if path in PLACES:
                flat = eg.Place.parse(PLACES[path]).select(values.shape).flat().reshape(-1)
                chosen.reshape(-1)[flat] = True
                assert np.array_equal(values.reshape(-1)[flat], elements[PLACES[path]]), written
            same = values.view(np.int32) == old[path].view(np.int32)
            assert same[~chosen].all(), (written, path)
            assert np.isfinite(values).all(), written
            assert not same[chosen].any(), (written, path)


def test_every_option_is_known_to_some_optimizer():
    known = {word for kind in optimizers_keras.kinds().values() for word in inspect.signature(kind).parameters}
    assert all(set(options) <= known for options in optimizers_keras.OWN)
