"""TensorFlow programs in which another cause lies near: ties, masks, NumPy in a step, slices from before, fixes."""

import keras
import numpy as np
import tensorflow as tf

from tests.support.programs_broken import Table

BROKEN = Table()
IMAGE = tf.constant([[1.0, 2.0, 2.0, 9.0], [0.0, 0.0, 0.0, 3.0], [5.0, 5.0, 2.0, 1.0], [0.0, 1.0, 1.0, 1.0]])
IMAGE = IMAGE[None, :, :, None]
ROWS = tf.constant([[1.0, 2.0], [2.0, 3.0]])
X = tf.constant([1.5, 2.5])
C = tf.constant([-1.0, 2.0])


@BROKEN.says("zero", "not-selected", wrt="x[0, 0, 2, 0]")
def as_large_as_the_maximum_of_another_window():
    return lambda x: tf.reduce_sum(tf.nn.max_pool2d(x, 2, 2, "VALID")), IMAGE  # <- here


@BROKEN.says("zero", "not-selected", wrt="x[0, 0, 2, 0]")
def a_layer_with_such_a_window():
    layer = keras.layers.MaxPooling2D(2)
    return lambda x: tf.reduce_sum(layer(x)), IMAGE  # <- here


@BROKEN.says("zero", "not-selected", wrt="x[0, 0, 2, 0]")
def a_volume():
    return lambda x: tf.reduce_sum(tf.nn.max_pool3d(x[:, None], [1, 2, 2], [1, 2, 2], "VALID")), IMAGE  # <- here


@BROKEN.says("zero", "out-of-range", fix="check the ids first", wrt="x[1]")
def a_segment_that_is_not_there():
    return lambda x: tf.reduce_sum(tf.math.unsorted_segment_sum(x, tf.constant([0, -1]), 2)), X  # <- here


@BROKEN.says("zero", "out-of-range", fix="check the ids first", wrt="x[1]")
def the_largest_of_a_segment_that_is_not_there():
    return lambda x: tf.reduce_sum(tf.math.unsorted_segment_max(x, tf.constant([0, -1]), 1)), X  # <- here


@BROKEN.says("zero", "out-of-range", wrt="x[1, 0]")
def a_compiled_mean_of_a_segment_that_is_not_there():
    return tf.function(lambda x: tf.math.unsorted_segment_mean(x, tf.constant([0, -1]), 1)[0, 0]), ROWS  # <- here


@BROKEN.says("zero", "not-selected", wrt="x[0]")
def beside_a_segment_that_is_not_there():
    x = tf.constant([1.0, 2.0, 9.0])
    return lambda x: tf.math.unsorted_segment_max(x, tf.constant([0, 0, -1]), 1)[0], x  # <- here


@BROKEN.says("zero", "tie", fix="equal elements are interchangeable", wrt="x[0, 2, 1, 0]")
def a_tie_in_its_own_window():
    return lambda x: tf.reduce_sum(tf.nn.max_pool2d(x, 2, 2, "VALID")), IMAGE  # <- here


@BROKEN.says("zero", "not-selected", wrt="x[1, 0]")
def as_large_as_the_maximum_of_another_row():
    return lambda x: tf.reduce_sum(tf.reduce_max(x, 1)), ROWS  # <- here


@BROKEN.says("zero", "not-selected", wrt="x[1, 0]")
def the_largest_of_another_row():
    return lambda x: tf.reduce_sum(tf.math.top_k(x, 1).values), ROWS  # <- here


def _step(compute, source=None):
    weight = tf.Variable([1.5, 2.5])

    def step():
        with tf.GradientTape() as tape:
            loss = compute(weight)
        weight.assign_sub(tape.gradient(loss, weight if source is None else source(weight)))

    return step


@BROKEN.says("unconnected", "left-framework")
def numpy_in_a_step():
    def compute(weight):
        hidden = weight * 2
        return tf.reduce_sum(np.tanh(hidden))  # <- here

    return _step(compute)


@BROKEN.says("unconnected", "left-framework")
def an_array_in_a_step():
    def compute(weight):
        array = np.asarray(weight * 2)  # <- here
        return tf.reduce_sum(tf.constant(array**2))

    return _step(compute)


@BROKEN.says("unconnected", "left-framework")
def a_mean_of_numpy_in_a_step():
    return _step(lambda weight: tf.constant(np.mean(weight * 2)))  # <- here


@BROKEN.says("unconnected", "resliced", fix="inside the tape")
def a_slice_from_before():
    whole = tf.Variable([1.5, 2.5])
    part = whole[0]

    def step():
        with tf.GradientTape() as tape:
            loss = whole[0] ** 2
        return tape.gradient(loss, part)

    return step


@BROKEN.says("unconnected", "resliced", fix="slice that")
def a_slice_of_a_tensor_from_before():
    part = X[1]

    def step():
        with tf.GradientTape() as tape:
            tape.watch(X)
            loss = X[1] ** 2
        return tape.gradient(loss, part)

    return step


@BROKEN.says("unconnected", "outside-tape", fix="inside the with block")
def a_slice_from_before_that_is_used():
    whole = tf.Variable([1.5, 2.5])
    part = whole[0]

    def step():
        with tf.GradientTape() as tape:
            loss = part**2  # <- here
        return tape.gradient(loss, whole)

    return step


def _slices_from_before(number):
    whole = tf.Variable([number, number])
    part = whole[0]
    equal = tf.constant(number)
    weight = tf.Variable(3.0)

    def unused_part():
        with tf.GradientTape() as tape:
            loss = whole[0] ** 2
        return tape.gradient(loss, part)

    def unused_number():
        with tf.GradientTape() as tape:
            loss = whole[0] ** 2
        return tape.gradient(loss, equal)

    def used_part():
        with tf.GradientTape() as tape:
            loss = weight * part**2
        return tape.gradient(loss, whole)

    def used_number():
        with tf.GradientTape() as tape:
            loss = weight * equal**2
        return tape.gradient(loss, whole)

    return unused_part, unused_number, used_part, used_number


@BROKEN.says("unconnected", "resliced")
def a_slice_of_zeros_from_before():
    return _slices_from_before(0.0)[0]


@BROKEN.says("unconnected", "unused")
def a_number_as_in_a_slice():
    return _slices_from_before(2.5)[1]


@BROKEN.says("unconnected", "outside-tape")
def a_slice_of_ones_from_before_that_is_used():
    return _slices_from_before(1.0)[2]


@BROKEN.says("unconnected", "unused")
def a_number_as_in_a_slice_that_is_used():
    return _slices_from_before(2.5)[3]


@BROKEN.says("unconnected", "left-framework")
def memory_that_is_read_in_a_step():
    return _step(lambda weight: tf.constant(np.frombuffer(memoryview(weight * 2), np.float32)))  # <- here


@BROKEN.says("unconnected", "unused", fix="name a tensor that is used")
def a_tensor_that_no_step_takes():
    def step():
        with tf.GradientTape() as tape:
            tape.watch(X)
            loss = tf.reduce_sum(X**2)
        return tape.gradient(loss, C)

    return step


@BROKEN.says("unconnected", "not-tracked", fix="tape.watch(x)")
def a_target_that_is_a_constant():
    return _step(lambda weight: tf.reduce_sum((weight - X) ** 2), lambda _: X)


@BROKEN.says("nonfinite", "masked-branch", fix="log(tf.where(ok, x, 1.0))", wrt="x[0]")
def a_constant_that_is_no_number():
    def f(x):
        c = tf.math.log(C)  # <- here
        return tf.reduce_sum(tf.where(C < 0, 0.0, x * c))

    return f, X


@BROKEN.says("nonfinite", "masked-branch", wrt="x")
def one_factor_of_constants_that_are_no_numbers():
    def f(x):
        c = tf.sqrt(C)  # <- here
        return tf.reduce_sum(tf.where(C < 0, 0.0, x * c))

    return f, tf.constant(2.0)


@BROKEN.says("zero", "stationary", wrt="x[0]")
def the_square_of_a_norm():
    return lambda x: tf.norm(x) ** 2, tf.zeros(2)  # <- here


@BROKEN.says("zero", "stationary", wrt="x[0]")
def a_size_times_itself():
    return lambda x: tf.reduce_sum(tf.abs(x) * tf.abs(x)), tf.zeros(2)  # <- here


@BROKEN.says("unconnected", "not-tracked", fix="gamma and beta", of="output[0, 0]", wrt="norm/moving_mean[0]")
def statistics():
    return keras.Sequential([keras.Input((2,)), keras.layers.BatchNormalization(name="norm")]), ROWS


@BROKEN.says(
    "unconnected", "unused", fix="add that result to the loss", of="output.first[0, 0]", wrt="second/kernel[0, 0]"
)
def a_weight_of_another_head():
    given = keras.Input((2,))
    heads = {name: keras.layers.Dense(1, name=name)(given) for name in ("first", "second")}
    return keras.Model(given, heads), ROWS


@BROKEN.says("zero", "masked", fix="glorot_uniform", of="output[0, 0]", wrt="one/kernel[0, 0]")
def weights_that_are_all_zero():
    layers = [keras.layers.Dense(2, kernel_initializer="zeros", name=name) for name in ("one", "two")]
    return keras.Sequential([keras.Input((2,)), *layers]), ROWS


@BROKEN.says("unconnected", "left-framework")
def an_array_of_keras_in_a_step():
    return _step(lambda weight: tf.constant(keras.ops.convert_to_numpy(weight * 2).sum()))  # <- here


@BROKEN.says("zero", "masked", fix="change the mask to keep", wrt="x[1]")
def a_mask_that_is_added():
    return lambda x: tf.nn.softmax(x + tf.constant([0.0, -1e9]))[0], X  # <- here


@BROKEN.says("zero", "cancelled", wrt="x[0]")
def shares_that_add_up_in_single_precision():
    return lambda x: tf.reduce_sum(tf.nn.softmax(x)), tf.constant([1.0, 4.0])  # <- here


@BROKEN.says("zero", "cancelled", of="output[0, 0]", wrt="inputs[0, 0]", kwargs={"training": True})
def a_batch_of_one():
    return keras.Sequential([keras.Input((2,)), keras.layers.BatchNormalization()]), ROWS[:1]


@BROKEN.says("zero", "dead-relu", wrt="x[1]")
def code_that_tensorflow_writes_anew():
    return lambda x: tf.reduce_sum(tf.map_fn(lambda a: tf.nn.relu(a), x)), tf.constant([1.0, -2.0])  # <- here


@BROKEN.says("nonfinite", "masked-branch", wrt="x[0, 0]")
def a_size_of_each_row_that_is_masked():
    def f(x):
        size = tf.reduce_sum(x**2, -1, keepdims=True)
        return tf.reduce_sum(tf.where(size > 0, x / size, 0.0))  # <- here

    return f, tf.constant([[0.0, 0.0], [1.0, 2.0]])
