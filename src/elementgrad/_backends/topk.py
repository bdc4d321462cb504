"""The elements of a tensor that are largest in size, found a piece at a time.

Tensors that are worked on together: few enough to fit in memory, enough of them to be done soon.
"""

from collections.abc import Iterator, Mapping

import numpy as np

PIECE = 2**18
"""How many elements are looked at together: no copy of the whole is made."""


def largest(
    pieces: Iterator[np.ndarray], others: Iterator[np.ndarray] | None, count: int, floor: float
) -> tuple[np.ndarray, np.ndarray]:
    """Size and position of the elements of the pieces, less the others, that are largest in size: `Backend.topk_abs`.

    >>> import numpy as np
    >>> from elementgrad._backends.topk import largest
    >>> largest(iter([np.array([1.0, -3.0]), np.array([2.0, 3.0])]), None, count=2, floor=0.0)
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
            size, place = _first(np.concatenate(sizes), np.concatenate(places), count)
            sizes, places, floor = [size], [place], max(floor, float(size.min()))
    return _first(np.concatenate(sizes), np.concatenate(places), count)


def _first(sizes: np.ndarray, places: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The largest; of equal ones those that stand first."""
    if len(sizes) <= count:
        return sizes, places
    least = np.partition(sizes, -count)[-count]
    kept = sizes > least
    kept[np.flatnonzero(sizes == least)[: count - np.count_nonzero(kept)]] = True
    return sizes[kept], places[kept]


def grouped(sizes: Mapping[str, int]) -> list[list[str]]:
    """Neighbours together, up to the size of the largest, which must be held in any case.

    >>> from elementgrad._backends.topk import grouped
    >>> grouped({"embedding": 100, "weight": 60, "bias": 10, "head": 90})
    [['embedding'], ['weight', 'bias'], ['head']]
    """
    room = max(sizes.values())
    groups: list[list[str]] = [[]]
    for name, size in sizes.items():
        if sum(sizes[other] for other in groups[-1]) + size > room:
            groups.append([])
        groups[-1].append(name)
    return groups
