"""An array with axes for pixels as a stack of planes, wherever its channels are.

Gradients in colours: a vector as bars, a matrix, an image, feature maps, and the nonzeros of a Jacobian.

A sequence: its tokens in the colours of their gradients, set like text.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgba
from matplotlib.patches import Patch

from elementgrad._place.index import to_text
from elementgrad._show.style import SMALL, Picture, Theme, bar, broken, cells, counted, legend, outline, readable, shade
from elementgrad._show.values import BROKEN, MARKS, Scale, pooled, strongest
from elementgrad.errors import OptionError

COLOURS = (1, 3, 4)
"""How many channels an image has."""


def without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape without leading axes of size one, such as that of a batch of one."""
    first = next((axis for axis, size in enumerate(shape) if size != 1), len(shape))
    return shape[first:]


def bare(coordinates: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Coordinates as positions in the flattened array."""
    if not shape:
        return np.zeros(len(coordinates), np.int64)
    return np.ravel_multi_index(tuple(coordinates.T), shape)


def channels_last(shape: tuple[int, ...], asked: Any, framework: str | None) -> bool:
    """Whether the last axis counts channels: as asked; else always on TensorFlow, or where only that one can."""
    if asked not in (None, "first", "last"):
        raise OptionError(f'channels={asked!r} is neither "first" nor "last"; give one of them, or leave it out')
    if asked is not None:
        return bool(asked == "last")
    return framework == "tensorflow" or (shape[-1] in COLOURS and shape[-3] not in COLOURS)


@dataclass(frozen=True)
class Planes:
    """Planes of pixels, what each is called, and which pixels are marked.

    >>> import numpy as np
    >>> from elementgrad._show.heatmaps import Planes
    >>> planes = Planes.of(np.zeros((1, 4, 5, 3)), np.array([[0, 2, 1, 2]]), last=True)
    >>> planes.stack.shape, planes.names, planes.marks.tolist()
    ((3, 4, 5), ('[0, ..., 0]', '[0, ..., 1]', '[0, ..., 2]'), [[2, 2, 1]])
    """

    stack: np.ndarray
    names: tuple[str, ...]
    marks: np.ndarray
    """Rows of plane, row and column."""

    @classmethod
    def of(cls, values: np.ndarray, marks: np.ndarray, last: bool) -> "Planes":
        """The last two axes as planes, or those before the channels where these come last."""
        if values.ndim < 3:
            values = values.reshape((1,) * (3 - values.ndim) + values.shape)
            marks = np.concatenate([np.zeros((len(marks), 3 - marks.shape[1]), np.int64), marks], axis=1)
            return cls(values, ("",), marks)
        moved = np.moveaxis(values, -1, -3) if last else values
        order = [*range(values.ndim - 3), values.ndim - 1, values.ndim - 3, values.ndim - 2]
        marks = marks[:, order] if last else marks
        leading = moved.shape[:-2]
        names = [to_text((*index[:-1], ..., index[-1]) if last else index) for index in np.ndindex(*leading)]
        which = np.ravel_multi_index(tuple(marks[:, :-2].T), leading)
        return cls(moved.reshape(-1, *moved.shape[-2:]), tuple(names), np.column_stack([which, marks[:, -2:]]))

    def strongest(self) -> np.ndarray:
        """One plane of the numbers largest in size."""
        return strongest(np.moveaxis(self.stack, 0, -1)) if len(self.stack) > 1 else self.stack[0]

    @property
    def merged(self) -> list[str]:
        """What there is to say where one plane stands for several."""
        return [f"at each pixel the largest in size of {len(self.stack)} channels"] if len(self.stack) > 1 else []

    def largest(self, most: int) -> list[int]:
        """The numbers of the planes with the largest gradients, and of all that bear a mark, in order."""
        if len(self.stack) <= most:
            return list(range(len(self.stack)))
        sizes = np.where(np.isfinite(self.stack), np.abs(self.stack), np.inf).max(axis=(1, 2), initial=0.0)
        first = dict.fromkeys([*np.unique(self.marks[:, 0]).tolist(), *np.argsort(-sizes, kind="stable").tolist()])
        return sorted(list(first)[:most])


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


MOST = 300
"""Tokens that are drawn."""
LONGEST_TOKENS = 40
"""Signs of one token."""
WIDTH = 7.0
LINE = 0.34
"""The height of a line, in inches."""


def per_token(values: np.ndarray, tokens: Any) -> tuple[np.ndarray, list[str]]:
    """One number for each token: its gradient, or the length of it where a token has several numbers."""
    if isinstance(tokens, str) or not isinstance(tokens, Sequence | np.ndarray):
        raise OptionError(f"tokens={tokens!r} is no list; give one text for each position, such as ['the', 'cat']")
    texts = [str(token) for token in tokens]
    for axes in (1, 2):
        if values.ndim >= axes and values.shape[-axes] == len(texts) and math.prod(values.shape[:-axes]) == 1:
            rows = values.reshape(values.shape[-axes:])
            return rows.reshape(-1) if rows.size == len(texts) else np.sqrt((rows**2).sum(axis=-1)), texts
    raise OptionError(
        f"{len(texts)} tokens for a gradient of shape {values.shape}; give one text for each position of a gradient of "
        "shape (positions,) or (positions, features)"
    )


def sequence(
    values: np.ndarray, tokens: Sequence[str], marks: Sequence[int], theme: Theme, limit: float | None, features: int
) -> tuple[Picture, list[str]]:
    """The tokens in lines, each on its colour."""
    scale = Scale.of(values, limit)
    texts = [_shown(token) for token in tokens[:MOST]]
    measure = Picture(theme, WIDTH, 2.0)
    FigureCanvasAgg(measure)
    widths = [_width(measure, text) for text in texts]
    lines = _lines(widths, WIDTH - 1.5)
    picture = Picture(theme, WIDTH, LINE * max(3.2, len(lines) + 0.4) + 0.5)
    axes = picture.panel()
    axes.set_xlim(0, WIDTH - 1.4)
    axes.set_ylim(max(3.2, len(lines) + 0.4), 0)
    axes.axis("off")
    for row, line in enumerate(lines):
        left = 0.05
        for number in line:
            gid = "mark" if number in marks else "token"
            _draw(picture, axes, (left + 0.06, row + 0.6), texts[number], float(values[number]), scale, gid)
            left += widths[number]
    bar(picture, axes, scale)
    notes = [f"the length of the gradient over the {features} numbers of each token"] if features > 1 else []
    if len(tokens) > MOST:
        notes.append(f"the first {MOST} of {len(tokens)} tokens")
    return picture, [*notes, *scale.notes]


def _shown(token: str) -> str:
    """A token on one line, with blanks that can be seen."""
    text = "".join(["·" if sign == " " else sign if sign.isprintable() else "␤" for sign in token]) or "∅"
    return text if len(text) <= LONGEST_TOKENS else f"{text[: LONGEST_TOKENS - 1]}…"


def _width(picture: Picture, text: str) -> float:
    """How many inches a token takes, with what is between it and the next."""
    made = picture.text(0, 0, text, **picture.words())
    extent = made.get_window_extent(picture.canvas.get_renderer())  # type: ignore[attr-defined]
    made.remove()
    return float(extent.width / picture.dpi) + 0.16


def _lines(widths: Sequence[float], room: float) -> list[list[int]]:
    """Which tokens stand in which line."""
    lines: list[list[int]] = [[]]
    used = 0.0
    for number, width in enumerate(widths):
        if lines[-1] and used + width > room:
            lines.append([])
            used = 0.0
        lines[-1].append(number)
        used += width
    return lines


def _draw(
    picture: Picture, axes: Any, at: tuple[float, float], text: str, value: float, scale: Scale, gid: str
) -> None:
    theme, mark = picture.theme, gid == "mark"
    names = [name for name, test in BROKEN.items() if test(value)]
    colour = to_rgba(theme.broken[names[0]]) if names else shade(picture, value, scale)
    box = {"boxstyle": "round,pad=0.25", "facecolor": colour, "edgecolor": theme.ink if mark else "none"}
    words = picture.words(color=readable(colour), weight="bold" if mark else "normal")
    axes.text(*at, text, va="center", bbox=box | {"linewidth": 1.8}, gid=gid, **words)
