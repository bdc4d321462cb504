"""TensorFlow's part in reads: seeds, sparse matrices, reads as graphs, and what worker processes start from."""

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import tensorflow as tf

from elementgrad._backends.autodiff import Linearization
from elementgrad._backends.tensorflow import contributions
from elementgrad._backends.tensorflow._compat import function_options, op_def_registry
from elementgrad._backends.tensorflow.autodiff import TensorflowLinearization
from elementgrad._backends.tensorflow.isolate import with_seeds, without_log
from elementgrad._backends.tensorflow.record import TensorflowRecorder
from elementgrad._read.backend import Layout, Read, ReadBackend
from elementgrad._read.recorder import Recorder
from elementgrad._sparsity.pattern import Pattern
from elementgrad.errors import FrameworkError

Tensor = Any
HARMLESS = {"Placeholder", "ReadVariableOp", "StatefulPartitionedCall"}
"""Operations with a state that change nothing, or only what those inside them change."""


class TensorflowRead(ReadBackend):
    uses = staticmethod(contributions.linearize_uses)

    def one_hot_seeds(self, like: Tensor, positions: np.ndarray, batch: int) -> Tensor:
        seeds = tf.one_hot(positions, math.prod(like.shape) // batch, dtype=like.dtype)
        seeds = tf.repeat(seeds, batch, 0) if batch > 1 else seeds
        shape = len(positions), *like.shape
        # An array takes a fraction of the time of a tuple.
        return tf.reshape(seeds, np.array(shape, np.int64) if tf.executing_eagerly() else shape)

    def transpose(self, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        return tf.transpose(x, axes)

    def matmul(self, x: Tensor, y: Tensor) -> Tensor:
        return tf.matmul(x, y)

    def rounding(self, like: Tensor) -> str:
        threads = tf.config.threading.get_intra_op_parallelism_threads()
        return f"tensorflow {tf.__version__}, {threads} threads" if "CPU" in like.device else ""

    def index(self, positions: np.ndarray, like: Tensor) -> Any:
        return positions  # a graph makes a constant of its own of them

    def gather(self, x: Tensor, index: Any) -> Tensor:
        return tf.gather(x, index)

    def seeds(self, values: np.ndarray, like: Tensor) -> Tensor:
        with tf.init_scope():
            return tf.cast(values, like.dtype)

    def sparse(self, pattern: Pattern, layout: Layout | None, like: Tensor) -> Callable[[Tensor], Any]:
        if layout == "csr":
            raise FrameworkError('TensorFlow keeps sparse matrices by coordinates; use "coo" or "scipy"')
        with tf.init_scope():
            places = tf.constant(np.stack([pattern.rows, pattern.columns], 1).astype(np.int64))
            shape = tf.constant(pattern.shape, tf.int64)
        return lambda values: tf.sparse.SparseTensor(places, values, shape)

    def maybe_compile(self, read: Read) -> Read:
        graph: Read | None = None
        tried = False

        def run(x: Tensor) -> Any:
            nonlocal graph, tried
            if not tried:
                graph, tried = _graph(read, x), True
            return read(x) if graph is None else graph(x)

        return run

    def recorder(self, tensors: Any) -> Recorder:
        return TensorflowRecorder(tensors)

    def ambient_state(self, linear: Linearization) -> Any:
        return linear.seeds if isinstance(linear, TensorflowLinearization) else None

    def restore_ambient_state(self, state: Any) -> AbstractContextManager[Any]:
        return with_seeds(state)

    def reducers(self) -> Mapping[type, Callable[[Any], tuple[Any, ...]]]:
        return {type(tf.function(lambda: None)): lambda compiled: (tf.function, function_options(compiled))}


def _graph(read: Read, x: Tensor) -> Read | None:
    """Trace a read into a graph; None if it cannot be, or would draw random numbers or write to variables."""
    try:
        with without_log():
            function = tf.function(read, [tf.TensorSpec(x.shape, x.dtype)], autograph=False).get_concrete_function()
    except Exception:  # it runs as it stands
        return None
    definition = function.graph.as_graph_def()
    nodes = [*definition.node, *[node for part in definition.library.function for node in part.node_def]]
    return function if all(node.op in HARMLESS or not _is_stateful(node.op) for node in nodes) else None


def _is_stateful(operation: str) -> bool:
    definition = op_def_registry.get(operation)
    return definition is None or definition.is_stateful


implementation = TensorflowRead()
