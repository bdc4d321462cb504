"""JAX programs whose gradient is zero, not finite or wrong, as people post them. The line that does it is marked."""

import jax
import jax.numpy as jnp

from tests.support.programs_broken import Table

BROKEN = Table()
X = jnp.array([0.5, -1.0, 2.0, 0.0])
W = jnp.array([[0.2, -0.4, 0.1, 0.3], [0.5, 0.1, -0.2, 0.4], [0.3, 0.2, 0.6, -0.1], [0.1, 0.7, 0.2, 0.2]])


@BROKEN.says("zero", "dead-relu", wrt="x[1]")
def a_dead_unit():
    return lambda x: jax.nn.relu(x).sum(), X  # <- here


@BROKEN.says("zero", "dead-relu", wrt="params.first.b[2]")
def a_layer_with_a_large_negative_bias():
    params = {"first": {"w": W, "b": jnp.full(4, -50.0)}, "last": X + 3}

    def predict(params, x):
        hidden = jnp.maximum(params["first"]["w"] @ x + params["first"]["b"], 0)  # <- here
        return hidden @ params["last"]

    return predict, params, X


@BROKEN.says("zero", "saturated", wrt="x[2]")
def a_saturated_sigmoid():
    return lambda x: jax.nn.sigmoid(200 * x).sum(), X  # <- here


@BROKEN.says("zero", "saturated", wrt="logits[1]")
def a_confident_softmax():
    def loss(logits):
        probabilities = jax.nn.softmax(logits * 500)  # <- here
        return -jnp.log(probabilities[2] + 1e-9)

    return loss, X


@BROKEN.says("zero", "saturated", wrt="w")
def a_saturated_recurrence():
    def loss(w):
        def step(h, x):
            return jnp.tanh(w * h + x), None  # <- here

        return jax.lax.scan(step, jnp.array(1.0), jnp.full(4, 60.0))[0]

    return loss, jnp.array(2.0)


@BROKEN.says("zero", "clamped", wrt="x[2]")
def a_clipped_action():
    return lambda x: jnp.clip(x, -1, 1).sum(), X  # <- here


@BROKEN.says("zero", "clamped", wrt="ratio[2]")
def a_clipped_objective():
    def loss(ratio, advantage):
        clipped = jax.lax.clamp(0.8, ratio, 1.2)  # <- here
        return -(clipped * advantage).mean()

    return loss, X, X + 1


@BROKEN.says("zero", "masked", wrt="x[3]")
def a_padding_mask():
    mask = jnp.array([1.0, 1.0, 1.0, 0.0])

    def loss(x):
        kept = x * mask  # <- here
        return (kept**2).sum() / mask.sum()

    return loss, X + 1


@BROKEN.says("zero", "masked", wrt="scores[0, 2]")
def a_causal_mask():
    def attend(scores):
        causal = jnp.tril(jnp.ones((4, 4), bool))
        masked = jnp.where(causal, scores, -1e9)  # <- here
        return jax.nn.softmax(masked, axis=-1)[0, 0] + masked[1, 1]

    return attend, W


@BROKEN.says("zero", "row-not-used", wrt="table[3, 1]")
def a_token_that_does_not_occur():
    def loss(table, ids):
        vectors = jnp.take(table, ids, axis=0)  # <- here
        return (vectors**2).sum()

    return loss, W, jnp.array([0, 2])


@BROKEN.says("zero", "out-of-range", wrt="table[3]")
def an_index_out_of_range():
    return lambda table, ids: table[ids].sum(), W, jnp.array([0, 9])  # <- here


@BROKEN.says("zero", "out-of-range", wrt="value")
def a_write_out_of_range():
    return lambda x, value: x.at[7].set(value).sum(), X, jnp.array(2.0)  # <- here


@BROKEN.says("zero", "overwritten", wrt="x[1]")
def an_element_that_is_set():
    def loss(x):
        y = x.at[1].set(3.0)  # <- here
        return (y**2).sum()

    return loss, X


@BROKEN.says("zero", "overwritten", wrt="cache[2]")
def a_cache_that_is_updated():
    def read(cache, x):
        cache = jax.lax.dynamic_update_slice(cache, x[:2], (2,))  # <- here
        return (cache * 2).sum()

    return read, X, X + 1


@BROKEN.says("zero", "cancelled", wrt="logits")
def a_sum_over_a_softmax():
    def loss(logits):
        probabilities = jax.nn.softmax(logits)
        return probabilities.sum()  # <- here

    return loss, X


@BROKEN.says("zero", "cancelled", wrt="x[0]")
def a_difference_with_itself():
    def loss(x):
        other = x * 1.0
        return (x - other).sum()  # <- here

    return loss, X


@BROKEN.says("zero", "underflow", wrt="x[0]")
def a_half_precision_loss():
    def loss(x):
        scaled = x * jnp.float16(1e-5)
        return scaled[0] * jnp.float16(1e-4)  # <- here

    return loss, X.astype(jnp.float16)


@BROKEN.says("zero", "not-selected", wrt="x[1]")
def the_largest_of_several():
    return lambda x: jnp.max(x) ** 2, X  # <- here


@BROKEN.says("zero", "not-selected", wrt="x[0]")
def the_top_of_a_list():
    def loss(x):
        best, _ = jax.lax.top_k(x, 1)  # <- here
        return best[0]

    return loss, X


@BROKEN.says("zero", "stationary", wrt="x[3]")
def a_parameter_at_its_minimum():
    return lambda x: (x**2).sum(), X  # <- here


@jax.custom_vjp
def gate(x):
    return x * (x > 0)


gate.defvjp(lambda x: (gate(x), x), lambda x, g: (jnp.zeros_like(g),))


@BROKEN.says("zero", "custom-rule", wrt="x[2]")
def a_rule_that_gives_zeros():
    def loss(x):
        y = gate(x)  # <- here
        return (y * 3).sum()

    return loss, X


@jax.custom_jvp
def cube(x):
    return x**3


cube.defjvp(lambda primals, tangents: (cube(*primals), 3 * primals[0] * tangents[0]))


@BROKEN.says("mismatch", "custom-rule", wrt="x[2]")
def a_rule_that_is_wrong():
    def loss(x):
        return cube(x).sum()  # <- here

    return loss, X


@jax.custom_vjp
def quantise(x):
    return jnp.round(x * 4) / 4


quantise.defvjp(lambda x: (quantise(x), None), lambda _, g: (g,))


@BROKEN.says("mismatch", "custom-rule", wrt="w[0, 1]")
def a_straight_through_estimator():
    def loss(w, x):
        return jnp.tanh(quantise(w) @ x).sum()  # <- here

    return jax.jit(loss), W, X


@BROKEN.says("nonfinite", "masked-branch", wrt="x[3]")
def a_safe_looking_square_root():
    def loss(x):
        root = jnp.sqrt(x)  # <- here
        return jnp.where(x > 0, root, 0.0).sum()

    return loss, jnp.abs(X)


@BROKEN.says("nonfinite", "masked-branch", wrt="x[3]")
def a_safe_looking_division():
    def loss(x):
        inverse = 1 / x  # <- here
        return jnp.where(x == 0, 0.0, inverse).sum()

    return jax.jit(loss), X


@BROKEN.says("nonfinite", "singular", wrt="x[3]")
def a_logarithm_of_zero():
    def entropy(x):
        p = jnp.abs(x) / jnp.abs(x).sum()
        return -(p * jnp.log(p)).sum()  # <- here

    return entropy, X


@BROKEN.says("nonfinite", "singular", wrt="x")
def the_norm_of_a_difference():
    def distance(x, y):
        return jnp.linalg.norm(x - y)  # <- here

    return distance, X, X + 0.0


@BROKEN.says("nonfinite", "singular", wrt="x[3]")
def a_root_in_a_loop():
    def loss(x):
        def step(total, row):
            return total + jnp.sqrt(row), None  # <- here

        return jax.lax.scan(step, 0.0, jnp.abs(x))[0]

    return loss, X


@BROKEN.says("nonfinite", "overflow", wrt="x[2]")
def exponentials_in_half_precision():
    def loss(x):
        weights = jnp.exp(x * 8)  # <- here
        return weights / weights.sum()

    return (lambda x: loss(x)[2]), X.astype(jnp.float16)


@BROKEN.says("zero", "masked", wrt="x[2]")
def a_dropout_of_ones_own():
    def loss(x):
        keep = jax.random.uniform(jax.random.key(0), x.shape, x.dtype) > 0.5  # in float64 others, which keep it
        return jnp.where(keep, x / 0.5, 0.0).sum()  # <- here

    return loss, X.astype(jnp.float32)


@BROKEN.says("zero", "masked", wrt="x[0]")
def a_choice_by_select():
    keep = jnp.array([False, True, True, True])
    return lambda x: jax.lax.select(keep, x, jnp.zeros_like(x)).sum(), X  # <- here
