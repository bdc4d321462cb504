"""A page in parts (prose, code, tables, pictures, numbers), written as one HTML file that needs nothing else.

Each part is a dataclass whose `kind` says to the template `page.html` how it is shown.
"""

import base64
import csv
import io
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from elementgrad import __version__
from elementgrad._files import replace_file, writable
from elementgrad._show.plot import plot
from elementgrad.errors import require_packages

if TYPE_CHECKING:
    from elementgrad._show.style import Picture

Tone = Literal["good", "bad", "odd", "calm"]
MAX_ROWS = 20
"""Rows of the table of numbers: all numbers if they are no more, else the largest."""
DOWNLOAD_LIMIT = 1_200_000
"""Bytes of numbers for downloading in one page."""
FORMULA_STARTS = tuple("=+-@\t\r\n\uff1d\uff0b\uff0d\uff20")
"""Characters with which some spreadsheet begins a formula, the wide signs included."""


@dataclass(frozen=True)
class Prose:
    """A paragraph."""

    kind: ClassVar = "prose"
    text: str
    ticks: bool = False
    """True if backticks mark code; texts of the user's are left as they are."""


@dataclass(frozen=True)
class Code:
    """Lines of Python, in colours, or of output."""

    kind: ClassVar = "code"
    text: str
    python: bool = True

    @property
    def html(self) -> str:
        """The lines as HTML."""
        from pygments import highlight
        from pygments.formatters import HtmlFormatter
        from pygments.lexers import PythonLexer

        return highlight(self.text, PythonLexer(stripnl=False), HtmlFormatter(nowrap=True)).rstrip("\n")


@dataclass(frozen=True)
class Facts:
    """Pairs of a word and a text."""

    kind: ClassVar = "facts"
    rows: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Callout:
    """A sentence that stands out, and some lines to it."""

    kind: ClassVar = "finding"
    head: str
    lines: Sequence[str] = ()
    tone: Tone = "calm"


@dataclass(frozen=True)
class StepList:
    """Numbered steps; each has True if it breaks the path, and the module and line that it is from."""

    kind: ClassVar = "steps"
    steps: Sequence[tuple[int, str, bool, str]]


@dataclass(frozen=True)
class Table:
    """Rows of cells under their heads, with a file of all rows where only some are shown."""

    kind: ClassVar = "table"
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    name: str = ""
    """The name of the file to download, without its ending; empty for no file."""
    csv: str = ""
    """The content of the file, in base64."""

    @classmethod
    def of(cls, heads: Sequence[str], rows: Sequence[Sequence[str]], limit: int, name: str) -> "Table":
        """Return a table of the first rows, with a file of all."""
        file = io.StringIO()
        csv.writer(file).writerows([[_escape_formula(cell) for cell in row] for row in (heads, *rows)])
        note = f"The first {limit} of {len(rows)} rows; the file has them all." if len(rows) > limit else ""
        return cls(heads, rows[:limit], note, _file_stem(name), base64.b64encode(file.getvalue().encode()).decode())


@dataclass(frozen=True)
class Image:
    """A picture in light and dark, with a description."""

    kind: ClassVar = "image"
    light: str
    dark: str
    alt: str
    width: int

    @classmethod
    def of(cls, what: Any, **options: Any) -> "Image":
        """Draw with `eg.plot`, as `drawn_by` does."""
        return cls.drawn_by(lambda theme: plot(what, theme=theme, **options))

    @classmethod
    def drawn_by(cls, draw: "Callable[[str], Picture]") -> "Image":
        """Draw in both themes, given by name, as PNG or SVG, whichever is smaller."""
        light, dark = draw("light"), draw("dark")
        files = {"png": light.save("png")}
        light.set_layout_engine("none")  # the layout is done now, and computing it again takes most of the time
        files["svg"] = light.save("svg")
        format = min(files, key=lambda format: len(files[format]))
        media_type = {"png": "image/png", "svg": "image/svg+xml"}[format]
        contents = files[format], dark.save(format)
        light_url, dark_url = [f"data:{media_type};base64,{base64.b64encode(content).decode()}" for content in contents]
        return cls(light_url, dark_url, light.alt, round(light.get_figwidth() * 100))


@dataclass(frozen=True)
class NumbersTable:
    """Numbers of any shape: the largest in a table, and all of them in files."""

    kind: ClassVar = "numbers"
    name: str
    table: Table
    npy: str = ""
    """The file of all, in base64; empty if it would be too large."""
    left_out: str = ""

    @classmethod
    def of(
        cls,
        values: np.ndarray,
        name: str,
        inputs: np.ndarray | None = None,
        limit: int = DOWNLOAD_LIMIT,
        coords: np.ndarray | None = None,
    ) -> "NumbersTable":
        """Return gradients as a table and a file of at most `limit` bytes, beside the values of their elements.

        `coords` has the coordinates of each element in its tensor, where `values` are some of its elements.
        """
        file = io.BytesIO()
        with np.errstate(over="ignore"):
            narrow = values.astype("<f4")
        exact = np.array_equal(narrow.astype(np.float64), values, equal_nan=True)
        np.save(file, narrow if exact else values.astype("<f8"))
        npy = file.getvalue()
        table = _largest_rows(values, inputs, coords)
        if len(npy) <= limit:
            return cls(_file_stem(name), table, base64.b64encode(npy).decode())
        note = f"All {values.size} numbers would take {len(npy) / 1e6:.1f} MB and are left out; eg.grad gives them."
        return cls(_file_stem(name), table, left_out=note)


@dataclass(frozen=True)
class Heading:
    """A heading within a section."""

    kind: ClassVar = "heading"
    text: str


@dataclass(frozen=True)
class PartGroup:
    """Parts that belong together, under a label."""

    kind: ClassVar = "framed"
    label: str
    parts: "Sequence[Part]"
    tone: Tone = "calm"


Part = Prose | Code | Facts | Callout | StepList | Table | Image | NumbersTable | Heading | PartGroup


@dataclass(frozen=True)
class Section:
    """A heading and the parts under it."""

    title: str
    parts: Sequence[Part]
    entry: str | None = None
    """Its entry in the contents: the title for None, and none if empty."""


@dataclass(frozen=True)
class Page:
    """A title, a sentence under it, and sections.

    >>> from elementgrad._show.page import Page, Prose, Section
    >>> html = Page("<One>", [Section("First", [Prose("a < b")])]).html()
    >>> "&lt;One&gt;" in html, "a &lt; b" in html
    (True, True)
    """

    title: str
    sections: Sequence[Section]
    lead: str = ""
    opening: Sequence[Part] = ()
    """Parts before the list of sections."""
    created: datetime = field(default_factory=lambda: datetime.now(UTC))

    def html(self) -> str:
        """Return the content of the file."""
        require_packages("jinja2 pygments", "a report", "show")
        import jinja2

        folder = resources.files("elementgrad._show")
        loader = jinja2.FunctionLoader(lambda name: folder.joinpath(name).read_text("utf-8"))
        environment = jinja2.Environment(
            loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
        )
        when = self.created.strftime("%Y-%m-%d %H:%M UTC")
        return environment.get_template("page.html").render(page=self, version=__version__, when=when)

    def write(self, path: str | os.PathLike[str]) -> Path:
        """Write the file as a whole or not at all."""
        replace_file(writable(path), self.html().encode("utf-8", "replace"))
        return Path(path)


def _escape_formula(cell: str) -> str:
    """Return a cell that no spreadsheet reads as a formula: a name may come from any file."""
    if not cell.startswith(FORMULA_STARTS):
        return cell
    try:
        float(cell)
    except ValueError:
        return f"'{cell}"  # how spreadsheets mark a text
    return cell


def _file_stem(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:60] or "numbers"


def _largest_rows(values: np.ndarray, inputs: np.ndarray | None, coords: np.ndarray | None) -> Table:
    """Return a table of the numbers that are largest in size, or of all in order if they are few."""
    flat = values.reshape(-1)
    sizes = np.where(np.isnan(flat), np.inf, np.abs(flat))
    few = flat.size <= MAX_ROWS
    chosen = np.arange(flat.size) if few else np.argsort(-sizes, kind="stable")[:MAX_ROWS]
    rows = []
    for position in chosen.tolist():
        if coords is not None:
            where = coords[position]
        else:
            where = np.array(np.unravel_index(position, values.shape) if values.shape else ())
        row = [f"[{', '.join(map(str, where.tolist()))}]", f"{flat[position]:.6g}"]
        rows.append(row if inputs is None else [*row, f"{inputs.reshape(-1)[position]:.6g}"])
    heads = ["index", "gradient"] if inputs is None else ["index", "gradient", "value there"]
    return Table(heads, rows, "" if few else f"The {MAX_ROWS} largest in size of {flat.size}.")
