"""Colourings: which rows and columns go into one sweep together, and where each entry is then to be found."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from elementgrad.sparsity.greedy import PATIENT, lines_of, stars_of
from elementgrad.sparsity.pattern import Pattern

Shapes = tuple[Sequence[int], Sequence[int]]
Kind = Literal["rows", "columns", "both", "symmetric"]
PARTS = 6
"""How many ways to part the dense rows or columns from the others are tried."""


@dataclass(frozen=True, eq=False)
class Colouring:
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


def colouring(
    pattern: Pattern,
    needed: np.ndarray | None = None,
    symmetric: bool = False,
    without: Iterable[str] = (),
    shapes: Shapes = ((), ()),
) -> Colouring:
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


def _least(pattern: Pattern, asked: np.ndarray, way: Callable[..., Colouring]) -> int:
    """A number of sweeps that no colouring this way goes below: rows that meet in one column all differ."""
    if not asked.all():
        return 1
    met = pattern.columns if way is _by_rows else pattern.rows
    return int(np.bincount(met, minlength=1).max())


def _by_rows(pattern: Pattern, asked: np.ndarray, shapes: Shapes = ((), ())) -> Colouring:
    rows = lines_of(pattern, asked, shapes[0])
    none = np.full(pattern.shape[1], -1)
    places = rows[pattern.rows[asked]] * pattern.shape[1] + pattern.columns[asked]
    return Colouring("rows", pattern.shape, rows, none, places)


def _by_columns(pattern: Pattern, asked: np.ndarray, shapes: Shapes = ((), ())) -> Colouring:
    """As by rows, of the transposed matrix."""
    order = np.argsort(pattern.columns, kind="stable")
    columns = lines_of(pattern.T, asked[order], shapes[1])
    none = np.full(pattern.shape[0], -1)
    places = columns[pattern.columns[asked]] * pattern.shape[0] + pattern.rows[asked]
    return Colouring("columns", pattern.shape, none, columns, places)


def _by_stars(pattern: Pattern, reverse: bool) -> Colouring:
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
    return Colouring("symmetric", pattern.shape, rows, columns, places)


def _parted(pattern: Pattern, asked: np.ndarray, best: Colouring) -> Colouring:
    """Part dense rows (or columns) from the others, and read each part in its own direction, if that is fewer."""
    sides = (pattern.rows, pattern.shape[0], True), (pattern.columns, pattern.shape[1], False)
    for lines, count, by_rows in sides:
        counts = np.bincount(lines, minlength=count)
        steps = np.unique(counts)[::-1]
        for least in steps[steps > max(best.sweeps / 2, 2 * counts.mean())][:PARTS]:
            apart = counts[lines] >= least
            best = _in_parts(pattern, asked, apart if by_rows else ~apart, best.sweeps) or best
    return best


def _in_parts(pattern: Pattern, asked: np.ndarray, by_rows: np.ndarray, most: int) -> Colouring | None:
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
    return Colouring("both", pattern.shape, rows, columns, places[asked])


def _part(
    pattern: Pattern, asked: np.ndarray, mine: np.ndarray, colours: Callable[[Pattern, np.ndarray], np.ndarray]
) -> np.ndarray:
    return colours(Pattern.from_keys(pattern.keys[mine], pattern.shape), asked[mine])
