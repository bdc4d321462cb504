"""Keras models with losses to rank their elements by, and what a plain tape says of them."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from elementgrad._backends.tensorflow.names import KerasModel
from elementgrad._train.top_backend import TopBackend
from tests.support import keras_models
from tests.support.ranked import Ranked

WIDE = {"dtype": "float64"}
LABELS = [0, 1, 2, 0, 1, 2]


def drawn(*shape):
    return tf.constant(np.random.default_rng(7).normal(size=shape))


def finished(inputs, *parts):
    return keras_models.drawn(keras.Sequential([inputs, *parts]))


def entropy(scores):
    return tf.nn.sparse_softmax_cross_entropy_with_logits(LABELS[: len(scores)], scores)


def mlp():
    parts = [layers.Dense(7, "tanh", name="first", **WIDE), layers.Dense(4, "tanh", name="second", **WIDE)]
    model = finished(keras.Input((5,), **WIDE), *parts, layers.Dense(3, name="third", **WIDE))
    x = drawn(6, 5)
    return model, lambda model: entropy(model(x))


def conv():
    parts = [layers.Conv2D(3, 3, name="conv", **WIDE), layers.BatchNormalization(name="norm", **WIDE), layers.ReLU()]
    parts += [layers.Dropout(0.2, seed=3), layers.Flatten(), layers.Dense(3, name="head", **WIDE)]
    model = finished(keras.Input((4, 4, 2), **WIDE), *parts)
    x = drawn(4, 4, 4, 2)
    return model, lambda model: entropy(model(x, training=True))


def gru():
    cells = layers.Bidirectional(layers.GRU(3, name="gru", **WIDE), name="rnn", **WIDE)
    model = finished(keras.Input((3, 2), **WIDE), cells, layers.Dense(2, name="head", **WIDE))
    x = drawn(4, 3, 2)
    return model, lambda model: tf.reduce_sum(model(x) ** 2, 1)


def attention():
    """Subclassed, with shared layers."""
    model = keras_models.transformer_subclassed()
    x = keras_models.input_of(model)
    return model, lambda model: tf.reduce_sum(tf.reshape(model(x), [2, -1]) ** 2, 1)


def frozen():
    model, loss_fn = mlp()
    model.layers[0].trainable = False
    return model, loss_fn


class Sparse(keras.Model):
    """A table whose gradient comes in rows, a variable without axes, an empty one, and a layer that is not called."""

    def __init__(self):
        super().__init__()
        self.scale = self.add_weight(shape=(), name="scale", initializer="ones", **WIDE)
        self.steps = self.add_weight(shape=(), name="steps", dtype="int64", initializer="ones")
        self.empty = self.add_weight(shape=(0, 4), name="empty", **WIDE)
        self.table = layers.Embedding(9, 3, name="table", **WIDE)
        self.other = layers.Dense(3, name="other", **WIDE)
        self.other.build((None, 3))

    def call(self, ids):
        return tf.reduce_sum(self.table(ids), -1) * self.scale.value + tf.reduce_sum(self.empty.value)


def sparse():
    model = Sparse()
    model(tf.constant([1]))
    keras_models.drawn(model)
    return model, lambda model: model(tf.constant([1, 1, 4])) ** 2


def compiled():
    """Functions that were traced before run as Python, and see what stands in for the variables."""
    model, _ = mlp()
    call = tf.function(model)
    call(drawn(6, 5))
    return model, lambda _: entropy(call(drawn(6, 5)))


def half():
    parts = [layers.Dense(7, "tanh", name="first", dtype="mixed_float16"), layers.Dense(3, name="second")]
    model = finished(keras.Input((5,)), *parts)
    x = tf.cast(drawn(6, 5), tf.float32)
    return model, lambda model: tf.reduce_sum(entropy(model(x)))


MODELS = {case.__name__: case for case in (mlp, conv, gru, attention, frozen, sparse, compiled, half)}


class RankedKeras(Ranked):
    """TensorFlow."""

    pieces = TopBackend
    models = MODELS

    def parameters(self, model):
        return {name: variable.numpy() for name, variable in self.tensors(model).items()}

    def tensors(self, model):
        return {name: x for name, kind, x in KerasModel(model)._variables() if kind == "parameter"}

    def dense(self, model, loss_fn, by):
        before = [variable.numpy() for variable in model.variables]
        variables = {name: x._value for name, x in self.tensors(model).items() if "float" in x.dtype}
        with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
            tape.watch(list(variables.values()))
            returned = loss_fn(model)
            losses = [returned] if tf.is_tensor(returned) else list(returned)
            numbers = [number for loss in losses for number in tf.unstack(tf.reshape(loss, [-1]))]
            numbers = numbers if by == "fisher" else [tf.add_n(numbers)]
        for variable, value in zip(model.variables, before, strict=True):
            variable.assign(value)
        found: dict = {}
        for number in numbers:
            gradients = tape.gradient(number, list(variables.values()))
            for name, gradient in zip(variables, gradients, strict=True):
                if gradient is not None:
                    size = np.abs(np.asarray(tf.convert_to_tensor(gradient), np.float64))
                    found[name] = found.get(name, 0) + (size**2 if by == "fisher" else size)
        return {name: found[name] for name in variables if name in found}

    def chain(self, kernels, biases, frozen, tied):
        inputs = keras.Input(kernels[0].shape[:1], **WIDE)
        parts = [
            layers.Dense(kernel.shape[1], "relu", use_bias=bias is not None, name=f"layer{number}", **WIDE)
            for number, (kernel, bias) in enumerate(zip(kernels, biases, strict=True))
        ]
        y = inputs
        for part, kernel, bias in zip(parts, kernels, biases, strict=True):
            y = part(y)
            part.set_weights([kernel] if bias is None else [kernel, bias])
        if tied:
            y = parts[0](y)  # once more
        parts[0].trainable = not frozen
        return keras.Model(inputs, y)

    def tensor(self, array):
        return tf.constant(array)

    def sums(self, y):
        return tf.reduce_sum(y, -1)

    def copied(self, model):
        other = keras.models.clone_model(model)
        other.set_weights(model.get_weights())
        return other

    def assign(self, model, values):
        for name, value in values.items():
            self.tensors(model)[name].assign(value)
