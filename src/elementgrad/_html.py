"""HTML for notebooks: a few lines or a table, plain, with inline style, in the colours of the page around it."""

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from html import escape
from typing import Any

from elementgrad._place.grammar import table

Rows = Sequence[Sequence[str]]
"""Rows of cells; the first may be the heads of the columns."""
CALM = "#6e7781"
"""The colour of a margin that says nothing of good or bad."""
LINE = "rgba(128, 128, 128, 0.35)"
"""Seen on white and on black."""
ROWS = 60
"""Rows of a table; more are left out and counted."""


def never_raise(method: Callable[[Any], str]) -> Callable[[Any], str]:
    """A `_repr_html_` that shows something whatever happens: a notebook asks for it when nobody expects an error."""

    @wraps(method)
    def shown(self: Any) -> str:
        try:
            return method(self)
        except Exception:
            return f"<pre>{escape(object.__repr__(self))}</pre>"

    return shown


class Tabular:
    """What is printed as a table, in a terminal and in a notebook."""

    __slots__ = ()

    def _rows(self) -> Rows:
        """The heads of the columns, and then the rows."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return table(self._rows())

    @never_raise
    def _repr_html_(self) -> str:
        return grid(self._rows())


def rows_of(what: Tabular) -> Rows:
    """The heads and rows of what is printed as a table."""
    return what._rows()


def box(head: str, lines: Iterable[str] = (), colour: str = CALM) -> str:
    """A heading and some lines behind a coloured margin.

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
    """Rows of cells as a table, the first row being the heads of the columns or else the first cells those of rows.

    >>> from elementgrad._html import grid
    >>> grid([("place",), ("x[<0>]",)]).count("x[&lt;0&gt;]")
    1
    """
    body = list(rows[1:] if heads else rows)
    left = len(body) - ROWS
    more = f'<div style="opacity: 0.7">{left} more rows are left out</div>' if left > 0 else ""
    written = [_row(rows[0], range(len(rows[0])))] if heads else []
    written += [_row(row, () if heads else (0,)) for row in body[:ROWS]]
    return (
        '<div style="overflow-x: auto; color: inherit"><table style="border-collapse: collapse; color: inherit">'
        f"{''.join(written)}</table>{more}</div>"
    )


def _row(cells: Sequence[str], heads: Iterable[int]) -> str:
    style = f"text-align: left; padding: 2px 12px 2px 0; border-bottom: 1px solid {LINE}; background: none"
    tags = ["th" if number in heads else "td" for number in range(len(cells))]
    written = [f'<{tag} style="{style}">{escape(cell)}</{tag}>' for tag, cell in zip(tags, cells, strict=True)]
    return f"<tr>{''.join(written)}</tr>"
