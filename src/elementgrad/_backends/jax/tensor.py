"""The trace that JAX is in: every verb leaves it as it found it, whatever was interrupted in it.

JAX enters traces by `with` statements, of which an interrupt can skip the end. Every computation of the thread would
then go to a trace that has ended.


Sparse matrices of JAX.

JAX.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from typing import Any

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np

from elementgrad import _cleanup
from elementgrad._backends.autodiff import Linearization, TensorFunction, Use
from elementgrad._backends.base import Backend, DtypeRange, Kind, Layout, Matrices, Read
from elementgrad._backends.jax._compat import core
from elementgrad._backends.jax.autodiff import JaxLinearization
from elementgrad._backends.jax.contributions import uses
from elementgrad._backends.jax.names import CopyingFunction, JaxModel, opened
from elementgrad._backends.jax.program import staged
from elementgrad._backends.model import Model
from elementgrad._cleanup import enter, entered, scope
from elementgrad._explain.trace import Trace
from elementgrad._place.selection import Selection
from elementgrad._sparsity.pattern import Pattern
from elementgrad._train.trainer import Trainer

context: Any = core.trace_ctx


def snapshot() -> Callable[[], None]:
    """Note the trace; the undo that is returned puts it back."""
    return partial(restore, context.trace, context.axis_env)


def restore(trace: Any, axes: Any) -> None:
    """Put back a trace and the axes that have names in it."""
    if context.axis_env is not axes:
        context.set_axis_env(axes)
    if context.trace is not trace:
        context.set_trace(trace)


Array = jax.Array


class JaxMatrices(Matrices):
    """The operations of `Matrices` on `jax.Array`."""

    def index(self, positions: np.ndarray, like: Array) -> Any:
        """Positions in as few bits as hold them: JAX has 64 only if told."""
        return positions.astype(np.int32) if positions.max(initial=0) < 2**31 else positions

    def gather(self, x: Array, index: Any) -> Array:
        """The elements there, which are in range and in no order."""
        return jnp.take(x, index, mode="clip")

    def seeds(self, numbers: np.ndarray, like: Array) -> Array:
        """Numbers, also while a program is traced."""
        with jax.ensure_compile_time_eval():
            return jnp.asarray(numbers, like.dtype)

    def maybe_compile_read(self, read: Read) -> Read:
        """Compiled, unless it cannot be traced, as what branches in Python on values cannot."""
        compiled = jax.jit(read)
        plainly = False

        def run(x: Array) -> tuple[Array | None, Array | None]:
            nonlocal plainly
            if not plainly:
                try:
                    return compiled(x)
                except (jax.errors.JAXTypeError, jax.errors.JAXIndexError):
                    if isinstance(x, jax.core.Tracer):
                        raise
                    plainly = True
            return read(x)

        return run

    def sparse(self, pattern: Pattern, layout: Layout | None, like: Array) -> Callable[[Array], Any]:
        """A `BCOO` unless told, or a `BCSR`."""
        from jax.experimental import sparse  # which imports SciPy, a third of what JAX itself takes to import

        promises: Any = {"shape": pattern.shape, "indices_sorted": True, "unique_indices": True}
        with jax.ensure_compile_time_eval():  # numbers, not a part of a program that is being traced
            zeros = jnp.zeros(pattern.size, like.dtype)
            if layout == "csr":
                parts = zeros, jnp.asarray(pattern.columns), jnp.asarray(pattern.starts)
                empty: Any = sparse.BCSR(parts, **promises)
            else:
                places = jnp.asarray(np.stack([pattern.rows, pattern.columns], 1))
                empty = sparse.BCOO((zeros, places), **promises)
        (_, *rest), structure = jax.tree.flatten(empty)  # putting it together anew takes as long as a small sweep
        return lambda values: jax.tree.unflatten(structure, [values, *rest])


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

    def dtype_range(self, x: Array) -> DtypeRange | None:
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

    def stop_gradient_at(self, x: Array, selection: Selection) -> Array:
        if selection.traced:
            return super().stop_gradient_at(x, selection)
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

    def straight_through(self, value: Array, slope: Array) -> Array:
        return _graft(value, slope)

    def ambient_state(self, linear: Linearization) -> Any:
        return jax.config.jax_enable_x64, jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]

    @contextmanager
    def restore_ambient_state(self, surroundings: Any) -> Iterator[None]:
        wide, precision = surroundings
        with scope():
            enter(WIDE(wide))
            enter(jax.default_matmul_precision(precision))
            yield

    def linearize(self, run: TensorFunction, inputs: Sequence[Array], create_graph: bool, order: int) -> Linearization:
        return JaxLinearization.of(run, inputs)

    def uses(self, run: TensorFunction, inputs: Sequence[Array | None], input: int) -> tuple[Linearization, list[Use]]:
        return uses(run, inputs, input)

    def trace(self, run: TensorFunction, source: Array | None, probe: bool) -> Trace:
        from elementgrad._backends.jax.explain import JaxTrace

        return JaxTrace(run, source)

    def flatten_node(self, value: Any) -> tuple[Sequence[Any], Sequence[Any], Callable[[Sequence[Any]], Any]] | None:
        return opened(value)

    def is_model(self, function: Any) -> bool:
        return next(iter(JaxModel(function).held()), None) is not None

    def model(self, function: Callable[..., Any]) -> Model:
        return JaxModel(function)

    def trainer(self, model: Any) -> Trainer:
        from elementgrad._backends.jax.train.trainer import JaxTrainer

        return JaxTrainer(model)

    def parameter_gradients(
        self,
        model: Model,
        parameters: Mapping[str, Array],
        losses: Callable[..., Iterable[Array]],
        squared: bool,
        give: Callable[[str, Array], None],
    ) -> None:
        from elementgrad._backends.jax.top import slopes

        assert isinstance(model, JaxModel)
        slopes(model, parameters, losses, squared, give)

    def topk_abs(self, x: Array, count: int, floor: float, minus: Array | None = None) -> tuple[np.ndarray, np.ndarray]:
        from elementgrad._backends.jax.top import largest

        return largest(x, count, floor, minus)

    def traceable(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return function if isinstance(function, CopyingFunction) else CopyingFunction(function)

    def name_in_graph(self, x: Array, name: str) -> Array:
        return staged(x, name)

    def itemsize(self, x: Array) -> int:
        return x.dtype.itemsize

    def zeros(self, shape: tuple[int, ...], like: Array) -> Array:
        return jnp.zeros(shape, like.dtype)

    def one_hot_seeds(self, like: Array, positions: np.ndarray, batch: int) -> Array:
        return _units(positions, like.shape, like.dtype, batch)

    def to_float64(self, x: Array) -> np.ndarray | None:
        values = self.read(x)
        return None if values is None else values.astype(np.float64)

    def convert(self, x: Array, dtype: str) -> Array:
        with self.precision(dtype):
            return jnp.asarray(x, dtype)

    def precision(self, dtype: str | None) -> AbstractContextManager[Any]:
        return entered(WIDE(True)) if dtype in ("float64", "complex128") else nullcontext()

    def maybe_compile(self, function: Callable[[Array], Array]) -> Callable[[Array], Array]:
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
def _limits(dtype: Any) -> DtypeRange | None:
    if jnp.issubdtype(dtype, jnp.inexact):
        return DtypeRange.of_floats(jnp.finfo(dtype))
    return DtypeRange.of_integers(jnp.iinfo(dtype)) if jnp.issubdtype(dtype, jnp.integer) else None


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
_cleanup.on_entry(snapshot)
