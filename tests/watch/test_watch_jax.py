"""Watching steps of JAX: which of several bad numbers was the first."""

import jax
import jax.numpy as jnp
import pytest

import elementgrad as eg


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
