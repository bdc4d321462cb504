"""A loss as a function of the values of elements: its program runs with patched arrays in place of parameters."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from elementgrad._backends.jax._compat import dce_jaxpr, jaxprs_in_params
from elementgrad._backends.jax.program import FOLLOWED, bind, evaluate, follow, is_array
from elementgrad._backends.jax.train.rules import (
    MOVES,
    PatchedArray,
    convolve,
    dynamic_slice,
    gather,
    multiply,
    split,
)
from elementgrad._train.trainer import ParameterUse
from elementgrad.errors import FrameworkError, OptionError

Array = jax.Array
OnUse = Callable[[str, str, bool], None]
"""Called for every use of a parameter: its name, the operation, whether the parameter was made whole for it."""
SPARSE: dict[str, Callable[[Any, Sequence[Any]], list[Array] | None]] = {
    "gather": gather,
    "dynamic_slice": dynamic_slice,
    "dot_general": multiply,
    "conv_general_dilated": convolve,
}
"""Operations that need no whole array; they return None for an equation that does."""
CALLS = {*FOLLOWED, "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"}
REMAT = ("remat2", "checkpoint")
ARRAYS = (jax.Array, jax.core.Tracer, np.ndarray, np.generic)
UNTRACEABLE = (jax.errors.JAXTypeError, jax.errors.JAXIndexError)
"""Raised by a function that branches on values, which can be differentiated only by running it."""


class TracedLoss:
    """A function of some arrays, traced once and then run with patched arrays.

    Args:
        call: The function.
        patched: Its arguments: arrays with the elements that train, whose values are vectors.
        has_aux: The function returns a pair of the loss and anything else.
    """

    def __init__(self, call: Callable[..., Any], patched: Sequence[PatchedArray], has_aux: bool):
        self._call, self._patched, self._has_aux = call, patched, has_aux
        self._arrays = [each.array for each in patched]
        self._structure: Any = None
        self._constants: dict[int, Any] = {}
        """Leaves of what the function returns that are no arrays, by their number."""
        self._program: Any = None
        with suppress(*UNTRACEABLE):
            self._program = jax.make_jaxpr(self._flat_call)(*self._arrays)

    def gradient(self, wanted: Sequence[int]) -> tuple[Any, list[Array | None]]:
        """Return what the function returns, and its gradients for the vectors of some arrays, by their numbers.

        A gradient is None where the function does not depend on the array.
        """
        reached: set[int] = set()

        def total(vectors: list[Array]) -> tuple[Array, list[Array]]:
            patched = list(self._patched)
            for number, vector in zip(wanted, vectors, strict=True):
                values = _call_with_gradient(vector, partial(reached.add, number))
                patched[number] = patched[number].with_values(values)
            loss, *aux = self._run(patched, lambda *use: None)
            return loss, aux

        loss, vjp, aux = jax.vjp(total, [self._patched[number].values for number in wanted], has_aux=True)
        one = jnp.ones_like(loss)
        (gradients,) = vjp(one)
        if self._program is None or _has_loops(self._program.jaxpr):
            # The derivative of a loop has zeros in the place of gradients that there are none of.
            program, count = jax.make_jaxpr(vjp)(one).jaxpr, len(wanted)
            paths = [dce_jaxpr(program, [n == number for n in range(count)])[1][0] for number in range(count)]
        else:
            paths = [number in reached for number in wanted]
        if not all(paths) and self._program is not None:
            # The loss may depend on an array and not on the elements of it that are wanted, as after a slice.
            paths = [self._reached_arrays[number] for number in wanted]
        gradients = [gradient if path else None for gradient, path in zip(gradients, paths, strict=True)]
        return self._unflatten([loss, *aux]), gradients

    def uses(self) -> list[ParameterUse]:
        """Return every use of the arrays, without computing anything."""
        if self._program is None:
            return [ParameterUse(one.name, "the function branches on values", True) for one in self._patched]
        uses: list[ParameterUse] = []

        def run(vectors: list[Array]) -> list[Array]:
            patched = [each.with_values(vector) for each, vector in zip(self._patched, vectors, strict=True)]
            return self._run(patched, lambda *use: uses.append(ParameterUse(*use)))

        jax.eval_shape(run, [each.values for each in self._patched])
        return list(dict.fromkeys(uses))

    @cached_property
    def _reached_arrays(self) -> list[bool]:
        """For each array, True if the derivative of the loss is computed from it."""
        program, arrays = self._program, self._arrays

        def loss(*arrays: Array) -> Array:
            return jax.core.eval_jaxpr(program.jaxpr, program.consts, *arrays)[0]

        tangents = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays]
        jvp = jax.make_jaxpr(lambda *tangents: jax.jvp(loss, tuple(arrays), tangents)[1])(*tangents)
        return list(dce_jaxpr(jvp.jaxpr, [True])[1])

    def _run(self, arrays: Sequence[PatchedArray], on_use: OnUse) -> list[Array]:
        if self._program is None:
            return self._flat_call(*[array.whole() for array in arrays])
        return run(self._program.jaxpr, self._program.consts, arrays, on_use)

    def _flat_call(self, *arrays: Array) -> list[Array]:
        """Call the function, check its loss, and return all arrays in what it returns, the loss first."""
        returned = self._call(*arrays)
        if self._has_aux and not (isinstance(returned, tuple) and len(returned) == 2):
            raise FrameworkError("with has_aux=True the function returns a pair, (loss, aux)")
        loss = returned[0] if self._has_aux else returned
        if not is_array(loss):
            raise FrameworkError(f"the loss is {type(loss).__name__}; return an array of one number")
        if jnp.shape(loss):
            raise OptionError(f"the loss has shape {jnp.shape(loss)}; return one number, such as loss.mean()")
        if not jnp.issubdtype(jnp.result_type(loss), jnp.floating):
            raise OptionError(f"the loss is {jnp.result_type(loss)}; return a real number")
        leaves, self._structure = jax.tree_util.tree_flatten(returned)
        self._constants = {number: leaf for number, leaf in enumerate(leaves) if not isinstance(leaf, ARRAYS)}
        return [jnp.asarray(leaf) for leaf in leaves if isinstance(leaf, ARRAYS)]

    def _unflatten(self, arrays: Sequence[Array]) -> Any:
        """Return what the function returned, with these arrays in it."""
        left = iter(arrays)
        count = len(arrays) + len(self._constants)
        leaves = [self._constants[number] if number in self._constants else next(left) for number in range(count)]
        return jax.tree_util.tree_unflatten(self._structure, leaves)


def _call_with_gradient(vector: Array, note: Callable[[], None]) -> Array:
    """Return a vector, and call `note` when it is given a gradient, be it zero."""

    @jax.custom_vjp
    def identity(vector: Array) -> Array:
        return vector

    def backward(_: None, gradient: Any) -> tuple[Any]:
        if isinstance(gradient, SymbolicZero):
            return (None,)
        note()
        return (gradient,)

    identity.defvjp(lambda vector: (vector.value, None), backward, symbolic_zeros=True)
    return identity(vector)


def _has_loops(jaxpr: Any) -> bool:
    """Return True if a program has programs in it other than calls."""
    return any(
        equation.primitive.name not in CALLS or any(map(_has_loops, inner))
        for equation in jaxpr.eqns
        if (inner := list(jaxprs_in_params(equation.params)))
    )


def run(jaxpr: Any, consts: Sequence[Any], operands: Sequence[Any], on_use: OnUse) -> list[Array]:
    """Run a program with patched arrays among its operands; its results are plain arrays."""
    results = evaluate(jaxpr, consts, operands, _PatchedInterpreter(on_use))
    return [_make_whole(result, "return", on_use) for result in results]


class _PatchedInterpreter:
    """Evaluates one equation: as it stands, unless a patched array is among its operands."""

    def __init__(self, on_use: OnUse):
        self._on_use = on_use

    def __call__(self, equation: Any, operands: list[Any]) -> Sequence[Any]:
        patched = [operand for operand in operands if isinstance(operand, PatchedArray)]
        if not patched:
            return bind(equation, operands)
        with equation.ctx.manager:  # the mesh among others, whose axes may be typed in another way in here
            return self._evaluate(equation, operands, patched)

    def _evaluate(self, equation: Any, operands: list[Any], patched: Sequence[PatchedArray]) -> Sequence[Any]:
        name = equation.primitive.name
        if name in REMAT:
            return self._checkpoint(equation, operands)
        if name in FOLLOWED:
            return follow(equation, operands, self)
        if name == "scan":
            return self._scan(equation, operands)
        if name == "cond":
            return self._cond(equation, operands)
        if name == "split":
            return split(patched[0], equation.params, bind(equation, [patched[0].array]))
        if name in MOVES:
            plain = [operand.array if isinstance(operand, PatchedArray) else operand for operand in operands]
            (array,) = bind(equation, plain)
            is_floating = jnp.issubdtype(array.dtype, jnp.inexact)
            moved = MOVES[name](patched[0], equation.params, array) if is_floating else None
            if moved is not None:
                return [moved]
        results = SPARSE[name](equation, operands) if name in SPARSE else None
        if results is not None:
            for operand in patched:
                self._on_use(operand.name, name, False)
            return results
        return bind(equation, [_make_whole(operand, name, self._on_use) for operand in operands])

    def _checkpoint(self, equation: Any, operands: list[Any]) -> Sequence[Any]:
        """Keep a checkpoint one: what it computes is computed again for the gradient."""
        params = equation.params

        def body(*operands: Any) -> list[Array]:
            return run(params["jaxpr"], (), operands, self._on_use)

        return jax.checkpoint(body, prevent_cse=params["prevent_cse"], policy=params["policy"])(*operands)

    def _scan(self, equation: Any, operands: list[Any]) -> Sequence[Any]:
        """Let the body of a scan close over patched arrays; what it scans over, or carries, is made whole."""
        params = equation.params
        body, fixed, carried = params["jaxpr"], params["num_consts"], params["num_carry"]
        consts = operands[:fixed]
        rest = [_make_whole(operand, "scan", self._on_use) for operand in operands[fixed:]]

        def step(carry: Any, slices: Any) -> Any:
            results = run(body.jaxpr, body.consts, [*consts, *carry, *slices], self._on_use)
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

    def _cond(self, equation: Any, operands: list[Any]) -> Sequence[Any]:
        """Pass patched arrays into the branches of a cond or switch."""
        which, *others = operands

        def branch(closed: Any) -> Callable[..., list[Array]]:
            return lambda *operands: run(closed.jaxpr, closed.consts, operands, self._on_use)

        return jax.lax.switch(which, [branch(closed) for closed in equation.params["branches"]], *others)


def _make_whole(operand: Any, operation: str, on_use: OnUse) -> Any:
    if not isinstance(operand, PatchedArray):
        return operand
    on_use(operand.name, operation, True)
    return operand.whole()
