"""Sets of seed elements that tensors may depend on: the algebra by which patterns are found.

Beside each tensor that depends on the seed a backend keeps an array of integers in the tensor's shape, the **ids**. An
id is the index of a set of seed elements in an `IndexSets` table. `_sparsity/__init__.py` tells how they are used.
"""

import math
from collections.abc import Sequence

import numpy as np

from elementgrad._sparsity.pattern import Pattern, require_room

Ids = np.ndarray
"""The id of a set for each element of a tensor."""
EMPTY = 0
"""The id of the empty set."""
COMPACT_ABOVE = 3 * 10**7
"""Number of elements in all sets from which on unused sets are worth dropping."""
DOMINANT = 4
"""A set that is this many times as large as all others together is checked for containing them already."""
MAX_PRODUCTS = 2 * 10**7
"""The most products for which the zeros of a known matrix are used."""


class IndexSets:
    """Growing table of sets of the elements of one seed. Equal ids are equal sets; equal sets may differ in id.

    >>> sets = IndexSets(4)
    >>> ids = sets.seed_ids((4,))
    >>> shifted = np.pad(ids[1:], (0, 1))
    >>> sets.pattern(sets.union(ids, shifted)).dense().astype(int)
    array([[1, 1, 0, 0],
           [0, 1, 1, 0],
           [0, 0, 1, 1],
           [0, 0, 0, 1]])
    >>> sets.pattern(sets.reduce(shifted.reshape(2, 2), [1])).rows.tolist()
    [0, 0, 1]
    """

    def __init__(self, size: int):
        self.size = size
        """Number of elements of the seed."""
        self.full = size + 1
        """The id of the set of all of them."""
        self._starts = np.concatenate([[0], np.arange(size + 1), [2 * size]])
        self._sets = size + 2
        self._elements = np.concatenate([np.arange(size), np.arange(size)]).astype(np.int64)
        self._used = 2 * size
        self._limit = COMPACT_ABOVE

    def seed_ids(self, shape: Sequence[int]) -> Ids:
        """Return the ids of the seed, whose elements depend on themselves."""
        return np.arange(1, self.size + 1).reshape(shape)

    def sizes(self, ids: Ids) -> np.ndarray:
        """Return how many elements each set has."""
        return self._starts[ids + 1] - self._starts[ids]

    def union(self, *tensors: Ids) -> Ids:
        """Return for each element the union of its sets in several tensors, which broadcast."""
        result = tensors[0]
        for ids in tensors[1:]:
            result = self._union_pairs(result, ids)
        return result

    def union_all(self, *tensors: Ids) -> int:
        """Return the union of all sets, for elements of an unknown op."""
        ids = np.unique(np.concatenate([ids.reshape(-1) for ids in tensors]))
        return int(self.union_by_owner(np.zeros(len(ids), dtype=np.int64), ids, 1)[0])

    def union_by_owner(self, owners: np.ndarray, ids: np.ndarray, count: int) -> Ids:
        """Return for each of `count` owners the union of its sets: `owners` and `ids` go in pairs, as in a scatter."""
        result = np.zeros(count, dtype=np.int64)
        nonempty = ids != EMPTY
        owners, ids = owners[nonempty], ids[nonempty]
        is_full = np.zeros(count, dtype=bool)
        is_full[owners[ids == self.full]] = True
        result[is_full] = self.full
        keys = np.unique((owners * self._sets + ids)[~is_full[owners]])
        owners = keys // self._sets
        ids = keys - owners * self._sets
        is_single = np.bincount(owners, minlength=count)[owners] == 1
        result[owners[is_single]] = ids[is_single]
        if is_single.all():
            return result
        owners, ids = owners[~is_single], ids[~is_single]
        distinct, owners = np.unique(owners, return_inverse=True)
        result[distinct] = self._merge(owners, ids, len(distinct))
        return result

    def reduce(self, ids: Ids, axes: Sequence[int], keepdims: bool = False) -> Ids:
        """Return the unions over some axes."""
        axes = sorted({axis % ids.ndim for axis in axes})
        others = [axis for axis in range(ids.ndim) if axis not in axes]
        shape = [1 if axis in axes else size for axis, size in enumerate(ids.shape) if axis in others or keepdims]
        count = int(np.prod([ids.shape[axis] for axis in others]))
        flat = ids.transpose([*others, *axes]).reshape(count, int(np.prod([ids.shape[axis] for axis in axes])))
        if not flat.shape[1]:
            return np.zeros(shape, dtype=np.int64)
        if flat.shape[1] == 1:
            return flat.reshape(shape)
        same = (flat[:, :1] == flat).all(1)
        result = np.where(same, flat[:, 0], EMPTY)
        rest = np.flatnonzero(~same)
        if len(rest):
            owners = np.repeat(np.arange(len(rest)), flat.shape[1])
            result[rest] = self.union_by_owner(owners, flat[rest].reshape(-1), len(rest))
        return result.reshape(shape)

    def cumulative(self, ids: Ids, axis: int, reverse: bool = False) -> Ids:
        """Return the unions up to each element along an axis, as of a cumulative sum; from each on, if `reverse`."""
        ids = np.moveaxis(ids, axis, 0)
        ids = ids[::-1] if reverse else ids
        step = 1
        while step < len(ids):
            ids = np.concatenate([ids[:step], self.union(ids[step:], ids[:-step])])
            step *= 2
        return np.moveaxis(ids[::-1] if reverse else ids, 0, axis)

    def windows(
        self,
        ids: Ids,
        size: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[tuple[int, int]],
        dilation: Sequence[int] | None = None,
        spacing: Sequence[int] | None = None,
        mask: np.ndarray | None = None,
    ) -> Ids:
        """Return the unions over windows of the last axes, as many as `size` has entries.

        `dilation` spaces the elements of a window, `spacing` those of the tensor (as in a transposed convolution).
        Negative padding cuts off. `mask`, of shape `size`, is True for the elements of a window that count.
        """
        dims, lead = len(size), ids.ndim - len(size)
        if not dims:
            return ids
        dilation, spacing = dilation or [1] * dims, spacing or [1] * dims
        if any(step > 1 for step in spacing):
            shape = [(n - 1) * step + 1 if n else 0 for n, step in zip(ids.shape[lead:], spacing, strict=True)]
            spaced = np.zeros((*ids.shape[:lead], *shape), dtype=np.int64)
            spaced[_step_slices([*[1] * lead, *spacing])] = ids
            ids = spaced
        ids = np.pad(ids, [(0, 0)] * lead + [(max(0, low), max(0, high)) for low, high in padding])
        cut = [slice(max(0, -low), n - max(0, -high)) for n, (low, high) in zip(ids.shape[lead:], padding, strict=True)]
        ids = ids[tuple([slice(None)] * lead + cut)]
        spans = [(n - 1) * step + 1 for n, step in zip(size, dilation, strict=True)]
        axes = tuple(range(lead, ids.ndim))
        if any(n < span for n, span in zip(ids.shape[lead:], spans, strict=True)):  # no window fits in
            counts = [
                max(0, (n - span) // step + 1) for n, span, step in zip(ids.shape[lead:], spans, stride, strict=True)
            ]
            return np.zeros((*ids.shape[:lead], *counts), dtype=np.int64)
        views = np.lib.stride_tricks.sliding_window_view(ids, spans, axes)
        views = views[_step_slices([*[1] * lead, *stride, *dilation])]
        if mask is not None:
            return self.reduce(views[..., mask], [-1])
        return self.reduce(views, range(views.ndim - dims, views.ndim))

    def matmul(self, ids: Ids, mask: np.ndarray | None, width: int) -> Ids:
        """Return the product of matrices `(..., n, k)` with constant ones `(..., k, width)`.

        `mask` is False where the constant is zero; None if nothing is known. A stack of one serves all.

        >>> sets = IndexSets(4)
        >>> product = sets.matmul(sets.seed_ids((1, 2, 2)), np.eye(2, dtype=bool)[None], 2)
        >>> sets.pattern(product).columns.tolist()
        [0, 1, 2, 3]
        """
        *stack, rows, inner = ids.shape
        count = math.prod(stack)
        if mask is not None and not mask.all():
            mask = mask.reshape(math.prod(mask.shape[:-2]), inner, width)
            if np.count_nonzero(mask) * (count // max(1, len(mask))) * rows <= MAX_PRODUCTS:
                index, source, target = np.nonzero(np.broadcast_to(mask, (count, inner, width)))
                owners = (index * rows + np.arange(rows)[:, None]) * width + target
                factors = ids.reshape(count, rows, inner)[index, :, source].T
                unions = self.union_by_owner(owners.reshape(-1), factors.reshape(-1), count * rows * width)
                return unions.reshape(*stack, rows, width)
        return np.broadcast_to(self.reduce(ids, [-1], keepdims=True), (*stack, rows, width))

    @property
    def is_large(self) -> bool:
        """True when it is time to `compact`."""
        return self._used > self._limit

    def compact(self, tensors: Sequence[Ids]) -> None:
        """Drop all sets but those of these arrays, whose ids change in place."""
        used = np.zeros(self._sets, dtype=bool)
        used[: self.full + 1] = True
        for ids in tensors:
            used[ids] = True
        old = np.flatnonzero(used)
        sizes, (_, elements) = self.sizes(old), self._list_elements(old)
        new = np.cumsum(used) - 1
        for ids in tensors:
            ids[...] = new[ids]
        self._elements, self._used, self._sets = elements, len(elements), len(old)
        self._starts = np.concatenate([[0], np.cumsum(sizes)])
        self._limit = max(COMPACT_ABOVE, 2 * self._used)
        require_room(self._used)

    def pattern(self, ids: Ids) -> Pattern:
        """Return a pattern with a row for each element: the elements of the seed that it may depend on."""
        ids = ids.reshape(-1)
        counts = self.sizes(ids)
        starts = np.concatenate([[0], np.cumsum(counts)])
        require_room(int(starts[-1]))
        return Pattern((len(ids), self.size), starts, self._list_elements(ids)[1])

    def _union_pairs(self, a: Ids, b: Ids) -> Ids:
        a, b = np.broadcast_arrays(a, b)
        result = np.where((b == EMPTY) | (a == self.full) | (a == b), a, b)
        rest = (a != b) & (a != EMPTY) & (b != EMPTY) & (a != self.full) & (b != self.full)
        if rest.any():
            low, high = np.minimum(a[rest], b[rest]), np.maximum(a[rest], b[rest])
            keys, inverse = np.unique(low * self._sets + high, return_inverse=True)
            first = keys // self._sets
            ids = np.stack([first, keys - first * self._sets], 1).reshape(-1)
            result[rest] = self._merge(np.repeat(np.arange(len(keys)), 2), ids, len(keys))[inverse.reshape(-1)]
        return result

    def _merge(self, owners: np.ndarray, ids: np.ndarray, count: int) -> Ids:
        """Return the unions for owners that rise, each of several sets."""
        sizes = self.sizes(ids)
        begins = np.append(0, np.flatnonzero(np.diff(owners)) + 1)
        largest_size = np.maximum.reduceat(sizes, begins)
        rest_size = np.add.reduceat(sizes, begins) - largest_size
        (at_largest,) = np.nonzero(sizes == largest_size[owners])
        position = np.empty(count, dtype=np.int64)
        position[owners[at_largest]] = at_largest
        largest = ids[position]
        result = largest.copy()
        is_dominated = largest_size >= DOMINANT * rest_size
        is_new = ~is_dominated
        if is_dominated.any():
            is_small = np.ones(len(ids), dtype=bool)
            is_small[position] = False
            is_small &= is_dominated[owners]
            holder, elements = self._list_elements(ids[is_small])
            holder = owners[is_small][holder]
            is_new[holder[~self._contains(largest[holder], elements)]] = True
        if is_new.any():
            chosen = is_new[owners]
            renumbered = np.cumsum(is_new) - 1
            result[is_new] = self._add_sets(
                renumbered[owners[chosen]], ids[chosen], largest[is_new], largest_size[is_new]
            )
        return result

    def _add_sets(self, owners: np.ndarray, ids: np.ndarray, largest: np.ndarray, largest_size: np.ndarray) -> Ids:
        """Append the unions as new sets, but for those that turn out to be their largest part, or full."""
        require_room(int(self.sizes(ids).sum()))
        holder, elements = self._list_elements(ids)
        keys = _sort_distinct(owners[holder] * self.size + elements)
        owner = keys // self.size
        elements = keys - owner * self.size
        sizes = np.bincount(owner, minlength=len(largest))
        result = np.where(sizes == largest_size, largest, self.full)
        new = (sizes != largest_size) & (sizes != self.size)
        result[new] = self._sets + np.arange(int(new.sum()))
        self._append(sizes[new], elements[new[owner]])
        return result

    def _append(self, sizes: np.ndarray, elements: np.ndarray) -> None:
        used, sets = self._used + len(elements), self._sets + len(sizes)
        if used > len(self._elements):
            self._elements = np.concatenate(
                [self._elements, np.empty(max(used, 2 * self._used) - len(self._elements), np.int64)]
            )
        if sets + 1 > len(self._starts):
            self._starts = np.concatenate(
                [self._starts, np.empty(max(sets, 2 * self._sets) + 1 - len(self._starts), np.int64)]
            )
        self._elements[self._used : used] = elements
        self._starts[self._sets + 1 : sets + 1] = self._used + np.cumsum(sizes)
        self._used, self._sets = used, sets

    def _list_elements(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return for each element of the sets, one after another, the position of its set and the element."""
        sizes = self.sizes(ids)
        holder = np.repeat(np.arange(len(ids)), sizes)
        ends = np.cumsum(sizes)
        places = np.arange(len(holder)) + np.repeat(self._starts[ids] - (ends - sizes), sizes)
        return holder, self._elements[places]

    def _contains(self, ids: np.ndarray, elements: np.ndarray) -> np.ndarray:
        """Return for each set if it contains its element, by bisection of them all at once."""
        low, high = self._starts[ids], self._starts[ids + 1]
        end = high
        while (open_ := low < high).any():
            middle = (low + high) // 2
            less = open_ & (self._elements[np.minimum(middle, self._used - 1)] < elements)
            low, high = np.where(less, middle + 1, low), np.where(open_ & ~less, middle, high)
        return (low < end) & (self._elements[np.minimum(low, self._used - 1)] == elements)


def _step_slices(steps: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(None, None, step) for step in steps)


def _sort_distinct(keys: np.ndarray) -> np.ndarray:
    keys = np.sort(keys)
    keep = np.ones(len(keys), dtype=bool)
    np.not_equal(keys[1:], keys[:-1], out=keep[1:])
    return keys[keep]
