"""JAX programs whose cause or remedy is easily mistaken for another. The line that does it is marked."""

import jax
import jax.numpy as jnp
from jax import lax

from tests.support.programs_broken import Table

BROKEN = Table()
X = jnp.array([1.0, 2.0, 3.0], jnp.float32)


@BROKEN.says("unconnected", "discrete", wrt="x")
def whole_numbers_in_between():
    return lambda x: x.astype(jnp.int32).astype(jnp.float32).sum(), X  # <- here


@BROKEN.says("unconnected", "discrete", wrt="x")
def the_place_of_the_largest():
    return lambda x: jnp.arange(3.0)[lax.top_k(x, 1)[1]].sum(), X  # <- here


@BROKEN.says("unconnected", "discrete", wrt="x")
def a_choice_from_an_array_that_is_the_argument_too():
    return lambda x: jax.nn.one_hot(jnp.argmax(x), 3) @ X, X  # <- here


@BROKEN.says("zero", "stationary", wrt="y")
def a_power_of_zero():
    return lambda x, y: (x**y).sum(), jnp.zeros(3), X  # <- here


@BROKEN.says("nonfinite", "singular", fix="arctan2(y, x + 1e-12)", wrt="x")
def an_angle_at_the_origin():
    return lambda x: jnp.arctan2(x[0], x[1]), jnp.zeros(2)  # <- here


@BROKEN.says("nonfinite", "overflow", wrt="x")
def a_square_in_half_precision():
    return lambda x: ((x * 300) ** 2).sum(), jnp.ones(2, jnp.float16)  # <- here


@BROKEN.says("nonfinite", "overflow", wrt="x")
def a_high_power():
    return lambda x: (x**30).sum(), X * 100  # <- here


@BROKEN.says("zero", "dead-relu", fix="hinge", wrt="x[2]")
def a_hinge():
    return lambda x: jnp.maximum(0.0, 1 - x).sum(), X  # <- here


@BROKEN.says("zero", "clamped", wrt="x")
def a_relu6_above_six():
    return lambda x: jax.nn.relu6(x).sum(), X * 30  # <- here


@BROKEN.says("zero", "cancelled", wrt="x")
def a_softmax_over_one_class():
    return lambda x: (jax.nn.softmax(x, axis=1) * X[:, None]).sum(), X[:, None]  # <- here


@BROKEN.says("zero", "underflow", fix="float64", wrt="x")
def a_chain_of_sigmoids():
    def f(x):
        for _ in range(80):
            x = jax.nn.sigmoid(x)
        return x.sum()

    return f, X


@BROKEN.says("nonfinite", "singular", fix="arccos(jnp.clip(", wrt="x")
def an_angle_between_the_same():
    return lambda x: jnp.arccos(x), jnp.array(1.0)  # <- here


@BROKEN.says("nonfinite", "masked-branch", fix="log(jnp.where(ok, x, 1.0))", wrt="x")
def a_masked_logarithm():
    return lambda x: jnp.where(x > 0, jnp.log(x), 0.0).sum(), jnp.array([0.0, 1.0])  # <- here


@BROKEN.says("nonfinite", "masked-branch", fix="x / jnp.where(ok, y, 1.0)", wrt="x")
def a_masked_division():
    return lambda x: jnp.where(x > 0, 1 / x, 0.0).sum(), jnp.array([0.0, 1.0])  # <- here


@BROKEN.says("zero", "overwritten", fix="keeps x", wrt="x[0]")
def an_element_that_is_set():
    return lambda x: x.at[0].set(1.0).sum(), X  # <- here


@BROKEN.says("nonfinite", "overflow", wrt="x")
def a_square_that_is_normalised():
    return lambda x: jax.nn.softmax((x * 300) ** 2)[0], X.astype(jnp.float16)  # <- here


@BROKEN.says("nonfinite", "singular", "several different values", wrt="x")
def a_spread_of_equals():
    def f(x):
        return x.std()  # <- here

    return f, jnp.ones(3)
