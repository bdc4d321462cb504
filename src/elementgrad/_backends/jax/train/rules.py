"""Operations on patched arrays: an array with a few elements replaced, kept as the array, the positions and the values.

Three kinds of operations need no whole array. Moves (reshape, transpose, slice, ...) move the positions along. Lookups
read rows of the array, and put the values into those rows that have patched elements. Products and convolutions compute
the plain product, and what patched elements contribute apart from it.

Subtracting an old number from a sum that it is part of would leave its rounding error behind, which may be larger than
all that remains. So a product is computed without the old numbers, in one of three ways, each as exact as the product
with the whole array at any ratio of old to new:

- by columns: the columns of the result that patched elements lead to are computed again, from those columns of the
  array with the values in them;
- by rows: what would be multiplied with rows that have patched elements is zero in the plain product, and the product
  with these rows, with the values in them, is added;
- whole: the product with a copy of the array that has the values in it.

The first two read a few columns or rows of the array. But zero times infinity is not zero: the way by rows is wrong for
an array with a number that is not finite. So is the derivative of the way by columns, which multiplies columns of the
array with zeros. The derivative of the way by rows replaces rows, and is right for any array. So where an array is not
known to be finite, as one that is traced, the product is computed by columns and differentiated by rows, and where
these are no small part of the array, whole. Only derivatives of that derivative may still meet zero times infinity.
The derivative by the values is not part of this: it reads the rows or columns that they are in, and is never dense.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.sharding import NamedSharding, PartitionSpec

from elementgrad._backends.jax.program import bind
from elementgrad._backends.jax.sharding import (
    IN_BOUNDS,
    make_varying,
    put,
    take,
    varying_axes,
    with_auto_axes,
    write_along,
)

Array = jax.Array
DENSE = 2
"""A block of rows and columns is small if it is at most one part in so many of its array."""
FEW = 64
"""Up to so many indices of an axis are written to one by one."""


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
        self._table = table
        self._sizes = [table.shape[axis] for axis in axes]
        self._width = math.prod(table.shape[axis] for axis in others)
        coords = table.coords
        keys = _ravel([coords[axis] for axis in axes], self._sizes)
        self.rows, self._row = np.unique(keys, return_inverse=True)
        within = _ravel([coords[axis] for axis in others], [table.shape[axis] for axis in others])
        within = np.zeros(len(keys), np.int64) if not others else within
        self.columns, self._column = np.unique(within, return_inverse=True)
        self._axes, self._others = axes, others

    @classmethod
    def of(cls, table: PatchedArray, axes: tuple[int, ...], sizes: Sequence[int]) -> "_Block | None":
        """Return the block of a table; None if slices are not whole rows, or if the block is large."""
        row_sizes = [1 if axis in axes else size for axis, size in enumerate(table.shape)]
        if not axes or list(sizes) != row_sizes or not len(table.positions):
            return None
        block = cls(table, axes)
        rows = math.prod(block._sizes)
        large = len(block.rows) * len(block.columns) * DENSE > table.array.size
        return None if large or rows > np.iinfo(np.int32).max else block

    def replace(self, plain: Array, values: Array, indices: Sequence[Array], clipped: bool) -> Array:
        """Put the values into looked up rows that have patched elements; the axes of the lookup come first."""
        key, valid = jnp.zeros((), jnp.int32), jnp.ones((), bool)
        for along, size in zip(indices, self._sizes, strict=True):
            along = along if along.dtype.itemsize >= 4 else along.astype(jnp.int32)  # may not hold the size
            along = jnp.clip(along, 0, size - 1) if clipped else along
            valid &= (along >= 0) & (along < size)
            key = key * size + along.astype(jnp.int32)
        rows = self.rows.astype(np.int32)
        at = jnp.minimum(jnp.searchsorted(rows, key, method="scan_unrolled"), len(rows) - 1)
        hit = (jnp.asarray(rows)[at] == key) & valid
        flat = plain.reshape(*key.shape, self._width)
        new = values[at]
        if len(self.columns) == self._width:
            flat = jnp.where(hit[..., None], new, flat)
        else:
            old = flat[..., self.columns]
            flat = write_along(flat, flat.ndim - 1, self.columns, jnp.where(hit[..., None], new, old))
        return flat.reshape(plain.shape)

    def values(self) -> Array:
        """Return all elements of the block, with the values in them."""
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
        old = take(self._table.array, np.ravel_multi_index(tuple(coords), self._table.shape)).reshape(shape)
        return old.at[self._row, self._column].set(self._table.values)


def _ravel(coords: Sequence[np.ndarray], sizes: Sequence[int]) -> np.ndarray:
    return np.ravel_multi_index(tuple(coords), tuple(sizes)) if sizes else np.zeros(0, np.int64)


def multiply(equation: Any, operands: Sequence[Any]) -> list[Array] | None:
    """Compute `x @ w`, `w @ x`, einsum and the like, where each axis of w is summed over or one of the result's."""
    side = next(number for number, operand in enumerate(operands) if isinstance(operand, PatchedArray))
    w, x = operands[side], operands[1 - side]
    x = x.whole() if isinstance(x, PatchedArray) else jnp.asarray(x)
    params = equation.params
    contracted, batched = params["dimension_numbers"]
    if batched[0]:
        return None
    summed, x_summed = tuple(contracted[side]), tuple(contracted[1 - side])
    free = tuple(axis for axis in range(len(w.shape)) if axis not in summed)
    x_free = [axis for axis in range(x.ndim) if axis not in x_summed]
    outer, summed_sizes = [x.shape[axis] for axis in x_free], [w.shape[axis] for axis in summed]

    def dot(x: Array, x_axes: Sequence[int], w: Array, w_axes: Sequence[int]) -> Array:
        arrays, axes = [(w, x), (x, w)][side], [(w_axes, x_axes), (x_axes, w_axes)][side]
        options = {name: params[name] for name in ("precision", "preferred_element_type")}
        return jax.lax.dot_general(*arrays, (axes, ((), ())), **options)

    def columns(cut: _PatchedSlice, x: Array, part: Array) -> Array:
        new = dot(x, x_summed, part, [cut.axis_of(axis) for axis in summed])
        return new.reshape((*outer, -1) if side == 1 else (-1, *outer))

    def rows(cut: _PatchedSlice, x: Array, part: Array) -> Array:
        matrix = jnp.transpose(x, (*x_free, *x_summed)).reshape(*outer, cut.total)
        factor = jnp.take(matrix, cut.chosen, axis=len(outer), mode="clip")
        return dot(factor, [len(outer)], part, [cut.axis])

    def row_mask(cut: _PatchedSlice) -> np.ndarray:
        inside = np.isin(np.arange(cut.total), cut.chosen).reshape(summed_sizes)
        return np.expand_dims(np.transpose(inside, np.argsort(x_summed)), x_free)

    cuts = _PatchedSlice(w, free), _PatchedSlice(w, summed)
    shape = (*outer, cuts[0].total) if side == 1 else (cuts[0].total, *outer)
    plain = partial(_bind_pair, equation, side)
    return _PatchedProduct(cuts, plain, columns, rows, row_mask, shape, len(outer) * side).of(w, x)


def convolve(equation: Any, operands: Sequence[Any]) -> list[Array] | None:
    """Compute a convolution with a patched kernel: input channels are the rows of a matrix, output channels columns."""
    x, w = operands
    params = equation.params
    if not isinstance(w, PatchedArray) or isinstance(x, PatchedArray):
        return None
    if params["feature_group_count"] != 1 or params["batch_group_count"] != 1:
        return None
    numbers = params["dimension_numbers"]
    (x_axis, axis), (out_axis, in_axis) = (numbers.lhs_spec[1], numbers.out_spec[1]), numbers.rhs_spec[:2]

    def columns(cut: _PatchedSlice, x: Array, part: Array) -> Array:
        return bind(equation, [x, part])[0]

    def rows(cut: _PatchedSlice, x: Array, part: Array) -> Array:
        return bind(equation, [jnp.take(x, cut.chosen, axis=x_axis, mode="clip"), part])[0]

    def row_mask(cut: _PatchedSlice) -> np.ndarray:
        inside = np.isin(np.arange(cut.total), cut.chosen)
        return np.expand_dims(inside, [number for number in range(len(numbers.lhs_spec)) if number != x_axis])

    cuts = _PatchedSlice(w, [out_axis]), _PatchedSlice(w, [in_axis])
    shape = equation.outvars[0].aval.shape
    return _PatchedProduct(cuts, partial(_bind_pair, equation, 1), columns, rows, row_mask, shape, axis).of(w, x)


class _PatchedProduct:
    """A product with a patched array.

    Args:
        cuts: The columns and the rows of the array that have patched elements.
        plain: Computes the product of two plain arrays.
        columns: Computes the columns of the product that lead from some columns of the array.
        rows: Computes the product with some rows of the array alone.
        row_mask: Tells which elements of x are multiplied with rows that have patched elements.
        shape: A shape of the product in which the columns are one axis.
        axis: That axis.
    """

    def __init__(
        self,
        cuts: "tuple[_PatchedSlice, _PatchedSlice]",
        plain: Callable[[Array, Array], Array],
        columns: Callable[["_PatchedSlice", Array, Array], Array],
        rows: Callable[["_PatchedSlice", Array, Array], Array],
        row_mask: Callable[["_PatchedSlice"], np.ndarray],
        shape: Sequence[int],
        axis: int,
    ):
        self._by_columns, self._by_rows = cuts
        self._plain, self._columns, self._rows, self._row_mask = plain, columns, rows, row_mask
        self._shape, self._axis = shape, axis

    def of(self, w: PatchedArray, x: Array) -> list[Array] | None:
        """Return the product in a list; None if elements are no small part of the array."""
        cut = min(self._by_columns, self._by_rows, key=lambda cut: cut.size)
        if not len(w.positions) or not cut.is_small:
            return None
        if w.is_finite:
            way = slope = self._product_by_columns if cut is self._by_columns else self._product_by_rows
        else:
            way = self._product_by_columns if self._by_columns.is_small else self._whole_product
            slope = self._product_by_rows if self._by_rows.is_small else self._whole_product

        # Nothing in here may hold `w` or another array that is traced: the function and its rule know each other, so
        # that they live until Python collects cycles.
        self._positions = positions = w.positions

        @jax.custom_jvp
        def product(x: Array, array: Array, values: Array) -> Array:
            return way(x, array, values, values != take(array, positions))

        @partial(product.defjvp, symbolic_zeros=True)
        def product_jvp(primals: tuple[Array, ...], tangents: tuple[Any, ...]) -> tuple[Array, Array]:
            (x, array, values), (dx, _, dvalues) = primals, tangents
            result = product(*primals)
            tangent = jnp.zeros_like(result)
            if not isinstance(dx, SymbolicZero):
                tangent = slope(dx, array, values, None)
            if not isinstance(dvalues, SymbolicZero):
                # Inside of a `shard_map` devices add up the gradients of what is made varying: the values alone here.
                dvalues = make_varying(dvalues, varying_axes(result))
                tangent = with_auto_axes(partial(self._add_part, cut), tangent, x, dvalues)
            return result, tangent

        return [product(x, w.array, w.values)]

    # Each way takes a mask of the values that have changed. With none changed the result has the bits of the plain
    # product. Without a mask a way is linear in x.

    def _whole_product(self, x: Array, array: Array, values: Array, changed: Array | None) -> Array:
        return self._plain(x, put(array, self._positions, values))

    def _product_by_columns(self, x: Array, array: Array, values: Array, changed: Array | None) -> Array:
        cut = self._by_columns

        def replace(base: Array, x: Array, array: Array, values: Array, *changed: Array) -> Array:
            new = self._columns(cut, x, cut.part(array, values))
            touched = cut.touched_mask(*changed) if changed else None
            return _replace_at(base.reshape(self._shape), new, touched, cut.chosen, self._axis).reshape(base.shape)

        masks = () if changed is None else (changed,)
        return with_auto_axes(replace, self._plain(x, array), x, array, values, *masks)

    def _product_by_rows(self, x: Array, array: Array, values: Array, changed: Array | None) -> Array:
        cut, mask = self._by_rows, self._row_mask(self._by_rows)

        def zero(x: Array, *changed: Array) -> Array:
            return jnp.where(changed[0].any() & mask if changed else mask, 0, x)

        def add(base: Array, x: Array, array: Array, values: Array, *changed: Array) -> Array:
            added = self._rows(cut, x, cut.part(array, values)).reshape(base.shape)
            if changed:  # minus zero is the only number that leaves all others as they are
                added = jnp.where(changed[0].any(), added, jnp.asarray(-0.0, added.dtype))
            return base + added

        masks = () if changed is None else (changed,)
        rest = with_auto_axes(zero, x, *masks)
        return with_auto_axes(add, self._plain(rest, array), x, array, values, *masks)

    def _add_part(self, cut: "_PatchedSlice", base: Array, x: Array, values: Array) -> Array:
        """Add the product with an array that is zero but for the values."""
        part = cut.zeros_but(values)
        if cut is self._by_rows:
            return base + self._rows(cut, x, part).reshape(base.shape)
        added = self._columns(cut, x, part)
        return write_along(base.reshape(self._shape), self._axis, cut.chosen, added, add=True).reshape(base.shape)


def _bind_pair(equation: Any, side: int, x: Array, w: Array) -> Array:
    return bind(equation, [(w, x), (x, w)][side])[0]


class _PatchedSlice:
    """The slices of a patched array, along some axes taken together, that have patched elements."""

    def __init__(self, w: PatchedArray, axes: Sequence[int]):
        axes, coords, shape = sorted(axes), w.coords, w.shape
        sizes = [shape[axis] for axis in axes]
        self.total = math.prod(sizes)
        along = np.ravel_multi_index([coords[axis] for axis in axes], sizes) if axes else np.zeros_like(w.positions)
        self.chosen, self._at = np.unique(along, return_inverse=True)
        """The indices of the slices, and for each element the number of its slice."""
        self._whole_axes = [axis for axis in range(len(shape)) if axis not in axes]
        adjacent = axes == list(range(axes[0], axes[0] + len(axes))) if axes else True
        self.axis = axes[0] if axes and adjacent else 0
        """The axis of the slices in `part`: in place of adjacent axes, or the first one, as in NumPy."""
        index = dict(zip(axes, np.unravel_index(self.chosen, sizes), strict=True)) if axes else {}
        self._index = tuple([index.get(axis, slice(None)) for axis in range(len(shape))])
        self._new_axis = not axes
        self._shape = [shape[axis] for axis in self._whole_axes]
        self._shape.insert(self.axis, len(self.chosen))
        self.size = math.prod(self._shape)
        self.is_small = DENSE * self.size <= w.array.size
        within = [coords[axis] for axis in self._whole_axes]
        within.insert(self.axis, self._at)
        self._positions = np.ravel_multi_index(within, self._shape)

    def axis_of(self, axis: int) -> int:
        """Return where an axis of the array is in `part`."""
        number = self._whole_axes.index(axis)
        return number + (number >= self.axis)

    def part(self, array: Array, values: Array) -> Array:
        """Return the slices of an array, with the values in them."""
        slices = array[None] if self._new_axis else array.at[self._index].get(mode=IN_BOUNDS, unique_indices=True)
        return put(slices, self._positions, values)

    def zeros_but(self, values: Array) -> Array:
        """Return slices that are zero, with the values in them."""
        return put(jnp.zeros(self._shape, values.dtype), self._positions, values)

    def touched_mask(self, changed: Array) -> Array:
        """Return a mask of the slices in which an element has changed."""
        return jnp.zeros(len(self.chosen), bool).at[self._at].max(changed, mode=IN_BOUNDS)


def _replace_at(base: Array, new: Array, touched: Array | None, where: np.ndarray, axis: int) -> Array:
    """Replace the slices of `base` at ascending indices `where` of an axis by `new` ones, or those that are touched."""
    ones = (1,) * axis, (1,) * (base.ndim - axis - 1)
    inside = np.isin(np.arange(base.shape[axis]), where).reshape(*ones[0], -1, *ones[1])
    if touched is None:  # the derivative of this only reads
        return write_along(jnp.where(inside, 0, base), axis, where, new, add=True)
    touched = touched.reshape(*ones[0], -1, *ones[1])
    if len(where) == base.shape[axis]:
        return jnp.where(touched, new, base)
    if len(where) <= FEW:
        old = jnp.take(base, where, axis=axis, mode="clip")
        return write_along(base, axis, where, jnp.where(touched, new, old))
    # One pass that reads, as scattering goes from index to index on a CPU.
    spread = np.zeros(base.shape[axis], np.int32)
    spread[where] = np.arange(len(where))
    here = jnp.take(touched, spread, axis=axis, mode="clip") & inside
    return jnp.where(here, jnp.take(new, spread, axis=axis, mode="clip"), base)
