"""Products with an array of which a few elements are patched: the plain product, and what they touch computed apart.

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

from elementgrad.backends.jax.axes import IN_BOUNDS, automatic, put, written
from elementgrad.backends.jax.program import bind
from elementgrad.backends.jax.training.patched import Patched

Array = jax.Array
DENSE = 2
"""Rows or columns that are more than one part in so many of the array are no small part: then all of it is used."""
CHEAP = 8
"""Rows and columns that are no more than one part in so many of the array may both be computed apart."""
FEW = 64
"""Up to so many indices of an axis are written to one by one."""


def product(equation: Any, operands: Sequence[Any]) -> list[Array] | None:
    """`x @ w`, `w @ x`, einsum and the like, where each axis of w is either summed over or one of the result's."""
    side = next(number for number, operand in enumerate(operands) if isinstance(operand, Patched))
    w, x = operands[side], operands[1 - side]
    x = x.whole() if isinstance(x, Patched) else jnp.asarray(x)
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

    def columns(cut: _Cut, base: Array, x: Array, part: Array, moved: Array) -> Array:
        new = multiply(x, others, part, [cut.axis_of(axis) for axis in mine])
        shape = (*outer, cut.total) if side == 1 else (cut.total, *outer)
        axis = len(outer) if side == 1 else 0
        return _replaced(base.reshape(shape), new, cut.touched(moved), cut.chosen, axis).reshape(base.shape)

    def rows(cut: _Cut, base: Array, x: Array, part: Array, moved: Array) -> Array:
        matrix = jnp.transpose(x, (*left, *others)).reshape(*outer, cut.total)
        met = jnp.take(matrix, cut.chosen, axis=len(outer), mode="clip")
        added = multiply(met, [len(outer)], part, [cut.axis])
        return base + _only(added.reshape(base.shape), moved.any())

    def met_by(cut: _Cut) -> np.ndarray:
        inside = np.isin(np.arange(cut.total), cut.chosen).reshape([w.shape[axis] for axis in mine])
        return np.expand_dims(np.transpose(inside, np.argsort(others)), left)

    plain = partial(_bound, equation, side)
    return _patched_product(w, x, (mine, free), plain, (columns, rows), met_by)


def correlation(equation: Any, operands: Sequence[Any]) -> list[Array] | None:
    """A convolution whose kernel is patched: its channels in are what rows are in a matrix, those out are columns."""
    x, w = operands
    params = equation.params
    if not isinstance(w, Patched) or isinstance(x, Patched):
        return None
    if params["feature_group_count"] != 1 or params["batch_group_count"] != 1:
        return None
    numbers = params["dimension_numbers"]
    (x_axis, axis), (out_axis, in_axis) = (numbers.lhs_spec[1], numbers.out_spec[1]), numbers.rhs_spec[:2]

    def columns(cut: _Cut, base: Array, x: Array, part: Array, moved: Array) -> Array:
        (new,) = bind(equation, [x, part])
        return _replaced(base, new, cut.touched(moved), cut.chosen, axis)

    def rows(cut: _Cut, base: Array, x: Array, part: Array, moved: Array) -> Array:
        (added,) = bind(equation, [jnp.take(x, cut.chosen, axis=x_axis, mode="clip"), part])
        return base + _only(added, moved.any())

    def met_by(cut: _Cut) -> np.ndarray:
        inside = np.isin(np.arange(cut.total), cut.chosen)
        return np.expand_dims(inside, [number for number in range(x.ndim) if number != x_axis])

    plain = partial(_bound, equation, 1)
    return _patched_product(w, x, ((in_axis,), (out_axis,)), plain, (columns, rows), met_by)


def _patched_product(
    w: Patched,
    x: Array,
    axes: tuple[Sequence[int], Sequence[int]],
    plain: Callable[[Array, Array], Array],
    ways: tuple[Callable[..., Array], Callable[..., Array]],
    met_by: Callable[["_Cut"], np.ndarray],
) -> list[Array] | None:
    """The product by rows or by columns, whose axes are `axes`, as two `ways` compute it; None if neither are few."""
    if not w.finite or not len(w.positions):
        return None
    by_rows, by_columns = cuts = [_Cut(w, along) for along in axes]
    cut = min(by_columns, by_rows, key=lambda cut: cut.size)
    if DENSE * cut.size > w.array.size:
        return None
    if not isinstance(w.array, jax.core.Tracer) or CHEAP * sum(cut.size for cut in cuts) > w.array.size:
        cuts = [cut]
    moved = w.moved_at_all()
    met = x
    if by_rows in cuts:
        inside = met_by(by_rows)
        met = automatic(lambda x, moved: _without(x, moved.any(), inside), x, moved)

    def computed(base: Array, x: Array, array: Array, values: Array, moved: Array) -> Array:
        for cut in cuts:
            base = ways[cut is by_rows](cut, base, x, cut.part(array, values), moved)
        return base

    return [automatic(computed, plain(met, w.array), x, w.array, w.values, moved)]


def _bound(equation: Any, side: int, x: Array, w: Array) -> Array:
    return bind(equation, [(w, x), (x, w)][side])[0]


class _Cut:
    """The part of a patched array at those indices of some axes, taken together, that have patched elements."""

    def __init__(self, w: Patched, axes: Sequence[int]):
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
            return written(base, axis, where, jnp.where(touched, new, held))
        # One pass that reads, as scattering goes from index to index on a CPU.
        spread = np.zeros(base.shape[axis], np.int32)
        spread[where] = np.arange(len(where))
        here = jnp.take(touched, spread, axis=axis, mode="clip") & inside
        return jnp.where(here, jnp.take(new, spread, axis=axis, mode="clip"), base)

    @replaced.defjvp
    def replaced_jvp(primals: tuple[Array, ...], tangents: tuple[Any, ...]) -> tuple[Array, Array]:
        base, new, _ = tangents
        if len(where) < base.shape[axis]:  # the gradient of this only reads
            new = written(jnp.where(inside, 0, base), axis, where, new, add=True)
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
