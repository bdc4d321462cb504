"""A loss as a function of the values of elements, and its gradient for these alone."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax._src.interpreters.partial_eval import dce_jaxpr

from elementgrad.backends.jax.program import is_array
from elementgrad.backends.jax.training.patched import Patched
from elementgrad.backends.jax.training.running import Tell, run
from elementgrad.backends.training import UseOf
from elementgrad.errors import FrameworkError, OptionError

Array = jax.Array
UNTRACEABLE = (jax.errors.JAXTypeError, jax.errors.JAXIndexError)
"""What a function raises that branches on values, and can be differentiated by running it as it stands alone."""


class Loss:
    """A function of some arrays, which it is traced for once and then given as patched ones."""

    def __init__(
        self,
        call: Callable[..., Any],
        arrays: Sequence[Array],
        patched: Callable[[Sequence[Array]], list[Patched]],
        has_aux: bool,
    ):
        self._call, self._patched, self._has_aux = call, patched, has_aux
        self._structure: Any = None
        self._program: Any = None
        self.connected: list[bool]
        """Whether the loss depends on each of the arrays."""
        try:
            self._program = jax.make_jaxpr(self._outputs)(*arrays)
        except UNTRACEABLE:
            self.connected = [True] * len(arrays)  # for all that can be known
        else:
            jaxpr = self._program.jaxpr
            only_loss = [number == 0 for number in range(len(jaxpr.outvars))]
            self.connected = list(dce_jaxpr(jaxpr, only_loss)[1])

    def gradient(self, values: Sequence[Array], wanted: Sequence[int]) -> tuple[Any, list[Array]]:
        """What the function returns, and its gradient for some of the values."""

        def total(some: list[Array]) -> tuple[Array, list[Array]]:
            every = list(values)
            for number, value in zip(wanted, some, strict=True):
                every[number] = value
            loss, *aux = self._run(self._patched(every), lambda *use: None)
            return loss, aux

        (loss, aux), found = jax.value_and_grad(total, has_aux=True)([values[number] for number in wanted])
        returned = jax.tree_util.tree_unflatten(self._structure, [loss, *aux])
        return returned, found

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
        return [jnp.asarray(leaf) for leaf in leaves]
