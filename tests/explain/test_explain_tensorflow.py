"""What explain and check say on TensorFlow and how: texts, kinks, layers, and that nothing is disturbed."""

import pickle

import keras
import numpy as np
import pytest
import tensorflow as tf

import elementgrad as eg
from elementgrad._backends.tensorflow.explain_rules import TensorflowOp


@pytest.mark.parametrize(
    ("f", "at", "verdict", "cause", "value"),
    [
        (tf.abs, 0.0, "zero", "kink", 0.0),
        (lambda x: tf.clip_by_value(x, -1.0, 1.0), 1.0, "flows", None, 1.0),
        (lambda x: tf.maximum(x, 0.0), 0.0, "flows", None, 1.0),
        (tf.round, 0.5, "unconnected", "step-function", None),
        (lambda x: tf.where(x > 0, tf.sqrt(x), 0.0), 0.0, "zero", "masked", 0.0),
    ],
    ids=["abs", "clip", "max", "round", "where"],
)
def test_kinks_are_told_as_they_are_here(f, at, verdict, cause, value):
    found = eg.explain(f, tf.constant(at))
    assert (found.verdict, found.cause) == (verdict, cause)
    assert value is None or float(found.value) == value


def test_the_layer_is_named():
    bias = keras.initializers.Constant(-9.0)
    inner = keras.Sequential([keras.layers.Dense(2, "relu", bias_initializer=bias, name="deep")], name="inner")
    model = keras.Sequential([keras.Input((3,)), inner, keras.layers.Dense(1)])
    found = eg.explain(model, tf.ones([1, 3]), of="output[0, 0]", wrt="inner/deep/kernel[0, 0]")
    assert (found.cause, found.module) == ("dead-relu", "inner/deep")


@pytest.mark.parametrize("activation", [tf.nn.silu, tf.custom_gradient(lambda x: (x * x, lambda g: 2 * g * x))])
def test_a_result_of_a_written_rule_that_nothing_reads_is_not_used(activation):
    found = eg.explain(lambda x: tf.reduce_sum(tf.ones_like(activation(3 * x))), tf.ones(2), wrt="x[1]")
    assert (found.verdict, found.cause) == ("unconnected", "unused"), found


def test_the_text_is_a_sentence_a_line_and_a_fix():
    def f(x):
        return tf.reduce_sum(tf.stop_gradient(x) * 2.0)

    sentence, where, fix = str(eg.explain(f, tf.ones(3), wrt="x[1]")).split("\n")
    assert sentence == "output has no gradient with respect to x[1]: stop_gradient cuts the gradient."
    assert where == f"where: test_explain_tensorflow.py:{f.__code__.co_firstlineno + 1}, at stop_gradient"
    assert fix == "fix: leave tf.stop_gradient out, or apply it only where no gradient is wanted"


def test_entries_are_checked_against_differences():
    @tf.custom_gradient
    def cube(x):
        return x**3, lambda upstream: upstream * x**2

    assert eg.check(lambda x: tf.reduce_sum(x**3), tf.constant([0.5, 2.0]))
    wrong = eg.check(lambda x: tf.reduce_sum(cube(x)), tf.constant([0.5, 2.0]))
    assert not wrong
    assert wrong.operation == "cube"


def test_entries_of_a_model_are_checked_in_its_own_precision():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, "tanh", name="first"), keras.layers.Dense(1)])
    kernel = model.get_layer("first").kernel.numpy()
    found = eg.check(model, tf.constant([[0.5, -1.0, 2.0]]), of="output[0, 0]", wrt="first/kernel")
    assert found
    assert found.dtype == "float32"
    np.testing.assert_array_equal(model.get_layer("first").kernel.numpy(), kernel)


def test_numpy_is_as_it_was_and_works_while_code_is_watched():
    names = ("tanh", "add", "asarray", "array")
    before = [getattr(np, name) for name in names]
    weight, kept = tf.Variable([1.0, 2.0]), []

    def step():
        with tf.GradientTape() as tape:
            hidden = weight * 2
            assert np.add.reduce([1, 2]) == 3
            assert np.shape(hidden) == (2,)
            assert isinstance(np.ones(2, np.float32) * hidden, tf.Tensor)
            kept.append(pickle.dumps(np.tanh))
            loss = tf.reduce_sum(hidden)
        return tape.gradient(loss, weight)

    assert eg.explain(step).verdict == "flows"
    assert [getattr(np, name) for name in names] == before
    assert pickle.loads(kept[0]) is np.tanh
    assert not hasattr(tf.constant(1.0), "__array_function__")


def test_a_compiled_function_is_of_no_kind_whatever_its_name_is():
    op = TensorflowOp("sum", op_type="__forward_sum_12", inner=frozenset({"StopGradient", "Sum"}))
    assert (op.kind, op.inner_cause) == (None, "detached")
    assert TensorflowOp("sum", op_type="Sum").kind == "sum"
