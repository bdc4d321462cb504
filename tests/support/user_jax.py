"""A user of JAX: parameters, an argument, the verbs, and everything that these might leave changed."""

import random
from contextlib import suppress
from functools import partial
from operator import getitem

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import core

import elementgrad as eg
from elementgrad._backends.jax._compat import local_settings
from tests.support.user import JACOBIAN_READS, Failing

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
        "settings of the thread": local_settings(),
        "settings": {key: value for key, value in jax.config.values.items() if key != "jax_compilation_cache_dir"},
        "python's random numbers": random.getstate(),
        "numpy's random numbers": str(np.random.get_state()),
    }


def run(params, x):
    return eg.tag(jnp.tanh(x @ params["first"]), "hidden") @ params["last"]


def same(left, right):
    return np.array_equal(left, right) if isinstance(left, jax.Array) else str(left) == str(right)


def heard(model):
    elements = eg.trainable(model, ["first[0, 1]", "last[:, 0]"])
    return elements.grad(lambda params: run(params, X).sum(), elements.values)


@jax.jit
def trained(params, x, factor):
    return jax.grad(lambda params: (factor * run(params, x)).sum())(params)


def watched(model, factor=1.0):
    watch = eg.watch(trained, capture=None)
    with suppress(eg.WatchError):
        watch(model, X, factor)
    return watch.error


READS = {
    "grad": lambda model: eg.grad(run, model, X, of="output[0, 0]", wrt="params.first[1]"),
    "activation": lambda model: eg.grad(run, model, X, of="output[0, 0]", wrt="hidden"),
    "cone": lambda model: eg.grad(run, model, X, of="output[0, 0]", wrt="x", cone=True),
    "value": lambda model: eg.value(run, model, X, of="output[0, 0]"),
    "field": lambda model: eg.field(run, model, X, of="output[0, 0]", wrt="x"),
    "columns": lambda model: eg.jacobian(run, model, X, wrt="x")[:, (0, ...)],
    "contributions": lambda model: eg.contributions(run, model, X, of="output[0, 0]", wrt="x").total,
    "explain": lambda model: eg.explain(run, model, X, of="output[0, 0]", wrt="x[1]").verdict,
    "check": lambda model: eg.check(run, model, X, of="output[0, 0]", wrt="x[0, 0:2]").verdict,
    "audit": lambda model: eg.audit(model, lambda params: run(params, X).sum()),
    "train": heard,
    "watch": watched,
    "watch-fault": partial(watched, factor=float("inf")),
}
"""Calls that the tests of interrupts make as well."""


class User(Failing):
    """Parameters and a function of a user's, which raises in its forward or in its derivative on request."""

    def __init__(self, fragile=False):
        super().__init__()
        self.params, self.x = model(), X
        self.params["last"] = jnp.concatenate([self.params["last"], jnp.ones((4, 1))], 1)
        self.passed = jax.custom_vjp(lambda x: x * 1)
        self.passed.defvjp(lambda x: (x * 1, None), self.back)
        self.fragile = fragile

    def back(self, _, gradient):
        self.reach("on the way back")
        return (gradient,)

    def run(self, params, x):
        self.reach("at once")
        hidden = eg.tag(jnp.tanh(x @ params["first"]), "hidden")
        return (self.passed(hidden) if self.fragile else hidden) @ params["last"]

    def state(self):
        return {
            "parameters": described(self.params),
            "argument": (id(self.x), self.x.tolist()),
            **surroundings(),
        }

    def train(self):
        elements = eg.trainable(self.params, ["first[0, 1]", "last[:, 0]"])
        return elements.grad(lambda params: self.run(params, self.x).sum(), elements.values)


def entry(verb, **names):
    """Return a verb that asks for the derivatives of one output."""
    return lambda user: lambda: verb(user.run, user.params, user.x, of="output[0, 0]", **names)


def of_function(read):
    def make(user):
        J = eg.jacobian(user.run, user.params, user.x, wrt="x")
        return lambda: read(J)

    return make


VERBS = {
    **{f"jacobian: {name}": of_function(read) for name, read in JACOBIAN_READS.items()},
    "grad": entry(eg.grad, wrt="x"),
    "parameter": entry(eg.grad, wrt="params.first[1]"),
    "activation": entry(eg.grad, wrt="hidden"),
    "hessian": lambda user: partial(
        getitem, eg.hessian(lambda x: user.run(user.params, x).sum(), user.x), ((0, 0), (1, 1))
    ),
    "sparse": lambda user: lambda: eg.jacobian(user.run, user.params, user.x, wrt="x").sparse("scipy"),
    "contributions": entry(eg.contributions, wrt="x"),
    "names": lambda user: lambda: eg.names(user.run, user.params, user.x),
    "explain": entry(eg.explain, wrt="x[1]"),
    "explain-cut": lambda user: lambda: eg.explain(lambda x: user.run(user.params, jax.lax.stop_gradient(x)).sum(), X),
    "check": entry(eg.check, wrt="x[0, 0:2]"),
    "audit": lambda user: lambda: eg.audit(user.params, lambda params: user.run(params, user.x).sum()),
    "train": lambda user: user.train,
}
