"""Index arrays for TensorFlow, which has none: elements as rows of a reshaped tensor, gathered and scattered."""

import math
from typing import Any

import tensorflow as tf

from elementgrad.index import Span
from elementgrad.selection import Selection

Tensor = Any
INT32 = 2**31
"""Up to so many positions are int32: TensorFlow vectorises (pfor) a scatter only with those."""


class Rows:
    """The selected elements as rows: trailing axes that are named whole stay blocks instead of becoming indices.

    Indices are a list of one list (axes 1, k, 1): with two axes a gradient is IndexedSlices, for which TensorFlow's
    forward mode has no tangent.
    """

    def __init__(self, x: Tensor, selection: Selection):
        self.x = x
        self.nothing = not selection.traced and selection.size == 0  # TensorFlow gathers nothing from nothing
        if selection.traced:
            positions = flat_positions(x, selection)
            self.shape, self.rows = tf.shape(positions), tf.reshape(x, [-1])
            self.indices = tf.reshape(positions, [1, -1, 1])
            self.listed = tf.shape(self.indices)[:2]
        else:
            positions, block = selection.rows()
            count = math.prod(selection.of[: len(selection.of) - len(block)])
            self.shape, self.rows = selection.shape, _reshape(x, (count, *block))
            self.indices = tf.constant(positions.reshape(1, -1, 1), tf.int32 if count < INT32 else tf.int64)
            self.listed = (1, positions.size, *block)

    def take(self) -> Tensor:
        """The rows."""
        if self.nothing:
            return tf.reshape(tf.reshape(self.x, [-1])[:0], self.shape)
        return tf.reshape(tf.gather_nd(self.rows, self.indices), self.shape)

    def put(self, value: Tensor) -> Tensor:
        """The tensor with its rows replaced."""
        return self._scatter(tf.tensor_scatter_nd_update, value)

    def add(self, value: Tensor) -> Tensor:
        """The tensor with values added to its rows; repeated ones accumulate."""
        return self._scatter(tf.tensor_scatter_nd_add, value)

    def multiply(self, value: Tensor) -> Tensor:
        """The tensor with its rows multiplied; the factors of repeated ones are multiplied together first."""
        distinct, group = tf.unique(tf.reshape(self.indices, [-1]))
        factors = tf.reshape(tf.broadcast_to(value, self.shape), [-1])
        factors = tf.math.unsorted_segment_prod(factors, group, tf.size(distinct))
        self.indices, self.shape = tf.reshape(distinct, [1, -1, 1]), tf.shape(distinct)
        self.listed = tf.shape(self.indices)[:2]
        return self.put(self.take() * factors)

    def _scatter(self, scatter: Any, value: Tensor) -> Tensor:
        if self.nothing:
            return tf.identity(self.x)
        value = tf.reshape(_broadcast(value, self.shape), self.listed)
        return _reshape(scatter(self.rows, self.indices, value), self.x)


def _reshape(x: Tensor, like: Any) -> Tensor:
    """x in a shape, or in that of a tensor. Eager operations are slow, so one that would do nothing is left out."""
    shape = tf.TensorShape(like) if isinstance(like, tuple) else like.shape
    if shape.is_fully_defined():
        return x if x.shape == shape else tf.reshape(x, shape)
    return tf.ensure_shape(tf.reshape(x, tf.shape(like)), shape)


def _broadcast(value: Tensor, shape: Any) -> Tensor:
    return value if isinstance(shape, tuple) and value.shape == shape else tf.broadcast_to(value, shape)


def flat_positions(x: Tensor, selection: Selection) -> Tensor:
    """Positions in the flattened x of elements whose indices, or the sizes they count in, are known only at run time.

    An index out of range, or beyond int32, becomes -1, which TensorFlow refuses where it can; it never becomes another
    element's position.
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
    return tf.cast(tf.where(valid & (position < INT32), position, tf.constant(-1, tf.int64)), tf.int32)


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
