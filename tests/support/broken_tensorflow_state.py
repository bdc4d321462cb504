"""TensorFlow and Keras programs that lose a gradient in state, in a rule, or before they start. The line is marked."""

import keras
import tensorflow as tf
from keras import layers

from tests.support.programs_broken import Table

BROKEN = Table()
X = tf.constant([[0.5, -1.0, 2.0], [1.5, 0.3, -0.7]])


def _built(model, x=X):
    model(x)
    return model


@BROKEN.says("unconnected", "assigned-state", wrt="x")
def a_hidden_state_in_a_variable():
    state = tf.Variable(tf.zeros([2, 3]))

    def f(x):
        state.assign(tf.tanh(x))  # <- here
        return tf.reduce_sum(state**2)

    return f, X


@BROKEN.says("unconnected", "assigned-state", wrt="x")
def a_running_mean():
    mean = tf.Variable(tf.zeros([3]))

    def f(x):
        mean.assign_add(0.1 * tf.reduce_mean(x, 0))  # <- here
        return tf.reduce_sum(mean * [1.0, 2.0, 3.0])

    return f, X


@BROKEN.says("unconnected", "assigned-state", of="output[0, 0]", wrt="encoder/kernel")
def a_memory_layer():
    class Memory(layers.Layer):
        def build(self, shape):
            self.slots = self.add_weight(shape=(2, 4), trainable=False, name="slots")

        def call(self, x):
            self.slots.assign(x)  # <- here
            return self.slots * 2.0

    return keras.Sequential([keras.Input((3,), 2), layers.Dense(4, name="encoder"), Memory()]), X


@BROKEN.says("unconnected", "no-rule", wrt="x")
def a_weighted_histogram():
    def f(x):
        counts = tf.math.bincount([0, 1, 1], weights=x[0])  # <- here
        return tf.reduce_sum(counts**2)

    return f, X


@BROKEN.says("unconnected", "no-rule", wrt="x")
def a_factorisation():
    def f(x):
        lower, _ = tf.linalg.lu(tf.eye(3) + tf.linalg.diag(x[0] ** 2))  # <- here
        return tf.reduce_sum(lower)

    return f, X


@BROKEN.says("unconnected", "custom-rule", wrt="x")
def a_gradient_function_without_gradient():
    @tf.custom_gradient
    def clipped(x):
        return tf.clip_by_value(x, -1.0, 1.0), lambda upstream: None

    def f(x):
        return tf.reduce_sum(clipped(x))  # <- here

    return f, X


@BROKEN.says("unconnected", "integer", wrt="ids")
def gradients_of_token_ids():
    embed = layers.Embedding(5, 3)
    return lambda ids: tf.reduce_sum(embed(ids)), tf.constant([[1, 2]])


@BROKEN.says("unconnected", "integer", wrt="x")
def whole_numbers_by_accident():
    return lambda x: tf.reduce_sum(tf.cast(x, tf.float32) ** 2), tf.constant([1, 2, 3])


@BROKEN.says("unconnected", "not-tracked", of="output[0, 0]", wrt="base/kernel[0, 0]")
def a_frozen_base():
    base = layers.Dense(4, name="base", trainable=False)
    return keras.Sequential([keras.Input((3,)), base, layers.Dense(1)]), X


@BROKEN.says("unconnected", "not-tracked", wrt="v")
def a_variable_that_is_not_trainable():
    return lambda v: tf.reduce_sum(v * v), tf.Variable([1.0, 2.0], trainable=False)


@BROKEN.says("unconnected", "unused", wrt="targets")
def an_argument_that_is_left_out():
    def f(x, targets):
        return tf.reduce_mean((x - x) ** 2 + x)

    return f, X, tf.zeros([2, 3])


@BROKEN.says("unconnected", "unused", of="output[0, 0]", wrt="spare/kernel")
def a_layer_whose_result_is_dropped():
    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.first = layers.Dense(3, name="first")
            self.spare = layers.Dense(3, name="spare")

        def call(self, x):
            self.spare(x)
            return self.first(x)

    return _built(Model()), X


@BROKEN.says("unconnected", "outside-tape", wrt="x")
def the_global_tensor_instead_of_the_argument():
    def f(x):
        return tf.reduce_sum(X**2)  # <- here

    return f, X


@BROKEN.says("unconnected", "outside-tape", wrt="x")
def a_row_that_was_cut_out_before():
    first = X[0]

    def f(x):
        return tf.reduce_sum(first * 2.0)  # <- here

    return f, X


@BROKEN.says("unconnected", "assigned-state", wrt="x")
def a_tensor_wrapped_as_a_variable():
    def f(x):
        weight = tf.Variable(x * 2.0)  # <- here
        return tf.reduce_sum(weight**2)

    return f, X
