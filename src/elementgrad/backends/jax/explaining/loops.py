"""Branches and loops of JAX: the branch that is taken, and every turn of a loop, operation by operation."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from elementgrad.backends.jax.explaining import words
from elementgrad.backends.jax.explaining.steps import Taken
from elementgrad.backends.jax.explaining.tracer import Watched

UNROLLED = 4000
"""A loop of so many operations is followed in every turn; a longer one is one step."""


def short(params: Mapping[str, Any]) -> bool:
    """Whether a loop is followed."""
    return bool(params["length"] * len(params["jaxpr"].jaxpr.eqns) <= UNROLLED)


def _joined(watch: Any, word: str, function: Any, operands: Sequence[Any], here: words.Place) -> list[Any]:
    """A step of ours that moves values around."""
    values = [watch.value(x) for x in operands]
    takes = [watch.number(x) for x in operands]
    step = Taken(word, {}, function, values, takes, here.where, word, quiet=True)
    step.run()
    return watch.keep(step, here, any(isinstance(x, Watched) for x in operands))


def branch(watch: Any, params: Mapping[str, Any], operands: Sequence[Any], here: words.Place) -> list[Any]:
    """The branch that is taken."""
    index, *rest = operands
    branches = params["branches"]
    chosen = min(max(int(watch.value(index)), 0), len(branches) - 1)
    results = watch.follow(branches[chosen], rest, here, True)
    return _joined(watch, "cond", lambda _, *xs: list(xs), [index, *results], here)


def unrolled(watch: Any, params: Mapping[str, Any], operands: Sequence[Any], here: words.Place) -> list[Any]:
    """Every turn of a loop."""
    length, body = params["length"], params["jaxpr"]
    consts, carry = params["num_consts"], params["num_carry"]
    fixed, carried = list(operands[:consts]), list(operands[consts : consts + carry])
    rows = [
        _joined(watch, "scan", lambda x: [x[turn] for turn in range(length)], [x], here)
        for x in operands[consts + carry :]
    ]
    turns = range(length)[::-1] if params["reverse"] else range(length)
    stacked: list[list[Any]] = [[None] * length for _ in body.jaxpr.outvars[carry:]]
    for turn in turns:
        results = watch.follow(body, [*fixed, *carried, *[row[turn] for row in rows]], here, True)
        carried = list(results[:carry])
        for column, result in zip(stacked, results[carry:], strict=True):
            column[turn] = result
    outputs = zip(body.jaxpr.outvars[carry:], stacked, strict=True)
    return carried + [result for variable, column in outputs for result in _stacked(watch, variable, column, here)]


def _stacked(watch: Any, variable: Any, column: Sequence[Any], here: words.Place) -> list[Any]:
    aval = variable.aval
    if not column:
        return [jnp.zeros((0, *aval.shape), aval.dtype)]
    return _joined(watch, "scan", lambda *xs: [jnp.stack(xs)], list(column), here)
