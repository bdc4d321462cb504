"""Recordings of eager code: reads during and after the block, and state that stays as it was."""

import jax.numpy as jnp
import keras
import numpy as np
import pytest
import tensorflow as tf
import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import elementgrad as eg
from tests.support.frameworks import TENSORFLOW, TORCH
from tests.support.operations import OPS

X = [[1.0, 2.0], [3.0, 4.0]]
Y = [[5.0, 6.0], [7.0, 8.0]]


@pytest.fixture(params=[TORCH, TENSORFLOW], ids=lambda framework: framework.name)
def fw(request):
    """The frameworks whose eager code can be recorded."""
    return request.param


def assert_values(fw, tensor, expected):
    np.testing.assert_allclose(fw.numpy(tensor), expected, rtol=1e-12)
    assert tuple(tensor.shape) == np.shape(expected)


def test_elements_by_a_tensor_that_was_not_recorded(fw):
    x, y = fw.tensor(X), fw.tensor(Y)
    with eg.record(x) as rec:
        z = x @ y
    for _ in range(2):
        assert_values(fw, rec.grad(eg.at(z)[0, 0], x), [[5, 7], [0, 0]])
    assert_values(fw, rec.grad(eg.at(z)[0, 0], eg.at(x)[0]), [5, 7])
    assert_values(fw, rec.grad(eg.at(z)[0], eg.at(x)[0, 1]), [7, 8])
    assert_values(fw, rec.grad(eg.at(z)[...], eg.at(x)[1, 0]), [[0, 0], [5, 6]])
    assert_values(fw, rec.grad(eg.at(z).coords([[0, 0], [1, 1]]), eg.at(x)[:, 1]), [[7, 0], [0, 8]])


def test_an_element_of_a_recorded_tensor_itself(fw):
    x = fw.tensor(np.arange(1.0, 10.0).reshape(3, 3))
    with eg.record(x) as rec:
        y = fw.sum(x)
    assert_values(fw, rec.grad(eg.at(x)[1, 2], x), [[0, 0, 0], [0, 0, 1], [0, 0, 0]])
    assert_values(fw, rec.grad(y, x), np.ones((3, 3)))


def test_the_block_may_be_asked_while_it_runs(fw):
    x = fw.tensor([1.0, 2.0, 3.0])
    with eg.record(x) as rec:
        y = x**2
        assert_values(fw, rec.grad(eg.at(y)[1], x), [0, 4, 0])
        J = rec.jacobian(y, x)
        assert_values(fw, J.diagonal(), [2, 4, 6])
        z = fw.sum(y) * x
        assert_values(fw, rec.grad(eg.at(z)[0], eg.at(x)[0]), 16)
    assert_values(fw, J[1:, :], [[0, 4, 0], [0, 0, 6]])
    assert_values(fw, rec.grad(eg.at(z)[0], y), [1, 1, 1])


def test_intermediates_are_sources_and_targets(fw):
    x = fw.tensor([1.0, 2.0])
    with eg.record(x) as rec:
        h = x**2
        k = h * 3
        y = fw.sum(k * h)
    assert_values(fw, rec.grad(y, h), [6, 24])
    assert_values(fw, rec.grad(y, k), [1, 4])
    assert_values(fw, rec.grad(eg.at(k)[1], eg.at(x)[1]), 12)
    assert_values(fw, rec.grad(eg.at(k)[1], eg.at(h)), [0, 3])


def test_structures_of_places_give_the_same_structures(fw):
    x, y = fw.tensor([1.0, 2.0]), fw.tensor([3.0, 4.0])
    with eg.record(x, y) as rec:
        z = x * y
        s = fw.sum(z)
    gradients = rec.grad({"s": s, "z": eg.at(z)[0]}, [x, (eg.at(y)[1], y)])
    assert_values(fw, gradients["s"][0], [3, 4])
    assert_values(fw, gradients["s"][1][0], 2)
    assert_values(fw, gradients["z"][1][1], [1, 0])
    jacobians = rec.jacobian((z, s), {"x": x})
    assert_values(fw, jacobians[0]["x"].dense(), [[3, 0], [0, 4]])
    assert_values(fw, jacobians[1]["x"][..., 1], 4)


def test_jacobians_are_lazy_and_sides_may_be_places(fw):
    x = fw.tensor(X)
    with eg.record(x) as rec:
        z = x * fw.sum(x)
    J = rec.jacobian(eg.at(z)[0], eg.at(x)[:, 1], budget="1MB")
    assert J.shape == (2, 2)
    assert_values(fw, J.dense(), [[1, 1], [12, 2]])
    assert_values(fw, J.value, [10, 20])
    assert_values(fw, J @ fw.tensor([1.0, 10.0]), [11, 32])
    assert_values(fw, fw.tensor([1.0, 10.0]) @ J, [121, 21])
    assert_values(fw, J.entries([0, 1], 0), [1, 12])
    assert "Jacobian of of (2,) with respect to wrt (2,)" in repr(J)


def test_unconnected_is_an_error_or_zeros(fw):
    x, y = fw.tensor([1.0, 2.0]), fw.tensor([3.0, 4.0])
    with eg.record(x, y) as rec:
        z = x * 2
    with pytest.raises(eg.UnconnectedError, match="no path leads from one to the other"):
        rec.grad(eg.at(z)[0], y)
    assert_values(fw, rec.grad(eg.at(z)[0], y, unconnected="zero"), [0, 0])
    assert_values(fw, rec.jacobian(z, y, unconnected="zero").dense(), np.zeros((2, 2)))
    with pytest.raises(eg.OptionError, match="neither"):
        rec.grad(eg.at(z)[0], y, unconnected="none")


def test_an_exception_in_the_block_leaves_a_usable_recording(fw):
    x = fw.tensor([1.0, 2.0])
    made = []

    def fails():
        with eg.record(x) as rec:
            made.extend([rec, x * 3])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    rec, y = made
    assert_values(fw, rec.grad(eg.at(y)[0], x), [3, 0])
    assert not _get_current_function_mode_stack()
    assert not _get_current_dispatch_mode_stack()
    assert "apply" not in vars(torch.autograd.function._SingleLevelFunction)


def test_nested_recordings_are_independent(fw):
    x, y = fw.tensor([1.0, 2.0]), fw.tensor([3.0, 4.0])
    with eg.record(x) as outer:
        a = x * y
        with eg.record(y) as inner:
            b = a * y
        c = fw.sum(b)
    assert_values(fw, inner.grad(eg.at(b)[0], y), [3, 0])
    assert_values(fw, outer.grad(c, x), [9, 16])


def test_one_feature_map_element_and_one_pixel(fw):
    o = OPS[fw.name]
    image = np.random.default_rng(0).normal(size=(1, 1, 10, 10))

    def network(pixels):
        return o.conv(o.softplus(o.conv(pixels, o.numbers(2, 1, 3, 3))), o.numbers(3, 2, 3, 3), 2)

    x = fw.tensor(image)
    with eg.record(x) as rec:
        features = network(x)
    number = rec.grad(eg.at(features)[0, 2, 1, 1], eg.at(x)[0, 0, 3, 4])
    assert_values(fw, number, fw.numpy(eg.grad(network, fw.tensor(image), of="output[0, 2, 1, 1]"))[0, 0, 3, 4])
    field = fw.numpy(rec.grad(eg.at(features)[0, 2, 1, 1], x))[0, 0] != 0
    assert field[2:7, 2:7].all()
    assert field.sum() == 25


BAD = {
    "no tensors": (lambda x, rec: eg.record(), eg.PlaceError, "needs at least one tensor"),
    "a number": (lambda x, rec: eg.record(3.0), eg.FrameworkError, "float is not a tensor"),
    "an array": (lambda x, rec: eg.record(np.ones(3)), eg.FrameworkError, "a NumPy array carries no gradients"),
    "a place": (lambda x, rec: eg.record(eg.at(x)[0]), eg.PlaceError, "takes whole tensors"),
    "two frameworks": (lambda x, rec: eg.record(x, jnp.ones(2)), eg.FrameworkError, "use one framework for all"),
    "a name": (lambda x, rec: rec.grad("conv1[0]", x), eg.PlaceError, "'conv1.0.' names no tensor in a recording"),
    "a named place": (lambda x, rec: rec.grad(x[0], eg.at("x")[0]), eg.PlaceError, "names no tensor in a recording"),
    "a place of nothing": (lambda x, rec: rec.grad(eg.at[0], x), eg.PlaceError, "names no tensor in a recording"),
    "nothing": (lambda x, rec: rec.grad([], x), eg.PlaceError, "names nothing"),
    "several elements": (
        lambda x, rec: rec.grad(x, x),
        eg.SelectionError,
        r"say which elements, as in eg.at\(z\)\[0\]",
    ),
    "another framework": (lambda x, rec: rec.grad(eg.at(x)[0], jnp.ones(2)), eg.FrameworkError, "the tensor is jax's"),
    "out of range": (lambda x, rec: rec.grad(eg.at(x)[7], x), eg.SelectionError, "out of range"),
    "budget": (lambda x, rec: rec.jacobian(x, x, budget="much"), eg.OptionError, "not an amount of memory"),
    "again": (lambda x, rec: rec.__enter__(), eg.OptionError, "a recording is of one block"),
    "too early": (lambda x, rec: eg.record(x).grad(eg.at(x)[0], x), eg.OptionError, "nothing is recorded yet"),
}


@pytest.mark.parametrize("name", BAD)
def test_impossible_recordings_are_refused_in_a_sentence(fw, name):
    ask, error, message = BAD[name]
    x = fw.tensor([1.0, 2.0])
    with eg.record(x) as rec:
        pass
    with pytest.raises(error, match=message):
        ask(x, rec)


def test_integers_have_no_gradients(fw):
    x = fw.tensor([1.0, 2.0])
    with pytest.raises(eg.DtypeError, match="has no gradients; make it floating point first"):
        eg.record(fw.tensor([1, 2], "int64"))
    with eg.record(x) as rec:
        pass
    with pytest.raises(eg.DtypeError, match="has no gradients"):
        rec.grad(eg.at(x)[0], fw.tensor([1, 2], "int32"))


OUTSIDE = (
    r"is from outside the recording; give it to eg.record, or name elements .* by eg.at\(x\)\[...\] instead of x\[...\]"
)


def test_tensors_from_outside_are_refused_by_both_sides(fw):
    x, other = fw.tensor([1.0, 2.0]), fw.tensor([3.0, 4.0])
    before = x * 2
    with eg.record(x) as rec:
        y = fw.sum(x * other)
    after = y * 2
    for stranger in (other, before, after):
        with pytest.raises(eg.PlaceError, match=OUTSIDE):
            rec.grad(y, stranger)
        with pytest.raises(eg.PlaceError, match=OUTSIDE):
            rec.grad(eg.at(stranger)[...], x)


def test_tensorflow_slices_from_outside_name_the_way():
    x = tf.constant([1.0, 2.0])
    with eg.record(x) as rec:
        y = tf.reduce_sum(x**2)
    with pytest.raises(eg.PlaceError, match=OUTSIDE):
        rec.grad(y, x[0])
    assert rec.grad(y, eg.at(x)[0]).numpy() == 2


def test_tensorflow_variables_are_recorded_too():
    v, w = tf.Variable([1.0, 2.0]), tf.Variable([5.0, 6.0], trainable=False)
    with eg.record(v, w) as rec:
        y = v * w
        z = tf.gather(v, [1, 1]) * w
    assert rec.grad(eg.at(y)[1], v).numpy().tolist() == [0, 6]
    assert rec.grad(eg.at(y)[1], eg.at(w)[1]).numpy() == 2
    assert rec.jacobian(z, v).dense().numpy().tolist() == [[0, 5], [0, 6]]
    assert rec.grad(eg.at(v)[0], v).numpy().tolist() == [1, 0]


def test_keras_variables_are_recorded_too():
    layer = keras.layers.Dense(2, use_bias=False)
    layer.build((None, 3))
    x = tf.constant([[1.0, 2.0, 3.0]])
    with eg.record(layer.kernel) as rec:
        y = layer(x)
    assert rec.grad(eg.at(y)[0, 1], layer.kernel).numpy().tolist() == [[0, 1], [0, 2], [0, 3]]
    with pytest.raises(eg.FrameworkError, match=r"use eg\.contributions"):
        rec.contributions(eg.at(y)[0, 1], layer.kernel)
    with pytest.raises(eg.PlaceError, match="of a tensor of TensorFlow, which is never written to"):
        rec.grad(eg.at(y)[0, 1], eg.at(layer.kernel, write=0))


def test_tensorflow_functions_and_other_tapes_go_on_as_ever():
    x = tf.constant([1.0, 2.0])
    square = tf.function(lambda x: x**2)
    with tf.GradientTape() as tape:
        tape.watch(x)
        with eg.record(x) as rec:
            y = tf.reduce_sum(square(x))
            inner = rec.grad(y, x)
    assert inner.numpy().tolist() == [2, 4]
    assert tape.gradient(y, x).numpy().tolist() == [2, 4]
    with pytest.raises(eg.FrameworkError, match=r"eg.record does not work inside tf.function"):
        tf.function(lambda x: eg.record(x))(x)
