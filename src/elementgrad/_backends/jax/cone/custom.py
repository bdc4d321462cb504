"""Functions with `jax.custom_jvp` on regions: their own derivative rule is kept."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from elementgrad._backends.jax.cone.rules import (
    Array,
    PlacedRegion,
    PrimitiveRule,
    Target,
    cut,
    cut_all,
    rule,
)
from elementgrad._backends.jax.cone.trace import build, run_steps
from elementgrad._backends.jax.program import bind
from elementgrad._cone.boxes import Box, Interval, Shape, whole
from elementgrad._cone.maps import Along, AxisMap, Link, Relation, Whole
from elementgrad._cone.plan import ProgramOp, ProgramValue, Rule, plan_need


@rule("custom_jvp_call")
def _custom_jvp(op: ProgramOp, params: dict[str, Any]) -> Rule | None:
    """Keep a function's own derivative rule: value and tangent are both programs, and both run on regions.

    Axes along which both programs treat every position apart are cut. The others are whole.
    """
    equation = op.details
    if len(op.results) != 1 or not all(jnp.issubdtype(value.dtype, jnp.floating) for value in op.operands):
        return None
    types = [jax.ShapeDtypeStruct(value.shape, value.dtype) for value in op.operands]
    count = len(types)

    def both(*both: Array) -> Any:
        function = lambda *xs: bind(equation, xs)[0]  # noqa: E731
        return jax.jvp(function, both[:count], both[count:])

    value = build(params["call_jaxpr"])
    slope = build(jax.make_jaxpr(both)(*types, *types), opens_rules=True)
    (result,) = op.shapes
    apart = [axis for axis, size in enumerate(result) if size > 1 and _is_apart((value, slope), result, axis)]
    if not apart:
        return None

    def matches(inner: ProgramValue) -> tuple[int | None, ...]:
        return found.get(inner, (None,) * len(inner.shape))

    found: dict[ProgramValue, tuple[int | None, ...]] = {}
    for program in (value, slope):
        for axis in apart:
            for output in program.outputs:
                for inner, box in _needed(program, output, result, axis, 0).items():
                    now = list(matches(inner))
                    for number, interval in enumerate(box):
                        if interval == Interval(0, 1) and inner.shape[number] > 1:
                            now[number] = axis
                    found[inner] = tuple(now)
    relations = []
    for number, operand in enumerate(op.operands):
        ways = [matches(value.inputs[number]), matches(slope.inputs[number]), matches(slope.inputs[count + number])]
        links = []
        for axis, size in enumerate(operand.shape):
            used = {
                way[axis]
                for way, inner in zip(
                    ways, (value.inputs[number], slope.inputs[number], slope.inputs[count + number]), strict=True
                )
                if inner in found
            }
            match = used.pop() if len(used) == 1 else None
            axis_map: AxisMap
            if match is None:
                axis_map = Whole((size,), ())
                links.append(Link((axis,), (), axis_map))
            else:
                links.append(Link((axis,), (match,), Along(size, result[match])))
        relations.append(Relation(operand.shape, result, tuple(links)))
    parts = cut_all(relations)

    def run(regions: list[PlacedRegion], target: Target) -> Array:
        def place(inner: ProgramValue) -> Target:
            way = matches(inner)
            return Target(
                tuple([0 if axis is None else target.starts[axis] for axis in way]),
                tuple(
                    [size if axis is None else target.sizes[axis] for axis, size in zip(way, inner.shape, strict=True)]
                ),
            )

        def evaluate_part(program: Any, arrays: Sequence[Array]) -> list[Array]:
            given = {}
            for inner, array, relation in zip(program.inputs, arrays, (relations * 2)[: len(arrays)], strict=True):
                starts = [0] * array.ndim
                for link in relation.links:
                    if link.result:
                        starts[link.operand[0]] = target.starts[link.result[0]]
                given[inner] = PlacedRegion(array, starts)
            held = run_steps(program.ops, given, place, program.outputs)
            return [cut(held[output], target.starts, target.sizes) for output in program.outputs]

        @jax.custom_jvp
        def function(*arrays: Array) -> Array:
            return evaluate_part(value, arrays)[0]

        @function.defjvp
        def _(primals: Any, tangents: Any) -> Any:
            return tuple(evaluate_part(slope, [*primals, *tangents]))

        return function(*parts(regions, target))

    return PrimitiveRule(op, relations, run, float(max(1, len(value.ops))))


def _needed(program: Any, output: ProgramValue, result: Shape, axis: int, at: int) -> dict[ProgramValue, Box]:
    box = list(whole(result))
    box[axis] = Interval(at, at + 1)
    return dict(plan_need(program.ops, output, tuple(box)).needed)


def _is_apart(programs: Sequence[Any], result: Shape, axis: int) -> bool:
    """Return True if every value of some programs is cut along one axis or none, where the result is."""
    for program in programs:
        for output in program.outputs:
            if output.shape != result:
                return False
            last = result[axis] - 1
            first, other = (_needed(program, output, result, axis, at) for at in (0, last))
            if first.keys() != other.keys():
                return False
            for value, box in first.items():
                cuts = 0
                for here, there, size in zip(box, other[value], value.shape, strict=True):
                    if here == there == Interval(0, size):
                        continue
                    if here != Interval(0, 1) or there != Interval(last, last + 1) or size != result[axis]:
                        return False
                    cuts += 1
                if cuts > 1:
                    return False
    return True
