"""Ranking elements of Keras models disturbs nothing, holds one dense gradient at a time, and says what it cannot do."""

import weakref

import keras
import pytest
import tensorflow as tf
from keras import layers
from tensorflow.python.framework import op_callbacks

import elementgrad as eg
from elementgrad._train.top_backend import TopBackend
from tests.support.ranked import HOW, assert_best
from tests.support.ranked_keras import WIDE, RankedKeras, drawn, finished, mlp

KERAS = RankedKeras()


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
