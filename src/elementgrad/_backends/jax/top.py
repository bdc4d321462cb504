"""Derivatives of losses with respect to parameters, some at a time, and the largest elements of an array."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np

from elementgrad._backends import topk
from elementgrad._backends.jax import sharding
from elementgrad._backends.jax.autodiff import JaxLinearization
from elementgrad._backends.jax.names import JaxModel, copy_with
from elementgrad._backends.topk import group_by_size
from elementgrad._cleanup import safe_context
from elementgrad._train.backend import TopBackend
from elementgrad.errors import FrameworkError

Array = jax.Array
wide: Any = getattr(jax if hasattr(jax, "enable_x64") else jax.experimental, "enable_x64")  # noqa: B009
"""A context in which arrays may have 64 bits, whatever the user has set."""


def slopes(
    model: JaxModel,
    parameters: Mapping[str, Array],
    losses: Callable[..., Iterable[Array]],
    squared: bool,
    give: Callable[[str, Array], None],
) -> None:
    """Give the derivative of the sum of the losses for each parameter, or the sum of the squares of theirs.

    The function runs once, on copies. Sweeps back then find the derivatives of one group of parameters at a time, which
    are together no larger than the largest parameter.
    """
    for name, array in parameters.items():
        _require_values(array, name)
    names = list(parameters)

    def numbers(*new: Array) -> list[Array]:
        found = losses(copy_with(model.function, dict(zip(names, new, strict=True))))
        return [jnp.concatenate([loss.reshape(-1) for loss in found])]

    linear = JaxLinearization(numbers, list(parameters.values()))
    reached = [name for number, name in enumerate(names) if number in linear.paths[0]]
    for group in group_by_size({name: parameters[name].size for name in reached}) if reached else []:
        every = linear.sweeper(0, [names.index(name) for name in group])
        found = _squares(every, linear.outputs[0]) if squared else every(jnp.ones_like(linear.outputs[0]))
        for name in group:
            give(name, found.pop(0))


def largest(x: Array, count: int, floor: float, minus: Array | None) -> tuple[np.ndarray, np.ndarray]:
    """Size and position of the elements that are largest in size; see `Backend.topk_abs`."""
    _require_values(x, "the tensor")
    return topk.topk_abs(_pieces(x), None if minus is None else _pieces(minus), count, floor)


def _squares(sweep: Callable[[Array], Sequence[Array]], numbers: Array) -> list[Array]:
    """The sum over the numbers of the squares of their derivatives, in 64 bits, in which small ones do not vanish."""
    totals: Any = None
    for number in range(numbers.size):
        found = sweep(jnp.zeros_like(numbers).at[number].set(1))
        with safe_context(wide(True)):
            totals = _added([jnp.zeros(each.shape, jnp.float64) for each in found] if totals is None else totals, found)
    return totals


@jax.jit
def _added(totals: list[Array], found: list[Array]) -> list[Array]:
    return [total + jnp.square(each.astype(jnp.float64)) for total, each in zip(totals, found, strict=True)]


def _pieces(x: Array) -> Iterator[np.ndarray]:
    """The elements in order, as float64, a piece at a time."""
    if len(x.sharding.device_set) > 1:  # no process need hold all of it at once
        for start in range(0, x.size, topk.PIECE):
            yield sharding.read(x, np.arange(start, min(start + topk.PIECE, x.size))).astype(np.float64)
        return
    flat = np.asarray(x).reshape(-1)
    for start in range(0, flat.size, topk.PIECE):
        yield flat[start : start + topk.PIECE].astype(np.float64)


def _require_values(array: Array, name: str) -> None:
    if isinstance(array, jax.core.Tracer):
        raise FrameworkError(f"{name} is being traced and has no values to rank; call eg.top outside of jax.jit")


class JaxTop(TopBackend):
    parameter_gradients = staticmethod(slopes)
    topk_abs = staticmethod(largest)


implementation = JaxTop()
