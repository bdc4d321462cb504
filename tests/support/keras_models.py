"""Small Keras models with the layouts that people build: residual, attention, recurrent and U-shaped nets, in each of
Keras's forms. Layers are named, weights are drawn from a seed, and everything is in Keras's float type."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import elementgrad as eg

Model = keras.Model


@contextmanager
def computing_in(dtype: str) -> Iterator[None]:
    """Let new models compute in a dtype. A policy that was set once stays, whatever the float type is."""
    floatx, policy = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx(dtype)
    keras.config.set_dtype_policy(dtype)
    try:
        yield
    finally:
        keras.config.set_floatx(floatx)
        keras.config.set_dtype_policy(policy)


def drawn(model: Model, seed: int = 0) -> Model:
    """The model with every weight drawn anew; what must be positive is."""
    rng = np.random.default_rng(seed)
    for variable in model.weights:
        if "seed" not in variable.path:
            low = 0.5 if "variance" in variable.path else -1.0
            variable.assign(rng.uniform(low, 1.5 if low > 0 else 1.0, variable.shape))
    return model


def input_of(model: Model, seed: int = 1) -> tf.Tensor:
    """Two examples of what a model takes."""
    shape = {"image": (4, 4, 2), "sequence": (3, 4)}[model.takes]
    return tf.constant(np.random.default_rng(seed).normal(size=(2, *shape)), keras.config.floatx())


def _finished(model: Model, takes: str) -> Model:
    model.takes = takes
    model(input_of(model))
    return drawn(model)


def _residual_block(name: str, width: int) -> Model:
    x = keras.Input((4, 4, width), name="features")
    y = layers.ReLU(name="relu1")(layers.BatchNormalization(name="bn1")(_conv("conv1", width)(x)))
    y = layers.BatchNormalization(name="bn2")(_conv("conv2", width)(y))
    return Model(x, layers.Add(name="add")([x, y]), name=name)


def _conv(name: str, width: int) -> layers.Layer:
    return layers.Conv2D(width, 3, padding="same", name=name)


def residual() -> Model:
    """Functional, with blocks that are Functional models themselves."""
    x = keras.Input((4, 4, 2), name="image")
    y = layers.Activation("tanh", name="act1")(layers.BatchNormalization(name="bn1")(_conv("conv1", 3)(x)))
    y = _residual_block("block2", 3)(_residual_block("block1", 3)(y))
    y = layers.GlobalAveragePooling2D(name="pool")(y)
    return _finished(Model(x, layers.Dense(3, name="head")(y)), "image")


class _Block(layers.Layer):
    def __init__(self, width: int, name: str):
        super().__init__(name=name)
        self.conv1, self.conv2 = _conv("conv1", width), _conv("conv2", width)
        self.bn1, self.bn2 = layers.BatchNormalization(name="bn1"), layers.BatchNormalization(name="bn2")

    def call(self, x, training=None):
        y = tf.nn.relu(self.bn1(self.conv1(x), training=training))
        return x + self.bn2(self.conv2(y), training=training)


class _Residual(Model):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = _conv("conv1", 3), layers.BatchNormalization(name="bn1")
        self.blocks = [_Block(3, "block1"), _Block(3, "block2")]
        self.head = layers.Dense(3, name="head")

    def call(self, image, training=None):
        x = tf.tanh(self.bn1(self.conv1(image), training=training))
        for block in self.blocks:
            x = block(x, training=training)
        return self.head(tf.reduce_mean(x, [1, 2]))


def residual_subclassed() -> Model:
    """The same as classes of the user's own, with a list of blocks."""
    return _finished(_Residual(), "image")


def _attention_block(name: str) -> Model:
    x = keras.Input((3, 4), name="tokens")
    y = layers.MultiHeadAttention(2, 2, name="attn")(x, x)
    z = layers.LayerNormalization(name="norm1")(layers.Add(name="add1")([x, y]))
    y = layers.Dense(4, name="ff2")(layers.Dense(5, "gelu", name="ff1")(z))
    return Model(x, layers.LayerNormalization(name="norm2")(layers.Add(name="add2")([z, y])), name=name)


def transformer() -> Model:
    """Functional: a block of attention inside an encoder."""
    tokens = keras.Input((3, 4), name="tokens")
    encoder = Model(tokens, _attention_block("block1")(tokens), name="encoder")
    x = keras.Input((3, 4), name="sequence")
    y = layers.Flatten(name="flat")(encoder(layers.Dense(4, name="embed")(x)))
    return _finished(Model(x, layers.Dense(2, name="head")(y)), "sequence")


class _Attention(layers.Layer):
    def __init__(self, name: str):
        super().__init__(name=name)
        self.attn = layers.MultiHeadAttention(2, 2, name="attn")
        self.norm1, self.norm2 = layers.LayerNormalization(name="norm1"), layers.LayerNormalization(name="norm2")
        self.ff1, self.ff2 = layers.Dense(5, "gelu", name="ff1"), layers.Dense(4, name="ff2")

    def call(self, x):
        x = self.norm1(x + self.attn(x, x))
        return self.norm2(x + self.ff2(self.ff1(x)))


class _Transformer(Model):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = layers.Dense(4, name="embed"), layers.Dense(2, name="head")
        self.blocks = {"first": _Attention("block1")}

    def call(self, sequence):
        x = self.blocks["first"](self.embed(sequence))
        return self.head(tf.reshape(x, [tf.shape(x)[0], -1]))


def transformer_subclassed() -> Model:
    """The same as classes, with a dict of blocks."""
    return _finished(_Transformer(), "sequence")


def lstm() -> Model:
    """Sequential: two LSTMs, the first of both directions."""
    return _finished(
        keras.Sequential(
            [
                keras.Input((3, 4), name="sequence"),
                layers.Bidirectional(layers.LSTM(2, return_sequences=True, name="lstm"), name="both"),
                layers.LSTM(3, name="lstm2"),
                layers.Dense(2, name="head"),
            ]
        ),
        "sequence",
    )


def gru() -> Model:
    """Functional: a GRU that gives its sequence and its state, and a layer for each of its steps."""
    x = keras.Input((3, 4), name="sequence")
    sequence, state = layers.GRU(3, return_sequences=True, return_state=True, unroll=True, name="gru")(x)
    steps = layers.TimeDistributed(layers.Dense(2, name="dense"), name="steps")(sequence)
    both = layers.Concatenate(name="both")([layers.Flatten(name="flat")(steps), state])
    return _finished(Model(x, layers.Dense(2, name="head")(both)), "sequence")


def unet() -> Model:
    """Functional: down, up, and a skip between."""
    x = keras.Input((4, 4, 2), name="image")
    down1 = layers.Conv2D(2, 3, padding="same", activation="softplus", name="down1")(x)
    down2 = layers.Conv2D(3, 3, padding="same", name="down2")(layers.AveragePooling2D(2, name="pool1")(down1))
    up1 = layers.Conv2DTranspose(2, 2, strides=2, name="up1")(down2)
    y = layers.Concatenate(name="skip1")([down1, up1])
    return _finished(Model(x, layers.Conv2D(1, 1, name="head")(y)), "image")


def nested() -> Model:
    """Sequential in Sequential, the inner one called twice."""
    inner = keras.Sequential([layers.Dense(4, "tanh", name="a"), layers.Dense(4, name="b")], name="inner")
    outer = [keras.Input((3, 4), name="sequence"), layers.Dense(4, name="first"), inner]
    functional = keras.Sequential(outer, name="outer")
    x = keras.Input((3, 4), name="sequence")
    return _finished(Model(x, layers.Dense(1, name="head")(inner(functional(x)))), "sequence")


MODELS: dict[str, Callable[[], Model]] = {
    builder.__name__: builder
    for builder in (
        residual,
        residual_subclassed,
        transformer,
        transformer_subclassed,
        lstm,
        gru,
        unet,
        nested,
    )
}


def functional() -> keras.Model:
    image = keras.Input((3,), name="image")
    a = layers.Dense(3, "tanh", name="a")
    x = layers.Dropout(0.5, name="drop")(layers.BatchNormalization(name="bn")(a(a(image))))
    return keras.Model(image, layers.Dense(2, name="b", activity_regularizer="l2")(x))


class Doubled(layers.Dense):
    """A layer that has its own way of being called."""

    def __call__(self, x: Any) -> Any:
        return super().__call__(x) * 2


class Compiled(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Doubled(3, name="a"), layers.Dense(2, name="b")
        self.idle = layers.Dense(1, name="idle")
        self.idle.build((None, 3))

    @tf.function
    def call(self, x: Any) -> Any:
        return self.b(eg.tag(tf.square(self.a(x)), "squared"))

    @tf.function(jit_compile=True)
    def score(self, x: Any) -> Any:
        return tf.reduce_sum(self.a(x)) ** 2
