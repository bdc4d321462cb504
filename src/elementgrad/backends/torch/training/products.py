"""Some entries of the product `left.T @ right`, by whichever way is cheapest for those entries."""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from elementgrad.cleanup import entered

Tensor = torch.Tensor

# Costs per row of the factors, in nanoseconds, in float32 on a CPU: rough, and only their ratios count (`make bench`
# shows the outcome). The first and the third were measured on one core, the others on two.
GATHERED = 3.8  # one entry: two columns read, multiplied and summed
MULTIPLIED = 0.0105  # one entry of a matrix product
SELECTED = 2.2  # one column copied out of a factor
TRANSPOSED = 2.3  # one column turned into a row
SAMPLED = 0.12  # one entry of a sampled product of such rows
CELLS, FAR_CELLS = 1 << 18, 1 << 24
"""How many numbers of a factor are dealt with at a time, so that they stay near; elsewhere than on a CPU more."""


class Product:
    """Entries (row, column) of `left.T @ right`, where left has `rows` columns and right has `columns`.

    >>> import torch
    >>> from elementgrad.backends.torch.training.products import Product
    >>> product = Product([0, 1], [1, 1], rows=2, columns=2, device="cpu")
    >>> left, right = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[5.0, 6.0], [7.0, 8.0]])
    >>> product(left, right)
    tensor([30., 44.])
    """

    def __init__(self, row: "np.ndarray", column: "np.ndarray", rows: int, columns: int, device: torch.device | str):
        row, column = np.asarray(row, dtype=np.int64), np.asarray(column, dtype=np.int64)
        self._size = rows, columns
        self._row, self._column = index(row, device), index(column, device)
        some_rows, row_of = np.unique(row, return_inverse=True)
        some_columns, column_of = np.unique(column, return_inverse=True)
        # All columns in their order are the factor itself, without a copy.
        self._rows = None if len(some_rows) == rows else index(some_rows, device)
        self._columns = None if len(some_columns) == columns else index(some_columns, device)
        self._cell = index(row_of * len(some_columns) + column_of, device)
        self._every = len(row) == rows * columns and bool((self._cell.numpy(force=True) == np.arange(len(row))).all())
        self._csr: Tensor | None = None
        copied = sum(len(some) for some, all_of in ((some_rows, rows), (some_columns, columns)) if len(some) < all_of)
        self.costs = {
            "gather": GATHERED * len(row),
            "block": MULTIPLIED * len(some_rows) * len(some_columns) + SELECTED * copied,
            "sample": TRANSPOSED * (rows + columns) + SAMPLED * len(row),
        }
        self._differentiable = self._cheapest("gather", "block")
        self._way = self._cheapest("gather", "block", "sample")

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_csr": None}

    @property
    def cost(self) -> float:
        """What a row of the factors costs, in nanoseconds."""
        return min(self.costs.values())

    def __call__(self, left: Tensor, right: Tensor) -> Tensor:
        """The entries, for factors of shape (n, rows) and (n, columns)."""
        return self._way(left, right) if self._sampling(left, right) else self._differentiable(left, right)

    def connected(self, weight: Tensor, values: Tensor) -> Tensor:
        """The weight, connected with the values of its elements."""
        return connected(weight, self._row * self._size[1] + self._column, values)

    def _cheapest(self, *ways: str) -> Callable[[Tensor, Tensor], Tensor]:
        return getattr(self, f"_{min(ways, key=self.costs.__getitem__)}")

    def _sampling(self, left: Tensor, right: Tensor) -> bool:
        """Whether a sampled product can be had: no compiler knows it, and nothing differentiates it again here."""
        return (
            not torch.compiler.is_compiling()
            and not (torch.is_grad_enabled() and (left.requires_grad or right.requires_grad))
            and left.device.type == "cpu"
            and left.dtype == right.dtype
            and left.dtype in (torch.float32, torch.float64)
        )

    def _gather(self, left: Tensor, right: Tensor) -> Tensor:
        cells = CELLS if left.device.type == "cpu" else FAR_CELLS
        length = max(16, cells // max(1, len(self._row)))
        if torch.compiler.is_compiling() or len(left) <= length:
            return self._gathered(left, right)
        first, *others = zip(left.split(length), right.split(length), strict=True)
        found = self._gathered(*first)
        for piece in others:
            found = found + self._gathered(*piece)
        return found

    def _gathered(self, left: Tensor, right: Tensor) -> Tensor:
        return (left.index_select(1, self._row) * right.index_select(1, self._column)).sum(0)

    def _block(self, left: Tensor, right: Tensor) -> Tensor:
        left = left if self._rows is None else left.index_select(1, self._rows)
        right = right if self._columns is None else right.index_select(1, self._columns)
        block = (left.t() @ right).reshape(-1)
        return block if self._every else block.index_select(0, self._cell)

    def _sample(self, left: Tensor, right: Tensor) -> Tensor:
        with entered(warnings.catch_warnings()):
            warnings.simplefilter("ignore")  # that this layout is in beta, once per process
            pattern, order = self._pattern(left.dtype)
            length = max(64, CELLS // sum(self._size))
            first, *others = zip(left.split(length), right.split(length), strict=True)
            sums = torch.sparse.sampled_addmm(pattern, first[0].t(), first[1], beta=0)
            for piece in others:
                torch.sparse.sampled_addmm(sums, piece[0].t(), piece[1], out=sums)
            found = sums.values()
        return found if order is None else torch.empty_like(found).index_copy_(0, order, found)

    def _pattern(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        if self._csr is None or self._csr.dtype != dtype:
            rows, columns = self._size
            flat = self._row * columns + self._column
            order = flat.argsort()
            self._order = None if bool((flat.diff() > 0).all()) else order
            ends = torch.bincount(self._row, minlength=rows).cumsum(0)
            starts = torch.cat([ends.new_zeros(1), ends])
            zeros = torch.zeros(len(flat), dtype=dtype)
            self._csr = torch.sparse_csr_tensor(
                starts, self._column[order], zeros, (rows, columns), check_invariants=False
            )
        return self._csr, self._order


def again() -> bool:
    """Whether what is computed going back is to be differentiated once more."""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


def connected(weight: Tensor, positions: Tensor, values: Tensor) -> Tensor:
    """A weight that holds values, as a step by which those values hear of what is computed with it."""
    change = (values - values.detach()).to(weight.dtype)
    return weight.reshape(-1).index_add(0, positions, change).view(weight.shape)


def index(array: np.ndarray, device: torch.device | str) -> Tensor:
    """Positions as a tensor of their own."""
    return torch.from_numpy(np.array(array, dtype=np.int64).reshape(-1)).to(device)
