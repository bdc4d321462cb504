"""Rows that are looked up in an array with patched elements: those that were hit get the values."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from elementgrad.backends.jax.axes import automatic, taken, written
from elementgrad.backends.jax.program import bind
from elementgrad.backends.jax.training.patched import Patched

Array = jax.Array
DENSE = 2
"""A block of rows and columns that is more than one part in so many of its array is no small one."""


def gathered(equation: Any, operands: Sequence[Any]) -> list[Array] | None:
    """`table[ids]`, `jnp.take(table, ids, axis)`, `table[i, j]`: whole slices at given indices of the other axes."""
    table, indices = operands
    numbers, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]
    if not isinstance(table, Patched) or isinstance(indices, Patched):
        return None
    axes = tuple(sorted(numbers.start_index_map))
    if getattr(numbers, "operand_batching_dims", ()) or axes != tuple(sorted(numbers.collapsed_slice_dims)):
        return None
    block = _Block.of(table, axes, sizes)
    if block is None:
        return None
    (found,) = bind(equation, [table.array, indices])
    batch = [axis for axis in range(found.ndim) if axis not in numbers.offset_dims]
    order = (*batch, *numbers.offset_dims)
    clipped = "clip" in str(equation.params["mode"]).lower()

    def replaced(found: Array, values: Array, indices: Array) -> Array:
        given = [indices[..., numbers.start_index_map.index(axis)] for axis in axes]
        rows = block.replaced(jnp.transpose(found, order), values, given, clipped)
        return jnp.transpose(rows, [order.index(axis) for axis in range(found.ndim)])

    return [automatic(replaced, found, block.values(), jnp.asarray(indices))]


def sliced(equation: Any, operands: Sequence[Any]) -> list[Array] | None:
    """`table[i]` for one index that is computed."""
    table, *starts = operands
    if not isinstance(table, Patched) or any(isinstance(start, Patched) for start in starts):
        return None
    sizes = equation.params["slice_sizes"]
    axes = tuple(axis for axis, size in enumerate(sizes) if size != table.shape[axis])
    block = _Block.of(table, axes, sizes)
    if block is None:
        return None
    (found,) = bind(equation, [table.array, *starts])

    def replaced(found: Array, values: Array, *given: Array) -> Array:
        return block.replaced(found, values, given, clipped=True)

    return [automatic(replaced, found, block.values(), *[jnp.asarray(starts[axis]) for axis in axes])]


class _Block:
    """The rows and columns of a table in which there are patched elements, cut out; rows are what is looked up."""

    def __init__(self, table: Patched, axes: tuple[int, ...]):
        others = [axis for axis in range(len(table.shape)) if axis not in axes]
        self._table = table
        self._sizes = [table.shape[axis] for axis in axes]
        self._width = math.prod(table.shape[axis] for axis in others)
        coords = table.coords
        keys = _ravelled([coords[axis] for axis in axes], self._sizes)
        self.rows, self._row = np.unique(keys, return_inverse=True)
        within = _ravelled([coords[axis] for axis in others], [table.shape[axis] for axis in others])
        within = np.zeros(len(keys), np.int64) if not others else within
        self.columns, self._column = np.unique(within, return_inverse=True)
        self._axes, self._others = axes, others

    @classmethod
    def of(cls, table: Patched, axes: tuple[int, ...], sizes: Sequence[int]) -> "_Block | None":
        """None where slices are not whole, or where the block is no small part of the table."""
        wanted = [1 if axis in axes else size for axis, size in enumerate(table.shape)]
        if not axes or list(sizes) != wanted or not len(table.positions):
            return None
        block = cls(table, axes)
        rows = math.prod(block._sizes)
        large = len(block.rows) * len(block.columns) * DENSE > table.array.size
        return None if large or rows > np.iinfo(np.int32).max else block

    def replaced(self, found: Array, values: Array, given: Sequence[Array], clipped: bool) -> Array:
        """What was looked up, axes of rows first, with the values where rows with patched elements were hit."""
        key, valid = jnp.zeros((), jnp.int32), jnp.ones((), bool)
        for along, size in zip(given, self._sizes, strict=True):
            along = along if along.dtype.itemsize >= 4 else along.astype(jnp.int32)  # may not hold the size
            along = jnp.clip(along, 0, size - 1) if clipped else along
            valid &= (along >= 0) & (along < size)
            key = key * size + along.astype(jnp.int32)
        rows = self.rows.astype(np.int32)
        at = jnp.minimum(jnp.searchsorted(rows, key, method="scan_unrolled"), len(rows) - 1)
        hit = (jnp.asarray(rows)[at] == key) & valid
        flat = found.reshape(*key.shape, self._width)
        new = values[at]
        if len(self.columns) == self._width:
            flat = jnp.where(hit[..., None], new, flat)
        else:
            held = flat[..., self.columns]
            flat = written(flat, flat.ndim - 1, self.columns, jnp.where(hit[..., None], new, held))
        return flat.reshape(found.shape)

    def values(self) -> Array:
        """All elements of the block, the values among them."""
        shape = len(self.rows), len(self.columns)
        if len(self._table.positions) == math.prod(shape):
            return self._table.values[np.lexsort((self._column, self._row))].reshape(shape)
        rows, columns = np.unravel_index(np.arange(math.prod(shape)), shape)
        coords: list[Any] = [None] * len(self._table.shape)
        for axis, along in zip(self._axes, np.unravel_index(self.rows[rows], self._sizes), strict=True):
            coords[axis] = along
        widths = [self._table.shape[axis] for axis in self._others]
        for axis, along in zip(self._others, np.unravel_index(self.columns[columns], widths or (1,)), strict=False):
            coords[axis] = along
        held = taken(self._table.array, np.ravel_multi_index(tuple(coords), self._table.shape)).reshape(shape)
        return held.at[self._row, self._column].set(self._table.values)


def _ravelled(coords: Sequence[np.ndarray], sizes: Sequence[int]) -> np.ndarray:
    return np.ravel_multi_index(tuple(coords), tuple(sizes)) if sizes else np.zeros(0, np.int64)
