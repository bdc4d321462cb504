"""What explain and check say on JAX and how: texts, kinks, refusals, and code that only tracing makes fail."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import elementgrad as eg
from tests.support.meshes import shard_map

X = jnp.array([1.0, -2.0, 3.0, 0.0])


def line_of(mark):
    with open(__file__) as file:
        return next(number for number, line in enumerate(file, 1) if line.rstrip().endswith(f"# {mark}"))


def test_the_text_names_the_line_and_the_fix():
    def f(x):
        return jax.lax.stop_gradient(x * 2).sum()  # cut

    found = eg.explain(f, X, wrt="x[1]")
    assert str(found) == (
        "output has no gradient with respect to x[1]: stop_gradient cuts the gradient.\n"
        f"where: test_explain_jax.py:{line_of('cut')}, at stop_gradient\n"
        "fix: leave stop_gradient out, or apply it only where no gradient is wanted"
    )
    assert found.path == ("multiply", "stop_gradient (broken here)", "sum")
    with pytest.raises(eg.UnconnectedError, match=rf"stop_gradient cuts the gradient .*:{line_of('cut')}"):
        eg.grad(f, X)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["as it is", "compiled"])
def test_a_function_on_several_devices_is_one_operation(wrap):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("i",))
    rectify = shard_map(jax.nn.relu, mesh=mesh, in_specs=P("i"), out_specs=P("i"))
    f = wrap(lambda x: rectify(x * 2).sum())  # sharded
    np.testing.assert_array_equal(eg.grad(f, X), [2.0, 0.0, 2.0, 0.0])
    found = eg.explain(f, X, wrt="x[1]")
    assert (found.verdict, found.operation) == ("zero", "shard_map")
    assert found.where == f"test_explain_jax.py:{line_of('sharded')}"
    found = eg.explain(f, X, wrt="x[0]")
    assert found.verdict == "flows"
    np.testing.assert_array_equal(found.value, 2.0)


KINKS = {
    "abs at 0": (jnp.abs, 0.0, "flows", None, 1.0),
    "clip at the bound": (lambda x: jnp.clip(x, 0, 1), 1.0, "flows", None, 0.5),
    "max(x, 0) at 0": (lambda x: jnp.maximum(x, 0), 0.0, "flows", None, 0.5),
    "round": (jnp.round, 0.4, "unconnected", "step-function", None),
    "where and sqrt(0)": (lambda x: jnp.where(x > 0, jnp.sqrt(x), 0), 0.0, "nonfinite", "masked-branch", np.nan),
    "sqrt(0)": (jnp.sqrt, 0.0, "nonfinite", "singular", np.inf),
}


@pytest.mark.parametrize("kink", KINKS)
def test_a_kink_is_told_as_jax_has_it(kink):
    function, x, verdict, cause, value = KINKS[kink]
    found = eg.explain(function, jnp.array(x))
    assert (found.verdict, found.cause) == (verdict, cause)
    if value is None:
        assert found.value is None
    else:
        np.testing.assert_equal(float(found.value), value)
        np.testing.assert_equal(float(jax.grad(function)(x)), value)


def test_check_agrees_at_a_kink_and_names_what_is_not_finite():
    assert eg.check(jnp.abs, jnp.array(0.0))
    checked = eg.check(lambda x: jnp.where(x > 0, jnp.sqrt(x), 0), jnp.array(0.0))
    assert not checked
    assert (checked.diagnosis.cause, checked.operation) == ("masked-branch", "sqrt")


def test_check_uses_float64_where_jax_has_none():
    x = X.astype(jnp.float32)
    before = jax.config.read("jax_enable_x64")
    jax.config.update("jax_enable_x64", False)
    try:
        checked = eg.check(lambda x: jnp.sin(x).sum(), x)
        assert jnp.ones(1).dtype == jnp.float32
    finally:
        jax.config.update("jax_enable_x64", before)
    assert checked
    assert checked.dtype == "float64"


def test_an_element_flows_beside_one_that_is_dead():
    def f(x):
        return jax.nn.relu(x).sum()

    assert eg.explain(f, X, wrt="x[0]").verdict == "flows"
    assert eg.explain(f, X, wrt="x[1]").cause == "dead-relu"
    assert "2 of 4 elements have a gradient of zero" in eg.explain(f, X).evidence


def test_an_index_out_of_range_is_told_though_the_gradient_flows():
    found = eg.explain(lambda x: x[jnp.array([0, 9])].sum(), X, wrt="x[0]")
    assert found.verdict == "flows"
    assert "index 9 is out of range for axis 0 of size 4" in found.evidence[-1]


def test_a_tie_is_told():
    found = eg.explain(lambda x: jax.lax.top_k(x, 1)[0][0], jnp.array([3.0, 3.0, 1.0, 0.0]), wrt="x[1]")
    assert (found.verdict, found.cause) == ("zero", "tie")


def test_the_users_exception_comes_through():
    def f(x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        eg.explain(f, X)
    with pytest.raises(TypeError, match="same shape"):
        eg.explain(lambda x: jnp.dot(x, jnp.ones(3)), X)


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x.sum() * (2 if x[0] > 0 else 1),
        lambda x: x.sum() if bool(jnp.all(x < 9)) else x[0],
        lambda x: x[: int(jnp.argmax(x))].sum(),
        lambda x: [print(f"{x}"), x.sum()][1],
    ],
    ids=["if", "bool", "int", "print"],
)
def test_code_that_looks_at_values_is_followed(f):
    found = eg.explain(f, X, wrt="x[0]")
    assert found.verdict == "flows"
    assert found.path


def test_what_jax_refuses_to_differentiate_is_a_verdict():
    def f(x):
        return jax.device_put(x, x.device).sum()  # refused

    found = eg.explain(f, X)
    assert (found.verdict, found.cause) == ("unconnected", None)
    assert found.where == f"test_explain_jax.py:{line_of('refused')}"
    assert "jax refuses to differentiate it: " in str(found)


def test_a_long_loop_is_one_step():
    def f(x):
        return jax.lax.scan(lambda h, _: (0.999 * h + 0.001 * x, None), x, None, 5000)[0].sum()

    found = eg.explain(f, X, wrt="x[0]")
    assert found.verdict == "flows"
    assert found.path == ("scan", "sum")


def test_training_and_ranking_name_the_line_that_cuts():
    params = {"v": X, "w": jnp.ones(2)}

    def loss(params):
        return (jax.lax.stop_gradient(params["v"]) ** 2).sum() + params["w"].sum()  # loss cut

    elements = eg.trainable(params, "v[1]")
    where = f"stop_gradient cuts the gradient .test_explain_jax.py:{line_of('loss cut')}.; leave stop_gradient out"
    told = f"the loss for v.1. does not depend on v: {where}"
    with pytest.raises(eg.UnconnectedError, match=told):
        elements.grad(loss)
    with pytest.raises(eg.UnconnectedError, match=told):
        elements.grad(lambda params: (loss(params), 1), has_aux=True)
    with pytest.raises(eg.UnconnectedError, match=told):
        elements.grad({"v[1]": loss})
    with pytest.raises(eg.UnconnectedError, match=f"choose from: v; as to v, {where}"):
        eg.top(params, loss, k=1, among="v")
    with pytest.raises(eg.UnconnectedError, match="does not depend on v; give one"):  # nothing is looked into there
        jax.jit(lambda values: elements.grad(loss, values))(elements.values)


def test_a_compiled_operation_is_tried_in_float64_by_itself():
    runs = []

    def f(x):
        runs.append(1)
        return jnp.sum(jnp.sqrt(x * 0) + jax.nn.gelu(x))

    found = eg.explain(f, jnp.ones(3, "float32"), wrt="x[0]")
    assert (found.verdict, found.cause, found.operation) == ("nonfinite", "singular", "sqrt")
    assert len(runs) == 1


@pytest.mark.parametrize(
    ("f", "wrt", "index"),
    [
        (lambda x: x[-5], "x[0]", "index -5 is"),
        (lambda x: jax.lax.dynamic_index_in_dim(x, -5)[0], "x[0]", "index -5 is"),
        (lambda x: jax.lax.dynamic_update_slice(jnp.zeros(4), x[:2], (3,)).sum(), "x[0]", "index 3 is"),
        (lambda x: jax.lax.dynamic_update_slice(jnp.zeros(4), x[:2], (-7,)).sum(), "x[0]", "index -7 is"),
        (lambda x: jnp.take(x, jnp.array([0, 5]), mode="fill", fill_value=0.0)[1], "x", "index 5 is"),
        (lambda x: jnp.take(x, jnp.array([0, 5]), mode="fill", fill_value=0.0).sum(), "x[2]", "index 5 is"),
    ],
)
def test_every_index_out_of_range_is_in_the_evidence(f, wrt, index):
    found = eg.explain(f, jnp.array([1.0, 2.0, 3.0]), wrt=wrt)
    assert any(index in each for each in found.evidence), found


def test_an_update_beside_the_array_is_named():
    found = eg.explain(lambda x: jax.lax.dynamic_update_slice(x, jnp.zeros(2), (5,)).sum(), jnp.ones(3), wrt="x[2]")
    assert (found.verdict, found.cause) == ("zero", "out-of-range")
    assert "index 5 is out of range for axis 0 of size 3" in found.evidence[0]
    assert "writes to the nearest place" in str(found)


@pytest.mark.parametrize("write", ["set", "add", "max"])
def test_a_write_beside_the_array_is_said_to_be_dropped(write):
    found = eg.explain(lambda x, u: getattr(x.at[7], write)(u).sum(), jnp.ones(3), jnp.array(2.0), wrt="u")
    assert (found.verdict, found.cause) == ("zero", "out-of-range")
    assert "JAX drops what is written there" in str(found)
