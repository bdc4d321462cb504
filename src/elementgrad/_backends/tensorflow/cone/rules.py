"""How TensorFlow's operations run on parts of tensors: kinds of rules, and a table from operations to rules.

An operation that is not in the table runs on whole operands, and the part is cut out of its results. Operands that say
how an operation works, such as a shape or an axis, have no relation: their numbers are looked up with `known`.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np
import tensorflow as tf

from elementgrad._backends.tensorflow.graph_ops import rerun
from elementgrad._cone.boxes import Box, join, sizes, whole
from elementgrad._cone.maps import Relation
from elementgrad._cone.plan import ProgramOp, ProgramValue, Regions, Rule

Tensor = Any
Run = Callable[[list[Any], Sequence[Box | None], Box], Tensor]
MakeRule = Callable[[ProgramOp], Rule | None]
RULES: dict[str, MakeRule] = {}


class GraphCall:
    """An operation of a graph, which can run again on other tensors."""

    def __init__(self, op: Any):
        self.op = op

    def run(self, *tensors: Tensor) -> list[Tensor]:
        return rerun(self.op, tensors)

    def attribute(self, name: str) -> Any:
        value = self.op.get_attr(name)
        return value.decode() if isinstance(value, bytes) else value


def rule(*names: str) -> Callable[[MakeRule], MakeRule]:
    """Register the rule of some types of operations."""

    def register(make: MakeRule) -> MakeRule:
        RULES.update(dict.fromkeys(names, make))
        return make

    return register


def find_rule(op: ProgramOp) -> Rule:
    """Return the rule of an operation."""
    make = RULES.get(op.name)
    found = None if make is None else make(op)
    return found or WholeRun(op)


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


class WholeRun(Rule):
    """An operation on whole operands, of whose results parts are cut out."""

    def __init__(self, op: ProgramOp):
        self._op = op
        self.relations = op.opaque_relations()

    def needs(self, boxes: Sequence[Box | None]) -> list[Box | None]:
        return [whole(operand.shape) for operand in self._op.operands]

    def cost(self, boxes: Sequence[Box | None]) -> float:
        return self.work * sum(
            [prod(shape) for shape, box in zip(self._op.shapes, boxes, strict=True) if box is not None]
        )

    def run(self, regions: Regions, needs: Sequence[Box | None], boxes: Sequence[Box | None]) -> list[Any]:
        made = self._op.details.run(*regions)
        return [
            None if box is None or result is None else cut(y, box, whole(result.shape))
            for y, box, result in zip(made, boxes, self._op.results, strict=True)
        ]


class PartRun(Rule):
    """An operation that runs as it is on parts of its operands; all results depend on them in the same way."""

    def __init__(self, op: ProgramOp, relations: Sequence[Relation | None], work: float = 1.0):
        self._op = op
        self._row = relations
        self.relations = [[None if result is None else r for r in relations] for result in op.results]
        self.work = work
        self._given = {
            at: known_tensor(value)
            for at, (value, relation) in enumerate(zip(op.operands, relations, strict=True))
            if relation is None
        }

    def run(self, regions: Regions, needs: Sequence[Box | None], boxes: Sequence[Box | None]) -> list[Any]:
        made = self._op.details.run(*[self._given.get(at, region) for at, region in enumerate(regions)])
        joined: Box | None = None
        for box in boxes:
            joined = join(joined, box)
        assert joined is not None
        computed = joined
        for relation in self._row:
            if relation is not None:
                wider = relation.computed(joined)
                computed = tuple([one.join(other) for one, other in zip(computed, wider, strict=True)])
        return [None if box is None else cut(y, box, computed) for y, box in zip(made, boxes, strict=True)]


class OwnRun(Rule):
    """An operation whose first result has a run of its own on parts; other results are only had of the whole."""

    def __init__(self, op: ProgramOp, relations: Sequence[Relation | None], run: Run, work: float = 1.0):
        self._whole = WholeRun(op)
        self._run = run
        self.relations = [list(relations), *self._whole.relations[1:]]
        self.work = work

    def needs(self, boxes: Sequence[Box | None]) -> list[Box | None]:
        return super().needs(boxes) if _only_first(boxes) else self._whole.needs(boxes)

    def run(self, regions: Regions, needs: Sequence[Box | None], boxes: Sequence[Box | None]) -> list[Any]:
        if not _only_first(boxes):
            return self._whole.run(regions, needs, boxes)
        assert boxes[0] is not None
        return [self._run(list(regions), needs, boxes[0]), *[None] * (len(boxes) - 1)]


class SplitRun(Rule):
    """An operation with several results, each a part of one operand; the others say how to split it."""

    def __init__(self, op: ProgramOp, operand: int, relations: Sequence[Relation], axis: int | None):
        self._operand, self._axis = operand, axis
        self._own = relations
        self.relations = [
            [relation if at == operand else None for at in range(len(op.operands))] for relation in relations
        ]
        self.work = 0.0

    def run(self, regions: Regions, needs: Sequence[Box | None], boxes: Sequence[Box | None]) -> list[Any]:
        region, need = regions[self._operand], needs[self._operand]
        assert need is not None
        results: list[Any] = []
        for relation, box in zip(self._own, boxes, strict=True):
            part = None if box is None else cut(region, relation.need(box), need)
            results.append(part if part is None or self._axis is None else tf.squeeze(part, self._axis))
        return results


def _only_first(boxes: Sequence[Box | None]) -> bool:
    return boxes[0] is not None and all(box is None for box in boxes[1:])
