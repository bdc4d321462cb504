"""Products with an array of which a few elements are patched: the plain product, and what the changes add to it."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from elementgrad.backends.jax.axes import automatic, written
from elementgrad.backends.jax.program import bind
from elementgrad.backends.jax.training.patched import Patched

Array = jax.Array
SPARSE = 64
"""Up to so many times as many elements as there are changes are multiplied as a matrix, which is that much faster."""
DENSE = 2
"""A matrix of more than one part in so many of the whole is no small one: then all is done with the whole."""
FEW = 64
"""Up to so many indices of an axis are written to one by one."""


def product(equation: Any, operands: Sequence[Any]) -> list[Array] | None:
    """`x @ w`, `w @ x`, einsum and the like, where each axis of w is either summed over or one of the result's."""
    side = next(number for number, operand in enumerate(operands) if isinstance(operand, Patched))
    w, x = operands[side], operands[1 - side]
    x = x.whole() if isinstance(x, Patched) else jnp.asarray(x)
    contracted, batched = equation.params["dimension_numbers"]
    if batched[0] or not w.steady or not len(w.positions):
        return None
    mine, others = tuple(contracted[side]), tuple(contracted[1 - side])
    free = [axis for axis in range(len(w.shape)) if axis not in mine]
    rows, columns = _ravelled(w, mine), _ravelled(w, free)
    if DENSE * len(np.unique(rows)) * len(np.unique(columns)) > w.array.size and len(rows) > 1:
        return None
    (base,) = bind(equation, [w.array, x] if side == 0 else [x, w.array])
    left = [axis for axis in range(x.ndim) if axis not in others]
    inner = [x.shape[axis] for axis in others]
    outer = [x.shape[axis] for axis in left]
    size = math.prod(w.shape[axis] for axis in free)

    def changed(base: Array, x: Array, changes: Array) -> Array:
        matrix = jnp.transpose(x, (*left, *others)).reshape(*outer, math.prod(inner))
        change, touched, where = _change(changes, matrix, rows, columns, base.dtype)
        change = _only(change, touched)
        if side == 1:
            return _added(base.reshape(*outer, size), change, where, len(outer)).reshape(base.shape)
        return _added(base.reshape(size, *outer), jnp.moveaxis(change, -1, 0), where, 0).reshape(base.shape)

    return [automatic(changed, base, x, w.changes(jnp.promote_types(base.dtype, jnp.float32)))]


def _change(
    changes: Array, x: Array, rows: np.ndarray, columns: np.ndarray, dtype: Any
) -> tuple[Array, Array, np.ndarray]:
    """What the changes of a matrix add to `x @ matrix`: some columns, whether anything changed there, which they are.

    The precision is the highest, as what is added is small and cheap.
    """
    where, column = np.unique(columns, return_inverse=True)
    used, row = np.unique(rows, return_inverse=True)
    wide = changes.dtype
    touched = jnp.zeros(len(where), bool).at[column].max(changes != 0)
    if len(used) * len(where) <= SPARSE * len(rows):
        block = jnp.zeros((len(used), len(where)), wide).at[row, column].set(changes, unique_indices=True)
        added = jnp.matmul(x[..., used].astype(wide), block, precision="highest")
    else:
        each = x[..., rows].astype(wide) * changes
        added = jnp.zeros((*x.shape[:-1], len(where)), wide).at[..., column].add(each, mode="promise_in_bounds")
    return added.astype(dtype), touched, where


def correlation(equation: Any, operands: Sequence[Any]) -> list[Array] | None:
    """A convolution whose kernel is patched: a small one over the channels that changes are in, and the plain one."""
    x, w = operands
    params = equation.params
    if not isinstance(w, Patched) or isinstance(x, Patched) or not w.steady or not len(w.positions):
        return None
    if params["feature_group_count"] != 1 or params["batch_group_count"] != 1:
        return None
    numbers = params["dimension_numbers"]
    out_axis, in_axis = numbers.rhs_spec[:2]
    where, to = np.unique(w.coords[out_axis], return_inverse=True)
    used, of = np.unique(w.coords[in_axis], return_inverse=True)
    small = [len(where) if axis == out_axis else len(used) if axis == in_axis else n for axis, n in enumerate(w.shape)]
    if DENSE * math.prod(small) > w.array.size:
        return None
    (base,) = bind(equation, [x, w.array])
    coords = tuple(to if axis == out_axis else of if axis == in_axis else along for axis, along in enumerate(w.coords))

    def changed(base: Array, x: Array, changes: Array) -> Array:
        kernel = jnp.zeros(small, changes.dtype).at[coords].set(changes, unique_indices=True)
        touched = jnp.zeros(len(where), bool).at[to].max(changes != 0)
        (added,) = bind(equation, [jnp.take(x, used, axis=numbers.lhs_spec[1]), kernel])
        axis = numbers.out_spec[1]
        shape = [len(where) if number == axis else 1 for number in range(base.ndim)]
        return _added(base, _only(added, touched.reshape(shape)), where, axis)

    return [automatic(changed, base, x, w.changes(w.array.dtype))]


def _added(base: Array, change: Array, where: np.ndarray, axis: int) -> Array:
    """An array with a change added at some indices of an axis, which rise."""
    if len(where) == base.shape[axis]:
        return base + change

    def scattered(base: Array, change: Array) -> Array:
        return written(base, axis, where, change, add=True)

    if len(where) <= FEW:
        return scattered(base, change)

    @jax.custom_jvp
    def added(base: Array, change: Array) -> Array:
        # One pass that reads, as scattering goes from index to index on a CPU.
        nothing = jnp.full_like(jax.lax.index_in_dim(change, 0, axis), -0.0)
        spread = np.full(base.shape[axis], len(where))
        spread[where] = np.arange(len(where))
        along = (slice(None),) * axis + (spread,)
        return base + jnp.concatenate([change, nothing], axis).at[along].get(mode="promise_in_bounds")

    @added.defjvp
    def added_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
        return added(*primals), scattered(*tangents)  # the gradient of which only reads

    return added(base, change)


@jax.custom_jvp
def _only(change: Array, touched: Array) -> Array:
    """A change, and where nothing was touched a minus zero, the only number that leaves all others as they are."""
    return jnp.where(touched, change, jnp.asarray(-0.0, change.dtype))


@_only.defjvp
def _only_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Any]) -> tuple[Array, Array]:
    return _only(*primals), tangents[0]  # the values hear of it all the same


def _ravelled(w: Patched, axes: Sequence[int]) -> np.ndarray:
    coords = w.coords
    if not axes:
        return np.zeros(len(w.positions), np.int64)
    return np.ravel_multi_index(tuple(coords[axis] for axis in axes), tuple(w.shape[axis] for axis in axes))
