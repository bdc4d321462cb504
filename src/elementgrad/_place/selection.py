"""`Selection`: the elements that an index names in a tensor of a given shape, by NumPy's rules."""

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import index as as_int
from typing import Any

import numpy as np

from elementgrad._place.index import Index, IndexArray, Span, normalize, out_of_range_error, to_text
from elementgrad.errors import SelectionError, TracedError, quoted

Shape = tuple[Any, ...]
"""Sizes of axes: ints, or None where a framework does not know one while it traces."""

TRACED_MASK = "the mask is traced, so how many elements it names is not known; use a concrete mask"


@dataclass(frozen=True, eq=False, repr=False)
class Selection:
    """The elements that an index names in a tensor of a given shape.

    It keeps the structure of the index: a slice stays a range and a mask over the whole tensor stays a mask, so naming
    a billion elements costs no memory until their positions are needed.

    >>> import elementgrad as eg
    >>> rows = eg.Selection.resolve(([0, 2], slice(None, None, 2)), shape=(3, 5))
    >>> rows.shape, rows.size, rows.unique
    ((2, 3), 6, True)
    >>> rows.flat().tolist()
    [[0, 2, 4], [10, 12, 14]]
    """

    __module__ = "elementgrad"

    of: Shape
    """The shape of the tensor."""
    parts: tuple[Any, ...]
    """One entry per axis of the tensor: an int, a range, or an integer array (all arrays broadcast together).

    Where one mask covers all axes it stands here alone, as an `IndexArray`. A slice of an axis whose size is not known
    stays a `Span`."""
    block: int = 0
    """Where the axes of the broadcast arrays stand among those of the result."""
    broadcast: Shape | None = None
    """The shape that the arrays broadcast to; None without arrays."""

    def __post_init__(self) -> None:
        for part in self.parts:
            if isinstance(part, np.ndarray):
                part.setflags(write=False)

    @classmethod
    def resolve(cls, index: Any, shape: tuple[int, ...]) -> "Selection":
        """Resolve an index against a shape.

        Args:
            index: what stands between the brackets of `x[...]`.
            shape: the shape of the tensor.

        Returns:
            The elements that the index names.

        Raises:
            SelectionError: an `IndexError`, where NumPy would raise one.
        """
        try:
            fits = isinstance(shape, (tuple, list)) and all(size is None or as_int(size) >= 0 for size in shape)
        except TypeError:
            fits = False
        if not fits:
            raise SelectionError(f"{quoted(shape)} is not a shape; give a tuple of sizes, such as (3, 4)")
        index = normalize(index)
        try:
            return resolve(index, tuple(shape))
        except SelectionError as error:
            raise SelectionError(f"{to_text(index)}: {error}") from None

    @cached_property
    def mask(self) -> IndexArray | None:
        """The mask that covers the whole tensor, if the elements were named by one."""
        return self.parts[0] if self.parts and isinstance(self.parts[0], IndexArray) else None

    @cached_property
    def traced(self) -> bool:
        """True if some indices or sizes are traced, so that not everything could be checked."""
        if self.mask is not None:
            return self.mask.traced
        return None in self.of or not all(isinstance(part, int | range | np.ndarray) for part in self.parts)

    @cached_property
    def axes(self) -> tuple[Any, ...]:
        """One int, range or integer array per axis, with a mask turned into the positions it marks."""
        if self.mask is None:
            return self.parts
        axes = self.mask.readable(TRACED_MASK).nonzero() if self.of else ()
        for axis in axes:
            axis.setflags(write=False)
        return axes

    @cached_property
    def shape(self) -> Shape:
        """The shape of `x[index]`."""
        if self.mask is not None:
            return (int(np.count_nonzero(self.mask.readable(TRACED_MASK))),)
        kept = [len(part) if isinstance(part, range) else None for part in self.parts if keeps_axis(part)]
        return (*kept[: self.block], *(self.broadcast or ()), *kept[self.block :])

    @cached_property
    def size(self) -> int:
        """The number of elements that are named, duplicates counted."""
        if None in self.shape:
            raise TracedError("an axis of unknown size is named, so how many elements there are is not known")
        return math.prod(self.shape)

    @cached_property
    def unique(self) -> bool:
        """True if it is known that no element is named twice. Ranges never repeat one; index arrays may."""
        return self.mask is not None or self.broadcast is None or self._repeat is False

    @cached_property
    def repeated(self) -> tuple[int, ...] | None:
        """The coordinates, by the index arrays, of an element that is known to be named twice; or None."""
        if self.unique or self._repeat is None:
            return None
        rows = np.stack([part.reshape(-1) for part in np.broadcast_arrays(*filter(_is_array, self.parts))], axis=-1)
        _, first, counts = np.unique(rows, axis=0, return_index=True, return_counts=True)
        return tuple(int(entry) for entry in rows[first[counts > 1].min()])

    @cached_property
    def _repeat(self) -> bool | None:
        """True if the index arrays name something twice; None if that cannot be known before the program runs."""
        arrays = [(part, size) for part, size in zip(self.parts, self.of, strict=True) if _is_array(part)]
        if any(not isinstance(part, np.ndarray) for part, _ in arrays):
            return None
        if any(size is None and part.size and part.min() < 0 <= part.max() for part, size in arrays):
            return None  # -1 and 3 are one element if the axis turns out to have four
        if math.prod(self.broadcast or ()) <= 1 or 0 in self.shape:
            return False
        keys: np.ndarray = np.zeros(self.broadcast or (), np.int64)
        for part, size in arrays:  # in place, as the first use of memory takes longer than the arithmetic
            keys *= size if size is not None else int(abs(part).max()) + 1
            keys += part
        keys = keys.reshape(-1)
        if (keys[1:] > keys[:-1]).all():  # as most long lists are, which spares sorting them
            return False
        keys.sort()
        return bool((keys[1:] == keys[:-1]).any())

    @cached_property
    def whole(self) -> bool:
        """True if every element is named, once and in order, as by `x[...]`."""
        return (
            self.mask is None
            and self.broadcast is None
            and all(
                isinstance(part, range) and part == range(size) for part, size in zip(self.parts, self.of, strict=True)
            )
        )

    def flat(self) -> np.ndarray:
        """Return the position of each named element in the flattened tensor (C order), in an array of `self.shape`."""
        if self.whole:
            return np.arange(self.size, dtype=np.int64).reshape(self.shape)
        return self._positions(len(self.of))

    def rows(self) -> tuple[np.ndarray, Shape]:
        """Return `flat` without trailing axes that are named whole: positions of blocks, and the shape of a block."""
        split = len(self.of)
        while split and isinstance(self.axes[split - 1], range) and self.axes[split - 1] == range(self.of[split - 1]):
            split -= 1
        return self._positions(split), self.of[split:]

    def coords(self) -> np.ndarray:
        """Return one row of coordinates per named element.

        >>> import elementgrad as eg
        >>> eg.Selection.resolve(([0, 1], [5, 12]), shape=(50, 32)).coords().tolist()
        [[0, 5], [1, 12]]
        """
        if not self.of:
            return np.zeros((self.size, 0), dtype=np.int64)
        return np.stack(np.unravel_index(self.flat().reshape(-1), self.of), axis=-1)

    def mesh(self, split: int | None = None, lines: Any = None, reshape: Any = None) -> tuple[Any, ...]:
        """Return one array (or int) per axis, which broadcast to `shape` together: `x[mesh]` is `x[index]`.

        Args:
            split: the number of leading axes to do this for, if all behind them are named whole; None for all.
            lines: the ranges as arrays, for a framework whose arrays are not NumPy's.
            reshape: a function that appends axes to such an array.
        """
        axes = self.axes[:split]
        lines = lines or [
            np.arange(part.start, part.stop, part.step) if isinstance(part, range) else part for part in axes
        ]
        reshape = reshape or _append_axes
        if self.mask is not None:
            return tuple(axes)
        width = len(self.broadcast or ())
        ndim = width + sum(keeps_axis(part) for part in axes)
        parts: list[Any] = []
        axis = 0
        for part, line in zip(axes, lines, strict=True):
            if keeps_axis(part):
                axis += width if axis == self.block else 0
                parts.append(reshape(line, ndim - axis - 1))
                axis += 1
            else:
                parts.append(part if isinstance(part, int) else reshape(line, ndim - self.block - width))
        return tuple(parts)

    @cached_property
    def basic(self) -> tuple[tuple[Any, ...], tuple[int, ...]] | None:
        """The index in ints and forward slices, and the axes of the result to flip; None if it needs arrays."""
        if self.mask is not None or self.broadcast is not None or self.traced:
            return None
        index, flips = self.native(lambda array: array)
        while index and index[-1] == slice(0, self.of[len(index) - 1], 1):  # each slice costs a call
            index = index[:-1]
        return index, flips

    def native(self, to_array: Any) -> tuple[tuple[Any, ...], tuple[int, ...]]:
        """Return the index in ints, forward slices and arrays by `to_array`, and the axes of the result to flip."""
        if self.mask is not None:
            return (to_array(self.mask.readable(TRACED_MASK)),), ()
        index: list[Any] = []
        flips: list[int] = []
        axis = 0
        for part in self.parts:
            if axis == self.block:
                axis += len(self.broadcast or ())
            if isinstance(part, int):
                # Frameworks disagree on ints beside arrays; as an array it means the same to all.
                index.append(to_array(np.array([part])) if self.broadcast else part)
            elif isinstance(part, range):
                ahead = ascending(part)
                index.append(slice(ahead.start, ahead.stop, ahead.step))
                if part.step < 0:
                    flips.append(axis)
                axis += 1
            else:
                index.append(to_array(part))
        return tuple(index), tuple(flips)

    def behind(self, axes: tuple[int, ...]) -> "Selection":
        """Return the same elements, named without arrays, in each of a stack of tensors with these axes in front."""
        stacked = Selection((*axes, *self.of), (*map(range, axes), *self.parts), len(axes))
        if self.basic:  # copied from here, as computing it again takes longer
            index, flips = self.basic
            front = tuple(slice(None) for _ in axes)
            stacked.__dict__["basic"] = (*front, *index), tuple(axis + len(axes) for axis in flips)
        return stacked

    def stacked(self, axes: tuple[int, ...]) -> "Selection":
        """Return the same elements, along one axis, in each of a stack of flattened tensors, axes in front."""
        places = self.flat().reshape(-1)
        return Selection((*axes, math.prod(self.of)), (*map(range, axes), places), len(axes), places.shape)

    def pointwise(self) -> "Selection":
        """Return the same elements in the same order, with one integer array per axis and no other structure."""
        if self.traced:
            raise TracedError("traced indices cannot be combined in this way; write the index without `...` or masks")
        return Selection.at_flat(self.flat(), self.of)

    @classmethod
    def at_flat(cls, positions: np.ndarray, of: Shape) -> "Selection":
        """Return the elements at these positions of the flattened tensor; a single position is named by ints."""
        parts = np.unravel_index(positions, of) if of else ()
        if not positions.shape:
            return cls(of, tuple(map(int, parts)))
        return cls(of, tuple(parts), block=0, broadcast=positions.shape)

    def __repr__(self) -> str:
        named = "traced elements" if self.traced else f"{self.size} of {math.prod(self.of)} elements"
        return f"<Selection: {named} of shape {self.of}>"

    def _positions(self, split: int) -> np.ndarray:
        """Return positions within the first `split` axes, flattened; the axes after them must be named whole."""
        if self.shape == () and self.broadcast is None and self.mask is None:  # a fast path for one element
            return np.array(sum(part * math.prod(self.of[axis + 1 :]) for axis, part in enumerate(self.parts)))
        ndim = len(self.shape) - (len(self.of) - split)
        positions = np.zeros((1,) * ndim, dtype=np.int64)
        for part, size in zip(self.mesh(split), self.of, strict=False):
            positions = positions * size + part
        return np.broadcast_to(positions, self.shape[:ndim])


def ascending(part: range) -> range:
    """Return the same elements in rising order, with bounds and step that fit any framework."""
    if len(part) < 2:
        return range(part.start, part.start + 1) if part else range(0)
    return part if part.step > 0 else part[::-1]


def keeps_axis(part: Any) -> bool:
    """Return True if an axis stays in the result: a range, or a slice of an axis whose size is not known."""
    return isinstance(part, range | Span)


def _is_array(part: Any) -> bool:
    return not isinstance(part, int | range | Span)


def _append_axes(part: Any, count: int) -> Any:
    return part.reshape(tuple(part.shape) + (1,) * count)


CACHED_SIZE = 256
"""Index arrays of at most this many entries have their selections cached."""


def resolve(index: Index, of: Shape) -> Selection:
    """Resolve an index in normal form against a shape; the caller prefixes error messages with the name."""
    for size in of:
        if type(size) is not int and size is not None:  # a compiler's or tracer's own ints
            return _resolve(index, tuple([size if size is None else int(size) for size in of]))
    for item in index:
        if type(item) is IndexArray and (item.traced or item.values.size > CACHED_SIZE):
            return _resolve(index, of)
    return _resolve_cached(index, of)


def _resolve(index: Index, of: Shape) -> Selection:
    used, ellipses, arrays = 0, 0, []
    for item in index:
        if item is Ellipsis:
            ellipses += 1
        elif isinstance(item, IndexArray):
            used += item.axes
            arrays.append(item)
        else:
            used += 1
    if used > len(of):
        raise SelectionError(f"{used} indices for a tensor of {len(of)} axes and shape {of}")
    if ellipses > 1:
        raise SelectionError("`...` occurs twice; one is enough")
    if len(arrays) == 1 and used == len(of) == arrays[0].axes and arrays[0].boolean:
        _check_mask(arrays[0], of, 0)
        return Selection(of if arrays[0].traced else arrays[0].shape, (arrays[0],))
    return _IndexWalk(of, fill=len(of) - used, arrays=bool(arrays)).resolve(index if ellipses else (*index, Ellipsis))


_resolve_cached = lru_cache(maxsize=4096)(_resolve)


class _IndexWalk:
    """A pass over an index, axis by axis, that collects the parts of its selection."""

    def __init__(self, of: Shape, fill: int, arrays: bool):
        self.of = of
        self.fill = fill
        self.arrays = arrays
        self.parts: list[Any] = []
        self.shapes: list[Shape] = []
        self.kept = 0
        self.block: int | None = None
        self.apart = False
        self.lone = False

    def resolve(self, index: Index) -> Selection:
        for item in index:
            if item is Ellipsis:
                sizes = self.of[len(self.parts) : len(self.parts) + self.fill]
                self.keep([self.span(Span(None, None, None), size) for size in sizes])
            elif isinstance(item, Span):
                self.keep([self.span(item, self.of[len(self.parts)])])
            elif isinstance(item, IndexArray):
                self.join(self.array(item), item)
            else:
                axis, size = len(self.parts), self.of[len(self.parts)]
                if size is not None and not -size <= item < size:
                    raise out_of_range_error(item, axis, size)
                self.join([item if size is None or item >= 0 else item + size], None)
        return self.finish()

    def keep(self, ranges: list[range | Span]) -> None:
        """Add axes that stay in the result. In NumPy an empty `...` still separates index arrays."""
        self.parts += ranges
        self.kept += len(ranges)
        self.apart = self.block is not None

    def join(self, parts: list[Any], item: IndexArray | None) -> None:
        """Add axes that index arrays take; beside arrays, ints count as such."""
        self.parts += parts
        if not self.arrays:
            return
        if item is not None:
            self.shapes.append((int(np.count_nonzero(item.values)),) if item.boolean else item.shape)
        if self.block is None:
            self.block = self.kept
        elif self.apart:
            self.block = 0

    def span(self, item: Span, size: int | None) -> range | Span:
        if item.step == 0:
            raise SelectionError("a slice step of 0 names nothing; use a step of at least 1, or a negative one")
        return item if size is None else range(*slice(*item).indices(size))

    def array(self, item: IndexArray) -> list[Any]:
        axis = len(self.parts)
        if item.boolean:
            _check_mask(item, self.of, axis)
            values = item.readable("a traced mask must cover the whole tensor, as the only index; use a concrete mask")
            self.lone |= not item.shape
            return list(values.nonzero()) if item.shape else []
        return [item.values]

    def finish(self) -> Selection:
        if not self.arrays:
            return Selection(self.of, tuple(self.parts))
        broadcast = self.shapes[0] if len(self.shapes) == 1 else self.broadcast_shape()
        if 0 not in broadcast:
            self.parts = [
                part if keeps_axis(part) else self.check_range(part, axis) for axis, part in enumerate(self.parts)
            ]
        if not self.of:
            return Selection(self.of, (IndexArray.freeze(np.array(broadcast != (0,))),))
        selection = Selection(self.of, tuple(self.parts), self.block or 0, broadcast)
        return selection if self.is_plain() else selection.pointwise()

    def broadcast_shape(self) -> Shape:
        try:
            return np.broadcast_shapes(*self.shapes)
        except ValueError:
            shapes = " and ".join(map(str, self.shapes))
            raise SelectionError(f"index arrays of shapes {shapes} do not broadcast together") from None

    def check_range(self, part: Any, axis: int) -> Any:
        """Check that an integer array is in range, and return it with negative entries counted from the end."""
        size = self.of[axis]
        if not isinstance(part, np.ndarray) or size is None:
            return part
        if (part.view(np.uint64) < size).all():  # a negative number is a huge one, unsigned
            return part
        low, high = int(part.min()), int(part.max())
        if low < -size or high >= size:
            raise out_of_range_error(high if high >= size else low, axis, size)
        return np.where(part < 0, part + size, part)

    def is_plain(self) -> bool:
        """Return True if the arrays' axes are where frameworks put them for such an index."""
        if self.lone:  # a mask without axes adds one of its own, which is no axis of the tensor
            return False
        indexed = [axis for axis, part in enumerate(self.parts) if not keeps_axis(part)]
        adjacent = indexed[-1] - indexed[0] + 1 == len(indexed)
        return self.block == (indexed[0] if adjacent else 0)


def _check_mask(mask: IndexArray, of: Shape, axis: int) -> None:
    covered = of[axis : axis + len(mask.shape)]
    for size, own in zip(covered, mask.shape, strict=True):
        if size is not None and own is not None and size != own:
            shapes = f"a mask of shape {tuple(mask.shape)} does not fit axes of shape {tuple(covered)}"
            raise SelectionError(f"{shapes}; it must match exactly")
