"""A few elements of arrays, taken and put, whatever mesh these are spread over and however its axes are typed.

Arrays that are spread over the devices of a mesh, and over processes: a few elements of them, nothing gathered.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from elementgrad._backends.jax._compat import get_axis_env
from elementgrad.errors import FrameworkError

Array = jax.Array
IN_BOUNDS = "promise_in_bounds"
BEYOND = np.iinfo(np.int32).max
"""An index that no array has, at which nothing is written.

It stands beside one that is alone wherever an array may be sharded. The compiler makes the writing of one element an
update of a slice, takes that together with the slice of the array that a shard may be, and then devices that do not
have the element write to another one.
"""


def taken(array: Array, positions: np.ndarray) -> Array:
    """Some elements in one row. By coordinates, since flat positions may be too large for 32 bits."""
    if not array.shape:
        return jnp.broadcast_to(array, positions.shape)
    return picked(array, np.unravel_index(positions, array.shape))


def picked(array: Array, index: tuple[Any, ...]) -> Array:
    """Elements by their coordinates; of a sharded array only they go from device to device."""
    typed = explicit(array)
    more: dict[str, Any] = {} if typed is None else {"out_sharding": NamedSharding(typed.mesh, PartitionSpec())}
    return array.at[index].get(mode=IN_BOUNDS, unique_indices=True, **more)


def put(array: Array, positions: np.ndarray, values: Array) -> Array:
    """An array with some elements replaced, on the devices that it was on: each device writes to its own shard."""
    values = values.astype(array.dtype)
    if not array.shape:
        return values.reshape(()) if len(positions) else array
    index, mode = np.unravel_index(positions, array.shape), IN_BOUNDS
    if len(positions) == 1 and _several_devices():
        index, mode = tuple([np.append(along, BEYOND) for along in index]), "drop"
        values = jnp.concatenate([values, jnp.zeros_like(values)])
    typed = explicit(array)
    if typed is not None:
        return _replaced(array, index, values, mode, out_sharding=typed)
    traced = isinstance(array, jax.core.Tracer) or isinstance(values, jax.core.Tracer)
    if array.dtype.itemsize == 2 and not traced:
        return _replaced_bits(array, index, values, mode, array.sharding if _constrained(array.sharding) else None)
    if isinstance(array, jax.core.Tracer) or not _constrained(array.sharding):
        return _replaced(array, index, values, mode)
    return _replaced_there(array, index, values, mode, array.sharding)


def written(array: Array, axis: int, where: np.ndarray, values: Array, add: bool = False) -> Array:
    """An array with values at some indices of an axis, each once, or with the values added there."""
    mode = IN_BOUNDS
    if len(where) == 1 and _several_devices():
        where, mode = np.append(where, BEYOND), "drop"
        values = jnp.concatenate([values, jnp.zeros_like(values)], axis)
    at = array.at[(slice(None),) * axis + (where,)]
    return (at.add if add else at.set)(values, mode=mode, unique_indices=True)


def settled(row: Array, like: Array) -> Array:
    """A row of numbers on each device that another one is on."""
    if not _constrained(like.sharding) or explicit(row) is not None:
        return row
    if not isinstance(row, jax.core.Tracer) and row.sharding.is_equivalent_to(like.sharding, row.ndim):
        return row
    return jax.lax.with_sharding_constraint(row, like.sharding)


def automatic(function: Callable[..., Array], base: Array, *arrays: Array) -> Array:
    """What a function makes of a base and other arrays, as an array of the type that the base is of.

    Where the axes of a mesh are explicit, the sharding of every result has to follow from those of the operands. That
    of some elements of an array does not, and so the compiler finds it here, as it does for all other meshes.
    """
    typed = explicit(base)
    if typed is None:
        return function(base, *arrays)
    return jax.sharding.auto_axes(function, axes=typed.mesh.explicit_axes, out_sharding=typed)(base, *arrays)


def explicit(array: Any) -> Any:
    """The sharding in the type of an array, where an axis of its mesh is explicit; None elsewhere."""
    typeof = getattr(jax, "typeof", None)
    sharding = None if typeof is None else getattr(typeof(array), "sharding", None)
    return sharding if getattr(getattr(sharding, "mesh", None), "explicit_axes", ()) else None


def varying(x: Array, axes: frozenset[Any]) -> Array:
    """An array that is typed to vary over some axes at least, as `axes_of` has them from another one.

    Derivatives must be of the type of what they are derivatives of, and numbers that are made anew vary over none.
    """
    more = tuple(sorted(axes - axes_of(x)))
    if not more:
        return x
    cast: Any = getattr(jax.lax, "pcast", None)
    older: Any = getattr(jax.lax, "pvary", None)  # until JAX 0.8
    return older(x, more) if cast is None else cast(x, more, to="varying")


def axes_of(array: Any) -> frozenset[Any]:
    """The axes of a mesh over which an array may differ inside of a `shard_map`, which are a part of its type."""
    typeof = getattr(jax, "typeof", None)
    aval = None if typeof is None else typeof(array)
    kind = getattr(aval, "mat", None)  # where it is since JAX 0.10
    return frozenset(getattr(aval, "vma", ()) if kind is None else kind.varying)


def members() -> frozenset[Any]:
    """The names of the axes, of a `shard_map`, `pmap` or `vmap`, of which the running function is one member."""
    return frozenset(get_axis_env().axis_sizes)


def _constrained(sharding: Sharding) -> bool:
    """Whether there is anything to say of devices: not for one, nor inside of a `shard_map`, which sees one each."""
    return len(sharding.device_set) > 1 and not members()


def _replaced(array: Array, index: tuple[Any, ...], values: Array, mode: str, **more: Any) -> Array:
    return array.at[index].set(values, mode=mode, unique_indices=True, **more)


@partial(jax.jit, static_argnums=(3, 4))
def _replaced_there(array: Array, index: tuple[Any, ...], values: Array, mode: str, sharding: Sharding) -> Array:
    return jax.lax.with_sharding_constraint(_replaced(array, index, values, mode), sharding)


@partial(jax.jit, static_argnums=(3, 4))
def _replaced_bits(array: Array, index: tuple[Any, ...], values: Array, mode: str, sharding: Sharding | None) -> Array:
    """Write numbers of half precision as integers, since the compiler may take the floats through float32.

    There a signalling NaN becomes a quiet one, also in elements that nobody writes to.
    """
    bits = [jax.lax.bitcast_convert_type(each, jnp.int16) for each in (array, values)]
    new = jax.lax.bitcast_convert_type(_replaced(bits[0], index, bits[1], mode), array.dtype)
    return new if sharding is None else jax.lax.with_sharding_constraint(new, sharding)


@cache
def _several_devices() -> bool:
    """Whether a program can be one for several devices at all."""
    return jax.device_count() > 1 or jax.device_count("cpu") > 1


def read(array: Array, positions: np.ndarray) -> np.ndarray:
    """Some elements, by flat positions, on the host.

    Each comes from a shard that holds it. Where processes hold different shards all of them must ask at once, as they
    do in any computation, and only what is asked for goes from one to another.
    """
    if not array.shape:
        return np.asarray(array).reshape(1)[np.zeros(len(positions), np.int64)]
    index = np.unravel_index(positions, array.shape)
    if not _within_reach(array):
        return np.asarray(jax.jit(picked, out_shardings=everywhere(array))(array, index))
    found = np.empty(len(positions), array.dtype)
    left = np.ones(len(positions), bool)
    for shard in array.addressable_shards:
        if not left.any():
            break
        inside, local = left.copy(), []
        for along, part, size in zip(index, shard.index, array.shape, strict=True):
            start, stop, _ = part.indices(size)
            inside &= (along >= start) & (along < stop)
            local.append(along - start)
        chosen = np.flatnonzero(inside)
        if len(chosen):
            found[chosen] = _held(shard.data, [along[chosen] for along in local])
            left[chosen] = False
    if left.any():
        raise FrameworkError(
            f"an array of shape {array.shape} is on devices of another process alone; put it on a mesh of all processes"
        )
    return found


def everywhere(array: Array) -> NamedSharding | None:
    """The sharding of what each device of an array has whole; None for an array on one device."""
    sharding = array.sharding
    if len(sharding.device_set) == 1:
        return None
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, PartitionSpec())
    return NamedSharding(Mesh(np.array(_devices(array)), ("devices",)), PartitionSpec())


def given_to_all(numbers: np.ndarray, like: Array) -> Array:
    """Numbers of the host on every device that an array is on, each process giving them to its own."""
    sharding = everywhere(like)
    if sharding is None:
        return jnp.asarray(numbers)
    numbers = numbers.astype(jax.dtypes.canonicalize_dtype(numbers.dtype), copy=False)
    return jax.make_array_from_callback(numbers.shape, sharding, lambda index: numbers[index])


def copied(row: Array, like: Array) -> Array:
    """A copy of a row of numbers, on every device that an array is on."""
    sharding = everywhere(like)
    if sharding is None or row.sharding.is_equivalent_to(sharding, row.ndim):
        return jnp.array(row)
    return given_to_all(read(row, np.arange(row.size)), like)


def first(spread: Array) -> bool:
    """Whether this process is the first of those that hold an array."""
    return bool(jax.process_index() == min([device.process_index for device in _devices(spread)]))


def gathered(spread: Array, row: np.ndarray) -> np.ndarray:
    """A row of numbers for each device that an array is on, from its process; all of these must ask at once."""
    devices = _devices(spread)
    mesh = Mesh(np.array(devices), ("devices",))
    each, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("devices",), ()))
    told = jax.make_array_from_callback((len(devices), len(row)), each, lambda _: row[None])
    return np.asarray(jax.jit(jnp.asarray, out_shardings=whole)(told))


def _within_reach(array: Array) -> bool:
    """Whether each process holds all of an array, in one shard or several: known without asking, and to all alike."""
    if array.is_fully_addressable or array.is_fully_replicated:
        return True
    held: dict[int, set[Any]] = {}
    indices: dict[Any, Any] = dict(array.sharding.devices_indices_map(array.shape))
    for device, index in indices.items():
        bounds = tuple([part.indices(size)[:2] for part, size in zip(index, array.shape, strict=True)])
        held.setdefault(device.process_index, set()).add(bounds)
    return len({frozenset(each) for each in held.values()}) == 1


def _devices(array: Array) -> list[Any]:
    """In the order in which programs count them."""
    return list(array.sharding.devices_indices_map(array.shape))


def _held(data: Array, index: Sequence[np.ndarray]) -> np.ndarray:
    """Elements of a shard: where it is in the memory of the host nothing is computed for them."""
    here = all(device.platform == "cpu" for device in data.devices())
    return np.asarray(data)[tuple(index)] if here else np.asarray(data[tuple(index)])
