"""A user's program run with patched arrays, each operation on them in the cheapest way that is exact."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from elementgrad.backends.jax.program import FOLLOWED, bind, evaluate, follow
from elementgrad.backends.jax.training.lookups import gathered, sliced
from elementgrad.backends.jax.training.patched import MOVES, Patched, split
from elementgrad.backends.jax.training.products import correlation, product

Array = jax.Array
Tell = Callable[[str, str, bool], None]
"""Hears of every use of a parameter: its name, the operation, whether the parameter was made whole for it."""
SPARSE: dict[str, Callable[[Any, Sequence[Any]], list[Array] | None]] = {
    "gather": gathered,
    "dynamic_slice": sliced,
    "dot_general": product,
    "conv_general_dilated": correlation,
}
"""Operations that need no whole array; None where the one at hand does."""
REMAT = ("remat2", "checkpoint")


def run(jaxpr: Any, consts: Sequence[Any], operands: Sequence[Any], tell: Tell) -> list[Array]:
    """The results of a program, plain arrays all of them."""
    results = evaluate(jaxpr, consts, operands, _Step(tell))
    return [_whole(result, "return", tell) for result in results]


class _Step:
    """One equation: as it stands, unless a patched array is among its operands."""

    def __init__(self, tell: Tell):
        self._tell = tell

    def __call__(self, equation: Any, operands: list[Any]) -> Sequence[Any]:
        patched = [operand for operand in operands if isinstance(operand, Patched)]
        if not patched:
            return bind(equation, operands)
        with equation.ctx.manager:  # the mesh among others, whose axes may be typed in another way in here
            return self._on_patched(equation, operands, patched)

    def _on_patched(self, equation: Any, operands: list[Any], patched: Sequence[Patched]) -> Sequence[Any]:
        name = equation.primitive.name
        if name in REMAT:
            return self._recomputed(equation, operands)
        if name in FOLLOWED:
            return follow(equation, operands, self)
        if name in LOOPS:
            return LOOPS[name](self, equation, operands)
        if name == "split":
            return split(patched[0], equation.params, bind(equation, [patched[0].array]))
        if name in MOVES:
            (array,) = bind(equation, [_array(operand) for operand in operands])
            moved = MOVES[name](patched[0], equation.params, array) if _floating(array) else None
            if moved is not None:
                return [moved]
        results = SPARSE[name](equation, operands) if name in SPARSE else None
        if results is not None:
            for operand in patched:
                self._tell(operand.name, name, False)
            return results
        return bind(equation, [_whole(operand, name, self._tell) for operand in operands])

    def _recomputed(self, equation: Any, operands: list[Any]) -> Sequence[Any]:
        """A checkpoint stays one: what it computes is computed again for the gradient."""
        params = equation.params

        def inner(*operands: Any) -> list[Array]:
            return run(params["jaxpr"], (), operands, self._tell)

        return jax.checkpoint(inner, prevent_cse=params["prevent_cse"], policy=params["policy"])(*operands)

    def _scanned(self, equation: Any, operands: list[Any]) -> Sequence[Any]:
        """A scan whose body closes over patched arrays; what it scans over, or carries, is whole."""
        params = equation.params
        body, fixed, carried = params["jaxpr"], params["num_consts"], params["num_carry"]
        consts = operands[:fixed]
        rest = [_whole(operand, "scan", self._tell) for operand in operands[fixed:]]

        def step(carry: Any, slices: Any) -> Any:
            results = run(body.jaxpr, body.consts, [*consts, *carry, *slices], self._tell)
            return tuple(results[:carried]), tuple(results[carried:])

        start = [jnp.asarray(x, aval.dtype) for x, aval in zip(rest, body.in_avals[fixed:], strict=False)]
        carry, stacked = jax.lax.scan(
            step,
            tuple(start[:carried]),
            tuple(rest[carried:]),
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        return [*carry, *stacked]

    def _branched(self, equation: Any, operands: list[Any]) -> Sequence[Any]:
        """A cond or switch, on whose branches patched arrays come as they are."""
        which, *others = operands

        def branch(closed: Any) -> Callable[..., list[Array]]:
            return lambda *operands: run(closed.jaxpr, closed.consts, operands, self._tell)

        return jax.lax.switch(which, [branch(closed) for closed in equation.params["branches"]], *others)


LOOPS: dict[str, Any] = {"scan": _Step._scanned, "cond": _Step._branched}


def _whole(operand: Any, operation: str, tell: Tell) -> Any:
    if not isinstance(operand, Patched):
        return operand
    tell(operand.name, operation, True)
    return operand.whole()


def _array(operand: Any) -> Any:
    return operand.array if isinstance(operand, Patched) else operand


def _floating(array: Array) -> bool:
    return bool(jnp.issubdtype(array.dtype, jnp.inexact))
