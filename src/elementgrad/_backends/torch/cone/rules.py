"""How PyTorch's operations run on parts of tensors: kinds of rules, and a table from operations to rules.

Most operations run as they are on the parts that they need (`PartRule`). Those whose arguments speak of sizes or
positions get arguments that fit the part (`CustomRule`). An operation that is not in the table runs on whole operands,
and the part is cut out of its results. The files beside this one fill the table, by families of operations.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from elementgrad._backends.torch import _compat
from elementgrad._cleanup import defer, scope
from elementgrad._cone.boxes import Box, join, slices, whole
from elementgrad._cone.maps import (
    Relation,
)
from elementgrad._cone.plan import ProgramOp, ProgramValue, Regions, Rule

Tensor = torch.Tensor
Run = Callable[[list[Any], Sequence[Box | None], Box], Tensor]


class OpaqueRule(Rule):
    """An operation on whole operands, of whose results parts are cut out."""

    def __init__(self, op: ProgramOp):
        self._op = op
        self.relations = op.opaque_relations()

    def needs(self, boxes: Sequence[Box | None]) -> list[Box | None]:
        return [whole(operand.shape) for operand in self._op.operands]

    def run(self, regions: Regions, needs: Sequence[Box | None], boxes: Sequence[Box | None]) -> list[Any]:
        results = tensors_of(self._op.details.run(*regions), len(boxes))
        return [
            None if box is None or result is None else y[slices(box)]
            for y, box, result in zip(results, boxes, self._op.results, strict=True)
        ]


class PartRule(Rule):
    """An operation that runs as it is on parts of its operands; all results depend on them in the same way."""

    def __init__(self, op: ProgramOp, relations: Sequence[Relation | None], work: float = 1.0):
        self._op = op
        self._row = relations
        self.relations = [[None if result is None else r for r in relations] for result in op.results]
        self.work = work

    def run(self, regions: Regions, needs: Sequence[Box | None], boxes: Sequence[Box | None]) -> list[Any]:
        results = tensors_of(self._op.details.run(*regions), len(boxes))
        joined: Box | None = None
        for box in boxes:
            joined = join(joined, box)
        assert joined is not None
        computed = joined
        for relation in self._row:
            wider = joined if relation is None else relation.computed(joined)
            computed = computed if wider is joined else _around(computed, wider)
        return [
            None if box is None else y if box == computed else y[slices(box, computed)]
            for y, box in zip(results, boxes, strict=True)
        ]


class CustomRule(Rule):
    """An operation whose first result has a run of its own on parts; other results are only had of the whole."""

    def __init__(self, op: ProgramOp, relations: Sequence[Relation | None], run: Run, work: float = 1.0):
        self._whole = OpaqueRule(op)
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


class SplitRule(Rule):
    """An operation with several results, each a part of its only operand."""

    def __init__(self, op: ProgramOp, relations: Sequence[Relation], run: Run):
        self.relations = [[relation] for relation in relations]
        self._run = run

    def run(self, regions: Regions, needs: Sequence[Box | None], boxes: Sequence[Box | None]) -> list[Any]:
        (region,), (need,) = regions, needs
        assert need is not None
        results: list[Any] = []
        for (relation,), box in zip(self.relations, boxes, strict=True):
            if box is None or relation is None:
                results.append(None)
            else:
                own = relation.need(box)
                assert region is not None
                results.append(self._run([region[slices(own, need)]], [own], box))
        return results


class DrawnRule(Rule):
    """Random numbers: drawn in full from the state that the program had, of which parts are cut out."""

    def __init__(self, op: ProgramOp):
        self._op = op
        self.relations = [[None] * len(op.operands) for _ in op.results]

    def run(self, regions: Regions, needs: Sequence[Box | None], boxes: Sequence[Box | None]) -> list[Any]:
        with scope():
            defer(torch.set_rng_state, torch.get_rng_state())
            torch.set_rng_state(self._op.details.random_state)
            results = draw(self._op.details)
        return [
            None if box is None or result is None else y[slices(box)]
            for y, box, result in zip(results, boxes, self._op.results, strict=True)
        ]


def draw(call: Any) -> list[Tensor]:
    """Run an operation that draws random numbers, on tensors whose values do not matter."""
    values = [call.leaves[slot] for slot in call.slots]
    with torch.no_grad():
        tensors = [
            torch.empty(value.shape, dtype=value.dtype) if value.constant is None else value.constant.clone()
            for value in values
        ]
        return [y for y in _compat.tree_leaves(call.run(*tensors)) if isinstance(y, Tensor)]


def _only_first(boxes: Sequence[Box | None]) -> bool:
    return boxes[0] is not None and all(box is None for box in boxes[1:])


def _around(left: Box, right: Box) -> Box:
    return tuple([one.join(other) for one, other in zip(left, right, strict=True)])


def tensors_of(made: Any, count: int) -> list[Any]:
    results = [made] if isinstance(made, Tensor) else _compat.tree_leaves(made)
    return [*results, *[None] * (count - len(results))]


def is_random(func: Any) -> bool:
    """Return True if an operation draws random numbers."""
    if func is None or not _compat.is_seeded(func):
        return False
    return "dot_product" not in _compat.operation_name(func)


def find_rule(op: ProgramOp) -> Rule:
    """Return the rule of an operation."""
    call = op.details
    if call.func is None:
        return OpaqueRule(op)
    if call.random_state is not None:
        return DrawnRule(op)
    name = _compat.operation_name(call.func).rstrip("_")
    make = RULES.get(name) or RULES.get(name.removesuffix("_copy"))
    rule = None if make is None else make(op, call.arguments)
    if rule is None and make is None and _compat.is_pointwise(call.func):
        rule = RULES["clone"](op, call.arguments)
    return rule or OpaqueRule(op)


Arguments = dict[str, Any]
MakeRule = Callable[[ProgramOp, Arguments], Rule | None]
RULES: dict[str, MakeRule] = {}


def rule(*names: str) -> Callable[[MakeRule], MakeRule]:
    """Register the rule of some operations."""

    def register(make: MakeRule) -> MakeRule:
        RULES.update(dict.fromkeys(names, make))
        return make

    return register


def result_shape(op: ProgramOp) -> tuple[int, ...]:
    return op.shapes[0]


def axes_of(dims: Any, rank: int) -> list[int]:
    """Return axes as a list of non-negative numbers; all axes for None and for an empty list."""
    if dims is None or (isinstance(dims, (list, tuple)) and not dims):
        return list(range(rank))
    return [dim % rank for dim in ([dims] if isinstance(dims, int) else dims)] if rank else []


def known_value(value: Any) -> Tensor | None:
    """Return the numbers of a value that depends on constants alone, such as indices and masks; None for others."""
    if not isinstance(value, ProgramValue):
        return None
    if value.constant is not None:
        return value.constant
    maker = value.maker
    if maker is None or maker.details.func is None or is_random(maker.details.func):
        return None
    if value.known is None:
        operands = [known_value(operand) for operand in maker.operands]
        if any(operand is None for operand in operands):
            return None
        with torch.no_grad():
            results = tensors_of(maker.details.run(*operands), len(maker.results))
        for result, y in zip(maker.results, results, strict=True):
            if result is not None:
                result.known = y
    return value.known


def _by_table(func: Any) -> Callable[..., Any]:
    return _compat.decomposition_table()[func]


def _stack(func: Any) -> Callable[..., Any]:
    return lambda tensors, dim=0: torch.cat([x.unsqueeze(dim if dim >= 0 else dim + x.dim() + 1) for x in tensors], dim)


def _shuffle(func: Any) -> Callable[..., Any]:
    def run(x: Tensor, factor: int) -> Tensor:
        *lead, c, h, w = x.shape
        parts = x.reshape(*lead, c // factor**2, factor, factor, h, w)
        n = len(lead)
        order = [*range(n), n, n + 3, n + 1, n + 4, n + 2]
        return parts.permute(order).reshape(*lead, c // factor**2, h * factor, w * factor)

    return run


def _unshuffle(func: Any) -> Callable[..., Any]:
    def run(x: Tensor, factor: int) -> Tensor:
        *lead, c, h, w = x.shape
        parts = x.reshape(*lead, c, h // factor, factor, w // factor, factor)
        n = len(lead)
        order = [*range(n), n, n + 2, n + 4, n + 1, n + 3]
        return parts.permute(order).reshape(*lead, c * factor**2, h // factor, w // factor)

    return run


DECOMPOSED: dict[str, Callable[[Any], Callable[..., Any]]] = {
    "stack": _stack,
    "pixel_shuffle": _shuffle,
    "pixel_unshuffle": _unshuffle,
    "glu": _by_table,
    "rot90": _by_table,
    "channel_shuffle": _by_table,
}
"""Operations that are recorded as the simpler ones they consist of."""
