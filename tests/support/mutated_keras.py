"""The mutation study on Keras: three models with random weights, and causes behind their layers."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

import elementgrad as eg
from tests.support.mutated import Mutation, Outcome, draw, judge

Tensor = Any


class Chain(keras.Model):
    """Layers one after the other; something may be done to what one of them returns."""

    def __init__(self, layers: list[keras.Layer], residual: bool = False):
        super().__init__()
        self.chain, self.residual = layers, residual
        self.mutated, self.mutation = "", None

    def call(self, x: Tensor, training: bool = False) -> Tensor:
        for layer in self.chain:
            before, x = x, layer(x, training=training)
            if layer.name == self.mutated:
                x = self.mutation(x)
            if self.residual and before.shape == x.shape:
                x = before + x
        return x


def dense() -> tuple[Chain, Any, Any]:
    layers = [
        keras.layers.Dense(12, name="first"),
        keras.layers.LayerNormalization(name="norm"),
        keras.layers.Activation("tanh", name="act"),
        keras.layers.Dense(12, activation="gelu", name="second"),
        keras.layers.Dropout(0.1, name="drop"),
        keras.layers.Dense(3, name="head"),
    ]
    return Chain(layers, residual=True), np.random.randn(16, 6).astype("float32"), np.random.randint(3, size=16)


def convolution() -> tuple[Chain, Any, Any]:
    layers = [
        keras.layers.Conv2D(8, 3, padding="same", name="conv1"),
        keras.layers.BatchNormalization(name="bn1"),
        keras.layers.Activation("silu", name="act1"),
        keras.layers.Conv2D(8, 3, padding="same", name="conv2"),
        keras.layers.Activation("tanh", name="act2"),
        keras.layers.GlobalAveragePooling2D(name="pool"),
        keras.layers.Dense(3, name="head"),
    ]
    return Chain(layers), np.random.randn(6, 8, 8, 2).astype("float32"), np.random.randint(3, size=6)


def recurrent() -> tuple[Chain, Any, Any]:
    layers = [
        keras.layers.Embedding(20, 6, name="embedding"),
        keras.layers.GRU(8, return_sequences=True, name="gru"),
        keras.layers.LayerNormalization(name="norm"),
        keras.layers.Dense(3, name="head"),
    ]
    return Chain(layers), np.random.randint(20, size=(5, 7)), np.random.randint(3, size=(5, 7))


MODELS = {"dense": dense, "convolution": convolution, "recurrent": recurrent}


@tf.custom_gradient
def zero_rule_of(x: Tensor) -> Any:
    return tf.identity(x), tf.zeros_like


@tf.custom_gradient
def no_rule_of(x: Tensor) -> Any:
    return tf.identity(x), lambda gradient: None


@tf.custom_gradient
def wrong_rule_of(x: Tensor) -> Any:
    return 1.5 * x, lambda gradient: -0.5 * gradient


def detach(x: Tensor) -> Tensor:
    return tf.stop_gradient(x)


def through_numpy(x: Tensor) -> Tensor:
    return tf.constant(x.numpy())


def argmax(x: Tensor) -> Tensor:
    return tf.cast(tf.argmax(x, -1)[..., None] + tf.zeros(x.shape, tf.int64), tf.float32)


def compare(x: Tensor) -> Tensor:
    return tf.cast(x > 0, tf.float32)


def cast(x: Tensor) -> Tensor:
    return tf.cast(tf.cast(10 * x, tf.int32), tf.float32)


def rounded(x: Tensor) -> Tensor:
    return tf.round(10 * x)


def dead_rectifier(x: Tensor) -> Tensor:
    return tf.nn.relu(x - 1e4)


def dead_bound(x: Tensor) -> Tensor:
    return tf.clip_by_value(x, 1e4, 2e4) * 1e-4


def saturated(x: Tensor) -> Tensor:
    return tf.sigmoid(x + 1e4)


def zero_factor(x: Tensor) -> Tensor:
    return x * tf.zeros(x.shape[-1])


def root(x: Tensor) -> Tensor:
    return tf.sqrt(x * 0)


def logarithm(x: Tensor) -> Tensor:
    return tf.math.log(x - x)


def division(x: Tensor) -> Tensor:
    return x / (x - tf.stop_gradient(x))


def unused(x: Tensor) -> Tensor:
    return tf.ones_like(x)


def assigned(x: Tensor) -> Tensor:
    state = tf.Variable(tf.zeros(x.shape))
    state.assign(x)
    return state + 0.0


def zero_rule(x: Tensor) -> Tensor:
    return zero_rule_of(x)


def no_rule(x: Tensor) -> Tensor:
    return no_rule_of(x)


def wrong_rule(x: Tensor) -> Tensor:
    return wrong_rule_of(x)


MUTATIONS = [
    Mutation("detach", detach, ["detached"]),
    Mutation("numpy", through_numpy, ["left-framework"]),
    Mutation("argmax", argmax, ["discrete"]),
    Mutation("comparison", compare, ["discrete"]),
    Mutation("integer cast", cast, ["discrete"]),
    Mutation("round", rounded, ["step-function"]),
    Mutation("dead rectifier", dead_rectifier, ["dead-relu"]),
    Mutation("dead bound", dead_bound, ["clamped"]),
    Mutation("saturated sigmoid", saturated, ["saturated"]),
    Mutation("zero factor", zero_factor, ["masked"]),
    Mutation("NaN by sqrt", root, ["singular", "masked-branch"]),
    Mutation("NaN by log", logarithm, ["singular", "masked-branch"]),
    Mutation("NaN by division", division, ["singular", "masked-branch"]),
    Mutation("unused", unused, ["unused"], has_line=False),
    Mutation("assigned", assigned, ["assigned-state"]),
    Mutation("rule of zeros", zero_rule, ["custom-rule"]),
    Mutation("rule of None", no_rule, ["custom-rule"]),
    Mutation("wrong rule", wrong_rule, ["custom-rule"], right=lambda x: 1.5 * x),
]
CROSS_ENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def make(kind: str, seed: int) -> tuple[Chain, Any]:
    keras.utils.set_random_seed(seed)
    model, x, y = MODELS[kind]()
    x = tf.constant(x)
    model(x)
    return model, lambda model, training=False: CROSS_ENTROPY(y, model(x, training=training))


def gradients_of(model: Chain, loss: Any) -> dict[str, Any]:
    with tf.GradientTape() as tape:
        value = loss(model)
    variables = model.trainable_variables
    arrays = [None if g is None else tf.convert_to_tensor(g).numpy() for g in tape.gradient(value, variables)]
    return {v.path.partition("/")[2]: g for v, g in zip(variables, arrays, strict=True)}


def broken_names(gradients: dict[str, Any], right: dict[str, Any]) -> set[str]:
    """Return the variables that a tape leaves without a usable gradient, or with another than the right one."""
    broken = {name for name, g in gradients.items() if g is None or not g.any() or not np.isfinite(g).all()}
    return broken | {name for name, g in right.items() if not np.array_equal(g, gradients[name])}


def audited(kind: str, mutation: Mutation, seed: int) -> Outcome:
    """Audit a model with a mutation behind a layer that the seed draws."""
    model, loss = make(kind, seed)
    model.mutated = draw(f"{seed} {kind} {mutation.name}", [layer.name for layer in model.chain])
    right = {}
    if mutation.right is not None:
        model.mutation = mutation.right
        right = gradients_of(model, loss)
    model.mutation = mutation.apply
    truth = broken_names(gradients_of(model, loss), right)
    return judge(f"{kind}, {mutation.name} after {model.mutated}", mutation, eg.audit(model, loss), truth)


def audit_healthy(kind: str, seed: int) -> eg.Audit:
    model, loss = make(kind, seed)
    return eg.audit(model, lambda model: loss(model, training=seed % 2 == 0))
