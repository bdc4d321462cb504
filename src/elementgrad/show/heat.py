"""Gradients in colours: a vector as bars, a matrix, an image, feature maps, and the nonzeros of a Jacobian."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from matplotlib.patches import Patch

from elementgrad.show.canvas import Picture, bar, broken, cells, counted, legend, outline, readable, shade
from elementgrad.show.planes import Planes, bare
from elementgrad.show.theme import SMALL, Theme
from elementgrad.show.values import BROKEN, MARKS, Scale, pooled

CELLS = 256
"""Rows and columns that are drawn; of more, blocks are drawn as one."""
WRITTEN = 64
"""Cells of a matrix in which the numbers are written."""
PANELS = 16
"""Feature maps that are drawn."""
LONGEST = 4.8
"""Inches of the longer side of a matrix."""
CELL = 0.75
"""Inches of a cell, at most."""


def vector(values: np.ndarray, marks: np.ndarray, theme: Theme, limit: float | None) -> tuple[Picture, list[str]]:
    """Bars, as many as there are numbers."""
    flat, scale = values.reshape(-1), Scale.of(values, limit)
    (drawn,), (_, step) = pooled(flat[None], CELLS)
    picture = Picture(theme, float(np.clip(0.3 * len(flat) + 2.0, 3.6, 6.4)), 2.8)
    axes = picture.panel()
    middles = np.arange(len(drawn)) * step + (step - 1) / 2
    heights = np.where(np.isfinite(drawn), drawn, 0.0)
    ends = np.clip(heights, -scale.limit, scale.limit)
    shades = theme.colours(0.5 + np.sign(ends) * (0.2 + 0.3 * np.abs(ends) / scale.limit))  # none too pale to be seen
    axes.bar(middles, ends, 0.8 * step if len(drawn) <= 64 else step, color=shades, linewidth=0, gid="values")
    axes.axhline(0.0, color=theme.faint, linewidth=0.8)
    axes.set_ylim(-1.12 * scale.limit, 1.12 * scale.limit)
    axes.set_xlim(-0.7, len(flat) - 0.3)
    dots: dict[str, Any] = {"linestyle": "none", "markeredgecolor": theme.ink, "clip_on": False, "zorder": 4}
    for sign, shape in ((1, "^"), (-1, "v")):
        at = middles[heights * sign > scale.limit]
        if len(at):
            edge = np.full(len(at), sign * 1.06 * scale.limit)
            axes.plot(at, edge, marker=shape, color=theme.ink, markersize=4, gid="beyond", **dots)
    for name, test in BROKEN.items():
        at = middles[test(drawn)]
        if len(at):
            axes.plot(at, np.zeros(len(at)), marker="X", color=theme.broken[name], markersize=8, gid=name, **dots)
    if scale.broken:
        legend(picture, broken(picture, scale))
    counted(axes.xaxis)
    axes.yaxis.set_major_formatter("{x:.3g}")
    picture.label(axes, "element", "gradient")
    for (position,) in flattened(marks, values.shape)[:MARKS]:
        start = position // step * step
        outline(axes, picture, start - 0.5, -1.12 * scale.limit, step, 2.24 * scale.limit, "mark")
    return picture, [*scale.notes, *_blocks((1, step), "bar")]


def matrix(values: np.ndarray, marks: np.ndarray, theme: Theme, limit: float | None) -> tuple[Picture, list[str]]:
    """A matrix; more axes before the last are the rows."""
    table, scale = as_matrix(values), Scale.of(values, limit)
    shown, block = pooled(table, CELLS)
    rows, columns = table.shape
    picture, axes = _sheet(theme, rows, columns)
    frame = _frame(shown, block)
    cells(picture, axes, shown, scale, frame, aspect=_aspect(rows, columns))
    if shown.size <= WRITTEN and columns <= 10:
        _write(picture, axes, shown, scale)
    _count(axes, rows, columns)
    picture.label(axes, "column", "row" if values.ndim == 2 else f"row of {values.shape[:-1]}, flattened")
    bar(picture, axes, scale)
    _mark(axes, picture, flattened(marks, values.shape, table.shape), block)
    return picture, [*scale.notes, *_blocks(block)]


def image(planes: Planes, theme: Theme, limit: float | None) -> tuple[Picture, list[str]]:
    """One plane: at each pixel the channel with the largest gradient."""
    plane, scale = planes.strongest(), Scale.of(planes.stack, limit)
    shown, block = pooled(plane, CELLS)
    picture, axes = _sheet(theme, *plane.shape)
    cells(picture, axes, shown, scale, _frame(shown, block), aspect=_aspect(*plane.shape))
    _count(axes, *plane.shape)
    bar(picture, axes, scale)
    _mark(axes, picture, planes.marks[:, 1:], block)
    return picture, [*planes.merged, *scale.notes, *_blocks(block)]


def channels(planes: Planes, theme: Theme, limit: float | None) -> tuple[Picture, list[str]]:
    """A grid of feature maps, of a great many those with the largest gradients, in one scale."""
    scale = Scale.of(planes.stack, limit)
    chosen = planes.largest(PANELS)
    across = math.ceil(math.sqrt(len(chosen))) if len(chosen) != 3 else 3
    down = math.ceil(len(chosen) / across)
    rows, columns = planes.stack.shape[1:]
    height = float(np.clip(5.2 / across * rows / columns, 0.6, 2.4))
    picture = Picture(theme, 7.0, down * (height + 0.32) + 0.7)
    drawn = []
    block = (1, 1)
    for number, plane in enumerate(chosen):
        axes = picture.panel(down, across, number + 1)
        shown, block = pooled(planes.stack[plane], CELLS // across)
        cells(picture, axes, shown, scale, _frame(shown, block), aspect=_aspect(rows, columns))
        axes.set_title(planes.names[plane], **picture.words(size=SMALL), pad=3)
        _count(axes, rows, columns, most=3)
        _mark(axes, picture, planes.marks[planes.marks[:, 0] == plane][:, 1:], block)
        drawn.append(axes)
    bar(picture, drawn, scale)
    left = len(planes.stack) - len(chosen)
    fewer = [f"{len(chosen)} of {len(planes.stack)} feature maps: those with the largest gradients"] if left else []
    return picture, [*fewer, *scale.notes, *_blocks(block)]


def field(planes: Planes, under: np.ndarray, theme: Theme, limit: float | None) -> tuple[Picture, list[str]]:
    """An image, and over it where the gradient is not zero."""
    plane, scale = planes.strongest(), Scale.of(planes.stack, limit)
    rows, columns = plane.shape
    picture = Picture(theme, 7.2, float(np.clip(3.2 * rows / columns, 1.4, 5.0)) + 0.7)
    shown, block = pooled(plane, CELLS)
    sides = [picture.panel(1, 2, number) for number in (1, 2)]
    options: dict[str, Any] = {"cmap": "gray", "vmin": 0.0, "vmax": 1.0, "interpolation": "nearest", "origin": "upper"}
    for axes, name in zip(sides, ("image", "gradient over it"), strict=True):
        for spine in axes.spines.values():
            spine.set_visible(True)
        axes.imshow(under, extent=(-0.5, columns - 0.5, rows - 0.5, -0.5), aspect=_aspect(rows, columns), **options)
        axes.set_title(name, **picture.words(size=SMALL), pad=3)
        _count(axes, rows, columns, most=5)
    with np.errstate(invalid="ignore"):
        strength = np.clip(np.abs(np.nan_to_num(shown)) / scale.limit, 0.0, 1.0)
    veil = np.where(np.isfinite(shown) & (shown == 0), 0.0, 0.35 + 0.65 * np.sqrt(strength))
    cells(picture, sides[1], shown, scale, _frame(shown, block), aspect=_aspect(rows, columns), alpha=veil, zorder=2)
    touched = np.argwhere(plane != 0)
    notes = [f"{len(touched)} of {plane.size} pixels have a gradient"]
    if len(touched):
        (top, left), (bottom, right) = touched.min(axis=0), touched.max(axis=0)
        notes[0] += f", in rows {top} to {bottom} and columns {left} to {right} (framed)"
        for axes in sides:
            outline(axes, picture, left - 0.5, top - 0.5, right - left + 1, bottom - top + 1, "field")
    bar(picture, sides, scale)
    _mark(sides[1], picture, planes.marks[:, 1:], block)
    return picture, [*notes, *planes.merged, *scale.notes, *_blocks(block)]


def spy(
    values: np.ndarray, marks: np.ndarray, theme: Theme, lines: Sequence[np.ndarray | None], size: tuple[int, int]
) -> tuple[Picture, list[str]]:
    """Where a matrix is not zero, and with which sign; it may be some rows and columns of a larger one."""
    scale = Scale.of(values)
    shown, block = pooled(values, CELLS)
    picture, axes = _sheet(theme, *values.shape)
    signs = np.where(np.isfinite(shown), np.sign(shown), shown)
    pale = replace(scale, limit=1.7)  # of the colours those that are well seen, and not the darkest
    cells(picture, axes, signs, pale, _frame(shown, block), aspect=_aspect(*values.shape))
    shades = [shade(picture, sign, pale) for sign in (-1.0, 0.0, 1.0)]
    handles = [
        Patch(facecolor=colour, edgecolor=theme.faint, linewidth=0.5, label=name)
        for colour, name in zip(shades, ("negative", "zero", "positive"), strict=True)
    ]
    legend(picture, [*handles, *broken(picture, scale)])
    _count(axes, *values.shape)
    picture.label(axes, "input element", "output element")
    for axis, chosen in zip((axes.yaxis, axes.xaxis), lines, strict=True):
        if chosen is not None:
            axis.set_major_formatter(lambda at, _, c=chosen: str(c[int(at)]) if 0 <= at < len(c) else "")
    _mark(axes, picture, marks, block)
    share = 100 * scale.nonzero / scale.count
    notes = [f"{scale.nonzero} of {scale.count} entries are not zero ({share:.3g} %)"]
    if any(chosen is not None for chosen in lines):
        some = f"{values.shape[0]} of {size[0]} rows and {values.shape[1]} of {size[1]} columns"
        notes.append(f"{some}, evenly spread; what is between them was not computed")
    return picture, [*notes, *_blocks(block)]


def as_matrix(values: np.ndarray) -> np.ndarray:
    """All axes before the last as rows."""
    return values.reshape(-1, values.shape[-1]) if values.ndim > 1 else values.reshape(1, -1)


def _sheet(theme: Theme, rows: int, columns: int) -> tuple[Picture, Any]:
    """A figure of about the shape of what is in it."""
    most = min(LONGEST, CELL * max(rows, columns))
    width, height = [float(np.clip(most * size / max(rows, columns), 1.2, LONGEST)) for size in (columns, rows)]
    picture = Picture(theme, max(3.6, width + 1.5), height + 1.1)
    return picture, picture.panel()


def _aspect(rows: int, columns: int) -> Literal["equal", "auto"]:
    return "equal" if max(rows, columns) / min(rows, columns) <= 8 else "auto"


def _frame(shown: np.ndarray, block: tuple[int, int]) -> tuple[float, float, float, float]:
    """Where cells lie in the numbers of rows and columns."""
    return -0.5, shown.shape[1] * block[1] - 0.5, shown.shape[0] * block[0] - 0.5, -0.5


def _count(axes: Any, rows: int, columns: int, most: int = 8) -> None:
    axes.set_xlim(-0.5, columns - 0.5)
    axes.set_ylim(rows - 0.5, -0.5)
    counted(axes.xaxis, most)
    counted(axes.yaxis, most)


def _write(picture: Picture, axes: Any, shown: np.ndarray, scale: Scale) -> None:
    """The numbers in their cells, dark on light or light on dark."""
    for (row, column), value in np.ndenumerate(shown):
        colour = shade(picture, value, scale) if np.isfinite(value) else (1.0, 1.0, 1.0, 1.0)
        words = picture.words(size=SMALL, color=readable(colour))
        axes.text(column, row, f"{value:.3g}", ha="center", va="center", zorder=4, **words)


def _mark(axes: Any, picture: Picture, marks: np.ndarray, block: tuple[int, int]) -> None:
    for row, column in marks[:MARKS]:
        top, left = row // block[0] * block[0], column // block[1] * block[1]
        outline(axes, picture, left - 0.5, top - 0.5, block[1], block[0], "mark")


def flattened(marks: np.ndarray, shape: tuple[int, ...], into: tuple[int, ...] | None = None) -> np.ndarray:
    """Marks in the coordinates of another shape of the same size; in one row if there is none."""
    positions = bare(marks, shape)
    return positions[:, None] if into is None else np.stack(np.unravel_index(positions, into), axis=-1)


def _blocks(block: tuple[int, int], what: str = "cell") -> list[str]:
    if block == (1, 1):
        return []
    many = f"{block[0]} x {block[1]}" if what == "cell" else str(block[1])
    return [f"each {what} is the largest in size of {many} numbers"]
