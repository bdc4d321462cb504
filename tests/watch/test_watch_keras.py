"""Watching `fit` of Keras: rules, bits, and what is left behind."""

import gc

import keras
import numpy as np
import pytest
import tensorflow as tf

import elementgrad as eg
from elementgrad.callbacks import KerasWatch


def fitted(*callbacks, steps_per_execution=1, scale=None, size=1):
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(3, name="first"), keras.layers.Dropout(0.2), keras.layers.Dense(1, name="last")]
    model = keras.Sequential([keras.Input((2,)), *layers])
    optimizer = keras.optimizers.Adam(0.1)
    if scale is not None:
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=scale)
    model.compile(optimizer, "mse", steps_per_execution=steps_per_execution)
    x = size * np.linspace(-1, 1, 24, dtype="f").reshape(12, 2)
    error = None
    try:
        model.fit(x, x[:, :1], batch_size=4, verbose=0, shuffle=False, callbacks=list(callbacks))
    except (eg.WatchError, KeyError) as caught:
        error = caught
    return model, error


@pytest.mark.parametrize("steps", [1, 2])
def test_a_healthy_fit_has_the_same_bits(steps):
    plain, watched = (
        fitted(steps_per_execution=steps)[0],
        fitted(KerasWatch(capture=None), steps_per_execution=steps)[0],
    )
    assert all(np.array_equal(x, y) for x, y in zip(plain.get_weights(), watched.get_weights(), strict=True))


def test_a_rule_stops_at_a_gradient(tmp_path):
    rule = {"last/kernel[1]": lambda g: tf.reduce_max(abs(g)) > 0}
    watch = KerasWatch(when=rule, capture=tmp_path / "nan.capture")
    model, error = fitted(watch)
    assert (error.step, error.cause, error.place) == (0, "rule", "last/kernel[1, 0]")
    assert "apply_gradients" not in vars(model.optimizer)
    assert watch.replay().same
    with pytest.raises(eg.PlaceError, match="no parameter is named 'lst/kernel'; nearest"):
        fitted(KerasWatch(when={"lst/kernel": lambda g: True}))


def test_a_rule_sees_gradients_that_are_not_scaled():
    def largest(scale, size=1):
        seen = []
        rule = {"last/kernel": lambda g: seen.append(float(tf.reduce_max(abs(g)))) or False}
        fitted(KerasWatch(when=rule, capture=None), scale=scale, size=size)
        return seen

    plain = largest(None)
    assert max(plain) > 0
    assert largest(2.0**10) == pytest.approx(plain, rel=1e-5)
    assert largest(1e38, size=100) == []  # it overflows, and all steps are skipped


@pytest.mark.parametrize("scale", [None, 2.0**10])
@pytest.mark.parametrize("how", ["apply_gradients", "apply", "apply to all", "an optimizer of its own"])
def test_a_rule_sees_the_true_gradients_in_a_training_step_of_the_users_own(how, scale):
    class Own(keras.Sequential):
        def train_step(self, data):
            optimizer = self.second if how == "an optimizer of its own" else self.optimizer
            with tf.GradientTape() as tape:
                loss = optimizer.scale_loss(tf.reduce_mean(tf.square(self(data[0]) - data[1])))
            gradients = tape.gradient(loss, self.trainable_variables)
            if how == "apply_gradients":
                optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            else:
                optimizer.apply(gradients, *([] if how == "apply to all" else [self.trainable_variables]))
            return {"loss": loss}

    def make_optimizer():
        optimizer = keras.optimizers.SGD(0.1)
        return optimizer if scale is None else keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=scale)

    keras.utils.set_random_seed(0)
    model, seen = Own([keras.Input((2,)), keras.layers.Dense(1, name="last", use_bias=False)]), []
    model.compile(make_optimizer(), "mse")
    model.second = make_optimizer()
    x, before = np.ones((4, 2), "f"), model.get_weights()[0]
    rule = {"last/kernel": lambda g: seen.append(g.numpy()) or False}
    watch = KerasWatch(when=rule, capture=None)
    model.fit(x, np.zeros((4, 1), "f"), batch_size=4, verbose=0, callbacks=[watch])
    assert np.allclose(before - 0.1 * seen[0], model.get_weights()[0], rtol=1e-5)
    assert not any("apply" in vars(each) for each in (model.optimizer, model.second))


def test_rules_are_not_about_steps_that_are_skipped_or_gradients_that_are_not_computed():
    model = keras.Sequential([keras.layers.Embedding(50, 3, name="table"), keras.layers.Dense(1, name="last")])
    model.layers[-1].trainable = False
    x = np.arange(12).reshape(6, 2)
    model(x)
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=1e38)
    model.compile(optimizer, "mse")
    seen = []
    rules = {
        "table/embeddings[1]": lambda g: seen.append("table") or float(tf.reduce_max(abs(g))) == 0,
        "last/kernel": lambda g: seen.append("last") or float(tf.reduce_max(abs(g))) == 0,
    }
    model.fit(x, 1e3 * np.ones((6, 2, 1)), verbose=0, epochs=12, callbacks=[KerasWatch(when=rules, capture=None)])
    assert 0 < len(seen) < 12
    assert set(seen) == {"table"}


def test_nothing_is_left_after_an_error_of_the_user():
    class Raising(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise KeyError("the user's own")

    watch = KerasWatch(capture=None)
    model, error = fitted(watch, Raising())
    assert isinstance(error, KeyError)
    del error
    gc.collect()  # Keras keeps the frame of fit in a cycle
    assert type(model.train_function).__name__ == "function"


class Unbuilt(keras.Model):
    def __init__(self):
        super().__init__()
        self.first, self.drop = keras.layers.Dense(3, activation="relu", name="first"), keras.layers.Dropout(0.2)
        self.last = keras.layers.Dense(1, name="last")

    def call(self, x, training=None):
        return self.last(self.drop(self.first(x), training=training))


class Pair(keras.Model):
    """Two models in one, which is never called itself."""

    def __init__(self):
        super().__init__()
        self.inner = keras.Sequential([keras.layers.Dense(1, name="inner")])

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self.inner(x) - y))
        variables = self.inner.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return {"loss": loss}


def fit_unbuilt(kind, *callbacks, bad=None):
    keras.utils.set_random_seed(0)
    model = kind()
    model.compile("adam", None if kind is Pair else "mse")
    x = np.linspace(-1, 1, 24, dtype="f").reshape(12, 2)
    y = x[:, :1].copy()
    if bad is not None:
        x[bad] = np.nan
    error = None
    try:
        model.fit(x, y, batch_size=4, verbose=0, shuffle=False, callbacks=list(callbacks))
    except eg.WatchError as caught:
        error = caught
    return model, error


@pytest.mark.parametrize("step", [0, 2])
def test_a_model_without_variables_before_its_first_step_is_watched(step, tmp_path):
    watch = KerasWatch(capture=tmp_path / "nan.capture")
    _, error = fit_unbuilt(Unbuilt, watch, bad=(4 * step + 1, 1))
    assert (error.step, error.place, error.cause) == (step, "x[1, 1]", "bad-input"), str(error)
    assert watch.replay().same


def test_a_model_that_is_built_for_the_watch_has_the_same_bits_and_rules():
    (plain, _), (watched, error) = fit_unbuilt(Unbuilt), fit_unbuilt(Unbuilt, KerasWatch(capture=None))
    assert error is None
    assert all(np.array_equal(x, y) for x, y in zip(plain.get_weights(), watched.get_weights(), strict=True))
    model, error = fit_unbuilt(Unbuilt, KerasWatch(when={"last/kernel[1]": lambda g: True}, capture=None))
    assert (error.step, error.cause, error.place) == (0, "rule", "last/kernel[1, 0]")
    assert "apply" not in vars(model.optimizer)
    with pytest.raises(eg.PlaceError, match="no parameter is named 'lst/kernel'; nearest"):
        fit_unbuilt(Unbuilt, KerasWatch(when={"lst/kernel": lambda g: True}))


def test_a_model_that_cannot_be_built_alone_is_watched_from_its_first_step(tmp_path):
    watch = KerasWatch(capture=tmp_path / "nan.capture")
    _, error = fit_unbuilt(Pair, watch, bad=(5, 1))
    assert (error.step, error.place, error.cause) == (1, "x[1, 1]", "bad-input"), str(error)
    assert watch.replay().same
    _, error = fit_unbuilt(Pair, KerasWatch(capture=None), bad=(1, 1))
    assert (error.step, error.cause) == (0, "unseen")
    assert "build it before fit" in error.evidence[0]
