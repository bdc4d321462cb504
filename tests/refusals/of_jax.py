"""Calls that are refused on JAX."""

import jax
import jax.numpy as jnp
import numpy as np

import elementgrad as eg
from tests.support.jax_losses import SMALL, small, small_loss

X = jnp.array([1.0, 2.0, 3.0])


def train(call, places=SMALL):
    """Return a call with the elements of some places of small parameters."""
    return lambda: call(eg.trainable(small(), places))


def loss_of(loss):
    return lambda: eg.trainable({"w": jnp.ones((3, 3)), "b": jnp.ones(3)}, "w[0, 0]").grad(loss)


def cut(params):
    return params["b"].sum() + jax.lax.stop_gradient(params["w"]).sum()


def counted(params):
    return params["b"][jnp.argmax(params["w"][0])]


def branched(params):
    return params["b"].sum() if params["b"][0] > 0 else params["w"].sum()


ROWS = {
    "explain, traced": (
        lambda: jax.jit(lambda x: eg.explain(lambda y: y.sum(), x).value)(X),
        eg.TracedError,
        r"call it outside of jax\.jit",
    ),
    "explain, live arrays": (
        lambda: eg.explain(of=X.sum(), wrt=X),
        eg.FrameworkError,
        "give the function and its arguments",
    ),
    "record": (lambda: eg.record(X), eg.FrameworkError, r"eager code of jax cannot be recorded.*eg.jacobian\(f, x\)"),
    "contributions, a branch": (
        lambda: eg.contributions(lambda x: x if x[0] > 0 else -x, X, of="output[0]"),
        eg.FrameworkError,
        "contributions need a function that JAX can trace, and this one branches",
    ),
    "contributions, an unknown name": (
        lambda: eg.contributions(lambda x: x * 2, X, of="output[0]", wrt="y"),
        eg.PlaceError,
        "no tensor is named 'y'; there are: x, output",
    ),
    "contributions, whole numbers": (
        lambda: eg.contributions(lambda x: x * eg.tag(jnp.arange(3), "n"), X, of="output[0]", wrt="n"),
        eg.DtypeError,
        r"int.*, which has no gradients",
    ),
    "a tensor of another shape @ J": (
        lambda: jnp.ones((2, 3, 4)) @ eg.jacobian(lambda x: x * x, jnp.ones((2, 3))),
        eg.BroadcastError,
        "more axes before it",
    ),
    "keep": (
        lambda: eg.trainable({"w": jnp.ones(3)}, "w[0]", keep="w"),
        eg.OptionError,
        "here nothing is frozen; leave it out",
    ),
    "an array of NumPy among parameters": (
        lambda: eg.trainable({"layer": {"w": np.ones((4, 3)), "b": jnp.ones(3)}}, "layer.w[0, 0]"),
        eg.FrameworkError,
        r"'layer\.w' is a NumPy array, which carries no gradients",
    ),
    "a name beside an array of NumPy": (
        lambda: eg.trainable({"layer": {"w": np.ones((4, 3)), "b": jnp.ones(3)}}, "layer.v[0, 0]"),
        eg.PlaceError,
        r"no parameter named 'layer\.v'",
    ),
    "a loss behind stop_gradient": (
        loss_of(cut),
        eg.UnconnectedError,
        "does not depend on w: .*stop_gradient cuts the gradient",
    ),
    "a loss behind argmax": (
        loss_of(counted),
        eg.UnconnectedError,
        "does not depend on w: argmax returns integers",
    ),
    "a loss behind a branch": (
        loss_of(branched),
        eg.UnconnectedError,
        "does not depend on w: .*is not computed from",
    ),
    "an unknown name": (
        lambda: eg.trainable(small(), "tabel[0]"),
        eg.PlaceError,
        "no parameter named 'tabel'; nearest: table",
    ),
    "a branch of the tree": (lambda: eg.trainable(small(), "head[0]"), eg.PlaceError, "'head' is no array; it has"),
    "out of range": (lambda: eg.trainable(small(), "table[10]"), IndexError, "out of range"),
    "twice": (lambda: eg.trainable(small(), ["table[0]", "table[:, 1]"]), eg.DuplicateError, "is named by"),
    "integers": (lambda: eg.trainable({"n": jnp.arange(3)}, "n[0]"), eg.DtypeError, "n is int.*only floats train"),
    "an array": (lambda: eg.trainable(small()["table"], eg.at[0]), eg.FrameworkError, "give a dict"),
    "a dtype": (lambda: eg.trainable(small(), SMALL, dtype=int), eg.OptionError, "not a floating dtype"),
    "two of a name": (lambda: eg.trainable({"a.b": X, "a": {"b": X}}, "a.b"), eg.PlaceError, "2 arrays"),
    "tracers": (
        lambda: jax.jit(lambda p: eg.trainable(p, SMALL).merge())(small()),
        eg.FrameworkError,
        "is being traced; call this outside of jax.jit",
    ),
    "parameters": (train(lambda e: e.parameters()), eg.FrameworkError, r"no parameters; use elements\.values"),
    "backward": (train(lambda e: e.backward({})), eg.FrameworkError, r"no backward; use elements\.grad, which takes"),
    "release": (train(lambda e: e.release()), eg.FrameworkError, "elements.merge"),
    "other values": (train(lambda e: e.merge({"table[1]": 0})), eg.PlaceError, "not one of these places"),
    "few values": (train(lambda e: e.merge({})), eg.PlaceError, "nothing for"),
    "a wrong shape": (
        train(lambda e: e.merge({"table[3]": jnp.ones(3, jnp.float32)}), "table[3]"),
        eg.OptionError,
        r"give float32 of shape \(4,\)",
    ),
    "a number": (train(lambda e: e.grad(3.0)), eg.FrameworkError, "is float; give a function"),
    "no losses": (train(lambda e: e.grad({})), eg.PlaceError, "no losses are given"),
    "a loss for nobody": (train(lambda e: e.grad({(): small_loss})), eg.PlaceError, "given to no place"),
    "a routed number": (
        train(lambda e: e.grad({"table[3]": 1.0})),
        eg.FrameworkError,
        r"the loss for table\[3\] is float",
    ),
    "a vector": (train(lambda e: e.grad(lambda p: p["table"][0])), eg.OptionError, "return one number"),
    "unconnected": (
        train(lambda e: e.grad(lambda p: p["table"].sum())),
        eg.UnconnectedError,
        "does not depend on head.kernel",
    ),
    "not in training": (
        train(lambda e: e.grad({"table[1]": small_loss})),
        eg.PlaceError,
        "has elements that do not train here",
    ),
    "other params": (
        train(lambda e: e.merge(params=small(jnp.float64))),
        eg.OptionError,
        "give the same parameters",
    ),
}
