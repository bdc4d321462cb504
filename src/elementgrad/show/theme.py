"""Colours and fonts, light and dark: told apart by people who see fewer colours, and set on every artist by itself."""

from dataclasses import dataclass
from typing import Any

from matplotlib.colors import LinearSegmentedColormap

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
