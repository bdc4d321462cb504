"""Ranking elements of Keras models disturbs nothing, holds one dense gradient at a time, and says what it cannot do."""

import contextlib
import random
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from tensorflow.python.eager.context import context
from tensorflow.python.framework import op_callbacks

import elementgrad as eg
from elementgrad._train.trainer import TopBackend
from tests.support.ranked import HOW, assert_best
from tests.support.ranked_keras import WIDE, RankedKeras, conv, drawn, finished, mlp

KERAS = RankedKeras()


class StoppedError(Exception):
    pass


def seen(model):
    return (
        [(variable.path, variable.trainable, variable.numpy().tolist()) for variable in model.variables],
        [sorted(vars(layer)) for layer in model.layers],
        [loss.numpy() for loss in model.losses],
        random.getstate(),
        context()._rng.getstate() if getattr(context(), "_rng", None) else None,
    )


@pytest.mark.parametrize("kind", ["number", "vector", "generator"])
@pytest.mark.parametrize("by", HOW)
@pytest.mark.parametrize("fails", [None, "at once", "half-way", "on the way back"])
def test_nothing_is_disturbed(kind, by, fails):
    model, plain = conv()
    tf.random.set_seed(0)
    before = seen(model)

    @tf.custom_gradient
    def failing(x):
        def back(gradient):
            if fails == "on the way back":
                raise StoppedError
            return gradient

        return tf.identity(x), back

    def losses(model):
        vector = failing(plain(model))
        vector += 0 if kind == "generator" else tf.random.uniform([], dtype=tf.float64)
        if fails == "at once":
            raise StoppedError
        if kind != "generator":
            if fails == "half-way":
                raise StoppedError
            return tf.reduce_sum(vector) if kind == "number" else vector
        return several(vector)

    def several(vector):
        yield tf.reduce_sum(vector)
        if fails == "half-way":
            raise StoppedError

    with pytest.raises(StoppedError) if fails else contextlib.nullcontext():
        eg.top(model, losses, 5, by)
    assert seen(model) == before
    assert keras.src.backend.in_stateless_scope() is False


@pytest.mark.parametrize("by", HOW)
def test_losses_of_layers_and_regularizers_count(by):
    class Penalised(layers.Layer):
        def call(self, x):
            self.add_loss(tf.reduce_sum(x**4))
            return x

    parts = [layers.Dense(4, name="first", kernel_regularizer="l2", **WIDE), Penalised(**WIDE)]
    model = finished(keras.Input((5,), **WIDE), *parts, layers.Dense(3, name="second", **WIDE))
    x = drawn(6, 5)
    assert_best(KERAS, model, lambda model: tf.reduce_sum(model(x)) + tf.add_n(model.losses), 9, by)
    assert len(model.losses) == 1 + 1


@pytest.mark.parametrize("by", HOW)
def test_models_in_training_are_ranked_as_plain_ones(by):
    parts = [layers.Embedding(9, 4, name="table", **WIDE), layers.Flatten(), layers.Dense(3, name="head", **WIDE)]
    model = finished(keras.Input((2,), dtype="int32"), *parts)
    tokens = tf.constant([[1, 2], [2, 2], [7, 0]])

    def loss_fn(model):
        return tf.reduce_sum(model(tokens) ** 2, 1)

    expected = eg.top(model, loss_fn, 12, by)
    elements = eg.trainable(model, expected)
    assert eg.top(model, loss_fn, 12, by) == expected
    assert [str(place) for place in elements] == [str(place) for place in expected]


class Memory:
    """Counts the dense tensors of a size that operations make, as long as they live."""

    def __init__(self, size):
        self.size, self.live, self.peak = size, {}, 0

    def __enter__(self):
        op_callbacks.add_op_callback(self.met)
        return self

    def __exit__(self, *raised):
        op_callbacks.remove_op_callback(self.met)

    def met(self, kind, inputs, attrs, outputs, *_, **__):
        if (kind.decode() if isinstance(kind, bytes) else kind) in ("Identity", "ReadVariableOp", "Reshape"):
            return  # which share the memory of what they were given
        for x in outputs:
            if x.dtype.is_floating and x.shape.num_elements() >= self.size:
                self.live[x._id] = weakref.ref(x, lambda _, key=x._id: self.live.pop(key, None))
        self.peak = max(self.peak, len(self.live))


def tower(width=64, count=6):
    parts = [layers.Dense(width, "tanh", name=f"layer{number}", **WIDE) for number in range(count)]
    return finished(keras.Input((width,), **WIDE), *parts), drawn(3, width)


def test_no_second_dense_gradient_lives(monkeypatch):
    monkeypatch.setattr(TopBackend, "PIECE", 256)
    model, x = tower()
    with Memory(64 * 64) as memory:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x))
        gradients = tape.gradient(loss, [layer.kernel for layer in model.layers])
        assert memory.peak == len(memory.live) == 6  # the meter sees gradients that pile up
        del gradients
    losses = {
        "number": lambda model: tf.reduce_sum(model(x)),
        "vector": lambda model: tf.reduce_sum(model(x), 1),
        "one by one": lambda model: (tf.reduce_sum(model(x[i : i + 1])) for i in range(3)),
    }
    for by in HOW:
        for loss_fn in losses.values():
            with Memory(64 * 64) as memory:
                eg.top(model, loss_fn, 20, by)
            assert not memory.live
            assert memory.peak == 1


def test_a_generator_has_one_graph_at_a_time():
    model = finished(keras.Input((4,)), layers.Dense(4, "tanh", name="a"), layers.Dense(4, "tanh", name="b"))
    x = tf.ones([512, 4])

    def live(loss_fn, by):
        with Memory(512 * 4) as memory:
            eg.top(model, loss_fn, 5, by)
        return memory.peak

    for by in HOW:
        one = live(lambda model: (tf.reduce_sum(model(x)) for _ in range(1)), by)
        assert live(lambda model: (tf.reduce_sum(model(x)) for _ in range(6)), by) == one
        assert live(lambda model: [tf.reduce_sum(model(x)) for _ in range(6)], by) > 3 * one


MODEL, LOSS = mlp()


def prelude(model):
    """Two losses that share the first layer, and one between that does not."""
    hidden = model.layers[0](drawn(6, 5))
    yield tf.reduce_sum(hidden[0])
    yield tf.reduce_sum(model.layers[1].kernel.value ** 2)
    yield tf.reduce_sum(hidden[1]) * tf.reduce_sum(model.layers[1].kernel.value)


def writing(model):
    model.layers[0].kernel.assign(tf.zeros_like(model.layers[0].kernel))
    return LOSS(model)


REFUSED = {
    "detached": (lambda model: tf.stop_gradient(LOSS(model)), eg.UnconnectedError, "a loss has no gradient"),
    "one of them": (lambda model: [LOSS(model), tf.ones([])], eg.UnconnectedError, "a loss has no gradient"),
    "one of them, late": (
        lambda model: (LOSS(model)[i] if i else tf.ones([], tf.float64) for i in range(2)),
        eg.UnconnectedError,
        "a loss has no gradient",
    ),
    "a number": (lambda model: float(LOSS(model)[0]), eg.FrameworkError, "loss_fn gave float and no loss"),
    "past Keras": (
        lambda model: LOSS(model)[0] + tf.reduce_sum(model.layers[0].kernel._value),
        eg.FrameworkError,
        "the loss uses first/kernel past Keras",
    ),
    "shared": (lambda model: iter(tf.unstack(LOSS(model))), eg.FrameworkError, "return them in a list"),
    "shared in part": (prelude, eg.FrameworkError, "return them in a list"),
    "written": (writing, eg.FrameworkError, "loss_fn has written to first/kernel; write to a copy"),
    "NaN": (lambda model: LOSS(model) * np.nan, eg.PlaceError, r"\[\[0\].* has a .* of nan, which"),
    "too few": (
        lambda model: tf.reduce_sum(model.layers[2].bias.value),
        eg.UnconnectedError,
        "k=20 is more than the 3",
    ),
}


@pytest.mark.parametrize("by", HOW)
@pytest.mark.parametrize("case", REFUSED)
def test_losses_that_cannot_rank(case, by):
    loss_fn, error, message = REFUSED[case]
    before = seen(MODEL)
    with pytest.raises(error, match=message) as raised:
        eg.top(MODEL, loss_fn, 20, by)
    assert "\n" not in str(raised.value)
    assert seen(MODEL) == before


def test_losses_that_are_others_when_asked_again():
    rows = iter(range(20))
    with pytest.raises(eg.FrameworkError, match="gives other losses when it is asked again"):
        eg.top(MODEL, lambda model: (LOSS(model)[0] * next(rows) for _ in range(2)), 5)


def test_inside_of_a_compiled_function():
    with pytest.raises(eg.FrameworkError, match=r"outside of tf\.function"):
        tf.function(lambda: eg.top(MODEL, LOSS, 1) and tf.ones([]), autograph=False)()
