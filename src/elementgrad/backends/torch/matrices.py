"""Sparse matrices of PyTorch."""

import warnings

import numpy as np
import torch

from elementgrad.backends.matrices import Layout, Matrices
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

    def sparse(self, values: Tensor, pattern: Pattern, layout: Layout | None) -> Tensor:
        """A matrix by rows unless told, or by coordinates."""
        if layout == "coo":
            places = _on(np.stack([pattern.rows, pattern.columns]), values)
            return torch.sparse_coo_tensor(places, values, pattern.shape, is_coalesced=True, check_invariants=False)
        starts, columns = (_on(part, values) for part in (pattern.starts, pattern.columns))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta state")
            return torch.sparse_csr_tensor(starts, columns, values, pattern.shape, check_invariants=False)


def _on(numbers: np.ndarray, like: Tensor) -> Tensor:
    return torch.from_numpy(numbers.astype(np.int64)).to(like.device)
