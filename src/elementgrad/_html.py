"""Tables for terminals, and HTML for notebooks: boxes and tables with inline style, in the colours of the page."""

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from html import escape
from typing import Any

Rows = Sequence[Sequence[str]]
"""Rows of cells; the first may be the column heads."""
NEUTRAL = "#6e7781"
"""The colour of a margin that means neither good nor bad."""
LINE = "rgba(128, 128, 128, 0.35)"
"""Visible on white and on black."""
ROWS_LIMIT = 60
"""Rows of a table; further ones are left out and counted."""


def never_raise(method: Callable[[Any], str]) -> Callable[[Any], str]:
    """Decorate a `_repr_html_` to fall back to the plain repr: an error while displaying would only confuse."""

    @wraps(method)
    def repr_html(self: Any) -> str:
        try:
            return method(self)
        except Exception:
            return f"<pre>{escape(object.__repr__(self))}</pre>"

    return repr_html


class Tabular:
    """Base of objects that print as a table, in a terminal and in a notebook."""

    __slots__ = ()

    def _rows(self) -> Rows:
        """Return the column heads, and then the rows."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return table(self._rows())

    @never_raise
    def _repr_html_(self) -> str:
        return grid(self._rows())


def table(rows: Rows) -> str:
    """Return rows of cells as aligned columns of text; the first row has the heads."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def rows_of(what: Tabular) -> Rows:
    """Return the heads and rows of an object that prints as a table."""
    return what._rows()


def box(head: str, lines: Iterable[str] = (), colour: str = NEUTRAL) -> str:
    """Return a heading and some lines behind a coloured margin.

    >>> from elementgrad._html import box
    >>> "a &lt; b" in box("a < b")
    True
    """
    rows = "".join([f"<div>{escape(line)}</div>" for line in lines])
    return (
        f'<div style="border-left: 4px solid {colour}; padding-left: 8px; color: inherit">'
        f'<div style="font-weight: bold">{escape(head)}</div>{rows}</div>'
    )


def grid(rows: Rows, heads: bool = True) -> str:
    """Return rows of cells as a table. The first row has the column heads, or else the first cells are row heads.

    >>> from elementgrad._html import grid
    >>> grid([("place",), ("x[<0>]",)]).count("x[&lt;0&gt;]")
    1
    """
    body = list(rows[1:] if heads else rows)
    omitted = len(body) - ROWS_LIMIT
    note = f'<div style="opacity: 0.7">{omitted} more rows are left out</div>' if omitted > 0 else ""
    lines = [_row(rows[0], range(len(rows[0])))] if heads else []
    lines += [_row(row, () if heads else (0,)) for row in body[:ROWS_LIMIT]]
    return (
        '<div style="overflow-x: auto; color: inherit"><table style="border-collapse: collapse; color: inherit">'
        f"{''.join(lines)}</table>{note}</div>"
    )


def _row(cells: Sequence[str], heads: Iterable[int]) -> str:
    style = f"text-align: left; padding: 2px 12px 2px 0; border-bottom: 1px solid {LINE}; background: none"
    tags = ["th" if column in heads else "td" for column in range(len(cells))]
    parts = [f'<{tag} style="{style}">{escape(cell)}</{tag}>' for tag, cell in zip(tags, cells, strict=True)]
    return f"<tr>{''.join(parts)}</tr>"
