"""What passes by each operation of a run: derivatives going forward, gradients coming back, numbers."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from elementgrad.backends.tensorflow.explaining import words
from elementgrad.backends.tensorflow.explaining.records import Record, differentiable, zeros
from elementgrad.backends.witness import Pulled, Pushed, Seen, arriving, bounded, counts_for_nothing, weights

Tensor = Any
CHOOSES = frozenset(
    """
    Max Min TopK TopKV2 Maximum Minimum MaxPool MaxPoolV2 MaxPool3D MaxPoolWithArgmax Dilation2D FractionalMaxPool
    NthElement SegmentMax SegmentMin SegmentMaxV2 SegmentMinV2 UnsortedSegmentMax UnsortedSegmentMin
    TensorScatterMax TensorScatterMin
    """.split()  # noqa: SIM905
)
BOUNDS = {"Maximum", "Minimum"}
"""Of those, the ones that may take a constant."""
SHARES = {"Softmax", "LogSoftmax", "SoftmaxCrossEntropyWithLogits", "SparseSoftmaxCrossEntropyWithLogits"}
PRODUCTS = {"Mul", "RealDiv"}
MATRICES = {"MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum", "Conv2D", "Conv3D"}
SUMS = {*MATRICES, "Sum", "Mean", "AddV2", "AddN", "Sub", "BiasAdd", "Cumsum"}
LOOKS_UP = {"GatherV2", "ResourceGather"}
SEGMENTS = {"UnsortedSegmentSum", "UnsortedSegmentProd", "UnsortedSegmentMax", "UnsortedSegmentMin"}


def reached(records: Sequence[Record], source: int) -> set[int]:
    """The values computed from one."""
    found = {source}
    for each in records:
        if not found.isdisjoint(each.takes):
            found.update(each.gives)
    return found


def leading(records: Sequence[Record], target: int) -> set[int]:
    """The values that one is computed from."""
    found = {target}
    for each in reversed(records):
        if not found.isdisjoint(each.gives):
            found.update(each.takes)
    return found


def spread(like: Tensor, positions: np.ndarray, values: np.ndarray) -> Tensor:
    """Zeros, but for some flat positions."""
    flat = np.zeros(math.prod(like.shape))
    flat[positions] = values
    return tf.cast(flat.reshape(tuple(like.shape)), like.dtype)


def pushed(
    records: Sequence[Record], connected: Collection[int], start: Mapping[int, Tensor], target: int
) -> tuple[list[Pushed | None], Tensor | None]:
    """How far derivatives get that start somewhere, step by step; and what arrives at the target."""
    tangents = dict(start)
    found: list[Pushed | None] = []
    for each in records:
        taken = [tangents.get(value) for value in each.takes]
        arrives = max([_size(t) for t in taken if t is not None], default=0.0)
        if not each.inputs or arrives == 0:
            found.append(Pushed(0.0, 0.0) if each.inputs else None)
            continue
        if not each.outputs:  # a write to a variable, which keeps numbers alone
            found.append(Pushed(arrives, 0.0))
            continue
        given: list[Tensor | None] = [None] * len(each.outputs)
        if not set(each.gives).isdisjoint(connected):
            given = each.push(taken)
        tangents.update({n: t for n, t in zip(each.gives, given, strict=False) if t is not None})
        leaves = max([_size(t) for t in given if t is not None], default=0.0)
        found.append(Pushed(arrives, leaves, _why_none(each, taken) if leaves == 0 else _bounded(each, taken)))
    return found, tangents.get(target)


def pulled(
    records: Sequence[Record],
    connected: Collection[int],
    start: tuple[int, Tensor],
    counts: tuple[int, np.ndarray] | None = None,
    gradients: dict[int, Tensor] | None = None,
) -> list[Pulled | None]:
    """What gradients come back to each step, and what it makes of them; of one value some elements alone may count.

    The gradients of all values go into `gradients`, if it is given.
    """
    gradients = {} if gradients is None else gradients
    gradients.update([start])
    found: list[Pulled | None] = []
    for each in reversed(records):
        came = [gradients.get(value) for value in each.gives]
        if all(g is None for g in came) or set(each.takes).isdisjoint(connected) or not each.outputs or not each.inputs:
            found.append(None)
            continue
        seeds = [zeros(y) if g is None else g for g, y in zip(came, each.outputs, strict=True)]
        went = each.pull(seeds) if not set(each.gives).isdisjoint(connected) else [None] * len(each.inputs)
        arrives = _worst([_size(g) for g in came if g is not None])
        leaves, there = 0.0, None
        for value, g in zip(each.takes, went, strict=False):
            if g is None or value not in connected:
                continue
            gradients[value] = gradients[value] + g if value in gradients else g
            if counts is not None and counts[0] == value:
                g = _only(g, counts[1])
            leaves = _worst([leaves, _size(g)])
            if not math.isfinite(_size(g)):
                bad = ~np.isfinite(np.abs(g.numpy()))
                size = None if came[0] is None else arriving(np.abs(tf.cast(came[0], tf.float64).numpy()), bad)
                there = max(there or 0.0, arrives if size is None else size)
        found.append(Pulled(arrives, leaves, arrives if there is None else there, arrives == 0))
    return found[::-1]


def touching(records: Sequence[Record], start: Mapping[int, np.ndarray]) -> dict[int, np.ndarray]:
    """Masks of the elements that can move with some that are given, at whatever numbers."""
    masks = dict(start)
    for each in records:
        if any(value in masks for value in each.takes):
            found = each.touched([masks.get(value) for value in each.takes])
            masks.update({n: mask for n, mask in zip(each.gives, found, strict=False) if mask.any()})
    return masks


def seen(each: Record) -> Seen | None:
    """Whether the numbers of a step are finite."""
    if not each.inputs:
        return None
    takes, gives = [x for x in each.inputs if differentiable(x)], [y for y in each.outputs if differentiable(y)]
    grows = all(np.all(x.numpy()) for x in takes) and not any(np.isnan(y.numpy()).any() for y in gives)
    return Seen(all(map(_finite, takes)), all(map(_finite, gives)), grows)


def out_of_range(each: Record) -> str:
    """What is to be said of the ids of segments, if some are of none: TensorFlow drops what bears them."""
    if each.kind not in SEGMENTS:
        return ""
    wrong = each.inputs[1].numpy()[_of_no_segment(each)]
    if not wrong.size:
        return ""
    return f"id {wrong[0]} is out of range for {int(each.inputs[2])} segments, and TensorFlow drops what bears it"


def _of_no_segment(each: Record) -> np.ndarray:
    ids = each.inputs[1].numpy()
    return np.asarray((ids < 0) | (ids >= int(each.inputs[2])))


def _why_none(each: Record, tangents: Sequence[Tensor | None]) -> str | None:
    """Why a step gives no derivative, where its numbers say more than its name."""
    carrying = [(x, t) for x, t in zip(each.inputs, tangents, strict=False) if t is not None and _size(t) > 0]
    x, tangent = carrying[0]
    if each.inside:
        return words.suspect(each.inside)
    moved = np.abs(tangent.numpy()) > 0
    if _is_too_small(each, tangents):
        return "underflow"
    if each.kind in SHARES and not np.ptp(tangent.numpy(), axis=-1).any():  # it takes differences alone
        return "cancelled"
    if each.kind in SHARES and counts_for_nothing(tf.cast(x, tf.float64).numpy(), moved):
        return "masked"
    if each.kind == "Relu6" and bool((np.asarray(x)[moved] > 0).all()):
        return "clamped"
    if each.kind in SEGMENTS and bool(_of_no_segment(each)[np.nonzero(moved)[: each.inputs[1].ndim]].all()):
        return "out-of-range"
    if each.kind in CHOOSES and each.word not in ("clip_by_value", "relu6", "hard_sigmoid"):
        if each.ties([None if t is None else np.abs(t.numpy()) > 0 for t in tangents]):
            return "tie"
        return _bounded(each, tangents) or "not-selected"
    if each.kind in LOOKS_UP and each.word not in ("boolean_mask", "indexing") and tangent.shape.rank > 1:
        axis = int(each.inputs[2]) if each.kind == "GatherV2" else 0
        return "row-not-used" if axis == 0 else None
    if each.kind in (*PRODUCTS, *MATRICES) and each.word not in ("dropout", "norm"):
        if len(carrying) > 1:
            return "stationary" if not np.asarray(x)[np.abs(tangent.numpy()) > 0].any() else "cancelled"
        others = [y for y, t in zip(each.inputs, tangents, strict=False) if t is None or _size(t) == 0]
        if others and differentiable(others[0]) and bool((others[0].numpy() != 0).all()):
            return "underflow" if each.kind in PRODUCTS else _why_no_sum(each, tangents)
    return _why_no_sum(each, tangents) if each.kind in SUMS else None


def _bounded(each: Record, tangents: Sequence[Tensor | None]) -> str | None:
    """What a maximum or minimum with a bound is."""
    still = [y for y, t in zip(each.inputs, tangents, strict=False) if t is None or _size(t) == 0]
    if each.kind not in BOUNDS or each.word == "clip_by_value" or len(still) != 1:
        return None
    return bounded(each.kind == "Maximum", still[0].numpy())


def _is_too_small(each: Record, tangents: Sequence[Tensor | None]) -> bool:
    """Whether something leaves if more comes in: a power of two, so that nothing is rounded in another way."""
    size = max([_size(t) for t in tangents if t is not None])
    if not size < 1:
        return False
    factor = 2.0 ** -math.frexp(size)[1]
    more = [None if t is None else tf.cast(_wide(t) * factor, t.dtype) for t in tangents]
    return any(t is not None and _size(t) > 0 for t in each.push(more))


def _wide(x: Tensor) -> Tensor:
    return tf.cast(x, tf.complex128 if x.dtype.is_complex else tf.float64)


def _why_no_sum(each: Record, tangents: Sequence[Tensor | None]) -> str:
    """Whether parts had cancelled, which come in other amounts then; or each was multiplied by zero."""
    parts = [None if t is None else t * _amounts(t, number) for number, t in enumerate(tangents, 1)]
    return "cancelled" if any(t is not None and _size(t) > 0 for t in each.push(parts)) else "masked"


def _amounts(like: Tensor, number: int) -> Tensor:
    return tf.cast(number * (weights(math.prod(like.shape)) + 0.5).reshape(tuple(like.shape)), like.dtype)


def _only(x: Tensor, positions: np.ndarray) -> Tensor:
    """Zeros, but for some flat positions of a gradient."""
    mask = np.zeros(math.prod(x.shape), bool)
    mask[positions] = True
    return tf.where(mask.reshape(tuple(x.shape)), x, tf.zeros_like(x))


def _size(x: Tensor) -> float:
    """The largest in size; NaN if there is one."""
    x = tf.convert_to_tensor(x)
    return float(tf.reduce_max(tf.abs(x))) if math.prod(x.shape) else 0.0


def _worst(sizes: Sequence[float]) -> float:
    return math.nan if any(map(math.isnan, sizes)) else max(sizes, default=0.0)


def _finite(x: Tensor) -> bool:
    return not differentiable(x) or bool(tf.reduce_all(tf.math.is_finite(tf.abs(x))))
