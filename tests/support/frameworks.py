"""The three frameworks behind one face, so that a test is written once. All in float64 unless told otherwise."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tensorflow as tf
import torch

jax.config.update("jax_enable_x64", True)

Function = Callable[..., Any]


class Framework:
    name: str

    def jit(self, f: Function) -> Function: ...

    def tensor(self, array: Any, dtype: str = "float64") -> Any: ...

    def numpy(self, tensor: Any) -> np.ndarray: ...

    def grad(self, f: Function, *xs: Any) -> list[np.ndarray]: ...

    def jvp(self, f: Function, xs: list[Any], tangents: list[Any]) -> np.ndarray: ...

    def hessians(self, f: Function, x: Any) -> dict[str, np.ndarray]: ...

    def stack(self, tensors: list[Any]) -> Any: ...

    def sum(self, tensor: Any) -> Any: ...

    def vmap(self, f: Function) -> Function: ...


class Torch(Framework):
    name = "torch"

    def jit(self, f: Function) -> Function:
        torch.compiler.reset()  # tests compile the same few lambdas again and again
        return torch.compile(f, fullgraph=True, backend="aot_eager")

    def tensor(self, array: Any, dtype: str = "float64") -> torch.Tensor:
        return torch.tensor(np.asarray(array)).to(getattr(torch, dtype))

    def numpy(self, tensor: torch.Tensor) -> np.ndarray:
        tensor = tensor.detach().resolve_conj()
        return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()

    def grad(self, f: Function, *xs: torch.Tensor) -> list[np.ndarray]:
        xs = tuple(x.detach().clone().requires_grad_() for x in xs)
        return [self.numpy(g) for g in torch.autograd.grad(f(*xs), xs, materialize_grads=True)]

    def jvp(self, f: Function, xs: list[Any], tangents: list[Any]) -> np.ndarray:
        return self.numpy(torch.func.jvp(f, tuple(xs), tuple(tangents))[1])

    def hessians(self, f: Function, x: torch.Tensor) -> dict[str, np.ndarray]:
        return {
            "forward over reverse": self.numpy(torch.func.jacfwd(torch.func.jacrev(f))(x)),
            "reverse over reverse": self.numpy(torch.autograd.functional.hessian(f, x)),
        }

    def stack(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(tensors)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.sum()

    def vmap(self, f: Function) -> Function:
        return torch.func.vmap(f)


class Tensorflow(Framework):
    name = "tensorflow"
    jit = staticmethod(tf.function)

    def tensor(self, array: Any, dtype: str = "float64") -> tf.Tensor:
        return tf.cast(tf.constant(np.asarray(array)), dtype)

    def numpy(self, tensor: tf.Tensor) -> np.ndarray:
        return np.asarray(tf.cast(tensor, tf.float32) if tensor.dtype == tf.bfloat16 else tensor)

    def grad(self, f: Function, *xs: tf.Tensor) -> list[np.ndarray]:
        with tf.GradientTape() as tape:
            tape.watch(xs)
            y = f(*xs)
        gradients = tape.gradient(y, xs, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        return [self.numpy(tf.convert_to_tensor(g)) for g in gradients]

    def jvp(self, f: Function, xs: list[Any], tangents: list[Any]) -> np.ndarray:
        with tf.autodiff.ForwardAccumulator(xs, tangents) as accumulator:
            y = f(*xs)
        return np.asarray(accumulator.jvp(y, unconnected_gradients=tf.UnconnectedGradients.ZERO))

    def hessians(self, f: Function, x: tf.Tensor) -> dict[str, np.ndarray]:
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = f(x)
            gradient = inner.gradient(y, x, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        reverse = outer.jacobian(gradient, x, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        columns = []
        for position in range(int(tf.size(x))):
            direction = tf.reshape(tf.one_hot(position, tf.size(x), dtype=x.dtype), x.shape)
            columns.append(self.jvp(lambda x: self._gradient(f, x), [x], [direction]))
        forward = np.stack(columns, axis=-1).reshape(tuple(x.shape) * 2)
        return {"reverse over reverse": np.asarray(reverse), "forward over reverse": forward}

    def _gradient(self, f: Function, x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = f(x)
        return tape.gradient(y, x, unconnected_gradients=tf.UnconnectedGradients.ZERO)

    def stack(self, tensors: list[tf.Tensor]) -> tf.Tensor:
        return tf.stack(tensors)

    def sum(self, tensor: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(tensor)

    def vmap(self, f: Function) -> Function:
        return lambda *xs: tf.vectorized_map(lambda xs: f(*xs), xs)


class Jax(Framework):
    name = "jax"
    jit = staticmethod(jax.jit)

    def tensor(self, array: Any, dtype: str = "float64") -> jax.Array:
        return jnp.asarray(array).astype(dtype)

    def numpy(self, tensor: jax.Array) -> np.ndarray:
        return np.asarray(tensor.astype("float32") if tensor.dtype == jnp.bfloat16 else tensor)

    def grad(self, f: Function, *xs: jax.Array) -> list[np.ndarray]:
        return [self.numpy(g) for g in jax.grad(f, argnums=tuple(range(len(xs))))(*xs)]

    def jvp(self, f: Function, xs: list[Any], tangents: list[Any]) -> np.ndarray:
        return np.asarray(jax.jvp(f, tuple(xs), tuple(tangents))[1])

    def hessians(self, f: Function, x: jax.Array) -> dict[str, np.ndarray]:
        return {
            "forward over reverse": np.asarray(jax.jacfwd(jax.jacrev(f))(x)),
            "reverse over reverse": np.asarray(jax.jacrev(jax.jacrev(f))(x)),
        }

    def stack(self, tensors: list[jax.Array]) -> jax.Array:
        return jnp.stack(tensors)

    def sum(self, tensor: jax.Array) -> jax.Array:
        return tensor.sum()

    def vmap(self, f: Function) -> Function:
        return jax.vmap(f)


TORCH, TENSORFLOW, JAX = Torch(), Tensorflow(), Jax()
FRAMEWORKS = [TORCH, TENSORFLOW, JAX]


def difference(f: Callable[[np.ndarray], float], x: np.ndarray, step: float = 1e-6) -> np.ndarray:
    """Central finite differences of a scalar function of one float64 array."""
    gradient = np.zeros_like(x)
    for position in np.ndindex(x.shape):
        up, down = x.copy(), x.copy()
        up[position] += step
        down[position] -= step
        gradient[position] = (f(up) - f(down)) / (2 * step)
    return gradient
