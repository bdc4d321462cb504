"""Sets of reach through the operations of JAX that take indices: known ones move data, others may move any."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.lax import GatherDimensionNumbers, GatherScatterMode, gather

from elementgrad.backends.jax.program import bind
from elementgrad.backends.jax.reaching.following import Follower, Rule, everything, known
from elementgrad.sparsity.reach import Ids
from elementgrad.sparsity.value import Reached, Value


def gathered(follower: Follower, equation: Any, operands: list[Value]) -> list[Value]:
    """`gather`: along an axis that is indexed by what is not known, any element may be meant."""
    operand, indices = operands
    if isinstance(indices, Reached):
        return everything(follower, equation, operands)
    params = equation.params
    ids = operand.ids
    if not known(indices):
        sizes = zip(params["slice_sizes"], ids.shape, strict=True)
        cut = [axis for axis, (part, whole) in enumerate(sizes) if part < whole]
        ids = _smeared(follower, ids, [axis for axis in cut if axis in params["dimension_numbers"].start_index_map])
        indices = jnp.zeros(equation.invars[1].aval.shape, jnp.int32)
    return [_taken(ids, indices, params["dimension_numbers"], params["slice_sizes"], params["mode"])]


def sliced(follower: Follower, equation: Any, operands: list[Value]) -> list[Value]:
    """`dynamic_slice`."""
    operand, *starts = operands
    if any(isinstance(start, Reached) for start in starts):
        return everything(follower, equation, operands)
    ids, sizes = operand.ids, equation.params["slice_sizes"]
    loose = [axis for axis, start in enumerate(starts) if not known(start) and sizes[axis] < ids.shape[axis]]
    ids = _smeared(follower, ids, loose)
    corner = _corner(starts, ids.shape, sizes)
    return [Reached(ids[tuple([slice(low, low + size) for low, size in zip(corner, sizes, strict=True)])])]


def updated(follower: Follower, equation: Any, operands: list[Value]) -> list[Value]:
    """`dynamic_update_slice`."""
    starts = operands[2:]
    if any(isinstance(start, Reached) for start in starts):
        return everything(follower, equation, operands)
    ids, update = (
        follower.ids(value, variable) for value, variable in zip(operands, equation.invars[:2], strict=False)
    )
    sizes = update.shape
    loose = [axis for axis, start in enumerate(starts) if not known(start) and sizes[axis] < ids.shape[axis]]
    corner = _corner(starts, ids.shape, sizes)
    where = tuple([slice(low, low + size) for low, size in zip(corner, sizes, strict=True)])
    if not loose:
        result = ids.copy()
        result[where] = update
        return [Reached(result)]
    where = tuple([slice(None) if axis in loose else part for axis, part in enumerate(where)])
    any_of = follower.reach.over(update, loose, keepdims=True)
    result = ids.copy()
    result[where] = follower.reach.union(ids[where], any_of)
    return [Reached(result)]


def scattered(follower: Follower, equation: Any, operands: list[Value]) -> list[Value]:
    """Every kind of scatter: at known indices written or joined there, at others joined anywhere."""
    indices = operands[1]
    if isinstance(indices, Reached):
        return everything(follower, equation, operands)
    ids, updates = (follower.ids(operands[number], equation.invars[number]) for number in (0, 2))
    if not ids.size:  # everything is dropped, and nothing can be taken to find out where it would go
        return [Reached(ids)]
    params = equation.params
    if not known(indices):
        return [Reached(follower.reach.union(ids, np.array(follower.reach.all_of(updates))))]
    if equation.primitive.name == "scatter" and params["unique_indices"]:
        sets = [jnp.asarray(ids, jnp.int32), indices, jnp.asarray(updates, jnp.int32)]
        (result,) = bind(equation, sets)
        return [Reached(np.asarray(result, np.int64))]
    owners = _owners(ids.shape, updates.shape, indices, params)
    inside = owners >= 0
    both = np.concatenate([np.arange(ids.size), owners[inside]]), np.concatenate([ids.reshape(-1), updates[inside]])
    return [Reached(follower.reach.gathered(*both, ids.size).reshape(ids.shape))]


def _owners(shape: Sequence[int], updates: Sequence[int], indices: Any, params: Any) -> np.ndarray:
    """For each element of the updates the position that it goes to, -1 for one that is dropped."""
    numbers = params["dimension_numbers"]
    narrow = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    window = iter(numbers.update_window_dims)
    sizes = [1 if axis in narrow else updates[next(window)] for axis in range(len(shape))]
    as_gather = GatherDimensionNumbers(
        offset_dims=numbers.update_window_dims,
        collapsed_slice_dims=numbers.inserted_window_dims,
        start_index_map=numbers.scatter_dims_to_operand_dims,
        operand_batching_dims=numbers.operand_batching_dims,
        start_indices_batching_dims=numbers.scatter_indices_batching_dims,
    )
    positions = np.arange(1, int(np.prod(shape)) + 1).reshape(shape)
    return _taken(positions, indices, as_gather, sizes, params["mode"]).ids - 1


def _taken(ids: Ids, indices: Any, numbers: Any, sizes: Sequence[int], mode: Any) -> Reached:
    """A gather of numbers of sets; what is out of range is 0."""
    mode = GatherScatterMode.from_any(mode)
    if mode == GatherScatterMode.PROMISE_IN_BOUNDS:
        mode = GatherScatterMode.CLIP
    taken = gather(jnp.asarray(ids, jnp.int32), indices, numbers, tuple(sizes), mode=mode, fill_value=0)
    return Reached(np.asarray(taken, np.int64))


def _smeared(follower: Follower, ids: Ids, axes: Sequence[int]) -> Ids:
    """Any element along some axes in place of each."""
    return np.broadcast_to(follower.reach.over(ids, axes, keepdims=True), ids.shape) if axes else ids


def _corner(starts: Sequence[Value], shape: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Where a slice starts: it is moved to be inside, and one that is not known counts as 0."""
    return [
        min(max(int(start), 0), whole - size) if known(start) else 0
        for start, whole, size in zip(starts, shape, sizes, strict=True)
    ]


INDEXING: dict[str, Rule] = {
    "gather": gathered,
    "dynamic_slice": sliced,
    "dynamic_update_slice": updated,
    **dict.fromkeys(("scatter", "scatter-add", "scatter-mul", "scatter-min", "scatter-max", "scatter-sub"), scattered),
}
