"""JAX."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from typing import Any

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np

from elementgrad import cleanup
from elementgrad.backends.jax import ambient
from elementgrad.backends.jax.linear import JaxLinear
from elementgrad.backends.jax.matrices import JaxMatrices
from elementgrad.backends.jax.model import Copying, JaxModel, opened
from elementgrad.backends.jax.program import staged
from elementgrad.backends.jax.uses import uses
from elementgrad.backends.limits import Limits
from elementgrad.backends.linear import Linear, Run, Use
from elementgrad.backends.model import Model
from elementgrad.backends.protocol import Backend, Kind
from elementgrad.backends.training import Trainer
from elementgrad.backends.witness import Witness
from elementgrad.cleanup import enter, entered, scope
from elementgrad.selection import Selection

Array = jax.Array
WIDE = getattr(jax if hasattr(jax, "enable_x64") else jax.experimental, "enable_x64")  # noqa: B009
"""Where there is a float64."""


class JaxBackend(JaxMatrices, Backend):
    """The operations of `Backend` on `jax.Array`, tracers included."""

    name = "jax"
    conjugates = True

    def owns(self, kind: type) -> bool:
        return issubclass(kind, (jax.Array, jax.core.Tracer))

    def shape(self, x: Array) -> tuple[int, ...]:
        return x.shape

    def kind(self, x: Array) -> Kind:
        if jnp.issubdtype(x.dtype, jnp.floating):
            return "f"
        if jnp.issubdtype(x.dtype, jnp.complexfloating):
            return "c"
        if jnp.issubdtype(x.dtype, jnp.integer):
            return "i"
        return "b" if x.dtype == jnp.bool_ else "o"

    def read(self, x: Array) -> np.ndarray | None:
        if isinstance(x, jax.core.Tracer):
            return None
        here = getattr(x, "is_fully_addressable", True)  # or else parts of it are in other processes
        return np.asarray(x) if here else None

    def limits(self, x: Array) -> Limits | None:
        return _limits(x.dtype)

    def cast(self, value: Any, like: Array) -> Array:
        return value.astype(like.dtype) if isinstance(value, Array) else jnp.asarray(value, like.dtype)

    def tensor(self, array: np.ndarray) -> Array:
        return jax.device_put(array.copy())  # jnp.array compiles a program for it

    def take(self, x: Array, selection: Selection) -> Array:
        index, flips = selection.basic or selection.native(_as_it_is)
        taken = x.at[index].get(**_promises(selection))
        return jnp.flip(taken, flips) if flips else taken

    def put(self, x: Array, selection: Selection, value: Any) -> Array:
        index, flips = selection.basic or selection.native(_as_it_is)
        return x.at[index].set(self._flipped(value, x, selection, flips), **_promises(selection))

    def accumulate(self, x: Array, selection: Selection, value: Any, multiply: bool) -> Array:
        index, flips = selection.native(_as_it_is)
        value = self._flipped(value, x, selection, flips)
        return x.at[index].multiply(value) if multiply else x.at[index].add(value)

    def _flipped(self, value: Any, x: Array, selection: Selection, flips: tuple[int, ...]) -> Array:
        value = self.cast(value, x)
        return jnp.flip(jnp.broadcast_to(value, selection.shape), flips) if flips else value

    def where(self, mask: Any, x: Array, y: Array) -> Array:
        return jnp.where(mask, x, y)

    def stop(self, x: Array) -> Array:
        return jax.lax.stop_gradient(x)

    def only(self, x: Array, selection: Selection) -> Array:
        if selection.traced:
            return super().only(x, selection)
        return _through(x, lambda t: self.put(jnp.zeros_like(t), selection, self.take(t, selection)))

    def all_but(self, x: Array, selection: Selection) -> Array:
        if selection.traced:
            return super().all_but(x, selection)
        return _through(x, lambda t: self.put(t, selection, 0))

    def reshape(self, x: Array, shape: tuple[int, ...]) -> Array:
        return jnp.reshape(x, shape)

    def broadcast(self, x: Array, shape: tuple[int, ...]) -> Array:
        return jnp.broadcast_to(x, shape)

    def soft_choice(self, x: Array, logits: Array, axis: int) -> Array:
        weights = jax.nn.softmax(logits, axis).astype(x.dtype)
        return jnp.sum(weights * jnp.where(weights == 0, 0, x), axis)

    def hard_choice(self, x: Array, logits: Array, axis: int) -> Array:
        chosen = jnp.argmax(logits, axis, keepdims=True)
        return jnp.squeeze(jnp.take_along_axis(x, chosen, axis), axis)

    def graft(self, value: Array, slope: Array) -> Array:
        return _graft(value, slope)

    def surroundings(self, linear: Linear) -> Any:
        return jax.config.jax_enable_x64, jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]

    @contextmanager
    def within(self, surroundings: Any) -> Iterator[None]:
        wide, precision = surroundings
        with scope():
            enter(WIDE(wide))
            enter(jax.default_matmul_precision(precision))
            yield

    def linearize(self, run: Run, inputs: Sequence[Array], create_graph: bool, order: int) -> Linear:
        return JaxLinear.of(run, inputs)

    def uses(self, run: Run, inputs: Sequence[Array | None], input: int) -> tuple[Linear, list[Use]]:
        return uses(run, inputs, input)

    def witness(self, run: Run, source: Array | None, probe: bool) -> Witness:
        from elementgrad.backends.jax.explaining.witness import JaxWitness

        return JaxWitness(run, source)

    def opened(self, value: Any) -> tuple[Sequence[Any], Sequence[Any], Callable[[Sequence[Any]], Any]] | None:
        return opened(value)

    def models(self, function: Any) -> bool:
        return next(iter(JaxModel(function).held()), None) is not None

    def model(self, function: Callable[..., Any]) -> Model:
        return JaxModel(function)

    def trainer(self, model: Any) -> Trainer:
        from elementgrad.backends.jax.training.trainer import JaxTrainer

        return JaxTrainer(model)

    def slopes(
        self,
        model: Model,
        parameters: Mapping[str, Array],
        losses: Callable[..., Iterable[Array]],
        squared: bool,
        give: Callable[[str, Array], None],
    ) -> None:
        from elementgrad.backends.jax.scores import slopes

        assert isinstance(model, JaxModel)
        slopes(model, parameters, losses, squared, give)

    def largest(self, x: Array, count: int, floor: float, minus: Array | None = None) -> tuple[np.ndarray, np.ndarray]:
        from elementgrad.backends.jax.scores import largest

        return largest(x, count, floor, minus)

    def traceable(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return function if isinstance(function, Copying) else Copying(function)

    def staged(self, x: Array, name: str) -> Array:
        return staged(x, name)

    def itemsize(self, x: Array) -> int:
        return x.dtype.itemsize

    def zeros(self, shape: tuple[int, ...], like: Array) -> Array:
        return jnp.zeros(shape, like.dtype)

    def units(self, like: Array, positions: np.ndarray, batch: int) -> Array:
        return _units(positions, like.shape, like.dtype, batch)

    def floats(self, x: Array) -> np.ndarray | None:
        values = self.read(x)
        return None if values is None else values.astype(np.float64)

    def convert(self, x: Array, dtype: str) -> Array:
        with self.precision(dtype):
            return jnp.asarray(x, dtype)

    def precision(self, dtype: str | None) -> AbstractContextManager[Any]:
        return entered(WIDE(True)) if dtype in ("float64", "complex128") else nullcontext()

    def swift(self, function: Callable[[Array], Array]) -> Callable[[Array], Array]:
        return jax.jit(function)

    def concat(self, parts: Sequence[Array]) -> Array:
        return jnp.concatenate(parts)

    def transpose(self, x: Array, axes: tuple[int, ...]) -> Array:
        return jnp.transpose(x, axes)

    def matmul(self, x: Array, y: Array) -> Array:
        return x @ y


@partial(jax.jit, static_argnums=(1, 2, 3))
def _units(positions: np.ndarray, shape: tuple[int, ...], dtype: Any, batch: int) -> Array:
    seeds = positions[:, None, None] == jnp.arange(math.prod(shape) // batch)[None, None]
    return jnp.broadcast_to(seeds, (len(positions), batch, seeds.shape[2])).astype(dtype).reshape(-1, *shape)


@cache
def _limits(dtype: Any) -> Limits | None:
    if jnp.issubdtype(dtype, jnp.inexact):
        return Limits.of_floats(jnp.finfo(dtype))
    return Limits.of_integers(jnp.iinfo(dtype)) if jnp.issubdtype(dtype, jnp.integer) else None


def _through(x: Array, keep: Callable[[Array], Array]) -> Array:
    """x itself, at no cost, with its derivatives passed through a linear map."""

    @jax.custom_jvp
    def same(x: Array) -> Array:
        return x

    @same.defjvp
    def same_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
        return same(*primals), keep(*tangents)

    return same(x)


@jax.custom_jvp
def _graft(value: Array, slope: Array) -> Array:
    return value


@_graft.defjvp
def _graft_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    return _graft(*primals), tangents[1]


def _as_it_is(array: Any) -> Any:
    """NumPy's index arrays stay NumPy's: under jit an array of JAX's own would be traced."""
    return array


def _promises(selection: Selection) -> dict[str, Any]:
    """What JAX may take for granted: concrete indices were checked, traced ones are left to its own rules."""
    return {} if selection.traced else {"mode": "promise_in_bounds", "unique_indices": selection.unique}


backend = JaxBackend()
cleanup.on_entry(ambient.snapshot)
