"""Patched arrays: an array with a few elements replaced, kept as the array, the positions and the values.

Two kinds of operations on them need no whole array, and are here; `products.py` has the third. Moves (reshape,
transpose, slice, ...) move the positions along. Lookups read rows of the array, and put the values into those rows that
have patched elements.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from elementgrad._backends.jax.program import bind
from elementgrad._backends.jax.sharding import put, put_at, take, with_auto_axes
from elementgrad._train.kernels import CellBlock

Array = jax.Array
DENSE = 2
"""A block of rows and columns is small if it is at most one part in this many of its array."""


@jax.tree_util.register_pytree_node_class
class PatchedArray:
    """An array with a few elements replaced by values. Only the values are ever differentiated."""

    def __init__(self, array: Array, values: Array, positions: np.ndarray, name: str, largest: float):
        self.array = array
        self.values = values
        """One for each position, in the dtype of the array."""
        self.positions = positions
        """Flat positions, unique, in any order."""
        self.name = name
        """The name of the parameter that it comes from."""
        self.largest = largest
        """The largest absolute value of the array; NaN if there is one in it, or if it is not known."""

    def tree_flatten(self) -> tuple[tuple[Array, Array], Any]:
        return (self.array, self.values), (self.positions, self.name, self.largest)

    @classmethod
    def tree_unflatten(cls, aux: Any, arrays: Any) -> "PatchedArray":
        return cls(*arrays, *aux)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return self.array.shape

    @property
    def coords(self) -> tuple[np.ndarray, ...]:
        """One array of coordinates for each axis."""
        return np.unravel_index(self.positions, self.shape) if self.shape else ()

    @property
    def is_finite(self) -> bool:
        """True if all of the array is known to be finite, in the dtype that it was cast to."""
        return self.largest <= float(jnp.finfo(self.array.dtype).max)

    def whole(self) -> Array:
        """Return the array with the values in it: a dense copy, whose gradient is dense as well."""
        return put(self.array, self.positions, self.values)

    def with_values(self, values: Array) -> "PatchedArray":
        return PatchedArray(self.array, values, self.positions, self.name, self.largest)

    def move(self, array: Array, positions: np.ndarray, chosen: np.ndarray | None = None) -> "PatchedArray":
        """Return a patched array with the same values, or some of them, at other positions of another array."""
        values = self.values if chosen is None else self.values[chosen]
        return PatchedArray(array, values.astype(array.dtype), positions, self.name, self.largest)


def _flat(coords: Sequence[np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    return np.ravel_multi_index(tuple(coords), shape) if shape else np.zeros(len(coords[0]) if coords else 1, np.int64)


def _transpose(x: PatchedArray, params: dict[str, Any], array: Array) -> PatchedArray | None:
    coords = x.coords
    return x.move(array, _flat([coords[axis] for axis in params["permutation"]], array.shape))


def _reverse(x: PatchedArray, params: dict[str, Any], array: Array) -> PatchedArray | None:
    coords = [
        size - 1 - along if axis in params["dimensions"] else along
        for axis, (along, size) in enumerate(zip(x.coords, x.shape, strict=True))
    ]
    return x.move(array, _flat(coords, array.shape))


def _keep_order(x: PatchedArray, params: dict[str, Any], array: Array) -> PatchedArray | None:
    # A broadcast to more elements is no move.
    return x.move(array, x.positions) if array.size == x.array.size else None


def _reshard(x: PatchedArray, params: dict[str, Any], array: Array) -> PatchedArray | None:
    # The values go to every device of the new mesh.
    everywhere = NamedSharding(params["dst_sharding"].mesh, PartitionSpec())
    values = jax.sharding.reshard(x.values, everywhere)
    return PatchedArray(array, values, x.positions, x.name, x.largest)


def _slice(x: PatchedArray, params: dict[str, Any], array: Array) -> PatchedArray | None:
    steps = params["strides"] or (1,) * len(x.shape)
    inside = np.ones(len(x.positions), bool)
    coords = []
    for along, start, end, step in zip(x.coords, params["start_indices"], params["limit_indices"], steps, strict=True):
        inside &= (along >= start) & (along < end) & ((along - start) % step == 0)
        coords.append((along - start) // step)
    chosen = np.flatnonzero(inside)
    return x.move(array, _flat([along[chosen] for along in coords], array.shape), chosen)


Move = Callable[[PatchedArray, dict[str, Any], Array], PatchedArray | None]
MOVES: dict[str, Move] = {
    "reshape": _keep_order,
    "squeeze": _keep_order,
    "expand_dims": _keep_order,
    "broadcast_in_dim": _keep_order,
    "convert_element_type": _keep_order,
    "copy": _keep_order,
    "copy_p": _keep_order,
    "sharding_constraint": _keep_order,
    "pvary": _keep_order,
    "reshard": _reshard,
    "transpose": _transpose,
    "rev": _reverse,
    "slice": _slice,
}
"""Operations that only move elements; they return None for an equation that does more."""


def split(x: PatchedArray, params: dict[str, Any], arrays: Sequence[Array]) -> list[PatchedArray]:
    """Split a patched array along one axis, given the plain parts."""
    axis, start, results = params["axis"], 0, []
    for array in arrays:
        along = x.coords[axis]
        chosen = np.flatnonzero((along >= start) & (along < start + array.shape[axis]))
        coords = [other[chosen] - (start if number == axis else 0) for number, other in enumerate(x.coords)]
        results.append(x.move(array, _flat(coords, array.shape), chosen))
        start += array.shape[axis]
    return results


def gather(equation: Any, operands: Sequence[Any]) -> list[Array] | None:
    """Compute `table[ids]`, `jnp.take(table, ids, axis)`, `table[i, j]`: whole slices at indices of other axes."""
    table, indices = operands
    numbers, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]
    if not isinstance(table, PatchedArray) or isinstance(indices, PatchedArray):
        return None
    axes = tuple(sorted(numbers.start_index_map))
    if getattr(numbers, "operand_batching_dims", ()) or axes != tuple(sorted(numbers.collapsed_slice_dims)):
        return None
    block = _Block.of(table, axes, sizes)
    if block is None:
        return None
    (plain,) = bind(equation, [table.array, indices])
    batch = [axis for axis in range(plain.ndim) if axis not in numbers.offset_dims]
    order = (*batch, *numbers.offset_dims)
    clipped = "clip" in str(equation.params["mode"]).lower()

    def replace(plain: Array, values: Array, indices: Array) -> Array:
        along = [indices[..., numbers.start_index_map.index(axis)] for axis in axes]
        rows = block.replace(jnp.transpose(plain, order), values, along, clipped)
        return jnp.transpose(rows, [order.index(axis) for axis in range(plain.ndim)])

    return [with_auto_axes(replace, plain, block.values(), jnp.asarray(indices))]


def dynamic_slice(equation: Any, operands: Sequence[Any]) -> list[Array] | None:
    """Compute `table[i]` for an index that is not known in advance."""
    table, *starts = operands
    if not isinstance(table, PatchedArray) or any(isinstance(start, PatchedArray) for start in starts):
        return None
    sizes = equation.params["slice_sizes"]
    axes = tuple(axis for axis, size in enumerate(sizes) if size != table.shape[axis])
    block = _Block.of(table, axes, sizes)
    if block is None:
        return None
    (plain,) = bind(equation, [table.array, *starts])

    def replace(plain: Array, values: Array, *indices: Array) -> Array:
        return block.replace(plain, values, indices, clipped=True)

    return [with_auto_axes(replace, plain, block.values(), *[jnp.asarray(starts[axis]) for axis in axes])]


class _Block:
    """The rows and columns of a table that have patched elements; rows are what is looked up."""

    def __init__(self, table: PatchedArray, axes: tuple[int, ...]):
        others = [axis for axis in range(len(table.shape)) if axis not in axes]
        self._table, self._axes, self._others = table, axes, others
        self._sizes, self._widths = ([table.shape[axis] for axis in some] for some in (axes, others))
        coords = table.coords
        row = np.ravel_multi_index([coords[axis] for axis in axes], self._sizes)
        column = np.ravel_multi_index([coords[axis] for axis in others], self._widths) if others else 0 * row
        self.cells = CellBlock(row, column, (math.prod(self._sizes), math.prod(self._widths)))

    @classmethod
    def of(cls, table: PatchedArray, axes: tuple[int, ...], sizes: Sequence[int]) -> "_Block | None":
        """Return the block of a table; None if slices are not whole rows, or if the block is large."""
        row_sizes = [1 if axis in axes else size for axis, size in enumerate(table.shape)]
        if not axes or list(sizes) != row_sizes or not len(table.positions):
            return None
        block = cls(table, axes)
        rows = math.prod(block._sizes)
        large = block.cells.size * DENSE > table.array.size
        return None if large or rows > np.iinfo(np.int32).max else block

    def replace(self, plain: Array, values: Array, indices: Sequence[Array], clipped: bool) -> Array:
        """Put the values into looked up rows that have patched elements; the axes of the lookup come first."""
        key, valid = jnp.zeros((), jnp.int32), jnp.ones((), bool)
        for along, size in zip(indices, self._sizes, strict=True):
            along = along if along.dtype.itemsize >= 4 else along.astype(jnp.int32)  # may not hold the size
            along = jnp.clip(along, 0, size - 1) if clipped else along
            valid &= (along >= 0) & (along < size)
            key = key * size + along.astype(jnp.int32)
        rows, columns = self.cells.rows.astype(np.int32), self.cells.columns
        at = jnp.minimum(jnp.searchsorted(rows, key, method="scan_unrolled"), len(rows) - 1)
        hit = (jnp.asarray(rows)[at] == key) & valid
        flat = plain.reshape(*key.shape, math.prod(self._widths))
        new = values[at]
        if self.cells.has_all_columns:
            flat = jnp.where(hit[..., None], new, flat)
        else:
            old = flat[..., columns]
            flat = put_at(flat, (..., columns), jnp.where(hit[..., None], new, old), flat.ndim - 1)
        return flat.reshape(plain.shape)

    def values(self) -> Array:
        """Return all elements of the block, with the values in them."""
        cells = self.cells
        shape = len(cells.rows), len(cells.columns)
        if len(cells.cell) == cells.size:
            return self._table.values[np.argsort(cells.cell)].reshape(shape)
        rows, columns = np.unravel_index(np.arange(cells.size), shape)
        coords: list[Any] = [None] * len(self._table.shape)
        for axis, along in zip(self._axes, np.unravel_index(cells.rows[rows], self._sizes), strict=True):
            coords[axis] = along
        for axis, along in zip(
            self._others, np.unravel_index(cells.columns[columns], self._widths or (1,)), strict=False
        ):
            coords[axis] = along
        old = take(self._table.array, np.ravel_multi_index(tuple(coords), self._table.shape)).reshape(shape)
        return old.at[cells.row_of, cells.column_of].set(self._table.values)
