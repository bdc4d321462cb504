"""The text of a place, `conv1[0, 12, 5:9]`: a small grammar, parsed and never evaluated.

    place := [name] ["[" [item {"," item}] [","] "]"] ["(" kind ")"]
    item  := "..." | int | [int] ":" [int] [":" [int]] | array
    array := "[" [entry {"," entry}] [","] "]" | "true" | "false"    entry := int | "true" | "false" | array
           | ("int" | "bool") "(" int {"," int} ")"                  an empty array of that shape

A name is anything without brackets or parentheses, such as `encoder.layer.3.attn`, `dense/kernel`, `lstm:0`, `block#1`.
"""

import re
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

import numpy as np

from elementgrad._place.index import Index, IndexArray, Item, Span
from elementgrad.errors import ParseError

DIGITS_LIMIT = 40
"""The most digits of an int. A longer one is beyond every axis, and takes long to parse."""
SHOWN = 100
"""Characters that an error shows before and behind the one that does not fit."""
KINDS = ("input", "output", "activation", "given", "parameter", "buffer")
_NAME = re.compile(r"[^\[\]()\n]*")
_INT = re.compile(r"[+-]?\d+")
_WORD = re.compile(r"[A-Za-z_]\w*")


def parse(text: str) -> tuple[str | None, Index, str | None]:
    """Split the text of a place into name, index and kind."""
    parser = _Parser(text)
    try:
        return parser.place()
    except RecursionError:
        raise parser.error("fewer brackets inside one another") from None


class _Parser:
    def __init__(self, text: str):
        self.text = text
        self.at = 0

    def place(self) -> tuple[str | None, Index, str | None]:
        name = self.match(_NAME).strip()
        index: Index = ()
        kind = None
        if self.skip("["):
            index = tuple(self.sequence(self.item, "]"))
        elif not name:
            raise self.error('a name or "["')
        if self.skip("("):
            self.space()
            start = self.at
            kind = self.match(_WORD)
            if kind not in KINDS:
                self.at = start
                raise self.error(f"one of {', '.join(KINDS)}")
            self.expect(")")
        self.space()
        if self.at < len(self.text):
            raise self.error("nothing more")
        return name or None, index, kind

    def item(self) -> Item:
        if self.skip("..."):
            return Ellipsis
        if self.peek() in "[tfib":
            return self.array()
        start = None if self.peek() == ":" else self.integer()
        if not self.skip(":"):
            if start is None:
                raise self.error("an int")
            return start
        stop = self.bound()
        return Span(start, stop, self.bound() if self.skip(":") else None)

    def bound(self) -> int | None:
        return None if self.peek() in ":,]" else self.integer()

    def integer(self) -> int:
        self.space()
        digits = self.match(_INT)
        if not 0 < len(digits) <= DIGITS_LIMIT:
            self.at -= len(digits)
            raise self.error("an int, a slice, `...` or a list")
        return int(digits)

    def array(self) -> IndexArray:
        start = self.at
        word = self.match(_WORD)
        if word in ("int", "bool"):
            self.expect("(")
            shape = self.sequence(self.integer, ")")
            try:
                empty: np.ndarray = np.zeros(shape, dtype=np.bool_ if word == "bool" else np.int64)
            except (ValueError, OverflowError, MemoryError):
                empty = np.zeros(1)
            if empty.size:
                self.at = start
                raise self.error("a shape with an axis of size 0")
            return IndexArray.freeze(empty)
        self.at = start
        try:
            array = np.array(self.entry())
        except ValueError:
            array = np.array(None)
        if array.dtype.kind not in "bi" and array.shape != (0,):
            self.at = start
            raise self.error("a list of ints that fit 64 bits, or of true and false, in rows of one length")
        return IndexArray.freeze(array)

    def entry(self) -> Any:
        self.space()
        if self.skip("["):
            return self.sequence(self.entry, "]")
        start = self.at
        word = self.match(_WORD)
        if word in ("true", "false"):
            return word == "true"
        self.at = start
        return self.integer()

    def sequence(self, read: Any, end: str) -> list[Any]:
        """Parse entries with commas between them, up to the closing bracket."""
        entries: list[Any] = []
        while not self.skip(end):
            if entries:
                self.expect(",", end)
                if self.skip(end):
                    break
            entries.append(read())
        return entries

    def space(self) -> None:
        while self.at < len(self.text) and self.text[self.at].isspace():
            self.at += 1

    def peek(self) -> str:
        self.space()
        return self.text[self.at : self.at + 1] or " "

    def skip(self, token: str) -> bool:
        self.space()
        matches = self.text.startswith(token, self.at)
        self.at += len(token) * matches
        return matches

    def expect(self, token: str, other: str = "") -> None:
        if not self.skip(token):
            raise self.error(f'"{token}" or "{other}"' if other else f'"{token}"')

    def match(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self.text, self.at)
        if match is None:
            return ""
        self.at = match.end()
        return match.group()

    def error(self, fits: str) -> ParseError:
        character = repr(self.text[self.at]) if self.at < len(self.text) else "the end"
        start, end = max(0, self.at - SHOWN), self.at + SHOWN
        before, after = "... " if start else "", " ..." if end < len(self.text) else ""
        shown = before + re.sub(r"\s", " ", self.text[start:end]) + after
        mark = " " * (len(before) + self.at - start)
        return ParseError(f"expected {fits} at character {self.at + 1}, found {character}\n  {shown}\n  {mark}^")


def nearest(name: str, names: Sequence[str]) -> str:
    """Return the names that a misspelt one may mean, as the end of a sentence."""
    inside = [other for other in names if other.startswith(name) and other[len(name) :][:1] in tuple(".:/#")]
    close = inside or get_close_matches(name, names, n=3)
    return f"nearest: {listed(close)}" if close else f"there are: {listed(names)}"


def listed(names: Sequence[str]) -> str:
    """Return names as a list in a sentence, at most eight of them."""
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "") or "none"
