"""Training elements of JAX parameters: what is out of the ordinary in parameters, indices and losses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import elementgrad as eg


@pytest.mark.parametrize("odd", [1e8, np.inf])
def test_other_parameters_may_stand_out_where_these_did_not(odd):
    table = jax.random.normal(jax.random.key(0), (6, 6), jnp.float64)
    elements, values = eg.trainable({"w": table}, "w[1, 1]"), {"w[1, 1]": jnp.array([0.5], table.dtype)}
    other = {"w": table.at[1, 1].set(odd)}

    def loss(params):
        return jnp.sin(jnp.arange(6, dtype=table.dtype) @ params["w"]).sum()

    dense = jax.value_and_grad(loss)(elements.merge(values, params=other))
    given, slope = elements.value_and_grad(loss, values, params=other)
    np.testing.assert_allclose(given, dense[0], rtol=1e-12)
    np.testing.assert_allclose(slope["w[1, 1]"], dense[1]["w"][1, 1], rtol=1e-12)
    traced = jax.jit(lambda values, params: elements.value_and_grad(loss, values, params=params))(values, other)
    assert np.isnan(traced[0])
    assert np.isnan(traced[1]["w[1, 1]"])


def test_a_small_index_may_not_hold_the_number_of_rows():
    table = jnp.arange(600.0).reshape(300, 2)
    elements = eg.trainable({"t": table}, ["t[255]", "t[5]"])
    loss, slope = elements.value_and_grad(
        lambda params: jax.lax.dynamic_index_in_dim(params["t"], jnp.uint8(255)).sum()
    )
    assert loss == 1021
    assert slope["t[255]"].tolist() == [1, 1]
    assert slope["t[5]"].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("loss", "why"),
    [
        (lambda params: params["b"].sum() + jax.lax.stop_gradient(params["w"]).sum(), "stop_gradient cuts it off"),
        (lambda params: params["b"][jnp.argmax(params["w"][0])], "argmax gives whole numbers"),
        (lambda params: params["b"].sum() if params["b"][0] > 0 else params["w"].sum(), "is not computed from"),
    ],
    ids=["stop_gradient", "argmax", "a branch"],
)
def test_a_loss_without_a_derivative_is_no_loss_of_zero(loss, why):
    elements = eg.trainable({"w": jnp.ones((3, 3)), "b": jnp.ones(3)}, "w[0, 0]")
    with pytest.raises(eg.UnconnectedError, match=f"does not depend on w: .*{why}"):
        elements.grad(loss)


def test_an_element_that_a_slice_leaves_out_has_a_gradient_of_zero():
    elements = eg.trainable({"w": jnp.ones((3, 3))}, "w[0, 0]")
    assert elements.grad(lambda params: (params["w"][1] ** 2).sum())["w[0, 0]"].tolist() == [0]


def test_what_is_returned_beside_the_loss_may_be_anything():
    elements = eg.trainable({"w": jnp.ones((3, 3))}, "w[0, 0]")
    (loss, aux), _ = elements.value_and_grad(
        lambda params: (params["w"].sum(), ["text", 3, params["w"][0]]), has_aux=True
    )
    assert loss == 9
    assert aux[:2] == ["text", 3]
    assert aux[2].tolist() == [1, 1, 1]


def test_a_numpy_array_among_parameters_is_told_from_a_name_that_is_not_there():
    params = {"layer": {"w": np.ones((4, 3)), "b": jnp.ones(3)}}
    with pytest.raises(eg.FrameworkError, match=r"'layer\.w' is a NumPy array, which carries no gradients"):
        eg.trainable(params, "layer.w[0, 0]")
    with pytest.raises(eg.PlaceError, match=r"no parameter named 'layer\.v'"):
        eg.trainable(params, "layer.v[0, 0]")
