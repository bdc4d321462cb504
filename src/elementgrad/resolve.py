"""Putting an index against a shape: NumPy's rules, and the checks that come before any work."""

from functools import lru_cache
from typing import Any

import numpy as np

from elementgrad.errors import SelectionError, quoted
from elementgrad.index import Index, IndexArray, Span
from elementgrad.selection import Selection, Shape, stays

SMALL = 256
"""Up to so many entries in an index array, its selection is kept for the next call."""


def resolve(index: Index, of: Shape) -> Selection:
    """Put a normal index against a shape; messages lack the name, which the caller puts in front."""
    for size in of:
        if type(size) is not int and size is not None:  # a compiler's or tracer's own ints
            return _resolve(index, tuple([size if size is None else int(size) for size in of]))
    for item in index:
        if type(item) is IndexArray and (item.traced or item.values.size > SMALL):
            return _resolve(index, of)
    return _resolve_again(index, of)


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
                    raise SelectionError(f"index {quoted(item)} is out of range for axis {axis} of size {size}")
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
            self.parts = [part if stays(part) else self.checked(part, axis) for axis, part in enumerate(self.parts)]
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
        return np.where(part < 0, part + size, part)

    def plain(self) -> bool:
        """Whether the arrays land where their axes stand, which is what frameworks do with such an index."""
        if self.lone:  # a mask without axes adds one of its own, which no axis of the tensor accounts for
            return False
        taken = [axis for axis, part in enumerate(self.parts) if not stays(part)]
        adjacent = taken[-1] - taken[0] + 1 == len(taken)
        return self.block == (taken[0] if adjacent else 0)


def _check_mask(mask: IndexArray, of: Shape, axis: int) -> None:
    covered = of[axis : axis + len(mask.shape)]
    for size, own in zip(covered, mask.shape, strict=True):
        if size is not None and own is not None and size != own:
            shapes = f"a mask of shape {tuple(mask.shape)} does not fit axes of shape {tuple(covered)}"
            raise SelectionError(f"{shapes}; it must match exactly")
