"""TensorFlow behind the common interface of `frameworks`."""

from typing import Any

import numpy as np
import tensorflow as tf

from tests.support.frameworks import Function

jit = tf.function


def tensor(array: Any, dtype: str = "float64") -> tf.Tensor:
    return tf.cast(tf.constant(np.asarray(array)), dtype)


def numpy(tensor: tf.Tensor) -> np.ndarray:
    return np.asarray(tf.cast(tensor, tf.float32) if tensor.dtype == tf.bfloat16 else tensor)


def grad(f: Function, *xs: tf.Tensor) -> list[np.ndarray]:
    with tf.GradientTape() as tape:
        tape.watch(xs)
        y = f(*xs)
    gradients = tape.gradient(y, xs, unconnected_gradients=tf.UnconnectedGradients.ZERO)
    return [numpy(tf.convert_to_tensor(g)) for g in gradients]


def jvp(f: Function, xs: list[Any], tangents: list[Any]) -> np.ndarray:
    with tf.autodiff.ForwardAccumulator(xs, tangents) as accumulator:
        y = f(*xs)
    return np.asarray(accumulator.jvp(y, unconnected_gradients=tf.UnconnectedGradients.ZERO))


def hessians(f: Function, x: tf.Tensor) -> dict[str, np.ndarray]:
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
        columns.append(jvp(lambda x: plain_gradient(f, x), [x], [direction]))
    forward = np.stack(columns, axis=-1).reshape(tuple(x.shape) * 2)
    return {"reverse over reverse": np.asarray(reverse), "forward over reverse": forward}


def plain_gradient(f: Function, x: tf.Tensor) -> tf.Tensor:
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = f(x)
    return tape.gradient(y, x, unconnected_gradients=tf.UnconnectedGradients.ZERO)


def stack(tensors: list[tf.Tensor]) -> tf.Tensor:
    return tf.stack(tensors)


def sum(tensor: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(tensor)


def vmap(f: Function) -> Function:
    return lambda *xs: tf.vectorized_map(lambda xs: f(*xs), xs)
