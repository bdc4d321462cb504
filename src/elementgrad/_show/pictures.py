"""Pictures: gradients in colours (matrices, images, receptive fields, tokens), and numbers in an order.

Every `draw_` function returns a picture and notes on what it leaves out; those of numbers in an order (shares that add
up, values over steps, values before and after) return a description too. Marked elements are framed.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgba
from matplotlib.patches import Patch as Swatch

from elementgrad._read.contributions import Shares
from elementgrad._show.style import (
    SMALL,
    Picture,
    add_colorbar,
    add_legend,
    colour_of,
    draw_cells,
    draw_frame,
    nonfinite_handles,
    set_integer_ticks,
    text_colour_on,
)
from elementgrad._show.theme import Theme
from elementgrad._show.values import (
    MAX_MARKS,
    NONFINITE,
    PERCENTILE,
    Planes,
    Scale,
    carries_most,
    flat_positions,
    move_marks,
    pool,
    require_elements,
    to_floats,
)
from elementgrad._train.entries import element_text
from elementgrad._train.patch import Patch
from elementgrad.errors import OptionError, SelectionError

MAX_CELLS = 256
"""Rows and columns that are drawn; of larger arrays, a cell is a block of numbers."""
MAX_WRITTEN = 64
"""Numbers are written into the cells of a matrix with at most this many."""
MAX_PANELS = 16
MAX_SIDE = 4.8
"""Inches of the longer side of a matrix."""
CELL_SIDE = 0.75
"""Inches of a cell, at most."""
MAX_TOKENS = 300
MAX_CHARACTERS = 40
"""Characters of one token that are drawn."""
TEXT_WIDTH = 7.0
LINE_HEIGHT = 0.34
"""Inches."""
MAX_ROWS = 20
"""Shares, or elements before and after, that are drawn."""
MAX_LINES = 10
"""Elements of a trace that are drawn."""
DASHES = ("-", "--", ":")


def draw_vector(values: np.ndarray, marks: np.ndarray, theme: Theme, limit: float | None) -> tuple[Picture, list[str]]:
    flat, scale = values.reshape(-1), Scale.of(values, limit)
    (drawn,), (_, step) = pool(flat[None], MAX_CELLS)
    picture = Picture(theme, float(np.clip(0.3 * len(flat) + 2.0, 3.6, 6.4)), 2.8)
    axes = picture.add_panel()
    middles = np.arange(len(drawn)) * step + (step - 1) / 2
    heights = np.where(np.isfinite(drawn), drawn, 0.0)
    ends = np.clip(heights, -scale.limit, scale.limit)
    shades = theme.colormap(0.5 + np.sign(ends) * (0.2 + 0.3 * np.abs(ends) / scale.limit))  # no bar is too pale
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
    for name, test in NONFINITE.items():
        at = middles[test(drawn)]
        if len(at):
            axes.plot(at, np.zeros(len(at)), marker="X", color=theme.nonfinite[name], markersize=8, gid=name, **dots)
    if scale.nonfinite:
        add_legend(picture, nonfinite_handles(picture, scale))
    set_integer_ticks(axes.xaxis)
    axes.yaxis.set_major_formatter("{x:.3g}")
    picture.label_axes(axes, "element", "gradient")
    for position in flat_positions(marks, values.shape)[:MAX_MARKS]:
        start = position // step * step
        draw_frame(axes, picture, start - 0.5, -1.12 * scale.limit, step, 2.24 * scale.limit, "mark")
    return picture, [*scale.notes, *_block_notes((1, step), "bar")]


def draw_matrix(values: np.ndarray, marks: np.ndarray, theme: Theme, limit: float | None) -> tuple[Picture, list[str]]:
    """Draw a matrix; all axes before the last are the rows."""
    is_image = values.ndim > 3  # of a batch of one, with one channel
    table, scale = as_matrix(values), Scale.of(values, limit, weighty=is_image)
    picture, axes = _make_sheet(theme, *table.shape)
    shown, block = _draw_plane(picture, axes, table, scale, move_marks(marks, values.shape, table.shape))
    if shown.size <= MAX_WRITTEN and table.shape[1] <= 10:
        _write_numbers(picture, axes, shown, scale)
    picture.label_axes(axes, "column", "row" if values.ndim == 2 else f"row of {values.shape[:-1]}, flattened")
    notes = _frame_core(table, picture, [axes]) if is_image else []
    add_colorbar(picture, axes, scale)
    return picture, [*notes, *scale.notes, *_block_notes(block)]


def draw_image(planes: Planes, theme: Theme, limit: float | None) -> tuple[Picture, list[str]]:
    """Draw one plane: at each pixel the channel with the largest gradient."""
    (plane, merge_notes), scale = planes.merge(), Scale.of(planes.stack, limit, weighty=True)
    picture, axes = _make_sheet(theme, *plane.shape)
    _, block = _draw_plane(picture, axes, plane, scale, planes.marks[:, 1:])
    notes = _frame_core(plane, picture, [axes])
    add_colorbar(picture, axes, scale)
    return picture, [*notes, *merge_notes, *scale.notes, *_block_notes(block)]


def draw_channels(planes: Planes, theme: Theme, limit: float | None) -> tuple[Picture, list[str]]:
    """Draw a grid of feature maps in one scale, those with the largest gradients if there are many."""
    scale = Scale.of(planes.stack, limit, weighty=True)
    chosen = planes.choose_largest(MAX_PANELS if planes.stack.any() else 1)
    across = math.ceil(math.sqrt(len(chosen))) if len(chosen) != 3 else 3
    down = math.ceil(len(chosen) / across)
    rows, columns = planes.stack.shape[1:]
    height = float(np.clip(5.2 / across * rows / columns, 0.6, 2.4))
    picture = Picture(theme, 7.0, down * (height + 0.32) + 0.7)
    panels = []
    block = (1, 1)
    for index, plane in enumerate(chosen):
        axes = picture.add_panel(down, across, index + 1)
        marks = planes.marks[planes.marks[:, 0] == plane][:, 1:]
        _, block = _draw_plane(picture, axes, planes.stack[plane], scale, marks, MAX_CELLS // across, max_ticks=3)
        axes.set_title(planes.names[plane], **picture.text_style(size=SMALL), pad=3)
        panels.append(axes)
    add_colorbar(picture, panels, scale)
    if not planes.stack.any():
        return picture, [f"all of the {len(planes.stack)} feature maps are zero, and one of them is drawn"]
    notes = [*scale.notes, *_block_notes(block)]
    if len(chosen) < len(planes.stack):
        notes.insert(0, f"{len(chosen)} of {len(planes.stack)} feature maps: those with the largest gradients")
    return picture, notes


def draw_side_by_side(
    matrices: Sequence[np.ndarray], names: Sequence[str], theme: Theme
) -> tuple[Picture, list[str], str]:
    """Draw several matrices of one shape in one scale, each under its name; those of one row below each other.

    They share one set of axes, since drawing axes takes far longer than drawing their content.
    """
    stack = np.stack(matrices)
    scale, (count, rows, columns) = Scale.of(stack), stack.shape
    across = 1 if rows == 1 else 3 if count == 3 else math.ceil(math.sqrt(count))
    down = math.ceil(count / across)
    width, gap = 5.2 / across, 0.34  # inches, as all sizes of the sheet
    height = float(np.clip(min(width / columns, CELL_SIDE) * rows, 0.3, 3.6))
    picture = Picture(theme, 7.0, down * (height + gap) + 0.8)
    axes = picture.add_panel()
    # The axes count rows and columns of one matrix, and go on counting through the gaps.
    step_down, step_across = rows * (1 + gap / height), columns * (1 + gap / width)
    block = (1, 1)
    for number, (matrix, name) in enumerate(zip(matrices, names, strict=True)):
        top, left = number // across * step_down, number % across * step_across
        shown, block = pool(matrix, MAX_CELLS // across)
        right, bottom = left + columns - 0.5, top + rows - 0.5
        draw_cells(picture, axes, shown, scale, (left - 0.5, right, bottom, top - 0.5))
        axes.plot([left - 0.5, right, right, left - 0.5, left - 0.5], [top - 0.5, top - 0.5, bottom, bottom, top - 0.5],
                  color=theme.faint, linewidth=0.8, clip_on=False)  # fmt: skip
        axes.text(left - 0.5, top - 0.5 - 0.05 * rows / height, _shorten(name), va="bottom", gid="name",
                  **picture.text_style(size=SMALL))  # fmt: skip
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_xlim(-0.5, across * step_across - columns * gap / width - 0.5)
    axes.set_ylim(down * step_down - rows * gap / height - 0.5, -0.5 - rows * gap / height)
    for set_ticks, size, step, repeats in (
        (axes.set_xticks, columns, step_across, across),
        (axes.set_yticks, rows, step_down, down),
    ):
        ends = sorted({0, size - 1}) if size > 1 else []
        set_ticks(
            [end + repeat * step for repeat in range(repeats) for end in ends], [str(end) for end in ends] * repeats
        )
    picture.label_axes(axes, "column", "row" if rows > 1 else "")
    add_colorbar(picture, axes, scale)
    description = f"Heat maps of {count} gradients, {', '.join(names)}: {scale.description}"
    return picture, [*scale.notes, *_block_notes(block)], description


def draw_receptive_field(
    planes: Planes, background: np.ndarray, theme: Theme, limit: float | None
) -> tuple[Picture, list[str]]:
    """Draw an image, and beside it the same under the gradient."""
    (plane, merge_notes), scale = planes.merge(), Scale.of(planes.stack, limit, weighty=True)
    rows, columns = plane.shape
    picture = Picture(theme, 7.2, float(np.clip(3.2 * rows / columns, 1.4, 5.0)) + 0.7)
    shown, block = pool(plane, MAX_CELLS)
    aspect = _aspect(rows, columns)
    sides = [picture.add_panel(1, 2, column) for column in (1, 2)]
    options: dict[str, Any] = {"cmap": "gray", "vmin": 0.0, "vmax": 1.0, "interpolation": "nearest", "origin": "upper"}
    for axes, name in zip(sides, ("image", "gradient over it"), strict=True):
        for spine in axes.spines.values():
            spine.set_visible(True)
        axes.imshow(background, extent=(-0.5, columns - 0.5, rows - 0.5, -0.5), aspect=aspect, **options)
        axes.set_title(name, **picture.text_style(size=SMALL), pad=3)
        _set_ticks(axes, rows, columns, max_ticks=5)
    with np.errstate(invalid="ignore"):
        strength = np.clip(np.abs(np.nan_to_num(shown)) / scale.limit, 0.0, 1.0)
    alpha = np.where(np.isfinite(shown) & (shown == 0), 0.0, 0.35 + 0.65 * np.sqrt(strength))
    draw_cells(picture, sides[1], shown, scale, _extent(shown, block), aspect=aspect, alpha=alpha, zorder=2)
    notes = _frame_core(plane, picture, sides) or _frame_field(plane != 0, picture, sides, "have a gradient")
    add_colorbar(picture, sides, scale)
    _frame_marks(sides[1], picture, planes.marks[:, 1:], block)
    return picture, [*notes, *merge_notes, *scale.notes, *_block_notes(block)]


def draw_field(inside: np.ndarray, background: np.ndarray, theme: Theme) -> tuple[Picture, list[str]]:
    """Draw an image with some pixels framed and the others faint."""
    rows, columns = inside.shape
    picture = Picture(theme, 4.2, float(np.clip(3.6 * rows / columns, 1.2, 5.0)) + 0.7)
    axes = picture.add_panel()
    options: dict[str, Any] = {"extent": (-0.5, columns - 0.5, rows - 0.5, -0.5), "interpolation": "nearest"}
    axes.imshow(background, cmap="gray", vmin=0.0, vmax=1.0, aspect=_aspect(rows, columns), **options)
    veil = np.zeros((rows, columns, 4))
    veil[..., :3], veil[..., 3] = to_rgba(theme.paper)[:3], np.where(inside, 0.0, 0.55)
    axes.imshow(veil, aspect=_aspect(rows, columns), gid="outside", **options)
    _set_ticks(axes, rows, columns, max_ticks=5)
    return picture, _frame_field(inside, picture, [axes], "are in the field")


def _frame_core(plane: np.ndarray, picture: Picture, panels: Sequence[Any]) -> list[str]:
    """Frame the pixels that carry most of the gradient, if others that have one too reach much further."""
    reached = np.argwhere(plane != 0)
    core = carries_most(np.abs(np.nan_to_num(plane, posinf=0.0, neginf=0.0)))
    if not core.any() or not np.isfinite(plane).all():
        return []
    areas = [np.prod(np.ptp(pixels, axis=0) + 1) for pixels in (np.argwhere(core), reached)]
    if areas[0] > areas[1] / 2:
        return []
    return _frame_field(core, picture, panels, f"carry {PERCENTILE:.0f} % of the size")


def _frame_field(mask: np.ndarray, picture: Picture, panels: Sequence[Any], what: str) -> list[str]:
    pixels = np.argwhere(mask)
    note = f"{len(pixels)} of {mask.size} pixels {what}"
    if not len(pixels):
        return [note]
    (top, left), (bottom, right) = pixels.min(axis=0), pixels.max(axis=0)
    for axes in panels:
        draw_frame(axes, picture, left - 0.5, top - 0.5, right - left + 1, bottom - top + 1, "field")
    return [f"{note}, in rows {top} to {bottom} and columns {left} to {right} (framed)"]


def draw_spy(
    values: np.ndarray, marks: np.ndarray, theme: Theme, lines: Sequence[np.ndarray | None], size: tuple[int, int]
) -> tuple[Picture, list[str]]:
    """Draw where a matrix is not zero, and with which sign.

    `lines` has the rows and the columns of the matrix of shape `size` that were computed, or None for all.
    """
    scale = Scale.of(values)
    shown, block = pool(values, MAX_CELLS)
    picture, axes = _make_sheet(theme, *values.shape)
    signs = np.where(np.isfinite(shown), np.sign(shown), shown)
    pale = replace(scale, limit=1.7)  # so that signs have well visible colours, and not the darkest
    draw_cells(picture, axes, signs, pale, _extent(shown, block), aspect=_aspect(*values.shape))
    shades = [colour_of(picture, sign, pale) for sign in (-1.0, 0.0, 1.0)]
    handles = [
        Swatch(facecolor=colour, edgecolor=theme.faint, linewidth=0.5, label=name)
        for colour, name in zip(shades, ("negative", "zero", "positive"), strict=True)
    ]
    add_legend(picture, [*handles, *nonfinite_handles(picture, scale)])
    _set_ticks(axes, *values.shape)
    picture.label_axes(axes, "input element", "output element")
    for axis, chosen in zip((axes.yaxis, axes.xaxis), lines, strict=True):
        if chosen is not None:
            axis.set_major_formatter(lambda at, _, c=chosen: str(c[int(at)]) if 0 <= at < len(c) else "")
    _frame_marks(axes, picture, marks, block)
    share = 100 * scale.nonzero / scale.count
    notes = [f"{scale.nonzero} of {scale.count} entries are not zero ({share:.3g} %)"]
    if any(chosen is not None for chosen in lines):
        part = f"{values.shape[0]} of {size[0]} rows and {values.shape[1]} of {size[1]} columns"
        notes.append(f"{part}, evenly spread; what is between them was not computed")
    return picture, [*notes, *_block_notes(block)]


def as_matrix(values: np.ndarray) -> np.ndarray:
    return values.reshape(-1, values.shape[-1]) if values.ndim > 1 else values.reshape(1, -1)


def _make_sheet(theme: Theme, rows: int, columns: int) -> tuple[Picture, Any]:
    longer = min(MAX_SIDE, CELL_SIDE * max(rows, columns))
    width, height = [float(np.clip(longer * size / max(rows, columns), 1.2, MAX_SIDE)) for size in (columns, rows)]
    picture = Picture(theme, max(3.6, width + 1.5), height + 1.1)
    return picture, picture.add_panel()


def _draw_plane(
    picture: Picture,
    axes: Any,
    values: np.ndarray,
    scale: Scale,
    marks: np.ndarray,
    max_cells: int = MAX_CELLS,
    max_ticks: int = 8,
) -> tuple[np.ndarray, tuple[int, int]]:
    """Draw a matrix in colours, with ticks and marks; return the cells and the shape of the block behind each."""
    shown, block = pool(values, max_cells)
    draw_cells(picture, axes, shown, scale, _extent(shown, block), aspect=_aspect(*values.shape))
    rows, columns = values.shape
    _set_ticks(axes, rows, columns, max_ticks)
    _frame_marks(axes, picture, marks, block)
    return shown, block


def _aspect(rows: int, columns: int) -> Literal["equal", "auto"]:
    return "equal" if max(rows, columns) / min(rows, columns) <= 8 else "auto"


def _extent(shown: np.ndarray, block: tuple[int, int]) -> tuple[float, float, float, float]:
    """Return the left, right, bottom and top ends of cells, in rows and columns of the array."""
    return -0.5, shown.shape[1] * block[1] - 0.5, shown.shape[0] * block[0] - 0.5, -0.5


def _set_ticks(axes: Any, rows: int, columns: int, max_ticks: int = 8) -> None:
    axes.set_xlim(-0.5, columns - 0.5)
    axes.set_ylim(rows - 0.5, -0.5)
    set_integer_ticks(axes.xaxis, max_ticks)
    set_integer_ticks(axes.yaxis, max_ticks)


def _write_numbers(picture: Picture, axes: Any, shown: np.ndarray, scale: Scale) -> None:
    for (row, column), value in np.ndenumerate(shown):
        colour = colour_of(picture, value, scale) if np.isfinite(value) else (1.0, 1.0, 1.0, 1.0)
        style = picture.text_style(size=SMALL, color=text_colour_on(colour))
        axes.text(column, row, f"{value:.3g}", ha="center", va="center", zorder=4, **style)


def _frame_marks(axes: Any, picture: Picture, marks: np.ndarray, block: tuple[int, int]) -> None:
    for row, column in marks[:MAX_MARKS]:
        top, left = row // block[0] * block[0], column // block[1] * block[1]
        draw_frame(axes, picture, left - 0.5, top - 0.5, block[1], block[0], "mark")


def _block_notes(block: tuple[int, int], what: str = "cell") -> list[str]:
    if block == (1, 1):
        return []
    many = f"{block[0]} x {block[1]}" if what == "cell" else str(block[1])
    return [f"each {what} is the largest in size of {many} numbers"]


def reduce_per_token(values: np.ndarray, tokens: Any) -> tuple[np.ndarray, list[str]]:
    """Return one number for each token, its gradient or the norm of it, and the tokens as texts."""
    if isinstance(tokens, str) or not isinstance(tokens, Sequence | np.ndarray):
        raise OptionError(f"tokens={tokens!r} is not a list; give one string for each position, such as ['the', 'cat']")
    texts = [str(token) for token in tokens]
    for axes in (1, 2):
        if values.ndim >= axes and values.shape[-axes] == len(texts) and math.prod(values.shape[:-axes]) == 1:
            rows = values.reshape(values.shape[-axes:])
            return rows.reshape(-1) if rows.size == len(texts) else np.sqrt((rows**2).sum(axis=-1)), texts
    raise OptionError(
        f"{len(texts)} tokens for a gradient of shape {values.shape}; give one text for each position of a gradient of "
        "shape (positions,) or (positions, features)"
    )


def draw_tokens(
    values: np.ndarray, tokens: Sequence[str], marks: Sequence[int], theme: Theme, limit: float | None, features: int
) -> tuple[Picture, list[str]]:
    """Draw tokens in lines of text, each on the colour of its gradient."""
    scale = Scale.of(values, limit)
    texts = [_make_printable(token) for token in tokens[:MAX_TOKENS]]
    measure = Picture(theme, TEXT_WIDTH, 2.0)
    FigureCanvasAgg(measure)
    widths = [_measure(measure, text) for text in texts]
    lines = _break_lines(widths, TEXT_WIDTH - 1.5)
    picture = Picture(theme, TEXT_WIDTH, LINE_HEIGHT * max(3.2, len(lines) + 0.4) + 0.5)
    axes = picture.add_panel()
    axes.set_xlim(0, TEXT_WIDTH - 1.4)
    axes.set_ylim(max(3.2, len(lines) + 0.4), 0)
    axes.axis("off")
    for row, line in enumerate(lines):
        left = 0.05
        for index in line:
            gid = "mark" if index in marks else "token"
            _draw_token(picture, axes, (left + 0.06, row + 0.6), texts[index], float(values[index]), scale, gid)
            left += widths[index]
    add_colorbar(picture, axes, scale)
    notes = [f"the length of the gradient over the {features} numbers of each token"] if features > 1 else []
    if len(tokens) > MAX_TOKENS:
        notes.append(f"the first {MAX_TOKENS} of {len(tokens)} tokens")
    return picture, [*notes, *scale.notes]


def _make_printable(token: str) -> str:
    """Return a token on one line, with visible blanks."""
    text = (
        "".join(["·" if character == " " else character if character.isprintable() else "␤" for character in token])
        or "∅"
    )
    return text if len(text) <= MAX_CHARACTERS else f"{text[: MAX_CHARACTERS - 1]}…"


def _measure(picture: Picture, text: str) -> float:
    """Return the width of a token in inches, with the space behind it."""
    artist = picture.text(0, 0, text, **picture.text_style())
    extent = artist.get_window_extent(picture.canvas.get_renderer())  # type: ignore[attr-defined]
    artist.remove()
    return float(extent.width / picture.dpi) + 0.16


def _break_lines(widths: Sequence[float], room: float) -> list[list[int]]:
    """Return the indices of the tokens of each line."""
    lines: list[list[int]] = [[]]
    used = 0.0
    for index, width in enumerate(widths):
        if lines[-1] and used + width > room:
            lines.append([])
            used = 0.0
        lines[-1].append(index)
        used += width
    return lines


def _draw_token(
    picture: Picture, axes: Any, at: tuple[float, float], text: str, value: float, scale: Scale, gid: str
) -> None:
    theme, mark = picture.theme, gid == "mark"
    names = [name for name, test in NONFINITE.items() if test(value)]
    colour = to_rgba(theme.nonfinite[names[0]]) if names else colour_of(picture, value, scale)
    box = {"boxstyle": "round,pad=0.25", "facecolor": colour, "edgecolor": theme.ink if mark else "none"}
    style = picture.text_style(color=text_colour_on(colour), weight="bold" if mark else "normal")
    axes.text(*at, text, va="center", bbox=box | {"linewidth": 1.8}, gid=gid, **style)


def draw_waterfall(shares: Shares, theme: Theme) -> tuple[Picture, list[str], str]:
    """Draw each share as a bar from the sum of those before it, and their total."""
    values = [to_floats(share.value) for share in shares]
    if any(value.size != 1 for value in values):
        raise SelectionError(
            f"shares of shape {values[0].shape} are many waterfalls; name one element of both sides, as in "
            'eg.contributions(f, x, of="output[0]", wrt="x[2]")'
        )
    numbers = np.array([value.item() for value in values])
    labels = ["  ".join(filter(None, (share.operation, share.where))) for share in shares]
    numbers, labels, notes = _merge_smallest(numbers, labels)
    total = float(sum(value.item() for value in values)) if values else 0.0
    finite = np.where(np.isfinite(numbers), numbers, 0.0)
    ends = np.cumsum(finite)
    starts = ends - finite
    picture = Picture(theme, 6.8, 0.3 * (len(numbers) + 1) + 1.0)
    axes = picture.add_panel()
    rows = np.arange(len(numbers))
    colours = [theme.above if number >= 0 else theme.below for number in finite]
    axes.barh(rows, finite, 0.62, left=starts, color=colours, gid="shares")
    last = total if np.isfinite(total) else 0.0
    axes.barh([len(numbers)], [last], 0.62, color=theme.faint, gid="total")
    for row, end in zip(rows, ends, strict=True):
        axes.plot([end, end], [row - 0.31, row + 1.31], color=theme.faint, linewidth=0.8)
    axes.axvline(0.0, color=theme.faint, linewidth=0.8)
    lowest, highest = min(0.0, ends.min(initial=0.0), last), max(0.0, ends.max(initial=0.0), last)
    room = (highest - lowest) or 1.0
    axes.set_xlim(lowest - 0.16 * room, highest + 0.16 * room)
    sides = [*np.maximum(starts, ends), max(last, 0.0)]
    texts = [*[f"{number:+.4g}" for number in numbers], f"{total:.4g}"]
    for line, (side, text) in enumerate(zip(sides, texts, strict=True)):
        axes.text(float(side) + 0.012 * room, line, text, va="center", **picture.text_style(size=SMALL))
    axes.set_ylim(len(numbers) + 0.6, -0.6)
    axes.set_yticks([*rows, len(rows)], [*labels, "total"], parse_math=False)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.xaxis.set_major_formatter("{x:.3g}")
    picture.label_axes(axes, "derivative")
    description = ", ".join([f"{label} {number:+.4g}" for label, number in zip(labels, numbers, strict=True)])
    return picture, notes, f"Waterfall of {len(shares)} shares: {description}; total {total:.4g}"


def _merge_smallest(numbers: np.ndarray, labels: list[str]) -> tuple[np.ndarray, list[str], list[str]]:
    """Keep the largest of many shares, in order, and add up the rest."""
    if len(numbers) <= MAX_ROWS:
        return numbers, labels, []
    sizes = np.where(np.isfinite(numbers), np.abs(numbers), np.inf)
    largest = np.sort(np.argsort(-sizes, kind="stable")[: MAX_ROWS - 1])
    rest = len(numbers) - len(largest)
    others = numbers.sum() - numbers[largest].sum() if np.isfinite(numbers).all() else np.delete(numbers, largest).sum()
    note = f"the {rest} smallest of {len(numbers)} shares are drawn as one"
    return np.append(numbers[largest], others), [*[labels[index] for index in largest], f"{rest} others"], [note]


def is_trace(what: Any) -> bool:
    """Return True for a list of values by place, one for each step."""
    return isinstance(what, (list, tuple)) and bool(what) and all(isinstance(each, Mapping) for each in what)


def draw_trace(steps: Sequence[Mapping[Any, Any]], theme: Theme) -> tuple[Picture, list[str], str]:
    """Draw the values of each element over the steps."""
    places = list(steps[0])
    if any(list(step) != places for step in steps) or not places:
        raise OptionError("the steps of a trace have different places; give the same places, in order, at each step")
    values_of: dict[str, np.ndarray] = {}
    for place in places:
        rows = [to_floats(step[place]).reshape(-1) for step in steps]
        if len({len(row) for row in rows}) != 1:
            raise OptionError(f"{place} has not the same number of values at each step; give as many each time")
        for index, values in enumerate(np.stack(rows, axis=-1)):
            values_of[f"{place}" if len(rows[0]) == 1 else f"{place} ({index})"] = values
    chosen = sorted(values_of, key=lambda name: -_distance(values_of[name]))[:MAX_LINES]
    picture = Picture(theme, 6.8, 3.4)
    axes = picture.add_panel()
    styles = itertools.product(DASHES, theme.lines)
    for name, (dash, colour) in zip([name for name in values_of if name in chosen], styles, strict=False):
        dots = "o" if len(steps) <= 25 else ""
        axes.plot(values_of[name], dash, color=colour, linewidth=1.6, marker=dots, markersize=3, label=_shorten(name))
    set_integer_ticks(axes.xaxis)
    axes.yaxis.set_major_formatter("{x:.4g}")
    picture.label_axes(axes, "step", "value")
    add_legend(picture, axes.get_lines(), loc="outside right upper", ncols=1)
    notes = []
    if len(chosen) < len(values_of):
        notes.append(f"{len(chosen)} of {len(values_of)} elements: those that changed most")
    broken = [name for name in chosen if not np.isfinite(values_of[name]).all()]
    if broken:
        notes.append(f"not finite at some step: {', '.join(map(_shorten, broken))}")
    description = ", ".join([f"{name} from {values_of[name][0]:.4g} to {values_of[name][-1]:.4g}" for name in chosen])
    return picture, notes, f"Values over {len(steps)} steps: {description}"


def draw_changes(patch: Patch, theme: Theme) -> tuple[Picture, list[str], str]:
    """Draw each element before and after, those that moved furthest if there are many."""
    names, before, after = elements_of_patch(patch)
    require_elements(before.shape)
    with np.errstate(invalid="ignore"):
        distance = np.abs(after - before)
    order = np.argsort(-np.where(np.isfinite(distance), distance, np.inf), kind="stable")[:MAX_ROWS]
    order = np.sort(order)
    picture = Picture(theme, 6.8, 0.27 * len(order) + 1.2)
    axes = picture.add_panel()
    for row, index in enumerate(order):
        colour = theme.above if after[index] >= before[index] else theme.below
        axes.plot(
            [before[index], after[index]], [row, row], color=colour, linewidth=2.2, gid="change", solid_capstyle="butt"
        )
    rows = np.arange(len(order))
    hollow: dict[str, Any] = {"markerfacecolor": theme.paper, "markeredgecolor": theme.ink, "markersize": 5.5}
    old = axes.plot(before[order], rows, "o", label="before", gid="before", zorder=3, **hollow)
    new = axes.plot(after[order], rows, "o", color=theme.ink, markersize=5.5, label="after", gid="after", zorder=3)
    axes.set_ylim(len(order) - 0.4, -0.6)
    axes.set_yticks(rows, [_shorten(names[index]) for index in order], parse_math=False)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.xaxis.set_major_formatter("{x:.4g}")
    picture.label_axes(axes, "value")
    add_legend(picture, [*old, *new])
    left = len(names) - len(order)
    notes = [f"{len(order)} of {len(names)} elements: those that changed most"] if left else []
    description = ", ".join([f"{names[index]} from {before[index]:.4g} to {after[index]:.4g}" for index in order])
    return picture, notes, f"Elements before and after: {description}"


def elements_of_patch(patch: Patch) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Return the names of all elements of a patch, their originals, and their values."""
    names, before, after = [], [np.zeros(0)], [np.zeros(0)]
    for entry in patch.entries:
        names += [element_text(entry.name, entry.shape, position) for position in entry.indices]
        before.append(to_floats(entry.require_originals("a picture of it").floats()))
        after.append(to_floats(entry.values.floats()))
    return names, np.concatenate(before), np.concatenate(after)


def _distance(values: np.ndarray) -> float:
    with np.errstate(invalid="ignore"):
        distance = float(np.max(values) - np.min(values))
    return distance if np.isfinite(distance) else np.inf


def _shorten(name: str) -> str:
    return name if len(name) <= 34 else f"{name[:14]}…{name[-19:]}"
