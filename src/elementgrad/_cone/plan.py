"""Programs of operations, and the part of each value that named elements need or reach.

A `Program` is recorded by a backend. `plan_need` walks it backwards once, from a box of one of its values to boxes of
all that this box depends on; `plan_reach` walks it forwards.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from elementgrad._cone.boxes import Box, Interval, Shape, is_empty, join, volume
from elementgrad._cone.maps import Relation, relate_all

Tensor = Any
Regions = Sequence[Tensor | None]
"""The needed part of each operand; None where nothing of it is needed."""


class NoConeError(Exception):
    """A program that cannot be recorded, or not be run in parts; the message says why."""


class UnbuiltError(NoConeError):
    """A layer that gets its variables when it is run for the first time; it can be recorded afterwards."""


@dataclass(eq=False)
class ProgramValue:
    """A tensor of a recorded program: a constant, an input, or the result of an operation."""

    shape: Shape
    constant: Tensor | None = None
    """The tensor itself, for one that the program did not compute."""
    maker: "ProgramOp | None" = None
    dtype: Any = None
    differentiable: bool = False
    """True if gradients flow through it."""
    known: Tensor | None = None
    """The numbers of a value that depends on constants alone, once something has asked for them."""


class Rule(ABC):
    """The parts of its operands that an operation needs, and how it runs on parts.

    `relations` has a row for each result and a column for each operand. None stands for no dependence.
    """

    work = 1.0
    """Multiplications and additions for one element of the results."""
    relations: Sequence[Sequence[Relation | None]]

    def needs(self, boxes: Sequence[Box | None]) -> list[Box | None]:
        """Return the part of each operand that parts of the results depend on; None for a result without need."""
        needed: list[Box | None] = [None] * len(self.relations[0])
        for box, row in zip(boxes, self.relations, strict=True):
            for operand, relation in enumerate(row):
                if box is not None and relation is not None:
                    here, before = relation.need(box), needed[operand]
                    needed[operand] = here if before is None else join(before, here)
        return needed

    def cost(self, boxes: Sequence[Box | None]) -> float:
        """Return the multiplications and additions for parts of the results."""
        return self.work * _size(boxes)

    @abstractmethod
    def run(self, regions: Regions, needs: Sequence[Box | None], boxes: Sequence[Box | None]) -> Sequence[Any]:
        """Return the parts of the results, from the parts of the operands."""


@dataclass(eq=False)
class ProgramOp:
    """One operation of a recorded program."""

    name: str
    operands: Sequence[ProgramValue]
    results: Sequence[ProgramValue | None]
    find_rule: Callable[["ProgramOp"], Rule]
    where: str | None = None
    """File and line of the user's code."""
    details: Any = None
    """The call itself, as the backend keeps it: a `ProgramCall`, or an equation of JAX."""
    _rule: Rule | None = None

    @property
    def rule(self) -> Rule:
        if self._rule is None:
            self._rule = self.find_rule(self)
        return self._rule

    @property
    def shapes(self) -> list[Shape]:
        """The shapes of the results; empty for what is no tensor."""
        return [() if result is None else result.shape for result in self.results]

    def opaque_relations(self) -> list[list[Relation | None]]:
        """Return the relations of an operation of which nothing is known."""
        return [
            [None if result is None else relate_all(operand.shape, result.shape) for operand in self.operands]
            for result in self.results
        ]


@dataclass(eq=False)
class Program:
    """The operations of a function, in order, with the values of its inputs and of what was named in it."""

    ops: Sequence[ProgramOp]
    inputs: Sequence[ProgramValue]
    outputs: Sequence[ProgramValue]
    speed: float = 2e10
    """The multiplications and additions for a value in a second, in which its derivative is computed too."""
    recording_seconds: float = 0.0
    """The time that it took to record it, by an estimate, so that equal programs are equal in all decisions."""


@dataclass(frozen=True)
class ConeStep:
    """An operation of a cone, with the parts of its operands and results."""

    op: ProgramOp
    needs: Sequence[Box | None]
    boxes: Sequence[Box | None]

    @property
    def is_empty(self) -> bool:
        """True if no element of a result is needed, but for its shape: nothing is computed then."""
        return all(box is None or is_empty(box) for box in self.boxes)


@dataclass
class Cone:
    """The part of a program that a box of one value depends on."""

    steps: list[ConeStep]
    needed: Mapping[ProgramValue, Box] = field(default_factory=dict)

    def count_work(self, moved: float = 0.0) -> float:
        """Return the multiplications and additions, roughly, and as many as `moved` for each element of a result."""
        return sum([step.op.rule.cost(step.boxes) + moved * _size(step.boxes) for step in self.steps])


def _size(boxes: Sequence[Box | None]) -> int:
    return sum([volume(box) for box in boxes if box is not None])


def plan_need(ops: Sequence[ProgramOp], of: ProgramValue, box: Box) -> Cone:
    """Walk a program backwards, from a box of a value to all that it depends on.

    A value that several operations need is needed in the smallest box around what each of them needs.
    """
    needed: dict[ProgramValue, Box] = {of: box}
    steps: list[ConeStep] = []
    for op in reversed(ops):
        boxes = [None if result is None else needed.get(result) for result in op.results]
        if boxes.count(None) == len(boxes):
            continue
        step = ConeStep(op, [None] * len(op.operands), boxes)
        if step.is_empty:
            steps.append(step)
            continue
        needs = op.rule.needs(boxes)
        used: list[Box | None] = []
        for value, need in zip(op.operands, needs, strict=True):
            # Nothing is needed of an operand for a part that does not touch it. One that is empty itself is given.
            touches = need is not None and (not is_empty(need) or 0 in value.shape)
            used.append(need if touches else None)
            if touches:
                joined = join(needed[value], need) if value in needed else need
                assert joined is not None
                needed[value] = joined
        steps.append(ConeStep(op, used, boxes))
    return Cone(steps[::-1], needed)


def plan_reach(ops: Sequence[ProgramOp], wrt: ProgramValue, box: Box) -> dict[ProgramValue, Box]:
    """Walk a program forwards, from a box of a value to the boxes of all values that may depend on it."""
    reached: dict[ProgramValue, Box] = {wrt: box}
    for op in ops:
        touched = [reached.get(value) for value in op.operands]
        if all(one is None for one in touched):
            continue
        for result, row in zip(op.results, op.rule.relations, strict=True):
            here: Box | None = None
            for part, relation in zip(touched, row, strict=True):
                if part is not None and relation is not None:
                    here = join(here, relation.reach(part))
            if result is not None and here is not None and not is_empty(here):
                reached[result] = here
    return reached


def empty(shape: Shape) -> Box:
    """Return a box without elements."""
    return tuple([Interval(0, 0)] * len(shape))


def whole_work(ops: Sequence[ProgramOp], of: ProgramValue, moved: float = 0.0) -> float:
    """Return the work of all that a whole value depends on, counted as that of a cone."""
    needed, work = {of}, 0.0
    for op in reversed(ops):
        results = [result for result in op.results if result is not None and result in needed]
        if results:
            work += (op.rule.work + moved) * sum([prod(result.shape) for result in results])
            needed.update(op.operands)
    return work
