"""Elements of Keras models that train: in every mode of `fit`, in every precision, nothing else moves."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import elementgrad as eg
from tests.support.keras_training import (
    PLACES,
    TARGETS,
    TOKENS,
    assert_only_places_moved,
    moved,
    state,
    tagger,
    variable_of,
)


@pytest.mark.parametrize(
    "options",
    [{"run_eagerly": True}, {"jit_compile": True}, {"jit_compile": False, "steps_per_execution": 3}],
    ids=lambda options: "+".join(options),
)
def test_fit_in_every_mode(options):
    walk = not options.get("jit_compile")  # which takes long to compile
    model = tagger(walk=walk)
    before = state(model)
    elements = eg.trainable(model, [place for place in PLACES if walk or "walk" not in place])
    assert {id(v) for v in model.trainable_variables} == {id(v) for v in elements.variables}
    model.compile(keras.optimizers.AdamW(0.01, weight_decay=0.1), "mse", **options)
    losses = model.fit(TOKENS, TARGETS, batch_size=8, epochs=2, verbose=0).history["loss"]
    assert losses[1] < losses[0]
    assert_only_places_moved(model, before)
    row = elements["table/embeddings[2]"].numpy()
    assert np.array_equal(row, variable_of(model, "embeddings").numpy()[2])
    plain = tagger(walk=walk)
    plain.set_weights(model.get_weights())
    plain.compile(loss="mse")
    np.testing.assert_allclose(
        plain.evaluate(TOKENS, TARGETS, verbose=0), model.evaluate(TOKENS, TARGETS, verbose=0), rtol=1e-5
    )


def test_training_is_that_of_the_whole_variable():
    """A place that is the whole variable trains as the variable itself would."""
    plain, model = tagger(), tagger()
    for layer in plain.layers:
        layer.trainable = layer.name in ("table", "head")
    eg.trainable(model, ["table/embeddings", "head/kernel", "head/bias"])
    for one in (plain, model):
        one.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")  # Adam would see sparse gradients of the one
        one.fit(TOKENS, TARGETS, batch_size=8, epochs=2, shuffle=False, verbose=0)
    for name, values in state(plain).items():
        np.testing.assert_allclose(state(model)[name], values, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_keeps_its_values_in_float32(dtype):
    model = tagger(dtype, walk=False)
    before = state(model)
    elements = eg.trainable(model, [place for place in PLACES if "walk" not in place])
    assert {variable.dtype for variable in elements.variables} == {"float32"}
    model.compile(keras.optimizers.SGD(1e-4), "mse")
    model.fit(TOKENS, TARGETS, verbose=0)
    kept = elements["table/embeddings[2]"].numpy()
    assert not np.array_equal(kept, before["table/embeddings"][2].astype(np.float32))
    assert np.array_equal(kept.astype(before["table/embeddings"].dtype), state(model)["table/embeddings"][2])
    elements.undo()
    assert not any(moved(model, before).values())


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_mixed_precision(policy):
    model = tagger(policy, walk=False)
    before = state(model)
    elements = eg.trainable(model, [place for place in PLACES if "walk" not in place])
    assert {variable.dtype for variable in elements.variables} == {"float32"}
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.AdamW(0.01, weight_decay=0.1), initial_scale=8.0)
    model.compile(optimizer, "mse")
    model.fit(TOKENS, TARGETS, batch_size=8, verbose=0)
    assert_only_places_moved(model, before)


def test_each_place_has_its_own_rate():
    model = tagger(walk=False)
    elements = eg.trainable(model, ["table/embeddings[2]", "head/kernel[:, 1]"])
    before = [variable.numpy() for variable in elements.variables]
    optimizers = [keras.optimizers.SGD(rate) for rate in (0.001, 0.1)]
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(TOKENS, training=True) - TARGETS) ** 2)
    gradients = tape.gradient(loss, elements.variables)
    for optimizer, gradient, variable in zip(optimizers, gradients, elements.variables, strict=True):
        optimizer.apply([gradient], [variable])
    for old, gradient, variable, rate in zip(before, gradients, elements.variables, (0.001, 0.1), strict=True):
        np.testing.assert_allclose(variable.numpy(), old - rate * gradient, rtol=1e-5, atol=1e-7)


@pytest.mark.skipif(
    not hasattr(keras.optimizers, "MultiOptimizer"), reason="this Keras has one optimizer for all in fit"
)
def test_each_place_has_its_own_rate_in_fit():
    model = tagger(walk=False)
    before = state(model)
    elements = eg.trainable(model, ["table/embeddings[2]", "head/kernel[:, 1]"])
    frozen, slow = keras.optimizers.SGD(0.0), keras.optimizers.AdamW(0.01, weight_decay=0.1)
    row = elements["table/embeddings[2]"]
    model.compile(keras.optimizers.MultiOptimizer(lambda variable: frozen if variable is row else slow), "mse")
    model.fit(TOKENS, TARGETS, batch_size=8, verbose=0)
    assert_only_places_moved(model, before, {"head/kernel": 5})
