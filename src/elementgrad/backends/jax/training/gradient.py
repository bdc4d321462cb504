"""A loss as a function of the values of elements, and its gradient for these alone."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.interpreters.partial_eval import dce_jaxpr

from elementgrad.backends.jax.program import is_array
from elementgrad.backends.jax.training.patched import Patched
from elementgrad.backends.jax.training.running import Tell, run
from elementgrad.backends.training import UseOf
from elementgrad.errors import FrameworkError, OptionError

Array = jax.Array
ARRAYS = (jax.Array, jax.core.Tracer, np.ndarray, np.generic)
UNTRACEABLE = (jax.errors.JAXTypeError, jax.errors.JAXIndexError)
"""What a function raises that branches on values, and can be differentiated by running it as it stands alone."""


class Loss:
    """A function of some arrays, which it is traced for once and then given as patched ones.

    `homes` says for each row of values which of the arrays it is of.
    """

    def __init__(
        self,
        call: Callable[..., Any],
        arrays: Sequence[Array],
        homes: Sequence[int],
        patched: Callable[[Sequence[Array]], list[Patched]],
        has_aux: bool,
    ):
        self._call, self._patched, self._has_aux = call, patched, has_aux
        self._arrays, self._homes = arrays, homes
        self._structure: Any = None
        self._others: dict[int, Any] = {}
        self._program: Any = None
        with suppress(*UNTRACEABLE):
            self._program = jax.make_jaxpr(self._outputs)(*arrays)

    def gradient(self, values: Sequence[Array], wanted: Sequence[int]) -> tuple[Any, list[Array | None]]:
        """What the function returns, and its gradient for some of the values; None where no path leads to them."""

        def total(some: list[Array]) -> tuple[Array, list[Array]]:
            every = list(values)
            for number, value in zip(wanted, some, strict=True):
                every[number] = value
            loss, *aux = self._run(self._patched(every), lambda *use: None)
            return loss, aux

        loss, back, aux = jax.vjp(total, [values[number] for number in wanted], has_aux=True)
        one = jnp.ones_like(loss)
        (found,) = back(one)
        program = jax.make_jaxpr(back)(one).jaxpr
        paths = [dce_jaxpr(program, [n == number for n in range(len(found))])[1][0] for number in range(len(found))]
        if not all(paths) and self._program is not None:  # elements may be left out of what goes on of their array
            paths = [self._reached[self._homes[number]] for number in wanted]
        return self._returned([loss, *aux]), [each if path else None for each, path in zip(found, paths, strict=True)]

    @cached_property
    def _reached(self) -> list[bool]:
        """Whether the derivative of the loss is computed from that of each array."""
        program, arrays = self._program, self._arrays

        def loss(*arrays: Array) -> Array:
            return jax.core.eval_jaxpr(program.jaxpr, program.consts, *arrays)[0]

        tangents = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays]
        moved = jax.make_jaxpr(lambda *tangents: jax.jvp(loss, tuple(arrays), tangents)[1])(*tangents)
        return list(dce_jaxpr(moved.jaxpr, [True])[1])

    def uses(self, values: Sequence[Array]) -> list[UseOf]:
        """Every use of the arrays, without computing anything."""
        found: list[UseOf] = []
        if self._program is None:
            return [UseOf(one.name, "the function branches on values", True) for one in self._patched(values)]
        jax.eval_shape(lambda values: self._run(self._patched(values), lambda *use: found.append(UseOf(*use))), values)
        return list(dict.fromkeys(found))

    def _run(self, arrays: list[Patched], tell: Tell) -> list[Array]:
        if self._program is None:
            return self._outputs(*[array.whole() for array in arrays])
        return run(self._program.jaxpr, self._program.consts, arrays, tell)

    def _outputs(self, *arrays: Array) -> list[Array]:
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
        self._others = {number: leaf for number, leaf in enumerate(leaves) if not isinstance(leaf, ARRAYS)}
        return [jnp.asarray(leaf) for leaf in leaves if isinstance(leaf, ARRAYS)]

    def _returned(self, arrays: Sequence[Array]) -> Any:
        """What the function returned, with these arrays in it; whatever else there was is as it was."""
        left = iter(arrays)
        count = len(arrays) + len(self._others)
        leaves = [self._others[number] if number in self._others else next(left) for number in range(count)]
        return jax.tree_util.tree_unflatten(self._structure, leaves)
