"""Calls that are refused on TensorFlow."""

from functools import cache

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import elementgrad as eg
from tests.support import user_keras
from tests.support.keras_models import Compiled, functional
from tests.support.ranked import HOW
from tests.support.ranked_keras import drawn, mlp

X = tf.constant([0.7, -1.3, 0.4], tf.float64)
IMAGE = tf.constant([[1.0, -2.0, 0.5], [0.3, 0.7, -1.0]])
MODEL, LOSS = mlp()


def names():
    rows = {
        "aa": "no tensor is named 'aa'; nearest: a",
        "a": "'a' is 2 tensors here; name one: a#0, a#1",
        "a#2": "'a#2' is none of these: a#0, a#1",
        "a/kernle": "no tensor is named 'a/kernle'; nearest: a/kernel",
    }
    for wrt, text in rows.items():
        yield (
            f"wrt={wrt}",
            (
                lambda wrt=wrt: eg.grad(functional(), IMAGE, of="output[0, 0]", wrt=wrt),
                eg.PlaceError,
                text,
            ),
        )
    yield (
        "the wrong way round",
        (
            lambda: eg.grad(functional(), IMAGE, of="a#0[0, 0]", wrt="bn"),
            eg.UnconnectedError,
            'swap the two, of="bn" and wrt="a#0"',
        ),
    )
    yield (
        "a layer that is not called",
        (
            lambda: eg.grad(Compiled(), IMAGE, of="output[0, 0]", wrt="idle"),
            eg.PlaceError,
            "'idle' is not computed with these arguments",
        ),
    )


def reads():
    yield (
        "a tensor of another shape @ J",
        (
            lambda: tf.ones([2, 3, 4], tf.float64) @ eg.jacobian(lambda x: x * x, tf.ones([2, 3], tf.float64)),
            eg.FrameworkError,  # TensorFlow says what it had to say when it tried to make a tensor of the Jacobian
            "says why",
        ),
    )
    yield (
        "explain, traced",
        (
            lambda: tf.function(lambda x: eg.explain(lambda y: y * 2.0, x).value, autograph=False)(tf.ones(3)),
            eg.FrameworkError,
            r"inside tf\.function, where there are no numbers yet",
        ),
    )
    spec = tf.TensorSpec([None], tf.float64)
    yield (
        "grad, a size that is not known",
        (
            lambda: tf.function(lambda x: eg.grad(lambda x: tf.reduce_sum(x), x), input_signature=[spec])(X),
            eg.TracedError,
            r"the shape \(None,\) of x is not known while tracing",
        ),
    )
    yield (
        "contributions, not traceable",
        (
            lambda: eg.contributions(lambda x: x * float(x.numpy()[0]), X, of="output[0]"),
            eg.FrameworkError,
            "the function cannot be traced, so its uses of a tensor",
        ),
    )


@cache
def network():
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((3,)), layers.Dense(4, name="head")])


def routed(call):
    """Return a call with elements, a tape, and two losses that it has seen."""

    def refused():
        model = network()
        elements = eg.trainable(model, ["head/bias[0]", "head/kernel[0]"])
        try:
            with tf.GradientTape() as tape:
                losses = -tf.nn.log_softmax(model(IMAGE)[0])
                first, second = losses[2], losses[3]
            call(elements, tape, first, second)
        finally:
            elements.release()

    return refused


def training():
    rows = {
        "persistent": (
            lambda e, tape, first, second: e.gradients(tape, {"head/bias[0]": first, "head/kernel[0]": second}),
            eg.OptionError,
            "persistent=True",
        ),
        "no tape": (lambda e, tape, first, second: e.gradients(None, first), eg.OptionError, "not a tape"),
        "a vector": (
            lambda e, tape, first, second: e.gradients(tape, {"head/bias[0]": tf.stack([first, second])}),
            eg.OptionError,
            "one number",
        ),
        "not in training": (
            lambda e, tape, first, second: e.gradients(tape, {"head/bias[1]": first}),
            eg.PlaceError,
            "do not train here",
        ),
        "unconnected": (
            lambda e, tape, first, second: e.gradients(tape, {"head/bias[0]": tf.constant(1.0)}),
            eg.UnconnectedError,
            "does not depend on head/bias",
        ),
        "parameters": (lambda e, *_: e.parameters(), eg.FrameworkError, r"use elements\.variables"),
        "backward": (
            lambda e, *_: e.backward({}),
            eg.FrameworkError,
            r"use elements\.gradients\(tape, \{place: loss\}\)",
        ),
    }
    for name, (call, error, text) in rows.items():
        yield f"elements, {name}", (routed(call), error, text)


def prelude(model):
    """Two losses that share the first layer, and one between that does not."""
    hidden = model.layers[0](drawn(6, 5))
    yield tf.reduce_sum(hidden[0])
    yield tf.reduce_sum(model.layers[1].kernel.value ** 2)
    yield tf.reduce_sum(hidden[1]) * tf.reduce_sum(model.layers[1].kernel.value)


def writing(model):
    model.layers[0].kernel.assign(tf.zeros_like(model.layers[0].kernel))
    return LOSS(model)


LOSSES = {
    "detached": (lambda model: tf.stop_gradient(LOSS(model)), eg.UnconnectedError, "a loss has no gradient"),
    "one of them": (lambda model: [LOSS(model), tf.ones([])], eg.UnconnectedError, "a loss has no gradient"),
    "one of them, late": (
        lambda model: (LOSS(model)[i] if i else tf.ones([], tf.float64) for i in range(2)),
        eg.UnconnectedError,
        "a loss has no gradient",
    ),
    "a number": (lambda model: float(LOSS(model)[0]), eg.FrameworkError, "loss_fn gave float and no loss"),
    "past Keras": (
        lambda model: LOSS(model)[0] + tf.reduce_sum(model.layers[0].kernel._value),
        eg.FrameworkError,
        "the loss uses first/kernel past Keras",
    ),
    "shared": (lambda model: iter(tf.unstack(LOSS(model))), eg.FrameworkError, "return them in a list"),
    "shared in part": (prelude, eg.FrameworkError, "return them in a list"),
    "written": (writing, eg.FrameworkError, "loss_fn has written to first/kernel; write to a copy"),
    "NaN": (lambda model: LOSS(model) * np.nan, eg.PlaceError, r"\[\[0\].* has a .* of nan, which"),
    "too few": (
        lambda model: tf.reduce_sum(model.layers[2].bias.value),
        eg.UnconnectedError,
        "k=20 is more than the 3",
    ),
}


def rank(loss_fn, by):
    before = user_keras.described(MODEL), user_keras.surroundings()
    try:
        eg.top(MODEL, loss_fn, 20, by)
    finally:
        assert (user_keras.described(MODEL), user_keras.surroundings()) == before


def ranking():
    for name, (loss_fn, error, text) in LOSSES.items():
        for by in HOW:
            yield f"top, {by}, {name}", (lambda loss_fn=loss_fn, by=by: rank(loss_fn, by), error, text)
    rows = iter(range(20))
    yield (
        "top, losses that change",
        (
            lambda: eg.top(MODEL, lambda model: (LOSS(model)[0] * next(rows) for _ in range(2)), 5),
            eg.FrameworkError,
            "returns other losses when called again",
        ),
    )
    yield (
        "top, compiled",
        (
            lambda: tf.function(lambda: eg.top(MODEL, LOSS, 1) and tf.ones([]), autograph=False)(),
            eg.FrameworkError,
            r"outside of tf\.function",
        ),
    )


ROWS = dict([*names(), *reads(), *training(), *ranking()])
