"""The pattern of a Jacobian from the graph of one reverse sweep."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from elementgrad.backends.tensorflow.reaching.following import Anything, Follower
from elementgrad.backends.tensorflow.reaching.rules import RULES
from elementgrad.sparsity.pattern import Pattern
from elementgrad.sparsity.reach import Reach
from elementgrad.sparsity.value import UNKNOWN, Reached

Tensor = Any
Swept = tuple[Tensor | None, Tensor | None]


def found(sweep: Callable[..., Swept], x: Tensor | None, y: Tensor, like: Tensor) -> Pattern | None:
    """The pattern of a function, from a reverse sweep: `sweep(seed)` here, or `sweep(x, seed)` at any x.

    It gives the tensor that is differentiated, which counts as unknown, and its derivative, as `like` is; None if there
    is none. The seed is as the output y is.
    """
    given = [tf.TensorSpec(end.shape, end.dtype) for end in (x, y) if end is not None]
    swept: list[Any] = []

    def program(*ends: Tensor) -> Tensor:
        swept[:] = sweep(*ends)
        return tf.zeros([]) if swept[1] is None else swept[1]

    graph = tf.function(program, autograph=False).get_concrete_function(*given).graph
    source, derivative = swept
    if derivative is None:
        return None
    reach = Reach(math.prod(y.shape))
    captured = [_captured(external) for external, _ in graph.captures]
    operands = [*[UNKNOWN] * (len(given) - 1), Reached(reach.start(y.shape)), *captured]
    hidden = [source] if getattr(source, "graph", None) is graph else []
    with tf.init_scope(), tf.device("CPU"):
        (result,) = Follower(reach, RULES).run(graph, operands, graph.outputs[:1], hidden)
    shape = math.prod(like.shape)
    if isinstance(result, Anything):
        result = Reached(np.full(shape, result.ids))
    return reach.pattern(result.ids if isinstance(result, Reached) else np.zeros(shape, dtype=np.int64)).T


def _captured(external: Any) -> Any:
    """A tensor from outside of the graph. One of a graph has no value, and what a variable holds may change."""
    return UNKNOWN if not hasattr(external, "numpy") or external.dtype in (tf.resource, tf.variant) else external
