"""JAX behind the common interface of `frameworks`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.support.frameworks import Function

jit = jax.jit


def tensor(array: Any, dtype: str = "float64") -> jax.Array:
    return jnp.asarray(array).astype(dtype)


def numpy(tensor: jax.Array) -> np.ndarray:
    return np.asarray(tensor.astype("float32") if tensor.dtype == jnp.bfloat16 else tensor)


def grad(f: Function, *xs: jax.Array) -> list[np.ndarray]:
    return [numpy(g) for g in jax.grad(f, argnums=tuple(range(len(xs))))(*xs)]


def jvp(f: Function, xs: list[Any], tangents: list[Any]) -> np.ndarray:
    return np.asarray(jax.jvp(f, tuple(xs), tuple(tangents))[1])


def hessians(f: Function, x: jax.Array) -> dict[str, np.ndarray]:
    return {
        "forward over reverse": np.asarray(jax.jacfwd(jax.jacrev(f))(x)),
        "reverse over reverse": np.asarray(jax.jacrev(jax.jacrev(f))(x)),
    }


def stack(tensors: list[jax.Array]) -> jax.Array:
    return jnp.stack(tensors)


def sum(tensor: jax.Array) -> jax.Array:
    return tensor.sum()


def vmap(f: Function) -> Function:
    return jax.vmap(f)
