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
from elementgrad._cone.boxes import Shape
from elementgrad._cone.maps import Along, AxisMap, Fixed, Link, Relation, Whole, keeps_positions
from elementgrad._cone.plan import Program, ProgramOp, ProgramValue, Rule

Axes = tuple[int | None, ...]


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

    traced = jax.make_jaxpr(both)(*types, *types)
    value = build(params["call_jaxpr"].jaxpr, params["call_jaxpr"].consts)
    slope = build(traced.jaxpr, traced.consts, opens_rules=True)
    (result,) = op.shapes
    if any(output.shape != result for program in (value, slope) for output in program.outputs):
        return None
    found = match_axes((value, slope), result)
    if not any(axis is not None for output in value.outputs for axis in found[output]):
        return None

    def matches(inner: ProgramValue) -> Axes:
        return found.get(inner, (None,) * len(inner.shape))

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


def match_axes(programs: Sequence[Program], result: Shape) -> dict[ProgramValue, Axes]:
    """Return the axis of the result for each axis of each value, where every operation treats its positions apart.

    An axis of the result along which some operation does anything else is matched by no axis of any value.
    """
    apart = {axis for axis, size in enumerate(result) if size > 1}
    while True:
        found: dict[ProgramValue, Axes] = {}
        mixed: set[int | None] = set()

        def note(value: ProgramValue, axes: Sequence[int | None], found: Any = found, mixed: Any = mixed) -> None:
            before = found.setdefault(value, tuple(axes))
            for one, other in zip(before, axes, strict=True):
                mixed.update({one, other} if one != other else ())
            mixed.update([axis for axis in axes if axes.count(axis) > 1])

        for program in programs:
            for output in program.outputs:
                note(output, [axis if axis in apart else None for axis in range(len(result))])
            for op in reversed(program.ops):
                for made, row in zip(op.results, op.rule.relations, strict=True):
                    if made is None or made not in found:
                        continue
                    for operand, relation in zip(op.operands, row, strict=True):
                        axes: list[int | None] = [None] * len(operand.shape)
                        for link in () if relation is None else relation.links:
                            if keeps_positions(link.map):
                                axes[link.operand[0]] = found[made][link.result[0]]
                            elif not isinstance(link.map, Fixed):
                                mixed.update([found[made][axis] for axis in link.result])
                        note(operand, axes)
        if not mixed & apart:
            return found
        apart -= mixed
