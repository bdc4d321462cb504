"""Some entries of the gradient of a table of which rows were looked up."""

import numpy as np
import torch

from elementgrad.backends.torch.training.products import connected, index

Tensor = torch.Tensor
ROOM = 1 << 16
"""Numbers that are summed without asking first which rows occur."""


class Lookup:
    """Entries (row, column) of what `index_add_` of gradients to the rows looked up would give.

    >>> import torch
    >>> from elementgrad.backends.torch.training.lookups import Lookup
    >>> lookup = Lookup([0, 7], [1, 0], columns=2, device="cpu")
    >>> lookup(torch.tensor([7, 3, 7]), torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]))
    tensor([0., 6.])
    """

    def __init__(self, row: "np.ndarray", column: "np.ndarray", columns: int, device: torch.device | str):
        rows, row_of = np.unique(np.asarray(row, dtype=np.int64), return_inverse=True)
        some, column_of = np.unique(np.asarray(column, dtype=np.int64), return_inverse=True)
        self._rows, self._row_of = index(rows, device), index(row_of, device)
        self._columns = None if len(some) == columns else index(some, device)
        self._column_of = index(column_of, device)
        cell = row_of.reshape(-1) * len(some) + column_of.reshape(-1)
        self._cell = None if np.array_equal(cell, np.arange(len(rows) * len(some))) else index(cell, device)
        self._width = len(some)
        self._alone = (int(rows[0]), int(some[0])) if len(row_of) == 1 else None
        self._crowded = len(rows) * len(some) > ROOM + 4 * len(row_of)

    def __call__(self, tokens: Tensor, gradient: Tensor) -> Tensor:
        """The entries, for n tokens and the gradients of the n rows that they looked up."""
        if not len(self._row_of):
            return gradient.new_zeros(0)
        count = len(self._rows)
        if self._alone is not None:
            row, column = self._alone
            return gradient.select(1, column).masked_fill(tokens != row, 0).sum(0, keepdim=True)
        gradient = gradient if self._columns is None else gradient.index_select(1, self._columns)
        if count == 1:
            sums = gradient.masked_fill((tokens != self._rows).unsqueeze(1), 0).sum(0)
        else:
            near = torch.searchsorted(self._rows, tokens).clamp(max=count - 1)
            hit = self._rows.index_select(0, near) == tokens
            if self._crowded and not torch.compiler.is_compiling():
                return self._of_present(near[hit], gradient[hit])
            place = near.where(hit, count)
            sums = gradient.new_zeros(count + 1, self._width).index_add(0, place, gradient)[:count].view(-1)
        return sums if self._cell is None else sums.index_select(0, self._cell)

    def connected(self, table: Tensor, values: Tensor) -> Tensor:
        """The table, connected with the values of its elements."""
        column = self._column_of if self._columns is None else self._columns.index_select(0, self._column_of)
        return connected(table, self._rows.index_select(0, self._row_of) * table.shape[1] + column, values)

    def _of_present(self, hits: Tensor, gradient: Tensor) -> Tensor:
        """Sums for the rows alone that occur: far fewer than all that were named."""
        present, place = hits.unique(return_inverse=True)
        sums = gradient.new_zeros(len(present) + 1, self._width).index_add(0, place, gradient)
        at = torch.full_like(self._rows, len(present)).index_copy_(0, present, torch.arange(len(present)).to(present))
        return sums.view(-1).index_select(0, at.index_select(0, self._row_of) * self._width + self._column_of)
