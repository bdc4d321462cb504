"""A user of TensorFlow and Keras: a model, an argument, the verbs, and everything that these might leave changed."""

import random
from contextlib import suppress
from functools import partial
from operator import getitem

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.eager.record import could_possibly_record
from tensorflow.python.ops.resource_variable_ops import BaseResourceVariable, ResourceVariable

import elementgrad as eg
from elementgrad.callbacks import KerasWatch
from tests.support.ranked import HOW
from tests.support.user import JACOBIAN_READS, Failing, at_once, of_jacobian

NAME = "keras"
X = tf.constant([[0.1, 0.2, 0.3], [0.7, -0.4, 0.9]])
PLACES = ["first/kernel[0, 1]", "first/kernel[2]", "last/bias"]


class Fragile(keras.layers.Layer):
    """Passes on what it is given, or raises what the user has put there, in its forward or in its derivative."""

    def __init__(self, user, fragile, **options):
        super().__init__(**options)
        self.user, self.fragile = lambda: user, fragile  # Keras looks into attributes, and not into functions

    def call(self, x):
        self.user().reach("at once")
        return self.passed(x) if self.fragile else x  # TensorFlow never forgets a gradient of one's own in a graph

    @tf.custom_gradient
    def passed(self, x):
        def back(gradient):
            self.user().reach("on the way back")
            return gradient

        return tf.identity(x), back


def model(*others):
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((3,), name="x"),
            keras.layers.Dense(4, name="first"),
            keras.layers.BatchNormalization(name="norm"),
            keras.layers.Dropout(0.3, name="drop", seed=1),
            *others,
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
    seeds = getattr(context.context(), "_rng", None)  # made when TensorFlow first needs its context
    return {
        "eager": tf.executing_eagerly(),
        "recording": could_possibly_record(),
        "callbacks": list(context.context().op_callbacks),
        "seeds": seeds and seeds.getstate(),
        "log": tf.get_logger().disabled,
        "replaced": [
            BaseResourceVariable.assign,
            vars(context.Context)["call_function"],
            vars(context.context()).get("call_function"),
            *[vars(tf.GradientTape)[key] for key in ("_push_tape", "_pop_tape", "watch", "gradient")],
            vars(keras.Layer)["__call__"],
            vars(keras.Layer)["add_loss"],
            *[vars(kind)["call"] for kind in (keras.layers.Dense, keras.layers.BatchNormalization)],
            type(tf.function(lambda: 0)).__call__,
            *[{key: x for key, x in vars(v).items() if callable(x)} for v in (BaseResourceVariable, ResourceVariable)],
            *[getattr(np, key) for key in ("tanh", "add", "asarray", "array")],
        ],
        "stateless": keras.src.backend.in_stateless_scope(),
        "defaults": (keras.config.floatx(), keras.config.dtype_policy().name),
        "python's random numbers": random.getstate(),
    }


def same(left, right):
    return np.array_equal(left, right) if tf.is_tensor(left) else str(left) == str(right)


def recorded(model, x=X):
    with eg.record(x) as rec:
        y = model(x)
    return rec.grad(eg.at(y)[0, 0], eg.at(x)[1])


def stepped(model, x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(x, training=True) ** 2)
    gradients = tape.gradient(loss, model.trainable_variables)
    keras.optimizers.SGD().apply_gradients(zip(gradients, model.trainable_variables, strict=True))


def watched(model, x=X, factor=1.0):
    """Take a watched step, which changes nothing by itself."""
    values, watch = [variable.numpy() for variable in model.variables], KerasWatch(capture=None)
    model.compile(keras.optimizers.SGD(0.0), "mse", run_eagerly=True)
    try:
        with suppress(eg.WatchError):
            model.fit(x, factor * tf.ones((2, 3)), verbose=0, callbacks=[watch])
    finally:
        for variable, value in zip(model.variables, values, strict=True):
            variable.assign(value)
    return watch.error


READS = {
    "grad": lambda model, x=X: eg.grad(model, x, of="output[0, 0]", kwargs={"training": True}),
    "parameter": lambda model, x=X: eg.grad(model, x, of="output[0, 0]", wrt="first/kernel[1]"),
    "activation": lambda model, x=X: eg.grad(model, x, of="act[0, 0]", wrt="norm"),
    "cone": lambda model, x=X: eg.grad(model, x, of="output[0, 0]", cone=True),
    "value": lambda model, x=X: eg.value(model, x, of="output[0, 0]"),
    "field": lambda model, x=X: eg.field(model, x, of="output[0, 0]"),
    "columns": lambda model, x=X: eg.jacobian(model, x)[:, (0, ...)],
    "contributions": lambda model, x=X: eg.contributions(model, x, of="output[0, 0]", wrt="first").total,
    "top": lambda model, x=X: eg.top(model, lambda model: tf.reduce_sum(model(x)), 3),
    "audit": lambda model, x=X: eg.audit(model, lambda model: tf.reduce_sum(model(x, training=True) ** 2)),
    "audit-step": lambda model, x=X: eg.audit(model, lambda: stepped(model, x)),
    "record": recorded,
    "explain": lambda model, x=X: eg.explain(model, x, of="output[0, 0]", wrt="first/kernel[1, 1]").verdict,
    "check": lambda model, x=X: eg.check(model, x, of="output[0, 0]", wrt="last/kernel[0, 0:2]").verdict,
    "watch": watched,
    "watch-fault": partial(watched, factor=float("inf")),
}
"""Calls that the tests of interrupts make as well."""


class User(Failing):
    """A model and functions of a user's, with variables, a generator and losses that show whether they were touched."""

    def __init__(self, fragile=False):
        super().__init__()
        penalty = keras.layers.ActivityRegularization(l2=0.1, name="penalty")
        self.model, self.x = model(Fragile(self, fragile, name="fragile"), penalty), X
        self.model(X)
        tf.random.set_seed(0)
        self.variable, self.generator = tf.Variable(1.0), tf.random.Generator.from_seed(1)

    def state(self):
        return {
            "model": described(self.model),
            "argument": self.x.numpy().tolist(),
            "losses": [loss.numpy() for loss in self.model.losses],
            "variable": self.variable.numpy(),
            "generator": self.generator.state.numpy().tolist(),
            **surroundings(),
        }

    def losses(self, kind):
        """Return a function of a model with one or more losses, which draws random numbers."""

        def several(vector):
            yield tf.reduce_sum(vector)
            self.reach("half-way")

        def losses(model):
            vector = tf.reduce_sum(model(self.x) ** 2, 1)
            if kind == "generator":
                return several(vector)
            vector += tf.random.uniform([])
            self.reach("half-way")
            return tf.reduce_sum(vector) if kind == "number" else vector

        return losses

    def drawing(self, through=tf.identity):
        """Return a function that assigns to a variable, draws random numbers and runs the model in training."""

        def f(x):
            self.variable.assign_add(1.0)
            noise = self.generator.normal([3]) + tf.random.normal([3])
            return tf.reduce_sum(through(self.model(x, training=True)) * noise)

        return f

    def block(self, recording):
        with recording as rec:
            y = tf.reduce_sum(self.x**3)
            rec.grad(y, self.x)
            self.reach("at once")
        return rec.grad(y, self.x), rec.jacobian(y, self.x).dense()

    def reads(self, training):
        options = {"kwargs": {"training": training}}
        eg.jacobian(self.model, 3 * self.x, wrt="norm", **options)[(0, 0), (0, 0)]
        eg.grad(self.model, 3 * self.x, of="act[0, 0]", wrt=["norm/gamma", "first/kernel", "x"], **options)


VERBS = {
    **{f"jacobian: {name}": of_jacobian(read) for name, read in JACOBIAN_READS.items()},
    # A watched step trains the model.
    **{name: at_once(read) for name, read in READS.items() if name not in ("columns", "watch", "watch-fault")},
    "names": lambda user: lambda: eg.names(user.model, user.x),
    **{
        f"top: {by} of a {kind}": lambda user, by=by, kind=kind: lambda: eg.top(user.model, user.losses(kind), 5, by)
        for by in HOW
        for kind in ("number", "vector", "generator")
    },
    "activation and parameter": lambda user: lambda: user.reads(False),
    "activation and parameter in training": lambda user: lambda: user.reads(True),
    "hessian": lambda user: partial(getitem, eg.hessian(user.drawing(), user.x), ((0, 0), (1, 1))),
    "grad of a function that draws": lambda user: lambda: eg.grad(user.drawing(), user.x),
    "grad of a traced function that draws": lambda user: (
        lambda: eg.grad(tf.function(user.drawing(), autograph=False), user.x)
    ),
    "explain a function that draws": lambda user: lambda: eg.explain(user.drawing(), user.x).verdict,
    "record a block": lambda user: lambda: user.block(eg.record(user.x)),
    "explain-cut": lambda user: lambda: eg.explain(user.drawing(tf.stop_gradient), user.x).cause,
}


def trains(elements, model):
    """Hear losses, one for each place."""
    with tf.GradientTape() as tape:
        total = tf.reduce_sum(model(X, training=True))
    return elements.gradients(tape, total)


def change(elements):
    for variable in elements.variables:
        variable.assign_add(tf.ones_like(variable._value))
