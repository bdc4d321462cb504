"""Sets of reach through the operations of TensorFlow that add at indices, or take by indices that are not known."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from elementgrad.backends.tensorflow.reaching.following import Follower, Operation, Rule, array_of, known, rerun
from elementgrad.sparsity.reach import Ids
from elementgrad.sparsity.value import Reached, Value


def gathered(follower: Follower, operation: Operation, operands: list[Value]) -> Sequence[Value]:
    """`GatherV2`: along an axis that is indexed by what is not known, any element may be meant."""
    params, indices, axis = operands
    if isinstance(indices, Reached) or not known(axis):
        return follower.everything(operation, operands)
    ids = params.ids
    if not known(indices):
        shape = operation.inputs[1].shape
        if not shape.is_fully_defined():
            return follower.everything(operation, operands)
        ids = np.broadcast_to(follower.reach.over(ids, [int(axis)], keepdims=True), ids.shape)
        indices = tf.zeros(shape, operation.inputs[1].dtype)
    (taken,) = rerun(operation, [tf.constant(ids, tf.int64), indices, axis])
    return [Reached(array_of(taken))]


def scattered(follower: Follower, operation: Operation, operands: list[Value]) -> Sequence[Value]:
    """`ScatterNd`: everything is added where it goes."""
    indices, updates, shape = operands
    if not known(indices) or not known(shape) or not isinstance(updates, Reached):
        return follower.everything(operation, operands)
    shape = array_of(shape).tolist()
    return [_added(follower, np.zeros(shape, dtype=np.int64), indices, updates.ids)]


def scattered_onto(follower: Follower, operation: Operation, operands: list[Value]) -> Sequence[Value]:
    """`TensorScatterAdd` and its like: what is there, and what is added to it."""
    indices = operands[1]
    ends = [(operands[number], operation.inputs[number]) for number in (0, 2)]
    if not known(indices) or not all(isinstance(v, Reached) or x.shape.is_fully_defined() for v, x in ends):
        return follower.everything(operation, operands)
    there, updates = (follower.ids(value, x) for value, x in ends)
    return [_added(follower, there, indices, updates)]


def segmented(follower: Follower, operation: Operation, operands: list[Value]) -> Sequence[Value]:
    """Sums over segments: the first axes of the data are numbered by where they go, and negative numbers go nowhere."""
    data, segments = operands[:2]
    count = operands[2] if len(operands) > 2 else None
    if not known(segments) or (count is not None and not known(count)):
        return follower.everything(operation, operands)
    segments = array_of(segments).astype(np.int64)
    rest = data.ids.shape[segments.ndim :]
    total = int(count) if count is not None else int(segments.max(initial=-1)) + 1
    size = int(np.prod(rest))
    owners = (segments.reshape(-1, 1) * size + np.arange(size)).reshape(-1)
    inside = (owners >= 0) & (owners < total * size)
    unions = follower.reach.gathered(owners[inside], data.ids.reshape(-1)[inside], total * size)
    return [Reached(unions.reshape(total, *rest))]


def folded(follower: Follower, operation: Operation, operands: list[Value]) -> Sequence[Value]:
    """`MirrorPadGrad`: what was padded goes back to where it came from."""
    operand, paddings = operands
    if not known(paddings):
        return follower.everything(operation, operands)
    pads = array_of(paddings)
    shape = [n - int(low) - int(high) for n, (low, high) in zip(operand.ids.shape, pads, strict=True)]
    positions = tf.reshape(tf.range(int(np.prod(shape)), dtype=tf.int64), shape)
    mode = operation.get_attr("mode")
    owners = array_of(tf.raw_ops.MirrorPad(input=positions, paddings=paddings, mode=mode)).reshape(-1)
    unions = follower.reach.gathered(owners, operand.ids.reshape(-1), int(np.prod(shape)))
    return [Reached(unions.reshape(shape))]


def _added(follower: Follower, there: Ids, indices: Any, updates: Ids) -> Reached:
    positions = tf.reshape(tf.range(there.size, dtype=tf.int64), there.shape)
    owners = array_of(tf.gather_nd(positions, indices)).reshape(-1)
    both = (
        np.concatenate([np.arange(there.size), owners]),
        np.concatenate([there.reshape(-1), updates.reshape(-1)]),
    )
    return Reached(follower.reach.gathered(*both, there.size).reshape(there.shape))


INDEXING: dict[str, Rule] = {
    "GatherV2": gathered,
    "ScatterNd": scattered,
    **dict.fromkeys(("TensorScatterAdd", "TensorScatterSub", "TensorScatterMax", "TensorScatterMin"), scattered_onto),
    **dict.fromkeys(("UnsortedSegmentSum", "SegmentSum", "SegmentMean", "SegmentSumV2"), segmented),
    "MirrorPadGrad": folded,
}
