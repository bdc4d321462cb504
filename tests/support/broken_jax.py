"""JAX programs without a gradient, as people post them. The line that breaks the path is marked."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from tests.support.programs_broken import Table

BROKEN = Table()
X = jnp.array([0.5, -1.0, 2.0, 1.5])
W = jnp.array([[0.2, -0.4, 0.1, 0.3], [0.5, 0.1, -0.2, 0.4], [0.3, 0.2, 0.6, -0.1], [0.1, 0.7, 0.2, 0.2]])


@BROKEN.says("unconnected", "detached", wrt="w")
def a_frozen_encoder():
    def encode(w, x):
        return jnp.tanh(w @ x)

    def loss(w, x):
        features = jax.lax.stop_gradient(encode(w, x))  # <- here
        return jnp.mean((features - 1.0) ** 2)

    return loss, W, X


@BROKEN.says("unconnected", "detached", wrt="params.critic")
def a_target_network():
    def loss(params, x):
        target = jax.lax.stop_gradient(x @ params["critic"])  # <- here
        value = x @ params["actor"]
        return ((value - target) ** 2).sum()

    return loss, {"actor": W, "critic": W * 2}, X


@BROKEN.says("unconnected", "detached", wrt="x[2]")
def a_cut_inside_a_scan():
    def rollout(x):
        def step(state, force):
            state = 0.9 * state + jax.lax.stop_gradient(force)  # <- here
            return state, state**2

        _, costs = jax.lax.scan(step, 0.0, x)
        return costs.sum()

    return rollout, X


@BROKEN.says("unconnected", "detached", wrt="scale")
def a_cut_inside_jit():
    @jax.jit
    def normalised(x, scale):
        size = jax.lax.stop_gradient(jnp.linalg.norm(x) * scale)  # <- here
        return x / size

    return lambda x, scale: normalised(x, scale).sum(), X, jnp.array(2.0)


@BROKEN.says("unconnected", "detached", wrt="x")
def a_cut_under_vmap():
    def one(row):
        return jnp.sum(jax.lax.stop_gradient(row) ** 2)  # <- here

    return lambda x: jax.vmap(one)(x.reshape(2, 2)).mean(), X


@BROKEN.says("unconnected", "discrete", wrt="logits")
def picking_by_argmax():
    values = jnp.array([10.0, 20.0, 30.0, 40.0])

    def reward(logits):
        choice = jnp.argmax(logits)  # <- here
        return values[choice]

    return reward, X


@BROKEN.says("unconnected", "discrete", wrt="logits")
def accuracy_as_a_loss():
    labels = jnp.array([0, 1, 2, 3])

    def loss(logits):
        predicted = jnp.argmax(logits, axis=-1)  # <- here
        return 1.0 - jnp.mean(predicted == labels)

    return loss, W


@BROKEN.says("unconnected", "discrete", wrt="x")
def a_cast_to_integers():
    def loss(x):
        tokens = (x * 10).astype(jnp.int32)  # <- here
        return jnp.sum(tokens.astype(jnp.float32) ** 2)

    return loss, X


@BROKEN.says("unconnected", "discrete", wrt="x")
def a_hard_threshold():
    def count(x):
        above = x > 0.7  # <- here
        return jnp.sum(above.astype(jnp.float32))

    return count, X


@BROKEN.says("unconnected", "discrete", wrt="logits")
def sampling_an_action():
    def reward(logits):
        action = jax.random.categorical(jax.random.PRNGKey(0), logits)  # <- here
        return jax.nn.one_hot(action, 4) @ jnp.arange(4.0)

    return reward, X


@BROKEN.says("unconnected", "discrete", wrt="p")
def a_bernoulli_gate():
    def loss(p, x):
        gate = jax.random.bernoulli(jax.random.PRNGKey(1), p)  # <- here
        return (gate * x).sum()

    return loss, jax.nn.sigmoid(X), X


@BROKEN.says("unconnected", "discrete", wrt="x")
def a_python_branch():
    def reward(x):
        if x[0] > 0:  # <- here
            return jnp.ones(())
        return jnp.zeros(())

    return reward, X


@BROKEN.says("unconnected", "discrete", wrt="x")
def a_cond_between_constants():
    def price(x):
        return jax.lax.cond(x.sum() > 1.0, lambda: 3.0, lambda: 5.0)  # <- here

    return price, X


@BROKEN.says("unconnected", "step-function", wrt="x")
def quantised_weights():
    def loss(x):
        quantised = jnp.round(x * 8) / 8  # <- here
        return jnp.mean((quantised - 0.3) ** 2)

    return loss, X


@BROKEN.says("unconnected", "step-function", wrt="w")
def a_sign_network():
    def loss(w, x):
        binary = jnp.sign(w)  # <- here
        return jnp.tanh(binary @ x).sum()

    return loss, W, X


@BROKEN.says("unconnected", "step-function", wrt="x")
def bins_by_floor():
    return lambda x: jnp.floor(x / 0.5).mean(), X  # <- here


@BROKEN.says("unconnected", "integer", wrt="ids")
def tokens_asked_for():
    return lambda ids, table: table[ids].sum(), jnp.array([0, 2]), W


@BROKEN.says("unconnected", "unused", wrt="params.bias")
def a_forgotten_bias():
    def predict(params, x):
        return (params["weight"] @ x).sum()

    return predict, {"weight": W, "bias": X}, X


@BROKEN.says("unconnected", "unused", wrt="temperature")
def a_temperature_that_goes_nowhere():
    def loss(logits, temperature):
        scaled = logits / temperature
        del scaled
        return -jax.nn.log_softmax(logits)[0]

    return loss, X, jnp.array(2.0)


@BROKEN.says("unconnected", "outside-tape", wrt="w")
def a_closure_over_the_parameters():
    weights = W * 1.5

    def loss(w, x):
        return jnp.tanh(weights @ x).sum()  # <- here

    return loss, weights, X


@BROKEN.says("unconnected", "outside-tape", wrt="params.w")
def a_partial_over_the_parameters():
    params = {"w": X + 1}

    def forward(x):
        return params["w"] * x  # <- here

    return lambda params, x: forward(x).sum(), params, X


@BROKEN.says("unconnected", "left-framework", wrt="x")
def numpy_in_between():
    def loss(x):
        h = jnp.tanh(x)
        smoothed = np.convolve(h, np.ones(2) / 2)  # <- here
        return jnp.asarray(smoothed).sum()

    return loss, X


@BROKEN.says("unconnected", "left-framework", wrt="x")
def a_float_in_between():
    def loss(x):
        total = float(jnp.sum(x**2))  # <- here
        return jnp.sqrt(jnp.asarray(total))

    return loss, X


@BROKEN.says("unconnected", "left-framework", wrt="x[1]")
def items_in_a_list():
    def loss(x):
        values = [value * 2 for value in x.tolist()]  # <- here
        return jnp.array(values).sum()

    return loss, X


@BROKEN.says("unconnected", "left-framework", wrt="x")
def an_io_callback():
    def logged(x):
        return np.asarray(x) * 2

    def loss(x):
        y = io_callback(logged, jax.ShapeDtypeStruct(x.shape, x.dtype), x)  # <- here
        return y.sum()

    return loss, X


@BROKEN.says("unconnected", "no-rule", wrt="x")
def a_pure_callback():
    def loss(x):
        shape = jax.ShapeDtypeStruct((4,), jnp.float32)
        y = jax.pure_callback(lambda v: np.cumsum(v, dtype=np.float32), shape, x)  # <- here
        return (y**2).sum()

    return loss, X


@BROKEN.says("unconnected", "no-rule", wrt="x")
def a_while_loop():
    def newton(x):
        def close(state):
            return jnp.max(jnp.abs(state**2 - 2)) > 1e-3

        start = jnp.abs(x) + 1
        root = jax.lax.while_loop(close, lambda y: 0.5 * (y + 2 / y), start)  # <- here
        return root.sum()

    return newton, X


@BROKEN.says("unconnected", "no-rule", wrt="x")
def a_loop_of_dynamic_length():
    def power(x, n):
        return jax.lax.fori_loop(0, n, lambda _, y: y * x, jnp.ones(4)).sum()  # <- here

    return jax.jit(power), X, jnp.array(3)
