"""A sequence: its tokens in the colours of their gradients, set like text."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgba

from elementgrad.errors import OptionError
from elementgrad.show.canvas import Picture, bar, readable, shade
from elementgrad.show.theme import Theme
from elementgrad.show.values import BROKEN, Scale

MOST = 300
"""Tokens that are drawn."""
LONGEST = 40
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
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


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
