"""A graph of TensorFlow followed operation by operation, with the sets of seed elements that values may depend on."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from inspect import signature
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import op_def_registry

from elementgrad.sparsity.reach import Ids, Reach
from elementgrad.sparsity.value import UNKNOWN, Reached, Value, joined, reached, settled

Operation = Any
Rule = Callable[["Follower", Operation, list[Value]], Sequence[Value]]
CALLS = {"PartitionedCall", "StatefulPartitionedCall"}
BRANCHES = {"If", "StatelessIf"}
LOOPS = {"While", "StatelessWhile"}
OF_SHAPE = {"Shape", "ShapeN", "Size", "Rank", "ZerosLike", "OnesLike"}
"""Operations whose results are those of any values of the same shape."""


@dataclass(frozen=True, eq=False)
class Anything(Reached):
    """A value of a shape that is not known before it runs; its one set is that of all of its elements."""


def known(value: Value) -> bool:
    """Whether a value is the same at every point, and there to be looked at."""
    return value is not UNKNOWN and not isinstance(value, Reached)


def array_of(value: Any) -> np.ndarray:
    """Return a known value as an array. `np.asarray` fails where a single number is of a dtype that NumPy lacks."""
    return np.asarray(value.numpy())


class Follower:
    """Follows graphs, with one table of sets for all of their values."""

    def __init__(self, reach: Reach, rules: Mapping[str, Rule]):
        self.reach = reach
        self.rules = rules

    def run(
        self, graph: Any, operands: Sequence[Value], results: Sequence[Any], hidden: Sequence[Any] = ()
    ) -> list[Value]:
        """What a graph gives for some of its tensors, with these for its inputs; what is not needed is left out.

        What is hidden counts as unknown, even if it could be computed.
        """
        values: dict[Any, Value] = {x.ref(): value for x, value in zip(graph.inputs, operands, strict=True)}
        values.update({x.ref(): UNKNOWN for x in hidden})
        for operation in _needed(results):
            if operation.outputs and operation.outputs[0].ref() not in values:
                given = [values[x.ref()] for x in operation.inputs]
                values.update(zip([y.ref() for y in operation.outputs], self.step(operation, given), strict=True))
        return [values[y.ref()] for y in results]

    def step(self, operation: Operation, operands: list[Value]) -> Sequence[Value]:
        """The results of one operation."""
        kind = operation.type
        if kind in OF_SHAPE:
            operands = [_of_shape(value, x) for value, x in zip(operands, operation.inputs, strict=True)]
        inside = {**dict.fromkeys(BRANCHES, self._branch), **dict.fromkeys(LOOPS, self._loop)}.get(kind)
        if kind in CALLS or (inside and reached(operands)):
            try:
                return inside(operation, operands) if inside else self._call(operation, "f", operands)
            except _OpaqueError:
                pass
        elif all(map(known, operands)):
            return _evaluated(operation, operands)
        if not reached(operands):
            return [UNKNOWN] * len(operation.outputs)
        if any(isinstance(value, Anything) for value in operands):
            return self.everything(operation, operands)
        return self.rules.get(kind, Follower.everything)(self, operation, operands)

    def everything(self, operation: Operation, operands: list[Value]) -> list[Value]:
        """The rule for what is not known: each result depends on all that any operand does."""
        all_of = self.reach.all_of(*reached(operands))
        return [
            Reached(np.full(y.shape.as_list(), all_of)) if y.shape.is_fully_defined() else Anything(np.array(all_of))
            for y in operation.outputs
        ]

    def ids(self, value: Value, x: Any) -> Ids:
        """The sets of a value; of one that does not depend on the seed they are empty."""
        return value.ids if isinstance(value, Reached) else np.zeros(x.shape.as_list(), dtype=np.int64)

    def _call(self, operation: Operation, attribute: str, operands: Sequence[Value], count: int = -1) -> list[Value]:
        """What a function of an operation's gives: as many values as the operation does, unless told."""
        graph = operation.graph._get_function(operation.get_attr(attribute).name).graph
        count = len(operation.outputs) if count < 0 else count
        if len(graph.inputs) != len(operands) or len(graph.outputs) != count:
            raise _OpaqueError  # the graph was added to for a gradient, after the function was made of it
        return self.run(graph, operands, graph.outputs)

    def _branch(self, operation: Operation, operands: list[Value]) -> Sequence[Value]:
        which, *rest = operands
        if isinstance(which, Reached):
            raise _OpaqueError
        names = ["then_branch", "else_branch"]
        if known(which):
            return self._call(operation, names[not array_of(which).any()], rest)
        results = [_shaped(self._call(operation, name, rest)) for name in names]
        return [joined(self.reach, *values) for values in zip(*results, strict=True)]

    def _loop(self, operation: Operation, operands: list[Value]) -> Sequence[Value]:
        start = _shaped(operands)
        state = settled(self.reach, start, lambda state: _shaped(self._call(operation, "body", state)))
        (more,) = self._call(operation, "cond", state, 1)
        if isinstance(more, Reached):
            raise _OpaqueError
        return state


class _OpaqueError(Exception):
    """Nobody can look into an operation, or what it carries has no shape that is known before it runs."""


def _shaped(values: Sequence[Value]) -> Sequence[Value]:
    if any(isinstance(value, Anything) for value in values):
        raise _OpaqueError
    return values


def rerun(operation: Operation, operands: Sequence[Any]) -> list[Any]:
    """The same operation, now, on other tensors; its types are those of the tensors."""
    function, inputs, attributes = _raw(operation.type)
    left = iter(operands)
    given: dict[str, Any] = {}
    for name, argument in zip(inputs, operation.op_def.input_arg, strict=True):
        several = operation.get_attr(argument.number_attr) if argument.number_attr else None
        if argument.type_list_attr:
            several = len(operation.get_attr(argument.type_list_attr))
        given[name] = next(left) if several is None else [next(left) for _ in range(several)]
    results = function(**given, **{name: operation.get_attr(own) for name, own in attributes.items()})
    return list(results) if isinstance(results, (list, tuple)) else [results]


@lru_cache
def _raw(kind: str) -> tuple[Callable[..., Any], list[str], dict[str, str]]:
    """The function of an operation, what it calls the inputs, and for each attribute that it takes the name of it.

    In some functions an argument goes by another name than in the operation, but in the same order.
    """
    function = getattr(tf.raw_ops, kind)
    definition = op_def_registry.get(kind)
    taken = [name for name in signature(function).parameters if name != "name"]
    inputs = [argument.name for argument in definition.input_arg]
    implied = {a for x in definition.input_arg for a in (x.type_attr, x.number_attr, x.type_list_attr)}
    attributes = [attribute.name for attribute in definition.attr if attribute.name not in implied]
    own = [*inputs, *attributes]
    renamed = dict(zip([n for n in own if n not in taken], [n for n in taken if n not in own], strict=True))
    names = {name: renamed.get(name, name) for name in own}
    return function, [names[name] for name in inputs], {names[name]: name for name in attributes}


def _evaluated(operation: Operation, operands: Sequence[Any]) -> list[Value]:
    """The results of an operation of known values; unknown if it may give others another time, or cannot run alone."""
    if operation.type == "Const":
        return [tf.constant(tf.make_ndarray(operation.get_attr("value")))]
    if operation.op_def.is_stateful or any(y.dtype in (tf.variant, tf.resource) for y in operation.outputs):
        return [UNKNOWN] * len(operation.outputs)
    try:
        return rerun(operation, operands)
    except (AttributeError, TypeError, ValueError, tf.errors.OpError):
        return [UNKNOWN] * len(operation.outputs)


def _of_shape(value: Value, x: Any) -> Value:
    if known(value) or x.dtype == tf.variant:
        return value
    if isinstance(value, Reached) and not isinstance(value, Anything):
        return tf.zeros(value.ids.shape, x.dtype)
    return tf.zeros(x.shape, x.dtype) if x.shape.is_fully_defined() else UNKNOWN


def _needed(results: Sequence[Any]) -> Iterator[Operation]:
    """The operations from which these tensors are computed, each after those that it needs."""
    done: set[Any] = set()
    left = [y.op for y in reversed(results)]
    while left:
        before = [x.op for x in left[-1].inputs if x.op not in done]
        if left[-1] in done or not before:
            operation = left.pop()
            if operation not in done:
                done.add(operation)
                yield operation
        else:
            left += before
