"""TensorFlow and Keras programs without a gradient, as people post them. The line that breaks the path is marked."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tests.support.programs_broken import Table

BROKEN = Table()
X = tf.constant([[0.5, -1.0, 2.0], [1.5, 0.3, -0.7]])


def _built(model, x=X):
    model(x)
    return model


@BROKEN.says("unconnected", "detached", wrt="x")
def features_that_are_stopped():
    body, head = layers.Dense(4, activation="tanh"), layers.Dense(1)

    def f(x):
        features = body(x)
        features = tf.stop_gradient(features)  # <- here
        return tf.reduce_sum(head(features))

    return f, X


class Block(keras.Model):
    def __init__(self, cut=False, **options):
        super().__init__(**options)
        self.dense = layers.Dense(4, name="dense")
        self.cut = cut

    def call(self, h):
        return tf.tanh(self.dense(h))


@BROKEN.says("unconnected", "detached", of="output[0, 0]", wrt="embed/kernel[0, 0]")
def a_stop_in_a_nested_model():
    class Cutting(Block):
        def call(self, h):
            h = tf.stop_gradient(h)  # <- here
            return super().call(h)

    class Encoder(keras.Model):
        def __init__(self):
            super().__init__()
            self.embed = layers.Dense(4, name="embed")
            self.blocks = [Block(name="b0"), Cutting(name="b1"), Block(name="b2")]

        def call(self, x):
            h = self.embed(x)
            for block in self.blocks:
                h = block(h)
            return h

    return _built(Encoder()), X


@BROKEN.says("unconnected", "detached", wrt="x")
def a_stop_inside_a_compiled_function():
    @tf.function
    def normalised(x):
        scale = tf.reduce_max(x)
        return tf.stop_gradient(x / scale)  # <- here

    return lambda x: tf.reduce_sum(normalised(x) ** 2), X


@BROKEN.says("unconnected", "detached", wrt="x")
def a_stop_in_a_mapped_function():
    def f(x):
        rows = tf.vectorized_map(lambda row: tf.stop_gradient(row) * 2.0, x)  # <- here
        return tf.reduce_sum(rows)

    return f, X


@BROKEN.says("unconnected", "left-framework", wrt="x")
def a_metric_in_numpy_used_as_a_loss():
    def f(x):
        error = x.numpy() - 1.0  # <- here
        return tf.constant(np.mean(error**2))

    return f, X


@BROKEN.says("unconnected", "left-framework", wrt="x")
def a_function_of_numpy_on_a_tensor():
    def f(x):
        return tf.reduce_sum(tf.convert_to_tensor(np.sqrt(np.abs(x))))  # <- here

    return f, X


@BROKEN.says("unconnected", "left-framework", wrt="x")
def memory_that_is_read():
    factor = tf.Variable(2.0)

    def f(x):
        return factor * tf.reduce_sum(tf.constant(np.frombuffer(memoryview(x), np.float32)))  # <- here

    return f, X


@BROKEN.says("unconnected", "left-framework", wrt="x")
def a_python_number_in_the_middle():
    def f(x):
        total = float(tf.reduce_sum(x))  # <- here
        return tf.ones([2]) * total

    return f, X


@BROKEN.says("unconnected", "left-framework", wrt="x")
def a_numpy_function():
    def f(x):
        flipped = tf.numpy_function(lambda a: a[:, ::-1].copy(), [x], tf.float32)  # <- here
        return tf.reduce_sum(flipped**2)

    return f, X


@BROKEN.says("unconnected", "left-framework", wrt="x")
def a_py_function_that_uses_numpy():
    def f(x):
        y = tf.py_function(lambda a: np.tanh(a.numpy()), [x], tf.float32)  # <- here
        return tf.reduce_sum(y)

    return f, X


@BROKEN.says("unconnected", "left-framework", wrt="x")
def a_loop_over_numbers():
    def f(x):
        total = 0.0
        for row in x:
            for number in row.numpy():  # <- here
                total += number * number
        return tf.constant(total)

    return f, X


@BROKEN.says("unconnected", "discrete", wrt="logits")
def accuracy_as_a_loss():
    labels = tf.constant([2, 0])

    def f(logits):
        predicted = tf.argmax(logits, axis=-1, output_type=tf.int32)  # <- here
        return 1.0 - tf.reduce_mean(tf.cast(predicted == labels, tf.float32))

    return f, X


@BROKEN.says("unconnected", "discrete", wrt="x")
def a_hard_threshold():
    def f(x):
        mask = tf.cast(x > 0.4, tf.float32)  # <- here
        return tf.reduce_mean(mask)

    return f, X


@BROKEN.says("unconnected", "discrete", wrt="x")
def pixels_as_integers():
    def f(x):
        pixels = tf.cast(x * 255, tf.uint8)  # <- here
        return tf.reduce_mean(tf.cast(pixels, tf.float32)) / 255

    return f, X


@BROKEN.says("unconnected", "discrete", of="output", wrt="x")
def a_sampled_action():
    def f(x):
        action = tf.random.categorical(x, 1)  # <- here
        return tf.reduce_sum(tf.cast(action, tf.float32))

    return f, X


@BROKEN.says("unconnected", "discrete", wrt="x")
def a_branch_that_decides():
    def f(x):
        if tf.reduce_sum(x) > 0:  # <- here
            return tf.constant(1.0)
        return tf.constant(0.0)

    return f, X


@BROKEN.says("unconnected", "discrete", of="output", wrt="x")
def token_ids_that_are_returned():
    class Tagger(keras.Model):
        def __init__(self):
            super().__init__()
            self.head = layers.Dense(5, name="head")

        def call(self, x):
            return tf.argmax(self.head(x), axis=-1)  # <- here

    return _built(Tagger()), X


@BROKEN.says("unconnected", "step-function", wrt="x")
def quantised_activations():
    def f(x):
        return tf.reduce_sum(tf.round(x * 8) / 8)  # <- here

    return f, X


@BROKEN.says("unconnected", "step-function", wrt="x")
def a_grid_of_cells():
    def f(x):
        cell = tf.floor(x / 0.1)  # <- here
        return tf.reduce_sum(cell * 0.1)

    return f, X


@BROKEN.says("unconnected", "step-function", of="output[0, 0]", wrt="first/kernel")
def a_quantising_layer():
    class Quantise(layers.Layer):
        def call(self, x):
            return tf.math.ceil(x * 4) / 4  # <- here

    return keras.Sequential([keras.Input((3,)), layers.Dense(4, name="first"), Quantise(), layers.Dense(1)]), X


@BROKEN.says("unconnected", "discrete", wrt="x")
def the_places_of_the_largest():
    def f(x):
        best = tf.math.top_k(x, 2)  # <- here
        return tf.reduce_sum(tf.cast(best.indices, tf.float32))

    return f, X
