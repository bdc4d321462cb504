"""Rules by which index sets go through ops, shared by the frameworks.

The first part works on ids alone: products, convolutions, pools, scatters. The second is for frameworks that give a
program to walk through (TensorFlow's graphs, JAX's jaxprs): `Propagator` runs it, and rules take its ops one by one.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from elementgrad._sparsity.index_sets import EMPTY, Ids, IndexSets

Pads = Sequence[tuple[int, int]]
MAX_MASKS = 64
"""The most different masks of output channels that are treated one by one; more are merged into one."""


def matmul(
    sets: IndexSets,
    factors: Sequence[Ids | None],
    masks: Sequence[np.ndarray | None],
    rows: int,
    columns: int,
) -> Ids:
    """Return the ids of a product `(..., rows, columns)` of two matrices, or of stacks of them.

    Ids of a factor are None if it does not depend on the seed. A mask is True where a known factor is not zero, and
    None if the factor is not known. Each factor is taken in turn, as if the other were constant.
    """
    (left, right), (left_mask, right_mask) = factors, masks
    parts = []
    if left is not None:
        parts.append(sets.matmul(left, right_mask, columns))
    if right is not None:
        mask = None if left_mask is None else left_mask.swapaxes(-1, -2)
        parts.append(sets.matmul(right.swapaxes(-1, -2), mask, rows).swapaxes(-1, -2))
    return sets.union(*parts)


def along_axis(sets: IndexSets, ids: Ids, axis: int, mask: np.ndarray) -> Ids:
    """Return the ids of a product of one axis with a matrix, old size by new size, that is not zero where a mask is."""
    moved = np.moveaxis(ids, axis, -1)
    rows = moved.reshape(1, prod(moved.shape[:-1]), moved.shape[-1])
    product = sets.matmul(rows, mask[None], mask.shape[1])
    return np.moveaxis(product.reshape(*moved.shape[:-1], mask.shape[1]), -1, axis)


def convolve(
    sets: IndexSets,
    ids: Ids,
    mask: np.ndarray,
    stride: Sequence[int],
    padding: Pads,
    dilation: Sequence[int] | None = None,
    spacing: Sequence[int] | None = None,
    groups: int = 1,
    max_masks: int = MAX_MASKS,
) -> Ids:
    """Return the ids of images `(n, channels, *space)` convolved with a kernel `(out, channels / groups, *space)`.

    `mask` is True where the kernel may be nonzero. `spacing` spaces the image, as in a transposed convolution.
    """
    channels, per_group = mask.shape[1], mask.shape[0] // groups
    parts = []
    for group in range(groups):
        image = ids[:, group * channels : (group + 1) * channels]
        kernels = mask[group * per_group : (group + 1) * per_group]
        distinct, inverse = np.unique(kernels.reshape(per_group, prod(mask.shape[1:])), axis=0, return_inverse=True)
        if len(distinct) > max_masks:
            distinct, inverse = np.any(distinct, axis=0, keepdims=True), np.zeros(per_group, dtype=np.int64)
        outputs = [
            _convolve_channel(sets, image, kernel.reshape(mask.shape[1:]), stride, padding, dilation, spacing)
            for kernel in distinct
        ]
        parts.append(np.stack(outputs, 1)[:, inverse.reshape(-1)])
    return np.concatenate(parts, 1)


def _convolve_channel(
    sets: IndexSets,
    ids: Ids,
    mask: np.ndarray,
    stride: Sequence[int],
    padding: Pads,
    dilation: Sequence[int] | None,
    spacing: Sequence[int] | None,
) -> Ids:
    """Return one output channel. Channels are one more axis of the window, unless the kernel is the same for all."""
    if (mask == mask[:1]).all() and prod(mask.shape):
        window = mask[0]
        window_mask = None if window.all() else window
        return sets.windows(sets.reduce(ids, [1]), window.shape, stride, padding, dilation, spacing, window_mask)
    stride, padding = [1, *stride], [(0, 0), *padding]
    dilation, spacing = [1, *(dilation or [1] * (ids.ndim - 2))], [1, *(spacing or [1] * (ids.ndim - 2))]
    return sets.windows(ids, mask.shape, stride, padding, dilation, spacing, mask)[:, 0]


def convolve_transposed(
    sets: IndexSets,
    ids: Ids,
    mask: np.ndarray,
    size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int = 1,
    max_masks: int = MAX_MASKS,
) -> Ids:
    """Return the transpose of a convolution, to images of a size: a convolution with the kernel flipped.

    `mask`, `stride`, `padding` (in front) and `dilation` are those of the convolution.
    """
    out, channels, *space = mask.shape
    mask = mask.reshape(groups, out // groups, channels, *space).swapaxes(1, 2)
    mask = np.flip(mask.reshape(groups * channels, out // groups, *space), tuple(range(2, 2 + len(space))))
    pads = _transposed_pads(ids.shape[2:], size, space, stride, padding, dilation)
    return convolve(sets, ids, mask, [1] * len(space), pads, dilation, stride, groups, max_masks)


def windows_transposed(
    sets: IndexSets,
    ids: Ids,
    shape: Sequence[int],
    size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int] | None = None,
) -> Ids:
    """Return for each element of a tensor of this shape the union of the windows that it is in, as of a pool."""
    dims = len(size)
    dilation = dilation or [1] * dims
    pads = _transposed_pads(ids.shape[ids.ndim - dims :], shape[len(shape) - dims :], size, stride, padding, dilation)
    return sets.windows(ids, size, [1] * dims, pads, dilation, stride)


def _transposed_pads(
    counts: Sequence[int],
    sizes: Sequence[int],
    window: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Pads:
    """Return the padding by which `counts` outputs of windows, spaced by the stride, give `sizes` elements again."""
    pads = []
    for count, size, n, step, pad, gap in zip(counts, sizes, window, stride, padding, dilation, strict=True):
        low = gap * (n - 1) - pad
        pads.append((low, size - (count - 1) * step - 1 + pad))
    return pads


def scatter(sets: IndexSets, ids: Ids, owners: np.ndarray, updates: Ids) -> Ids:
    """Return ids after updates were added to them at the flat positions `owners`."""
    positions = np.concatenate([np.arange(ids.size), owners.reshape(-1)])
    unions = sets.union_by_owner(positions, np.concatenate([ids.reshape(-1), updates.reshape(-1)]), ids.size)
    return unions.reshape(ids.shape)


def spread(sets: IndexSets, ids: Ids, axes: Sequence[int], shape: Sequence[int] | None = None) -> Ids:
    """Return for each element the union along some axes, for an op that may take any element along them."""
    if not len(axes):
        return ids
    return np.broadcast_to(sets.reduce(ids, axes, keepdims=True), ids.shape if shape is None else shape)


MAX_TURNS = 32
"""The turns of a loop that are followed while they add entries; then the loop is taken to mix everything."""
Value = Any
"""A known array, `UNKNOWN`, or a `DependentValue`."""
Shape = Sequence[int]


UNKNOWN = object()
"""A value that depends on the point of the derivative, and not on the seed."""


@dataclass(frozen=True, eq=False)
class DependentValue:
    """A value that may depend on the seed, by the ids of its elements."""

    ids: Ids

    def __post_init__(self) -> None:
        object.__setattr__(self, "ids", np.asarray(self.ids))  # NumPy makes scalars of arrays without axes


@dataclass(frozen=True, eq=False)
class UnknownShape(DependentValue):
    """A value whose shape is not known before it runs; its one set is that of all of its elements."""


def dependent_ids(values: Iterable[Value]) -> list[Ids]:
    """Return the ids of those values that may depend on the seed."""
    return [value.ids for value in values if isinstance(value, DependentValue)]


class Propagator(ABC):
    """Runs programs on index sets, with one table of sets for all of their values."""

    def __init__(self, sets: IndexSets):
        self.sets = sets

    @abstractmethod
    def is_known(self, value: Value) -> bool:
        """Return True for a value that is the same at every point, and there to be looked at."""

    @abstractmethod
    def to_array(self, value: Value) -> np.ndarray:
        """Return a known value as an array."""

    @abstractmethod
    def input_shapes(self, op: Any) -> Sequence[Shape | None]:
        """Return the shapes of an op's inputs, None for one that is not known."""

    @abstractmethod
    def output_shapes(self, op: Any) -> Sequence[Shape | None]:
        """Return the shapes of an op's outputs, None for one that is not known."""

    def ids(self, value: Value, shape: Shape | None) -> Ids:
        """Return the ids of a value; empty sets for one that does not depend on the seed."""
        if isinstance(value, DependentValue):
            return value.ids
        assert shape is not None
        return np.zeros(shape, dtype=np.int64)

    def mask(self, value: Value) -> np.ndarray | None:
        """Return where a known value is not zero; None for one that is not known."""
        return self.to_array(value) != 0 if self.is_known(value) else None

    def union_values(self, *values: Value) -> Value:
        """Return a value that stands for any one of several values of one shape."""
        tensors = dependent_ids(values)
        return DependentValue(self.sets.union(*tensors)) if tensors else UNKNOWN

    def fixed_point(self, carried: Sequence[Value], turn: Callable[[list[Value]], Sequence[Value]]) -> list[Value]:
        """Return what a loop carries after any number of turns."""
        state = [self.union_values(value) for value in carried]
        for count in range(2 * MAX_TURNS + len(state)):
            larger = [self.union_values(old, new) for old, new in zip(state, turn(state), strict=True)]
            if count >= MAX_TURNS:  # from here on all is one set, which grows only when another value is reached
                union = self.sets.union_all(*dependent_ids(larger))
                larger = [
                    DependentValue(np.full_like(value.ids, union)) if isinstance(value, DependentValue) else UNKNOWN
                    for value in larger
                ]
            if not any(self._has_grown(old, new) for old, new in zip(state, larger, strict=True)):
                return state
            state = larger
        raise AssertionError("a loop in which no end of what is reached was found")

    def _has_grown(self, old: Value, new: Value) -> bool:
        if isinstance(old, DependentValue):
            return bool((self.sets.sizes(old.ids) != self.sets.sizes(new.ids)).any())
        return isinstance(new, DependentValue) and bool((new.ids != EMPTY).any())


Rule = Callable[[Any, Any, list[Value]], Sequence[Value]]
"""From a propagator, an op and its operands, of which at least one depends on the seed, to the op's results."""


def everything(propagator: Propagator, op: Any, operands: Sequence[Value]) -> list[Value]:
    """Rule for an unknown op: each result depends on all that any operand depends on."""
    union = propagator.sets.union_all(*dependent_ids(operands))
    return [
        UnknownShape(np.array(union)) if shape is None else DependentValue(np.full(shape, union))
        for shape in propagator.output_shapes(op)
    ]


def elementwise(propagator: Propagator, op: Any, operands: list[Value]) -> Sequence[Value]:
    """Rule for elementwise ops: the union of the operands at the same place; several results go one to one."""
    shapes = propagator.output_shapes(op)
    if len(shapes) > 1:
        return operands
    if shapes[0] is None and any(not isinstance(value, DependentValue) for value in operands):
        return everything(propagator, op, operands)
    ids = propagator.sets.union(*dependent_ids(operands))
    return [DependentValue(ids if shapes[0] is None else np.broadcast_to(ids, shapes[0]))]


def multiply(propagator: Propagator, op: Any, operands: list[Value]) -> Sequence[Value]:
    """Rule for elementwise products: empty where a factor is known to be zero."""
    (result,) = elementwise(propagator, op, operands)
    for value in operands:
        mask = propagator.mask(value)
        if mask is not None and type(result) is DependentValue:
            result = DependentValue(np.where(mask, result.ids, EMPTY))
    return [result]


def mix(propagator: Propagator, op: Any, operands: list[Value], axes: Sequence[int]) -> Sequence[Value]:
    """Rule for sorts, Fourier transforms and linear algebra: everything along some axes mixes."""
    tensors = dependent_ids(operands)
    results = []
    for shape in propagator.output_shapes(op):
        if shape is None or any(ids.ndim != len(shape) for ids in tensors):
            return everything(propagator, op, operands)
        reduced = [propagator.sets.reduce(ids, axes, keepdims=True) for ids in tensors]
        results.append(DependentValue(np.broadcast_to(propagator.sets.union(*reduced), shape)))
    return results
