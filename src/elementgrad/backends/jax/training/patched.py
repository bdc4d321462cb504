"""An array with a few elements replaced, kept apart: the array as it was, where the elements are, their values."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from elementgrad.backends.jax.axes import put, taken

Array = jax.Array


@jax.tree_util.register_pytree_node_class
class Patched:
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
    def tree_unflatten(cls, kept: Any, arrays: Any) -> "Patched":
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
        return self.values != taken(self.array, self.positions)

    def moved(self, array: Array, positions: np.ndarray, chosen: np.ndarray | None = None) -> "Patched":
        """The same elements, or some of them, elsewhere in an array that was made by moving elements."""
        values = self.values if chosen is None else self.values[chosen]
        return Patched(array, values.astype(array.dtype), positions, self.name, self.largest)


def _flat(coords: Sequence[np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    return np.ravel_multi_index(tuple(coords), shape) if shape else np.zeros(len(coords[0]) if coords else 1, np.int64)


def _transposed(x: Patched, params: dict[str, Any], array: Array) -> Patched | None:
    coords = x.coords
    return x.moved(array, _flat([coords[axis] for axis in params["permutation"]], array.shape))


def _reversed(x: Patched, params: dict[str, Any], array: Array) -> Patched | None:
    coords = [
        size - 1 - along if axis in params["dimensions"] else along
        for axis, (along, size) in enumerate(zip(x.coords, x.shape, strict=True))
    ]
    return x.moved(array, _flat(coords, array.shape))


def _kept(x: Patched, params: dict[str, Any], array: Array) -> Patched | None:
    """Elements in the order in which they were, unless there are more than before."""
    return x.moved(array, x.positions) if array.size == x.array.size else None


def _resharded(x: Patched, params: dict[str, Any], array: Array) -> Patched | None:
    """Elsewhere, or on the same mesh with its axes typed in another way; the values go to all of it."""
    everywhere = NamedSharding(params["dst_sharding"].mesh, PartitionSpec())
    values = jax.sharding.reshard(x.values, everywhere)
    return Patched(array, values, x.positions, x.name, x.largest)


def _sliced(x: Patched, params: dict[str, Any], array: Array) -> Patched | None:
    steps = params["strides"] or (1,) * len(x.shape)
    inside = np.ones(len(x.positions), bool)
    coords = []
    for along, start, end, step in zip(x.coords, params["start_indices"], params["limit_indices"], steps, strict=True):
        inside &= (along >= start) & (along < end) & ((along - start) % step == 0)
        coords.append((along - start) // step)
    chosen = np.flatnonzero(inside)
    return x.moved(array, _flat([along[chosen] for along in coords], array.shape), chosen)


Move = Callable[[Patched, dict[str, Any], Array], Patched | None]
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


def split(x: Patched, params: dict[str, Any], arrays: Sequence[Array]) -> list[Patched]:
    """The parts of an array along one axis."""
    axis, start, parts = params["axis"], 0, []
    for array in arrays:
        along = x.coords[axis]
        chosen = np.flatnonzero((along >= start) & (along < start + array.shape[axis]))
        coords = [other[chosen] - (start if number == axis else 0) for number, other in enumerate(x.coords)]
        parts.append(x.moved(array, _flat(coords, array.shape), chosen))
        start += array.shape[axis]
    return parts
