"""Index arrays for TensorFlow, which has none: elements as rows of a reshaped tensor, gathered and scattered."""

from typing import Any

import numpy as np
import tensorflow as tf

from elementgrad.index import Span
from elementgrad.selection import Selection

Tensor = Any


class Rows:
    """The selected elements as rows: trailing axes that are named whole stay blocks instead of becoming indices."""

    def __init__(self, x: Tensor, selection: Selection):
        self.x = x
        if selection.traced:
            self.positions, self.rows = flat_positions(x, selection), tf.reshape(x, [-1])
            self.shape = tf.shape(self.positions)
        else:
            positions, block = selection.rows()
            count = int(np.prod(selection.of[: len(selection.of) - len(block)], dtype=np.int64))
            self.positions, self.rows = tf.constant(positions), tf.reshape(x, (count, *block))
            self.shape = selection.shape

    def take(self) -> Tensor:
        return tf.gather(self.rows, self.positions)

    def put(self, value: Tensor) -> Tensor:
        return self._scatter(tf.tensor_scatter_nd_update, value)

    def add(self, value: Tensor) -> Tensor:
        return self._scatter(tf.tensor_scatter_nd_add, value)

    def _scatter(self, scatter: Any, value: Tensor) -> Tensor:
        value = tf.broadcast_to(value, self.shape)
        edited = scatter(self.rows, tf.expand_dims(self.positions, -1), value)
        return tf.ensure_shape(tf.reshape(edited, tf.shape(self.x)), self.x.shape)


def flat_positions(x: Tensor, selection: Selection) -> Tensor:
    """Positions in the flattened x of elements whose indices, or the sizes they count in, are known only at run time.

    An index out of range becomes -1, which TensorFlow refuses where it can, and never another element's position.
    """
    sizes = tf.unstack(tf.shape(x, out_type=tf.int64))
    lines = [_line(part, size) for part, size in zip(selection.parts, sizes, strict=True)]
    position = tf.zeros((), tf.int64)
    valid = tf.constant(True)
    for part, size in zip(selection.mesh(lines=lines, reshape=_append_axes), sizes, strict=True):
        part = tf.cast(part, tf.int64)
        part = tf.where(part < 0, part + size, part)
        valid &= (part >= 0) & (part < size)
        position = position * size + part
    return tf.where(valid, position, tf.constant(-1, tf.int64))


def _line(part: Any, size: Tensor) -> Tensor:
    """A range along one axis, with the bounds of a slice clamped to a size known only at run time."""
    if isinstance(part, range):
        return tf.range(part.start, part.stop, part.step, dtype=tf.int64)
    if not isinstance(part, Span):
        return part
    step = 1 if part.step is None else part.step
    low, high = (0, size) if step > 0 else (-1, size - 1)

    def bound(given: int | None, default: Any) -> Tensor:
        if given is None:
            return tf.cast(default, tf.int64)
        return tf.clip_by_value(given + size if given < 0 else tf.constant(given, tf.int64), low, high)

    start, stop = bound(part.start, low if step > 0 else high), bound(part.stop, high if step > 0 else low)
    return tf.range(start, tf.maximum(start, stop) if step > 0 else tf.minimum(start, stop), step)


def _append_axes(part: Any, count: int) -> Tensor:
    part = tf.convert_to_tensor(part)
    return tf.reshape(part, tf.concat([tf.shape(part), tf.ones(count, tf.int32)], 0))
