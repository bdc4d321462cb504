"""Trained elements as cells of a matrix: what the kernels of every framework know before there is a tensor.

The gradient of a weight matrix is a product of two factors, and that of a table is a sum of rows. Kernels compute the
block of those rows and columns that have trained elements (`CellBlock`), or single cells of it. The kernel of a
convolution is one such matrix for each of its offsets (`split_by_offset`).
"""

from collections.abc import Sequence
from functools import cached_property

import numpy as np


class CellBlock:
    """The block of the rows and columns of a matrix in which given cells lie.

    >>> import numpy as np
    >>> from elementgrad._train.kernels import CellBlock
    >>> block = CellBlock(np.array([7, 2, 7]), np.array([1, 0, 0]), shape=(9, 2))
    >>> block.rows, block.columns, block.cell, block.has_all_columns
    (array([2, 7]), array([0, 1]), array([3, 0, 2]), True)
    """

    def __init__(self, row: np.ndarray, column: np.ndarray, shape: Sequence[int]):
        self.row, self.column = np.asarray(row, np.int64), np.asarray(column, np.int64)
        self.rows, self.row_of = unique_indices(self.row, shape[0])
        self.columns, self.column_of = unique_indices(self.column, shape[1])
        self.size = len(self.rows) * len(self.columns)
        self.cell = self.row_of * len(self.columns) + self.column_of
        """The position of each cell in the flattened block."""
        # A factor of which all columns are needed is used as it is, without a copy.
        self.has_all_rows = len(self.rows) == shape[0]
        self.has_all_columns = len(self.columns) == shape[1]
        self.copied = len(self.rows) * (not self.has_all_rows) + len(self.columns) * (not self.has_all_columns)
        """The number of columns of the factors that have to be copied."""

    @cached_property
    def is_in_order(self) -> bool:
        """True if the cells are the whole block, row by row."""
        return len(self.cell) == self.size and np.array_equal(self.cell, np.arange(self.size))


def unique_indices(indices: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices that occur, ascending, and for each index its number among them, in linear time.

    >>> import numpy as np
    >>> unique_indices(np.array([7, 2, 7]), size=9)
    (array([2, 7]), array([1, 0, 1]))
    """
    indices = np.asarray(indices, np.int64).reshape(-1)
    if size > 8 * len(indices):  # then sorting is cheaper
        unique, inverse = np.unique(indices, return_inverse=True)
        return unique, inverse.reshape(-1)
    occurs = np.zeros(size, bool)
    occurs[indices] = True
    return np.flatnonzero(occurs), (np.cumsum(occurs) - 1)[indices]


def split_by_offset(offsets: np.ndarray) -> tuple[list[tuple[int, np.ndarray]], np.ndarray]:
    """Return the elements at each offset of a kernel, and the order that brings these lists, joined, back in line.

    >>> import numpy as np
    >>> split_by_offset(np.array([4, 0, 4]))
    ([(0, array([1])), (4, array([0, 2]))], array([1, 0, 2]))
    """
    parts = [(int(offset), np.flatnonzero(offsets == offset)) for offset in np.unique(offsets)]
    return parts, np.concatenate([np.zeros(0, np.int64), *[elements for _, elements in parts]]).argsort()
