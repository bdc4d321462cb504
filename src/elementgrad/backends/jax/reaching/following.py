"""A program of JAX followed equation by equation, with the sets of seed elements that each value may depend on."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.core import jaxprs_in_params

from elementgrad.backends.jax.program import FOLLOWED, bind, evaluate
from elementgrad.sparsity.reach import Ids, Reach
from elementgrad.sparsity.value import UNKNOWN, Reached, Value, joined, reached, settled

UNROLLED = 4000
"""A loop of so many operations is followed in every turn; a longer one until nothing new is reached."""
INNER = {
    **FOLLOWED,
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
}
"""The calls whose results are those of their inner program, and where that is. Their rules are in the program."""


Rule = Callable[["Follower", Any, list[Value]], Sequence[Value]]


def known(value: Value) -> bool:
    """Whether a value is the same at every point, and there to be looked at."""
    return value is not UNKNOWN and not isinstance(value, (Reached, jax.core.Tracer))


class Follower:
    """Follows programs, with one table of sets for all of their values."""

    def __init__(self, reach: Reach, rules: Mapping[str, Rule]):
        self.reach = reach
        self.rules = {"cond": branches, "scan": scanned, "while": repeated, "custom_linear_solve": solved, **rules}

    def run(self, program: Any, operands: Sequence[Value]) -> list[Value]:
        """What a program gives for these operands; its constants are known."""
        jaxpr, consts = getattr(program, "jaxpr", program), getattr(program, "consts", ())
        consts = [const if known(const) else UNKNOWN for const in consts]
        return evaluate(jaxpr, consts, operands, self.step)

    def step(self, equation: Any, operands: list[Value]) -> Sequence[Value]:
        """The results of one equation."""
        name = equation.primitive.name
        if all(map(known, operands)) and not equation.effects:
            return bind(equation, operands)
        if name in INNER:
            return self.run(equation.params[INNER[name]], operands)
        if not any(isinstance(operand, Reached) for operand in operands):
            return [UNKNOWN] * len(equation.outvars)
        return self.rules.get(name, everything)(self, equation, operands)

    def ids(self, value: Value, variable: Any) -> Ids:
        """The sets of a value; of one that does not depend on the seed they are empty."""
        return value.ids if isinstance(value, Reached) else np.zeros(variable.aval.shape, dtype=np.int64)


def everything(follower: Follower, equation: Any, operands: list[Value]) -> list[Value]:
    """The rule for what is not known: each result depends on all that any operand does."""
    all_of = follower.reach.all_of(*reached(operands))
    return [Reached(np.full(getattr(variable.aval, "shape", ()), all_of)) for variable in equation.outvars]


def branches(follower: Follower, equation: Any, operands: list[Value]) -> Sequence[Value]:
    """The branch that is taken at every point, or what any of them gives."""
    which, *rest = operands
    programs = equation.params["branches"]
    if isinstance(which, Reached):
        return everything(follower, equation, operands)
    if known(which):
        return follower.run(programs[min(max(int(which), 0), len(programs) - 1)], rest)
    results = [follower.run(program, rest) for program in programs]
    return [joined(follower.reach, *values) for values in zip(*results, strict=True)]


def scanned(follower: Follower, equation: Any, operands: list[Value]) -> Sequence[Value]:
    """A loop with a known number of turns."""
    params = equation.params
    length, body = params["length"], params["jaxpr"]
    first, last = params["num_consts"], params["num_consts"] + params["num_carry"]
    fixed, carried, rows = operands[:first], operands[first:last], operands[last:]
    carries = last - first
    if length * size_of(body.jaxpr) > UNROLLED:
        whole = [Reached(follower.reach.over(row.ids, [0])) if isinstance(row, Reached) else UNKNOWN for row in rows]

        def turn(carried: list[Value]) -> list[Value]:
            return follower.run(body, [*fixed, *carried, *whole])

        carried = settled(follower.reach, carried, lambda carried: turn(carried)[:carries])
        each = turn(carried)[carries:]
        columns = [[value] * length for value in each]
    else:
        columns = [[UNKNOWN] * length for _ in equation.outvars[carries:]]
        for number in range(length)[::-1] if params["reverse"] else range(length):
            results = follower.run(body, [*fixed, *carried, *[_row(row, number) for row in rows]])
            carried = results[:carries]
            for column, result in zip(columns, results[carries:], strict=True):
                column[number] = result
    variables = equation.outvars[carries:]
    return [*carried, *[_stacked(column, variable) for column, variable in zip(columns, variables, strict=True)]]


def repeated(follower: Follower, equation: Any, operands: list[Value]) -> Sequence[Value]:
    """A loop that ends by a condition: turn by turn while that is known, and then until nothing new is reached."""
    params = equation.params
    condition, body = params["cond_jaxpr"], params["body_jaxpr"]
    first, last = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    of_condition, of_body, carried = operands[:first], operands[first:last], operands[last:]
    left = UNROLLED // size_of(body.jaxpr)
    while True:
        (more,) = follower.run(condition, [*of_condition, *carried])
        if known(more) and not bool(more):
            return carried
        if not known(more) or not left:
            break
        carried = follower.run(body, [*of_body, *carried])
        left -= 1
    state = settled(follower.reach, carried, lambda carried: follower.run(body, [*of_body, *carried]))
    (more,) = follower.run(condition, [*of_condition, *state])
    return everything(follower, equation, [*operands, more]) if isinstance(more, Reached) else state


def solved(follower: Follower, equation: Any, operands: list[Value]) -> Sequence[Value]:
    """A linear system: what its program for the solution does."""
    lengths, programs = equation.params["const_lengths"], equation.params["jaxprs"]
    start = lengths.matvec + lengths.vecmat
    right = operands[sum(length or 0 for length in lengths) :]
    return follower.run(programs.solve, [*operands[start : start + lengths.solve], *right])


def size_of(jaxpr: Any) -> int:
    """How many operations a program takes, loops inside it counted as often as they turn."""
    return 1 + sum(
        equation.params.get("length", 1) * sum(map(size_of, jaxprs_in_params(equation.params)), start=1)
        for equation in jaxpr.eqns
    )


def _row(value: Value, number: int) -> Value:
    if isinstance(value, Reached):
        return Reached(value.ids[number])
    return value[number] if known(value) else UNKNOWN


def _stacked(column: Sequence[Value], variable: Any) -> Value:
    if not any(isinstance(value, Reached) for value in column):
        return jnp.stack(column) if len(column) and all(map(known, column)) else UNKNOWN
    empty = np.zeros(variable.aval.shape[1:], dtype=np.int64)
    return Reached(np.stack([value.ids if isinstance(value, Reached) else empty for value in column]))
