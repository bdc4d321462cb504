"""Colorings: which rows and columns go into one sweep together, and where each entry is then to be read.

`color` tries rows, columns, symmetry, and a mix of rows and columns. Rows are colored by first fit in several orders
(`color_rows`, `color_stars`), and by colors that repeat along the axes of a tensor (`repeat_colors`), which suit
stencils whose period fits the grid. In first fit a set of colors is the bits of a Python int, so that each entry is
looked at only twice.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

import numpy as np

from elementgrad._sparsity.pattern import Pattern

Shapes = tuple[Sequence[int], Sequence[int]]
Kind = Literal["rows", "columns", "both", "symmetric"]
MAX_SPLITS = 6
"""The number of ways that are tried to separate dense rows or columns from the others."""
ROUNDS = 6
"""Number of times that first fit is tried again, in orders by the colors of the best result."""
MAX_PATIENT_SIZE = 300_000
"""Patterns of up to this many entries are colored in several orders."""
MAX_AXES = 3
"""The most axes of a tensor with several elements; those behind count as one axis."""
MAX_PERIOD = 16
"""The longest period that is tried."""
MAX_FACTORS = 40
"""The number of factors, for each period, that fit one column and are then checked on all."""


@dataclass(frozen=True, eq=False)
class Coloring:
    """A plan to read the entries of a pattern in few sweeps.

    A reverse sweep is seeded with all rows of a color and gives their sum; a forward sweep is seeded with all columns
    of a color. Each entry is alone somewhere in those sums.

    >>> P = Pattern.from_dense(np.eye(6) + np.eye(6, k=1) + np.eye(6, k=-1))
    >>> color(P)
    <Colouring of 16 entries: 3 reverse sweeps by rows, for 6 rows and 6 columns>
    """

    kind: Kind
    shape: tuple[int, int]
    rows: np.ndarray
    """The color of each row, -1 for one that is in no sweep."""
    columns: np.ndarray
    """The color of each column, -1 for one that is in no sweep."""
    places: np.ndarray
    """The position of each entry among the flattened results of all sweeps: first the forward ones (each as long as
    there are rows), then the reverse ones."""

    @property
    def reverse(self) -> int:
        """Number of reverse sweeps."""
        return _count_colors(self.rows)

    @property
    def forward(self) -> int:
        """Number of forward sweeps."""
        return _count_colors(self.columns)

    @property
    def sweeps(self) -> int:
        """Number of sweeps of both directions."""
        return self.reverse + self.forward

    @property
    def text(self) -> str:
        """The sweeps in words."""
        names = (("reverse", self.reverse), ("forward", self.forward))
        counts = [f"{count} {name} sweep{'s'[: count != 1]}" for name, count in names if count]
        how = {"both": "by rows and columns", "symmetric": "by symmetry"}.get(self.kind, f"by {self.kind}")
        return f"{' and '.join(counts) or 'no sweep'} {how}"

    def __repr__(self) -> str:
        size = f"{self.shape[0]} rows and {self.shape[1]} columns"
        return f"<Colouring of {len(self.places)} entries: {self.text}, for {size}>"


def _count_colors(colors: np.ndarray) -> int:
    return int(colors.max(initial=-1)) + 1


def color(
    pattern: Pattern,
    needed: np.ndarray | None = None,
    symmetric: bool = False,
    without: Iterable[str] = (),
    shapes: Shapes = ((), ()),
) -> Coloring:
    """Return the coloring with the fewest sweeps found. Of equal numbers of sweeps reverse ones are taken.

    Args:
        pattern: The entries that can be nonzero. A dense one has as many colors as rows or columns.
        needed: True for each entry to be read; all by default.
        symmetric: True if the matrix is symmetric; then its pattern must be.
        without: The directions that cannot be had, of "reverse" and "forward".
        shapes: The shapes of the tensors whose elements rows and columns are: stencils repeat along their axes.
    """
    is_needed = np.ones(pattern.size, dtype=bool) if needed is None else np.asarray(needed, dtype=bool)
    without = set(without)
    methods = [_color_by_rows] if "reverse" not in without else []
    methods += [_color_by_columns] if "forward" not in without else []
    # Without entries no sweep is left that could show that the matrix is symmetric.
    is_symmetric = symmetric and pattern.size > 0 and is_needed.all()
    candidates = [_color_by_symmetry(pattern, "reverse" not in without)] if is_symmetric else []
    if candidates:  # then rows and columns are the same, and rarely better
        methods = methods[: pattern.size <= MAX_PATIENT_SIZE]
    for method in methods:
        if not candidates or candidates[0].sweeps > _lower_bound(pattern, is_needed, method):
            candidates.append(method(pattern, is_needed, shapes))
    best = min(candidates, key=lambda coloring: coloring.sweeps)
    return best if without or not best.sweeps else _separate_dense_lines(pattern, is_needed, best)


def _lower_bound(pattern: Pattern, needed: np.ndarray, method: Callable[..., Coloring]) -> int:
    """Return a number of sweeps that no coloring goes below: rows that meet in one column all differ."""
    if not needed.all():
        return 1
    lines = pattern.columns if method is _color_by_rows else pattern.rows
    return int(np.bincount(lines, minlength=1).max())


def _color_by_rows(pattern: Pattern, needed: np.ndarray, shapes: Shapes = ((), ())) -> Coloring:
    rows = color_rows(pattern, needed, shapes[0])
    places = rows[pattern.rows[needed]] * pattern.shape[1] + pattern.columns[needed]
    return Coloring("rows", pattern.shape, rows, np.full(pattern.shape[1], -1), places)


def _color_by_columns(pattern: Pattern, needed: np.ndarray, shapes: Shapes = ((), ())) -> Coloring:
    order = np.argsort(pattern.columns, kind="stable")
    columns = color_rows(pattern.T, needed[order], shapes[1])
    places = columns[pattern.columns[needed]] * pattern.shape[0] + pattern.rows[needed]
    return Coloring("columns", pattern.shape, np.full(pattern.shape[0], -1), columns, places)


def _color_by_symmetry(pattern: Pattern, reverse: bool) -> Coloring:
    """Return a coloring in which each entry is read in its own place if it is alone there, else in its mirror's."""
    size = pattern.shape[0]
    colors = color_stars(pattern)
    own = colors[pattern.rows] * size + pattern.columns
    mirrored = colors[pattern.columns] * size + pattern.rows
    is_alone = np.bincount(own, minlength=_count_colors(colors) * size) == 1
    places = np.where(is_alone[own], own, mirrored)
    if not is_alone[places].all():
        raise AssertionError("a star colouring that tells not all entries apart")
    none = np.full(size, -1)
    rows, columns = (colors, none) if reverse else (none, colors)
    return Coloring("symmetric", pattern.shape, rows, columns, places)


def _separate_dense_lines(pattern: Pattern, needed: np.ndarray, best: Coloring) -> Coloring:
    """Read dense rows (or columns) in their own direction, and the others in the other, if that is fewer sweeps."""
    sides = (pattern.rows, pattern.shape[0], True), (pattern.columns, pattern.shape[1], False)
    for lines, count, is_rows in sides:
        counts = np.bincount(lines, minlength=count)
        steps = np.unique(counts)[::-1]
        for least in steps[steps > max(best.sweeps / 2, 2 * counts.mean())][:MAX_SPLITS]:
            is_dense = counts[lines] >= least
            best = _color_both(pattern, needed, is_dense if is_rows else ~is_dense, best.sweeps) or best
    return best


def _color_both(pattern: Pattern, needed: np.ndarray, by_rows: np.ndarray, limit: int) -> Coloring | None:
    """Read some entries by rows and the others by columns, if that takes fewer sweeps than `limit`.

    Each part is colored as if the other were not there: rows are seeded whole, and what they have of the other part is
    not read.
    """
    m, n = pattern.shape

    def part(mine: np.ndarray) -> tuple[Pattern, np.ndarray]:
        return Pattern.from_keys(pattern.keys[mine], pattern.shape), needed[mine]

    rows = _color_by_rows(*part(by_rows)).rows
    if _count_colors(rows) >= limit:
        return None
    columns = _color_by_columns(*part(~by_rows)).columns
    forward = _count_colors(columns)
    if forward + _count_colors(rows) >= limit:
        return None
    in_reverse = forward * m + rows[pattern.rows] * n + pattern.columns
    places = np.where(by_rows, in_reverse, columns[pattern.columns] * m + pattern.rows)
    return Coloring("both", pattern.shape, rows, columns, places[needed])


def color_rows(pattern: Pattern, needed: np.ndarray | None = None, shape: Sequence[int] = ()) -> np.ndarray:
    """Return a color for each row, such that no two rows of a color meet in a column; -1 for a row without entries.

    With `needed`, a boolean for each entry, two rows may meet where neither has a needed entry, and a row without
    needed entries has no color. `shape` is that of the tensor whose elements the rows are.

    >>> color_rows(Pattern.from_dense(np.eye(6) + np.eye(6, k=1) + np.eye(6, k=-1))).tolist()
    [0, 1, 2, 0, 1, 2]
    """
    if needed is not None and needed.all():
        needed = None
    counts = np.diff(pattern.starts)
    needed_counts = counts if needed is None else np.bincount(pattern.rows[needed], minlength=pattern.shape[0])
    lines = np.flatnonzero(needed_counts)
    column_counts = np.bincount(pattern.columns, minlength=pattern.shape[1])
    least = int(column_counts.max(initial=0)) if needed is None else 1
    if needed is None and least == len(lines):  # all rows meet in one column
        colors = np.full(pattern.shape[0], -1)
        colors[lines] = np.arange(len(lines))
        return colors
    starts, columns = pattern.starts.tolist(), pattern.columns.tolist()
    flags = None if needed is None else needed.tolist()

    def fit(order: np.ndarray) -> np.ndarray:
        return np.array(_fit_rows(starts, columns, order.tolist(), pattern.shape[1], flags), dtype=np.int64)

    def orders() -> Iterator[np.ndarray]:
        degrees = np.zeros(pattern.shape[0], dtype=np.int64)
        np.add.at(degrees, pattern.rows, column_counts[pattern.columns] - 1)
        yield lines[np.argsort(-degrees[lines], kind="stable")]
        if int((column_counts.astype(np.int64) ** 2).sum()) <= 4 * MAX_PATIENT_SIZE:
            order = _order_smallest_last(_row_neighbors(pattern), degrees)
            yield order[needed_counts[order] > 0]

    best = _fit_in_orders(fit, lines, orders(), least, pattern.size <= MAX_PATIENT_SIZE)
    if needed is None and least < _count_colors(best):
        fewer = repeat_colors(pattern, shape, least, _count_colors(best))
        return best if fewer is None else fewer
    return best


def color_stars(pattern: Pattern) -> np.ndarray:
    """Return a star coloring of a symmetric pattern: neighbors differ, and no path of four has only two colors.

    Each entry, or its mirror image, is then alone in its column among the rows of its color.

    >>> arrow = np.eye(6); arrow[0], arrow[:, 0] = 1, 1
    >>> color_stars(Pattern.from_dense(arrow)).tolist()
    [1, 0, 0, 0, 0, 0]
    """
    counts = np.diff(pattern.starts)
    lines = np.flatnonzero(counts)
    starts, columns = pattern.starts.tolist(), pattern.columns.tolist()

    def fit(order: np.ndarray) -> np.ndarray:
        return np.array(_fit_stars(starts, columns, order.tolist()), dtype=np.int64)

    def orders() -> Iterator[np.ndarray]:
        yield lines[np.argsort(-counts[lines], kind="stable")]
        order = _order_smallest_last(lambda line: columns[starts[line] : starts[line + 1]], counts)
        yield order[counts[order] > 0]

    return _fit_in_orders(fit, lines, orders(), 1, pattern.size <= MAX_PATIENT_SIZE)


def _fit_in_orders(
    fit: Callable[[np.ndarray], np.ndarray],
    lines: np.ndarray,
    orders: Iterable[np.ndarray],
    least: int,
    patient: bool,
) -> np.ndarray:
    """Return the fewest colors over several orders, then over orders by the colors of the best so far."""
    best = fit(lines)
    if not patient:
        return best
    for order in orders:
        if _count_colors(best) <= least:
            return best
        other = fit(order)
        best = other if other.max() < best.max() else best
    random = np.random.default_rng(0)
    for turn in range(ROUNDS):
        count = _count_colors(best)
        if count <= least:
            break
        ranks = np.arange(count)[::-1] if turn % 2 == 0 else random.permutation(count)
        other = fit(lines[np.argsort(ranks[best[lines]], kind="stable")])
        best = other if other.max() <= best.max() else best
    return best


def _fit_rows(
    starts: list[int], columns: list[int], order: list[int], width: int, needed: list[bool] | None
) -> list[int]:
    """Give each row the first color that no row before it has in one of its columns."""
    colors = [-1] * (len(starts) - 1)
    in_column = [0] * width
    if needed is None:
        for line in order:
            own = columns[starts[line] : starts[line + 1]]
            taken = 0
            for column in own:
                taken |= in_column[column]
            first_free = ~taken & (taken + 1)
            for column in own:
                in_column[column] |= first_free
            colors[line] = first_free.bit_length() - 1
        return colors
    needed_in_column = [0] * width
    for line in order:
        entries = range(starts[line], starts[line + 1])
        taken = 0
        for entry in entries:
            taken |= in_column[columns[entry]] if needed[entry] else needed_in_column[columns[entry]]
        first_free = ~taken & (taken + 1)
        for entry in entries:
            in_column[columns[entry]] |= first_free
            if needed[entry]:
                needed_in_column[columns[entry]] |= first_free
        colors[line] = first_free.bit_length() - 1
    return colors


def _fit_stars(starts: list[int], columns: list[int], order: list[int]) -> list[int]:
    """Give each element the first color that makes no path of four elements in two colors.

    For each element: the colors of its neighbors (`once`), those of two or more of them (`twice`), and the colors of
    the neighbors that are the middle of a star of its own color (`hubs`).
    """
    size = len(starts) - 1
    colors, once, twice, hubs = [0] * size, [0] * size, [0] * size, [0] * size
    for line in order:
        neighbors = [other for other in columns[starts[line] : starts[line + 1]] if other != line]
        taken, repeated = once[line], twice[line]
        for other in neighbors:
            if colors[other]:
                taken |= once[other] if colors[other] & repeated else hubs[other]
        first_free = ~taken & (taken + 1)
        colors[line] = first_free
        for other in neighbors:
            if not once[other] & first_free:
                once[other] |= first_free
            elif not twice[other] & first_free:
                twice[other] |= first_free
                if colors[other]:  # it becomes the middle of a star of this color
                    for leaf in columns[starts[other] : starts[other + 1]]:
                        if leaf != other and colors[leaf] == first_free:
                            hubs[leaf] |= colors[other]
            elif colors[other]:
                hubs[line] |= colors[other]
        for other in neighbors:  # this element is the middle of a star of the neighbor's color
            if colors[other] & twice[line]:
                hubs[other] |= first_free
    return [color.bit_length() - 1 for color in colors]


def _row_neighbors(pattern: Pattern) -> Callable[[int], list[int]]:
    """Return a function from a row to the rows that it meets, each once for every column that they share."""
    transposed = pattern.T
    starts, columns = pattern.starts.tolist(), pattern.columns.tolist()
    column_starts, rows = transposed.starts.tolist(), transposed.columns.tolist()

    def neighbors(row: int) -> list[int]:
        return [
            other
            for column in columns[starts[row] : starts[row + 1]]
            for other in rows[column_starts[column] : column_starts[column + 1]]
        ]

    return neighbors


def _order_smallest_last(neighbors: Callable[[int], Sequence[int]], degrees: np.ndarray) -> np.ndarray:
    """Return an order in which each line meets few before it: the one that meets fewest is put last, then left out."""
    remaining = degrees.tolist()
    heap = [(degree, line) for line, degree in enumerate(remaining)]
    heapq.heapify(heap)
    order = []
    while heap:
        degree, line = heapq.heappop(heap)
        if degree != remaining[line]:
            continue
        remaining[line] = -1
        order.append(line)
        meetings: dict[int, int] = {}
        for other in neighbors(line):
            if remaining[other] > 0:
                meetings[other] = meetings.get(other, 0) + 1
        for other, count in meetings.items():
            remaining[other] -= count
            heapq.heappush(heap, (remaining[other], other))
    return np.array(order[::-1], dtype=np.int64)


def repeat_colors(pattern: Pattern, shape: Sequence[int], least: int, limit: int) -> np.ndarray | None:
    """Return fewer than `limit` colors for the rows, which are the elements of a tensor; None if none are found.

    The color of an element is a sum of its coordinates, each by a factor, modulo a period.

    >>> grid = np.eye(16).reshape(4, 4, 4, 4)
    >>> ring = sum(np.roll(grid, step, axis) for step, axis in ((0, 0), (1, 2), (-1, 2), (1, 3), (-1, 3)))
    >>> repeat_colors(Pattern.from_dense(ring.reshape(16, 16)), (4, 4), 5, 16) is None
    False
    """
    shape = [size for size in shape if size > 1]
    shape = guess_grid(pattern) if len(shape) <= 1 else shape
    shape = [*shape[: MAX_AXES - 1], int(np.prod(shape[MAX_AXES - 1 :]))] if len(shape) > MAX_AXES else shape
    if not shape or int(np.prod(shape)) != pattern.shape[0] or not pattern.size:
        return None
    coordinates = np.stack(np.unravel_index(np.arange(pattern.shape[0]), shape), 1)
    transposed = pattern.T
    counts = np.diff(transposed.starts)
    fullest = np.flatnonzero(counts == counts.max())
    column = fullest[len(fullest) // 2]
    meeting = coordinates[transposed.columns[transposed.starts[column] : transposed.starts[column + 1]]]
    for period in range(max(2, least), min(limit, MAX_PERIOD + 1)):
        for factors in _fitting_factors(meeting, period)[: MAX_FACTORS if pattern.size <= MAX_PATIENT_SIZE else 2]:
            colors = coordinates @ factors % period
            keys = pattern.columns.astype(np.int64) * period + colors[pattern.rows]
            if np.bincount(keys).max() == 1:
                return np.where(np.diff(pattern.starts) > 0, colors, -1)
    return None


def guess_grid(pattern: Pattern) -> list[int]:
    """Return the sizes of the grid whose elements lie in a vector, by the diagonals of the matrix of a stencil.

    A neighbor along an axis of the grid is a fixed distance away in the vector, and the longer distances are multiples
    of the shorter ones.

    >>> plane = np.eye(24).reshape(4, 6, 4, 6)
    >>> below = plane + np.pad(plane, ((0, 0), (0, 0), (0, 1), (0, 0)))[:, :, 1:]
    >>> guess_grid(Pattern.from_dense(below.reshape(24, 24)))
    [4, 6]
    """
    size = pattern.shape[0]
    distances, counts = np.unique(np.abs(pattern.columns - pattern.rows), return_counts=True)
    steps = [1]
    for distance in distances[counts >= size // 2].tolist():
        if distance > steps[-1] and distance % steps[-1] == 0 and size % distance == 0 and distance < size:
            steps.append(distance)
    return [after // before for before, after in zip(steps, [*steps[1:], size], strict=True)][::-1]


def _fitting_factors(meeting: np.ndarray, period: int) -> np.ndarray:
    """Return the first factors for which the rows that meet in one column all differ."""
    factors = np.array(list(product(range(period), repeat=meeting.shape[1])))
    colors = np.sort(meeting @ factors.T % period, axis=0)
    return factors[(np.diff(colors, axis=0) > 0).all(0)]
