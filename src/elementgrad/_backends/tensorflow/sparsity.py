"""Sparsity patterns of TensorFlow functions: the graph of one reverse sweep, followed op by op.

`sparsity_rules.py` has the rules. The derivative of a composite function such as softmax is mul, sum and sub.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from elementgrad._backends.tensorflow.graph_ops import rerun, static_shape
from elementgrad._backends.tensorflow.sparsity_rules import LIST_RULES, RULES
from elementgrad._sparsity.index_sets import IndexSets
from elementgrad._sparsity.pattern import Pattern
from elementgrad._sparsity.rules import (
    UNKNOWN,
    DependentValue,
    Propagator,
    UnknownShape,
    Value,
    dependent_ids,
    everything,
)

Tensor = Any
Operation = Any
CALLS = {"PartitionedCall", "StatefulPartitionedCall"}
BRANCHES = {"If", "StatelessIf"}
LOOPS = {"While", "StatelessWhile"}
SHAPE_OPS = {"Shape", "ShapeN", "Size", "Rank", "ZerosLike", "OnesLike"}
"""Ops whose results are those of any values of the same shape."""


def find_pattern(
    sweep: Callable[..., tuple[Tensor | None, Tensor | None]], x: Tensor | None, y: Tensor, like: Tensor
) -> Pattern | None:
    """Return the pattern of a function from a reverse sweep; None if there is no derivative.

    Args:
        sweep: `sweep(seed)` at this point, or `sweep(x, seed)` at any x. Returns the tensor that is differentiated,
            which counts as unknown, and its derivative.
        x: The input, for a sweep at any x.
        y: The output; the seed has its shape and dtype.
        like: The input, whose shape the derivative has.
    """
    specs = [tf.TensorSpec(end.shape, end.dtype) for end in (x, y) if end is not None]
    swept: list[Any] = []

    def program(*ends: Tensor) -> Tensor:
        swept[:] = sweep(*ends)
        return tf.zeros([]) if swept[1] is None else swept[1]

    graph = tf.function(program, autograph=False).get_concrete_function(*specs).graph
    source, derivative = swept
    if derivative is None:
        return None
    sets = IndexSets(math.prod(y.shape))
    captured = [_captured_value(external) for external, _ in graph.captures]
    operands = [*[UNKNOWN] * (len(specs) - 1), DependentValue(sets.seed_ids(y.shape)), *captured]
    hidden = [source] if getattr(source, "graph", None) is graph else []
    with tf.init_scope(), tf.device("CPU"):
        (result,) = GraphPropagator(sets).run(graph, operands, graph.outputs[:1], hidden)
    size = math.prod(like.shape)
    if isinstance(result, UnknownShape):
        result = DependentValue(np.full(size, result.ids))
    return sets.pattern(result.ids if isinstance(result, DependentValue) else np.zeros(size, dtype=np.int64)).T


def _captured_value(external: Any) -> Any:
    """Return a tensor from outside the graph. One of a graph has no value, and that of a variable may change."""
    return UNKNOWN if not hasattr(external, "numpy") or external.dtype in (tf.resource, tf.variant) else external


class _OpaqueError(Exception):
    """An op cannot be looked into, or carries a value whose shape is not known before it runs."""


class GraphPropagator(Propagator):
    """Follows graphs."""

    def run(
        self, graph: Any, operands: Sequence[Value], results: Sequence[Any], hidden: Sequence[Any] = ()
    ) -> list[Value]:
        """Return the values of some tensors of a graph, with these operands for its inputs.

        Hidden tensors count as unknown, even if they could be computed.
        """
        values: dict[Any, Value] = {x.ref(): value for x, value in zip(graph.inputs, operands, strict=True)}
        values.update({x.ref(): UNKNOWN for x in hidden})
        for op in _sort_needed(results):
            if op.outputs and op.outputs[0].ref() not in values:
                inputs = [values[x.ref()] for x in op.inputs]
                values.update(zip([y.ref() for y in op.outputs], self._step(op, inputs), strict=True))
        return [values[y.ref()] for y in results]

    def _step(self, op: Operation, operands: list[Value]) -> Sequence[Value]:
        kind = op.type
        if kind in SHAPE_OPS:
            operands = [self._zeros_of_shape(value, x) for value, x in zip(operands, op.inputs, strict=True)]
        inside = self._branch if kind in BRANCHES else self._loop if kind in LOOPS else None
        if kind in CALLS or (inside and dependent_ids(operands)):
            try:
                return inside(op, operands) if inside else self._call(op, "f", operands)
            except _OpaqueError:
                pass
        elif all(map(self.is_known, operands)):
            return _evaluate(op, operands)
        if not dependent_ids(operands):
            return [UNKNOWN] * len(op.outputs)
        if any(isinstance(value, UnknownShape) for value in operands):
            return everything(self, op, operands)
        is_list = any(x.dtype == tf.variant for x in (*op.inputs, *op.outputs))
        return (LIST_RULES if is_list else RULES).get(kind, everything)(self, op, operands)

    def is_known(self, value: Value) -> bool:
        return value is not UNKNOWN and not isinstance(value, DependentValue)

    def to_array(self, value: Value) -> np.ndarray:
        return np.asarray(value.numpy())  # of the tensor itself it fails for scalars of a dtype that NumPy lacks

    def input_shapes(self, op: Operation) -> list[list[int] | None]:
        return [static_shape(x) for x in op.inputs]

    def output_shapes(self, op: Operation) -> list[list[int] | None]:
        return [static_shape(y) for y in op.outputs]

    def _call(self, op: Operation, attribute: str, operands: Sequence[Value], count: int = -1) -> list[Value]:
        """Run a function of an op, which gives as many values as the op does unless there is a `count`."""
        graph = op.graph._get_function(op.get_attr(attribute).name).graph
        count = len(op.outputs) if count < 0 else count
        if len(graph.inputs) != len(operands) or len(graph.outputs) != count:
            raise _OpaqueError  # the graph was added to for a gradient, after the function was made of it
        return self.run(graph, operands, graph.outputs)

    def _branch(self, op: Operation, operands: list[Value]) -> Sequence[Value]:
        which, *rest = operands
        if isinstance(which, DependentValue):
            raise _OpaqueError
        names = ["then_branch", "else_branch"]
        if self.is_known(which):
            return self._call(op, names[not self.to_array(which).any()], rest)
        results = [_require_shapes(self._call(op, name, rest)) for name in names]
        return [self.union_values(*values) for values in zip(*results, strict=True)]

    def _loop(self, op: Operation, operands: list[Value]) -> Sequence[Value]:
        start = _require_shapes(operands)
        state = self.fixed_point(start, lambda state: _require_shapes(self._call(op, "body", state)))
        (goes_on,) = self._call(op, "cond", state, 1)
        if isinstance(goes_on, DependentValue):
            raise _OpaqueError
        return state

    def _zeros_of_shape(self, value: Value, x: Any) -> Value:
        if self.is_known(value) or x.dtype == tf.variant:
            return value
        if isinstance(value, DependentValue) and not isinstance(value, UnknownShape):
            return tf.zeros(value.ids.shape, x.dtype)
        return tf.zeros(x.shape, x.dtype) if x.shape.is_fully_defined() else UNKNOWN


def _require_shapes(values: Sequence[Value]) -> Sequence[Value]:
    if any(isinstance(value, UnknownShape) for value in values):
        raise _OpaqueError
    return values


def _sort_needed(results: Sequence[Any]) -> Iterator[Operation]:
    """Yield the ops from which these tensors are computed, each after those that it needs."""
    done: set[Any] = set()
    stack = [y.op for y in reversed(results)]
    while stack:
        missing = [x.op for x in stack[-1].inputs if x.op not in done]
        if stack[-1] in done or not missing:
            op = stack.pop()
            if op not in done:
                done.add(op)
                yield op
        else:
            stack += missing


def _evaluate(op: Operation, operands: Sequence[Any]) -> list[Value]:
    """Compute an op of known values; unknown if it may give others another time, or cannot run alone."""
    if op.type == "Const":
        return [tf.constant(tf.make_ndarray(op.get_attr("value")))]
    if op.op_def.is_stateful or any(y.dtype in (tf.variant, tf.resource) for y in op.outputs):
        return [UNKNOWN] * len(op.outputs)
    try:
        return rerun(op, operands)
    except (AttributeError, TypeError, ValueError, tf.errors.OpError):
        return [UNKNOWN] * len(op.outputs)
