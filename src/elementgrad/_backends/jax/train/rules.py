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
- whole: the product with a copy of the array that has the values in it. Small products are computed so, too.

The first two read a few columns or rows of the array. But zero times infinity is not zero: the way by rows is wrong for
an array with a number that is not finite. So is the derivative of the way by columns, which multiplies columns of the
array with zeros. The derivative of the way by rows replaces rows, and is right for any array. So where an array is not
known to be finite, as one that is traced, the product is computed by columns and differentiated by rows, and where
these are no small part of the array, whole. Only derivatives of that derivative may still meet zero times infinity.
The derivative by the values is not part of this: it reads the rows or columns that they are in, and is never dense.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.sharding import NamedSharding, PartitionSpec

from elementgrad._backends.jax.program import bind
from elementgrad._backends.jax.sharding import (
    IN_BOUNDS,
    add_at,
    explicit_sharding,
    has_several_devices,
    is_on_host,
    make_varying,
    put,
    put_at,
    take,
    varying_axes,
    with_auto_axes,
)
from elementgrad._train.numbers import unique_indices

Array = jax.Array
DENSE = 2
"""A block of rows and columns is small if it is at most one part in this many of its array."""
CHEAP = 8
"""Rows and columns that are at most one part in this many of the array are both few."""
SMALL, COPY = 2**17, 8
"""A product of at most this many multiplications is computed whole, where the copy of an element counts as several.

That takes no longer than the ways by columns and rows, each of which is several operations, and a fraction of their
time to compile.
"""


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
            flat = put_at(flat, (..., self.columns), jnp.where(hit[..., None], new, old), flat.ndim - 1)
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
    contracted, batched = equation.params["dimension_numbers"]
    if batched[0]:
        return None
    left, right = map(tuple, contracted)
    free = len(w.shape) - len(contracted[side])
    return _patched_product(equation, _DotProduct(side, left, right, free, _options(equation)), x, w)


def convolve(equation: Any, operands: Sequence[Any]) -> list[Array] | None:
    """Compute a convolution with a patched kernel: input channels are the rows of a matrix, output channels columns."""
    x, w = operands
    params = equation.params
    if not isinstance(w, PatchedArray) or isinstance(x, PatchedArray):
        return None
    if params["feature_group_count"] != 1 or params["batch_group_count"] != 1:
        return None
    return _patched_product(equation, _ConvolutionProduct(equation.primitive, _options(equation)), x, w)


def _options(equation: Any) -> tuple[tuple[str, Any], ...]:
    return tuple(equation.params.items())


@dataclass(frozen=True)
class _DotProduct:
    """A product of x and w. The axes of w that are summed over number its rows, the others its columns."""

    side: int
    """The number of the operand that w is."""
    left_summed: tuple[int, ...]
    right_summed: tuple[int, ...]
    free: int
    """The number of axes of w that are not summed over."""
    options: tuple[tuple[str, Any], ...]

    def axes(self, w: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the axes of w that make its rows, and those that make its columns."""
        summed = self._summed[0]
        return summed, tuple(axis for axis in range(len(w.shape)) if axis not in summed)

    def plain(self, x: Array, w: Array) -> Array:
        summed, x_summed = self._summed
        return self._dot(x, x_summed, w, summed)

    def columns(self, base: Array, x: Array, part: Array, cut: "_Axes") -> tuple[Array, tuple[int, ...], int]:
        """Return the products with some columns, the shape of all of them, and the axis of the columns in it."""
        summed, x_summed = self._summed
        outer = [size for axis, size in enumerate(x.shape) if axis not in x_summed]
        shape = (*outer, cut.total) if self.side == 1 else (cut.total, *outer)
        axis = len(outer) if self.side == 1 else 0
        if part.shape[cut.axis] == 1 and self._is_simple(x, part):
            factor = part.reshape([-1 if axis == x_summed[0] else 1 for axis in range(x.ndim)])
            return jnp.expand_dims((x * factor).sum(x_summed[0]), axis), shape, axis
        return self._dot(x, x_summed, part, [cut.axis_of(axis) for axis in summed]), shape, axis

    def rows(self, x: Array, part: Array, chosen: Array, cut: "_Axes") -> Array:
        """Return the product of some of x with some rows of w."""
        summed, x_summed = self._summed
        free = [axis for axis in range(x.ndim) if axis not in x_summed]
        matrix = jnp.transpose(x, (*free, *[x_summed[summed.index(axis)] for axis in cut.axes]))
        factor = jnp.take(matrix.reshape(*matrix.shape[: len(free)], cut.total), chosen, axis=len(free), mode="clip")
        if part.shape[cut.axis] == 1 and self._is_simple(x, part):
            row = part.reshape(*(1,) * len(free), -1) if self.side == 1 else part.reshape(-1, *(1,) * len(free))
            return factor * row if self.side == 1 else row * jnp.moveaxis(factor, -1, 0)
        return self._dot(factor, [len(free)], part, [cut.axis])

    def change(self, base: Array, x: Array, values: Array, at: "_SliceArrays", cut: "_Axes") -> Array | None:
        """Return how the result changes with the values, if they are few in their columns."""
        if not self._is_simple(x, values) or CHEAP * values.size > at.number.size:
            return None
        (summed,), (x_summed,) = self._summed
        coords = cut.coords(at)
        factor = jnp.moveaxis(jnp.take(x, coords[summed], axis=x_summed, mode="clip"), x_summed, -1)
        factor = factor * values.reshape(*(1,) * (x.ndim - 1), -1)
        column = coords[1 - summed]
        if self.side == 1:
            return add_at(jnp.zeros_like(base), (..., column), factor, base.ndim - 1)
        return add_at(jnp.zeros_like(base), (column,), jnp.moveaxis(factor, -1, 0))

    def _is_simple(self, x: Array, other: Array) -> bool:
        """Return True for a product of one axis with a matrix, in a dtype in which sums need no wider one.

        There a compiler is much faster at products with single columns and rows if they are written as sums.
        """
        dtypes = {x.dtype, other.dtype, jnp.dtype(dict(self.options)["preferred_element_type"] or x.dtype)}
        return len(self.left_summed) == 1 and self.free == 1 and len(dtypes) == 1 and x.dtype.itemsize >= 4

    def row_mask(self, inside: Any, cut: "_Axes", ndim: int) -> Any:
        """Return which elements of x are multiplied with some rows; its axes go with those of x."""
        summed, x_summed = self._summed
        order = [x_summed[summed.index(axis)] for axis in cut.axes]
        mask = inside.reshape(cut.sizes).transpose(np.argsort(order).tolist())
        return jnp.expand_dims(mask, [axis for axis in range(ndim) if axis not in x_summed])

    @property
    def _summed(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The axes that are summed over: those of w, and those of x."""
        axes = self.left_summed, self.right_summed
        return axes[self.side], axes[1 - self.side]

    def _dot(self, x: Array, x_axes: Sequence[int], w: Array, w_axes: Sequence[int]) -> Array:
        arrays, axes = [(w, x), (x, w)][self.side], [(w_axes, x_axes), (x_axes, w_axes)][self.side]
        options = {name: value for name, value in self.options if name in ("precision", "preferred_element_type")}
        return jax.lax.dot_general(*arrays, (axes, ((), ())), **options)


@dataclass(frozen=True)
class _ConvolutionProduct:
    """A convolution of x with a kernel w, whose input channels number its rows, and output channels its columns."""

    primitive: Any
    options: tuple[tuple[str, Any], ...]
    side: ClassVar[int] = 1

    @property
    def _numbers(self) -> Any:
        return dict(self.options)["dimension_numbers"]

    def axes(self, w: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
        out_axis, in_axis = self._numbers.rhs_spec[:2]
        return (in_axis,), (out_axis,)

    def plain(self, x: Array, w: Array) -> Array:
        return self.primitive.bind(x, w, **dict(self.options))

    def columns(self, base: Array, x: Array, part: Array, cut: "_Axes") -> tuple[Array, tuple[int, ...], int]:
        return self.plain(x, part), base.shape, self._numbers.out_spec[1]

    def rows(self, x: Array, part: Array, chosen: Array, cut: "_Axes") -> Array:
        return self.plain(jnp.take(x, chosen, axis=self._numbers.lhs_spec[1], mode="clip"), part)

    def change(self, *_: Any) -> None:
        return None

    def row_mask(self, inside: Any, cut: "_Axes", ndim: int) -> Any:
        return jnp.expand_dims(inside, [axis for axis in range(ndim) if axis != self._numbers.lhs_spec[1]])


def _patched_product(
    equation: Any, op: "_DotProduct | _ConvolutionProduct", x: Array, w: PatchedArray
) -> list[Array] | None:
    """Compute a product without a whole array where that is exact; None if elements are no small part of it."""
    rows, columns = [_PatchedSlice(w, along) for along in op.axes(w)]
    smaller = min(columns, rows, key=lambda cut: cut.size)
    if not len(w.positions) or not smaller.is_small:
        return None
    if _is_cheap_whole(equation, columns.axes.total, x, w):
        everything = _PatchedSlice(w, ()).arrays
        return [_whole_product(op, x, w.array, w.values, everything.coords[1:], everything.number[0])]
    if w.is_finite:
        both = CHEAP * (rows.size + columns.size) <= w.array.size
        way = "columns" if both or smaller is columns else "rows"
        slope = "rows" if both else way
    else:
        way = "columns" if columns.is_small else "whole"
        slope = "rows" if rows.is_small else "whole"
    # The product has a derivative of its own. What it is computed from here is to have none.
    constant, array = _stop_gradient(x), w.array
    if isinstance(array, jax.core.Tracer):
        array = _stop_gradient(array)
    if way == "rows":
        changed = w.values != take(array, w.positions)

        def leave_out(x: Array, changed: Array) -> Array:
            return jnp.where(changed.any() & op.row_mask(rows.arrays.inside, rows.axes, x.ndim), 0, x)

        constant = with_auto_axes(leave_out, constant, jax.lax.stop_gradient(changed))
    elif way == "whole":
        array = jax.lax.stop_gradient(w.whole())
    base = bind(equation, [(array, constant), (constant, array)][op.side])[0]
    specs = op, columns.axes, rows.axes, way, slope
    at = columns.arrays if way == "columns" else None
    operands: Any = (
        *(x, w.values, w.array, columns.read(w.array) if way == "columns" else None, at),
        rows.arrays if slope == "rows" else None,
    )
    if explicit_sharding(base) is None:
        return [_product(specs, base, *operands)]
    uncompiled: Any = _product.__wrapped__  # type: ignore[attr-defined]
    return [with_auto_axes(lambda base, *others: uncompiled(specs, base, *others), base, *operands)]


def _is_cheap_whole(equation: Any, columns: int, x: Array, w: PatchedArray) -> bool:
    """Return True if the product with a whole array is no slower than one with parts of it.

    Of an array that may be sharded, a whole gradient would be sent from device to device.
    """
    if has_several_devices() or explicit_sharding(w.array) is not None or explicit_sharding(x) is not None:
        return False
    multiplications = equation.outvars[0].aval.size * w.array.size // columns
    return multiplications + COPY * w.array.size <= SMALL


_stop_gradient = jax.jit(jax.lax.stop_gradient, inline=True)  # differentiated once for each shape


# Layers with as many elements in arrays of one shape share one program, which is traced and differentiated once:
# the positions of the elements are operands of it.
@partial(jax.jit, static_argnums=0)
def _product(specs: tuple[Any, "_Axes", "_Axes", str, str], *operands: Any) -> Array:
    """Put what patched elements lead to into a plain product, with a derivative that reads no whole array.

    Without a change the result has the bits of the plain product; the derivative takes all elements for changed.
    """
    op, cut, row_cut, way, slope = specs

    @jax.custom_jvp
    def product(base: Array, x: Array, values: Array, array: Array, slices: Any, at: Any, rows: Any) -> Array:
        if way == "whole":
            return base
        if way == "rows":
            slices = row_cut.take(array, rows)
            part = _insert(slices, values, rows.coords, rows.number)
            added = op.rows(x, part, rows.chosen, row_cut).reshape(base.shape)
            # Minus zero is the only number that leaves all others as they are.
            return base + jnp.where((part != slices).any(), added, jnp.asarray(-0.0, added.dtype))
        slices = cut.take(array, at) if slices is None else slices
        part = _insert(slices, values, at.coords, at.number)
        touched = (part != slices).any(tuple([axis for axis in range(part.ndim) if axis != cut.axis]))
        new, shape, axis = op.columns(base, x, part, cut)
        here = _along(at.inside & jnp.take(touched, at.spread, mode="clip"), axis, len(shape))
        spread = jnp.take(new, at.spread, axis=axis, mode="clip")
        return jnp.where(here, spread, base.reshape(shape)).reshape(base.shape)

    @partial(product.defjvp, symbolic_zeros=True)
    def product_jvp(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Array, Any]:
        base, x, values, array, slices, at, rows = primals
        _, of_x, of_values, of_array, *_ = tangents
        total = jnp.zeros_like(base)
        coords = cut.coords(at) if way == "columns" else row_cut.coords(rows)

        def put_columns(total: Array, x: Array, part: Array) -> Array:
            """Put the product with some columns in their place; the transpose of this only reads."""
            new, shape, axis = op.columns(base, x, part, cut)
            kept = jnp.where(_along(at.inside, axis, len(shape)), 0, total.reshape(shape))
            return put_at(kept, (*(slice(None),) * axis, at.chosen), new, axis).reshape(base.shape)

        if not isinstance(of_x, SymbolicZero):
            if slope == "whole":
                total = op.plain(of_x, put_at(array, coords, values))
            elif slope == "columns":
                slices = cut.take(array, at) if slices is None else slices
                total = put_columns(op.plain(of_x, array), of_x, _insert(slices, values, at.coords, at.number))
            else:
                part = _insert(row_cut.take(array, rows), values, rows.coords, rows.number)
                others = op.plain(jnp.where(op.row_mask(rows.inside, row_cut, x.ndim), 0, of_x), array)
                total = others + op.rows(of_x, part, rows.chosen, row_cut).reshape(base.shape)
        if not isinstance(of_values, SymbolicZero):
            # Inside of a `shard_map` devices add up the gradients of what is made varying: the values alone here.
            of_values = make_varying(of_values, varying_axes(base))
            change = op.change(base, x, of_values, at, cut) if way == "columns" else None
            if change is None:
                mine = at if way == "columns" else rows
                part = put_at(jnp.zeros(mine.number.shape, of_values.dtype), mine.coords, of_values)
                by_rows = partial(op.rows, x, part)
                change = (
                    put_columns(jnp.zeros_like(base), x, part)
                    if way == "columns"
                    else by_rows(rows.chosen, row_cut).reshape(base.shape)
                )
            total = total + change
        if not isinstance(of_array, SymbolicZero):
            total = total + op.plain(x, put_at(of_array, coords, jnp.zeros_like(values)))
        return product(*primals), total

    return product(*operands)


@partial(jax.jit, static_argnums=0)
def _whole_product(op: Any, x: Array, array: Array, values: Array, coords: tuple[Any, ...], number: Any) -> Array:
    """Compute a product with the whole array, with the values in it."""
    return op.plain(x, _insert(array, values, coords, number))


def _along(row: Array, axis: int, ndim: int) -> Array:
    return row.reshape(*(1,) * axis, -1, *(1,) * (ndim - axis - 1))


@dataclass(frozen=True)
class _Axes:
    """Some axes of an array, taken together: the slices along them are numbered in C order."""

    axes: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def sizes(self) -> list[int]:
        return [self.shape[axis] for axis in self.axes]

    @property
    def total(self) -> int:
        """The number of slices."""
        return math.prod(self.sizes)

    @property
    def others(self) -> list[int]:
        return [axis for axis in range(len(self.shape)) if axis not in self.axes]

    @property
    def axis(self) -> int:
        """The axis of the slices in `take`: in place of adjacent axes, or the first one, as in NumPy."""
        adjacent = bool(self.axes) and self.axes == tuple(range(self.axes[0], self.axes[0] + len(self.axes)))
        return self.axes[0] if adjacent else 0

    def axis_of(self, axis: int) -> int:
        """Return where another axis of the array is in `take`."""
        number = self.others.index(axis)
        return number + (number >= self.axis)

    def coords(self, at: "_SliceArrays") -> tuple[Array, ...]:
        """Return the coordinates of the elements in the array."""
        along = dict(zip(self.axes, [each[at.coords[self.axis]] for each in at.slices], strict=True))
        along |= {axis: at.coords[self.axis_of(axis)] for axis in self.others}
        return tuple([along[axis] for axis in range(len(self.shape))])

    def take(self, array: Array, at: "_SliceArrays") -> Array:
        """Return some slices."""
        if not self.axes:
            return array[None]
        index = dict(zip(self.axes, at.slices, strict=True))
        every = tuple([index.get(axis, slice(None)) for axis in range(len(self.shape))])
        return array.at[every].get(mode=IN_BOUNDS, unique_indices=True)


class _SliceArrays(NamedTuple):
    """The slices of an array that have patched elements. Indices are unsigned, as JAX looks at the sign of others."""

    slices: tuple[Any, ...]
    """The coordinates of the slices, for each of their axes."""
    chosen: Any
    """The numbers of the slices, ascending."""
    spread: Any
    """For each slice of the array its number among these, or 0."""
    inside: Any
    """For each slice of the array True if it is one of these."""
    coords: tuple[Any, ...]
    """The coordinates of the elements in these slices."""
    number: Any
    """For each element of these slices the number of its value, or -1."""


class _PatchedSlice:
    """The slices of a patched array, along some axes taken together, that have patched elements."""

    def __init__(self, w: PatchedArray, axes: Sequence[int]):
        self.axes = spec = _Axes(tuple(sorted(axes)), w.shape)
        coords = w.coords
        along = np.ravel_multi_index([coords[axis] for axis in spec.axes], spec.sizes) if axes else 0 * w.positions
        self.chosen, self._at = unique_indices(along, spec.total)
        self._within = [coords[axis] for axis in spec.others]
        self._within.insert(spec.axis, self._at)
        self._shape = [w.shape[axis] for axis in spec.others]
        self._shape.insert(spec.axis, len(self.chosen))
        self.size = math.prod(self._shape)
        self.is_small = DENSE * self.size <= w.array.size

    @cached_property
    def arrays(self) -> _SliceArrays:
        spread, inside = np.zeros(self.axes.total, np.int32), np.zeros(self.axes.total, bool)
        spread[self.chosen], inside[self.chosen] = np.arange(len(self.chosen)), True
        number = np.full(self._shape, -1, np.int32)
        number[tuple(self._within)] = np.arange(len(self._at))
        index = np.unravel_index(self.chosen, self.axes.sizes) if self.axes.axes else ()
        unsigned = [each.astype(np.uint32) for each in (*index, self.chosen, *self._within)]
        count = len(index)
        return _SliceArrays(
            tuple(unsigned[:count]), unsigned[count], spread, inside, tuple(unsigned[count + 1 :]), number
        )

    def read(self, array: Array) -> np.ndarray | None:
        """Return the slices of an array whose numbers are known; a compiler would take long to compute them."""
        if isinstance(array, jax.core.Tracer) or not is_on_host(array):
            return None
        index = dict(zip(self.axes.axes, self.arrays.slices, strict=True))
        every = tuple([index.get(axis, slice(None)) for axis in range(len(self.axes.shape))])
        return np.asarray(array)[every if index else None]


@jax.custom_jvp
def _insert(slices: Array, values: Array, coords: tuple[Array, ...], number: Array) -> Array:
    """Put values into slices; a compiler is faster at reading them than at scattering them."""
    return jnp.where(number < 0, slices, jnp.take(values, number, mode="clip"))


@_insert.defjvp
def _insert_jvp(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Array, Array]:
    _, _, coords, number = primals
    slices, values = tangents[:2]
    kept = jnp.where(number < 0, slices, 0)
    if len(values) == 1:
        # A single constant index becomes part of the machine code, which is then compiled anew for each layer. So zero
        # is added to the first element as well.
        coords = tuple([jnp.append(each, jnp.zeros((), each.dtype)) for each in coords])
        return _insert(*primals), add_at(kept, coords, jnp.append(values, jnp.zeros((), values.dtype)))
    return _insert(*primals), put_at(kept, coords, values)  # whose transpose only reads
