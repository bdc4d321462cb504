"""A page: sections of prose, code, tables, pictures and numbers, written as one HTML file that needs nothing else."""

import base64
import csv
import io
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from elementgrad import __version__
from elementgrad._files import replace_file, writable
from elementgrad._optional import require
from elementgrad._show.plot import plot

Tone = Literal["good", "bad", "odd", "calm"]
ROWS = 20
"""Rows of the table of numbers: all of so few, or the largest of more."""
CARRIED = 1_200_000
"""Bytes of numbers that one page carries for downloading."""
FORMULA = tuple("=+-@\t\r\n\uff1d\uff0b\uff0d\uff20")
"""With what a formula begins in some spreadsheet, the wide signs included."""


@dataclass(frozen=True)
class Prose:
    """A paragraph."""

    kind: ClassVar = "prose"
    text: str
    ticks: bool = False
    """Whether backticks set code apart; what a user wrote is left as it is."""


@dataclass(frozen=True)
class Code:
    """Lines of Python, in colours, or of something else, such as what they printed."""

    kind: ClassVar = "code"
    text: str
    python: bool = True

    @property
    def coloured(self) -> str:
        """The lines with their words in classes, all else escaped."""
        from pygments import highlight
        from pygments.formatters import HtmlFormatter
        from pygments.lexers import PythonLexer

        return highlight(self.text, PythonLexer(stripnl=False), HtmlFormatter(nowrap=True)).rstrip("\n")


@dataclass(frozen=True)
class Facts:
    """Words, and what there is to say to each."""

    kind: ClassVar = "facts"
    rows: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Callout:
    """One sentence to be seen first, and some lines to it."""

    kind: ClassVar = "finding"
    head: str
    lines: Sequence[str] = ()
    tone: Tone = "calm"


@dataclass(frozen=True)
class StepList:
    """A way, step by step: the number of each step, what it is, and whether it ends the way."""

    kind: ClassVar = "steps"
    steps: Sequence[tuple[int, str, bool]]


@dataclass(frozen=True)
class Table:
    """Rows of cells under their heads, all of which can be downloaded where only some are shown."""

    kind: ClassVar = "table"
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    name: str = ""
    """The name of the file to download, without its ending; none for no file."""
    csv: str = ""
    """What is in the file, in base64."""

    @classmethod
    def of(cls, heads: Sequence[str], rows: Sequence[Sequence[str]], most: int, name: str) -> "Table":
        """The first rows of a table, and a file of all."""
        file = io.StringIO()
        csv.writer(file).writerows([[_harmless(cell) for cell in row] for row in (heads, *rows)])
        note = f"The first {most} of {len(rows)} rows; the file has them all." if len(rows) > most else ""
        return cls(heads, rows[:most], note, _stem(name), base64.b64encode(file.getvalue().encode()).decode())


@dataclass(frozen=True)
class Image:
    """A picture in light and dark, and in words."""

    kind: ClassVar = "image"
    light: str
    dark: str
    alt: str
    width: int

    @classmethod
    def of(cls, what: Any, **options: Any) -> "Image":
        """What `eg.plot` draws, in both themes, as PNG or SVG, whichever is smaller."""
        made: dict[str, Any] = {theme: plot(what, theme=theme, **options) for theme in ("light", "dark")}
        files = {format: made["light"].save(format) for format in ("png", "svg")}
        format = min(files, key=lambda format: len(files[format]))
        kind = {"png": "image/png", "svg": "image/svg+xml"}[format]
        themed = files[format], made["dark"].save(format)
        light, dark = [f"data:{kind};base64,{base64.b64encode(file).decode()}" for file in themed]
        return cls(light, dark, made["light"].alt, round(made["light"].get_figwidth() * 100))


@dataclass(frozen=True)
class NumbersTable:
    """Numbers of any shape: the largest in a table, and all of them in files."""

    kind: ClassVar = "numbers"
    name: str
    table: Table
    npy: str = ""
    """The file of all, in base64; none where it would be too large."""
    left_out: str = ""

    @classmethod
    def of(cls, values: np.ndarray, name: str, beside: np.ndarray | None = None, room: int = CARRIED) -> "NumbersTable":
        """Some numbers by their name, perhaps beside those of the tensor that they are about."""
        file = io.BytesIO()
        with np.errstate(over="ignore"):
            narrow = values.astype("<f4")
        exact = np.array_equal(narrow.astype(np.float64), values, equal_nan=True)
        np.save(file, narrow if exact else values.astype("<f8"))
        npy = file.getvalue()
        left = f"All {values.size} numbers would take {len(npy) / 1e6:.1f} MB and are left out; eg.grad gives them."
        fits = len(npy) <= room
        carried = base64.b64encode(npy).decode() if fits else ""
        return cls(_stem(name), _largest(values, beside), carried, "" if fits else left)


@dataclass(frozen=True)
class Heading:
    """A smaller heading within a section."""

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
    """A heading and what stands under it."""

    title: str
    parts: Sequence[Part]


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
    """What is to be seen first, before the list of sections."""
    made: datetime = field(default_factory=lambda: datetime.now(UTC))

    def html(self) -> str:
        """The whole file."""
        require("jinja2 pygments", "a report", "show")
        import jinja2

        folder = resources.files("elementgrad._show")
        loader = jinja2.FunctionLoader(lambda name: folder.joinpath(name).read_text("utf-8"))
        environment = jinja2.Environment(
            loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
        )
        when = self.made.strftime("%Y-%m-%d %H:%M UTC")
        return environment.get_template("page.html").render(page=self, version=__version__, when=when)

    def write(self, path: str | os.PathLike[str]) -> Path:
        """Write the file as a whole or not at all."""
        replace_file(writable(path), self.html().encode("utf-8", "replace"))
        return Path(path)


def _harmless(cell: str) -> str:
    """Return a cell that no spreadsheet takes for a formula: a name may come from a file of anybody's."""
    if not cell.startswith(FORMULA):
        return cell
    try:
        float(cell)
    except ValueError:
        return f"'{cell}"  # how spreadsheets mark a text
    return cell


def _stem(name: str) -> str:
    """A name for a file."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:60] or "numbers"


def _largest(values: np.ndarray, beside: np.ndarray | None) -> Table:
    """The largest numbers in size, or all of a few in order."""
    flat = values.reshape(-1)
    sizes = np.where(np.isnan(flat), np.inf, np.abs(flat))
    few = flat.size <= ROWS
    chosen = np.arange(flat.size) if few else np.argsort(-sizes, kind="stable")[:ROWS]
    rows = []
    for position in chosen.tolist():
        where = ", ".join([str(int(axis)) for axis in np.unravel_index(position, values.shape)]) if values.shape else ""
        about = [] if beside is None else [f"{beside.reshape(-1)[position]:.6g}"]
        rows.append([f"[{where}]", f"{flat[position]:.6g}", *about])
    heads = ["index", "gradient", *(["value there"] if beside is not None else [])]
    return Table(heads, rows, "" if few else f"The {ROWS} largest in size of {flat.size}.")
