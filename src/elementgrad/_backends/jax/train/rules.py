"""An array with a few elements replaced, kept apart: the array as it was, where the elements are, their values.

Rows that are looked up in an array with patched elements: those that were hit get the values.

Products with an array of which a few elements are patched: the plain product, and what they touch computed apart.

Subtracting an old number from a sum that it is part of leaves its rounding error behind, which may be larger than all
that remains. So the touched part is computed without it, in one of two ways, each as exact as the product with the
whole array at any ratio of old to new:

- columns: the columns of the result that patched elements lead to are computed again, from those columns of the array
  with the values in them;
- rows: whatever would be multiplied with rows that have patched elements is zero in the plain product, and the product
  with these rows, with the values in them, is added.

Either reads a few columns or rows of the array, whichever are fewer elements. Zero times infinity is no zero: columns
with an element that was not finite spoil the gradient of what they are multiplied with, rows with one the result.
Where that is known the whole array is used. Where the array is traced, so that it cannot be, both ways are taken one
after the other if they are cheap, which leaves nothing of such an element.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from elementgrad._backends.jax.program import bind
from elementgrad._backends.jax.sharding import IN_BOUNDS, put, take, with_auto_axes, write_along

Array = jax.Array


@jax.tree_util.register_pytree_node_class
class PatchedArray:
    """An array that stands in a program for another one, of which a few elements are others.

    The values are the only part that is ever differentiated; the array is what the user's parameters hold.
    """

    def __init__(self, array: Array, values: Array, positions: np.ndarray, name: str, largest: float):
        self.array = array
        self.values = values
        """In the dtype of the array, one for each position."""
        self.positions = positions
        """Flat, in the shape of the array, none twice, in any order."""
        self.name = name
        """What the parameter is called that it comes from."""
        self.largest = largest
        """The size of the largest number that the values replace, where it can be known; NaN if one of them is NaN, and
        infinity if any number of the array is not finite."""

    def tree_flatten(self) -> tuple[tuple[Array, Array], Any]:
        """As JAX asks for it."""
        return (self.array, self.values), (self.positions, self.name, self.largest)

    @classmethod
    def tree_unflatten(cls, kept: Any, arrays: Any) -> "PatchedArray":
        """As JAX asks for it."""
        return cls(*arrays, *kept)

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the array."""
        return self.array.shape

    @property
    def coords(self) -> tuple[np.ndarray, ...]:
        """One array of coordinates for each axis."""
        return np.unravel_index(self.positions, self.shape) if self.shape else ()

    @property
    def finite(self) -> bool:
        """Whether the array is finite, and what the values replace also in a dtype that it was cast to."""
        return self.largest <= float(jnp.finfo(self.array.dtype).max)

    def whole(self) -> Array:
        """The array with the values in it: a dense copy, whose gradient is dense as well."""
        return put(self.array, self.positions, self.values)

    def moved_at_all(self) -> Array:
        """For each element whether its value differs from what the array holds."""
        return self.values != take(self.array, self.positions)

    def moved(self, array: Array, positions: np.ndarray, chosen: np.ndarray | None = None) -> "PatchedArray":
        """The same elements, or some of them, elsewhere in an array that was made by moving elements."""
        values = self.values if chosen is None else self.values[chosen]
        return PatchedArray(array, values.astype(array.dtype), positions, self.name, self.largest)


def _flat(coords: Sequence[np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    return np.ravel_multi_index(tuple(coords), shape) if shape else np.zeros(len(coords[0]) if coords else 1, np.int64)


def _transposed(x: PatchedArray, params: dict[str, Any], array: Array) -> PatchedArray | None:
    coords = x.coords
    return x.moved(array, _flat([coords[axis] for axis in params["permutation"]], array.shape))


def _reversed(x: PatchedArray, params: dict[str, Any], array: Array) -> PatchedArray | None:
    coords = [
        size - 1 - along if axis in params["dimensions"] else along
        for axis, (along, size) in enumerate(zip(x.coords, x.shape, strict=True))
    ]
    return x.moved(array, _flat(coords, array.shape))


def _kept(x: PatchedArray, params: dict[str, Any], array: Array) -> PatchedArray | None:
    """Elements in the order in which they were, unless there are more than before."""
    return x.moved(array, x.positions) if array.size == x.array.size else None


def _resharded(x: PatchedArray, params: dict[str, Any], array: Array) -> PatchedArray | None:
    """Elsewhere, or on the same mesh with its axes typed in another way; the values go to all of it."""
    everywhere = NamedSharding(params["dst_sharding"].mesh, PartitionSpec())
    values = jax.sharding.reshard(x.values, everywhere)
    return PatchedArray(array, values, x.positions, x.name, x.largest)


def _sliced(x: PatchedArray, params: dict[str, Any], array: Array) -> PatchedArray | None:
    steps = params["strides"] or (1,) * len(x.shape)
    inside = np.ones(len(x.positions), bool)
    coords = []
    for along, start, end, step in zip(x.coords, params["start_indices"], params["limit_indices"], steps, strict=True):
        inside &= (along >= start) & (along < end) & ((along - start) % step == 0)
        coords.append((along - start) // step)
    chosen = np.flatnonzero(inside)
    return x.moved(array, _flat([along[chosen] for along in coords], array.shape), chosen)


Move = Callable[[PatchedArray, dict[str, Any], Array], PatchedArray | None]
MOVES: dict[str, Move] = {
    "reshape": _kept,
    "squeeze": _kept,
    "expand_dims": _kept,
    "broadcast_in_dim": _kept,
    "convert_element_type": _kept,
    "copy": _kept,
    "copy_p": _kept,
    "sharding_constraint": _kept,
    "pvary": _kept,
    "reshard": _resharded,
    "transpose": _transposed,
    "rev": _reversed,
    "slice": _sliced,
}
"""Operations that only move elements, and where those that are patched come to lie; None for what they cannot tell."""


def split(x: PatchedArray, params: dict[str, Any], arrays: Sequence[Array]) -> list[PatchedArray]:
    """The parts of an array along one axis."""
    axis, start, parts = params["axis"], 0, []
    for array in arrays:
        along = x.coords[axis]
        chosen = np.flatnonzero((along >= start) & (along < start + array.shape[axis]))
        coords = [other[chosen] - (start if number == axis else 0) for number, other in enumerate(x.coords)]
        parts.append(x.moved(array, _flat(coords, array.shape), chosen))
        start += array.shape[axis]
    return parts


DENSE = 2
"""A block of rows and columns that is more than one part in so many of its array is no small one."""


def gathered(equation: Any, operands: Sequence[Any]) -> list[Array] | None:
    """`table[ids]`, `jnp.take(table, ids, axis)`, `table[i, j]`: whole slices at given indices of the other axes."""
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
    (found,) = bind(equation, [table.array, indices])
    batch = [axis for axis in range(found.ndim) if axis not in numbers.offset_dims]
    order = (*batch, *numbers.offset_dims)
    clipped = "clip" in str(equation.params["mode"]).lower()

    def replaced(found: Array, values: Array, indices: Array) -> Array:
        given = [indices[..., numbers.start_index_map.index(axis)] for axis in axes]
        rows = block.replaced(jnp.transpose(found, order), values, given, clipped)
        return jnp.transpose(rows, [order.index(axis) for axis in range(found.ndim)])

    return [with_auto_axes(replaced, found, block.values(), jnp.asarray(indices))]


def sliced(equation: Any, operands: Sequence[Any]) -> list[Array] | None:
    """`table[i]` for one index that is computed."""
    table, *starts = operands
    if not isinstance(table, PatchedArray) or any(isinstance(start, PatchedArray) for start in starts):
        return None
    sizes = equation.params["slice_sizes"]
    axes = tuple(axis for axis, size in enumerate(sizes) if size != table.shape[axis])
    block = _Block.of(table, axes, sizes)
    if block is None:
        return None
    (found,) = bind(equation, [table.array, *starts])

    def replaced(found: Array, values: Array, *given: Array) -> Array:
        return block.replaced(found, values, given, clipped=True)

    return [with_auto_axes(replaced, found, block.values(), *[jnp.asarray(starts[axis]) for axis in axes])]


class _Block:
    """The rows and columns of a table in which there are patched elements, cut out; rows are what is looked up."""

    def __init__(self, table: PatchedArray, axes: tuple[int, ...]):
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
    def of(cls, table: PatchedArray, axes: tuple[int, ...], sizes: Sequence[int]) -> "_Block | None":
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
            flat = write_along(flat, flat.ndim - 1, self.columns, jnp.where(hit[..., None], new, held))
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
        held = take(self._table.array, np.ravel_multi_index(tuple(coords), self._table.shape)).reshape(shape)
        return held.at[self._row, self._column].set(self._table.values)


def _ravelled(coords: Sequence[np.ndarray], sizes: Sequence[int]) -> np.ndarray:
    return np.ravel_multi_index(tuple(coords), tuple(sizes)) if sizes else np.zeros(0, np.int64)


CHEAP = 8
"""Rows and columns that are no more than one part in so many of the array may both be computed apart."""
FEW = 64
"""Up to so many indices of an axis are written to one by one."""


def product(equation: Any, operands: Sequence[Any]) -> list[Array] | None:
    """`x @ w`, `w @ x`, einsum and the like, where each axis of w is either summed over or one of the result's."""
    side = next(number for number, operand in enumerate(operands) if isinstance(operand, PatchedArray))
    w, x = operands[side], operands[1 - side]
    x = x.whole() if isinstance(x, PatchedArray) else jnp.asarray(x)
    params = equation.params
    contracted, batched = params["dimension_numbers"]
    if batched[0]:
        return None
    mine, others = tuple(contracted[side]), tuple(contracted[1 - side])
    free = tuple(axis for axis in range(len(w.shape)) if axis not in mine)
    left = [axis for axis in range(x.ndim) if axis not in others]
    outer = [x.shape[axis] for axis in left]

    def multiply(x: Array, x_axes: Sequence[int], w: Array, w_axes: Sequence[int]) -> Array:
        arrays, axes = [(w, x), (x, w)][side], [(w_axes, x_axes), (x_axes, w_axes)][side]
        more = {name: params[name] for name in ("precision", "preferred_element_type")}
        return jax.lax.dot_general(*arrays, (axes, ((), ())), **more)

    def columns(cut: _PatchedSlice, base: Array, x: Array, part: Array, moved: Array) -> Array:
        new = multiply(x, others, part, [cut.axis_of(axis) for axis in mine])
        shape = (*outer, cut.total) if side == 1 else (cut.total, *outer)
        axis = len(outer) if side == 1 else 0
        return _replaced(base.reshape(shape), new, cut.touched(moved), cut.chosen, axis).reshape(base.shape)

    def rows(cut: _PatchedSlice, base: Array, x: Array, part: Array, moved: Array) -> Array:
        matrix = jnp.transpose(x, (*left, *others)).reshape(*outer, cut.total)
        met = jnp.take(matrix, cut.chosen, axis=len(outer), mode="clip")
        added = multiply(met, [len(outer)], part, [cut.axis])
        return base + _only(added.reshape(base.shape), moved.any())

    def met_by(cut: _PatchedSlice) -> np.ndarray:
        inside = np.isin(np.arange(cut.total), cut.chosen).reshape([w.shape[axis] for axis in mine])
        return np.expand_dims(np.transpose(inside, np.argsort(others)), left)

    plain = partial(_bound, equation, side)
    return _patched_product(w, x, (mine, free), plain, (columns, rows), met_by)


def correlation(equation: Any, operands: Sequence[Any]) -> list[Array] | None:
    """A convolution whose kernel is patched: its channels in are what rows are in a matrix, those out are columns."""
    x, w = operands
    params = equation.params
    if not isinstance(w, PatchedArray) or isinstance(x, PatchedArray):
        return None
    if params["feature_group_count"] != 1 or params["batch_group_count"] != 1:
        return None
    numbers = params["dimension_numbers"]
    (x_axis, axis), (out_axis, in_axis) = (numbers.lhs_spec[1], numbers.out_spec[1]), numbers.rhs_spec[:2]

    def columns(cut: _PatchedSlice, base: Array, x: Array, part: Array, moved: Array) -> Array:
        (new,) = bind(equation, [x, part])
        return _replaced(base, new, cut.touched(moved), cut.chosen, axis)

    def rows(cut: _PatchedSlice, base: Array, x: Array, part: Array, moved: Array) -> Array:
        (added,) = bind(equation, [jnp.take(x, cut.chosen, axis=x_axis, mode="clip"), part])
        return base + _only(added, moved.any())

    def met_by(cut: _PatchedSlice) -> np.ndarray:
        inside = np.isin(np.arange(cut.total), cut.chosen)
        return np.expand_dims(inside, [number for number in range(x.ndim) if number != x_axis])

    plain = partial(_bound, equation, 1)
    return _patched_product(w, x, ((in_axis,), (out_axis,)), plain, (columns, rows), met_by)


def _patched_product(
    w: PatchedArray,
    x: Array,
    axes: tuple[Sequence[int], Sequence[int]],
    plain: Callable[[Array, Array], Array],
    ways: tuple[Callable[..., Array], Callable[..., Array]],
    met_by: Callable[["_PatchedSlice"], np.ndarray],
) -> list[Array] | None:
    """The product by rows or by columns, whose axes are `axes`, as two `ways` compute it; None if neither are few."""
    if not w.finite or not len(w.positions):
        return None
    by_rows, by_columns = cuts = [_PatchedSlice(w, along) for along in axes]
    cut = min(by_columns, by_rows, key=lambda cut: cut.size)
    if DENSE * cut.size > w.array.size:
        return None
    if not isinstance(w.array, jax.core.Tracer) or CHEAP * sum(cut.size for cut in cuts) > w.array.size:
        cuts = [cut]
    moved = w.moved_at_all()
    met = x
    if by_rows in cuts:
        inside = met_by(by_rows)
        met = with_auto_axes(lambda x, moved: _without(x, moved.any(), inside), x, moved)

    def computed(base: Array, x: Array, array: Array, values: Array, moved: Array) -> Array:
        for cut in cuts:
            base = ways[cut is by_rows](cut, base, x, cut.part(array, values), moved)
        return base

    return [with_auto_axes(computed, plain(met, w.array), x, w.array, w.values, moved)]


def _bound(equation: Any, side: int, x: Array, w: Array) -> Array:
    return bind(equation, [(w, x), (x, w)][side])[0]


class _PatchedSlice:
    """The part of a patched array at those indices of some axes, taken together, that have patched elements."""

    def __init__(self, w: PatchedArray, axes: Sequence[int]):
        axes, coords, shape = sorted(axes), w.coords, w.shape
        sizes = [shape[axis] for axis in axes]
        self.total = math.prod(sizes)
        along = np.ravel_multi_index([coords[axis] for axis in axes], sizes) if axes else np.zeros_like(w.positions)
        self.chosen, self._at = np.unique(along, return_inverse=True)
        """The indices, and for each element which of them it is at."""
        self._kept = [axis for axis in range(len(shape)) if axis not in axes]
        beside = axes == list(range(axes[0], axes[0] + len(axes))) if axes else True
        self.axis = axes[0] if axes and beside else 0
        """Where the indices lie in the part: in place of axes that are neighbours, or first, as in NumPy."""
        index = dict(zip(axes, np.unravel_index(self.chosen, sizes), strict=True)) if axes else {}
        self._index = tuple([index.get(axis, slice(None)) for axis in range(len(shape))])
        self._new_axis = not axes
        self._shape = [shape[axis] for axis in self._kept]
        self._shape.insert(self.axis, len(self.chosen))
        self.size = math.prod(self._shape)
        within = [coords[axis] for axis in self._kept]
        within.insert(self.axis, self._at)
        self._positions = np.ravel_multi_index(within, self._shape)

    def axis_of(self, axis: int) -> int:
        """Where an axis that is kept whole lies in the part."""
        number = self._kept.index(axis)
        return number + (number >= self.axis)

    def part(self, array: Array, values: Array) -> Array:
        """Those indices of an array, with the values in them."""
        held = array[None] if self._new_axis else array.at[self._index].get(mode=IN_BOUNDS, unique_indices=True)
        return put(held, self._positions, values)

    def touched(self, moved: Array) -> Array:
        """For each of the indices whether an element there is among those that have moved."""
        return jnp.zeros(len(self.chosen), bool).at[self._at].max(moved, mode=IN_BOUNDS)


def _replaced(base: Array, new: Array, touched: Array, where: np.ndarray, axis: int) -> Array:
    """An array with others at those of some indices of an axis, which rise, that are touched.

    For derivatives all of them are: untouched ones are left as they are for the sake of their bits.
    """
    ones = (1,) * axis, (1,) * (base.ndim - axis - 1)
    touched = touched.reshape(*ones[0], -1, *ones[1])
    inside = np.isin(np.arange(base.shape[axis]), where).reshape(*ones[0], -1, *ones[1])

    @jax.custom_jvp
    def replaced(base: Array, new: Array, touched: Array) -> Array:
        if len(where) == base.shape[axis]:
            return jnp.where(touched, new, base)
        if len(where) <= FEW:
            held = jnp.take(base, where, axis=axis, mode="clip")
            return write_along(base, axis, where, jnp.where(touched, new, held))
        # One pass that reads, as scattering goes from index to index on a CPU.
        spread = np.zeros(base.shape[axis], np.int32)
        spread[where] = np.arange(len(where))
        here = jnp.take(touched, spread, axis=axis, mode="clip") & inside
        return jnp.where(here, jnp.take(new, spread, axis=axis, mode="clip"), base)

    @replaced.defjvp
    def replaced_jvp(primals: tuple[Array, ...], tangents: tuple[Any, ...]) -> tuple[Array, Array]:
        base, new, _ = tangents
        if len(where) < base.shape[axis]:  # the gradient of this only reads
            new = write_along(jnp.where(inside, 0, base), axis, where, new, add=True)
        return replaced(*primals), new

    return replaced(base, new, touched)


def _without(x: Array, moved: Array, inside: np.ndarray) -> Array:
    """An array with zeros inside of a mask, if anything has moved at all; for derivatives in any case."""

    @jax.custom_jvp
    def without(x: Array, moved: Array) -> Array:
        return jnp.where(moved & inside, 0, x)

    @without.defjvp
    def without_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Any]) -> tuple[Array, Array]:
        return without(*primals), jnp.where(inside, 0, tangents[0])

    return without(x, moved)


@jax.custom_jvp
def _only(added: Array, moved: Array) -> Array:
    """What is added, and where nothing has moved a minus zero, the only number that leaves all others as they are."""
    return jnp.where(moved, added, jnp.asarray(-0.0, added.dtype))


@_only.defjvp
def _only_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Any]) -> tuple[Array, Array]:
    return _only(*primals), tangents[0]  # the values hear of it all the same
