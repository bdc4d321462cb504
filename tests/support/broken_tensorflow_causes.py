"""TensorFlow and Keras programs whose cause or remedy is easily mistaken for another. The line at fault is marked."""

import keras
import tensorflow as tf
from keras import layers

from tests.support.programs_broken import Table

BROKEN = Table()
X = tf.constant([1.0, 2.0, 3.0])


@BROKEN.says("nonfinite", "singular", fix="sqrt(x + 1e-12)", wrt="x")
def a_norm_at_zero():
    return lambda x: tf.sqrt(tf.reduce_sum(x**2)), tf.zeros(2)  # <- here


@BROKEN.says("nonfinite", "singular", fix="sqrt(x + 1e-12)", wrt="x[0]")
def a_root_of_a_single_element():
    return lambda x: tf.sqrt(x[0]), tf.zeros(2)  # <- here


@BROKEN.says("nonfinite", "singular", fix="atan2(y, x + 1e-12)", wrt="x")
def an_angle_at_the_origin():
    return lambda x: tf.atan2(x[0], x[1]), tf.zeros(2)  # <- here


@BROKEN.says("nonfinite", "overflow", wrt="x")
def a_square_in_half_precision():
    return lambda x: tf.reduce_sum((x * 300) ** 2), tf.ones(2, tf.float16)  # <- here


@BROKEN.says("nonfinite", "overflow", wrt="x")
def a_high_power():
    return lambda x: tf.reduce_sum(x**30), X * 100  # <- here


@BROKEN.says("zero", "dead-relu", fix="hinge", wrt="x[2]")
def a_hinge():
    return lambda x: tf.reduce_sum(tf.maximum(0.0, 1 - x)), X  # <- here


@BROKEN.says("zero", "clamped", wrt="x")
def a_bound_from_above():
    return lambda x: tf.reduce_sum(tf.minimum(x, 0.5)), X  # <- here


@BROKEN.says("zero", "clamped", wrt="x")
def a_relu6_above_six():
    return lambda x: tf.reduce_sum(tf.nn.relu6(x)), X * 30  # <- here


@BROKEN.says("zero", "dead-relu", wrt="x")
def a_relu6_below_zero():
    return lambda x: tf.reduce_sum(tf.nn.relu6(x)), -X  # <- here


@BROKEN.says("zero", "cancelled", wrt="x")
def a_softmax_over_one_class():
    return lambda x: tf.reduce_sum(tf.nn.softmax(x, axis=1) * X[:, None]), X[:, None]  # <- here


@BROKEN.says("zero", "underflow", fix="float64", wrt="x")
def a_chain_of_sigmoids():
    def f(x):
        for _ in range(80):
            x = tf.sigmoid(x)
        return tf.reduce_sum(x)

    return f, X


@BROKEN.says("nonfinite", "singular", fix="acos(tf.clip_by_value(", wrt="x")
def an_angle_between_the_same():
    return lambda x: tf.acos(x), tf.constant(1.0)  # <- here


@BROKEN.says("nonfinite", "masked-branch", fix="log(tf.where(ok, x, 1.0))", wrt="x")
def a_masked_logarithm():
    return lambda x: tf.reduce_sum(tf.where(x > 0, tf.math.log(x), 0.0)), tf.constant([0.0, 1.0])  # <- here


@BROKEN.says("nonfinite", "masked-branch", fix="x / tf.where(ok, y, 1.0)", wrt="x")
def a_masked_division():
    return lambda x: tf.reduce_sum(tf.where(x > 0, 1 / x, 0.0)), tf.constant([0.0, 1.0])  # <- here


@BROKEN.says("unconnected", "not-tracked", fix="layer.trainable = True", of="output[0, 0]", wrt="frozen/kernel")
def a_frozen_layer():
    model = keras.Sequential([keras.Input((3,)), layers.Dense(2, name="frozen"), layers.Dense(1)])
    model.layers[0].trainable = False
    return model, X[None]


@BROKEN.says("zero", "overwritten", fix="eg.at(x)", wrt="x[0]")
def an_element_that_is_set():
    return lambda x: tf.reduce_sum(tf.tensor_scatter_nd_update(x, [[0]], [1.0])), X  # <- here


@BROKEN.says("nonfinite", "overflow", wrt="x")
def a_square_that_is_normalised():
    return lambda x: tf.nn.softmax((x * 300) ** 2)[0], tf.cast(X, tf.float16)  # <- here


@BROKEN.says("zero", "cancelled", wrt="x")
def a_sum_behind_a_normalisation():
    norm = keras.layers.LayerNormalization()
    norm.build((2, 4))

    def f(x):
        return tf.reduce_sum(norm(x))  # <- here

    return f, tf.constant([[0.1, -0.1, 0.6, 0.1], [-0.5, 0.4, 1.3, 0.9]])
