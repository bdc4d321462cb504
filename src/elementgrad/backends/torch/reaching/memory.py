"""What is known of each tensor while a sweep is watched, kept by the memory that it lives in.

Views share memory, so they need no rules, and what is written in place is seen by all of them.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from elementgrad.backends.linear import UnsupportedError
from elementgrad.sparsity.reach import Ids, Reach

Tensor = torch.Tensor
TIDY = 256
"""After so many new memories those that are gone are forgotten."""


@dataclass
class Cell:
    """One piece of memory."""

    weak: StorageWeakRef
    """Kept so that no other memory gets the same address."""
    unit: int
    """The bytes of one id: those of a real number."""
    ids: np.ndarray | None = None
    """The set that each number in it depends on; None if none does."""
    varies: bool = False
    """Whether it depends on the point of the derivative, so that its values are not known in general."""


class Memory:
    """The ids of tensors, and which of them vary."""

    def __init__(self, reach: Reach):
        self.reach = reach
        self._cells: dict[int, Cell] = {}
        self._limit = TIDY

    def ids(self, x: Tensor) -> Ids | None:
        """The sets that the elements of a tensor depend on; None if it does not depend on the seed at all."""
        cell = self._cells.get(x.untyped_storage()._cdata)
        if cell is None or cell.ids is None:
            return None
        view = _view(cell, x)
        ids = view[..., 0] if view.shape[-1] == 1 else self.reach.over(view, [-1])  # of a complex number both parts
        return ids if ids.any() else None

    def varies(self, x: Tensor) -> bool:
        """Whether the values of a tensor depend on the point of the derivative."""
        cell = self._cells.get(x.untyped_storage()._cdata)
        return cell is not None and cell.varies

    def vary(self, x: Tensor) -> None:
        """Say so."""
        self._cell(x).varies = True

    def write(self, x: Tensor, ids: Ids | None) -> None:
        """The elements of a tensor depend on these sets from now on."""
        cell = self._cells.get(x.untyped_storage()._cdata)
        if ids is None and (cell is None or cell.ids is None):
            return
        cell = self._cell(x)
        if cell.ids is None:
            cell.ids = np.zeros(-(-x.untyped_storage().nbytes() // cell.unit), dtype=np.int64)
        _view(cell, x)[...] = 0 if ids is None else np.broadcast_to(ids, tuple(x.shape))[..., None]

    def shares(self, x: Tensor, others: list[Tensor]) -> bool:
        """Whether a tensor lives in the memory of another."""
        where = x.untyped_storage()._cdata
        return any(where == other.untyped_storage()._cdata for other in others)

    def tidy(self) -> None:
        """Forget the sets that no tensor depends on any more."""
        self._forget()
        self.reach.tidy([cell.ids for cell in self._cells.values() if cell.ids is not None])

    def _forget(self) -> None:
        self._cells = {key: cell for key, cell in self._cells.items() if not cell.weak.expired()}
        self._limit = 2 * len(self._cells) + TIDY

    def _cell(self, x: Tensor) -> Cell:
        storage = x.untyped_storage()
        cell = self._cells.get(storage._cdata)
        if cell is None:
            if len(self._cells) >= self._limit:
                self._forget()
            cell = Cell(StorageWeakRef(storage), _real_size(x))
            self._cells[storage._cdata] = cell
        return cell


def _real_size(x: Tensor) -> int:
    return x.element_size() // 2 if x.is_complex() else x.element_size()


def _view(cell: Cell, x: Tensor) -> np.ndarray:
    """The ids of a tensor's elements in its memory, with an axis behind for the parts of complex numbers."""
    if _real_size(x) != cell.unit:
        raise UnsupportedError("the bytes of one dtype are taken for those of another")
    parts, ids = x.element_size() // cell.unit, cell.ids
    assert ids is not None
    strides = [step * parts * ids.itemsize for step in x.stride()]
    start: Any = ids[x.storage_offset() * parts :]
    return np.lib.stride_tricks.as_strided(start, (*x.shape, parts), (*strides, ids.itemsize))
