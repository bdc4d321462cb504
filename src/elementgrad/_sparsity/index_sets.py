"""Sets of elements that others may depend on: the algebra with which patterns are found.

How a backend finds a pattern. It goes through a derivative program: a program that is linear in a seed, as one reverse
or forward sweep is. Beside each tensor that depends on the seed it keeps an array of integers in the tensor's shape,
the **ids**: the number of the set of seed elements that each element may depend on. 0 is the empty set. What does not
depend on the seed has no ids, and is a constant: known, if it does not depend on the point of the derivative either.

- `ids = reach.start(shape)` are those of the seed itself: one element each.
- An operation that only moves data (reshape, slice, transpose, gather at known indices, pad, concatenate, expand, roll,
  flip, scatter at known indices without adding) is run on the ids themselves. What it fills with zeros is then 0, the
  empty set. There is no other rule for them.
- An elementwise operation of one tensor that depends on the seed and of constants has the same ids, broadcast; 0 where
  a known constant factor is zero (`np.where(factor != 0, ids, 0)`).
- Sums, and anything elementwise of several such tensors: `reach.union(a, b, ...)`, which broadcasts.
- Reductions: `reach.over(ids, axes)`. Cumulative ones: `reach.along(ids, axis)`.
- Windows, as of convolutions and pools: `reach.windows(...)`. Products with a matrix whose zeros are known:
  `reach.through(ids, mask)`; with any other, a reduction over the contracted axis.
- Adding at known indices: `reach.gathered(owners, ids, count)`.
- Everything unknown: `reach.all_of(ids, ...)`: each output element depends on all that any of its tensors depends on.

At the end `reach.pattern(ids)` has a row for each element of the result and a column for each of the seed. A reverse
program gives the transpose of the Jacobian's pattern.


Sets of reach through products: of matrices in stacks, and of convolutions.
"""

from collections.abc import Sequence
from math import prod

import numpy as np

from elementgrad._sparsity.pattern import Pattern, require_room

Ids = np.ndarray
"""The number of a set for each element of a tensor."""
EMPTY = 0
LARGE = 3 * 10**7
"""From so many elements in all sets on it is worth a look which of them are still in use."""
CLEAR = 4
"""A set so many times as large as all others together is looked at for whether it holds them."""


class IndexSets:
    """A growing table of sets of the elements of one seed. Equal ids are equal sets; equal sets may differ in id.

    >>> reach = Reach(4)
    >>> ids = reach.start((4,))
    >>> moved = np.pad(ids[1:], (0, 1))
    >>> reach.pattern(reach.union(ids, moved)).dense().astype(int)
    array([[1, 1, 0, 0],
           [0, 1, 1, 0],
           [0, 0, 1, 1],
           [0, 0, 0, 1]])
    >>> reach.pattern(reach.over(moved.reshape(2, 2), [1])).rows.tolist()
    [0, 0, 1]
    """

    def __init__(self, size: int):
        self.size = size
        """How many elements the seed has."""
        self.full = size + 1
        """The set of all of them."""
        self._starts = np.concatenate([[0], np.arange(size + 1), [2 * size]])
        self._sets = size + 2
        self._elements = np.concatenate([np.arange(size), np.arange(size)]).astype(np.int64)
        self._used = 2 * size
        self._limit = LARGE

    def start(self, shape: Sequence[int]) -> Ids:
        """The ids of the seed: each element is reached by itself."""
        return np.arange(1, self.size + 1).reshape(shape)

    def sizes(self, ids: Ids) -> np.ndarray:
        """How many elements each set has."""
        return self._starts[ids + 1] - self._starts[ids]

    def union(self, *several: Ids) -> Ids:
        """For each element the union of its sets in several tensors, which broadcast."""
        result = several[0]
        for ids in several[1:]:
            result = self._pairs(result, ids)
        return result

    def over(self, ids: Ids, axes: Sequence[int], keepdims: bool = False) -> Ids:
        """The unions over some axes."""
        axes = sorted({axis % ids.ndim for axis in axes})
        kept = [axis for axis in range(ids.ndim) if axis not in axes]
        shape = [1 if axis in axes else size for axis, size in enumerate(ids.shape) if axis in kept or keepdims]
        count = int(np.prod([ids.shape[axis] for axis in kept]))
        flat = ids.transpose([*kept, *axes]).reshape(count, int(np.prod([ids.shape[axis] for axis in axes])))
        if flat.shape[1] == 1:
            return flat.reshape(shape)
        same = (flat[:, :1] == flat).all(1) if flat.shape[1] else np.zeros(count, dtype=bool)
        result = np.zeros(count, dtype=np.int64)
        if flat.shape[1]:
            result[same] = flat[same, 0]
        rest = np.flatnonzero(~same)
        if len(rest) and flat.shape[1]:
            owners = np.repeat(np.arange(len(rest)), flat.shape[1])
            result[rest] = self.gathered(owners, flat[rest].reshape(-1), len(rest))
        return result.reshape(shape)

    def along(self, ids: Ids, axis: int, reverse: bool = False) -> Ids:
        """The unions over all elements up to each along an axis, as of a cumulative sum; from each on, if reverse."""
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
        """The unions over windows of the last axes, as many as `size` has numbers.

        `dilation` spaces the elements of a window, `spacing` those of the tensor (as a transposed convolution does).
        Negative padding cuts off. `mask`, of shape `size`, says which elements of a window count.
        """
        dims, lead = len(size), ids.ndim - len(size)
        if not dims:
            return ids
        dilation, spacing = dilation or [1] * dims, spacing or [1] * dims
        if any(step > 1 for step in spacing):
            shape = [(n - 1) * step + 1 if n else 0 for n, step in zip(ids.shape[lead:], spacing, strict=True)]
            spaced = np.zeros((*ids.shape[:lead], *shape), dtype=np.int64)
            spaced[_steps([*[1] * lead, *spacing])] = ids
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
        views = views[_steps([*[1] * lead, *stride, *dilation])]
        if mask is not None:
            return self.over(views[..., mask], [-1])
        return self.over(views, range(views.ndim - dims, views.ndim))

    def through(self, ids: Ids, mask: np.ndarray) -> Ids:
        """The product of a matrix (or stack of them) with one whose zeros are known: `mask` is true elsewhere."""
        if mask.all():
            whole = self.over(ids, [-1], keepdims=True)
            return np.broadcast_to(whole, (*whole.shape[:-1], mask.shape[1])).copy()
        into, out = np.nonzero(mask)
        flat = ids.reshape(int(np.prod(ids.shape[:-1])), ids.shape[-1])
        owners = np.arange(len(flat))[:, None] * mask.shape[1] + out
        unions = self.gathered(owners.reshape(-1), flat[:, into].reshape(-1), len(flat) * mask.shape[1])
        return unions.reshape(*ids.shape[:-1], mask.shape[1])

    def all_of(self, *several: Ids) -> int:
        """The union of everything: what an element depends on of which nothing is known."""
        ids = np.unique(np.concatenate([ids.reshape(-1) for ids in several]))
        return int(self.gathered(np.zeros(len(ids), dtype=np.int64), ids, 1)[0])

    def gathered(self, owners: np.ndarray, ids: np.ndarray, count: int) -> Ids:
        """For each of `count` owners the union of the sets that it owns: `owners` and `ids` go in pairs."""
        result = np.zeros(count, dtype=np.int64)
        some = ids != EMPTY
        owners, ids = owners[some], ids[some]
        full = np.zeros(count, dtype=bool)
        full[owners[ids == self.full]] = True
        result[full] = self.full
        keys = np.unique((owners * self._sets + ids)[~full[owners]])
        owners = keys // self._sets
        ids = keys - owners * self._sets
        counts = np.bincount(owners, minlength=count)
        alone = counts[owners] == 1
        result[owners[alone]] = ids[alone]
        if alone.all():
            return result
        owners, ids = owners[~alone], ids[~alone]
        named, owners = np.unique(owners, return_inverse=True)
        result[named] = self._merged(owners, ids, len(named))
        return result

    @property
    def large(self) -> bool:
        """Whether it is time to `tidy`."""
        return self._used > self._limit

    def tidy(self, several: Sequence[Ids]) -> None:
        """Forget all sets but those of these arrays, in which the numbers of the sets change."""
        used = np.zeros(self._sets, dtype=bool)
        used[: self.full + 1] = True
        for ids in several:
            used[ids] = True
        kept = np.flatnonzero(used)
        sizes, (_, elements) = self.sizes(kept), self._listed(kept)
        new = np.cumsum(used) - 1
        for ids in several:
            ids[...] = new[ids]
        self._elements, self._used, self._sets = elements, len(elements), len(kept)
        self._starts = np.concatenate([[0], np.cumsum(sizes)])
        self._limit = max(LARGE, 2 * self._used)
        require_room(self._used)

    def pattern(self, ids: Ids) -> Pattern:
        """A row for each element, with the elements of the seed that it may depend on."""
        ids = ids.reshape(-1)
        counts = self.sizes(ids)
        starts = np.concatenate([[0], np.cumsum(counts)])
        require_room(int(starts[-1]))
        return Pattern((len(ids), self.size), starts, self._listed(ids)[1])

    def _pairs(self, a: Ids, b: Ids) -> Ids:
        a, b = np.broadcast_arrays(a, b)
        result = np.where((b == EMPTY) | (a == self.full) | (a == b), a, b)
        rest = (a != b) & (a != EMPTY) & (b != EMPTY) & (a != self.full) & (b != self.full)
        if rest.any():
            low, high = np.minimum(a[rest], b[rest]), np.maximum(a[rest], b[rest])
            keys, inverse = np.unique(low * self._sets + high, return_inverse=True)
            first = keys // self._sets
            ids = np.stack([first, keys - first * self._sets], 1).reshape(-1)
            result[rest] = self._merged(np.repeat(np.arange(len(keys)), 2), ids, len(keys))[inverse.reshape(-1)]
        return result

    def _merged(self, owners: np.ndarray, ids: np.ndarray, count: int) -> Ids:
        """The unions for owners that rise, each of several sets."""
        sizes = self.sizes(ids)
        begins = np.append(0, np.flatnonzero(np.diff(owners)) + 1)
        most = np.maximum.reduceat(sizes, begins)
        rest = np.add.reduceat(sizes, begins) - most
        (large,) = np.nonzero(sizes == most[owners])
        which = np.empty(count, dtype=np.int64)
        which[owners[large]] = large
        largest = ids[which]
        result = largest.copy()
        looked = most >= CLEAR * rest
        todo = ~looked
        if looked.any():
            small = np.ones(len(ids), dtype=bool)
            small[which] = False
            small &= looked[owners]
            holder, elements = self._listed(ids[small])
            holder = owners[small][holder]
            outside = ~self._holds(largest[holder], elements)
            todo[holder[outside]] = True
        if todo.any():
            chosen = todo[owners]
            number = np.cumsum(todo) - 1
            result[todo] = self._added(number[owners[chosen]], ids[chosen], largest[todo], most[todo])
        return result

    def _added(self, owners: np.ndarray, ids: np.ndarray, largest: np.ndarray, most: np.ndarray) -> Ids:
        """New sets, but for those that turn out to be their largest part, or all."""
        require_room(int(self.sizes(ids).sum()))
        holder, elements = self._listed(ids)
        keys = _distinct(owners[holder] * self.size + elements)
        owner = keys // self.size
        elements = keys - owner * self.size
        sizes = np.bincount(owner, minlength=len(largest))
        result = np.where(sizes == most, largest, self.full)
        new = (sizes != most) & (sizes != self.size)
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

    def _listed(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The elements of sets one after another, and beside each the position of its set."""
        sizes = self.sizes(ids)
        holder = np.repeat(np.arange(len(ids)), sizes)
        ends = np.cumsum(sizes)
        places = np.arange(len(holder)) + np.repeat(self._starts[ids] - (ends - sizes), sizes)
        return holder, self._elements[places]

    def _holds(self, ids: np.ndarray, elements: np.ndarray) -> np.ndarray:
        """Whether each set holds an element, by bisection of them all at once."""
        low, high = self._starts[ids], self._starts[ids + 1]
        end = high
        while (open_ := low < high).any():
            middle = (low + high) // 2
            less = open_ & (self._elements[np.minimum(middle, self._used - 1)] < elements)
            low, high = np.where(less, middle + 1, low), np.where(open_ & ~less, middle, high)
        return (low < end) & (self._elements[np.minimum(low, self._used - 1)] == elements)


def _steps(steps: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(None, None, step) for step in steps)


def _distinct(keys: np.ndarray) -> np.ndarray:
    keys = np.sort(keys)
    keep = np.ones(len(keys), dtype=bool)
    np.not_equal(keys[1:], keys[:-1], out=keep[1:])
    return keys[keep]


PRUNED = 2 * 10**7
"""The zeros of a known factor are looked at as long as no more products than this are left."""
MASKS = 64
"""So many different masks of output channels are gone through one by one; more are taken together."""


def product(reach: IndexSets, ids: Ids, mask: np.ndarray | None, width: int) -> Ids:
    """Stacks of matrices, `(b, n, k)`, times others of shape `(b, k, width)`, of which `mask` tells the zeros.

    Without a mask nothing is known of the others. A stack of one serves all.

    >>> reach = Reach(4)
    >>> through = product(reach, reach.start((1, 2, 2)), np.eye(2, dtype=bool)[None], 2)
    >>> reach.pattern(through).columns.tolist()
    [0, 1, 2, 3]
    """
    stacks, rows, inner = ids.shape
    known = mask is not None and not mask.all()
    if known and np.count_nonzero(mask) * (stacks // max(1, len(mask))) * rows <= PRUNED:  # type: ignore[arg-type]
        stack, into, out = np.nonzero(np.broadcast_to(mask, (stacks, inner, width)))  # type: ignore[arg-type]
        owners = (stack * rows + np.arange(rows)[:, None]) * width + out
        unions = reach.gathered(owners.reshape(-1), ids[stack, :, into].T.reshape(-1), stacks * rows * width)
        return unions.reshape(stacks, rows, width)
    return np.broadcast_to(reach.over(ids, [2], keepdims=True), (stacks, rows, width))


def convolution(
    reach: IndexSets,
    ids: Ids,
    mask: np.ndarray,
    stride: Sequence[int],
    padding: Sequence[tuple[int, int]],
    dilation: Sequence[int] | None = None,
    spacing: Sequence[int] | None = None,
    groups: int = 1,
) -> Ids:
    """Images `(n, channels, *space)` with a kernel `(out, channels / groups, *space)`, of which `mask` tells the zeros.

    Of a kernel of which nothing is known the mask is true everywhere.
    """
    each, per_group = mask.shape[1], mask.shape[0] // groups
    parts = []
    for group in range(groups):
        part = ids[:, group * each : (group + 1) * each]
        kernels = mask[group * per_group : (group + 1) * per_group]
        distinct, which = np.unique(kernels.reshape(per_group, prod(mask.shape[1:])), axis=0, return_inverse=True)
        if len(distinct) > MASKS:
            distinct, which = np.any(distinct, axis=0, keepdims=True), np.zeros(per_group, dtype=np.int64)
        seen = [
            _windows(reach, part, kernel.reshape(mask.shape[1:]), stride, padding, dilation, spacing)
            for kernel in distinct
        ]
        parts.append(np.stack(seen, 1)[:, which.reshape(-1)])
    return np.concatenate(parts, 1)


def transposed_windows(
    reach: IndexSets,
    ids: Ids,
    shape: Sequence[int],
    size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[tuple[int, int]],
) -> Ids:
    """For each element of a tensor of this shape what the windows hold that it is in: `windows` the other way round."""
    low = [n - 1 - before for n, (before, _) in zip(size, padding, strict=True)]
    spans = [(n - 1) * step + 1 for n, step in zip(ids.shape[-len(size) :], stride, strict=True)]
    high = [
        whole - span - before + n - 1
        for whole, span, before, n in zip(shape[-len(size) :], spans, low, size, strict=True)
    ]
    return reach.windows(ids, size, [1] * len(size), list(zip(low, high, strict=True)), spacing=stride)


def _windows(
    reach: IndexSets,
    ids: Ids,
    mask: np.ndarray,
    stride: Sequence[int],
    padding: Sequence[tuple[int, int]],
    dilation: Sequence[int] | None,
    spacing: Sequence[int] | None,
) -> Ids:
    """One output channel. Channels count as one more axis of the window, unless all of them are in it alike."""
    if (mask == mask[:1]).all() and prod(mask.shape):
        inner = mask[0]
        return reach.windows(reach.over(ids, [1]), inner.shape, stride, padding, dilation, spacing, _some(inner))
    stride, padding = [1, *stride], [(0, 0), *padding]
    dilation, spacing = [1, *(dilation or [1] * (ids.ndim - 2))], [1, *(spacing or [1] * (ids.ndim - 2))]
    return reach.windows(ids, mask.shape, stride, padding, dilation, spacing, mask)[:, 0]


def _some(mask: np.ndarray) -> np.ndarray | None:
    return None if mask.all() else mask
