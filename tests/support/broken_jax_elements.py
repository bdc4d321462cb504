"""JAX programs in which the element asked about is cut off or dead while others flow. The line at fault is marked."""

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

from tests.support.programs_broken import Table

BROKEN = Table()
X = jnp.array([1.0, 2.0, 3.0])
ROWS = jnp.array([1.0, -1.0])
W = jnp.array(2.0)


@BROKEN.says("zero", "detached", wrt="x[0]")
def one_factor_stopped():
    def loss(x):
        scale = stop_gradient(x[0])  # <- here
        return x[1] * scale

    return loss, X


@BROKEN.says("zero", "detached", wrt="x[0]")
def a_stopped_prefix():
    def loss(x):
        prefix = stop_gradient(x[:1])  # <- here
        return jnp.concatenate([prefix, x[1:]]).sum()

    return loss, X


@BROKEN.says("zero", "detached", wrt="x[0]")
def a_state_stopped_in_every_turn():
    def last(x):
        state = 1.0
        for turn in range(3):
            state = stop_gradient(state) * x[turn]  # <- here
        return state

    return last, X


@BROKEN.says("zero", "detached", wrt="x[0]")
def a_state_stopped_in_a_scan():
    def last(x):
        def turn(state, part):
            state = stop_gradient(state) * part  # <- here
            return state, state

        return jax.lax.scan(turn, 1.0, x)[1][-1]

    return last, X


@BROKEN.says("zero", "detached", wrt="x[0]")
def a_part_that_is_stopped_where_it_is_positive():
    def loss(x):
        kept = stop_gradient(x)  # <- here
        return jnp.where(x > 0, kept, x).sum()

    return loss, X


@BROKEN.says("zero", "detached", wrt="x[0]")
def a_branch_that_is_stopped():
    def stopped(y):
        return stop_gradient(y).sum()  # <- here

    return lambda x: jax.lax.cond(x[0] > 0, stopped, jnp.sum, x), X


@BROKEN.says("zero", "unused", wrt="x[0]")
def an_element_that_is_not_used():
    return lambda x: (x * 2)[1:].prod(), X  # <- here


@BROKEN.says("zero", "dead-relu", of="output[1]", wrt="w")
def a_row_that_is_dead():
    return lambda x, w: jax.nn.relu(x * w), ROWS, W  # <- here


@BROKEN.says("zero", "dead-relu", of="output[1]", wrt="w")
def a_row_below_a_maximum():
    return lambda x, w: jnp.maximum(x * w, 0), ROWS, W  # <- here


@BROKEN.says("zero", "clamped", of="output[1]", wrt="w")
def a_row_out_of_bounds():
    return lambda x, w: jnp.clip(x * w, 0, 5), ROWS, W  # <- here


@BROKEN.says("zero", "saturated", of="output[1]", wrt="w")
def a_row_that_is_saturated():
    return lambda x, w: jax.nn.sigmoid(x * w * 1000), ROWS, W  # <- here


@BROKEN.says("zero", "masked", of="output[1]", wrt="w")
def a_row_times_zero():
    mask = jnp.array([1.0, 0.0])
    return lambda x, w: x * w * mask, ROWS, W  # <- here


@BROKEN.says("zero", "dead-relu", of="output[0]", wrt="w[0, 0]")
def a_recurrence_that_is_dead():
    def last(w, x):
        state = jnp.zeros(2)
        for turn in range(2):
            state = jax.nn.relu(w @ state + x[turn] - 100)  # <- here
        return state

    return last, jnp.ones((2, 2)), jnp.ones((2, 2))


@BROKEN.says("zero", "masked", of="output[1, 0]", wrt="x[2, 0]")
def a_token_of_the_future():
    keys = jax.random.split(jax.random.PRNGKey(0), 4)
    query, key, value = [jax.random.normal(each, (2, 2)) for each in keys[:3]]

    def attention(x):
        scores = (x @ query) @ (x @ key).T
        scores = jnp.where(jnp.tri(3, dtype=bool), scores, -jnp.inf)  # <- here
        return jax.nn.softmax(scores) @ (x @ value)

    return attention, jax.random.normal(keys[3], (3, 2))


@BROKEN.says("nonfinite", "singular", wrt="x[0]")
def an_angle_at_the_origin():
    return lambda x: jnp.arctan2(x[0], x[1]), jnp.zeros(2)  # <- here


@BROKEN.says("zero", "not-selected", wrt="x[0]")
def the_smallest_of_a_sorted_list():
    return lambda x: jnp.sort(x)[0], jnp.array([3.0, 1.0, 2.0])  # <- here
