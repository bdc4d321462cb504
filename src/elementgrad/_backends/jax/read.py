"""JAX's part in reads: seeds, sparse matrices and the configuration that worker processes start from."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from elementgrad._backends.autodiff import Linearization
from elementgrad._backends.jax import contributions
from elementgrad._backends.jax.tensor import WIDE
from elementgrad._cleanup import enter, scope
from elementgrad._read.backend import Layout, Read, ReadBackend
from elementgrad._read.recorder import Recorder
from elementgrad._sparsity.pattern import Pattern
from elementgrad.errors import FrameworkError

Array = jax.Array


class JaxRead(ReadBackend):
    uses = staticmethod(contributions.linearize_uses)

    def one_hot_seeds(self, like: Array, positions: np.ndarray, batch: int) -> Array:
        return _one_hot_seeds(positions, like.shape, like.dtype, batch)

    def transpose(self, x: Array, axes: tuple[int, ...]) -> Array:
        return jnp.transpose(x, axes)

    def matmul(self, x: Array, y: Array) -> Array:
        return x @ y

    def rounding(self, like: Array) -> str:
        return f"jax {jax.__version__}" if all(each.platform == "cpu" for each in like.devices()) else ""

    def index(self, positions: np.ndarray, like: Array) -> Any:
        # As few bits as hold them: JAX has 64 only if its configuration says so.
        return positions.astype(np.int32) if positions.max(initial=0) < 2**31 else positions

    def gather(self, x: Array, index: Any) -> Array:
        return jnp.take(x, index, mode="clip")  # all are in range, and this is the fastest mode

    def seeds(self, values: np.ndarray, like: Array) -> Array:
        with jax.ensure_compile_time_eval():
            return jnp.asarray(values, like.dtype)

    def sparse(self, pattern: Pattern, layout: Layout | None, like: Array) -> Callable[[Array], Any]:
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

    def maybe_compile(self, read: Read) -> Read:
        compiled = jax.jit(read)
        traceable = True

        def run(x: Array) -> tuple[Array | None, Array | None]:
            nonlocal traceable
            if traceable:
                try:
                    return compiled(x)
                except (jax.errors.JAXTypeError, jax.errors.JAXIndexError):  # it branches in Python on values
                    if isinstance(x, jax.core.Tracer):
                        raise
                    traceable = False
            return read(x)

        return run

    def recorder(self, tensors: Sequence[Array]) -> Recorder:
        raise FrameworkError(
            "eager code of jax cannot be recorded, since it leaves no trace; put it into a function f and use "
            "eg.jacobian(f, x) or eg.grad(f, x)"
        )

    def ambient_state(self, linear: Linearization) -> Any:
        return jax.config.jax_enable_x64, jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]

    @contextmanager
    def restore_ambient_state(self, state: Any) -> Iterator[None]:
        wide, precision = state
        with scope():
            enter(WIDE(wide))
            enter(jax.default_matmul_precision(precision))
            yield


@partial(jax.jit, static_argnums=(1, 2, 3))
def _one_hot_seeds(positions: np.ndarray, shape: tuple[int, ...], dtype: Any, batch: int) -> Array:
    seeds = positions[:, None, None] == jnp.arange(math.prod(shape) // batch)[None, None]
    return jnp.broadcast_to(seeds, (len(positions), batch, seeds.shape[2])).astype(dtype).reshape(-1, *shape)


implementation = JaxRead()
