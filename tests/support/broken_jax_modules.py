"""Programs of JAX with modules of flax NNX and losses of optax, broken and healthy."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from tests.support.programs_broken import Table

BROKEN, HEALTHY = Table(), Table()
X = jnp.array([0.5, -1.0, 2.0, 0.0])
W = jnp.array([[0.2, -0.4, 0.1, 0.3], [0.5, 0.1, -0.2, 0.4], [0.3, 0.2, 0.6, -0.1], [0.1, 0.7, 0.2, 0.2]])


class Block(nnx.Module):
    def __init__(self, rngs, cut=False):
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.cut = cut

    def __call__(self, x):
        h = nnx.tanh(self.linear(x))
        if self.cut:
            h = jax.lax.stop_gradient(h)  # the second of the blocks comes here
        return h


class Encoder(nnx.Module):
    def __init__(self, cut):
        rngs = nnx.Rngs(0)
        self.first, self.second = Block(rngs), Block(rngs, cut=cut)
        self.head = nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, x):
        return self.head(self.second(self.first(x)))[0]


@BROKEN.says("unconnected", "detached", wrt="first.linear.kernel[0, 1]")
def a_cut_in_a_nested_module():
    return Encoder(cut=True), X


@BROKEN.says("unconnected", "unused", wrt="head.bias")
def a_head_that_is_not_called():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.body = nnx.Linear(4, 4, rngs=rngs)
            self.head = nnx.Linear(4, 4, rngs=rngs)

        def __call__(self, x):
            return nnx.tanh(self.body(x)).sum()

    return Model(nnx.Rngs(0)), X


@BROKEN.says("unconnected", "detached", wrt="params.w")
def a_training_step_with_optax():
    def loss(params, x):
        frozen = jax.tree.map(jax.lax.stop_gradient, params)  # <- here
        logits = frozen["w"] @ x
        return optax.softmax_cross_entropy_with_integer_labels(logits, 1)

    def step(params, x):
        value, _ = jax.value_and_grad(loss)(params, x)
        return value

    return step, {"w": W}, X


@BROKEN.says("zero", "dead-relu", wrt="linear.bias[0]")
def a_dead_unit_of_a_module():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(4, 4, rngs=rngs, bias_init=nnx.initializers.constant(-9.0))

        def __call__(self, x):
            return nnx.relu(self.linear(x)).sum()  # <- here

    return Model(nnx.Rngs(0)), X


@BROKEN.says("zero", "dropped", wrt="x[0]")
def a_dropped_input():
    class Model(nnx.Module):
        def __init__(self):
            self.dropout = nnx.Dropout(0.999, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.dropout(x).sum()  # <- here

    return Model(), X + 1


@BROKEN.says("zero", "row-not-used", wrt="embed.embedding[1]")
def an_embedding_of_a_module():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(4, 4, rngs=rngs)

        def __call__(self, ids):
            return self.embed(ids).sum()  # <- here

    return Model(nnx.Rngs(0)), jnp.array([0, 2])


@BROKEN.says("zero", "saturated", wrt="params.w[1, 2]")
def a_training_step_that_has_diverged():
    def loss(params, x):
        logits = params["w"] @ x * 1e4
        return optax.softmax_cross_entropy_with_integer_labels(logits, 0)  # <- here

    optimizer = optax.sgd(0.1)

    def step(params, x):
        state = optimizer.init(params)
        value, gradients = jax.value_and_grad(loss)(params, x)
        updates, _ = optimizer.update(gradients, state)
        return value, jax.tree.map(jnp.shape, optax.apply_updates(params, updates))

    return (lambda params, x: step(params, x)[0]), {"w": W}, X


class Model(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.linear = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        return nnx.gelu(self.linear(self.norm(x))).mean()


@HEALTHY.says("flows", wrt="linear.kernel[0, 1]")
def a_module_with_statistics():
    return Model(nnx.Rngs(0)), W


@HEALTHY.says("flows", wrt="params.w[1, 2]")
def a_loss_of_optax():
    def loss(params, x):
        return optax.softmax_cross_entropy_with_integer_labels(params["w"] @ x, 1)

    return loss, {"w": W}, X
