"""Colours and fonts, light and dark: told apart by people who see fewer colours, and set on every artist by itself.

A figure with our colours and fonts: made without pyplot, and nothing of matplotlib's settings is changed.
"""

import io
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, Normalize, to_rgb
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator

from elementgrad._show.values import BROKEN, Scale
from elementgrad.errors import OptionError

FONT = "DejaVu Sans"
SIZE = 9.0
SMALL = 8.0


@dataclass(frozen=True)
class Theme:
    """One set of colours."""

    paper: str
    ink: str
    faint: str
    """Lines and words that stand back."""
    below: str
    """For one thing that is negative."""
    above: str
    """For one thing that is positive."""
    slopes: tuple[str, ...]
    """From the most negative through zero to the most positive."""
    broken: dict[str, str]
    """What is not finite, by kind."""
    lines: tuple[str, ...]
    """For several things that have no order."""

    @property
    def colours(self) -> LinearSegmentedColormap:
        """The colour map of gradients: blue below zero, orange above."""
        return LinearSegmentedColormap.from_list("elementgrad", self.slopes, N=511)


BROKEN_COLOURS = {"NaN": "#009e73", "+inf": "#cc79a7", "-inf": "#e0c800"}
THEMES = {
    "light": Theme(
        "#ffffff",
        "#1f2328",
        "#6e7781",
        "#2171b5",
        "#d94801",
        ("#08306b", "#2171b5", "#6baed6", "#c6dbef", "#f7f7f7", "#fdd0a2", "#fd8d3c", "#d94801", "#7f2704"),
        BROKEN_COLOURS,
        ("#0072b2", "#d55e00", "#007a5a", "#b0508b", "#8a6d00", "#56b4e9", "#444444"),
    ),
    "dark": Theme(
        "#14181d",
        "#e6edf3",
        "#8b949e",
        "#58a6e6",
        "#fd8d3c",
        ("#d6ebff", "#6baed6", "#2171b5", "#173d66", "#1f252c", "#6b2e0c", "#d94801", "#fd8d3c", "#ffe3c9"),
        BROKEN_COLOURS,
        ("#56b4e9", "#e69f00", "#2ec69a", "#d98cb8", "#f0e442", "#8fb8ff", "#c9d1d9"),
    ),
}


def theme_of(name: Any) -> Theme:
    """The colours of a name."""
    if not isinstance(name, str) or name not in THEMES:
        raise OptionError(f'theme={name!r} is neither "light" nor "dark"; give one of them')
    return THEMES[name]


DPI = 144


class Picture(Figure):
    """A matplotlib figure that says in words what it shows, as `alt`, and shows itself in a notebook."""

    alt = ""

    def __init__(self, theme: Theme, width: float, height: float):
        layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.06)
        super().__init__(figsize=(width, height), facecolor=theme.paper, layout=layout)
        self.theme = theme
        self.notes: list[str] = []

    def panel(self, *place: Any) -> Axes:
        """Axes in our colours, the only ones or some of a grid."""
        axes = self.add_subplot(*place)
        axes.set_facecolor(self.theme.paper)
        axes.set_axisbelow(True)
        axes.grid(False)
        self.styled(axes)
        return axes

    def styled(self, axes: Axes) -> None:
        """Ticks and frame in our colours and fonts."""
        axes.tick_params(which="both", colors=self.theme.faint, labelcolor=self.theme.ink, labelsize=SMALL, width=0.8)
        axes.tick_params(which="both", labelfontfamily=FONT, direction="out", length=3)
        for side, spine in axes.spines.items():
            spine.set_visible(side in ("left", "bottom"))
            spine.set_color(self.theme.faint)
            spine.set_linewidth(0.8)

    def words(self, **more: Any) -> dict[str, Any]:
        """How text is set; what a user wrote is never taken for mathematics."""
        return {"family": FONT, "size": SIZE, "color": self.theme.ink, "parse_math": False, "usetex": False, **more}

    def label(self, axes: Axes, across: str = "", down: str = "") -> None:
        """What the axes count."""
        axes.set_xlabel(across, **self.words(size=SMALL))
        axes.set_ylabel(down, **self.words(size=SMALL))

    def finish(self, title: str | None, alt: str, notes: Iterable[str]) -> "Picture":
        """Head and foot: the title, and what the picture leaves out."""
        self.notes = list(notes)
        if title:
            lines = textwrap.wrap(str(title), max(20, int(self.get_figwidth() * 11)))[:3]
            self.suptitle("\n".join(lines), x=0.01, ha="left", **self.words(size=SIZE + 2, weight="bold"))
        if self.notes:
            room = max(30, int(self.get_figwidth() * 15))
            lines = [line for note in self.notes for line in textwrap.wrap(note, room)]
            self.supxlabel("\n".join(lines), x=0.01, ha="left", **self.words(size=SMALL, color=self.theme.faint))
        self.alt = ". ".join([str(part) for part in (title, alt) if part])
        return self

    def save(self, format: str) -> bytes:
        """The picture as a file in memory."""
        file = io.BytesIO()
        when = {"Date": None} if format == "svg" else None
        self.savefig(file, format=format, dpi=DPI, facecolor=self.theme.paper, metadata=when)
        return file.getvalue()

    def _repr_png_(self) -> bytes:
        return self.save("png")


def cells(picture: Picture, axes: Axes, values: np.ndarray, scale: Scale, extent: Sequence[float], **more: Any) -> None:
    """A matrix in colours, and over it what is not finite."""
    theme = picture.theme
    norm = Normalize(-scale.limit, scale.limit)
    left, right, low, high = extent
    shown = np.ma.masked_invalid(values)
    options = {"extent": (left, right, low, high), "origin": "upper", "interpolation": "nearest", "aspect": "auto"}
    axes.imshow(shown, cmap=theme.colours, norm=norm, **(options | more))
    if scale.broken:
        over = np.zeros((*values.shape, 4))
        for name, test in BROKEN.items():
            over[test(values)] = (*to_rgb(theme.broken[name]), 1.0)
        axes.imshow(over, **(options | {key: more[key] for key in ("aspect",) if key in more}), zorder=2.5)
    for spine in axes.spines.values():
        spine.set_visible(True)


def bar(picture: Picture, axes: Any, scale: Scale) -> None:
    """The colours and what they stand for, with arrows where numbers go on beyond them."""
    over, under = scale.highest > scale.limit, scale.lowest < -scale.limit
    extend = "both" if over and under else "max" if over else "min" if under else "neither"
    colours = ScalarMappable(Normalize(-scale.limit, scale.limit), picture.theme.colours)
    ticks = scale.limit * np.linspace(-1, 1, 5 if picture.get_figheight() > 2.6 else 3)
    made = picture.colorbar(
        colours, ax=axes, extend=extend, ticks=ticks, format=FuncFormatter(lambda value, _: f"{value:.3g}"), pad=0.02,
        fraction=0.05, shrink=0.9, aspect=25,
    )  # fmt: skip
    picture.styled(made.ax)
    made.outline.set_visible(False)  # type: ignore[operator]
    if scale.broken:
        legend(picture, broken(picture, scale))


def broken(picture: Picture, scale: Scale) -> list[Any]:
    """What the colours of numbers that are not finite stand for."""
    colours = picture.theme.broken
    return [Patch(facecolor=colours[name], label=f"{name} ({count})") for name, count in scale.broken.items()]


def legend(picture: Picture, handles: Sequence[Any], **more: Any) -> None:
    """What single colours stand for, beside the picture."""
    options: dict[str, Any] = {"loc": "outside upper right", "ncols": len(handles), "frameon": False}
    options |= {"prop": {"family": FONT, "size": SMALL}, "labelcolor": picture.theme.ink}
    made = picture.legend(handles=handles, **(options | more))
    for text in made.get_texts():
        text.set_parse_math(False)


def shade(picture: Picture, value: float, scale: Scale) -> tuple[float, float, float, float]:
    """The colour of one number."""
    red, green, blue, solid = picture.theme.colours((np.clip(np.nan_to_num(value) / scale.limit, -1, 1) + 1) / 2)
    return red, green, blue, solid


def readable(colour: Sequence[float]) -> str:
    """The colour of text on another: dark on light, and light on dark."""
    red, green, blue = colour[:3]
    return "#1f2328" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "#ffffff"


def outline(axes: Axes, picture: Picture, left: float, top: float, width: float, height: float, gid: str) -> None:
    """A frame around something, seen on every colour."""
    for colour, thickness in ((picture.theme.paper, 3.6), (picture.theme.ink, 1.6)):
        axes.add_patch(
            Rectangle(
                (left, top), width, height, fill=False, edgecolor=colour, linewidth=thickness, zorder=5, gid=gid,
                clip_on=False,
            )
        )  # fmt: skip


def counted(axis: Any, most: int = 8) -> None:
    """Ticks at whole numbers."""
    axis.set_major_locator(MaxNLocator(nbins=most, integer=True, min_n_ticks=1))
