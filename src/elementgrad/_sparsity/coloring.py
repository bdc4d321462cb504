"""Colours that repeat along the axes of a tensor: the best there are for stencils whose period fits the grid.

Colours by first fit: sets of colours are the bits of Python ints, so that each entry is looked at twice, no more.

Colourings: which rows and columns go into one sweep together, and where each entry is then to be found.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

import numpy as np

from elementgrad._sparsity.pattern import Pattern

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


Shapes = tuple[Sequence[int], Sequence[int]]
Kind = Literal["rows", "columns", "both", "symmetric"]
PARTS = 6
"""How many ways to part the dense rows or columns from the others are tried."""


@dataclass(frozen=True, eq=False)
class Coloring:
    """How the entries of a pattern are read in few sweeps.

    A reverse sweep is seeded with all rows of a colour and gives their sum; a forward sweep is seeded with all columns
    of a colour. Each entry is alone somewhere in those sums. `rows` and `columns` hold the colour of each, -1 for one
    that is in no sweep. `places` says for each entry where it is among the results of all sweeps, one after another,
    flattened: first the forward ones (each as long as there are rows), then the reverse ones.

    >>> P = Pattern.from_dense(np.eye(6) + np.eye(6, k=1) + np.eye(6, k=-1))
    >>> colouring(P)
    <Colouring of 16 entries: 3 reverse sweeps by rows, for 6 rows and 6 columns>
    """

    kind: Kind
    shape: tuple[int, int]
    rows: np.ndarray
    columns: np.ndarray
    places: np.ndarray

    @property
    def reverse(self) -> int:
        """How many reverse sweeps."""
        return int(self.rows.max(initial=-1)) + 1

    @property
    def forward(self) -> int:
        """How many forward sweeps."""
        return int(self.columns.max(initial=-1)) + 1

    @property
    def sweeps(self) -> int:
        """How many sweeps, of both directions."""
        return self.reverse + self.forward

    @property
    def text(self) -> str:
        """The sweeps, for a person."""
        names = (("reverse", self.reverse), ("forward", self.forward))
        counts = [f"{count} {name} sweep{'s'[: count != 1]}" for name, count in names if count]
        how = {"both": "by rows and columns", "symmetric": "by symmetry"}.get(self.kind, f"by {self.kind}")
        return f"{' and '.join(counts) or 'no sweep'} {how}"

    def __repr__(self) -> str:
        size = f"{self.shape[0]} rows and {self.shape[1]} columns"
        return f"<Colouring of {len(self.places)} entries: {self.text}, for {size}>"


def color(
    pattern: Pattern,
    needed: np.ndarray | None = None,
    symmetric: bool = False,
    without: Iterable[str] = (),
    shapes: Shapes = ((), ()),
) -> Coloring:
    """The fewest sweeps found that read a pattern, or of it the entries for which `needed` is true.

    The matrix may be told to be symmetric; then its pattern must be. `without` names the directions that cannot be had.
    `shapes` are those of the tensors whose elements rows and columns are: stencils repeat along their axes.
    Of equal numbers of sweeps reverse ones are taken. A dense pattern has as many colours as rows or columns.
    """
    asked = np.ones(pattern.size, dtype=bool) if needed is None else np.asarray(needed, dtype=bool)
    without = set(without)
    ways = [_by_rows] if "reverse" not in without else []
    ways += [_by_columns] if "forward" not in without else []
    mirrored = symmetric and pattern.size > 0 and asked.all()  # without entries no sweep is left that could show it
    tried = [_by_stars(pattern, "reverse" not in without)] if mirrored else []
    if tried:  # then rows and columns are the same, and rarely better
        ways = ways[: pattern.size <= PATIENT]
    for way in ways:
        if not tried or tried[0].sweeps > _least(pattern, asked, way):
            tried.append(way(pattern, asked, shapes))
    best = min(tried, key=lambda found: found.sweeps)
    return best if without or not best.sweeps else _parted(pattern, asked, best)


def _least(pattern: Pattern, asked: np.ndarray, way: Callable[..., Coloring]) -> int:
    """A number of sweeps that no colouring this way goes below: rows that meet in one column all differ."""
    if not asked.all():
        return 1
    met = pattern.columns if way is _by_rows else pattern.rows
    return int(np.bincount(met, minlength=1).max())


def _by_rows(pattern: Pattern, asked: np.ndarray, shapes: Shapes = ((), ())) -> Coloring:
    rows = lines_of(pattern, asked, shapes[0])
    none = np.full(pattern.shape[1], -1)
    places = rows[pattern.rows[asked]] * pattern.shape[1] + pattern.columns[asked]
    return Coloring("rows", pattern.shape, rows, none, places)


def _by_columns(pattern: Pattern, asked: np.ndarray, shapes: Shapes = ((), ())) -> Coloring:
    """As by rows, of the transposed matrix."""
    order = np.argsort(pattern.columns, kind="stable")
    columns = lines_of(pattern.T, asked[order], shapes[1])
    none = np.full(pattern.shape[0], -1)
    places = columns[pattern.columns[asked]] * pattern.shape[0] + pattern.rows[asked]
    return Coloring("columns", pattern.shape, none, columns, places)


def _by_stars(pattern: Pattern, reverse: bool) -> Coloring:
    """An entry is read in its own place where it is alone there, and else in that of its mirror image."""
    size = pattern.shape[0]
    colours = stars_of(pattern)
    here = colours[pattern.rows] * size + pattern.columns
    there = colours[pattern.columns] * size + pattern.rows
    alone = np.bincount(here, minlength=(int(colours.max(initial=-1)) + 1) * size) == 1
    places = np.where(alone[here], here, there)
    if not alone[places].all():
        raise AssertionError("a star colouring that tells not all entries apart")
    none = np.full(size, -1)
    rows, columns = (colours, none) if reverse else (none, colours)
    return Coloring("symmetric", pattern.shape, rows, columns, places)


def _parted(pattern: Pattern, asked: np.ndarray, best: Coloring) -> Coloring:
    """Part dense rows (or columns) from the others, and read each part in its own direction, if that is fewer."""
    sides = (pattern.rows, pattern.shape[0], True), (pattern.columns, pattern.shape[1], False)
    for lines, count, by_rows in sides:
        counts = np.bincount(lines, minlength=count)
        steps = np.unique(counts)[::-1]
        for least in steps[steps > max(best.sweeps / 2, 2 * counts.mean())][:PARTS]:
            apart = counts[lines] >= least
            best = _in_parts(pattern, asked, apart if by_rows else ~apart, best.sweeps) or best
    return best


def _in_parts(pattern: Pattern, asked: np.ndarray, by_rows: np.ndarray, most: int) -> Coloring | None:
    """Some entries by rows and the others by columns, each part as if the other were not there: rows are seeded whole,
    and what they hold of the other part is left aside."""
    m, n = pattern.shape
    rows = _part(pattern, asked, by_rows, lambda part, needed: _by_rows(part, needed).rows)
    if rows.max(initial=-1) + 1 >= most:
        return None
    columns = _part(pattern, asked, ~by_rows, lambda part, needed: _by_columns(part, needed).columns)
    forward = int(columns.max(initial=-1)) + 1
    if forward + rows.max(initial=-1) + 1 >= most:
        return None
    right = forward * m + rows[pattern.rows] * n + pattern.columns
    places = np.where(by_rows, right, columns[pattern.columns] * m + pattern.rows)
    return Coloring("both", pattern.shape, rows, columns, places[asked])


def _part(
    pattern: Pattern, asked: np.ndarray, mine: np.ndarray, colours: Callable[[Pattern, np.ndarray], np.ndarray]
) -> np.ndarray:
    return colours(Pattern.from_keys(pattern.keys[mine], pattern.shape), asked[mine])
