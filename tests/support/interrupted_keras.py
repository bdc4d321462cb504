"""What interrupts of verbs on TensorFlow are tried with, and everything of it that they might leave changed."""

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.eager.record import could_possibly_record

import elementgrad as eg

NAME = "keras"
X = tf.constant([[0.1, 0.2, 0.3], [0.7, -0.4, 0.9]])
PLACES = ["first/kernel[0, 1]", "last/bias"]


def model():
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((3,), name="x"),
            keras.layers.Dense(4, name="first"),
            keras.layers.BatchNormalization(name="norm"),
            keras.layers.Dropout(0.3, name="drop", seed=1),
            keras.layers.Activation("tanh", name="act"),
            keras.layers.Dense(3, name="last"),
        ]
    )


def described(model):
    """Everything of a model that a verb might change."""
    found = []
    for layer in [model, *model.layers]:
        own = sorted(key for key in vars(layer) if not key.startswith("_tracker"))
        found.append((layer.name, type(layer), own, layer.trainable, len(layer._losses)))
        for variable in layer.weights:
            found.append((variable.path, id(variable), type(variable), type(variable._value), variable.trainable))
            found.append((sorted(vars(variable)), variable.numpy().tobytes()))
    return found


def surroundings():
    """Everything of TensorFlow and Keras that a verb might change."""
    from tensorflow.python.ops.resource_variable_ops import BaseResourceVariable

    return {
        "eager": tf.executing_eagerly(),
        "recording": could_possibly_record(),
        "callbacks": list(context.context().op_callbacks),
        "seeds": context.context()._rng.getstate(),
        "log": tf.get_logger().disabled,
        "replaced": [
            BaseResourceVariable.assign,
            vars(context.Context)["call_function"],
            *[vars(tf.GradientTape)[key] for key in ("_push_tape", "_pop_tape", "watch", "gradient")],
            vars(keras.Layer)["__call__"],
            vars(keras.Layer)["add_loss"],
            *[vars(kind)["call"] for kind in (keras.layers.Dense, keras.layers.BatchNormalization)],
            type(tf.function(lambda: 0)).__call__,
        ],
    }


def same(left, right):
    return np.array_equal(left, right) if tf.is_tensor(left) else str(left) == str(right)


def recorded(model):
    with eg.record(X) as rec:
        y = model(X)
    return rec.grad(eg.at(y)[0, 0], eg.at(X)[1])


READS = {
    "grad": lambda model: eg.grad(model, X, of="output[0, 0]", kwargs={"training": True}),
    "parameter": lambda model: eg.grad(model, X, of="output[0, 0]", wrt="first/kernel[1]"),
    "activation": lambda model: eg.grad(model, X, of="act[0, 0]", wrt="norm"),
    "columns": lambda model: eg.jacobian(model, X)[:, (0, ...)],
    "contributions": lambda model: eg.contributions(model, X, of="output[0, 0]", wrt="first").total,
    "top": lambda model: eg.top(model, lambda model: tf.reduce_sum(model(X)), 3),
    "record": recorded,
    "explain": lambda model: eg.explain(model, X, of="output[0, 0]", wrt="first/kernel[1, 1]").verdict,
    "check": lambda model: eg.check(model, X, of="output[0, 0]", wrt="last/kernel[0, 0:2]").verdict,
}


def trains(elements, model):
    """Hear losses, one for each place."""
    with tf.GradientTape() as tape:
        total = tf.reduce_sum(model(X, training=True))
    return elements.gradients(tape, total)


def change(elements):
    for variable in elements.variables:
        variable.assign_add(tf.ones_like(variable._value))
