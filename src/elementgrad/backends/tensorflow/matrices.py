"""Sparse matrices of TensorFlow."""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from elementgrad.backends.matrices import Layout, Matrices
from elementgrad.errors import FrameworkError
from elementgrad.sparsity.pattern import Pattern

Tensor = Any


class TensorflowMatrices(Matrices):
    """The operations of `Matrices` on `tf.Tensor`."""

    def index(self, positions: np.ndarray, like: Tensor) -> Any:
        """Positions, of which a graph makes a constant of its own."""
        return positions

    def gather(self, x: Tensor, index: Any) -> Tensor:
        """The elements there."""
        return tf.gather(x, index)

    def sparse(self, pattern: Pattern, layout: Layout | None, like: Tensor) -> Callable[[Tensor], Any]:
        """A `tf.SparseTensor`, which is by coordinates."""
        if layout == "csr":
            raise FrameworkError('TensorFlow keeps sparse matrices by coordinates; use "coo" or "scipy"')
        with tf.init_scope():
            places = tf.constant(np.stack([pattern.rows, pattern.columns], 1).astype(np.int64))
            shape = tf.constant(pattern.shape, tf.int64)
        return lambda values: tf.sparse.SparseTensor(places, values, shape)
