"""TensorFlow and Keras programs whose gradient is zero. The line at fault is marked."""

import keras
import tensorflow as tf
from keras import layers

import elementgrad as eg
from tests.support.programs_broken import Table

BROKEN = Table()
X = tf.constant([[0.5, -1.0, 2.0], [1.5, 0.3, -0.7]])


@BROKEN.says("zero", "dead-relu", wrt="x[0, 1]")
def a_dead_unit():
    return lambda x: tf.reduce_sum(tf.nn.relu(x) ** 2), X  # <- here


@BROKEN.says("zero", "dead-relu", of="output[0, 0]", wrt="hidden/kernel[0, 0]")
def a_bias_far_below_zero():
    bias = keras.initializers.Constant(-50.0)
    hidden = layers.Dense(4, activation="relu", bias_initializer=bias, name="hidden")
    return keras.Sequential([keras.Input((3,)), hidden, layers.Dense(1)]), X


@BROKEN.says("zero", "saturated", wrt="x[0, 2]")
def a_sigmoid_of_large_numbers():
    def f(x):
        gate = tf.sigmoid(x * 100.0)  # <- here
        return tf.reduce_sum(gate)

    return f, X


@BROKEN.says("zero", "saturated", of="output[0, 0]", wrt="inputs[0, 2]")
def a_tanh_without_normalisation():
    first = layers.Dense(2, activation="tanh", kernel_initializer="ones")
    return keras.Sequential([keras.Input((3,)), layers.Rescaling(255.0), first, layers.Dense(1)]), X


@BROKEN.says("zero", "clamped", wrt="x[0, 2]")
def an_action_beyond_its_bounds():
    def f(x):
        action = tf.clip_by_value(x, -1.0, 1.0)  # <- here
        return tf.reduce_sum(action**2)

    return f, X


@BROKEN.says("zero", "clamped", wrt="x[0, 2]")
def a_relu_with_a_ceiling():
    return lambda x: tf.reduce_sum(keras.ops.clip(x * 3, 0.0, 1.0)), X  # <- here


@BROKEN.says("zero", "masked", wrt="x[0, 1]")
def a_where():
    def f(x):
        return tf.reduce_sum(tf.where(x > 0, x, 0.1))  # <- here

    return f, X


@BROKEN.says("zero", "masked", wrt="x[1, 2]")
def a_padding_mask():
    mask = tf.constant([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]])

    def f(x):
        losses = x**2 * mask  # <- here
        return tf.reduce_sum(losses) / tf.reduce_sum(mask)

    return f, X


@BROKEN.says("zero", "masked", wrt="x[1, 1]")
def rows_that_a_boolean_mask_leaves_out():
    def f(x):
        kept = tf.boolean_mask(x, [True, False])  # <- here
        return tf.reduce_sum(kept**2)

    return f, X


@BROKEN.says("zero", "masked", wrt="scores[0, 2]")
def attention_to_the_future():
    def f(scores):
        seen = tf.linalg.band_part(tf.exp(scores), -1, 0)  # <- here
        return tf.reduce_sum(seen)

    return f, tf.ones([3, 3])


@BROKEN.says("zero", "dropped", wrt="x")
def a_drop_rate_that_keeps_nothing():
    def f(x):
        h = tf.nn.dropout(x, rate=0.999999)  # <- here
        return tf.reduce_sum(h**2)

    return f, X


@BROKEN.says("zero", "dropped", of="output[0, 0]", wrt="inputs", kwargs={"training": True})
def dropout_left_on():
    return keras.Sequential([keras.Input((3,)), layers.Dropout(0.999999), layers.Dense(1)]), X


@BROKEN.says("zero", "row-not-used", of="output[0, 0]", wrt="embedding/embeddings[4, 0]")
def a_token_that_does_not_occur():
    embed = layers.Embedding(8, 3, name="embedding")
    model = keras.Sequential([keras.Input((2,), dtype="int32"), embed, layers.Flatten(), layers.Dense(1)])
    return model, tf.constant([[1, 2]])


@BROKEN.says("zero", "row-not-used", wrt="table[3, 1]")
def a_lookup_in_a_table():
    ids = tf.constant([0, 2, 2])

    def f(table):
        rows = tf.nn.embedding_lookup(table, ids)  # <- here
        return tf.reduce_sum(rows**2)

    return f, tf.ones([5, 2])


@BROKEN.says("zero", "row-not-used", wrt="table[1, 0]")
def a_gather_of_other_rows():
    def f(table):
        return tf.reduce_sum(tf.gather(table, [0, 2]))  # <- here

    return f, tf.ones([3, 2])


@BROKEN.says("zero", "overwritten", wrt="x[0]")
def an_element_that_is_replaced():
    def f(x):
        y = tf.tensor_scatter_nd_update(x, [[0]], [5.0])  # <- here
        return tf.reduce_sum(y**2)

    return f, tf.ones([3])


@BROKEN.says("zero", "cancelled", wrt="x[0, 1]")
def a_sum_over_a_softmax():
    def f(x):
        return tf.reduce_sum(tf.nn.softmax(x))  # <- here

    return f, X


@BROKEN.says("zero", "cancelled", wrt="x")
def a_difference_of_the_same():
    def f(x):
        a, b = x * 3.0, 3.0 * x
        return tf.reduce_sum(a - b)  # <- here

    return f, X


@BROKEN.says("zero", "underflow", wrt="x")
def a_small_loss_in_half_precision():
    def f(x):
        loss = tf.reduce_mean(x) * 1e-4
        return loss * 1e-5  # <- here

    return f, tf.cast(X, tf.float16)


@BROKEN.says("zero", "not-selected", wrt="x[0, 0]")
def the_largest_alone():
    return lambda x: tf.reduce_max(x), X  # <- here


@BROKEN.says("zero", "not-selected", of="output[0, 0]", wrt="inputs[0, 0, 0, 0]")
def a_pixel_that_loses_in_a_pool():
    image = tf.reshape(tf.constant([1.0, 2.0, 3.0, 4.0]), [1, 2, 2, 1])
    return keras.Sequential([keras.Input((2, 2, 1)), layers.MaxPooling2D(2), layers.Flatten()]), image


@BROKEN.says("zero", "tie", wrt="x[0, 1, 0, 0]")
def equal_pixels_in_a_pool():
    def f(x):
        return tf.reduce_sum(tf.nn.max_pool2d(x, 2, 2, "VALID"))  # <- here

    return f, tf.ones([1, 2, 2, 1])


@BROKEN.says("zero", "tie", wrt="b[0]")
def a_maximum_of_equals():
    def f(a, b):
        return tf.reduce_sum(tf.maximum(a, b))  # <- here

    return f, tf.ones([2]), tf.ones([2])


@BROKEN.says("zero", "unused", wrt="x[0, 2]")
def a_column_that_is_sliced_off():
    def f(x):
        return tf.reduce_sum(x[:, :2] ** 2)  # <- here

    return f, X


@BROKEN.says("zero", "step-function", wrt="x")
def a_binarised_weight():
    def f(x):
        return tf.reduce_sum(tf.sign(x) * 0.5)  # <- here

    return f, X


@BROKEN.says("zero", "stationary", wrt="x[0]")
def a_square_at_its_bottom():
    return lambda x: tf.reduce_sum(x**2), tf.constant([0.0, 1.0])  # <- here


@BROKEN.says("zero", "kink", wrt="x[0]")
def an_absolute_value_at_zero():
    return lambda x: tf.reduce_sum(tf.abs(x)), tf.constant([0.0, 1.0])  # <- here


@BROKEN.says("zero", "not-selected", wrt="x[1]")
def the_largest_of_ragged_rows():
    def f(x):
        rows = tf.RaggedTensor.from_row_lengths(x, [2, 1])
        return tf.reduce_sum(tf.reduce_max(rows, axis=1))  # <- here

    return f, tf.constant([1.0, -2.0, 3.0])


@BROKEN.says("zero", "step-function", wrt="x")
def a_compiled_loop_that_rounds():
    @tf.function
    def rounded(x):
        for _ in tf.range(3):
            x = tf.round(x) * 2.0
        return tf.reduce_sum(x)

    compiled = rounded.get_concrete_function(tf.TensorSpec([2, 3]))
    return lambda x: compiled(x), X  # <- here


@BROKEN.says("zero", "overwritten", of="output[0, 0]", wrt="encoder/kernel[0, 1]")
def a_layer_that_blanks_a_column():
    class Blank(layers.Layer):
        def call(self, x):
            places = tf.constant([[0, 1], [1, 1]])
            return tf.tensor_scatter_nd_update(x, places, [0.0, 0.0])  # <- here

    encoder = layers.Dense(3, name="encoder")
    return keras.Sequential([keras.Input((3,), 2), encoder, Blank(), layers.Dense(1)]), X


@BROKEN.says("zero", "underflow", wrt="x")
def a_likelihood_in_half_precision():
    def f(x):
        return tf.reduce_sum(tf.exp(x - 20.0))  # <- here

    return f, tf.cast(X, tf.float16)


@BROKEN.says("zero", "dead-relu", of="output[0, 0]", wrt="layer/w[1]")
def a_weight_that_is_written_in_the_call():
    class Clipped(layers.Layer):
        def build(self, shape):
            self.w = self.add_weight(shape=(3,), initializer="ones", name="w")

        def call(self, x):
            self.w.assign(-tf.abs(self.w))
            return tf.nn.relu(tf.abs(x) * self.w)  # <- here

    return keras.Sequential([keras.Input((3,)), Clipped(name="layer"), layers.Dense(1)]), X


@BROKEN.says("zero", "detached", wrt="x[1]")
def an_element_that_we_stop():
    return lambda x: tf.reduce_sum(eg.at(x)[1].stop() ** 2), tf.ones([3])  # <- here


@BROKEN.says("zero", "overwritten", wrt="x[1]")
def an_element_that_we_set():
    return lambda x: tf.reduce_sum(eg.at(x)[1].set(5.0) ** 2), tf.ones([3])  # <- here


@BROKEN.says("zero", "masked", wrt="x[1]")
def a_dropout_of_ones_own():
    def loss(x):
        draw = tf.random.stateless_uniform([6], (1, 2), dtype=x.dtype)  # in float64 another one, which keeps it
        return tf.reduce_sum(x * tf.cast(draw > 0.5, x.dtype))  # <- here

    return loss, tf.ones([6])
