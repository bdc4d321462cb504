"""Rules by which PyTorch's operations run on parts of tensors: a table from operations to rules.

Most operations run as they are on the parts that they need (`PartRule`). Those whose arguments speak of sizes or
positions get arguments that fit the part (`CustomRule`). An operation that is not in the table runs on whole operands,
and the part is cut out of its results. The files beside this one fill the table, by families of operations.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from elementgrad._backends.torch import _compat
from elementgrad._cleanup import defer, scope
from elementgrad._cone.boxes import Box, slices
from elementgrad._cone.plan import ProgramOp, ProgramValue, Regions, Rule
from elementgrad._cone.rules import OpaqueRule, RuleTable

Tensor = torch.Tensor
Arguments = dict[str, Any]
RULES = RuleTable()
rule = RULES.register


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
        known = [known_value(value) for value in values]
        tensors = [
            torch.empty(value.shape, dtype=value.dtype) if numbers is None else numbers.clone()
            for value, numbers in zip(values, known, strict=True)
        ]
        return [y for y in call.run(*tensors) if isinstance(y, Tensor)]


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
    found = None if make is None else make(op, call.arguments)
    if make is None and _compat.is_pointwise(call.func):
        found = RULES["clone"](op, call.arguments)
    return found or OpaqueRule(op)


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
            results = maker.details.run(*operands)
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
