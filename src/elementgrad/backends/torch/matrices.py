"""Sparse matrices of PyTorch."""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from elementgrad.backends.matrices import Layout, Matrices
from elementgrad.cleanup import entered
from elementgrad.sparsity.pattern import Pattern

Tensor = torch.Tensor


class TorchMatrices(Matrices):
    """The operations of `Matrices` on `torch.Tensor`."""

    def index(self, positions: np.ndarray, like: Tensor) -> Tensor:
        """A tensor of positions."""
        return torch.from_numpy(positions).to(like.device)

    def gather(self, x: Tensor, index: Tensor) -> Tensor:
        """The elements there."""
        return x.index_select(0, index)

    def seeds(self, numbers: np.ndarray, like: Tensor) -> Tensor:
        """Where `like` is."""
        return torch.from_numpy(numbers).to(like.device, like.dtype)

    def sparse(self, pattern: Pattern, layout: Layout | None, like: Tensor) -> Callable[[Tensor], Tensor]:
        """A matrix by rows unless told, or by coordinates."""
        options: Any = {"size": pattern.shape, "check_invariants": False}
        if layout == "coo":
            places = _on(np.stack([pattern.rows, pattern.columns]), like)
            return lambda values: torch.sparse_coo_tensor(places, values, is_coalesced=True, **options)
        starts, columns = (_on(part, like) for part in (pattern.starts, pattern.columns))

        def by_rows(values: Tensor) -> Tensor:
            with entered(warnings.catch_warnings()):
                warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta state")
                return torch.sparse_csr_tensor(starts, columns, values, **options)

        return by_rows


def _on(numbers: np.ndarray, like: Tensor) -> Tensor:
    return torch.from_numpy(numbers.astype(np.int64)).to(like.device)
