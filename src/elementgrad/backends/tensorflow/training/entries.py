"""Some entries of the gradients of a product and of a table, without the others, by what every compiler knows."""

from typing import Any

import numpy as np
import tensorflow as tf

Tensor = Any

# Costs per row of the factors, in nanoseconds, as measured on two cores in float32 (`make bench` shows the outcome).
GATHERED = 5.0  # one entry: two columns read, multiplied and summed
MULTIPLIED = 0.0105  # one entry of a matrix product
SELECTED = 2.0  # one column copied out of a factor


class Product:
    """Entries (row, column) of `left.T @ right`, where left has `rows` columns and right has `columns`.

    >>> import tensorflow as tf
    >>> from elementgrad.backends.tensorflow.training.entries import Product
    >>> product = Product([0, 1], [1, 1], rows=2, columns=2)
    >>> product(tf.constant([[1.0, 2.0], [3.0, 4.0]]), tf.constant([[5.0, 6.0], [7.0, 8.0]])).numpy()
    array([30., 44.], dtype=float32)
    """

    def __init__(self, row: "np.ndarray", column: "np.ndarray", rows: int, columns: int):
        self._row, self._column = np.asarray(row, np.int64), np.asarray(column, np.int64)
        some_rows, row_of = np.unique(self._row, return_inverse=True)
        some_columns, column_of = np.unique(self._column, return_inverse=True)
        # All columns in their order are the factor itself, without a copy.
        self._rows = None if len(some_rows) == rows else some_rows
        self._columns = None if len(some_columns) == columns else some_columns
        self._cell = row_of.reshape(-1) * len(some_columns) + column_of.reshape(-1)
        self._every = bool(np.array_equal(self._cell, np.arange(rows * columns)))
        copied = sum(len(some) for some, all_of in ((some_rows, rows), (some_columns, columns)) if len(some) < all_of)
        gathered = GATHERED * len(self._row)
        multiplied = MULTIPLIED * len(some_rows) * len(some_columns) + SELECTED * copied
        self._gathers = gathered < multiplied
        self.cost = min(gathered, multiplied)
        """What a row of the factors costs, in nanoseconds."""

    def __call__(self, left: Tensor, right: Tensor) -> Tensor:
        """The entries, in the dtype of the right factor, for shapes (n, rows) and (n, columns); halves in float32."""
        if self._gathers:
            left, right = _alike(tf.gather(left, self._row, axis=1), tf.gather(right, self._column, axis=1))
            return tf.reduce_sum(left * right, 0)
        left = left if self._rows is None else tf.gather(left, self._rows, axis=1)
        right = right if self._columns is None else tf.gather(right, self._columns, axis=1)
        block = tf.reshape(tf.matmul(*_alike(left, right), transpose_a=True), [-1])
        return block if self._every else tf.gather(block, self._cell)


class Lookup:
    """Entries (row, column) of the gradient of a table of which rows were looked up.

    >>> import tensorflow as tf
    >>> from elementgrad.backends.tensorflow.training.entries import Lookup
    >>> lookup = Lookup([0, 7], [1, 0], columns=2)
    >>> lookup(tf.constant([7, 3, 7]), tf.constant([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])).numpy()
    array([0., 6.], dtype=float32)
    """

    def __init__(self, row: "np.ndarray", column: "np.ndarray", columns: int):
        self._rows, row_of = np.unique(np.asarray(row, np.int64), return_inverse=True)
        some, column_of = np.unique(np.asarray(column, np.int64), return_inverse=True)
        self._columns = None if len(some) == columns else some
        self._cell = row_of.reshape(-1) * len(some) + column_of.reshape(-1)
        self._every = bool(np.array_equal(self._cell, np.arange(len(self._rows) * len(some))))

    def __call__(self, tokens: Tensor, gradient: Tensor) -> Tensor:
        """The entries, for n tokens and the gradients of the n rows that they looked up."""
        count = len(self._rows)
        tokens = tf.cast(tokens, tf.int64)
        near = tf.minimum(tf.searchsorted(self._rows, tokens), count - 1)
        hit = tf.gather(self._rows, near) == tokens
        # The others are left out and not multiplied by zero, which would let NaN and inf through.
        if self._columns is None:
            gradient, near = _wide(gradient), tf.where(hit, near, -1)  # which is left out of sums
        else:
            some = tf.reshape(tf.where(hit), [-1])
            gradient, near = tf.gather(gradient, some), tf.gather(near, some)
            gradient = _wide(tf.gather(gradient, self._columns, axis=1))
        sums = tf.reshape(tf.math.unsorted_segment_sum(gradient, near, count), [-1])
        return sums if self._every else tf.gather(sums, self._cell)


def _alike(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    right = _wide(right)
    return tf.cast(left, right.dtype), right


def _wide(x: Tensor) -> Tensor:
    return tf.cast(x, tf.float32) if x.dtype in (tf.float16, tf.bfloat16) else x
