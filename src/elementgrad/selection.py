"""An index against a shape: which elements it names, checked once and never changed."""

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from elementgrad.errors import SelectionError, TracedError
from elementgrad.index import Index, IndexArray, Span, normalize, to_text

Shape = tuple[Any, ...]
"""Sizes of axes: ints, or None where a framework does not know one while it traces."""

COUNTED = "the mask is traced, so how many elements it names is not known; use a concrete mask"
SMALL = 256
"""Up to so many entries in an index array, its selection is kept for the next call."""


@dataclass(frozen=True, eq=False, repr=False)
class Selection:
    """The elements that an index names in a tensor of a given shape.

    It keeps the structure of the index: a slice stays a range and a mask over the whole tensor stays a mask, so naming
    a billion elements costs no memory until somebody asks for their positions.

    >>> import elementgrad as eg
    >>> rows = eg.Selection.resolve(([0, 2], slice(None, None, 2)), shape=(3, 5))
    >>> rows.shape, rows.size, rows.unique
    ((2, 3), 6, True)
    >>> rows.flat().tolist()
    [[0, 2, 4], [10, 12, 14]]
    """

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

    @classmethod
    def resolve(cls, index: Any, shape: tuple[int, ...]) -> "Selection":
        """Put an index (as written between the brackets of `x[...]`) against a shape.

        Raises `SelectionError`, an `IndexError`, where NumPy would.
        """
        index = normalize(index)
        try:
            return resolve(index, tuple(shape))
        except SelectionError as error:
            raise SelectionError(f"{to_text(index)}: {error}") from None

    @cached_property
    def mask(self) -> IndexArray | None:
        """The one mask that covers the whole tensor, if that is how the elements were named."""
        return self.parts[0] if self.parts and isinstance(self.parts[0], IndexArray) else None

    @cached_property
    def traced(self) -> bool:
        """Whether some indices or sizes are traced, so that not everything could be checked."""
        if self.mask is not None:
            return self.mask.traced
        return None in self.of or not all(isinstance(part, int | range | np.ndarray) for part in self.parts)

    @cached_property
    def axes(self) -> tuple[Any, ...]:
        """One int, range or integer array per axis, with a mask turned into the positions it marks."""
        if self.mask is None:
            return self.parts
        return self.mask.readable(COUNTED).nonzero() if self.of else ()

    @cached_property
    def shape(self) -> Shape:
        """The shape of `x[index]`."""
        if self.mask is not None:
            return (int(np.count_nonzero(self.mask.readable(COUNTED))),)
        kept = [len(part) if isinstance(part, range) else None for part in self.parts if _stays(part)]
        return (*kept[: self.block], *(self.broadcast or ()), *kept[self.block :])

    @property
    def size(self) -> int:
        """How many elements are named, duplicates counted."""
        return math.prod(self.shape)

    @cached_property
    def unique(self) -> bool:
        """Whether it is known that no element is named twice. Ranges never repeat one; index arrays may."""
        if self.mask is not None or self.broadcast is None:
            return True
        if self.traced:
            return False
        if self.size <= 1:
            return True
        keys = np.sort(self._keys())
        return bool((keys[1:] != keys[:-1]).all())

    def repeated(self) -> tuple[int, ...]:
        """The coordinates of the first element that is named twice."""
        positions = self.flat().reshape(-1)
        _, first, counts = np.unique(positions, return_index=True, return_counts=True)
        return tuple(int(axis) for axis in self.coords()[first[counts > 1].min()])

    def flat(self) -> np.ndarray:
        """The position of each named element in the flattened tensor (C order), in an array of `self.shape`."""
        return self._positions(len(self.of))

    def rows(self) -> tuple[np.ndarray, Shape]:
        """Like `flat`, with trailing axes that are named whole left out: positions of blocks, and a block's shape."""
        split = len(self.of)
        while split and isinstance(self.axes[split - 1], range) and self.axes[split - 1] == range(self.of[split - 1]):
            split -= 1
        return self._positions(split), self.of[split:]

    def coords(self) -> np.ndarray:
        """One row of coordinates per named element.

        >>> import elementgrad as eg
        >>> eg.Selection.resolve(([0, 1], [5, 12]), shape=(50, 32)).coords().tolist()
        [[0, 5], [1, 12]]
        """
        if not self.of:
            return np.zeros((self.size, 0), dtype=np.int64)
        return np.stack(np.unravel_index(self.flat().reshape(-1), self.of), axis=-1)

    def mesh(self, split: int | None = None, lines: Any = None, reshape: Any = None) -> tuple[Any, ...]:
        """One array (or int) per axis; together they broadcast to `shape`, so `x[mesh]` is `x[index]`.

        With `split`, the same for the first so many axes, when all behind them are whole. `lines` gives ranges as
        arrays and `reshape` appends axes to an array, for a framework whose arrays are not NumPy's.
        """
        axes = self.axes[:split]
        lines = lines or [
            np.arange(part.start, part.stop, part.step) if isinstance(part, range) else part for part in axes
        ]
        reshape = reshape or _append_axes
        if self.mask is not None:
            return tuple(axes)
        width = len(self.broadcast or ())
        ndim = width + sum(_stays(part) for part in axes)
        parts: list[Any] = []
        axis = 0
        for part, line in zip(axes, lines, strict=True):
            if _stays(part):
                axis += width if axis == self.block else 0
                parts.append(reshape(line, ndim - axis - 1))
                axis += 1
            else:
                parts.append(part if isinstance(part, int) else reshape(line, ndim - self.block - width))
        return tuple(parts)

    @cached_property
    def basic(self) -> tuple[tuple[Any, ...], tuple[int, ...]] | None:
        """The index in ints and forward slices, and the axes of the result to flip; None if that is not enough."""
        if self.mask is not None or self.broadcast is not None or self.traced:
            return None
        index, flips = self.native(lambda array: array)
        while index and index[-1] == slice(0, self.of[len(index) - 1], 1):  # each slice costs a call
            index = index[:-1]
        return index, flips

    def native(self, to_array: Any) -> tuple[tuple[Any, ...], tuple[int, ...]]:
        """The index in ints, forward slices and arrays made by `to_array`, and the axes of the result to flip."""
        if self.mask is not None:
            return (to_array(self.mask.readable(COUNTED)),), ()
        index: list[Any] = []
        flips: list[int] = []
        axis = 0
        for part in self.parts:
            if axis == self.block:
                axis += len(self.broadcast or ())
            if isinstance(part, int):
                # Frameworks disagree on ints beside arrays; as an array it means one thing.
                index.append(to_array(np.array([part])) if self.broadcast else part)
            elif isinstance(part, range):
                forward = part if part.step > 0 else part[::-1]
                index.append(slice(forward.start, max(forward.stop, forward.start), forward.step))
                if part.step < 0:
                    flips.append(axis)
                axis += 1
            else:
                index.append(to_array(part))
        return tuple(index), tuple(flips)

    def pointwise(self) -> "Selection":
        """The same elements in the same order, with one integer array per axis and no other structure."""
        if self.traced:
            raise TracedError("traced indices cannot be combined in this way; write the index without `...` or masks")
        return Selection.at_flat(self.flat(), self.of)

    @classmethod
    def at_flat(cls, positions: np.ndarray, of: Shape) -> "Selection":
        """The elements at these positions of the flattened tensor."""
        return cls(of, tuple(np.unravel_index(positions, of)) if of else (), block=0, broadcast=positions.shape)

    def __repr__(self) -> str:
        named = "traced elements" if self.traced else f"{self.size} of {math.prod(self.of)} elements"
        return f"<Selection: {named} of shape {self.of}>"

    def _keys(self) -> np.ndarray:
        """One number per entry of the broadcast arrays, equal where they name the same element."""
        arrays = [(part, size) for part, size in zip(self.parts, self.of, strict=True) if isinstance(part, np.ndarray)]
        keys = arrays[0][0]
        for part, size in arrays[1:]:
            keys = keys * size + part
        return keys.reshape(-1)

    def _positions(self, split: int) -> np.ndarray:
        """Positions within the first `split` axes, flattened; the axes after it must be whole."""
        ndim = len(self.shape) - (len(self.of) - split)
        positions = np.zeros((1,) * ndim, dtype=np.int64)
        for part, size in zip(self.mesh(split), self.of, strict=False):
            positions = positions * size + part
        return np.broadcast_to(positions, self.shape[:ndim])


def resolve(index: Index, of: Shape) -> Selection:
    """Put a normal index against a shape; messages lack the name, which the caller puts in front."""
    for item in index:
        if type(item) is IndexArray and (item.traced or item.values.size > SMALL):
            return _resolve(index, of)
    try:
        return _resolve_again(index, of)
    except TypeError:  # sizes that cannot be hashed, such as PyTorch's symbolic ones
        return _resolve(index, of)


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
        raise SelectionError("`...` stands twice; one is enough")
    if len(arrays) == 1 and used == len(of) == arrays[0].axes and arrays[0].boolean:
        _check_mask(arrays[0], of, 0)
        return Selection(of if arrays[0].traced else arrays[0].shape, (arrays[0],))
    return _Walk(of, fill=len(of) - used, arrays=bool(arrays)).over(index if ellipses else (*index, Ellipsis))


_resolve_again = lru_cache(maxsize=4096)(_resolve)


class _Walk:
    """One pass over an index, axis by axis, that collects the parts of its selection."""

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

    def over(self, index: Index) -> Selection:
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
                    raise SelectionError(f"index {item} is out of range for axis {axis} of size {size}")
                self.join([item if size is None or item >= 0 else item + size], None)
        return self.finish()

    def keep(self, ranges: list[range | Span]) -> None:
        """Axes that stay in the result. In NumPy an empty `...` still separates index arrays."""
        self.parts += ranges
        self.kept += len(ranges)
        self.apart = self.block is not None

    def join(self, parts: list[Any], item: IndexArray | None) -> None:
        """Axes that index arrays take over; beside arrays, ints count as such."""
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
            values = item.readable("a traced mask must cover the whole tensor and stand alone; use a concrete mask")
            self.lone |= not item.shape
            return list(values.nonzero()) if item.shape else []
        return [item.values]

    def finish(self) -> Selection:
        if not self.arrays:
            return Selection(self.of, tuple(self.parts))
        broadcast = self.shapes[0] if len(self.shapes) == 1 else self.together()
        if 0 not in broadcast:
            self.parts = [part if _stays(part) else self.checked(part, axis) for axis, part in enumerate(self.parts)]
        if not self.of:
            return Selection(self.of, (IndexArray.freeze(np.array(broadcast != (0,))),))
        selection = Selection(self.of, tuple(self.parts), self.block or 0, broadcast)
        return selection if self.plain() else selection.pointwise()

    def together(self) -> Shape:
        try:
            return np.broadcast_shapes(*self.shapes)
        except ValueError:
            shapes = " and ".join(map(str, self.shapes))
            raise SelectionError(f"index arrays of shapes {shapes} do not broadcast together") from None

    def checked(self, part: Any, axis: int) -> Any:
        """Range-check an integer array and count its negative entries from the end."""
        size = self.of[axis]
        if not isinstance(part, np.ndarray) or size is None:
            return part
        if (part.view(np.uint64) < size).all():  # a negative number is a huge one, unsigned
            return part
        low, high = int(part.min()), int(part.max())
        if low < -size or high >= size:
            culprit = high if high >= size else low
            raise SelectionError(f"index {culprit} is out of range for axis {axis} of size {size}")
        counted = np.where(part < 0, part + size, part)
        counted.flags.writeable = False
        return counted

    def plain(self) -> bool:
        """Whether the arrays land where their axes stand, which is what frameworks do with such an index."""
        if self.lone:  # a mask without axes adds one of its own, which no axis of the tensor accounts for
            return False
        taken = [axis for axis, part in enumerate(self.parts) if not _stays(part)]
        adjacent = taken[-1] - taken[0] + 1 == len(taken)
        return self.block == (taken[0] if adjacent else 0)


def _stays(part: Any) -> bool:
    """Whether an axis stays in the result: a range, or a slice of an axis whose size is not known."""
    return isinstance(part, range | Span)


def _append_axes(part: Any, count: int) -> Any:
    return part.reshape(tuple(part.shape) + (1,) * count)


def _check_mask(mask: IndexArray, of: Shape, axis: int) -> None:
    covered = of[axis : axis + len(mask.shape)]
    for size, own in zip(covered, mask.shape, strict=True):
        if size is not None and own is not None and size != own:
            shapes = f"a mask of shape {tuple(mask.shape)} does not fit axes of shape {tuple(covered)}"
            raise SelectionError(f"{shapes}; it must match exactly")
