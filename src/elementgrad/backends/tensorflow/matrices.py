"""Sparse matrices of TensorFlow."""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import op_def_registry

from elementgrad.backends.matrices import Layout, Matrices, Read
from elementgrad.backends.tensorflow.quiet import silenced
from elementgrad.errors import FrameworkError
from elementgrad.sparsity.pattern import Pattern

Tensor = Any
HARMLESS = {"Placeholder", "ReadVariableOp", "StatefulPartitionedCall"}
"""Operations with a state that change nothing, or only what those inside them change."""


class TensorflowMatrices(Matrices):
    """The operations of `Matrices` on `tf.Tensor`."""

    def index(self, positions: np.ndarray, like: Tensor) -> Any:
        """Positions, of which a graph makes a constant of its own."""
        return positions

    def gather(self, x: Tensor, index: Any) -> Tensor:
        """The elements there."""
        return tf.gather(x, index)

    def seeds(self, numbers: np.ndarray, like: Tensor) -> Tensor:
        """Outside of a graph that is being traced."""
        with tf.init_scope():
            return tf.cast(numbers, like.dtype)

    def repeated(self, read: Read) -> Read:
        """As a graph, unless it cannot be traced, or would draw numbers or write to variables."""
        traced: Read | None = None
        tried = False

        def run(x: Tensor) -> Any:
            nonlocal traced, tried
            if not tried:
                traced, tried = _traced(read, x), True
            return read(x) if traced is None else traced(x)

        return run

    def sparse(self, pattern: Pattern, layout: Layout | None, like: Tensor) -> Callable[[Tensor], Any]:
        """A `tf.SparseTensor`, which is by coordinates."""
        if layout == "csr":
            raise FrameworkError('TensorFlow keeps sparse matrices by coordinates; use "coo" or "scipy"')
        with tf.init_scope():
            places = tf.constant(np.stack([pattern.rows, pattern.columns], 1).astype(np.int64))
            shape = tf.constant(pattern.shape, tf.int64)
        return lambda values: tf.sparse.SparseTensor(places, values, shape)


def _traced(read: Read, x: Tensor) -> Read | None:
    try:
        with silenced():
            function = tf.function(read, [tf.TensorSpec(x.shape, x.dtype)], autograph=False).get_concrete_function()
    except Exception:  # it runs as it stands
        return None
    definition = function.graph.as_graph_def()
    nodes = [*definition.node, *[node for part in definition.library.function for node in part.node_def]]
    return function if all(node.op in HARMLESS or not _stateful(node.op) for node in nodes) else None


def _stateful(kind: str) -> bool:
    definition = op_def_registry.get(kind)
    return definition is None or definition.is_stateful
