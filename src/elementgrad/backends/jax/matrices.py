"""Sparse matrices of JAX."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from elementgrad.backends.matrices import Layout, Matrices, Read
from elementgrad.sparsity.pattern import Pattern

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

    def repeated(self, read: Read) -> Read:
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
