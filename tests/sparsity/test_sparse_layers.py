"""Patterns of convolutions, pools and layers on JAX and TensorFlow: all that is nonzero, and nothing else."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
import tensorflow as tf
from jax import lax

import elementgrad as eg
from tests.support.frameworks import JAX, TENSORFLOW

IMAGE = np.random.default_rng(0).uniform(0.5, 1.5, (1, 4, 5, 6))
KERNEL = np.random.default_rng(1).uniform(0.5, 1.5, (4, 2, 2, 3))
EDGE = np.zeros((2, 4, 3, 3))
EDGE[0, :, 1, 1], EDGE[1, 2, :, 0] = 1, 2
FORMS = ("NCHW", "OIHW", "NCHW")


def conv(x, kernel, strides=(1, 1), padding="SAME", **options):
    return lax.conv_general_dilated(x, kernel, strides, padding, dimension_numbers=FORMS, **options)


def last(x):
    """Channels last, as TensorFlow has them on CPUs."""
    return tf.transpose(x, (0, 2, 3, 1))


def turned(kernel):
    return tf.constant(kernel.transpose(2, 3, 1, 0))


def pool(x, size, strides, padding):
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 1, *size), (1, 1, *strides), padding)


ON_JAX = {
    "groups": lambda x: conv(x, KERNEL, feature_group_count=2),
    "each channel": lambda x: conv(x, KERNEL[:, :1], (2, 1), "VALID", feature_group_count=4),
    "strides and dilation": lambda x: conv(x, EDGE[:, :, :2, :2] + 1, (2, 3), ((1, 0), (2, 1)), rhs_dilation=(2, 1)),
    "transposed": lambda x: conv(x, EDGE + 1, padding=((1, 2), (2, 0)), lhs_dilation=(2, 3)),
    "zeros in the kernel": lambda x: conv(x, EDGE),
    "other axes": lambda x: lax.conv_general_dilated(
        x, EDGE.transpose(2, 0, 3, 1) + 1, (1, 1), "VALID", dimension_numbers=("NCHW", "HOWI", "CNHW")
    ),
    "sums of windows": lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 1, 2, 3), (1, 1, 2, 1), "SAME"),
    "stacks of matrices": lambda x: jnp.einsum("bcij,ckj->bick", x, KERNEL[:, :, :, :1].repeat(6, 3)[:, :, 0]),
    "groups of examples": lambda x: conv(x.reshape(4, 1, 5, 6), KERNEL[:, :1], batch_group_count=2),
    "differences by the kernel": lambda k: conv(IMAGE, k.reshape(EDGE.shape), (2, 2), "VALID"),
}
ON_TENSORFLOW = {
    "groups": lambda x: tf.nn.conv2d(last(x), turned(KERNEL), 1, "SAME"),
    "each channel": lambda x: tf.nn.depthwise_conv2d(
        last(x), tf.constant(KERNEL.transpose(2, 3, 0, 1)), (1, 2, 2, 1), "VALID"
    ),
    "strides": lambda x: tf.nn.conv2d(last(x), turned(EDGE + 1), (1, 2, 3, 1), "SAME"),
    "explicit padding": lambda x: tf.nn.conv2d(last(x), turned(EDGE + 1), 2, [[0, 0], [1, 0], [2, 1], [0, 0]]),
    "dilation": lambda x: tf.nn.conv2d(last(x), turned(EDGE[:, :, :2, :2] + 1), 1, "SAME", dilations=2),
    "transposed": lambda x: tf.nn.conv2d_transpose(
        last(x), tf.constant(EDGE.transpose(2, 3, 0, 1) + 1), (1, 10, 12, 2), 2
    ),
    "zeros in the kernel": lambda x: tf.nn.conv2d(last(x), turned(EDGE), 1, "SAME"),
    "in space": lambda x: tf.nn.conv3d(
        tf.reshape(x, (1, 4, 5, 6, 1)), tf.ones((2, 2, 3, 1, 1), x.dtype), (1, 2, 1, 2, 1), "SAME"
    ),
    "means of windows": lambda x: tf.nn.avg_pool2d(last(x), (2, 3), (2, 1), "SAME"),
    "stacks of matrices": lambda x: tf.matmul(x, tf.constant(KERNEL[:, 0, :1, :].repeat(6, 1)[:, :, :2])),
    "by a band": lambda x: tf.matmul(tf.linalg.band_part(tf.ones((5, 5), x.dtype), 1, 0), x),
    "added at places": lambda x: tf.tensor_scatter_nd_add(x[0], [[1], [1], [3]], x[0, :3]),
    "sums of segments": lambda x: tf.math.unsorted_segment_sum(x[0], [2, 0, -1, 2], 4),
    "enlarged": lambda x: tf.image.resize(last(x), (8, 9), "nearest"),
    "enlarged smoothly": lambda x: tf.image.resize(last(x), (8, 9)),
    "made smaller": lambda x: tf.image.resize(last(x), (3, 4), "bicubic"),
    "resized by corners": lambda x: tf.compat.v1.image.resize_bilinear(last(x), (7, 4), align_corners=True),
    "mirrored": lambda x: tf.pad(x, [[0, 0], [0, 0], [1, 2], [2, 0]], "REFLECT"),
    "differences by the kernel": lambda k: tf.nn.conv2d(
        last(tf.constant(IMAGE)), tf.reshape(k, (3, 3, 4, 2)), (1, 2, 2, 1), "VALID"
    ),
}
CASES = [
    pytest.param(fw, f, id=f"{fw.name}-{name}")
    for fw, table in ((JAX, ON_JAX), (TENSORFLOW, ON_TENSORFLOW))
    for name, f in table.items()
]


def columns(fw, f, x):
    """The matrix of a linear function: TensorFlow has no gradient of all of these on CPUs."""
    units = np.eye(np.size(x)).reshape(-1, *x.shape)
    return np.stack([fw.numpy(f(fw.tensor(unit))).reshape(-1) for unit in units], 1)


def own(fw, f, x):
    """By reverse sweeps of the framework itself, a row for each element of the output."""
    if fw is JAX:
        y, pull = jax.vjp(f, x)
        seeds = jnp.eye(y.size).reshape(y.size, *y.shape)
        return np.asarray(jax.jit(jax.vmap(pull))(seeds)[0]).reshape(y.size, -1)
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        y = f(x)
    return tape.jacobian(y, x, experimental_use_pfor=False).numpy().reshape(int(tf.size(y)), -1)


@pytest.mark.parametrize(("fw", "f"), CASES)
def test_the_pattern_of_an_operation_is_exact(fw, f):
    x = fw.tensor(EDGE + 1 if f.__code__.co_varnames == ("k",) else IMAGE)
    matrix = own if fw is JAX else columns
    np.testing.assert_array_equal(eg.jacobian(f, x).pattern().dense(), matrix(fw, f, x) != 0)


@pytest.mark.parametrize(
    ("fw", "f"),
    [
        pytest.param(JAX, lambda x: pool(x, (2, 3), (2, 2), "SAME"), id="jax"),
        pytest.param(TENSORFLOW, lambda x: tf.nn.max_pool2d(last(x), (2, 3), 2, "SAME"), id="tensorflow"),
    ],
)
def test_any_element_of_a_window_may_be_the_largest(fw, f):
    P = eg.jacobian(f, fw.tensor(IMAGE)).pattern().dense()
    seen = sum(own(fw, f, fw.tensor(np.random.default_rng(seed).uniform(size=IMAGE.shape))) != 0 for seed in range(40))
    np.testing.assert_array_equal(P, seen > 0)


ODD = {
    "a padded number": (JAX, lambda x: lax.pad(x[0] ** 2, 0.0, [])),
    "a padded number, by a number": (JAX, lambda x: lax.pad(x[:2], x[2], [(1, -1, 2)])),
    "nothing, padded": (JAX, lambda x: lax.pad(x[:0], x[2], [(1, 1, 1)])),
    "padded numbers of a loop": (JAX, lambda x: lax.scan(lambda c, r: (c + lax.pad(r, 0.0, []), r), 0.0, x)[0]),
    "numbers written in a loop": (
        JAX,
        lambda x: lax.scan(lambda c, r: (c, lax.dynamic_update_slice(r, r * r, ())), 0.0, x)[1],
    ),
    "a window of no axes": (JAX, lambda x: lax.reduce_window(x[1], 0.0, lax.add, (), (), "VALID")),
    "windows that do not fit": (
        JAX,
        lambda x: x + lax.reduce_window(x[:1], 0.0, lax.add, (2,), (1,), "VALID").sum(),
    ),
    "sums over nothing": (JAX, lambda x: x + x[:0].reshape(0, 2).sum(1).sum() + x[:0].reshape(3, 0).sum(1)),
    "added to nothing": (JAX, lambda x: x + jax.ops.segment_sum(x, jnp.zeros(3, int), 0).sum()),
    "products over nothing": (JAX, lambda x: x + (x[:0].reshape(3, 0) @ jnp.ones((0, 1)))[:, 0]),
    "a number that numpy lacks": (
        TENSORFLOW,
        lambda x: tf.cast(tf.cast(x, tf.bfloat16) * tf.constant(0.5, tf.bfloat16), x.dtype),
    ),
    "sums over nothing, by a tape": (
        TENSORFLOW,
        lambda x: (
            x + tf.reduce_sum(tf.reshape(x[:0], (3, 0)), 1) + tf.reduce_sum(tf.reduce_sum(tf.reshape(x[:0], (0, 2)), 1))
        ),
    ),
    "products over nothing, by a tape": (
        TENSORFLOW,
        lambda x: x + (tf.reshape(x[:0], (3, 0)) @ tf.ones((0, 1), x.dtype))[:, 0],
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_operands_without_axes_or_elements_have_a_pattern(name):
    fw, f = ODD[name]
    x = fw.tensor([1.0, 2.0, 3.0])
    dense = np.asarray(jax.jacfwd(f)(x)) if fw is JAX else own(fw, f, x)
    for local in (False, True):
        P = eg.jacobian(f, x).pattern(local=local)
        np.testing.assert_array_equal(P.dense(), dense.reshape(P.shape) != 0)


BATCH = np.random.default_rng(2).normal(size=(2, 4, 3))
APART = {
    "a recurrent layer": keras.layers.SimpleRNN(2, dtype="float64"),
    "gates": keras.layers.LSTM(2, return_sequences=True, dtype="float64"),
    "both directions": keras.layers.Bidirectional(keras.layers.GRU(2, dtype="float64"), dtype="float64"),
    "a scan": lambda x: tf.scan(lambda state, row: state + row**2, tf.transpose(x, (1, 0, 2))),
    "near channels": lambda x: tf.cast(tf.nn.local_response_normalization(tf.cast(x[None], tf.float32), 1), x.dtype),
    "cross products": lambda x: tf.linalg.cross(x, tf.ones_like(x)),
}
"""Functions of (2, 4, 3) whose examples do not mix."""


@pytest.mark.parametrize("name", APART)
def test_examples_do_not_mix_in_loops_of_tensorflow(name):
    f, x = APART[name], tf.constant(BATCH)
    P = eg.jacobian(f, x).pattern()
    seen = own(TENSORFLOW, f, x) != 0
    assert not (seen & ~P.dense()).any()
    by_example = P.dense().reshape(len(seen), 2, -1).any(2)
    np.testing.assert_array_equal(by_example, seen.reshape(len(seen), 2, -1).any(2))


def test_a_list_whose_elements_differ_in_shape_is_taken_whole():
    def f(x):
        rows = tf.TensorArray(x.dtype, 2, infer_shape=False, element_shape=None, clear_after_read=False)
        rows = rows.write(0, x[:2] ** 2).write(1, tf.stack([x[2], x[3], x[4]]) * x[5])
        return tf.concat([rows.read(0), rows.read(1)], 0)

    x = tf.constant([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], tf.float64)
    P = eg.jacobian(f, x).pattern()
    assert not ((own(TENSORFLOW, f, x) != 0) & ~P.dense()).any()


def test_layers_of_keras_have_patterns():
    keras.utils.set_random_seed(0)
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((12, 2)),
            layers.Conv1D(3, 3, activation="tanh", name="first"),
            layers.BatchNormalization(),
            layers.AveragePooling1D(2),
            layers.Conv1D(1, 2, padding="same", name="second"),
            layers.LayerNormalization(axis=-1, center=False, scale=False, epsilon=10.0),
        ]
    )
    x = tf.constant(np.random.default_rng(0).normal(size=(1, 12, 2)), tf.float32)
    for options in ({}, {"of": "second"}, {"of": "second", "wrt": "first"}, {"of": "second", "wrt": "second/kernel"}):
        J = eg.jacobian(model, x, **options, unconnected="zero")
        dense = J.dense().numpy().reshape(J.pattern().shape)
        assert not ((dense != 0) & ~J.pattern().dense()).any()
        np.testing.assert_allclose(J.sparse("scipy").toarray(), dense, rtol=1e-5, atol=1e-7)
    J = eg.jacobian(model, x, of="second")
    assert J.pattern().density < 0.6
    other = 2 * x + 0.1
    again = eg.jacobian(model, other, of="second").dense().numpy().reshape(J.pattern().shape)
    np.testing.assert_allclose(J.prepare("scipy")(other).toarray(), again, rtol=1e-5, atol=1e-7)


def test_a_variable_of_a_model_is_not_set_by_a_prepared_read():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, name="dense")])
    S = eg.jacobian(model, tf.ones((1, 4)), wrt="dense/kernel").prepare()
    with pytest.raises(eg.OptionError, match="assign it, and make a new Jacobian"):
        S(tf.ones((4, 3)))


def test_prepared_reads_restore_buffers_and_random_states():
    model = keras.Sequential([keras.Input((4,)), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5, seed=1)])
    x = tf.constant(np.random.default_rng(0).normal(size=(3, 4)), tf.float32)
    before = [variable.numpy().copy() for variable in model.variables]
    S = eg.jacobian(lambda x: model(x, training=True), x).prepare()
    S(x), S(x + 1)
    for variable, value in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)
