"""Kinds of rules by which operations run on parts of tensors; a backend has a table from its operations to these.

They run the calls that a backend recorded (`ProgramCall`) on parts of their operands. JAX has kinds of its own beside
`OpaqueRule`, as it compiles them for boxes whose starts are not known.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from elementgrad._cone.boxes import Box, join, whole
from elementgrad._cone.maps import Relation
from elementgrad._cone.plan import ProgramOp, Regions, Rule

Tensor = Any
RunPart = Callable[[list[Any], Sequence[Box | None], Box], Tensor]
"""Computes a part of a result, from parts of the operands, the boxes of these, and its own box."""
Boxes = Sequence[Box | None]


class ProgramCall(ABC):
    """The call of one operation, as `ProgramOp.details` has it."""

    @abstractmethod
    def run(self, *tensors: Tensor) -> list[Tensor]:
        """Run the operation on other tensors, and return its results."""

    @staticmethod
    @abstractmethod
    def cut(x: Tensor, box: Box, outer: Box) -> Tensor:
        """Return the part of a tensor that is in a box; the tensor holds the elements of an outer box."""


class RuleTable(dict[str, Callable[..., Rule | None]]):
    """A table from names of operations to functions that make their rules, or None for some calls of them."""

    def register(self, *names: str) -> Callable[[Callable[..., Rule | None]], Callable[..., Rule | None]]:
        """Decorate the function that makes the rules of some operations."""

        def add(make: Callable[..., Rule | None]) -> Callable[..., Rule | None]:
            self.update(dict.fromkeys(names, make))
            return make

        return add


class OpaqueRule(Rule):
    """An operation on whole operands, of whose results parts are cut out."""

    def __init__(self, op: ProgramOp):
        self._op = op
        self.relations = op.opaque_relations()

    def needs(self, boxes: Boxes) -> list[Box | None]:
        return [whole(operand.shape) for operand in self._op.operands]

    def cost(self, boxes: Boxes) -> float:
        pairs = zip(self._op.shapes, boxes, strict=True)
        return self.work * sum([prod(shape) for shape, box in pairs if box is not None])

    def run(self, regions: Regions, needs: Boxes, boxes: Boxes) -> list[Any]:
        call = self._op.details
        return [
            None if box is None or result is None else call.cut(y, box, whole(result.shape))
            for y, box, result in zip(call.run(*regions), boxes, self._op.results, strict=True)
        ]


class PartRule(Rule):
    """An operation that runs as it is on parts of its operands; all results depend on them in the same way.

    An operand without a relation says how the operation works, such as an axis: its numbers are known.
    """

    def __init__(self, op: ProgramOp, relations: Sequence[Relation | None], work: float = 1.0):
        self._op = op
        self._row = relations
        self.relations = [[None if result is None else r for r in relations] for result in op.results]
        self.work = work

    def run(self, regions: Regions, needs: Boxes, boxes: Boxes) -> list[Any]:
        operands = zip(self._op.operands, regions, self._row, strict=True)
        tensors = [value.known if relation is None else region for value, region, relation in operands]
        joined: Box | None = None
        for box in boxes:
            joined = join(joined, box)
        assert joined is not None
        computed = joined
        for relation in self._row:
            wider = joined if relation is None else relation.computed(joined)
            if wider is not joined:
                computed = tuple([one.join(other) for one, other in zip(computed, wider, strict=True)])
        call = self._op.details
        results = zip(call.run(*tensors), boxes, strict=True)
        return [None if box is None else call.cut(y, box, computed) for y, box in results]


class CustomRule(Rule):
    """An operation whose first result has a run of its own on parts; other results are only had of the whole."""

    def __init__(self, op: ProgramOp, relations: Sequence[Relation | None], run: RunPart, work: float = 1.0):
        self._whole = OpaqueRule(op)
        self._run = run
        self.relations = [list(relations), *self._whole.relations[1:]]
        self.work = work

    def needs(self, boxes: Boxes) -> list[Box | None]:
        return super().needs(boxes) if _only_first(boxes) else self._whole.needs(boxes)

    def run(self, regions: Regions, needs: Boxes, boxes: Boxes) -> list[Any]:
        if not _only_first(boxes):
            return self._whole.run(regions, needs, boxes)
        assert boxes[0] is not None
        return [self._run(list(regions), needs, boxes[0]), *[None] * (len(boxes) - 1)]


class SplitRule(Rule):
    """An operation with several results, each made of a part of one operand; other operands say how to split it."""

    work = 0.0

    def __init__(
        self, op: ProgramOp, relations: Sequence[Relation], make: Callable[[Tensor], Tensor], operand: int = 0
    ):
        self._op, self._operand, self._make = op, operand, make
        self._own = relations
        numbers = range(len(op.operands))
        self.relations = [[relation if at == operand else None for at in numbers] for relation in relations]

    def run(self, regions: Regions, needs: Boxes, boxes: Boxes) -> list[Any]:
        region, need, cut = regions[self._operand], needs[self._operand], self._op.details.cut
        assert need is not None
        return [
            None if box is None else self._make(cut(region, relation.need(box), need))
            for relation, box in zip(self._own, boxes, strict=True)
        ]


def _only_first(boxes: Boxes) -> bool:
    return boxes[0] is not None and all(box is None for box in boxes[1:])
