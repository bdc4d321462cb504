"""Contracts with TensorFlow and Keras for ranking and training elements."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager.record import should_record_backprop
from tensorflow.python.framework import op_callbacks

pytestmark = pytest.mark.contract


def test_tensorflow_numbers_eager_tensors_as_they_are_made_and_tells_of_operations_after_the_tape():
    x, met = tf.ones(2), []

    def callback(kind, inputs, attributes, outputs, *_, **__):
        met.append([(y._id, should_record_backprop([y])) for y in (*inputs, *outputs)])

    with tf.GradientTape() as tape:
        tape.watch(x)
        op_callbacks.add_op_callback(callback)
        y = tf.sin(x)
        op_callbacks.remove_op_callback(callback)
    assert met == [[(x._id, True), (y._id, True)]]
    assert x._id < y._id < tf.ones(2)._id


def test_tensorflow_hands_gradients_to_rules_one_at_a_time_and_takes_none_for_an_answer():
    taken = []
    x = tf.Variable([1.0, 2.0])
    with tf.GradientTape() as tape:
        y = tf.custom_gradient(lambda x: (tf.identity(x), taken.append))(tf.convert_to_tensor(x))
        z = tf.reduce_sum(y * y) + tf.reduce_sum(tf.gather(y, [0]))
    assert tape.gradient(z, x) is None
    assert len(taken) == 1  # of both uses together
    assert tf.convert_to_tensor(taken[0]).numpy().tolist() == [3.0, 4.0]


@pytest.mark.parametrize("compiled", [False, True])
def test_tensorflow_leaves_negative_segments_out_of_sums(compiled):
    total = tf.function(lambda x: tf.math.unsorted_segment_sum(x, [0, -1, 0], 2), jit_compile=compiled)
    assert total(tf.constant([1.0, np.nan, 2.0])).numpy().tolist() == [3.0, 0.0]


def test_keras_stateless_scope_replaces_variables_and_collects_writes():
    variable = keras.Variable([1.0])
    with keras.StatelessScope([(variable, tf.constant([2.0]))]) as scope:
        assert variable.numpy().tolist() == [2.0]
        variable.assign([3.0])
        assert scope.get_current_value(variable).numpy().tolist() == [3.0]
    assert variable.numpy().tolist() == [1.0]
