"""Products and convolutions of patched arrays: the plain product, and what patched elements contribute apart from it.

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
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from elementgrad._backends.jax.program import bind
from elementgrad._backends.jax.sharding import (
    IN_BOUNDS,
    add_at,
    explicit_sharding,
    has_several_devices,
    is_on_host,
    make_varying,
    put_at,
    take,
    varying_axes,
    with_auto_axes,
)
from elementgrad._backends.jax.train.rules import DENSE, PatchedArray
from elementgrad._train.kernels import unique_indices

Array = jax.Array
CHEAP = 8
"""Rows and columns that are at most one part in this many of the array are both few."""
SMALL, COPY = 2**17, 8
"""A product of at most this many multiplications is computed whole, where the copy of an element counts as several.

That takes no longer than the ways by columns and rows, each of which is several operations, and a fraction of their
time to compile.
"""


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
