"""The operations that the table in `functions.py` is written in: one namespace for each framework.

A name that a framework already has with the meaning wanted is looked up in its own modules; the rest is written here.
"""

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tensorflow as tf
import torch
from jax import lax
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.support.frameworks import JAX, TENSORFLOW, TORCH, Framework, Function

POOL = np.random.default_rng(20).uniform(size=80)


def point(*shape: int, low: float = -1.5, high: float = 1.5) -> np.ndarray:
    """An array of generic values between `low` and `high`, the same ones at every call."""
    return (low + (high - low) * POOL[: math.prod(shape)]).reshape(shape)


class Operations:
    framework: Framework
    modules: tuple[ModuleType, ...]

    def __getattr__(self, name: str) -> Any:
        for module in self.modules:
            if hasattr(module, name):
                return getattr(module, name)
        raise AttributeError(f"no module of {self.framework.name} has {name}")

    def array(self, array: Any) -> Any:
        return self.framework.tensor(array)

    def numbers(self, *shape: int) -> Any:
        """Generic constants: weights, targets and the like."""
        return self.array(1 - 2 * POOL[::-1][: math.prod(shape)].reshape(shape))


class TorchOps(Operations):
    framework = TORCH
    modules = (torch.fft, torch.linalg, torch, functional)
    transpose = staticmethod(torch.permute)
    split = staticmethod(torch.tensor_split)
    stop = staticmethod(torch.detach)
    vmap = staticmethod(torch.func.vmap)
    grad = staticmethod(torch.func.grad)

    def sort(self, x: Any) -> Any:
        return torch.sort(x).values

    def top(self, x: Any, count: int) -> Any:
        return torch.topk(x, count).values

    def conv(self, x: Any, kernel: Any, stride: int = 1) -> Any:
        return (functional.conv1d if x.ndim == 3 else functional.conv2d)(x, kernel, stride=stride)

    def max_pool(self, x: Any, size: int) -> Any:
        return functional.max_pool1d(x, size, stride=1)

    def avg_pool(self, x: Any, size: int) -> Any:
        return functional.avg_pool1d(x, size, stride=1)

    def take(self, x: Any, indices: list[int], axis: int) -> Any:
        return x.index_select(axis, torch.tensor(indices))

    def take_each(self, x: Any, indices: list[list[int]]) -> Any:
        return x.gather(1, torch.tensor(indices))

    def put(self, x: Any, *writes: tuple[int, Any]) -> Any:
        y = x.clone()
        for index, value in writes:
            y[index] = value
        return y

    def add_at(self, x: Any, indices: list[int], values: Any) -> Any:
        return x.index_add(0, torch.tensor(indices), values)

    def pad(self, x: Any, *widths: tuple[int, int]) -> Any:
        return functional.pad(x, [width for pair in reversed(widths) for width in pair])

    def loop(self, count: int, step: Function, x: Any) -> Any:
        for _ in range(count):
            x = step(x)
        return x

    def cond(self, condition: Any, yes: Function, no: Function, x: Any) -> Any:
        return yes(x) if condition else no(x)

    def recomputed(self, f: Function) -> Function:
        return lambda x: checkpoint(f, x, use_reentrant=False)

    def custom(self, f: Function, rule: Callable[[Any, Any], Any]) -> Function:
        class Rule(torch.autograd.Function):
            generate_vmap_rule = True

            @staticmethod
            def forward(x: Any) -> Any:
                return f(x)

            @staticmethod
            def setup_context(ctx: Any, inputs: tuple[Any], output: Any) -> None:
                ctx.save_for_backward(*inputs)

            @staticmethod
            def backward(ctx: Any, gradient: Any) -> Any:
                return rule(*ctx.saved_tensors, gradient)

        return Rule.apply


class TensorflowOps(Operations):
    framework = TENSORFLOW
    modules = (tf, tf.math, tf.nn, tf.linalg, tf.signal)
    sum = staticmethod(tf.reduce_sum)
    mean = staticmethod(tf.reduce_mean)
    prod = staticmethod(tf.reduce_prod)
    amax = staticmethod(tf.reduce_max)
    amin = staticmethod(tf.reduce_min)
    logsumexp = staticmethod(tf.reduce_logsumexp)
    clip = staticmethod(tf.clip_by_value)
    flip = staticmethod(tf.reverse)
    diagonal = staticmethod(tf.linalg.diag_part)
    stop = staticmethod(tf.stop_gradient)
    recomputed = staticmethod(tf.recompute_grad)

    def tril(self, x: Any) -> Any:
        return tf.linalg.band_part(x, -1, 0)

    def svdvals(self, x: Any) -> Any:
        return tf.linalg.svd(x, compute_uv=False)

    def top(self, x: Any, count: int) -> Any:
        return tf.math.top_k(x, count).values

    def fft(self, x: Any) -> Any:
        return tf.signal.fft(tf.complex(x, tf.zeros_like(x)))

    def irfft(self, x: Any, size: int) -> Any:
        return tf.signal.irfft(x, [size])

    def conv(self, x: Any, kernel: Any, stride: int = 1) -> Any:
        """Channels come before space, as in the other two; on the CPU TensorFlow wants them last."""
        last = [0, *range(2, len(x.shape)), 1]
        conv = tf.nn.conv1d if len(x.shape) == 3 else tf.nn.conv2d
        y = conv(tf.transpose(x, last), tf.transpose(kernel, [*last[1:], 0]), stride, "VALID")
        return tf.transpose(y, np.argsort(last))

    def max_pool(self, x: Any, size: int) -> Any:
        return self._pool(tf.nn.max_pool1d, x, size)

    def avg_pool(self, x: Any, size: int) -> Any:
        return self._pool(tf.nn.avg_pool1d, x, size)

    def _pool(self, pool: Function, x: Any, size: int) -> Any:
        return tf.transpose(pool(tf.transpose(x, [0, 2, 1]), size, 1, "VALID"), [0, 2, 1])

    def take(self, x: Any, indices: list[int], axis: int) -> Any:
        return tf.gather(x, indices, axis=axis)

    def take_each(self, x: Any, indices: list[list[int]]) -> Any:
        return tf.gather(x, indices, batch_dims=1)

    def put(self, x: Any, *writes: tuple[int, Any]) -> Any:
        for index, value in writes:
            x = tf.tensor_scatter_nd_update(x, [[index]], value[None])
        return x

    def add_at(self, x: Any, indices: list[int], values: Any) -> Any:
        return tf.tensor_scatter_nd_add(x, np.array(indices)[:, None], values)

    def pad(self, x: Any, *widths: tuple[int, int]) -> Any:
        return tf.pad(x, widths)

    def vmap(self, f: Function) -> Function:
        return lambda x: tf.vectorized_map(f, x)

    def grad(self, f: Function) -> Function:
        return lambda x: tf.convert_to_tensor(TENSORFLOW.plain_gradient(f, x))  # that of a lookup is sparse

    def loop(self, count: int, step: Function, x: Any) -> Any:
        """A loop of the graph: outside `tf.function`, `tf.while_loop` is a loop of Python."""

        def run(x: Any) -> Any:
            return tf.while_loop(lambda i, _: i < count, lambda i, x: (i + 1, step(x)), (0, x))[1]

        return tf.function(run, autograph=False).get_concrete_function(x)(x)

    def cond(self, condition: Any, yes: Function, no: Function, x: Any) -> Any:
        def run(condition: Any, x: Any) -> Any:
            return tf.cond(condition, lambda: yes(x), lambda: no(x))

        return tf.function(run, autograph=False).get_concrete_function(condition, x)(condition, x)

    def custom(self, f: Function, rule: Callable[[Any, Any], Any]) -> Function:
        return tf.custom_gradient(lambda x: (f(x), lambda gradient: rule(x, gradient)))


class JaxOps(Operations):
    framework = JAX
    modules = (jnp.fft, jnp.linalg, jnp, jax.nn, lax)
    stop = staticmethod(lax.stop_gradient)
    vmap = staticmethod(jax.vmap)
    grad = staticmethod(jax.grad)
    cond = staticmethod(lax.cond)
    recomputed = staticmethod(jax.checkpoint)

    def top(self, x: Any, count: int) -> Any:
        return lax.top_k(x, count)[0]

    def conv(self, x: Any, kernel: Any, stride: int = 1) -> Any:
        return lax.conv_general_dilated(x, kernel, [stride] * (x.ndim - 2), "VALID")

    def max_pool(self, x: Any, size: int) -> Any:
        return lax.reduce_window(x, -jnp.inf, lax.max, (1, 1, size), (1, 1, 1), "VALID")

    def avg_pool(self, x: Any, size: int) -> Any:
        return lax.reduce_window(x, 0.0, lax.add, (1, 1, size), (1, 1, 1), "VALID") / size

    def take(self, x: Any, indices: list[int], axis: int) -> Any:
        return jnp.take(x, np.array(indices), axis)

    def take_each(self, x: Any, indices: list[list[int]]) -> Any:
        return jnp.take_along_axis(x, np.array(indices), 1)

    def put(self, x: Any, *writes: tuple[int, Any]) -> Any:
        for index, value in writes:
            x = x.at[index].set(value)
        return x

    def add_at(self, x: Any, indices: list[int], values: Any) -> Any:
        return x.at[np.array(indices)].add(values)

    def pad(self, x: Any, *widths: tuple[int, int]) -> Any:
        return jnp.pad(x, widths)

    def loop(self, count: int, step: Function, x: Any) -> Any:
        return lax.fori_loop(0, count, lambda _, x: step(x), x)

    def custom(self, f: Function, rule: Callable[[Any, Any], Any]) -> Function:
        ruled = jax.custom_vjp(lambda x: f(x))
        ruled.defvjp(lambda x: (ruled(x), x), lambda x, gradient: (rule(x, gradient),))
        return ruled


OPS: dict[str, Operations] = {"torch": TorchOps(), "tensorflow": TensorflowOps(), "jax": JaxOps()}
