"""Gradients of edits: exact to the tensor and to the value, of first and second order, in reverse and forward mode."""

import numpy as np
import pytest
from hypothesis import given, settings

import elementgrad as eg
from tests.edit.test_edit import run
from tests.support.frameworks import JAX, difference
from tests.support.made import counts, edits, numpy_edit

TABLE = [
    ("get", (0, 1), None),
    ("get", ([0, 1, 1], slice(None, None, -1)), None),
    ("set", (slice(None), 1), [5.0, 6.0]),
    ("set", ([1, 0], [2, 2]), 5.0),
    ("set", (slice(None, None, -1), slice(0, 2)), [[5.0], [6.0]]),
    ("add", ([0, 0, 1],), [[1.0], [2.0], [3.0]]),
    ("add", (..., 1), [2.0, 3.0]),
    ("multiply", ([0, 0, 0], [1, 1, 2]), [2.0, 0.0, 3.0]),
    ("multiply", (0,), [2.0, 0.0, 3.0]),
    ("apply", (slice(None), [0, 2]), None),
    ("apply", (np.array([[True, False, True], [False, False, True]]),), None),
]
X = np.array([[1.5, -2.0, 0.5], [0.7, 1.1, -1.3]])


def weighted(fw, result):
    """A scalar that treats every element differently and is not linear in any."""
    shape = tuple(fw.numpy(result).shape) if not hasattr(result, "shape") else tuple(result.shape)
    return fw.sum(fw.tensor(weights(shape)) * result**3)


def weights(shape):
    return np.sin(1.0 + np.arange(int(np.prod(shape)))).reshape(shape)


def numpy_loss(verb, x, index, value):
    result = numpy_edit(verb, x, index, value)
    return float((weights(result.shape) * result**3).sum())


def test_made_edits_have_the_gradients_of_finite_differences(fw):
    @settings(max_examples=counts(*((60, 600) if fw is JAX else (100, 1500))))
    @given(edits(("get", "set", "add", "multiply", "apply")))
    def agrees(made):
        verb, x, index, value = made
        given_value = np.zeros(()) if value is None else value
        gradient, of_value = fw.grad(
            lambda x, value: (
                weighted(fw, run(fw, verb, x, index, None if made[3] is None else value)) + 0 * fw.sum(value)
            ),
            fw.tensor(x),
            fw.tensor(given_value),
        )
        np.testing.assert_allclose(
            gradient, difference(lambda x: numpy_loss(verb, x, index, value), x), rtol=1e-6, atol=1e-6
        )
        if value is not None:
            expected = difference(lambda value: numpy_loss(verb, x, index, value), value)
            np.testing.assert_allclose(of_value, expected, rtol=1e-6, atol=1e-6)

    agrees()


def test_made_selections_get_the_gradient_alone_or_not_at_all(fw):
    @settings(max_examples=counts(*((40, 300) if fw is JAX else (80, 1250))))
    @given(edits(("only", "stop")))
    def agrees(made):
        verb, x, index, _ = made
        if verb not in ("only", "stop"):
            return
        named = np.zeros(x.shape, bool)
        named[index] = True
        (gradient,) = fw.grad(lambda x: weighted(fw, run(fw, verb, x, index, None)), fw.tensor(x))
        whole = difference(lambda x: float((weights(x.shape) * x**3).sum()), x)
        np.testing.assert_allclose(gradient, np.where(named == (verb == "only"), whole, 0), rtol=1e-6, atol=1e-6)

    agrees()


def second_differences(f, x):
    """The Hessian of a scalar function of one float64 array, by differences of differences."""
    rows = [difference(lambda x, at=at: difference(f, x, step=1e-4)[at], x, step=1e-4) for at in np.ndindex(x.shape)]
    return np.stack(rows).reshape(x.shape * 2)


@pytest.mark.parametrize(("verb", "index", "value"), TABLE, ids=str)
def test_second_derivatives_are_exact(fw, verb, index, value):
    value = None if value is None else np.array(value)
    given_value = None if value is None else fw.tensor(value)
    expected = second_differences(lambda x: numpy_loss(verb, x, index, value), X)
    hessians = fw.hessians(lambda x: weighted(fw, run(fw, verb, x, index, given_value)), fw.tensor(X))
    for how, hessian in hessians.items():
        np.testing.assert_allclose(hessian, expected, rtol=1e-4, atol=1e-4, err_msg=how)


@pytest.mark.parametrize(("verb", "index", "value"), [case for case in TABLE if case[2] is not None], ids=str)
def test_second_derivatives_to_the_value_are_exact(fw, verb, index, value):
    value = np.array(value)
    expected = second_differences(lambda value: numpy_loss(verb, X, index, value), value)
    hessians = fw.hessians(lambda value: weighted(fw, run(fw, verb, fw.tensor(X), index, value)), fw.tensor(value))
    for how, hessian in hessians.items():
        np.testing.assert_allclose(hessian, expected, rtol=1e-4, atol=1e-4, err_msg=how)


@pytest.mark.parametrize(("verb", "index", "value"), TABLE, ids=str)
def test_forward_mode_agrees_with_finite_differences(fw, verb, index, value):
    value = np.zeros(()) if value is None else np.array(value)
    along_x, along_value = weights(X.shape), np.cos(weights(value.shape))
    takes_value = verb in ("set", "add", "multiply")

    def both(x, value):
        return weighted(fw, run(fw, verb, x, index, value if takes_value else None))

    tangent = fw.jvp(both, [fw.tensor(X), fw.tensor(value)], [fw.tensor(along_x), fw.tensor(along_value)])
    expected = (difference(lambda x: numpy_loss(verb, x, index, value if takes_value else None), X) * along_x).sum()
    if takes_value:
        expected += (difference(lambda value: numpy_loss(verb, X, index, value), value) * along_value).sum()
    np.testing.assert_allclose(tangent, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("verb", ["only", "stop"])
def test_only_and_stop_hold_in_forward_mode_and_second_order(fw, verb):
    x = np.array([1.0, 2.0, 3.0])
    kept = np.array([0.0, 1.0, 0.0]) if verb == "only" else np.array([1.0, 0.0, 1.0])
    for index in (1, [1], np.array([False, True, False])):

        def loss(x, index=index):
            return fw.sum(getattr(eg.at(x)[index], verb)() ** 3)

        tangent = fw.jvp(loss, [fw.tensor(x)], [fw.tensor(np.ones(3))])
        np.testing.assert_allclose(tangent, (3 * x**2 * kept).sum())
        for how, hessian in fw.hessians(loss, fw.tensor(x)).items():
            np.testing.assert_allclose(hessian, np.diag(6 * x * kept), err_msg=how)


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_complex_gradients_follow_the_convention_of_the_framework(fw, dtype):
    x, value = fw.tensor([1 + 2j, 3 - 1j, 0.5j], dtype), fw.tensor(2 - 3j, dtype)

    def edited(x, value):
        return eg.at(eg.at(x)[1].set(value))[[0, 1]].multiply(2.0)

    def by_hand(x, value):
        return fw.stack([x[0] * 2.0, value * 2.0, x[2]])

    ours, wanted = (fw.grad(lambda x, v, f=f: fw.sum(abs(f(x, v)) ** 2), x, value) for f in (edited, by_hand))
    for got, want in zip(ours, wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)
    assert np.abs(wanted[0].imag).max() > 1


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_low_precision_gradients_are_those_of_the_format(fw, dtype):
    def loss(x, value):
        return fw.sum(eg.at(eg.at(x)[0].set(value))[1].only() * 2.0)

    gradient, of_value = fw.grad(loss, fw.tensor([1.0, 2.0, 3.0], dtype), fw.tensor(5.0, dtype))
    assert gradient.astype(float).tolist() == [0, 2, 0]
    assert float(of_value) == 0
