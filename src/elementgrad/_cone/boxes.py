"""Boxes: an interval for each axis of a tensor."""

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any, NamedTuple

Shape = tuple[int, ...]


class Interval(NamedTuple):
    """The positions from `start` up to `stop`, which is left out."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """The number of positions."""
        start, stop = self
        return stop - start if stop > start else 0

    def join(self, other: "Interval") -> "Interval":
        """Return the smallest interval around both.

        >>> from elementgrad._cone.boxes import Interval
        >>> Interval(1, 3).join(Interval(5, 6)), Interval(2, 2).join(Interval(5, 6))
        (Interval(start=1, stop=6), Interval(start=5, stop=6))
        """
        if not self.size or not other.size:
            return self if self.size else other
        return Interval(min(self.start, other.start), max(self.stop, other.stop))

    def meet(self, other: "Interval") -> "Interval":
        """Return the positions that are in both."""
        start = max(self.start, other.start)
        return Interval(start, max(start, min(self.stop, other.stop)))

    def shift(self, by: int) -> "Interval":
        """Return the interval moved to the right."""
        return Interval(self.start + by, self.stop + by)

    def clip(self, size: int) -> "Interval":
        """Return the part of the interval that is inside an axis."""
        start = min(max(self.start, 0), size)
        return Interval(start, max(start, min(self.stop, size)))


Box = tuple[Interval, ...]


def whole(shape: Sequence[int]) -> Box:
    """Return the box of a whole tensor."""
    return tuple([Interval(0, size) for size in shape])


def join(left: Box | None, right: Box | None) -> Box | None:
    """Return the smallest box around both; None and empty boxes take no room."""
    if left is None or is_empty(left):
        return right if right is not None else left
    if right is None or is_empty(right):
        return left
    return tuple([one.join(other) for one, other in zip(left, right, strict=True)])


def meet(left: Box, right: Box) -> Box:
    """Return the part that is in both boxes."""
    return tuple([one.meet(other) for one, other in zip(left, right, strict=True)])


def sizes(box: Box) -> Shape:
    """Return the shape of the elements in a box."""
    return tuple([stop - start if stop > start else 0 for start, stop in box])


def volume(box: Box) -> int:
    """Return the number of elements in a box."""
    return prod(sizes(box))


def is_empty(box: Box) -> bool:
    """Return True if a box holds no element."""
    for start, stop in box:  # noqa: SIM110 (any() takes several times as long, and plans ask this for every operand)
        if stop <= start:
            return True
    return False


def slices(box: Box, outer: Box | None = None) -> tuple[slice, ...]:
    """Return the index of a box in a tensor that holds the elements of an outer box; without one, in the whole."""
    if outer is None:
        return tuple([slice(start, stop) for start, stop in box])
    return tuple(
        [
            slice(interval.start - around.start, interval.stop - around.start)
            for interval, around in zip(box, outer, strict=True)
        ]
    )


def around(coordinates: Iterable[Any]) -> Box:
    """Return the smallest box around the elements whose positions along each axis are given.

    >>> from elementgrad._cone.boxes import around
    >>> around([[3, 1], [0, 7]])
    (Interval(start=1, stop=4), Interval(start=0, stop=8))
    """
    return tuple(
        [Interval(int(min(axis)), int(max(axis)) + 1) if len(axis) else Interval(0, 0) for axis in coordinates]
    )
