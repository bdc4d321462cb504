"""How far a number is moved for differences: the usual widths, and wider and narrower ones where those do not do."""

import math
from dataclasses import dataclass

from elementgrad.explaining.precision import EPSILON, SIZES

USUAL = (1.0, 0.75, 0.5)
"""Widths that decide mostly, as parts of the usual size."""
WIDE = tuple([eighths * 2.0**-7 for eighths in (8, 7, 6, 5, 4, 3)])
"""Wider than the steps in which a function goes that rounds to any floating dtype on its way."""
NARROWER = 8.0
"""Below the usual widths each is so many times narrower than the one before."""
CLOSE = 16.0
"""A narrow width that is looked at early is so many times the narrowest."""
LEAST = 1e-4
"""The narrowest width of a number that is close to zero is at most so much of it."""


@dataclass(frozen=True)
class Widths:
    """The widths for one number, the widest first; all are powers of two and their eighths, so that moves are exact."""

    scale: float
    usual: list[float]
    wide: list[float]
    narrow: list[float]
    near: float
    """One that is narrow, and looked at early."""
    small: bool
    """Whether the number is smaller than the usual widths, so that those may be too wide to see its slope."""

    @classmethod
    def around(cls, here: float, dtype: str) -> "Widths":
        """Return widths of the size of the number or of one, and below them those that its own size asks for."""
        scale = 2.0 ** math.floor(math.log2(max(1.0, abs(here))))
        size = 2.0 ** math.floor(math.log2(SIZES[dtype])) * scale
        usual = [part * size for part in USUAL]
        narrow = _down_to(EPSILON[dtype] ** 0.65 * scale, usual[-1])
        narrow += [width for width in _own(abs(here), dtype) if 2 * width < narrow[-1]]
        wide = [width * scale for width in WIDE if width * scale > usual[0]]
        return cls(scale, usual, wide, narrow, CLOSE * narrow[-1], 0 < abs(here) < usual[-1])


def _down_to(lowest: float, width: float) -> list[float]:
    """Return widths below one of them, until one is below the lowest."""
    found = [width / NARROWER]
    while found[-1] > lowest:
        found.append(found[-1] / NARROWER)
    return found


def _own(size: float, dtype: str) -> list[float]:
    """Return widths by which a number of this size moves, and keeps its sign."""
    least = max(LEAST, 4 * EPSILON[dtype]) * size
    if not least:
        return []
    widths = _down_to(least, 2.0 ** math.floor(math.log2(size)))
    return [width for width in widths if width and size + width != size]
