"""Sparse matrices of JAX."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import sparse

from elementgrad.backends.matrices import Layout, Matrices
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

    def sparse(self, pattern: Pattern, layout: Layout | None, like: Array) -> Callable[[Array], Any]:
        """A `BCOO` unless told, or a `BCSR`."""
        options: Any = {"shape": pattern.shape, "indices_sorted": True, "unique_indices": True}
        if layout == "csr":
            columns, starts = jnp.asarray(pattern.columns), jnp.asarray(pattern.starts)
            return lambda values: sparse.BCSR((values, columns, starts), **options)
        places = jnp.asarray(np.stack([pattern.rows, pattern.columns], 1))
        return lambda values: sparse.BCOO((values, places), **options)
