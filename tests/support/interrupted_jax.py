"""What interrupts of verbs on JAX are tried with, and everything of JAX's that they might leave changed."""

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import core

import elementgrad as eg

NAME = "jax"
X = jnp.array([[0.1, 0.2, 0.3], [0.7, -0.4, 0.9]])


def model():
    rng = np.random.default_rng(0)
    return {"first": jnp.array(rng.normal(size=(3, 4))), "last": jnp.array(rng.normal(size=(4, 2)))}


def described(model):
    return {name: (id(x), np.asarray(x).tobytes()) for name, x in model.items()}


def surroundings():
    return {
        "trace": core.trace_ctx.trace,
        "axes": core.trace_ctx.axis_env,
        "wide": jax.config.jax_enable_x64,
        "width": jnp.asarray(1.0).dtype,
        "precision": jax.config.jax_default_matmul_precision,
    }


def run(params, x):
    return eg.tag(jnp.tanh(x @ params["first"]), "hidden") @ params["last"]


def same(left, right):
    return np.array_equal(left, right) if isinstance(left, jax.Array) else str(left) == str(right)


def heard(model):
    elements = eg.trainable(model, ["first[0, 1]", "last[:, 0]"])
    return elements.grad(lambda params: run(params, X).sum(), elements.values)


READS = {
    "grad": lambda model: eg.grad(run, model, X, of="output[0, 0]", wrt="params.first[1]"),
    "activation": lambda model: eg.grad(run, model, X, of="output[0, 0]", wrt="hidden"),
    "columns": lambda model: eg.jacobian(run, model, X, wrt="x")[:, (0, ...)],
    "contributions": lambda model: eg.contributions(run, model, X, of="output[0, 0]", wrt="x").total,
    "explain": lambda model: eg.explain(run, model, X, of="output[0, 0]", wrt="x[1]").verdict,
    "check": lambda model: eg.check(run, model, X, of="output[0, 0]", wrt="x[0, 0:2]").verdict,
    "train": heard,
}
