"""TensorFlow and Keras programs whose gradient is not finite, or by a rule that somebody wrote. The line is marked."""

import keras
import tensorflow as tf
from keras import layers

from tests.support.programs_broken import Table

BROKEN = Table()
X = tf.constant([[0.5, -1.0, 2.0], [1.5, 0.3, -0.7]])


@BROKEN.says("zero", "custom-rule", wrt="x")
def a_rule_that_gives_zeros():
    @tf.custom_gradient
    def gate(x):
        return x * 2.0, lambda upstream: tf.zeros_like(upstream)

    return lambda x: tf.reduce_sum(gate(x)), X  # <- here


@BROKEN.says("mismatch", "custom-rule", wrt="x")
def a_rule_that_forgets_a_factor():
    @tf.custom_gradient
    def cube(x):
        return x**3, lambda upstream: upstream * x**2

    return lambda x: tf.reduce_sum(cube(x)), X  # <- here


@BROKEN.says("mismatch", "custom-rule", of="output[0, 0]", wrt="first/kernel[0, 0]")
def a_reversed_gradient_in_a_layer():
    @tf.custom_gradient
    def reverse(x):
        return tf.identity(x), lambda upstream: -upstream

    class Reverse(layers.Layer):
        def call(self, x):
            return reverse(x)  # <- here

    return keras.Sequential([keras.Input((3,)), layers.Dense(2, name="first"), Reverse()]), X


@BROKEN.says("nonfinite", "singular", wrt="x[0]")
def a_root_of_zero():
    return lambda x: tf.reduce_sum(tf.sqrt(x)), tf.constant([0.0, 1.0])  # <- here


@BROKEN.says("nonfinite", "singular", wrt="x")
def the_distance_of_equals():
    target = tf.constant([1.0, 2.0])

    def f(x):
        return tf.norm(x - target)  # <- here

    return f, tf.constant([1.0, 2.0])


@BROKEN.says("nonfinite", "singular", wrt="p[1]")
def a_cross_entropy_by_hand():
    def f(p):
        return -tf.reduce_sum(tf.math.log(p) * [0.5, 0.5])  # <- here

    return f, tf.constant([1.0, 0.0])


@BROKEN.says("nonfinite", "masked-branch", wrt="x[0]")
def a_logarithm_behind_a_where():
    def f(x):
        logs = tf.math.log(x)  # <- here
        return tf.reduce_sum(tf.where(x > 0, logs, tf.zeros_like(x)))

    return f, tf.constant([0.0, 1.0])


@BROKEN.says("nonfinite", "masked-branch", wrt="x[1]")
def a_quotient_behind_a_where():
    def f(x):
        ratio = 1.0 / x  # <- here
        return tf.reduce_sum(tf.where(x == 0, 0.0, ratio))

    return f, tf.constant([2.0, 0.0])


@BROKEN.says("nonfinite", "overflow", wrt="x")
def an_exponential_in_half_precision():
    def f(x):
        return tf.reduce_sum(tf.exp(x * 8.0))  # <- here

    return f, tf.cast(X, tf.float16)
