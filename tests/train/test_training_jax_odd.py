"""Training elements of JAX parameters: what is out of the ordinary in parameters, indices and losses."""

import math
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import elementgrad as eg
from tests.support.made import counts

pytestmark = pytest.mark.usefixtures("products_by_parts")


def image(w):
    return jax.lax.conv_general_dilated(jnp.ones((2, 20, 5, 5), w.dtype), w, (1, 1), "VALID")


PRODUCTS = {
    "one": ((20, 24), lambda x, w: x @ w, "w[3, 4]"),
    "a few": ((20, 24), lambda x, w: x @ w, "w[[3, 5], [4, 4]]"),
    "a row": ((20, 24), lambda x, w: x @ w, "w[3]"),
    "a column": ((20, 24), lambda x, w: x @ w, "w[:, 4]"),
    "many columns": ((20, 300), lambda x, w: x @ w, "w[[3, 5], :90]"),
    "from the left": ((24, 20), lambda x, w: (w @ x.T).T, "w[4]"),
    "heads": ((3, 20, 8), lambda x, w: jnp.einsum("nd,hdk->hnk", x, w), "w[1, :, 3]"),
    "out of heads": ((4, 20, 5), lambda x, w: jnp.einsum("nkh,hdk->dn", x.reshape(-1, 5, 4), w), "w[1, :2, 3]"),
    "all summed": ((20,), lambda x, w: x @ w, "w[2:4]"),
    "an outer product": ((24,), lambda x, w: jax.lax.dot_general(x, w, (((), ()), ((), ()))), "w[2:4]"),
    "a convolution, channels out": ((24, 20, 3, 3), lambda x, w: x[0, 0] * image(w), "w[1]"),
    "a convolution, channels in": ((24, 20, 3, 3), lambda x, w: x[0, 0] * image(w), "w[:, 1, 0]"),
}


def two_ways(elements, loss):
    """Return the loss with its gradients by the elements and by x, computed for the elements alone and densely."""

    @jax.jit
    def ours(values, params, x):
        def both(x):
            return elements.value_and_grad(lambda params: loss(params, x), values, params=params)

        return jax.value_and_grad(both, has_aux=True)(x)

    @jax.jit
    def dense(values, params, x):
        total, slopes = jax.value_and_grad(lambda values, x: loss(elements.merge(values, params=params), x), (0, 1))(
            values, x
        )
        return (total, slopes[0]), slopes[1]

    return ours, dense


@pytest.mark.parametrize("case", PRODUCTS)
def test_products_are_exact_however_large_the_elements_of_traced_parameters_are(case):
    """Old numbers are up to 1e15 times as large as all others, so that no rounding of theirs may stay."""
    shape, multiply, place = PRODUCTS[case]
    random = np.random.default_rng(0)
    w, x = jnp.asarray(0.02 * random.normal(size=shape)), jnp.asarray(random.normal(size=(4, 20)))
    elements = eg.trainable({"w": w}, place)
    values = {place: 0.3 + elements.values[place]}

    def loss(params, x):
        return jnp.sin(multiply(x, params["w"])).sum()

    ours, dense = two_ways(elements, loss)
    for size in (0.3, 1e13):
        params = elements.merge({place: values[place] * size})
        for found, expected in zip(*map(jax.tree.leaves, (f(values, params, x) for f in (ours, dense))), strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("odd", [1e8, np.inf, np.nan])
def test_parameters_with_other_non_finite_values_give_right_gradients(odd):
    table = jax.random.normal(jax.random.key(0), (20, 20), jnp.float64)
    elements, values = eg.trainable({"w": table}, "w[1, 1]"), {"w[1, 1]": jnp.array([0.5], table.dtype)}
    other = {"w": table.at[1, 1].set(odd)}

    def loss(params, x):
        return jnp.sin(x @ params["w"]).sum()

    def ours(values, params, x):
        def both(x):
            return elements.value_and_grad(lambda params: loss(params, x), values, params=params)

        return jax.value_and_grad(both, has_aux=True)(x)

    x = jnp.arange(20, dtype=table.dtype)
    merged = elements.merge(values, params=other)
    expected, slopes = jax.value_and_grad(loss, (0, 1))(merged, x)
    for function in (ours, jax.jit(ours)):
        (found, slope), x_slope = function(values, other, x)
        np.testing.assert_allclose(found, expected, rtol=1e-12)
        np.testing.assert_allclose(slope["w[1, 1]"], slopes[0]["w"][1, 1][None], rtol=1e-12)
        np.testing.assert_allclose(x_slope, slopes[1], rtol=1e-12)


@pytest.mark.parametrize("case", PRODUCTS)
@settings(max_examples=counts(12))
@given(data=st.data())
def test_non_finite_values_agree_with_the_dense_gradient(case, data):
    """In the parameters, elements that train among them, in their values, and in what they are multiplied with."""
    shape, _, place = PRODUCTS[case]
    elements, x, ours, dense = compiled_product(case)
    count = math.prod(shape)
    positions = eval(f"np.arange({count}).reshape({shape}){place[1:]}").ravel().tolist()
    odd = st.sampled_from([np.inf, -np.inf, np.nan, 1e300, -1e305])
    numbers = np.random.default_rng(0).normal(size=count)
    for where, most in ((st.sampled_from(positions), 2), (st.integers(0, count - 1), 3)):
        for position, number in data.draw(st.dictionaries(where, odd, max_size=most)).items():
            numbers[position] = number
    params = {"w": jnp.asarray(numbers.reshape(shape)), "scale": jnp.ones(2)}
    values = elements.values
    row = np.array(values[place])
    for position, number in data.draw(st.dictionaries(st.integers(0, len(row) - 1), odd, max_size=1)).items():
        row[position] = number
    values[place] = jnp.asarray(row + data.draw(st.sampled_from([0.0, 0.3])))
    if data.draw(st.booleans()):
        x = x.at[1, 1].set(data.draw(st.sampled_from([np.inf, np.nan, 0.0])))
    function = ours if data.draw(st.integers(0, 7)) else ours.__wrapped__  # the parameters are known there
    for found, expected in zip(*map(jax.tree.leaves, (f(values, params, x) for f in (function, dense))), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)


@cache
def compiled_product(case):
    """Return elements, a factor, and the loss with its gradients by the values, a scale before it, and the factor."""
    shape, multiply, place = PRODUCTS[case]
    random = np.random.default_rng(0)
    params = {"w": jnp.asarray(0.3 * random.normal(size=shape)), "scale": jnp.ones(2)}
    elements = eg.trainable(params, [place, "scale[1]"])

    def loss(params, x):
        return jnp.tanh(multiply(x * params["scale"][1], params["w"])).sum()

    return elements, jnp.asarray(random.normal(size=(4, 20))), *two_ways(elements, loss)


def test_other_numbers_may_be_too_large_for_the_dtype_of_a_product():
    w = jnp.full((20, 20), 0.5, jnp.float32).at[1, 5].set(1e6)
    elements = eg.trainable({"w": w}, "w[1]")
    values = {"w[1]": jnp.full(20, 0.25)}

    def loss(params):
        return jnp.tanh(jnp.ones((1, 20), jnp.float16) @ params["w"].astype(jnp.float16)).sum()

    found, slope = elements.value_and_grad(loss, values)
    expected, slopes = jax.value_and_grad(lambda values: loss(elements.merge(values)))(values)
    assert found == expected
    np.testing.assert_array_equal(slope["w[1]"], slopes["w[1]"])


@pytest.mark.parametrize("place", ["w[1, 1]", "w[1]", "w[:, 1]"])
def test_infinite_numbers_beside_the_elements_are_multiplied_by_no_zero(place):
    """Ones that are there when the elements are made, and ones in other parameters whose numbers are known."""
    table = jax.random.normal(jax.random.key(0), (20, 20), jnp.float64)
    infinite = {"w": table.at[1, 5].set(jnp.inf).at[7, 1].set(-jnp.inf)}
    x = jnp.arange(1.0, 21.0, dtype=table.dtype)

    def loss(params, x):
        return jnp.tanh(x @ params["w"] / 1e3).sum()

    for first, other in ((infinite, None), ({"w": table}, infinite)):
        elements = eg.trainable(first, place)
        values = {place: 0.5 * elements.values[place]}
        values[place] = jnp.where(jnp.isfinite(values[place]), values[place], 1)
        expected, slopes = jax.value_and_grad(lambda v, e=elements, o=other: loss(e.merge(v, params=o), x))(values)

        def ours(values, elements=elements, other=other):
            return elements.value_and_grad(lambda params: loss(params, x), values, params=other)

        for function in (ours, jax.jit(ours)):
            found, slope = function(values)
            assert np.isfinite(expected)
            np.testing.assert_allclose(found, expected, rtol=1e-12)
            np.testing.assert_allclose(slope[place], slopes[place], rtol=1e-12)


def test_an_original_value_that_overflows_half_precision_leaves_no_error():
    w = jnp.full((20, 20), 0.5, jnp.float32).at[1, 1].set(1e6)
    elements = eg.trainable({"w": w}, "w[1, 1]")

    def loss(params):
        return (jnp.ones((1, 20), jnp.float16) @ params["w"].astype(jnp.float16)).sum()

    found, slope = elements.value_and_grad(loss, {"w[1, 1]": jnp.array([0.5])})
    assert (found, slope["w[1, 1]"].tolist()) == (200, [1])


def test_a_small_index_may_not_hold_the_number_of_rows():
    table = jnp.arange(600.0).reshape(300, 2)
    elements = eg.trainable({"t": table}, ["t[255]", "t[5]"])
    loss, slope = elements.value_and_grad(
        lambda params: jax.lax.dynamic_index_in_dim(params["t"], jnp.uint8(255)).sum()
    )
    assert loss == 1021
    assert slope["t[255]"].tolist() == [1, 1]
    assert slope["t[5]"].tolist() == [0, 0]


def test_an_element_that_a_slice_leaves_out_has_a_gradient_of_zero():
    elements = eg.trainable({"w": jnp.ones((3, 3))}, "w[0, 0]")
    assert elements.grad(lambda params: (params["w"][1] ** 2).sum())["w[0, 0]"].tolist() == [0]


def test_outputs_beside_the_loss_may_be_anything():
    elements = eg.trainable({"w": jnp.ones((3, 3))}, "w[0, 0]")
    (loss, aux), _ = elements.value_and_grad(
        lambda params: (params["w"].sum(), ["text", 3, params["w"][0]]), has_aux=True
    )
    assert loss == 9
    assert aux[:2] == ["text", 3]
    assert aux[2].tolist() == [1, 1, 1]
