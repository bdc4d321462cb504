"""Reads and writes a few elements of sharded arrays, without gathering them.

The arrays may be sharded over a mesh of devices and over processes, and the axes of the mesh may be explicit.
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
"""An index that no array has, so that nothing is written there.

It is added to a single index where an array may be sharded. XLA turns the write of one element into an update of a
slice, merges that with the slice that a shard is, and then devices that do not have the element write to another one.
"""


def take(array: Array, positions: np.ndarray) -> Array:
    """Return the elements at some flat positions, in one row."""
    if not array.shape:
        return jnp.broadcast_to(array, positions.shape)
    # By coordinates, since flat positions may need more than 32 bits.
    return take_at(array, np.unravel_index(positions, array.shape))


def take_at(array: Array, index: tuple[Any, ...]) -> Array:
    """Return the elements at some coordinates; only they are sent from device to device."""
    sharding = explicit_sharding(array)
    options: dict[str, Any] = (
        {} if sharding is None else {"out_sharding": NamedSharding(sharding.mesh, PartitionSpec())}
    )
    return array.at[index].get(mode=IN_BOUNDS, unique_indices=True, **options)


def put(array: Array, positions: np.ndarray, values: Array) -> Array:
    """Return an array with some elements replaced, sharded as before: each device writes to its own shard."""
    values = values.astype(array.dtype)
    if not array.shape:
        return values.reshape(()) if len(positions) else array
    index, values, mode = _with_spare_index(np.unravel_index(positions, array.shape), values)
    typed = explicit_sharding(array)
    options = {} if typed is None else {"out_sharding": typed}
    traced = isinstance(array, jax.core.Tracer) or isinstance(values, jax.core.Tracer)
    if array.dtype.itemsize == 2 and traced:
        return _set_traced_bits(array, index, values, mode, **options)
    if typed is not None:
        return _set(array, index, values, mode, **options)
    if array.dtype.itemsize == 2:
        return _set_bits(array, index, values, mode, array.sharding if _is_constrained(array.sharding) else None)
    if isinstance(array, jax.core.Tracer) or not _is_constrained(array.sharding):
        return _set(array, index, values, mode)
    return _set_sharded(array, index, values, mode, array.sharding)


def _set_traced_bits(array: Array, index: tuple[Any, ...], values: Array, mode: str, **options: Any) -> Array:
    """Set elements as `_set_bits` does in code that is traced, and may be differentiated."""

    @jax.custom_jvp
    def write(array: Array, values: Array) -> Array:
        return _set_as_integers(array, index, values, mode, **options)

    @write.defjvp
    def _(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
        return write(*primals), _set(tangents[0], index, tangents[1], mode, **options)

    return write(array, values)


def put_at(array: Array, index: tuple[Any, ...], values: Array, axis: int = 0) -> Array:
    """Return an array with values at some distinct indices, given as for NumPy; `axis` is that of the index arrays."""
    index, values, mode = _with_spare_index(index, values, axis)
    return _set(array, index, values, mode)


def add_at(array: Array, index: tuple[Any, ...], values: Array, axis: int = 0) -> Array:
    """Return an array with values added at some indices, some of them maybe more than once."""
    index, values, mode = _with_spare_index(index, values, axis)
    return array.at[index].add(values, mode=mode)


def _with_spare_index(index: tuple[Any, ...], values: Array, axis: int = 0) -> tuple[tuple[Any, ...], Array, str]:
    """Add an index that no array has to a single one, where an array may be sharded: see `BEYOND`."""
    if values.shape[axis] != 1 or not has_several_devices():
        return index, values, IN_BOUNDS
    index = tuple([each if each is ... or isinstance(each, slice) else jnp.append(each, BEYOND) for each in index])
    return index, jnp.concatenate([values, jnp.zeros_like(values)], axis), "drop"


def constrain_like(row: Array, like: Array) -> Array:
    """Return a row of numbers with the sharding of another."""
    if not _is_constrained(like.sharding) or explicit_sharding(row) is not None:
        return row
    if not isinstance(row, jax.core.Tracer) and row.sharding.is_equivalent_to(like.sharding, row.ndim):
        return row
    return jax.lax.with_sharding_constraint(row, like.sharding)


def with_auto_axes(function: Callable[..., Array], base: Array, *arrays: Array) -> Array:
    """Call a function on a base and other arrays, with a result that is sharded like the base.

    On a mesh with explicit axes the sharding of every result must follow from those of the operands. That of some
    elements of an array does not, so the compiler chooses it here, as it does on all other meshes.
    """
    typed = explicit_sharding(base)
    if typed is None:
        return function(base, *arrays)
    return jax.sharding.auto_axes(function, axes=typed.mesh.explicit_axes, out_sharding=typed)(base, *arrays)


def explicit_sharding(array: Any) -> Any:
    """Return the sharding in the type of an array, if an axis of its mesh is explicit; else None."""
    typeof = getattr(jax, "typeof", None)
    sharding = None if typeof is None else getattr(typeof(array), "sharding", None)
    return sharding if getattr(getattr(sharding, "mesh", None), "explicit_axes", ()) else None


def make_varying(x: Array, axes: frozenset[Any]) -> Array:
    """Return an array whose type varies at least over some axes, as `varying_axes` returns them of another array.

    A derivative must have the type of what it is a derivative of, and new constants vary over no axis.
    """
    missing = tuple(sorted(axes - varying_axes(x)))
    if not missing:
        return x
    pcast: Any = getattr(jax.lax, "pcast", None)
    pvary: Any = getattr(jax.lax, "pvary", None)  # until JAX 0.8
    return pvary(x, missing) if pcast is None else pcast(x, missing, to="varying")


def varying_axes(array: Any) -> frozenset[Any]:
    """Return the axes of a mesh over which an array may differ inside a `shard_map`; they are part of its type."""
    typeof = getattr(jax, "typeof", None)
    aval = None if typeof is None else typeof(array)
    kind = getattr(aval, "mat", None)  # where it is since JAX 0.10
    return frozenset(getattr(aval, "vma", ()) if kind is None else kind.varying)


def mapped_axes() -> frozenset[Any]:
    """Return the names of the axes of `shard_map`, `pmap` or `vmap` that the running function is mapped over."""
    return frozenset(get_axis_env().axis_sizes)


def _is_constrained(sharding: Sharding) -> bool:
    """Return True if a sharding can be constrained: not on one device, nor inside a `shard_map`."""
    return len(sharding.device_set) > 1 and not mapped_axes()


def _set(array: Array, index: tuple[Any, ...], values: Array, mode: str, **more: Any) -> Array:
    return array.at[index].set(values, mode=mode, unique_indices=True, **more)


@partial(jax.jit, static_argnums=(3, 4))
def _set_sharded(array: Array, index: tuple[Any, ...], values: Array, mode: str, sharding: Sharding) -> Array:
    return jax.lax.with_sharding_constraint(_set(array, index, values, mode), sharding)


@partial(jax.jit, static_argnums=(3, 4))
def _set_bits(array: Array, index: tuple[Any, ...], values: Array, mode: str, sharding: Sharding | None) -> Array:
    """Write half-precision numbers as integers, since XLA may compute with the floats in float32.

    That would turn signalling NaNs into quiet ones, also in elements that are not written.
    """
    new = _set_as_integers(array, index, values, mode)
    return new if sharding is None else jax.lax.with_sharding_constraint(new, sharding)


def _set_as_integers(array: Array, index: tuple[Any, ...], values: Array, mode: str, **more: Any) -> Array:
    bits = [jax.lax.bitcast_convert_type(each, jnp.int16) for each in (array, values)]
    return jax.lax.bitcast_convert_type(_set(bits[0], index, bits[1], mode, **more), array.dtype)


@cache
def has_several_devices() -> bool:
    return jax.device_count() > 1 or jax.device_count("cpu") > 1


def read(array: Array, positions: np.ndarray) -> np.ndarray:
    """Return the elements at some flat positions as a NumPy array, each from a shard that has it.

    If processes have different shards, all of them must call this at once, as in any computation. Only the elements
    are sent from one to another.
    """
    if not array.shape:
        return np.asarray(array).reshape(1)[np.zeros(len(positions), np.int64)]
    index = np.unravel_index(positions, array.shape)
    if not _is_local(array):
        return np.asarray(jax.jit(take_at, out_shardings=replicated_sharding(array))(array, index))
    values = np.empty(len(positions), array.dtype)
    missing = np.ones(len(positions), bool)
    for shard in array.addressable_shards:
        if not missing.any():
            break
        inside, local = missing.copy(), []
        for along, part, size in zip(index, shard.index, array.shape, strict=True):
            start, stop, _ = part.indices(size)
            inside &= (along >= start) & (along < stop)
            local.append(along - start)
        chosen = np.flatnonzero(inside)
        if len(chosen):
            values[chosen] = _read_shard(shard.data, [along[chosen] for along in local])
            missing[chosen] = False
    if missing.any():
        raise FrameworkError(
            f"an array of shape {array.shape} is only on devices of another process; put it on a mesh of all processes"
        )
    return values


def replicated_sharding(array: Array) -> NamedSharding | None:
    """Return a sharding that is replicated over the devices of an array; None for an array on one device."""
    sharding = array.sharding
    if len(sharding.device_set) == 1:
        return None
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, PartitionSpec())
    return NamedSharding(Mesh(np.array(_devices(array)), ("devices",)), PartitionSpec())


def replicate(numbers: np.ndarray, like: Array) -> Array:
    """Return numbers of the host on every device of an array; each process provides those of its own devices."""
    sharding = replicated_sharding(like)
    if sharding is None:
        return jnp.asarray(numbers)
    numbers = numbers.astype(jax.dtypes.canonicalize_dtype(numbers.dtype), copy=False)
    return jax.make_array_from_callback(numbers.shape, sharding, lambda index: numbers[index])


def copy_replicated(row: Array, like: Array) -> Array:
    """Return a copy of a row of numbers on every device of an array."""
    sharding = replicated_sharding(like)
    if sharding is None or row.sharding.is_equivalent_to(sharding, row.ndim):
        return jnp.array(row)
    return replicate(read(row, np.arange(row.size)), like)


def is_first_process(spread: Array) -> bool:
    """Return True if this process is the first of those that have a part of an array."""
    return bool(jax.process_index() == min([device.process_index for device in _devices(spread)]))


def gather_rows(spread: Array, row: np.ndarray) -> np.ndarray:
    """Return one row for each device of an array, from its process; all of these must call this at once."""
    devices = _devices(spread)
    mesh = Mesh(np.array(devices), ("devices",))
    each, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("devices",), ()))
    rows = jax.make_array_from_callback((len(devices), len(row)), each, lambda _: row[None])
    return np.asarray(jax.jit(jnp.asarray, out_shardings=whole)(rows))


def _is_local(array: Array) -> bool:
    """Return True if every process has all of an array. All of them know it, without communication."""
    if array.is_fully_addressable or array.is_fully_replicated:
        return True
    shards: dict[int, set[Any]] = {}
    indices: dict[Any, Any] = dict(array.sharding.devices_indices_map(array.shape))
    for device, index in indices.items():
        bounds = tuple([part.indices(size)[:2] for part, size in zip(index, array.shape, strict=True)])
        shards.setdefault(device.process_index, set()).add(bounds)
    return len({frozenset(each) for each in shards.values()}) == 1


def _devices(array: Array) -> list[Any]:
    # In the order of their numbers in a program.
    return list(array.sharding.devices_indices_map(array.shape))


def _read_shard(data: Array, index: Sequence[np.ndarray]) -> np.ndarray:
    """Return elements of a shard; one in the memory of the host is read without a computation."""
    return np.asarray(data)[tuple(index)] if is_on_host(data) else np.asarray(data[tuple(index)])


def is_on_host(array: Array) -> bool:
    """Return True if all of an array is in the memory of the host, where NumPy reads it without a copy."""
    return len(array.devices()) == 1 and all(device.platform == "cpu" for device in array.devices())
