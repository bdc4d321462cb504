"""Jaxprs as programs of regions: their equations with calls opened, and how these run one after the other."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from elementgrad._backends.jax.compile_cache import CachedProgram, OpenedCall
from elementgrad._backends.jax.cone.rules import PlacedRegion, Target, find_rule
from elementgrad._backends.jax.program import FOLLOWED
from elementgrad._cone.plan import Program, ProgramOp, ProgramValue


def build(jaxpr: Any, consts: Sequence[Any] = (), opens_rules: bool = False) -> Program:
    """Return a jaxpr as a program, with calls opened.

    Args:
        jaxpr: the jaxpr of the function, or a program of the compile cache.
        consts: its constants, as arrays; for a program of the cache its operands, as values.
        opens_rules: True to open functions with a derivative rule of their own too, where only values are computed.
    """
    ops: list[ProgramOp] = []

    def value_of(variable: Any, constant: Any = None) -> ProgramValue:
        aval: Any = variable.aval
        return ProgramValue(tuple(aval.shape), constant, dtype=aval.dtype)

    def walk(jaxpr: Any, own: Sequence[Any], arguments: Sequence[ProgramValue]) -> list[ProgramValue]:
        variables = [*jaxpr.constvars, *jaxpr.invars]
        constants = [
            const if isinstance(const, ProgramValue) else value_of(variable, const)
            for variable, const in zip(variables, own, strict=False)
        ]
        values: dict[Any, ProgramValue] = dict(zip(variables, [*constants, *arguments], strict=True))

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
                arrays = inner.select(consts) if isinstance(inner, OpenedCall) else getattr(inner, "consts", ())
                results = walk(getattr(inner, "jaxpr", inner), arrays, operands)
                values.update(zip(equation.outvars, results, strict=True))
                continue
            made = [value_of(variable) for variable in equation.outvars]
            op = ProgramOp(name, operands, made, find_rule, None, equation)
            for result in made:
                result.maker = op
            values.update(zip(equation.outvars, made, strict=True))
            ops.append(op)
        return [read(atom) for atom in jaxpr.outvars]

    program, own = (jaxpr.jaxpr, jaxpr.select(consts)) if isinstance(jaxpr, CachedProgram) else (jaxpr, consts)
    inputs = [value_of(variable) for variable in [*program.constvars, *program.invars][len(own) :]]
    outputs = walk(program, own, inputs)
    return Program(ops, inputs, outputs)


def count_equations(jaxpr: Any) -> int:
    """Return the number of equations of a jaxpr, with calls opened."""
    count = 0
    for equation in jaxpr.eqns:
        key = FOLLOWED.get(equation.primitive.name)
        inner = None if key is None else equation.params[key]
        count += 1 if key is None else count_equations(getattr(inner, "jaxpr", inner))
    return count


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
