"""`eg.top` for JAX: gradients of losses, a few parameters at a time, and the largest elements of an array."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np

from elementgrad._backends.jax import sharding
from elementgrad._backends.jax.autodiff import JaxLinearization
from elementgrad._backends.jax.names import JaxModel, copy_with
from elementgrad._cleanup import safe_context
from elementgrad._train.top_backend import TopBackend, group_by_size
from elementgrad.errors import FrameworkError

Array = jax.Array
enable_x64: Any = getattr(jax if hasattr(jax, "enable_x64") else jax.experimental, "enable_x64")  # noqa: B009
"""A context in which arrays may have 64 bits, whatever the user has set."""


class JaxTop(TopBackend):
    """Ranks elements of a pytree of arrays."""

    def parameter_gradients(
        self,
        model: JaxModel,
        parameters: Mapping[str, Array],
        losses: Callable[..., Iterable[Array]],
        squared: bool,
        give: Callable[[str, Array], None],
    ) -> None:
        """Pass on gradients. The function runs once, on copies.

        Reverse sweeps then compute the gradients of one group of parameters at a time, which are together no larger
        than the largest parameter.
        """
        for name, array in parameters.items():
            _require_values(array, name)
        names = list(parameters)

        def numbers(*new: Array) -> list[Array]:
            returned = losses(copy_with(model.function, dict(zip(names, new, strict=True))))
            return [jnp.concatenate([loss.reshape(-1) for loss in returned])]

        linear = JaxLinearization(numbers, list(parameters.values()))
        reached = [name for number, name in enumerate(names) if number in linear.paths[0]]
        for group in group_by_size({name: parameters[name].size for name in reached}) if reached else []:
            sweep = linear.compile_vjp(0, [names.index(name) for name in group])
            output = linear.outputs[0]
            gradients = _sum_of_squares(sweep, output) if squared else sweep(jnp.ones_like(output))
            for name in group:
                give(name, gradients.pop(0))  # popped, so that each is dropped once it is ranked

    def pieces(self, x: Array) -> Iterator[np.ndarray]:
        """Yield the elements; no process need hold all of a sharded array at once."""
        _require_values(x, "the tensor")
        is_spread = len(x.sharding.device_set) > 1
        flat = None if is_spread else np.asarray(x).reshape(-1)
        for start in range(0, x.size, TopBackend.PIECE):
            end = min(start + TopBackend.PIECE, x.size)
            piece = sharding.read(x, np.arange(start, end)) if flat is None else flat[start:end]
            yield piece.astype(np.float64)


implementation = JaxTop()


def _sum_of_squares(sweep: Callable[[Array], Sequence[Array]], output: Array) -> list[Array]:
    """Sum the squared derivatives of all numbers, in 64 bits, in which small ones do not vanish."""
    totals: Any = None
    for number in range(output.size):
        gradients = sweep(jnp.zeros_like(output).at[number].set(1))
        with safe_context(enable_x64(True)):
            totals = [jnp.zeros(each.shape, jnp.float64) for each in gradients] if totals is None else totals
            totals = _add_squares(totals, gradients)
    return totals


@jax.jit
def _add_squares(totals: list[Array], gradients: list[Array]) -> list[Array]:
    return [total + jnp.square(each.astype(jnp.float64)) for total, each in zip(totals, gradients, strict=True)]


def _require_values(array: Array, name: str) -> None:
    if isinstance(array, jax.core.Tracer):
        raise FrameworkError(f"{name} is being traced and has no values to rank; call eg.top outside of jax.jit")
