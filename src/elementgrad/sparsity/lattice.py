"""Colours that repeat along the axes of a tensor: the best there are for stencils whose period fits the grid."""

from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np

from elementgrad.sparsity.pattern import Pattern

AXES = 3
"""Of tensors with more axes of several elements the last ones count as one."""
WIDEST = 16
"""Longer periods are not tried."""
TRIED = 40
"""So many ways of repeating that look right are looked at in full, for each period."""


def repeating(pattern: Pattern, shape: Sequence[int], least: int, most: int) -> np.ndarray | None:
    """Fewer than `most` colours for the rows, which are the elements of a tensor; None if none are found.

    The colour of an element is a sum of its coordinates, each by a factor, modulo a period.

    >>> grid = np.eye(16).reshape(4, 4, 4, 4)
    >>> ring = sum(np.roll(grid, step, axis) for step, axis in ((0, 0), (1, 2), (-1, 2), (1, 3), (-1, 3)))
    >>> repeating(Pattern.from_dense(ring.reshape(16, 16)), (4, 4), 5, 16) is None
    False
    """
    shape = [size for size in shape if size > 1]
    shape = [*shape[: AXES - 1], int(np.prod(shape[AXES - 1 :]))] if len(shape) > AXES else shape
    if not shape or int(np.prod(shape)) != pattern.shape[0] or not pattern.size:
        return None
    places = np.stack(np.unravel_index(np.arange(pattern.shape[0]), shape), 1)
    across = pattern.T
    counts = np.diff(across.starts)
    full = np.flatnonzero(counts == counts.max())
    column = full[len(full) // 2]
    meeting = places[across.columns[across.starts[column] : across.starts[column + 1]]]
    for period in range(max(2, least), min(most, WIDEST + 1)):
        for factors in _fitting(meeting, period):
            colours = places @ factors % period
            keys = pattern.columns.astype(np.int64) * period + colours[pattern.rows]
            if np.bincount(keys).max() == 1:
                return np.where(np.diff(pattern.starts) > 0, colours, -1)
    return None


def _fitting(meeting: np.ndarray, period: int) -> Iterator[np.ndarray]:
    """The first factors for which the rows that meet in one column all differ."""
    factors = np.array(list(product(range(period), repeat=meeting.shape[1])))
    colours = np.sort(meeting @ factors.T % period, axis=0)
    yield from factors[(np.diff(colours, axis=0) > 0).all(0)][:TRIED]
