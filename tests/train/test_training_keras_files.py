"""Elements of Keras models that train: files load both ways, copies are plain models, and so is what is released."""

import copy

import jax.numpy as jnp
import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import elementgrad as eg
from tests.support import keras_models
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


def test_weight_files_load_both_ways(tmp_path):
    model, plain = tagger(), tagger()
    elements = eg.trainable(model, PLACES)
    for variable in elements.variables:
        variable.assign_add(tf.ones_like(variable))
    model.save_weights(tmp_path / "trained.weights.h5")
    plain.load_weights(tmp_path / "trained.weights.h5")
    assert not any(moved(plain, state(model)).values())
    other = keras_models.drawn(tagger(), seed=5)
    other.save(tmp_path / "other.keras")
    other.save_weights(tmp_path / "other.weights.h5")
    for file in ("other.keras", "trained.weights.h5", "other.weights.h5"):
        model.load_weights(tmp_path / file)
        assert not any(moved(model, state(plain if "trained" in file else other)).values())
    assert np.array_equal(elements["table/embeddings[2]"], variable_of(other, "embeddings").numpy()[2])
    elements["head/kernel[:, 1]"].assign(np.zeros(5))
    elements.undo()  # another model was loaded: what its elements were is what was loaded
    assert not any(moved(model, state(other)).values())


def test_loading_weights_of_the_same_training_keeps_the_originals(tmp_path):
    model = tagger()
    before = state(model)
    elements = eg.trainable(model, PLACES)
    elements["norm/gamma[::2]"].assign([5.0, 6.0, 7.0])
    model.save_weights(tmp_path / "trained.weights.h5")
    saved = state(model)
    elements["norm/gamma[::2]"].assign([0.0, 0.0, 0.0])
    model.load_weights(tmp_path / "trained.weights.h5")
    assert not any(moved(model, saved).values())
    assert elements["norm/gamma[::2]"].numpy().tolist() == [5.0, 6.0, 7.0]
    elements.undo()
    assert not any(moved(model, before).values())


def test_whole_models_are_saved_and_copied_as_plain_ones(tmp_path):
    model = tagger()
    elements = eg.trainable(model, PLACES)
    elements["head/kernel[:, 1]"].assign(np.ones(5))
    model.save(tmp_path / "model.keras")
    checkpoint = tf.train.Checkpoint(model=model).save(str(tmp_path / "checkpoint"))
    restored = tagger()
    tf.train.Checkpoint(model=restored).restore(checkpoint).expect_partial()
    for other in (keras.models.load_model(tmp_path / "model.keras"), copy.deepcopy(model), restored):
        assert [type(layer) for layer in other.layers] == [type(layer) for layer in tagger().layers]
        assert not any(moved(other, state(model)).values())
        assert len(other.trainable_variables) == len(tagger().trainable_variables)
    assert len(keras.models.clone_model(model).trainable_variables) == len(tagger().trainable_variables)


def test_old_formats_hold_the_variables_of_the_plain_model(tmp_path):
    inner = keras.Sequential([keras.Input((4,)), layers.Dense(5, name="a")], name="inner")
    model = keras.Sequential([keras.Input((4,)), inner, layers.Dense(3, name="b")])
    eg.trainable(model, ["inner/a/kernel[0, 0]", "b/bias"])
    model.compile("sgd", "mse")
    model.fit(np.ones((4, 4)), np.ones((4, 3)), verbose=0)
    model.save(tmp_path / "model.h5")
    loaded = keras.models.load_model(tmp_path / "model.h5", compile=False)
    assert all(map(np.array_equal, loaded.get_weights(), model.get_weights()))


def test_values_written_by_hand_count():
    model = tagger()
    elements = eg.trainable(model, ["head/kernel[:, 1]", "head/bias[0]"])
    kernel = variable_of(model, "head/kernel")
    kernel.assign(np.full((5, 3), 2.0))
    assert elements["head/kernel[:, 1]"].numpy().tolist() == [2.0] * 5
    elements["head/kernel[:, 1]"].assign_sub([1.0, 0, 0, 0, 0])
    assert kernel.numpy()[0].tolist() == [2.0, 1.0, 2.0]
    model.set_weights([np.zeros(w.shape) for w in model.get_weights()])
    assert elements["head/bias[0]"].numpy().tolist() == [0.0]


def test_release_gives_the_plain_model_back():
    model = tagger()
    model.get_layer("mix").trainable = False
    plain = [(type(layer), layer.trainable) for layer in model.layers]
    flags = [variable.trainable for variable in model.weights]
    kinds = [(type(variable), type(variable._value)) for variable in model.weights]
    elements = eg.trainable(model, PLACES, keep=[])
    assert not any(variable.trainable for variable in model.weights)
    assert isinstance(model.get_layer("head"), layers.Dense)
    assert "Dense" in repr(model.get_layer("head"))
    elements["head/kernel[:, 1]"].assign(np.ones(5))
    after = state(model)
    leaf = elements["head/kernel[:, 1]"]
    elements.release()
    assert [(type(layer), layer.trainable) for layer in model.layers] == plain
    assert [variable.trainable for variable in model.weights] == flags
    assert [(type(variable), type(variable._value)) for variable in model.weights] == kinds
    assert all("_elementgrad" not in vars(layer) for layer in model.layers)
    leaf.assign(np.zeros(5))
    assert not any(moved(model, after).values())
    model.compile("adam", "mse")
    model.fit(TOKENS, TARGETS, verbose=0)
    assert all(count for name, count in moved(model, after).items() if "mix" not in name)
    with pytest.raises(eg.PlaceError, match="do not train"):
        elements.variables  # noqa: B018
    with pytest.raises(eg.PatchError, match="was written over or taken back since; there is nothing to undo"):
        elements.undo()


@pytest.mark.parametrize("keep", [False, True])
def test_release_without_the_values_at_once_or_later(keep):
    model = tagger()
    before = state(model)
    elements = eg.trainable(model, PLACES)
    elements["head/kernel[:, 1]"].assign(np.ones(5))
    elements.release(keep=keep)
    assert any(moved(model, before).values()) is keep
    elements.undo()
    assert not any(moved(model, before).values())


def test_a_second_call_adds_places_and_others_train_beside():
    model = tagger()
    before = state(model)
    first = eg.trainable(model, "head/kernel[:, 1]")
    model.get_layer("head").trainable = True
    second = eg.trainable(model, ["head/kernel[0, 0]", "norm/gamma"])
    expected = {variable.path for variable in [*first.variables, *second.variables]} | {"head/bias"}
    assert {variable.path for variable in model.trainable_variables} == expected
    model.compile("adam", "mse")
    model.fit(TOKENS, TARGETS, verbose=0)
    assert_only_places_moved(model, before, {"head/kernel": 6, "head/bias": 3, "gamma": 6})
    first.release(keep=False)
    assert {variable.path for variable in model.trainable_variables} == {v.path for v in second.variables} | {
        "head/bias"
    }
    second.release()
    assert all(variable.trainable for variable in model.weights)


def test_parameters_frozen_meanwhile_stay_frozen():
    model = tagger()
    elements = eg.trainable(model, PLACES)
    model.get_layer("head").trainable = False
    elements.release()
    assert not any(variable.trainable for variable in model.get_layer("head").weights)
    assert all(variable.trainable for variable in model.get_layer("table").weights)


def test_stateless_calls_take_the_values_that_they_are_given():
    model = tagger("float64")
    eg.trainable(model, ["table/embeddings[2]", "head/kernel[:, 1]"])
    given = [variable.value + 1 for variable in model.trainable_variables]
    fixed = [variable.value for variable in model.non_trainable_variables]
    with tf.GradientTape() as tape:
        tape.watch(given)
        lent = tf.reduce_sum(model.stateless_call(given, fixed, TOKENS)[0] ** 2)
    found = tape.gradient(lent, given)
    for variable, value in zip(model.trainable_variables, given, strict=True):
        variable.assign(value)
    with tf.GradientTape() as tape:
        held = tf.reduce_sum(model(TOKENS) ** 2)
    np.testing.assert_allclose(lent, held, rtol=1e-12)
    for one, other in zip(found, tape.gradient(held, model.trainable_variables), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9)


class Row(keras.layers.Layer):
    """A layer that holds one variable, of its own or of another layer."""

    def __init__(self, name, w=None):
        super().__init__(name=name)
        self.w = self.add_weight(name="w", shape=(3,), initializer="ones") if w is None else w


class Rows(keras.Model):
    def __init__(self, together):
        super().__init__(name="rows")
        self.table = Row("table")
        self.head = Row("head", self.table.w if together else None)


@pytest.mark.parametrize("there", [True, False])
def test_variables_that_are_tied_on_one_side_alone_are_refused_untouched(there, tmp_path):
    made, given, same = Rows(there), Rows(not there), Rows(there)
    elements = eg.trainable(made, "table/w[1]")
    elements["table/w[1]"].assign([2.0])
    elements.save(tmp_path / "patch.safetensors")
    text = "table/w and head/w are one tensor, and here they are not" if there else "it would change both"
    with pytest.raises(eg.PatchError, match=text):
        eg.apply(given, tmp_path / "patch.safetensors")
    assert given.table.w.numpy().tolist() == given.head.w.numpy().tolist() == [1.0, 1.0, 1.0]
    eg.apply(same, tmp_path / "patch.safetensors")
    assert same.table.w.numpy().tolist() == [1.0, 2.0, 1.0]
    assert same.head.w.numpy().tolist() == [1.0, 2.0 if there else 1.0, 1.0]


def test_arrays_of_jax_are_values_and_never_tied(tmp_path):
    array = jnp.ones(3)
    elements = eg.trainable({"table": array, "head": array}, "table[1]")
    elements.values = {"table[1]": jnp.array([2.0])}
    elements.save(tmp_path / "patch.safetensors")
    for params in ({"table": array, "head": array}, {"table": array, "head": jnp.ones(3)}):
        merged = eg.apply(params, tmp_path / "patch.safetensors").merge()
        assert (merged["table"].tolist(), merged["head"].tolist()) == ([1.0, 2.0, 1.0], [1.0, 1.0, 1.0])
