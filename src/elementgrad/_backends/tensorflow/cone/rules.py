"""Rules by which TensorFlow's operations run on parts of tensors: a table from operations to rules.

An operation that is not in the table runs on whole operands, and the part is cut out of its results. Operands that say
how an operation works, such as a shape or an axis, have no relation: their numbers are looked up with `known`.
"""

from typing import Any

import numpy as np
import tensorflow as tf

from elementgrad._backends.tensorflow.graph_ops import rerun
from elementgrad._cone.boxes import Box, sizes
from elementgrad._cone.plan import ProgramOp, ProgramValue, Rule
from elementgrad._cone.rules import OpaqueRule, ProgramCall, RuleTable

Tensor = Any
RULES = RuleTable()
rule = RULES.register


class TensorflowCall(ProgramCall):
    """A call of TensorFlow."""

    @staticmethod
    def cut(x: Tensor, box: Box, outer: Box) -> Tensor:
        return cut(x, box, outer)


class GraphCall(TensorflowCall):
    """An operation of a graph, which can run again on other tensors."""

    def __init__(self, op: Any):
        self.op = op

    def run(self, *tensors: Tensor) -> list[Tensor]:
        return rerun(self.op, tensors)

    def attribute(self, name: str) -> Any:
        value = self.op.get_attr(name)
        return value.decode() if isinstance(value, bytes) else value


def find_rule(op: ProgramOp) -> Rule:
    """Return the rule of an operation."""
    make = RULES.get(op.name)
    found = None if make is None else make(op)
    return found or OpaqueRule(op)


def cut(x: Tensor, box: Box, outer: Box) -> Tensor:
    """Return the part of a tensor that is in a box; the tensor holds the elements of an outer box."""
    if box == outer:
        return x
    return tf.slice(x, [one.start - around.start for one, around in zip(box, outer, strict=True)], list(sizes(box)))


def known(value: ProgramValue) -> np.ndarray | None:
    """Return the numbers of a value that depends on constants alone, such as a shape or indices; None for others."""
    found = known_tensor(value)
    return None if found is None else found.numpy()


def known_tensor(value: ProgramValue) -> Tensor | None:
    if value.known is None and value.maker is not None:
        maker = value.maker
        if isinstance(maker.details, GraphCall):
            operands = [known_tensor(operand) for operand in maker.operands]
            if all(operand is not None for operand in operands):
                for result, made in zip(maker.results, maker.details.run(*operands), strict=True):
                    if result is not None:
                        result.known = made
    return value.known
