"""A matplotlib figure in our colours and fonts, light and dark, and what all pictures share: cells, bars, legends.

Figures are made without pyplot, and styles are set on every artist, so that matplotlib's settings are neither changed
nor obeyed.
"""

import io
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize, to_rgb
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator

from elementgrad._show.theme import Theme
from elementgrad._show.values import NONFINITE, Scale

FONT = "DejaVu Sans"
SIZE = 9.0
SMALL = 8.0
DPI = 144


class Picture(Figure):
    """A matplotlib figure that shows itself in a notebook, with a description in `alt` and remarks in `notes`."""

    alt = ""

    def __init__(self, theme: Theme, width: float, height: float):
        layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.06)
        super().__init__(figsize=(width, height), facecolor=theme.paper, layout=layout)
        self.theme = theme
        self.notes: list[str] = []

    def add_panel(self, *position: Any) -> Axes:
        """Add axes in our style; `position` is that of `Figure.add_subplot`."""
        axes = self.add_subplot(*position)
        axes.set_facecolor(self.theme.paper)
        axes.set_axisbelow(True)
        axes.grid(False)
        self.style_axes(axes)
        return axes

    def style_axes(self, axes: Axes) -> None:
        axes.tick_params(which="both", colors=self.theme.faint, labelcolor=self.theme.ink, labelsize=SMALL, width=0.8)
        axes.tick_params(which="both", labelfontfamily=FONT, direction="out", length=3)
        for side, spine in axes.spines.items():
            spine.set_visible(side in ("left", "bottom"))
            spine.set_color(self.theme.faint)
            spine.set_linewidth(0.8)

    def text_style(self, **options: Any) -> dict[str, Any]:
        """Return the options of a text; names of the user's are never parsed as mathematics."""
        return {"family": FONT, "size": SIZE, "color": self.theme.ink, "parse_math": False, "usetex": False, **options}

    def label_axes(self, axes: Axes, across: str = "", down: str = "") -> None:
        axes.set_xlabel(across, **self.text_style(size=SMALL))
        axes.set_ylabel(down, **self.text_style(size=SMALL))

    def finish(self, title: str | None, alt: str, notes: Iterable[str]) -> "Picture":
        """Add the title at the head, the notes at the foot, and the description."""
        self.notes = list(notes)
        if title:
            lines = textwrap.wrap(str(title), max(20, int(self.get_figwidth() * 11)))[:3]
            self.suptitle("\n".join(lines), x=0.01, ha="left", **self.text_style(size=SIZE + 2, weight="bold"))
        if self.notes:
            width = max(30, int(self.get_figwidth() * 15))
            lines = [line for note in self.notes for line in textwrap.wrap(note, width)]
            self.supxlabel("\n".join(lines), x=0.01, ha="left", **self.text_style(size=SMALL, color=self.theme.faint))
        self.alt = ". ".join([str(part) for part in (title, alt) if part])
        return self

    def save(self, format: str) -> bytes:
        """Return the picture as the content of a file."""
        file = io.BytesIO()
        metadata = {"Date": None} if format == "svg" else None
        self.savefig(file, format=format, dpi=DPI, facecolor=self.theme.paper, metadata=metadata)
        return file.getvalue()

    def _repr_png_(self) -> bytes:
        return self.save("png")


def draw_cells(
    picture: Picture, axes: Axes, values: np.ndarray, scale: Scale, extent: Sequence[float], **options: Any
) -> None:
    """Draw a matrix in colours, and over it the numbers that are not finite."""
    theme = picture.theme
    norm = Normalize(-scale.limit, scale.limit)
    left, right, low, high = extent
    shown = np.ma.masked_invalid(values)
    defaults = {"extent": (left, right, low, high), "origin": "upper", "interpolation": "nearest", "aspect": "auto"}
    axes.imshow(shown, cmap=theme.colormap, norm=norm, **(defaults | options))
    if scale.nonfinite:
        over = np.zeros((*values.shape, 4))
        for name, test in NONFINITE.items():
            over[test(values)] = (*to_rgb(theme.nonfinite[name]), 1.0)
        axes.imshow(over, **(defaults | {"aspect": options.get("aspect", "auto")}), zorder=2.5)
    for spine in axes.spines.values():
        spine.set_visible(True)


def add_colorbar(picture: Picture, axes: Any, scale: Scale) -> None:
    """Add the bar of colours, with arrows where numbers are beyond its ends."""
    over, under = scale.highest > scale.limit, scale.lowest < -scale.limit
    extend = "both" if over and under else "max" if over else "min" if under else "neither"
    colours = ScalarMappable(Normalize(-scale.limit, scale.limit), picture.theme.colormap)
    ticks = scale.limit * np.linspace(-1, 1, 5 if picture.get_figheight() > 2.6 else 3)
    colorbar = picture.colorbar(
        colours, ax=axes, extend=extend, ticks=ticks, format=FuncFormatter(lambda value, _: f"{value:.3g}"), pad=0.02,
        fraction=0.05, shrink=0.9, aspect=25,
    )  # fmt: skip
    picture.style_axes(colorbar.ax)
    colorbar.outline.set_visible(False)  # type: ignore[operator]
    if scale.nonfinite:
        add_legend(picture, nonfinite_handles(picture, scale))


def nonfinite_handles(picture: Picture, scale: Scale) -> list[Any]:
    """Return the entries of a legend for numbers that are not finite."""
    colours = picture.theme.nonfinite
    return [Patch(facecolor=colours[name], label=f"{name} ({count})") for name, count in scale.nonfinite.items()]


def add_legend(picture: Picture, handles: Sequence[Any], **options: Any) -> None:
    """Add a legend beside the panels."""
    defaults: dict[str, Any] = {"loc": "outside upper right", "ncols": len(handles), "frameon": False}
    defaults |= {"prop": {"family": FONT, "size": SMALL}, "labelcolor": picture.theme.ink}
    for text in picture.legend(handles=handles, **(defaults | options)).get_texts():
        text.set_parse_math(False)


def colour_of(picture: Picture, value: float, scale: Scale) -> tuple[float, float, float, float]:
    red, green, blue, solid = picture.theme.colormap((np.clip(np.nan_to_num(value) / scale.limit, -1, 1) + 1) / 2)
    return red, green, blue, solid


def text_colour_on(colour: Sequence[float]) -> str:
    """Return a dark colour for text on light, and a light one for text on dark."""
    red, green, blue = colour[:3]
    return "#1f2328" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "#ffffff"


def draw_frame(axes: Axes, picture: Picture, left: float, top: float, width: float, height: float, gid: str) -> None:
    """Draw a rectangle that is visible on every colour."""
    for colour, thickness in ((picture.theme.paper, 3.6), (picture.theme.ink, 1.6)):
        axes.add_patch(
            Rectangle(
                (left, top), width, height, fill=False, edgecolor=colour, linewidth=thickness, zorder=5, gid=gid,
                clip_on=False,
            )
        )  # fmt: skip


def set_integer_ticks(axis: Any, max_ticks: int = 8) -> None:
    axis.set_major_locator(MaxNLocator(nbins=max_ticks, integer=True, min_n_ticks=1))
