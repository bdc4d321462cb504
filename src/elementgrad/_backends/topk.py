"""Top-k by absolute value in pieces of NumPy arrays, and groups of parameters to differentiate together."""

from collections.abc import Iterator, Mapping

import numpy as np

PIECE = 2**18
"""The number of elements in a piece, so that no copy of the whole tensor is made."""


def topk_abs(
    pieces: Iterator[np.ndarray], others: Iterator[np.ndarray] | None, count: int, floor: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return size and position of the elements of `pieces - others` with the largest absolute value.

    This is `TopBackend.topk_abs` for a tensor that comes in pieces.

    >>> import numpy as np
    >>> from elementgrad._backends.topk import topk_abs
    >>> topk_abs(iter([np.array([1.0, -3.0]), np.array([2.0, 3.0])]), None, count=2, floor=0.0)
    (array([3., 3.]), array([1, 3]))
    """
    start = 0
    sizes, places = [np.zeros(0)], [np.zeros(0, np.int64)]
    for piece in pieces:
        size = np.abs(piece if others is None else piece - next(others))
        unknown = np.flatnonzero(~np.isfinite(size))[:1]
        if len(unknown):
            return size[unknown], start + unknown
        place = np.flatnonzero(size >= floor)
        sizes.append(size[place])
        places.append(start + place)
        start += len(piece)
        if sum(map(len, sizes)) > 2 * max(count, PIECE):
            size, place = _keep_largest(np.concatenate(sizes), np.concatenate(places), count)
            sizes, places, floor = [size], [place], max(floor, float(size.min()))
    return _keep_largest(np.concatenate(sizes), np.concatenate(places), count)


def _keep_largest(sizes: np.ndarray, places: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the `count` largest; of equal ones those that come first."""
    if len(sizes) <= count:
        return sizes, places
    least = np.partition(sizes, -count)[-count]
    kept = sizes > least
    kept[np.flatnonzero(sizes == least)[: count - np.count_nonzero(kept)]] = True
    return sizes[kept], places[kept]


def group_by_size(sizes: Mapping[str, int]) -> list[list[str]]:
    """Group neighbours up to the size of the largest, which must fit in memory in any case.

    >>> from elementgrad._backends.topk import group_by_size
    >>> group_by_size({"embedding": 100, "weight": 60, "bias": 10, "head": 90})
    [['embedding'], ['weight', 'bias'], ['head']]
    """
    room = max(sizes.values())
    groups: list[list[str]] = [[]]
    for name, size in sizes.items():
        if sum(sizes[other] for other in groups[-1]) + size > room:
            groups.append([])
        groups[-1].append(name)
    return groups
