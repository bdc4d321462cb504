"""The uses that a TensorFlow function makes of a tensor: found in its graph, and their shares against other uses
being stopped by hand."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import elementgrad as eg
from elementgrad._backends.tensorflow.tensor import backend
from elementgrad._names.call import ONLY_OUTPUT, BoundCall, PartialCall
from elementgrad._place.place import Place
from tests.support.made import counts

X = tf.constant([0.7, -1.3, 0.4], tf.float64)
UNARY: dict[str, Callable[[Any], Any]] = {
    "sin": tf.sin,
    "square": tf.square,
    "half": lambda x: x[:2],
    "sum": tf.reduce_sum,
    "shape": lambda x: tf.cast(tf.size(x), tf.float64),
    "zeros": tf.zeros_like,
    "stopped": tf.stop_gradient,
}
BINARY: dict[str, Callable[[Any, Any], Any]] = {"add": tf.add, "mul": tf.multiply, "sub": tf.subtract}


def shares(f: Any, x: Any, wrt: str) -> tuple[list[Any], list[Any], Any]:
    """The uses of a tensor, the share of each in the gradient of the sum of the output, and the whole gradient."""
    call = BoundCall(f, [x], {})
    source = call.find_source(Place.parse(wrt))
    linear, uses = backend.load("read").uses(PartialCall(call, [source], [ONLY_OUTPUT]), [source.tensor], 0)
    seeds = tf.ones([1, *linear.outputs[0].shape], linear.outputs[0].dtype)
    total = seeds[0] @ eg.jacobian(f, x, wrt=wrt, unconnected="zero")
    return uses, [share[0] for share in linear.vjp(0, range(len(uses)), seeds)] if uses else [], total


@st.composite
def expressions(draw: st.DrawFn) -> list[tuple[str, int, int]]:
    """Steps, each an operation and the numbers of the values that it takes; the first value is the tensor itself."""
    steps = []
    for count in range(1, draw(st.integers(2, 7))):
        which = st.integers(0, count - 1) | st.just(0)
        steps.append((draw(st.sampled_from([*UNARY, *BINARY, *BINARY])), draw(which), draw(which)))
    return steps


def evaluated(steps: list[tuple[str, int, int]], use: Callable[[], Any]) -> Any:
    """An expression; each time that it uses the tensor, it asks for it."""
    values: list[Any] = [None]

    def value(number: int) -> Any:
        return use() if number == 0 else values[number]

    for operation, first, second in steps:
        if operation in UNARY:
            values.append(UNARY[operation](value(first)))
        else:
            a, b = value(first), value(second)
            short = {2, 3} <= {*a.shape, *b.shape}  # a half does not fit a whole
            values.append(BINARY[operation](tf.reduce_sum(a), tf.reduce_sum(b)) if short else BINARY[operation](a, b))
    return tf.add_n([tf.reduce_sum(value) for value in values[1:]])


@given(expressions())
@settings(max_examples=counts(30))
def test_made_expressions_split_into_their_uses(steps):
    uses, found, total = shares(lambda x: evaluated(steps, lambda: x), X, "x")
    expected = []
    asked: list[None] = []
    evaluated(steps, lambda: asked.append(None) or X)
    for number in range(len(asked)):
        with tf.GradientTape() as tape:
            tape.watch(X)
            seen: list[None] = []
            y = evaluated(
                steps,
                lambda seen=seen, number=number: (
                    seen.append(None) or (X if len(seen) - 1 == number else tf.stop_gradient(X))
                ),
            )
        expected.append(tape.gradient(y, X))
    expected = [share for share in expected if share is not None]
    assert len(found) == len(uses) == len(expected)
    for share, by_hand in zip(found, expected, strict=True):
        np.testing.assert_allclose(share, by_hand, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(sum(found, tf.zeros_like(X)), total, rtol=1e-12, atol=1e-12)


def test_each_use_has_an_operation_and_a_line():
    def f(x):
        y = x * x
        return y + x[1] + tf.reduce_sum(x)

    first = f.__code__.co_firstlineno
    uses, found, _ = shares(f, X, "x")
    assert [use.operation for use in uses] == ["mul", "mul", "strided_slice", "sum"]
    assert [use.where for use in uses] == [f"{__file__.rpartition('/')[2]}:{first + line}" for line in (1, 1, 2, 2)]
    np.testing.assert_allclose(found[2], [0, 3, 0])


def test_uses_inside_compiled_functions_and_of_tagged_values():
    inner = tf.function(lambda x: eg.tag(tf.sin(x), "h") * x)
    assert [use.operation for use in shares(lambda x: inner(x) + x, X, "x")[0]] == ["sin", "mul", "add"]
    uses, found, total = shares(lambda x: tf.square(inner(x)), X, "h")
    assert [use.operation for use in uses] == ["mul"]
    np.testing.assert_allclose(found[0], total)
    assert [use.operation for use in shares(lambda x: x, X, "x")[0]] == ["identity"]


def test_uses_of_what_a_model_holds():
    dense = keras.layers.Dense(3, name="d", dtype="float64")
    model = keras.Sequential([keras.Input((3,), dtype="float64"), dense, dense])
    x = tf.reshape(X, (1, 3))
    uses, found, total = shares(model, x, "d/kernel")
    assert [use.operation for use in uses] == ["mat_mul", "mat_mul"]
    np.testing.assert_allclose(sum(found), total, rtol=1e-12)
    assert [use.operation for use in shares(model, x, "d#0")[0]] == ["mat_mul"]


def test_rows_gathered_from_a_variable_are_a_use():
    class Rows(keras.layers.Layer):
        def build(self, _):
            self.table = self.add_weight(shape=(4, 3), name="table", dtype="float64")

        def call(self, ids):
            return tf.gather(self.table.value, ids) ** 2 + tf.reduce_sum(self.table.value)

    layer = Rows()
    layer.build(None)
    layer.table.assign(np.arange(12.0).reshape(4, 3))
    uses, found, total = shares(layer, tf.constant([1, 3, 1]), "table")
    assert [use.operation for use in uses] == ["resource_gather", "sum"]
    np.testing.assert_allclose(sum(found), total, rtol=1e-12)
    assert found[0][1, 2] == 2 * 2 * 5


class Held(keras.layers.Layer):
    """A function of a variable that it holds and of its argument."""

    def __init__(self, function: Callable[[Any, Any], Any]):
        super().__init__(dtype="float64")
        self.function = function
        self.w = self.add_weight(shape=(3,), name="w", initializer="ones")

    def call(self, x: Any) -> Any:
        return self.function(self.w.value, x)


def identity_beside_others(w: Any, x: Any) -> Any:
    read = tf.convert_to_tensor(w)
    return tf.identity(read) * x + 2 * read * x


@pytest.mark.parametrize(
    ("function", "operations"),
    [
        (identity_beside_others, ["identity", "mul"]),
        (lambda w, x: w.read_value() * x, ["mul"]),
        (lambda w, x: tf.identity(w) * x + w, ["mul", "add"]),
        (lambda w, x: tf.convert_to_tensor(w), ["identity"]),
        (lambda w, x: tf.gather(w, [0, 2, 0]) * x, ["resource_gather"]),
        (lambda w, x: tf.gather_nd(w, [[0], [2], [0]]) * x, ["resource_gather_nd"]),
        (lambda w, x: tf.cast(tf.cast(w, tf.float32), tf.float64) * x, ["cast"]),
        (lambda w, x: w[1] * x + tf.cast(tf.shape(w)[0], w.dtype), ["strided_slice"]),
        (lambda w, x: tf.vectorized_map(lambda row: row * w, tf.stack([x, x])), ["mul"]),
        (lambda w, x: (w.assign_add(x), w * x)[1], ["mul"]),
    ],
    ids=["identity", "read", "copy", "return", "gather", "gather_nd", "cast", "slice", "map", "write"],
)
def test_shares_of_a_variable_add_up_to_its_gradient(function, operations):
    held = Held(function)
    found = eg.contributions(held, X, wrt="w")
    assert [share.operation for share in found] == operations
    np.testing.assert_allclose(found.total, eg.jacobian(held, X, wrt="w").dense(), rtol=1e-6)


def test_concrete_functions_are_one_operation():
    double = tf.function(lambda x: tf.sin(x) * x).get_concrete_function(tf.TensorSpec([3], tf.float64))
    held = Held(lambda w, x: double(x) * w)
    for wrt, operation in {"w": "mul", "x": "partitioned_call"}.items():
        found = eg.contributions(held, X, wrt=wrt)
        assert [share.operation for share in found] == [operation]
        np.testing.assert_allclose(found.total, eg.jacobian(held, X, wrt=wrt).dense(), rtol=1e-12)


OUTSIDE = Held(lambda w, x: w * x)
CONCRETE = tf.function(OUTSIDE).get_concrete_function(tf.TensorSpec([3], tf.float64))


@pytest.mark.parametrize(
    ("function", "where"),
    [
        (lambda x: tf.cond(x[0] > 0, lambda: OUTSIDE(x), lambda: x), "a loop or branch of a graph"),
        (lambda x: CONCRETE(x), "a concrete function"),
        (
            lambda x: x * tf.raw_ops.ReadVariableOp(resource=tf.identity(OUTSIDE.w.value.handle), dtype=tf.float64),
            "the operation Identity",
        ),
    ],
    ids=["branch", "concrete", "operation"],
)
def test_a_variable_that_is_read_where_nobody_can_look_is_refused(function, where):
    outer = keras.layers.Lambda(function, dtype="float64")
    outer.inner = OUTSIDE
    with pytest.raises(eg.FrameworkError, match=f"the variable is read inside {where}.*; read it before"):
        eg.contributions(outer, X, wrt=f"{OUTSIDE.name}/w")


def test_a_replaced_gradient_of_tapes_is_called_by_reads(monkeypatch):
    x, original, calls = tf.constant([1.0, 2.0]), tf.GradientTape.gradient, []
    monkeypatch.setattr(
        tf.GradientTape, "gradient", lambda *args, **options: calls.append(args) or original(*args, **options)
    )
    np.testing.assert_array_equal(eg.grad(lambda x: tf.reduce_sum(x * x), x), [2.0, 4.0])
    assert len(calls) == 1
