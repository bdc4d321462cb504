"""Reads of Keras models: state that stays as it was, errors about names, compiled code."""

import threading
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from tensorflow.python.eager.polymorphic_function.polymorphic_function import Function

import elementgrad as eg
from tests.support.keras_models import Compiled, functional

X = tf.constant([[1.0, -2.0, 0.5], [0.3, 0.7, -1.0]])
UNTOUCHED = [(keras.Layer, "__call__"), (keras.layers.Dense, "call"), (keras.Layer, "add_loss"), (Function, "__call__")]


@pytest.fixture(autouse=True)
def _untouched():
    before = [vars(owner)[name] for owner, name in UNTOUCHED]
    yield
    assert [vars(owner)[name] for owner, name in UNTOUCHED] == before


def test_several_outputs_are_parts():
    model = keras.Sequential([keras.Input((2, 3)), layers.LSTM(2, return_state=True, name="lstm")])
    x = tf.ones((1, 2, 3))
    with pytest.raises(eg.PlaceError, match="'lstm' is 3 tensors here; name one: lstm:0, lstm:1, lstm:2"):
        eg.grad(model, x, of="output.0[0, 0]", wrt="lstm")
    assert eg.grad(model, x, of="output.0[0, 1]", wrt="lstm:0[0]").numpy().tolist() == [0, 1]


def test_two_layers_of_one_name():
    class Twins(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = layers.Dense(3, name="d"), layers.Dense(3, name="d")

        def call(self, x: Any) -> Any:
            return self.two(self.one(x))

    model = Twins()
    model(X)
    with pytest.raises(eg.PlaceError, match="2 layers are named 'd'; give them different names"):
        eg.grad(model, X, of="output[0, 0]", wrt="d")
    with pytest.raises(eg.PlaceError, match="2 variables are named 'd/kernel'"):
        eg.grad(model, X, of="output[0, 0]", wrt="d/kernel")


@pytest.mark.parametrize("wrap", [lambda f: f, tf.function], ids=["as it is", "compiled"])
def test_compiled_models_methods_and_layers_of_another_call(wrap):
    model = Compiled()
    model(X)
    a = (X @ model.a.kernel + model.a.bias) * 2
    slope = 2 * a[0] * model.b.kernel[:, 1]
    f = wrap(model)
    np.testing.assert_allclose(eg.grad(f, X, of="output[0, 1]", wrt="a[0]"), slope, rtol=1e-6)
    np.testing.assert_allclose(eg.grad(f, X, of="output[0, 1]", wrt="squared[0]"), model.b.kernel[:, 1], rtol=1e-6)
    np.testing.assert_allclose(eg.grad(f, X, of="a[0, 1]", wrt="x[0]"), 2 * model.a.kernel[:, 1], rtol=1e-6)
    np.testing.assert_allclose(eg.grad(model.score, X, wrt="a[1]"), [2 * tf.reduce_sum(a)] * 3, rtol=1e-5)
    np.testing.assert_allclose(eg.grad(model.call, X, of="output[0, 1]", wrt="a[0]"), slope, rtol=1e-6)
    inside = tf.function(lambda x: eg.grad(f, x, of="output[0, 1]", wrt="a[0]"))
    np.testing.assert_allclose(inside(X), slope, rtol=1e-6)


def test_inputs_go_by_the_names_of_a_functional_model():
    image, text = keras.Input((3,), name="image"), keras.Input((3,), name="text")
    parts = [layers.Dense(1, name="a")(image), layers.Dense(1, name="b")(text)]
    model = keras.Model([image, text], layers.Add(name="sum")(parts))
    expected = model.get_layer("b").kernel[:, 0]
    for given in ([X, 2 * X], {"image": X, "text": 2 * X}):
        np.testing.assert_array_equal(eg.grad(model, given, of="output[0, 0]", wrt="text[0]"), expected)
    np.testing.assert_array_equal(eg.grad(model, [X, X], of="output[0, 0]", wrt="inputs.1[0]"), expected)


def test_variables_go_by_their_own_path_or_themselves_and_stay_parameters_when_frozen():
    inner = keras.Sequential([keras.Input((3,)), layers.Dense(2, name="d")], name="inner")
    model = keras.Sequential([keras.Input((3,)), inner])
    inner.trainable = False
    kernel = inner.get_layer("d").kernel
    assert [row.kind for row in eg.names(model, X)][-2:] == ["parameter"] * 2
    for wrt in ("inner/d/kernel", kernel, kernel.value, eg.at("inner/d/kernel", kind="parameter")):
        np.testing.assert_array_equal(eg.grad(model, X, of="output[0, 0]", wrt=wrt)[:, 0], X[0])


def test_keras_masks_stay_on_captured_tensors():
    model = keras.Sequential(
        [keras.Input((3,)), layers.Embedding(5, 2, mask_zero=True, name="embed"), layers.LSTM(2, name="lstm")]
    )
    ids = tf.constant([[1, 2, 0], [3, 0, 0]])
    J = eg.jacobian(model, ids, wrt="embed")
    np.testing.assert_array_equal(J.value, model(ids))
    assert not np.any(J[(0, 0), (0, 2)])
    assert np.any(J[(0, 0), (0, 1)])


def test_threads_capture_their_own_tags():
    models, found = [functional() for _ in range(4)], {}

    def read(number: int) -> None:
        found[number] = eg.grad(models[number], X, of="output[0, 0]", wrt="bn[0]")

    threads = [threading.Thread(target=read, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, model in enumerate(models):
        np.testing.assert_allclose(found[number], model.get_layer("b").kernel[:, 0], rtol=1e-6)


def test_a_mixed_policy_keeps_the_dtypes():
    image = keras.Input((3,), name="image")
    model = keras.Model(image, layers.Dense(2, name="a", dtype="mixed_float16")(image))
    assert eg.grad(model, X, of="output[0, 0]", wrt="a/kernel").dtype == tf.float32
    assert eg.grad(model, X, of="output[0, 0]", wrt="a").dtype == tf.float16


def looped(x: Any) -> Any:
    for _ in tf.range(3):
        x = eg.tag(x * 2, "t")
    return x


def test_a_tag_in_a_loop_counts_steps_and_has_no_single_value_in_a_graph():
    compiled = tf.function(looped)
    assert eg.grad(compiled, X, of="output[0, 0]", wrt="t#1[0, 0]") == 2
    with pytest.raises(eg.PlaceError, match="'t' is computed inside a loop or branch of a graph"):
        tf.function(lambda x: eg.grad(compiled, x, of="output[0, 0]", wrt="t"))(X)
    with pytest.raises(eg.PlaceError, match="'t' is computed inside a loop or branch of a graph"):
        eg.grad(lambda x: tf.vectorized_map(lambda row: eg.tag(row * 2, "t"), x), X, of="t")


SPEC = tf.TensorSpec([None])


@tf.function(input_signature=[SPEC])
def doubled(x: Any) -> Any:
    return x * 2


@tf.function(input_signature=[{"a": SPEC, "b": (SPEC, SPEC)}, tf.TensorSpec([2])])
def nested(parts: Any, scale: Any = (2.0, 3.0)) -> Any:
    return (parts["a"] + parts["b"][0] * 2 + parts["b"][1] * 3) * scale * 2


@tf.function
def plain(x: Any, *more: Any, scale: Any, **others: Any) -> Any:
    return x @ scale * (2 if tf.is_tensor(scale) else 0) + more[0] * others["last"]


MATRIX = np.array([[1, 2], [3, 4]], np.float32)


class Signed(layers.Layer):
    @tf.function(input_signature=[SPEC])
    def call(self, x: Any) -> Any:
        return x * 2


@pytest.mark.parametrize(
    "function",
    [
        lambda x: doubled([x[0, 0], x[0, 1]]),
        lambda x: doubled(x=[x[0, 0], x[0, 1]]),
        lambda x: nested({"a": [x[0, 0], 1.0], "b": (x[0], [1.0, x[0, 1]])}),
        lambda x: nested(scale=[x[0, 0], 1.0], parts={"a": x[0], "b": (x[1], [1.0, 2.0])}),
        lambda x: plain(x, x, scale=MATRIX, last=MATRIX),
        lambda x: Signed()([x[0, 0], x[0, 1]]),
    ],
    ids=["list", "keyword", "structure and default", "keywords", "arrays", "method"],
)
def test_compiled_functions_get_their_arguments_as_tensorflow_gives_them(function):
    x = tf.constant(MATRIX) / 10
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        y = function(x)
    expected = tape.jacobian(y, x, experimental_use_pfor=False)
    tagged = eg.jacobian(lambda x: eg.tag(function(eg.tag(x, "in")), "out"), x, of="out", wrt="in")
    np.testing.assert_allclose(tagged.value, y, rtol=1e-6)
    np.testing.assert_allclose(tagged.dense(), expected, rtol=1e-6)
    shares = eg.contributions(function, x)
    np.testing.assert_allclose(shares.total, expected, rtol=1e-6)


def test_layers_built_by_the_first_run_are_there_for_the_second():
    model = keras.Sequential([keras.layers.Dense(2, name="a")])
    with pytest.raises(eg.PlaceError, match="'a/kernel' did not exist before this first run, which has built it; call"):
        eg.grad(model, tf.ones((1, 3)), of="output[0, 0]", wrt="a/kernel")
    assert eg.grad(model, tf.ones((1, 3)), of="output[0, 0]", wrt="a/kernel").shape == (3, 2)
