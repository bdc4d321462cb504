"""JAX: operations on arrays, edits, and the trace and settings that every verb leaves as it found them.

JAX enters traces and settings by `with` statements, of which an interrupt can skip the end. Every computation of the
thread would then go to a trace that has ended, or run without the checks that the user turned on.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np

from elementgrad import _cleanup
from elementgrad._backends.autodiff import Linearization, TensorFunction
from elementgrad._backends.base import Backend, DtypeRange, Kind
from elementgrad._backends.jax._compat import core, local_settings, restore_local_settings
from elementgrad._backends.jax.autodiff import JaxLinearization
from elementgrad._backends.jax.compile_cache import can_compile
from elementgrad._backends.jax.names import JaxNames
from elementgrad._backends.reachable_state import ReachableState
from elementgrad._cleanup import defer, safe_context, scope
from elementgrad._place.edit import EditBackend
from elementgrad._place.selection import Selection

context: Any = core.trace_ctx


def snapshot() -> Callable[[], None]:
    """Return a function that restores the trace and the settings of this thread as they are now."""
    return partial(restore, context.trace, context.axis_env, local_settings())


def restore(trace: Any, axes: Any, settings: Sequence[Any]) -> None:
    """Restore a trace, its named axes, and settings."""
    restore_local_settings(settings)
    if context.axis_env is not axes:
        context.set_axis_env(axes)
    if context.trace is not trace:
        context.set_trace(trace)


Array = jax.Array


WIDE = getattr(jax if hasattr(jax, "enable_x64") else jax.experimental, "enable_x64")  # noqa: B009
"""A context manager that turns 64 bits on or off; older versions of JAX have it in `jax.experimental`."""


class JaxEdit(EditBackend):
    """Edits and choices of `jax.Array`."""

    def accumulate(self, x: Array, selection: Selection, value: Any, multiply: bool) -> Array:
        index, flips = selection.native(_as_it_is)
        value = _flip(self._backend.cast(value, x), selection, flips)
        return x.at[index].multiply(value) if multiply else x.at[index].add(value)

    def only(self, x: Array, selection: Selection) -> Array:
        if selection.traced:
            return super().only(x, selection)
        backend = self._backend
        return _through(x, lambda t: backend.put(jnp.zeros_like(t), selection, backend.take(t, selection)))

    def stop_gradient_at(self, x: Array, selection: Selection) -> Array:
        if selection.traced:
            return super().stop_gradient_at(x, selection)
        return _through(x, lambda t: self._backend.put(t, selection, 0))

    def soft_choice(self, x: Array, logits: Array, axis: int) -> Array:
        weights = jax.nn.softmax(logits, axis).astype(x.dtype)
        return jnp.sum(weights * jnp.where(weights == 0, 0, x), axis)

    def hard_choice(self, x: Array, logits: Array, axis: int) -> Array:
        chosen = jnp.argmax(logits, axis, keepdims=True)
        return jnp.squeeze(jnp.take_along_axis(x, chosen, axis), axis)

    def straight_through(self, value: Array, surrogate: Array) -> Array:
        return _straight_through(value, surrogate)


class JaxBackend(Backend):
    """The operations of `Backend` on `jax.Array`, tracers included."""

    name = "jax"
    records_programs = True
    conjugates = True

    def __init__(self) -> None:
        super().__init__(JaxEdit(self), JaxNames())

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

    def dtype_range(self, x: Array) -> DtypeRange | None:
        return _dtype_range(x.dtype)

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
        return x.at[index].set(_flip(self.cast(value, x), selection, flips), **_promises(selection))

    def where(self, mask: Any, x: Array, y: Array) -> Array:
        return jnp.where(mask, x, y)

    def stop(self, x: Array) -> Array:
        return jax.lax.stop_gradient(x)

    def reshape(self, x: Array, shape: tuple[int, ...]) -> Array:
        return _reshape(x, shape)

    def broadcast(self, x: Array, shape: tuple[int, ...]) -> Array:
        return jnp.broadcast_to(x, shape)

    def linearize(self, run: TensorFunction, inputs: Sequence[Array], create_graph: bool, order: int) -> Linearization:
        if not can_compile(inputs):  # the tensors of an enclosing transformation are the user's
            return JaxLinearization.of(run, inputs)
        state = ReachableState(run.function)
        with scope():
            defer(state.restore, lambda x: isinstance(x, jax.core.Tracer))
            return JaxLinearization.of(run, inputs)

    def itemsize(self, x: Array) -> int:
        return x.dtype.itemsize

    def zeros(self, shape: tuple[int, ...], like: Array) -> Array:
        return jnp.zeros(shape, like.dtype)

    def to_float64(self, x: Array) -> np.ndarray | None:
        values = self.read(x)
        return None if values is None else values.astype(np.float64)

    def convert(self, x: Array, dtype: str) -> Array:
        with self.precision(dtype):
            return jnp.asarray(x, dtype)

    def precision(self, dtype: str | None) -> AbstractContextManager[Any]:
        return safe_context(WIDE(True)) if dtype in ("float64", "complex128") else nullcontext()

    def concat(self, parts: Sequence[Array]) -> Array:
        return jnp.concatenate(parts)


_reshape = partial(jax.jit, static_argnums=1)(jnp.reshape)
"""Compiled, it is called in a tenth of the time, which is as much as a small sweep takes."""


@cache
def _dtype_range(dtype: Any) -> DtypeRange | None:
    if jnp.issubdtype(dtype, jnp.inexact):
        return DtypeRange.from_floats(jnp.finfo(dtype))
    return DtypeRange.from_integers(jnp.iinfo(dtype)) if jnp.issubdtype(dtype, jnp.integer) else None


def _through(x: Array, keep: Callable[[Array], Array]) -> Array:
    """Return x itself, with its derivatives passed through a linear map."""

    @jax.custom_jvp
    def same(x: Array) -> Array:
        return x

    @same.defjvp
    def same_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
        return same(*primals), keep(*tangents)

    return same(x)


@jax.custom_jvp
def _straight_through(value: Array, surrogate: Array) -> Array:
    return value


@_straight_through.defjvp
def _straight_through_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    return _straight_through(*primals), tangents[1]


def _as_it_is(array: Any) -> Any:
    return array  # index arrays stay NumPy's: under jit an array of JAX would be traced


def _flip(value: Array, selection: Selection, flips: tuple[int, ...]) -> Array:
    return jnp.flip(jnp.broadcast_to(value, selection.shape), flips) if flips else value


def _promises(selection: Selection) -> dict[str, Any]:
    """Return what JAX may assume: concrete indices were checked, traced ones are left to its own rules."""
    return {} if selection.traced else {"mode": "promise_in_bounds", "unique_indices": selection.unique}


backend = JaxBackend()
_cleanup.register_snapshot(snapshot)
