"""The mutation study on JAX: a network of plain arrays and a module of flax, and causes at points inside of them."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import elementgrad as eg
from tests.support.mutated import Mutation, Outcome, draw, judge

Array = Any
Change = Callable[[str, Array], Array]
"""Takes the name of a point and the value there."""


def same(_: str, x: Array) -> Array:
    return x


def attention(seed: int) -> tuple[Any, Callable[[Any, Change], Array], list[str]]:
    """Return parameters, a loss of them and of a change, and the points at which the loss calls it."""
    random = np.random.default_rng(seed)

    def weight(*shape: int) -> Array:
        return jnp.asarray(random.normal(size=shape) / np.sqrt(shape[0]), jnp.float32)

    layers = {"query": weight(8, 8), "key": weight(8, 8), "value": weight(8, 8), "mlp": weight(8, 8)}
    params = {"table": weight(16, 8), "layer": layers, "head": {"w": weight(8, 4), "b": jnp.zeros(4)}}
    ids, labels = jnp.asarray(random.integers(16, size=(3, 5))), jnp.asarray(random.integers(4, size=(3, 5)))

    def loss(params: Any, change: Change) -> Array:
        layer = params["layer"]
        x = change("table", params["table"][ids])
        q, k, v = [change(name, x @ layer[name]) for name in ("query", "key", "value")]
        weights = change("weights", jax.nn.softmax(q @ jnp.swapaxes(k, 1, 2) / 3.0))
        h = x + change("mixed", weights @ v)
        h = h + change("mlp", jnp.tanh(h @ layer["mlp"]))
        logits = change("head", h @ params["head"]["w"] + params["head"]["b"])
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1))

    return params, loss, ["table", "query", "key", "value", "weights", "mixed", "mlp", "head"]


class Convolutional(nn.Module):
    change: Change

    @nn.compact
    def __call__(self, x: Array) -> Array:
        x = self.change("conv1", nn.gelu(nn.Conv(6, (3, 3), name="conv1")(x)))
        x = self.change("norm", nn.LayerNorm(name="norm")(x))
        x = self.change("conv2", nn.gelu(nn.Conv(6, (3, 3), name="conv2")(x)))
        x = self.change("dense", nn.tanh(nn.Dense(8, name="dense")(x.mean((1, 2)))))
        return self.change("head", nn.Dense(3, name="head")(x))


def convolution(seed: int) -> tuple[Any, Callable[[Any, Change], Array], list[str]]:
    keys = jax.random.split(jax.random.key(seed), 3)
    x, labels = jax.random.normal(keys[0], (4, 6, 6, 2)), jax.random.randint(keys[1], (4,), 0, 3)
    params = Convolutional(same).init(keys[2], x)

    def loss(params: Any, change: Change) -> Array:
        logits = Convolutional(change).apply(params, x)
        return -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(4), labels])

    return params, loss, ["conv1", "norm", "conv2", "dense", "head"]


MODELS = {"attention": attention, "convolution": convolution}


@jax.custom_vjp
def zero_rule_of(x: Array) -> Array:
    return x * 1


zero_rule_of.defvjp(lambda x: (x * 1, None), lambda _, g: (jnp.zeros_like(g),))


@jax.custom_vjp
def wrong_rule_of(x: Array) -> Array:
    return x * 1.5


wrong_rule_of.defvjp(lambda x: (x * 1.5, None), lambda _, g: (-0.5 * g,))


def detach(x: Array) -> Array:
    return jax.lax.stop_gradient(x)


def argmax(x: Array) -> Array:
    return jnp.broadcast_to(jnp.argmax(x, -1, keepdims=True), x.shape).astype(jnp.float32)


def compare(x: Array) -> Array:
    return (x > 0).astype(jnp.float32)


def cast(x: Array) -> Array:
    return (10 * x).astype(jnp.int32).astype(jnp.float32)


def rounded(x: Array) -> Array:
    return jnp.round(10 * x)


def dead_rectifier(x: Array) -> Array:
    return jax.nn.relu(x - 1e4)


def dead_bound(x: Array) -> Array:
    return jnp.clip(x, 1e4, 2e4) * 1e-4


def saturated(x: Array) -> Array:
    return jax.nn.sigmoid(x + 1e4)


def zero_factor(x: Array) -> Array:
    return x * jnp.zeros(x.shape[-1])


def root(x: Array) -> Array:
    return jnp.sqrt(x * 0)


def logarithm(x: Array) -> Array:
    return jnp.log(x - x)


def division(x: Array) -> Array:
    return x / (x - jax.lax.stop_gradient(x))


def unused(x: Array) -> Array:
    return jnp.ones_like(x)


def zero_rule(x: Array) -> Array:
    return zero_rule_of(x)


def wrong_rule(x: Array) -> Array:
    return wrong_rule_of(x)


MUTATIONS = [
    Mutation("detach", detach, ["detached"]),
    Mutation("argmax", argmax, ["discrete"]),
    Mutation("comparison", compare, ["discrete"]),
    Mutation("integer cast", cast, ["discrete"]),
    Mutation("round", rounded, ["step-function"]),
    Mutation("dead rectifier", dead_rectifier, ["dead-relu"]),
    Mutation("dead bound", dead_bound, ["clamped"]),
    Mutation("saturated sigmoid", saturated, ["saturated"]),
    Mutation("zero factor", zero_factor, ["masked"]),
    Mutation("NaN by sqrt", root, ["singular", "masked-branch"]),
    Mutation("NaN by log", logarithm, ["singular", "masked-branch"]),
    Mutation("NaN by division", division, ["singular", "masked-branch"]),
    Mutation("unused", unused, ["unused"], has_line=False),
    Mutation("rule of zeros", zero_rule, ["custom-rule"]),
    Mutation("wrong rule", wrong_rule, ["custom-rule"], right=lambda x: x * 1.5),
]


def gradients_of(params: Any, loss: Callable[[Any], Array]) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_flatten_with_path(jax.grad(loss)(params))[0]
    return {".".join(str(key.key) for key in path): np.asarray(g) for path, g in leaves}


def broken_names(gradients: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> set[str]:
    """Return the arrays that have no gradient other than zero and NaN, or another than the right one."""
    broken = {name for name, g in gradients.items() if not g.any() or not np.isfinite(g).all()}
    return broken | {name for name, g in right.items() if not np.array_equal(g, gradients[name])}


def audited(kind: str, mutation: Mutation, seed: int) -> Outcome:
    """Audit a network with a mutation at a point that the seed draws."""
    params, loss, points = MODELS[kind](seed)
    point = draw(f"{seed} {kind} {mutation.name}", points)

    def changed(function: Callable[[Array], Array] | None) -> Callable[[Any], Array]:
        return lambda params: loss(params, lambda name, x: function(x) if function and name == point else x)

    audit = eg.audit(params, changed(mutation.apply))
    right = gradients_of(params, changed(mutation.right)) if mutation.right is not None else {}
    truth = broken_names(gradients_of(params, changed(mutation.apply)), right)
    return judge(f"{kind}, {mutation.name} after {point}", mutation, audit, truth)


def audit_healthy(kind: str, seed: int) -> eg.Audit:
    params, loss, _ = MODELS[kind](seed)
    return eg.audit(params, lambda params: loss(params, same))
