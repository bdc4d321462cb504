"""The colours of pictures and pages, light and dark. They can be told apart with colour vision deficiencies.

Nothing here needs matplotlib.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from elementgrad.errors import OptionError

if TYPE_CHECKING:
    from matplotlib.colors import LinearSegmentedColormap


@dataclass(frozen=True)
class Theme:
    """A set of colours."""

    paper: str
    ink: str
    faint: str
    """For lines and words in the background."""
    below: str
    """For negative numbers."""
    above: str
    """For positive numbers."""
    gradient: tuple[str, ...]
    """From the most negative through zero to the most positive."""
    nonfinite: dict[str, str]
    """For numbers that are not finite, by kind."""
    lines: tuple[str, ...]
    """For lines that have no order."""

    @property
    def colormap(self) -> "LinearSegmentedColormap":
        """Blue below zero, orange above."""
        from matplotlib.colors import LinearSegmentedColormap

        return LinearSegmentedColormap.from_list("elementgrad", self.gradient, N=511)


NONFINITE_COLOURS = {"NaN": "#009e73", "+inf": "#cc79a7", "-inf": "#e0c800"}
THEMES = {
    "light": Theme(
        "#ffffff",
        "#1f2328",
        "#6e7781",
        "#2171b5",
        "#d94801",
        ("#08306b", "#2171b5", "#6baed6", "#c6dbef", "#f7f7f7", "#fdd0a2", "#fd8d3c", "#d94801", "#7f2704"),
        NONFINITE_COLOURS,
        ("#0072b2", "#d55e00", "#007a5a", "#b0508b", "#8a6d00", "#56b4e9", "#444444"),
    ),
    "dark": Theme(
        "#14181d",
        "#e6edf3",
        "#8b949e",
        "#58a6e6",
        "#fd8d3c",
        ("#d6ebff", "#6baed6", "#2171b5", "#173d66", "#1f252c", "#6b2e0c", "#d94801", "#fd8d3c", "#ffe3c9"),
        NONFINITE_COLOURS,
        ("#56b4e9", "#e69f00", "#2ec69a", "#d98cb8", "#f0e442", "#8fb8ff", "#c9d1d9"),
    ),
}


def get_theme(name: Any) -> Theme:
    if not isinstance(name, str) or name not in THEMES:
        raise OptionError(f'theme={name!r} is neither "light" nor "dark"; give one of them')
    return THEMES[name]
