"""Jaxprs as programs of regions: their equations with calls opened, and how these run one after the other."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from elementgrad._backends.jax.cone.rules import PlacedRegion, Target, find_rule
from elementgrad._backends.jax.program import FOLLOWED
from elementgrad._cone.plan import NoConeError, Program, ProgramOp, ProgramValue


def build(program: Any, limit: int | None = None, opens_rules: bool = False) -> Program:
    """Return a closed jaxpr as a program, with calls opened.

    With `opens_rules`, functions with a derivative rule of their own are opened too, where only values are computed.
    """
    ops: list[ProgramOp] = []

    def value_of(variable: Any, constant: Any = None) -> ProgramValue:
        aval: Any = variable.aval
        return ProgramValue(tuple(aval.shape), constant, dtype=aval.dtype)

    def walk(jaxpr: Any, consts: Sequence[Any], arguments: Sequence[ProgramValue]) -> list[ProgramValue]:
        values: dict[Any, ProgramValue] = dict(zip(jaxpr.invars, arguments, strict=True))
        for variable, const in zip(jaxpr.constvars, consts, strict=True):
            values[variable] = const if isinstance(const, ProgramValue) else value_of(variable, const)

        def read(atom: Any) -> ProgramValue:
            if isinstance(atom, Literal):
                value = value_of(atom)
                value.known = np.asarray(atom.val, value.dtype)
                return value
            return values[atom]

        for equation in jaxpr.eqns:
            operands = [read(atom) for atom in equation.invars]
            name = equation.primitive.name
            key = FOLLOWED.get(name) or ("call_jaxpr" if opens_rules and name == "custom_jvp_call" else None)
            if key is not None:
                inner = equation.params[key]
                results = walk(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), operands)
                values.update(zip(equation.outvars, results, strict=True))
                continue
            made = [value_of(variable) for variable in equation.outvars]
            op = ProgramOp(name, operands, made, find_rule, None, equation)
            for result in made:
                result.maker = op
            values.update(zip(equation.outvars, made, strict=True))
            ops.append(op)
            if limit is not None and len(ops) > limit:
                raise NoConeError(f"the function has more than {limit} operations for its size")
        return [read(atom) for atom in jaxpr.outvars]

    inputs = [value_of(variable) for variable in program.jaxpr.invars]
    outputs = walk(program.jaxpr, program.consts, inputs)
    return Program(ops, inputs, outputs)


def run_steps(
    ops: Sequence[ProgramOp],
    given: Mapping[ProgramValue, PlacedRegion],
    place: Callable[[ProgramValue], Target],
    outputs: Sequence[ProgramValue],
) -> dict[ProgramValue, PlacedRegion]:
    """Compute regions of values, in the places that are asked for."""
    needed = set(outputs)
    steps = []
    for op in reversed(ops):
        if any(result in needed for result in op.results):
            steps.append(op)
            needed.update(op.operands)
    held = dict(given)
    for op in reversed(steps):
        regions = []
        for value in op.operands:
            if value not in held:
                array = value.constant if value.known is None else value.known
                held[value] = PlacedRegion(jnp.asarray(array), (0,) * len(value.shape))
            regions.append(held[value])
        made: Any = op.results
        targets = [place(result) if result in needed else None for result in made]
        if all(target is None or 0 in target.sizes for target in targets):
            results: Any = [
                None if target is None else jnp.zeros(target.sizes, result.dtype)
                for target, result in zip(targets, made, strict=True)
            ]
        else:
            run: Any = op.rule.run
            results = run(regions, (), targets)
        for value, target, result in zip(made, targets, results, strict=True):
            if target is not None:
                if tuple(result.shape) != tuple(target.sizes):
                    raise AssertionError(f"{op.name} gave shape {result.shape} for {target.sizes}")
                held[value] = PlacedRegion(result, target.starts)
    for value in outputs:
        if value not in held:
            array = value.constant if value.known is None else value.known
            held[value] = PlacedRegion(jnp.asarray(array), (0,) * len(value.shape))
    return held
