"""Connect the values of a recorded run by the framework's derivative, and say why it ends at an operation.

A backend says which results of an operation have a derivative by some of its operands (`Op.connected_results`), and has
a table of those of its operations that let none through. The order in which causes count is the same everywhere.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from copy import copy
from typing import Any

from elementgrad._explain.kinds import ELEMENTWISE, MATRIX_PRODUCT, MOVE, PRODUCT, SUM
from elementgrad._explain.trace import AnyOp, Hint, Numbers, Op, OpGraph

Tensor = Any
Cut = tuple[str | None, str]
"""A cause for which a derivative ends, and an observation."""
Cuts = Mapping[str, Cut]
"""For each type of operation that lets no derivative through, the cause."""
PASSING = (SUM, PRODUCT, MATRIX_PRODUCT, MOVE, ELEMENTWISE)
"""Kinds of operations that have a derivative by each of their operands."""
EXITS = ("left-framework", "no-rule")
"""Causes of operations that hand numbers to other code."""


def connect(
    ops: Sequence[AnyOp],
    sources: Collection[int],
    target: int,
    numbers: Numbers,
    cuts: Cuts,
    gap: Callable[[int, AnyOp], Cut | None] = lambda index, op: None,
    hints: Sequence[Hint] = (),
    is_random: bool = False,
) -> OpGraph[AnyOp]:
    """Return the graph of some operations, with the cause at each that the derivative does not pass.

    Args:
        ops: The operations in their order, which stay as they are.
        sources: The id of the source, and then those of other values of the same variable.
        target: The id of the target.
        numbers: Tells which tensors have derivatives.
        cuts: The backend's table.
        gap: Returns why the framework did not record the operation at an index, or None if it did.
        hints: More that is known.
        is_random: True if the run drew random numbers.
    """
    connected, ops = set(sources), [copy(op) for op in ops]
    for index, op in enumerate(ops):
        active = [n for n, value in enumerate(op.inputs) if value in connected]
        if not active or op.cut_cause is not None:
            continue
        missing = gap(index, op)
        reached: AbstractSet[int] = frozenset()
        if missing is None and _passes(op, active, numbers, cuts):
            reached = {0}
        elif missing is None:
            try:
                reached = op.connected_results(active)
            except Exception as error:  # there is no rule
                op.error = error
        connected.update([op.outputs[n] for n in reached])
        if not reached:
            op.cut_cause, note = cause_of_cut(op, op.results, numbers, cuts, missing)
        elif not op.misses and not op.loops:  # some results may have none, such as the indices beside the largest
            op.cut_cause, note = discrete_results(op.results, numbers) or (None, "")
        else:
            continue
        op.note = op.note or note
    custom = [op for op in ops if op.custom_gradient and not connected.isdisjoint(op.outputs)]
    missed = [op for op in ops if op.misses and op.cut_cause is None]
    hints = [*hints, *[Hint("custom-rule", "", op) for op in custom]]
    hints += [Hint("out-of-range", op.misses, op) for op in missed]
    return OpGraph(ops, next(iter(sources)), target, frozenset(connected), hints, is_random)


def _passes(op: Op, active: Sequence[int], numbers: Numbers, cuts: Cuts) -> bool:
    """Return True if the kind of an operation says that it has a derivative by its operands: then no rule is asked."""
    if op.kind not in PASSING or len(op.results) != 1 or op.compares or op.custom_gradient:
        return False
    floats = [op.results[0], *[op.operands[n] for n in active if n < len(op.operands)]]
    return len(floats) > 1 and all(map(numbers.is_differentiable, floats)) and cuts.keys().isdisjoint(op.inner)


def cause_of_cut(op: Op, lost: Sequence[Tensor], numbers: Numbers, cuts: Cuts, gap: Cut | None = None) -> Cut:
    """Return why results of an operation have no derivative, although one of its operands has."""
    own = cuts.get(op.op_type)
    exits = [cuts[name] for name in (op.op_type, *op.inner) if name in cuts and cuts[name][0] in EXITS]
    if own is not None and own[0] == "detached":
        return own
    if exits:
        return exits[0]
    if not op.results and not lost:
        return "assigned-state", "it keeps numbers and not where they came from"
    if not any(map(numbers.is_differentiable, lost)):
        return discrete_results(lost, numbers) or ("discrete", "")
    if gap is not None:
        return gap
    if op.custom_gradient:
        return "custom-rule", "its rule gives no derivative by what comes in"
    if own is not None:
        return own
    if op.error is not None:
        return "no-rule", (str(op.error).strip("'\" ").splitlines() or [""])[0]
    inside = cause_inside(op, cuts) or ("discrete" if op.compares else None)
    return inside, "it happens inside" if inside and len(op.inner) > 1 else ""


def cause_inside(op: Op, cuts: Cuts) -> str | None:
    """Return why an operation that is made of others lets no derivative through, if only one thing in it could."""
    causes = {cuts[name][0] for name in op.inner if name in cuts}
    return causes.pop() if len(causes) == 1 else None


def discrete_results(results: Sequence[Tensor], numbers: Numbers) -> Cut | None:
    """Return the cause for results that are integers or booleans, if some are."""
    names = [numbers.dtype(x) for x in results if not numbers.is_differentiable(x)]
    cause = "left-framework" if "string" in names else "discrete"
    return (cause, f"{names[0]} comes out") if names else None
