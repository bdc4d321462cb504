"""Training elements of JAX parameters: gradients against dense ones, under every transformation."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import elementgrad as eg
from tests.support.jax_losses import (
    CASES,
    IDS,
    KERNEL,
    SOME,
    TABLE,
    X,
    arrays,
    assert_dense_entries,
    assert_only,
    assert_same,
    embedding,
    moved,
    numbers,
    tied,
)

pytestmark = pytest.mark.usefixtures("small_products")

SINGLE = {"embedding, elements", "dense, many"}


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_entries_of_the_dense_one(case):
    loss, params, places = CASES[case]
    for dtype, tolerance in ((jnp.float64, 1e-12), (jnp.float32, 1e-6))[: 1 + (case in SINGLE)]:
        given = arrays(params, dtype)
        elements = eg.trainable(given, places)

        def both(values, elements=elements):
            return elements.value_and_grad(loss, values), jax.value_and_grad(loss)(elements.merge(values))

        compiled = jax.jit(both)
        for values in (elements.values, moved(elements.values)):
            (value, gradient), (expected, whole) = compiled(values)
            np.testing.assert_allclose(value, expected, rtol=10 * tolerance)
            assert_dense_entries(elements, loss, values, gradient, tolerance, whole)
        assert_same(given, arrays(params, dtype))


def test_values_as_they_were_change_no_bit():
    given = arrays({**TABLE, **KERNEL}, jnp.float32)
    elements = eg.trainable(given, ["table[5]", "w[3]"])
    x = X.astype(np.float32)

    def results(p):
        return p["table"][IDS], x @ p["w"]

    def loss(p):
        return p["table"][0, 0] + p["w"][0, 0], results(p)

    (_, found), _ = elements.value_and_grad(loss, has_aux=True)  # as it stands: jit may multiply in another order
    assert_same(found, results(given))


PLANS = {
    "embedding, elements": [("table", "gather", False)],
    "embedding, all": [("table", "gather", True)],
    "dense, many": [("w", "dot_general", False), ("b", "add", True)],
    "tied": [("table", "gather", False), ("table", "dot_general", False), ("table", "reduce_sum", True)],
    "conv": [("kernel", "conv_general_dilated", False)],
}


@pytest.mark.parametrize("case", PLANS)
def test_a_plan_lists_dense_gradients(case):
    loss, params, places = CASES[case]
    plan = eg.trainable(arrays(params, jnp.float32), places).plan(loss)
    if case == "dense, many":  # how a bias is broadcast differs between versions
        assert plan.uses[0] == PLANS[case][0]
        assert plan.uses[1].dense
    else:
        assert list(plan.uses) == PLANS[case]
    assert plan.dense == any(use.dense for use in plan.uses)


@settings(max_examples=4)
@given(st.data())
def test_made_networks(data):
    size = st.integers(1, 5)
    rows, inner, outer = data.draw(size) + 2, data.draw(size), data.draw(size)
    params = {"e": jnp.array(numbers(rows, inner)), "w": jnp.array(numbers(inner, outer)), "v": jnp.ones((outer, 2))}
    ids = np.array(data.draw(st.lists(st.integers(-rows, rows - 1), min_size=1, max_size=4)))
    flip, fun = data.draw(st.booleans()), data.draw(st.sampled_from([jnp.tanh, jnp.sin, jax.nn.relu]))
    places = []
    for name, array in params.items():
        chosen = data.draw(st.lists(st.integers(0, array.size - 1), max_size=4, unique=True))
        if chosen:
            places.append(eg.at(name).coords(np.stack(np.unravel_index(chosen, array.shape), 1)))

    def loss(p):
        h = fun(p["e"][ids] @ p["w"])
        h = (p["v"].T @ h.T).T if flip else h @ p["v"]
        return (h**2).sum() + (h[:, :1] * p["e"][ids]).sum()

    if places:
        elements = eg.trainable(params, places)
        values = moved(elements.values, data.draw(st.sampled_from([0.0, 0.5])))
        gradient, whole = jax.jit(lambda v: (elements.grad(loss, v), jax.grad(loss)(elements.merge(v))))(values)
        assert_dense_entries(elements, loss, values, gradient, 1e-12, whole)


def test_under_jit_vmap_and_donation():
    params = arrays({**TABLE, **KERNEL}, jnp.float32)
    elements = eg.trainable(params, ["table[5, 1:4]", "w[0]"])

    def loss(p, x):
        return jnp.tanh((p["table"][IDS] * x) @ p["w"] + p["b"]).sum()

    batches = jnp.array(numbers(3, 5, 6), jnp.float32)
    alone = jax.jit(lambda x: elements.grad(lambda p: loss(p, x)))
    expected = [alone(x) for x in batches]

    @partial(jax.jit, donate_argnums=0)
    def step(values, params, batch):
        gradient = elements.grad(lambda p: loss(p, batch), values, params=params)
        return jax.tree.map(lambda v, g: v - 0.1 * g, values, gradient), gradient

    values = elements.values
    for batch in batches[:1]:
        values, gradient = step(values, params, batch)
    for place in gradient:
        np.testing.assert_allclose(gradient[place], expected[0][place], rtol=1e-5, atol=1e-5)
    assert_same(elements.merge(), params)  # neither the elements nor the parameters were donated
    each = jax.jit(jax.vmap(lambda x: elements.grad(lambda p: loss(p, x))))(batches)
    for number, one in enumerate(expected):
        for place in one:
            np.testing.assert_allclose(each[place][number], one[place], rtol=1e-5, atol=1e-5)
    elements.values = values
    assert_only(elements, elements.merge(), params)
    assert_same(jax.jit(lambda v: elements.merge(v))(values), elements.merge())


def test_no_dense_copy_nor_gradient_under_jit():
    params = {"table": jnp.zeros((20_000, 64), jnp.float32), "w": jnp.array(numbers(64, 512), jnp.float32)}
    elements = eg.trainable(params, ["table[3]", "table[17, 5]", "w[3, 4]"])

    def loss(p):
        return jnp.tanh(p["table"][IDS] @ p["w"]).sum()

    compiled = jax.jit(lambda p, v: elements.grad(loss, v, params=p)).lower(params, elements.values).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < params["w"].nbytes


def test_aux_and_values_of_losses():
    elements = eg.trainable(arrays(TABLE, jnp.float64), SOME)

    def loss(p):
        return (p["table"][IDS] * X).sum(), {"rows": p["table"][IDS]}

    gradient, aux = jax.jit(lambda values: elements.grad(loss, values, has_aux=True))(elements.values)
    assert aux["rows"].shape == (5, 6)
    np.testing.assert_allclose(gradient["table[5, 1:4]"], X[1:3, 1:4].sum(0))


def test_functions_that_branch_on_values_are_run_as_they_stand():
    elements = eg.trainable(arrays(TABLE, jnp.float64), SOME)

    def loss(p):
        return tied(p) if p["table"][0, 0] > 100 else embedding(p)

    assert_dense_entries(elements, embedding, None, elements.grad(loss), 1e-12)
    assert "branches on values" in str(elements.plan(loss))


def test_custom_rules_are_kept():
    @jax.custom_vjp
    def doubled(x, w):
        return x @ w

    doubled.defvjp(lambda x, w: (x @ w, (x, w)), lambda kept, g: (g @ kept[1].T, 2 * kept[0].T @ g))
    params = arrays(KERNEL, jnp.float64)
    elements = eg.trainable(params, "w[2, 3]")
    gradient = elements.grad(lambda p: doubled(X, p["w"]).sum())
    np.testing.assert_allclose(gradient["w[2, 3]"], [2 * X[:, 2].sum()])


@pytest.mark.parametrize("odd", [np.nan, np.inf, 1e30])
def test_a_large_or_non_finite_original_value_leaves_no_error(odd):
    kernel = numbers(6, 8)
    kernel[2, 3] = odd
    elements = eg.trainable({"w": jnp.array(kernel, jnp.float32)}, "w[2, 3]")
    values = {"w[2, 3]": jnp.array([0.5], jnp.float32)}
    kernel[2, 3] = 0.5
    found, _ = elements.value_and_grad(lambda p: (X.astype(np.float32) @ p["w"]).sum(), values)
    np.testing.assert_allclose(found, (X @ kernel).sum(), rtol=1e-4)


def test_zeros_and_infinities_keep_their_bits():
    x = jnp.array([[-0.0, np.inf], [-0.0, 1.0]])
    params = {"w": jnp.array([[1.0, 2.0, 3.0], [0.0, 1.0, 1.0]])}
    elements = eg.trainable(params, ["w[0, 1]", "w[1, 2]"])
    (_, aux), _ = elements.value_and_grad(lambda p: ((x[1] @ p["w"]).sum(), x @ p["w"]), has_aux=True)
    assert_same(aux, x @ params["w"])


def test_second_derivatives():
    elements = eg.trainable(arrays({**TABLE, **KERNEL}, jnp.float64), ["table[5, 1:4]", "w[2]"])

    def loss(p):
        return jnp.tanh(p["table"][IDS] @ p["w"]).sum()

    def total(gradient):
        return sum((x**2).sum() for x in gradient.values())

    values = elements.values
    found = jax.jit(jax.grad(lambda v: total(elements.grad(loss, v))))(values)
    expected = jax.jit(jax.grad(lambda v: total(jax.grad(lambda v: loss(elements.merge(v)))(v))))(values)
    for place in values:
        np.testing.assert_allclose(found[place], expected[place], rtol=1e-9)


def test_half_precision_has_masters():
    for dtype in (jnp.bfloat16, jnp.float16):
        params = arrays(TABLE, dtype)
        elements = eg.trainable(params, SOME)
        assert {str(v.dtype) for v in elements.values.values()} == {"float32"}
        assert_same(elements.merge(), params)
        values = {place: value + jnp.float32(1e-6) for place, value in elements.values.items()}
        gradient = jax.jit(lambda v, elements=elements: elements.grad(embedding, v))(values)
        assert {str(v.dtype) for v in gradient.values()} == {"float32"}
        assert elements.merge(values)["table"].dtype == dtype
    assert eg.trainable(params, SOME, dtype="float64").values[SOME[0]].dtype == jnp.float64


def test_a_small_change_survives_a_half_precision_product():
    kernel = jnp.ones((6, 8), jnp.bfloat16).at[2, 3].set(1.0078125)
    elements = eg.trainable({"w": kernel}, "w[2, 3]")
    values = {"w[2, 3]": jnp.array([0.010009765625], jnp.float32)}  # as it is in bfloat16
    pick = jnp.zeros((1, 6), jnp.bfloat16).at[0, 2].set(1)

    def loss(p):
        return jnp.matmul(pick, p["w"], preferred_element_type=jnp.float32)[0, 3]

    np.testing.assert_allclose(elements.value_and_grad(loss, values)[0], values["w[2, 3]"][0], rtol=1e-5)


def test_two_names_of_one_array_are_two_parameters():
    zeros = jnp.zeros(3)
    elements = eg.trainable({"a": zeros, "b": zeros}, ["a[0]", "b[0]"])
    gradient = elements.grad(lambda p: (p["a"] * 2 + p["b"] * 5).sum())
    assert [x.tolist() for x in gradient.values()] == [[2.0], [5.0]]
    assert elements.merge({"a[0]": jnp.ones(1), "b[0]": jnp.zeros(1)})["b"].tolist() == [0, 0, 0]
