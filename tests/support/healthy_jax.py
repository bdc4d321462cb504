"""JAX programs that look suspicious and are not: their gradients flow, and nothing may be said against them."""

import jax
import jax.numpy as jnp

import elementgrad as eg
from tests.support.programs_broken import Table

HEALTHY = Table()
X = jnp.array([0.5, -1.0, 2.0, 1.5])
W = jnp.array([[0.2, -0.4, 0.1, 0.3], [0.5, 0.1, -0.2, 0.4], [0.3, 0.2, 0.6, -0.1], [0.1, 0.7, 0.2, 0.2]])


@HEALTHY.says("flows", wrt="x[2]")
def a_live_unit():
    return lambda x: jax.nn.relu(x).sum(), X


@HEALTHY.says("flows", wrt="x")
def a_softmax_that_cuts_its_maximum():
    return lambda x: jax.nn.softmax(x)[1], X


@HEALTHY.says("flows", wrt="x")
def a_log_of_sums():
    return lambda x: jax.nn.logsumexp(x), X


@HEALTHY.says("flows", wrt="x[0]")
def an_index():
    return lambda x: x[0] * 3, X


@HEALTHY.says("flows", wrt="x[0]")
def a_mask_of_booleans():
    return lambda x: x[jnp.array([True, False, True, False])].sum(), X


@HEALTHY.says("flows", wrt="x[2]")
def a_python_branch():
    def f(x):
        if x[0] > 0:
            return (x**2).sum()
        return x.sum()

    return f, X


@HEALTHY.says("flows", wrt="x")
def a_cond():
    return lambda x: jax.lax.cond(x[0] > 0, lambda y: (y**2).sum(), lambda y: y.sum(), x), X


@HEALTHY.says("flows", wrt="x[1]")
def a_scan():
    def f(x):
        return jax.lax.scan(lambda h, row: (jnp.tanh(h + row), h), 0.1, x)[0]

    return f, X


@HEALTHY.says("flows", wrt="x")
def a_loop_of_known_length():
    return lambda x: jax.lax.fori_loop(0, 3, lambda _, y: jnp.sin(y) + 1, x).sum(), X


@HEALTHY.says("flows", wrt="w[1, 2]")
def a_jitted_loss():
    @jax.jit
    def loss(w, x):
        return jnp.mean((jnp.tanh(w @ x) - 1) ** 2)

    return loss, W, X


@HEALTHY.says("flows", wrt="w")
def a_recomputed_layer():
    return lambda w, x: jax.checkpoint(lambda w: jnp.tanh(w @ x))(w).sum(), W, X


@HEALTHY.says("flows", wrt="x")
def a_straight_through_round():
    return lambda x: (x + jax.lax.stop_gradient(jnp.round(x) - x)).sum(), X


@HEALTHY.says("flows", wrt="x[1]")
def a_square_root_made_safe():
    def f(x):
        safe = jnp.where(x > 0, x, 1.0)
        return jnp.where(x > 0, jnp.sqrt(safe), x).sum()

    return f, X


@jax.custom_vjp
def squared(x):
    return x**2


squared.defvjp(lambda x: (squared(x), x), lambda x, g: (2 * x * g,))


@HEALTHY.says("flows", wrt="x[2]")
def a_rule_that_is_right():
    return lambda x: squared(x).sum(), X


@HEALTHY.says("flows", wrt="table[2, 1]")
def a_row_that_is_looked_up():
    return lambda table, ids: table[ids].sum(), W, jnp.array([0, 2])


@HEALTHY.says("flows", wrt="x")
def a_mean_over_a_vmap():
    return lambda x: jax.vmap(lambda row: jnp.dot(row, row))(x.reshape(2, 2)).mean(), X


@HEALTHY.says("flows", wrt="x[0]")
def a_gradient_of_a_gradient():
    return lambda x: jax.grad(lambda y: (y**3).sum())(x)[0], X


@HEALTHY.says("flows", wrt="hidden[1]")
def a_tag():
    def f(x):
        hidden = eg.tag(jnp.tanh(x), "hidden")
        return (hidden**2).sum()

    return f, X
