"""TensorFlow: operations on tensors and variables, and edits.

TensorFlow has no index arrays: elements are rows of a reshaped tensor, gathered and scattered (`RowIndexing`).
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import tensorflow as tf

from elementgrad import _cleanup
from elementgrad._backends.autodiff import Linearization, TensorFunction
from elementgrad._backends.base import Backend, DtypeRange, Kind
from elementgrad._backends.tensorflow import isolate
from elementgrad._backends.tensorflow._compat import TENSOR_TYPES
from elementgrad._backends.tensorflow.autodiff import TensorflowLinearization
from elementgrad._backends.tensorflow.names import TensorflowNames
from elementgrad._place.edit import EditBackend
from elementgrad._place.index import Span
from elementgrad._place.selection import Selection, to_ascending
from elementgrad.errors import TracedError

Tensor = Any
INT32 = 2**31
"""Positions are int32 up to here: TensorFlow vectorizes (pfor) a scatter only with those."""


class RowIndexing:
    """The selected elements as rows of a reshaped tensor. Trailing axes that are named whole stay together as blocks.

    The indices have the shape (1, k, 1): with two axes the gradient would be IndexedSlices, for which TensorFlow's
    forward mode has no tangent.
    """

    def __init__(self, x: Tensor, selection: Selection):
        self.x = x
        self.is_empty = not selection.traced and selection.size == 0  # `gather_nd` fails on an empty tensor
        if selection.traced:
            positions = flat_positions(x, selection)
            self.shape, self.rows = tf.shape(positions), tf.reshape(x, [-1])
            self.indices = tf.reshape(positions, [1, -1, 1])
            self.rows_shape = tf.shape(self.indices)[:2]
        else:
            positions, block = selection.rows()
            count = math.prod(selection.of[: len(selection.of) - len(block)])
            self.shape, self.rows = selection.shape, _reshape(x, (count, *block))
            self.indices = tf.constant(positions.reshape(1, -1, 1), tf.int32 if count < INT32 else tf.int64)
            self.rows_shape = (1, positions.size, *block)

    def take(self) -> Tensor:
        if self.is_empty:
            return tf.reshape(tf.reshape(self.x, [-1])[:0], self.shape)
        return tf.reshape(tf.gather_nd(self.rows, self.indices), self.shape)

    def put(self, value: Tensor) -> Tensor:
        return self._scatter(tf.tensor_scatter_nd_update, value)

    def add(self, value: Tensor) -> Tensor:
        """Return the tensor with values added to its rows; repeated ones accumulate."""
        return self._scatter(tf.tensor_scatter_nd_add, value)

    def multiply(self, value: Tensor) -> Tensor:
        """Return the tensor with its rows multiplied; the factors of repeated ones are multiplied first."""
        distinct, group = tf.unique(tf.reshape(self.indices, [-1]))
        factors = tf.reshape(tf.broadcast_to(value, self.shape), [-1])
        factors = tf.math.unsorted_segment_prod(factors, group, tf.size(distinct))
        self.indices, self.shape = tf.reshape(distinct, [1, -1, 1]), tf.shape(distinct)
        self.rows_shape = tf.shape(self.indices)[:2]
        return self.put(self.take() * factors)

    def _scatter(self, scatter: Any, value: Tensor) -> Tensor:
        if self.is_empty:
            return tf.identity(self.x)
        value = tf.reshape(_broadcast(value, self.shape), self.rows_shape)
        return _reshape(scatter(self.rows, self.indices, value), self.x)


def _reshape(x: Tensor, like: Any) -> Tensor:
    """Return x in a shape, or in that of a tensor. Eager operations are slow: one without effect is left out."""
    shape = tf.TensorShape(like) if isinstance(like, tuple) else like.shape
    if shape.is_fully_defined():
        return x if x.shape == shape else tf.reshape(x, shape)
    return tf.ensure_shape(tf.reshape(x, tf.shape(like)), shape)


def _broadcast(value: Tensor, shape: Any) -> Tensor:
    return value if isinstance(shape, tuple) and value.shape == shape else tf.broadcast_to(value, shape)


def flat_positions(x: Tensor, selection: Selection) -> Tensor:
    """Return flat positions in x of elements whose indices, or the sizes of whose axes, are known only at run time.

    An index out of range, or beyond int32, becomes -1, for which TensorFlow raises an error where it can; it never
    becomes the position of another element.
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
    """Return a range along one axis, with the bounds of a slice clamped to a size known only at run time."""
    if isinstance(part, range):
        return tf.range(part.start, part.stop, part.step, dtype=tf.int64)
    if not isinstance(part, Span):
        return part
    step = 1 if part.step is None else part.step
    low, high = (0, size) if step > 0 else (-1, size - 1)

    def bound(value: int | None, default: Any) -> Tensor:
        if value is None:
            return tf.cast(default, tf.int64)
        return tf.clip_by_value(value + size if value < 0 else tf.constant(value, tf.int64), low, high)

    start, stop = bound(part.start, low if step > 0 else high), bound(part.stop, high if step > 0 else low)
    return tf.range(start, tf.maximum(start, stop) if step > 0 else tf.minimum(start, stop), step)


def _append_axes(part: Any, count: int) -> Tensor:
    part = tf.convert_to_tensor(part)
    return tf.reshape(part, tf.concat([tf.shape(part), tf.ones(count, tf.int32)], 0))


class TensorflowEdit(EditBackend):
    """Edits and choices of `tf.Tensor` and `tf.Variable`."""

    def accumulate(self, x: Tensor, selection: Selection, value: Any, multiply: bool) -> Tensor:
        x = tf.convert_to_tensor(x)
        value = self._backend.cast(value, x)
        return RowIndexing(x, selection).multiply(value) if multiply else RowIndexing(x, selection).add(value)

    def only(self, x: Tensor, selection: Selection) -> Tensor:
        mask, backend = selection.mask, self._backend
        if mask is not None:
            return _through(x, lambda g: tf.where(mask.values, g, tf.zeros_like(g)))
        return _through(x, lambda g: backend.put(tf.zeros_like(g), selection, backend.take(g, selection)))

    def stop_gradient_at(self, x: Tensor, selection: Selection) -> Tensor:
        mask = selection.mask
        if mask is not None:
            return _through(x, lambda g: tf.where(mask.values, tf.zeros_like(g), g))
        return _through(x, lambda g: self._backend.put(g, selection, 0))

    def soft_choice(self, x: Tensor, logits: Tensor, axis: int) -> Tensor:
        x, logits = tf.convert_to_tensor(x), tf.convert_to_tensor(logits)
        weights = tf.nn.softmax(tf.cast(logits, tf.float32) if logits.dtype.size < 4 else logits, axis)
        weights = tf.cast(weights, x.dtype)
        return tf.reduce_sum(weights * tf.where(weights == 0, tf.zeros_like(x), x), axis)

    def hard_choice(self, x: Tensor, logits: Tensor, axis: int) -> Tensor:
        last = [*(other for other in range(x.shape.rank) if other != axis), axis]
        x = tf.transpose(x, last)
        chosen = tf.broadcast_to(tf.argmax(logits, axis), tf.shape(x)[:-1])
        return tf.gather(x, chosen, batch_dims=x.shape.rank - 1)

    def straight_through(self, value: Tensor, surrogate: Tensor) -> Tensor:
        return _straight_through(value, surrogate)


class TensorflowBackend(Backend):
    """The operations of `Backend` on `tf.Tensor` and `tf.Variable`, eager or inside `tf.function`."""

    name = "tensorflow"
    records_programs = True

    def __init__(self) -> None:
        super().__init__(TensorflowEdit(self), TensorflowNames())

    def owns(self, kind: type) -> bool:
        return issubclass(kind, TENSOR_TYPES)

    def shape(self, x: Tensor) -> tuple[int, ...]:
        shape = x.shape  # made anew each time
        if shape.rank is None:
            raise TracedError("the tensor's number of axes is not known while tracing; give it with tf.ensure_shape")
        return tuple(shape)

    def kind(self, x: Tensor) -> Kind:
        return _kind(x.dtype)

    def read(self, x: Tensor) -> np.ndarray | None:
        return tf.get_static_value(tf.convert_to_tensor(x))

    def dtype_range(self, x: Tensor) -> DtypeRange | None:
        return _dtype_range(tf.as_dtype(x.dtype))

    def cast(self, value: Any, like: Tensor) -> Tensor:
        return tf.cast(value if tf.is_tensor(value) else np.asarray(value), like.dtype)  # a bare float is float32 here

    def take(self, x: Tensor, selection: Selection) -> Tensor:
        x = tf.convert_to_tensor(x)
        if selection.basic:
            index, flips = selection.basic
            return tf.reverse(x[index], flips) if flips else x[index]
        if selection.mask is not None and selection.traced:
            return tf.boolean_mask(x, selection.mask.values)
        return RowIndexing(x, selection).take()

    def tensor(self, array: np.ndarray) -> Tensor:
        return tf.convert_to_tensor(array)

    def put(self, x: Tensor, selection: Selection, value: Any) -> Tensor:
        x = tf.convert_to_tensor(x)
        if selection.parts and not selection.shape and tf.executing_eagerly() and _is_one_element(selection):
            return _update_element(x, selection.parts, value)
        value = self.cast(value, x)
        if selection.basic and _strided_update_works(selection):
            return _strided_update(x, selection, value)
        return RowIndexing(x, selection).put(value)

    def where(self, mask: Any, x: Tensor, y: Tensor) -> Tensor:
        return tf.where(mask, x, y)

    def stop(self, x: Tensor) -> Tensor:
        return tf.stop_gradient(x)

    def reshape(self, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        # An array takes a fraction of the time of a tuple.
        return tf.reshape(x, np.array(shape, np.int64) if tf.executing_eagerly() else shape)

    def broadcast(self, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        return tf.broadcast_to(x, shape)

    def isolated(self, function: Callable[..., Any]) -> AbstractContextManager[None]:
        return isolate.isolated()

    def linearize(self, run: TensorFunction, inputs: Sequence[Tensor], create_graph: bool, order: int) -> Linearization:
        return TensorflowLinearization.of(run, inputs, create_graph, order)

    def itemsize(self, x: Tensor) -> int:
        return tf.as_dtype(x.dtype).size

    def zeros(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        return tf.zeros(shape, like.dtype)

    def to_float64(self, x: Tensor) -> np.ndarray | None:
        return self.read(tf.cast(x, tf.float64))

    def convert(self, x: Tensor, dtype: str) -> Tensor:
        return x if tf.as_dtype(x.dtype).name == dtype else tf.cast(x, dtype)

    def concat(self, parts: Sequence[Tensor]) -> Tensor:
        return tf.concat(parts, 0)


@cache
def _kind(dtype: Any) -> Kind:
    dtype = tf.as_dtype(dtype)
    if dtype.is_floating:
        return "f"
    return "c" if dtype.is_complex else "b" if dtype.is_bool else "i" if dtype.is_integer else "o"


@cache
def _dtype_range(dtype: tf.DType) -> DtypeRange | None:
    if dtype.is_floating or dtype.is_complex:
        return DtypeRange.from_floats(ml_dtypes.finfo(dtype.as_numpy_dtype))
    return DtypeRange.from_integers(ml_dtypes.iinfo(dtype.as_numpy_dtype)) if dtype.is_integer else None


def _through(x: Tensor, keep: Callable[[Tensor], Tensor]) -> Tensor:
    """Return x itself, with its derivatives passed through a linear map that is its own transpose."""
    # The value is cut off first, as forward mode would follow it beside the rule.
    return tf.custom_gradient(lambda x: (tf.stop_gradient(x), keep))(tf.convert_to_tensor(x))


@tf.custom_gradient
def _straight_through(value: Tensor, surrogate: Tensor) -> Any:
    return tf.stop_gradient(value), lambda upstream: (None, upstream)


EXACT = (tf.float32, tf.float64)
"""The dtypes to which NumPy rounds as TensorFlow does."""


def _is_one_element(selection: Selection) -> bool:
    known = selection.mask is None and all(type(part) is int for part in selection.parts)
    return known and max(selection.of) < 2**31


def _update_element(x: Tensor, at: Sequence[Any], value: Any) -> Tensor:
    """Write one element by one operation; every other one would take as long as the write."""
    if type(value) in (int, float) and x.dtype in EXACT:
        update: Any = np.array([value], x.dtype.as_numpy_dtype)
    else:
        update = tf.reshape(tf.cast(value if tf.is_tensor(value) else np.asarray(value), x.dtype), (1,))
    # Its derivatives of higher order put the indices beside shapes, which are int32.
    return tf.raw_ops.TensorScatterUpdate(tensor=x, indices=np.array([at], np.int32), updates=update)


def _strided_update_works(selection: Selection) -> bool:
    # XLA, which may compile any graph later, updates only unit steps.
    return tf.executing_eagerly() or all(
        abs(to_ascending(part).step) == 1 for part in selection.parts if isinstance(part, range)
    )


def _strided_update(x: Tensor, selection: Selection, value: Tensor) -> Tensor:
    ranges = [range(part, part + 1) if isinstance(part, int) else part for part in selection.parts]
    ahead = [to_ascending(part) for part in ranges]
    flips = [axis for axis, part in enumerate(ranges) if part.step < 0]
    value = tf.reshape(tf.broadcast_to(value, selection.shape), [len(part) for part in ranges])
    return tf.raw_ops.TensorStridedSliceUpdate(
        input=x,
        begin=np.array([part.start for part in ahead], np.int64),
        end=np.array([part.stop for part in ahead], np.int64),
        strides=np.array([part.step for part in ahead], np.int64),
        value=tf.reverse(value, flips) if flips else value,
    )


backend = TensorflowBackend()
_cleanup.register_snapshot(isolate.snapshot)
