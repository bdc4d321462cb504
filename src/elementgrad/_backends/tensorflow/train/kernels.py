"""Some entries of the dense gradient of a product, a table and a convolution, without computing the others.

Only operations that every compiler knows are used, so that they work in `tf.function` and under XLA.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from elementgrad._train.kernels import CellBlock, split_by_offset

Tensor = Any

# Costs per row of the factors, in nanoseconds, as measured on two cores in float32 (`make bench` shows the outcome).
GATHERED = 5.0  # one entry: two columns read, multiplied and summed
MULTIPLIED = 0.0105  # one entry of a matrix product
SELECTED = 2.0  # one column copied out of a factor
CONVOLVED = MULTIPLIED  # one entry of the dense gradient of a convolution's kernel


class KerasProduct:
    """Entries (row, column) of `left.T @ right`, where left has `rows` columns and right has `columns`.

    >>> import tensorflow as tf
    >>> from elementgrad._backends.tensorflow.train.kernels import KerasProduct
    >>> product = KerasProduct([0, 1], [1, 1], rows=2, columns=2)
    >>> product(tf.constant([[1.0, 2.0], [3.0, 4.0]]), tf.constant([[5.0, 6.0], [7.0, 8.0]])).numpy()
    array([30., 44.], dtype=float32)
    """

    def __init__(self, row: "np.ndarray", column: "np.ndarray", rows: int, columns: int):
        self._block = block = CellBlock(row, column, (rows, columns))
        gather_cost = GATHERED * len(block.row)
        matmul_cost = MULTIPLIED * block.size + SELECTED * block.copied
        self._gathers = gather_cost < matmul_cost
        self.cost = min(gather_cost, matmul_cost)
        """The cost per row of the factors, in nanoseconds."""

    def __call__(self, left: Tensor, right: Tensor) -> Tensor:
        """Compute the entries, in the dtype of the right factor, for (n, rows) and (n, columns); halves in float32."""
        block = self._block
        if self._gathers:
            left, right = _common_dtype(tf.gather(left, block.row, axis=1), tf.gather(right, block.column, axis=1))
            return tf.reduce_sum(left * right, 0)
        left = left if block.has_all_rows else tf.gather(left, block.rows, axis=1)
        right = right if block.has_all_columns else tf.gather(right, block.columns, axis=1)
        entries = tf.reshape(tf.matmul(*_common_dtype(left, right), transpose_a=True), [-1])
        return entries if block.is_in_order else tf.gather(entries, block.cell)


class KerasLookup:
    """Entries (row, column) of the gradient of a table of which rows were looked up.

    >>> import tensorflow as tf
    >>> from elementgrad._backends.tensorflow.train.kernels import KerasLookup
    >>> lookup = KerasLookup([0, 7], [1, 0], columns=2)
    >>> lookup(tf.constant([7, 3, 7]), tf.constant([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])).numpy()
    array([0., 6.], dtype=float32)
    """

    def __init__(self, row: "np.ndarray", column: "np.ndarray", columns: int):
        self._block = CellBlock(row, column, (int(np.max(row, initial=0)) + 1, columns))

    def __call__(self, tokens: Tensor, gradient: Tensor) -> Tensor:
        """Compute the entries, for n tokens and the gradients of the n rows that they looked up."""
        block = self._block
        count = len(block.rows)
        tokens = tf.cast(tokens, tf.int64)
        near = tf.minimum(tf.searchsorted(block.rows, tokens), count - 1)
        hit = tf.gather(block.rows, near) == tokens
        # The others are left out and not multiplied by zero, which would let NaN and inf through.
        if block.has_all_columns:
            gradient, near = _widen(gradient), tf.where(hit, near, -1)  # segment sums leave out -1
        else:
            some = tf.reshape(tf.where(hit), [-1])
            gradient, near = tf.gather(gradient, some), tf.gather(near, some)
            gradient = _widen(tf.gather(gradient, block.columns, axis=1))
        sums = tf.reshape(tf.math.unsorted_segment_sum(gradient, near, count), [-1])
        return sums if block.is_in_order else tf.gather(sums, block.cell)


@dataclass(frozen=True)
class KerasConvGrid:
    """The windows of a convolution over its input."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: str
    """"valid", "same" or "causal"."""
    channels_first: bool = False

    def to_channels_last(self, x: Tensor) -> Tensor:
        """Move the channels to the last axis."""
        return tf.transpose(x, [0, *range(2, x.shape.rank), 1]) if self.channels_first else x

    def pad(self, x: Tensor) -> Tensor:
        """Add the zeros of the padding around an input, channels last."""
        if self.padding == "valid":
            return x
        amounts: list[Any] = [[0, 0]]
        for axis, (size, stride, dilation) in enumerate(zip(self.size, self.stride, self.dilation, strict=True), 1):
            reach = (size - 1) * dilation
            if self.padding == "causal":
                amounts.append([reach, 0])
                continue
            length = tf.shape(x)[axis]
            outputs = (length + stride - 1) // stride
            total = tf.maximum((outputs - 1) * stride + reach + 1 - length, 0)
            amounts.append([total // 2, total - total // 2])
        return tf.pad(x, [*amounts, [0, 0]])

    def window(self, x: Tensor, offset: Sequence[int], outputs: Tensor) -> Tensor:
        """Return the elements of a padded input that the outputs multiply by one offset of the kernel."""
        starts = [at * dilation for at, dilation in zip(offset, self.dilation, strict=True)]
        windows = [
            slice(start, start + (outputs[axis] - 1) * stride + 1, stride)
            for axis, (start, stride) in enumerate(zip(starts, self.stride, strict=True), 1)
        ]
        return x[(slice(None), *windows, slice(None))]


class KerasCorrelation:
    """Entries of the gradient of a convolution's kernel, given by their coordinates (offset..., in, out).

    One offset of the kernel pairs every output with one input, so its share of the gradient is the product of the two
    over all pairs, of which `KerasProduct` computes the entries.
    """

    def __init__(self, coordinates: np.ndarray, shape: tuple[int, ...], grid: KerasConvGrid):
        self._grid = grid
        *offsets, channel, out = coordinates.T
        self._products: list[tuple[list[int], KerasProduct]] = []
        parts, self._order = split_by_offset(np.ravel_multi_index(tuple(offsets), shape[:-2]))
        cost = 0.0
        for offset, entries in parts:
            product = KerasProduct(channel[entries], out[entries], shape[-2], shape[-1])
            cost += product.cost + SELECTED * shape[-2]
            self._products.append(([int(axis) for axis in np.unravel_index(offset, shape[:-2])], product))
        self.is_dense_cheaper = cost > CONVOLVED * np.prod(shape)

    def __call__(self, x: Tensor, gradient: Tensor) -> Tensor:
        """Compute the entries, for the input and the gradient of the output."""
        gradient = self._grid.to_channels_last(gradient)
        x = self._grid.pad(self._grid.to_channels_last(x))
        outputs = tf.shape(gradient)
        right = tf.reshape(gradient, [-1, gradient.shape[-1]])
        entries = []
        for offset, product in self._products:
            window = self._grid.window(x, offset, outputs)
            entries.append(product(tf.reshape(window, [-1, x.shape[-1]]), right))
        return tf.gather(tf.concat(entries, 0), self._order)


def _common_dtype(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    right = _widen(right)
    return tf.cast(left, right.dtype), right


def _widen(x: Tensor) -> Tensor:
    return tf.cast(x, tf.float32) if x.dtype in (tf.float16, tf.bfloat16) else x
