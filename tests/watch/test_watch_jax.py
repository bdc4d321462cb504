"""Watching steps of JAX: which of several bad numbers was the first."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import elementgrad as eg
from tests.support.meshes import shard_map


@jax.jit
def step(weights, x):
    def loss(weights):
        scores = jnp.log(x) @ weights
        return jnp.square(jax.nn.softmax(scores)).sum()

    return weights - 0.1 * jax.grad(loss)(weights), {}


def test_numbers_that_a_function_of_jax_starts_from_are_no_fault():
    watched = eg.watch(step, capture=None)
    weights, _ = watched(jnp.ones((3, 3)), jnp.ones((2, 3)))
    with pytest.raises(eg.WatchError) as raised:
        watched(weights, jnp.ones((2, 3)).at[1, 2].set(-4.0))  # softmax starts its maximum from -inf
    assert (raised.value.cause, raised.value.place) == ("singular", "log[1, 2]")
    assert raised.value.where.startswith("test_watch_jax.py:")


def test_a_step_on_several_devices_is_followed_up_to_its_program(tmp_path):
    def step(state, x):
        loss, g = jax.value_and_grad(lambda w: jnp.mean(x @ jnp.sqrt(w)))(state)
        return state - 0.1 * jax.lax.pmean(g, "i"), loss

    mapped = jax.pmap(step, axis_name="i")
    state, x = jnp.ones((1, 3, 2)), jnp.ones((1, 2, 3)).at[0, 1, 2].set(jnp.nan)
    watched = eg.watch(mapped, capture=tmp_path / "nan.capture")
    with pytest.raises(eg.WatchError) as caught:
        watched(state, x)
    assert (caught.value.place, caught.value.cause) == ("x[0, 1, 2]", "bad-input"), str(caught.value)
    assert watched.replay().same
    with pytest.raises(eg.WatchError) as caught:
        eg.watch(mapped, capture=None)(jnp.zeros((1, 3, 2)), jnp.ones((1, 2, 3)))
    assert caught.value.cause is None
    assert "runs as one operation on all devices" in caught.value.clause


@pytest.mark.parametrize("wrap", [lambda step: step, jax.jit], ids=["as it is", "compiled"])
def test_a_step_that_is_sharded_is_followed_up_to_its_program(wrap):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("i",))

    def step(state, x):
        return state - jax.lax.pmean(jnp.log(x).mean(0), "i"), {"mean": jax.lax.pmean(x.mean(), "i")}

    specs = {"in_specs": (P(), P("i")), "out_specs": (P(), P())}
    watched = eg.watch(wrap(shard_map(step, mesh=mesh, **specs)), capture=None)
    state, _ = watched(jnp.ones(2), jnp.ones((4, 2)))
    with pytest.raises(eg.WatchError) as caught:
        watched(state, jnp.ones((4, 2)).at[3, 1].set(-2.0))
    assert (caught.value.place, caught.value.cause) == ("output.0[1]", None), str(caught.value)
    assert "inside of shard_map, which runs as one operation on all devices" in caught.value.clause
    assert caught.value.where.startswith("test_watch_jax.py:")


def test_a_pytree_of_parameters_is_no_step():
    with pytest.raises(eg.FrameworkError, match=r"dict cannot be watched; give a torch\.nn\.Module, or a step of JAX"):
        eg.watch({"w": jnp.ones(2)})
