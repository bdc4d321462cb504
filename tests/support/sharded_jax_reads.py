"""Reads and edits inside of a function that several devices run, each with its own part, against JAX's own."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import elementgrad as eg


def scaled(x: Any) -> Any:
    return jnp.sin(x) * x[0, 0]


def loss(x: Any, w: Any) -> Any:
    return jnp.tanh(x @ w).sum()


def summed(x: Any) -> Any:
    """Return the communication between devices."""
    return jax.lax.psum(jnp.sin(x) * x, "devices")


def tagged(x: Any) -> Any:
    return (eg.tag(jnp.sin(x), "hidden") ** 2).sum()


@jax.custom_vjp
def ruled(x: Any) -> Any:
    return jnp.sin(x).sum()


ruled.defvjp(lambda x: (ruled(x), x), lambda x, g: (3 * g * x,))


def edited(change: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda x, w: jax.grad(lambda x: (change(x) ** 2).sum())(x)


def looped(x: Any) -> Any:
    def step(total: Any, row: Any) -> Any:
        return total + jnp.sin(row).sum(), None

    return jax.lax.scan(step, 0 * x[0, 0], x)[0]


Read = Callable[[Any, Any], Any]
READS: dict[str, tuple[Read, Read]] = {
    "grad": (lambda x, w: eg.grad(loss, x, w, wrt="x"), jax.grad(loss)),
    "grad of what is replicated": (lambda x, w: eg.grad(loss, x, w, wrt="w"), jax.grad(loss, 1)),
    "a row": (lambda x, w: eg.jacobian(scaled, x)[(0, 1), :], lambda x, w: jax.jacrev(scaled)(x)[0, 1]),
    "a column": (lambda x, w: eg.jacobian(scaled, x)[:, (0, 0)], lambda x, w: jax.jacrev(scaled)(x)[..., 0, 0]),
    "all": (lambda x, w: eg.jacobian(scaled, x).dense(), lambda x, w: jax.jacrev(scaled)(x)),
    "J @ v": (lambda x, w: eg.jacobian(scaled, x) @ x, lambda x, w: jax.jvp(scaled, (x,), (x,))[1]),
    "u @ J": (lambda x, w: x @ eg.jacobian(scaled, x), lambda x, w: jax.vjp(scaled, x)[1](x)[0]),
    "sparse": (lambda x, w: eg.jacobian(jnp.sin, x).sparse().data, lambda x, w: jnp.cos(x).reshape(-1)),
    "hessian": (lambda x, w: eg.hessian(loss, x, w, wrt="x").dense(), jax.hessian(loss)),
    "hessian of what is replicated": (
        lambda x, w: eg.hessian(loss, x, w, wrt="w")[(0, 0), :],
        lambda x, w: jax.hessian(loss, 1)(x, w)[0, 0],
    ),
    "a row of a sum": (lambda x, w: eg.jacobian(summed, x)[(0, 0), :], lambda x, w: jax.jacrev(summed)(x)[0, 0]),
    "a column of a sum": (
        lambda x, w: eg.jacobian(summed, x)[:, (0, 0)],
        lambda x, w: jax.jacrev(summed)(x)[..., 0, 0],
    ),
    "an activation": (lambda x, w: eg.grad(tagged, x, wrt="hidden"), lambda x, w: 2 * jnp.sin(x)),
    "uses": (
        lambda x, w: sum(share.value for share in eg.contributions(tagged, x, wrt="x")),
        lambda x, w: jnp.sin(2 * x),
    ),
    "a rule of its own": (lambda x, w: eg.grad(ruled, x), lambda x, w: jax.grad(ruled)(x)),
    "a loop": (lambda x, w: eg.grad(looped, x), lambda x, w: jnp.cos(x)),
    "a checkpoint": (
        lambda x, w: eg.grad(lambda x: jax.checkpoint(loss)(x, w), x),
        jax.grad(loss),
    ),
    "vmap": (
        lambda x, w: jax.vmap(lambda row: eg.grad(lambda row: (jnp.sin(row) * row[0]).sum(), row))(x),
        lambda x, w: jax.vmap(jax.grad(lambda row: (jnp.sin(row) * row[0]).sum()))(x),
    ),
    "set": (
        lambda x, w: jax.grad(lambda x: (eg.at(x)[0, 1].set(x[0, 0] ** 2) * x).sum())(x),
        lambda x, w: jax.grad(lambda x: (x.at[0, 1].set(x[0, 0] ** 2) * x).sum())(x),
    ),
    "set in what is replicated": (
        lambda x, w: eg.at(w)[0, 1].set(x[0, 0]),
        lambda x, w: jnp.where(np.array([[0, 1, 0], [0, 0, 0]], bool), x[0, 0], w),
    ),
    "add": (edited(lambda x: eg.at(x)[0].add(2.0)), edited(lambda x: x.at[0].add(2.0))),
    "multiply": (edited(lambda x: eg.at(x)[0].multiply(3.0)), edited(lambda x: x.at[0].multiply(3.0))),
    "only": (edited(lambda x: eg.at(x)[0, 1].only()), lambda x, w: jnp.zeros_like(x).at[0, 1].set(2 * x[0, 1])),
    "stop": (edited(lambda x: eg.at(x)[0, 1].stop()), lambda x, w: (2 * x).at[0, 1].set(0)),
    "choose": (edited(lambda x: eg.choose(x, x)), edited(lambda x: (jax.nn.softmax(x, -1) * x).sum(-1))),
    "choose hard": (lambda x, w: eg.choose(x, x, hard=True), lambda x, w: x.max(-1)),
}
UNCHECKED_ONCE = {"uses", "all", *[name for name in READS if name.startswith(("a row", "a column", "hessian"))]}
"""Where JAX itself failed in a checked `shard_map` while that was experimental: names in programs, and `jacrev`."""


def reads(shard_map: Any, unchecked: dict[str, Any]) -> None:
    with jax.experimental.enable_x64() if not hasattr(jax, "enable_x64") else jax.enable_x64(True):
        mesh = Mesh(np.array(jax.devices()), ("devices",))
        x, w = jnp.arange(1.0, 17.0).reshape(8, 2) / 3, jnp.arange(1.0, 7.0).reshape(2, 3) / 5
        specs = {"in_specs": (P("devices"), P()), "out_specs": P("devices")}
        for options in ({}, unchecked):
            names = [name for name in READS if options or hasattr(jax, "shard_map") or name not in UNCHECKED_ONCE]
            found, expected = (
                jax.jit(shard_map(one_each(names, number), mesh=mesh, **specs, **options))(x, w) for number in (0, 1)
            )
            for name in names:
                np.testing.assert_allclose(found[name], expected[name], rtol=1e-12, atol=1e-14, err_msg=name)


def one_each(names: list[str], number: int) -> Callable[[Any, Any], dict[str, Any]]:
    """All of the reads in one program, with an axis in front for the devices."""
    return lambda x, w: {name: READS[name][number](x, w)[None] for name in names}
