"""TensorFlow programs in which the element asked about is cut off or dead while others flow. The line is marked."""

import keras
import numpy as np
import tensorflow as tf

from tests.support.programs_broken import Table

BROKEN = Table()
X = tf.constant([1.0, 2.0, 3.0])
ROWS = tf.constant([1.0, -1.0])
W = tf.constant(2.0)


@BROKEN.says("zero", "detached", wrt="x[0]")
def one_factor_stopped():
    def loss(x):
        scale = tf.stop_gradient(x[0])  # <- here
        return x[1] * scale

    return loss, X


@BROKEN.says("zero", "left-framework", wrt="x[0]")
def one_factor_as_a_number():
    def loss(x):
        scale = float(x[0].numpy())  # <- here
        return x[1] * scale

    return loss, X


@BROKEN.says("zero", "detached", wrt="x[0]")
def a_stopped_prefix():
    def loss(x):
        prefix = tf.stop_gradient(x[:1])  # <- here
        return tf.reduce_sum(tf.concat([prefix, x[1:]], 0))

    return loss, X


@BROKEN.says("zero", "detached", wrt="x[0]")
def a_state_stopped_in_every_turn():
    def last(x):
        state = tf.constant(1.0)
        for turn in range(3):
            state = tf.stop_gradient(state) * x[turn]  # <- here
        return state

    return last, X


@BROKEN.says("zero", "detached", wrt="x[0]")
def a_branch_that_is_stopped():
    def loss(x):
        kept = tf.stop_gradient(x)  # <- here
        return tf.reduce_sum(tf.where(x > 0, kept, x))

    return loss, X


@BROKEN.says("zero", "unused", wrt="x[0]")
def an_element_that_is_not_used():
    return lambda x: tf.reduce_prod((x * 2)[1:]), X  # <- here


@BROKEN.says("zero", "dead-relu", of="output[1]", wrt="w")
def a_row_that_is_dead():
    return lambda x, w: tf.nn.relu(x * w), ROWS, W  # <- here


@BROKEN.says("zero", "dead-relu", of="output[1]", wrt="w")
def a_row_below_a_maximum():
    return lambda x, w: tf.maximum(x * w, 0.0), ROWS, W  # <- here


@BROKEN.says("zero", "clamped", of="output[1]", wrt="w")
def a_row_out_of_bounds():
    return lambda x, w: tf.clip_by_value(x * w, 0.0, 5.0), ROWS, W  # <- here


@BROKEN.says("zero", "saturated", of="output[1]", wrt="w")
def a_row_that_is_saturated():
    return lambda x, w: tf.sigmoid(x * w * 1000), ROWS, W  # <- here


@BROKEN.says("zero", "masked", of="output[1]", wrt="w")
def a_row_times_zero():
    mask = tf.constant([1.0, 0.0])
    return lambda x, w: x * w * mask, ROWS, W  # <- here


@BROKEN.says("zero", "dead-relu", of="output[1, 0]", wrt="hidden/kernel[0, 1]")
def a_unit_that_is_dead_for_one_example():
    hidden = keras.layers.Dense(2, activation="relu", kernel_initializer="ones", name="hidden")
    return keras.Sequential([keras.Input((1,)), hidden, keras.layers.Dense(1)]), ROWS[:, None]


@BROKEN.says("zero", "masked", of="output[1, 0]", wrt="x[2, 0]")
def a_token_of_the_future():
    numbers = np.random.default_rng(0)
    query, key, value = [tf.constant(numbers.normal(size=(2, 2)), tf.float32) for _ in range(3)]

    def attention(x):
        scores = (x @ query) @ tf.transpose(x @ key)
        past = tf.linalg.band_part(tf.ones((3, 3)), -1, 0) > 0
        scores = tf.where(past, scores, -1e9)  # <- here
        return tf.nn.softmax(scores) @ (x @ value)

    return attention, tf.constant(numbers.normal(size=(3, 2)), tf.float32)


@BROKEN.says("nonfinite", "singular", wrt="x[0]")
def an_angle_at_the_origin():
    return lambda x: tf.atan2(x[0], x[1]), tf.zeros(2)  # <- here


@BROKEN.says("zero", "not-selected", wrt="x[0]")
def the_smallest_of_a_sorted_list():
    return lambda x: tf.sort(x)[0], tf.constant([3.0, 1.0, 2.0])  # <- here
