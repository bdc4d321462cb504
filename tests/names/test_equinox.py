"""Models of Equinox in every verb: names, reads, explanations, training."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import elementgrad as eg
from tests.support import frameworks  # noqa: F401  # float64

equinox = pytest.importorskip("equinox", reason="the oldest packages come without equinox")
X = jnp.array([0.3, -1.2, 0.7])
Y = jnp.array([1.0, -1.0])
WEIGHTS = [f"model.layers.{i}.weight[0, 1]" for i in range(4)]


@pytest.fixture
def mlp():
    return equinox.nn.MLP(3, 2, 4, 3, activation=jnp.tanh, key=jax.random.PRNGKey(0))


def loss(model):
    return jnp.mean((model(X) - Y) ** 2)


def test_names_of_a_module_need_no_run(mlp):
    names = [f"layers.{i}.{leaf}" for i in range(4) for leaf in ("weight", "bias")]
    assert [row.name for row in eg.names(mlp)] == names
    assert {row.kind for row in eg.names(mlp)} == {"parameter"}
    assert len(eg.names(mlp, match="layers.*.weight")) == 4
    assert [row.name for row in eg.names(mlp, X, kind="input")] == ["x"]


def test_the_gradient_of_a_loss_by_weights_is_that_of_equinox(mlp):
    expected = equinox.filter_grad(loss)(mlp)
    read = eg.grad(loss, mlp, wrt="model.layers.*.weight[0, 1]")
    assert list(read) == WEIGHTS
    for value, layer in zip(read.values(), expected.layers, strict=True):
        np.testing.assert_allclose(value, layer.weight[0, 1], rtol=1e-12)
    by_itself = eg.grad(mlp, X, of="output[1]", wrt="layers.2.bias")
    expected = equinox.filter_grad(lambda model: model(X)[1])(mlp)
    np.testing.assert_allclose(by_itself, expected.layers[2].bias, rtol=1e-12)
    np.testing.assert_array_equal(eg.grad(mlp, x=X, of="output[1]", wrt="layers.2.bias"), by_itself)
    parameters, static = equinox.partition(mlp, equinox.is_array)
    parted = eg.grad(lambda params: loss(equinox.combine(params, static)), parameters, wrt="params.layers.0.bias[2]")
    np.testing.assert_allclose(parted, eg.grad(loss, mlp, wrt="model.layers.0.bias[2]"), rtol=1e-12)


def test_arrays_of_numpy_and_second_derivatives(mlp):
    np.testing.assert_array_equal(
        eg.grad(mlp, np.asarray(X), of="output[0]", wrt="x"), eg.grad(mlp, X, of="output[0]", wrt="x")
    )
    hessian = jax.hessian(lambda b: loss(equinox.tree_at(lambda m: m.layers[0].bias, mlp, b)))(mlp.layers[0].bias)
    np.testing.assert_allclose(eg.hessian(loss, mlp, wrt="model.layers.0.bias").dense(), hessian, rtol=1e-9)
    jitted = eg.grad(equinox.filter_jit(mlp), X, of="output[0]", wrt="x")
    np.testing.assert_allclose(jitted, eg.grad(mlp, X, of="output[0]", wrt="x"), rtol=1e-12)


def test_weights_are_explained_checked_and_split(mlp):
    diagnoses = eg.explain(loss, mlp, wrt="model.layers.*.weight[0, 1]")
    assert [diagnosis.verdict for diagnosis in diagnoses.values()] == ["flows"] * 4
    checks = eg.check(loss, mlp, wrt="model.layers.*.weight[0, 1]")
    assert all(checks.values())
    shares = eg.contributions(loss, mlp, wrt="model.layers.*.weight[0, 1]")
    gradients = eg.grad(loss, mlp, wrt="model.layers.*.weight[0, 1]")
    assert list(diagnoses) == list(checks) == list(shares) == WEIGHTS
    for place in WEIGHTS:
        np.testing.assert_allclose(shares[place].total, gradients[place], rtol=1e-9)
    dead = equinox.nn.Sequential([mlp, equinox.nn.Lambda(lambda y: jax.nn.relu(y - 100.0))])
    assert eg.explain(dead, X, of="output[0]", wrt="layers.0.layers.1.bias[0]").cause == "dead-relu"


def test_unsupported_calls_of_equinox_modules_are_refused(mlp):
    with pytest.raises(eg.PlaceError, match=r"none of the inputs x, and .* constant on JAX; pass it to the function"):
        eg.grad(lambda x: jnp.sum(mlp(x)), X, wrt=eg.at(mlp.layers[0].weight)[0, 1])
    with pytest.raises(eg.OptionError, match=r"names_from=MLP is not a model .* On JAX pass it to the function"):
        eg.grad(lambda x: jnp.sum(mlp(x)), X, wrt="layers.0.weight[0, 1]", names_from=mlp)
    with pytest.raises(eg.PlaceError, match=r"is constant on JAX, so pass it as an argument"):
        eg.grad(lambda x: jnp.sum(mlp(x)), X, wrt="layers.0.weight[0, 1]")
    with pytest.raises(eg.PlaceError, match=r"nearest: model\.layers\.0\.weight"):
        eg.grad(loss, mlp, wrt="model.layers.0.wight")


def test_elements_of_a_module_train_and_patches_fit(mlp, tmp_path):
    elements = eg.trainable(mlp, "layers.*.weight[0]")
    values, optimizer = elements.values, optax.adam(0.05)
    state = optimizer.init(values)
    for _ in range(3):
        gradients = elements.grad(loss, values)
        updates, state = optimizer.update(gradients, state)
        values = optax.apply_updates(values, updates)
    trained = elements.merge(values)
    assert isinstance(trained, equinox.nn.MLP)
    assert loss(trained) < loss(mlp)
    for before, after in zip(mlp.layers, trained.layers, strict=True):
        np.testing.assert_array_equal(before.weight[1:], after.weight[1:])
        np.testing.assert_array_equal(before.bias, after.bias)
        assert (before.weight[0] != after.weight[0]).any()
    patch = eg.diff(mlp, trained, tmp_path / "patch.safetensors")
    applied = eg.apply(mlp, tmp_path / "patch.safetensors").merge()
    assert eg.diff(applied, trained).size == 0
    assert patch.size == sum(layer.weight.shape[1] for layer in mlp.layers)
