"""Arrays that are spread over the devices of a mesh, and over processes: a few elements of them, nothing gathered."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from elementgrad.backends.jax.axes import picked
from elementgrad.errors import FrameworkError

Array = jax.Array


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
