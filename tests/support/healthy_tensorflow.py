"""TensorFlow and Keras programs with nothing wrong, some of which look as if there were."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tests.support.programs_broken import Table

HEALTHY = Table()
X = tf.constant([[0.5, -1.0, 2.0], [1.5, 0.3, -0.7]])
Y = tf.constant([0, 1])
healthy = HEALTHY.says("flows")


@healthy
def a_square():
    return lambda x: tf.reduce_sum(x**2), X


@HEALTHY.says("flows", of="output[0, 1]", wrt="hidden/kernel[1, 2]")
def a_network():
    hidden = layers.Dense(8, activation="gelu", name="hidden")
    return keras.Sequential([keras.Input((3,)), hidden, layers.Dense(2)]), X


@HEALTHY.says("flows", wrt="x[0, 0]")
def a_live_unit_of_a_relu():
    return lambda x: tf.reduce_sum(tf.nn.relu(x)), X


@HEALTHY.says("flows", wrt="x[0]")
def an_element_by_index():
    return lambda x: x[0] * 3, tf.ones([3])


@HEALTHY.says("flows", wrt="x[0]")
def an_element_by_gather():
    return lambda x: tf.reduce_sum(tf.gather(x, [0])), tf.ones([3])


@HEALTHY.says("flows", wrt="x[0]")
def an_element_by_a_mask():
    return lambda x: tf.reduce_sum(tf.boolean_mask(x, [True, False, False])), tf.ones([3])


@HEALTHY.says("flows", wrt="x")
def a_stop_beside_a_path():
    return lambda x: tf.reduce_sum(x * tf.stop_gradient(x)), X


@HEALTHY.says("flows", wrt="x")
def a_number_that_is_only_printed():
    def f(x):
        loss = tf.reduce_mean(x**2)
        str(loss)
        float(loss)
        return loss

    return f, X


@HEALTHY.says("flows", wrt="x")
def a_straight_through_estimator_written_as_a_path():
    return lambda x: tf.reduce_sum(x + tf.stop_gradient(tf.round(x) - x)), X


@HEALTHY.says("flows", wrt="x")
def a_rule_that_is_right():
    @tf.custom_gradient
    def cube(x):
        return x**3, lambda upstream: upstream * 3 * x**2

    return lambda x: tf.reduce_sum(cube(x)), X


@HEALTHY.says("flows", wrt="x")
def a_loop_with_a_decision():
    def f(x):
        total = tf.constant(0.0)
        for row in x:
            total += tf.reduce_sum(row) if row[0] > 1 else tf.reduce_sum(row**2)
        return total

    return f, X


@HEALTHY.says("flows", wrt="x")
def a_loop_of_tensorflow():
    def f(x):
        _, y = tf.while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, tf.tanh(y)), (0, x))
        return tf.reduce_sum(y)

    return f, X


@HEALTHY.says("flows", wrt="x")
def a_compiled_function_with_branches():
    @tf.function
    def f(x):
        if tf.reduce_sum(x) > 0:
            return tf.reduce_sum(x**3)
        return tf.reduce_sum(x)

    return f, X


@HEALTHY.says("flows", wrt="x")
def a_function_that_runs_only_compiled():
    @tf.function
    def f(x):
        (slope,) = tf.gradients(tf.reduce_sum(x**3), x)
        return tf.reduce_sum(slope)

    return f, X


@HEALTHY.says("flows", wrt="x")
def a_concrete_function():
    f = tf.function(lambda x: tf.reduce_sum(tf.sin(x))).get_concrete_function(tf.TensorSpec([2, 3]))
    return lambda x: f(x) * 2.0, X


@HEALTHY.says("flows", wrt="x")
def rows_that_are_mapped():
    return lambda x: tf.reduce_sum(tf.map_fn(lambda row: row * row[0], x)), X


@HEALTHY.says("flows", wrt="x")
def a_gradient_penalty():
    def f(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.reduce_sum(tf.tanh(x))
        return tf.reduce_sum(tape.gradient(y, x) ** 2)

    return f, X


@HEALTHY.says("flows", wrt="x")
def a_py_function_of_tensors():
    return lambda x: tf.reduce_sum(tf.py_function(lambda a: tf.sin(a) * 2.0, [x], tf.float32)), X


@HEALTHY.says("flows", wrt="x")
def a_state_that_is_written_and_not_read():
    seen = tf.Variable(0.0)

    def f(x):
        loss = tf.reduce_sum(x**2)
        seen.assign(loss)
        return loss

    return f, X


@HEALTHY.says("flows", wrt="logits")
def a_cross_entropy():
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return lambda logits: loss(Y, logits), X


@HEALTHY.says("flows", of="output[0, 0]", wrt="norm/gamma[0]", kwargs={"training": True})
def a_batch_norm_in_training():
    norm = layers.BatchNormalization(name="norm")
    return keras.Sequential([keras.Input((3,)), norm, layers.Dense(2)]), X


@HEALTHY.says("flows", of="output[0, 0]", wrt="embedding/embeddings[2, 1]")
def a_recurrent_model():
    embed = layers.Embedding(6, 4, name="embedding")
    model = keras.Sequential([keras.Input((3,), dtype="int32"), embed, layers.LSTM(5), layers.Dense(2)])
    return model, tf.constant([[1, 2, 3]])


@HEALTHY.says("flows", of="output[0, 0]", wrt="inner/deep/kernel[0, 0]")
def a_nested_subclassed_model():
    class Outer(keras.Model):
        def __init__(self):
            super().__init__()
            deep = layers.Dense(4, activation="tanh", name="deep")
            self.inner = keras.Sequential([deep, layers.LayerNormalization()], name="inner")
            self.attend = layers.MultiHeadAttention(2, 2)
            self.head = layers.Dense(2)

        @tf.function
        def call(self, x):
            h = self.inner(x)[None]
            return self.head(h + self.attend(h, h))[0]

    model = Outer()
    model(X)
    return model, X


@HEALTHY.says("flows", wrt="x")
def a_mask_that_keeps_it():
    mask = tf.constant(np.ones([2, 3], np.float32))
    return lambda x: tf.reduce_sum(x * mask) / tf.reduce_sum(mask), X


@HEALTHY.says("flows", wrt="x[0]")
def a_safe_root():
    def f(x):
        positive = x > 0
        return tf.reduce_sum(tf.where(positive, tf.sqrt(tf.where(positive, x, 1.0)), 0.0))

    return f, tf.constant([4.0, 0.0])


@healthy
def a_training_step():
    model = keras.Sequential([keras.Input((3,)), layers.Dense(4, activation="tanh"), layers.Dense(2)])
    optimizer = keras.optimizers.Adam()

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            losses = keras.losses.sparse_categorical_crossentropy(Y, model(X, training=True), from_logits=True)
            loss = tf.reduce_mean(losses)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return step
