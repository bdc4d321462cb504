"""Colours by first fit: sets of colours are the bits of Python ints, so that each entry is looked at twice, no more."""

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from elementgrad.sparsity.lattice import repeating
from elementgrad.sparsity.pattern import Pattern

ROUNDS = 6
"""How often a colouring is tried to be bettered."""
PATIENT = 300_000
"""Patterns of up to so many entries are coloured in several orders."""


def lines_of(pattern: Pattern, needed: np.ndarray | None = None, shape: Sequence[int] = ()) -> np.ndarray:
    """A colour for each row, such that no two rows of a colour meet in a column; -1 for a row with no entries.

    With `needed`, a truth for each entry, two rows may meet where no needed entry of theirs is, and a row without one
    has no colour: only what is asked for must be told apart. `shape` is that of the tensor whose elements the rows are.

    >>> lines_of(Pattern.from_dense(np.eye(6) + np.eye(6, k=1) + np.eye(6, k=-1))).tolist()
    [0, 1, 2, 0, 1, 2]
    """
    if needed is not None and needed.all():
        needed = None
    counts = np.diff(pattern.starts)
    asked = counts if needed is None else np.bincount(pattern.rows[needed], minlength=pattern.shape[0])
    lines = np.flatnonzero(asked)
    colours = np.full(pattern.shape[0], -1)
    meeting = np.bincount(pattern.columns, minlength=pattern.shape[1])
    least = int(meeting.max(initial=0)) if needed is None else 1
    if needed is None and least == len(lines):  # one column meets all
        colours[lines] = np.arange(len(lines))
        return colours
    starts, columns = pattern.starts.tolist(), pattern.columns.tolist()
    flags = None if needed is None else needed.tolist()

    def fit(order: np.ndarray) -> np.ndarray:
        fitted = _first_fit(starts, columns, order.tolist(), pattern.shape[1], flags)
        return np.array(fitted, dtype=np.int64)

    def orders() -> Iterator[np.ndarray]:
        degrees = np.zeros(pattern.shape[0], dtype=np.int64)
        np.add.at(degrees, pattern.rows, meeting[pattern.columns] - 1)
        yield lines[np.argsort(-degrees[lines], kind="stable")]
        if int((meeting.astype(np.int64) ** 2).sum()) <= 4 * PATIENT:
            order = _smallest_last(pattern, degrees)
            yield order[asked[order] > 0]

    best = _best(fit, lines, orders(), least, pattern.size <= PATIENT)
    count = int(best.max(initial=-1)) + 1
    if needed is None and least < count and pattern.size <= PATIENT:
        fewer = repeating(pattern, shape, least, count)
        return best if fewer is None else fewer
    return best


def stars_of(pattern: Pattern) -> np.ndarray:
    """A star colouring of a symmetric pattern: neighbours differ, and no path of four elements has only two colours.

    Each entry, or its mirror image, is then alone in its column among the rows of its colour.

    >>> arrow = np.eye(6); arrow[0], arrow[:, 0] = 1, 1
    >>> stars_of(Pattern.from_dense(arrow)).tolist()
    [1, 0, 0, 0, 0, 0]
    """
    counts = np.diff(pattern.starts)
    lines = np.flatnonzero(counts)
    starts, columns = pattern.starts.tolist(), pattern.columns.tolist()

    def fit(order: np.ndarray) -> np.ndarray:
        return np.array(_star_fit(starts, columns, order.tolist()), dtype=np.int64)

    def orders() -> Iterator[np.ndarray]:
        yield lines[np.argsort(-counts[lines], kind="stable")]
        order = _peeled(lambda line: columns[starts[line] : starts[line + 1]], counts)
        yield order[counts[order] > 0]

    return _best(fit, lines, orders(), 1, pattern.size <= PATIENT)


def _best(
    fit: Callable[[np.ndarray], np.ndarray],
    lines: np.ndarray,
    orders: Iterable[np.ndarray],
    least: int,
    patient: bool,
) -> np.ndarray:
    """The fewest colours over several orders, then over orders by the classes of the best so far."""
    best = fit(lines)
    if not patient:
        return best
    for order in orders:
        if best.max(initial=-1) + 1 <= least:
            return best
        other = fit(order)
        best = other if other.max() < best.max() else best
    random = np.random.default_rng(0)
    for number in range(ROUNDS):
        count = int(best.max(initial=-1)) + 1
        if count <= least:
            break
        ranks = np.arange(count)[::-1] if number % 2 == 0 else random.permutation(count)
        other = fit(lines[np.argsort(ranks[best[lines]], kind="stable")])
        best = other if other.max() <= best.max() else best
    return best


def _first_fit(
    starts: list[int], columns: list[int], order: list[int], width: int, needed: list[bool] | None
) -> list[int]:
    colours = [-1] * (len(starts) - 1)
    met = [0] * width
    if needed is None:
        for line in order:
            mine = columns[starts[line] : starts[line + 1]]
            taken = 0
            for column in mine:
                taken |= met[column]
            colour = ~taken & (taken + 1)
            for column in mine:
                met[column] |= colour
            colours[line] = colour.bit_length() - 1
        return colours
    asked = [0] * width
    for line in order:
        span = range(starts[line], starts[line + 1])
        taken = 0
        for entry in span:
            taken |= met[columns[entry]] if needed[entry] else asked[columns[entry]]
        colour = ~taken & (taken + 1)
        for entry in span:
            met[columns[entry]] |= colour
            if needed[entry]:
                asked[columns[entry]] |= colour
        colours[line] = colour.bit_length() - 1
    return colours


def _star_fit(starts: list[int], columns: list[int], order: list[int]) -> list[int]:
    """First fit without paths of four elements in two colours.

    For each element: the colours of its neighbours (`once`), those of two or more of them (`twice`), and the colours of
    the neighbours that are the middle of a star of its own colour (`hubs`).
    """
    size = len(starts) - 1
    colours, once, twice, hubs = [0] * size, [0] * size, [0] * size, [0] * size
    for line in order:
        mine = [other for other in columns[starts[line] : starts[line + 1]] if other != line]
        taken, double = once[line], twice[line]
        for other in mine:
            theirs = colours[other]
            if theirs:
                taken |= once[other] if theirs & double else hubs[other]
        colour = ~taken & (taken + 1)
        colours[line] = colour
        for other in mine:
            if not once[other] & colour:
                once[other] |= colour
            elif not twice[other] & colour:
                twice[other] |= colour
                if colours[other]:
                    _becomes_hub(other, colour, colours, hubs, columns[starts[other] : starts[other + 1]])
            elif colours[other]:
                hubs[line] |= colours[other]
        for other in mine:  # a neighbour of several of one colour, which this one joins as a middle
            if colours[other] & twice[line]:
                hubs[other] |= colour
    return [colour.bit_length() - 1 for colour in colours]


def _becomes_hub(middle: int, colour: int, colours: list[int], hubs: list[int], around: list[int]) -> None:
    for other in around:
        if other != middle and colours[other] == colour:
            hubs[other] |= colours[middle]


def _smallest_last(pattern: Pattern, degrees: np.ndarray) -> np.ndarray:
    """Rows such that each meets few of those before it: the one that meets fewest is put last, then left out."""
    across = pattern.T
    starts, columns = pattern.starts.tolist(), pattern.columns.tolist()
    down, rows = across.starts.tolist(), across.columns.tolist()

    def met(line: int) -> list[int]:
        return [
            other
            for column in columns[starts[line] : starts[line + 1]]
            for other in rows[down[column] : down[column + 1]]
        ]

    return _peeled(met, degrees)


def _peeled(met: Callable[[int], Sequence[int]], degrees: np.ndarray) -> np.ndarray:
    """The same for lines that each meet others, as often as they are given."""
    left = degrees.tolist()
    heap = [(degree, line) for line, degree in enumerate(left)]
    heapq.heapify(heap)
    order = []
    while heap:
        degree, line = heapq.heappop(heap)
        if degree != left[line]:
            continue
        left[line] = -1
        order.append(line)
        touched: dict[int, int] = {}
        for other in met(line):
            if left[other] > 0:
                touched[other] = touched.get(other, 0) + 1
        for other, count in touched.items():
            left[other] -= count
            heapq.heappush(heap, (left[other], other))
    return np.array(order[::-1], dtype=np.int64)
