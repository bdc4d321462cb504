"""Messages of a page, checked before anything is done with them.

A message is a JSON object with `ask` and the fields of that question. Tensors are numbers in the list of names, and
elements are lists of ints: the only text that is read as a place is what a user types, and that is parsed.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from elementgrad.errors import ElementgradError, shortened

MAX_BYTES = 1 << 18
"""Bytes of a message."""
MAX_AXES = 64
MAX_EDITS = 1000
MAX_THUMBNAILS = 64
MAX_TEXT = 2000
MAX_INT = 1 << 53
"""Integers up to here are exact in JavaScript."""


class MessageError(ElementgradError, ValueError):
    """A message of a page that cannot be read, or that has something in it which does not belong there."""


@dataclass(frozen=True)
class Element:
    """One element of a tensor of the session."""

    tensor: int
    index: tuple[int, ...]


Edits = tuple[tuple[Element, float], ...]
"""Input elements with the values that they are to have."""


@dataclass(frozen=True)
class Message:
    """A question of a page. Fields that a question does not have are None."""

    ask: str
    tensor: int | None = None
    index: tuple[int, ...] | None = None
    of: Element | None = None
    edits: Edits = ()
    tensors: tuple[int, ...] = ()
    tiles: tuple[int, int] | None = None
    rows: tuple[int, int] | None = None
    columns: tuple[int, int] | None = None
    text: str = ""


def parse_message(data: bytes | str | Mapping[str, Any]) -> Message:
    """Return the message that some JSON is.

    Raises:
        MessageError: it is none; the message says why.

    >>> from elementgrad._explore.messages import parse_message
    >>> parse_message('{"ask": "drivers", "tensor": 2, "of": {"tensor": 5, "index": [0, 3]}}').of
    Element(tensor=5, index=(0, 3))
    >>> parse_message('{"ask": "shell"}')
    Traceback (most recent call last):
    elementgrad._explore.messages.MessageError: 'shell' is no question; ask one of ...
    """
    fields = _load(data) if isinstance(data, (bytes, str)) else dict(data)
    if not isinstance(fields, dict):
        raise MessageError("a message is a JSON object")
    ask = fields.pop("ask", None)
    if not isinstance(ask, str) or ask not in QUESTIONS:
        raise MessageError(f"{_show(ask)} is no question; ask one of {', '.join(QUESTIONS)}")
    required, optional = QUESTIONS[ask]
    missing = [name for name in required if fields.get(name) is None]
    unknown = [name for name in fields if name not in (*required, *optional)]
    if missing or unknown:
        which = f"needs {', '.join(missing)}" if missing else f"has no field {_show(unknown[0])}"
        raise MessageError(f"the question {ask!r} {which}")
    return Message(ask, **{name: FIELDS[name](value) for name, value in fields.items() if value is not None})


def _load(data: bytes | str) -> Any:
    if len(data) > MAX_BYTES:
        raise MessageError(f"a message has at most {MAX_BYTES} bytes")
    try:
        return json.loads(data, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise MessageError("a message is a JSON object, and this is no JSON") from None


def _refuse_constant(name: str) -> None:
    raise ValueError(name)


def _integer(value: Any) -> int:
    if type(value) is not int or not -MAX_INT <= value <= MAX_INT:
        raise MessageError(f"{_show(value)} is no int that fits")
    return value


def _integers(value: Any, limit: int = MAX_AXES) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple)) or len(value) > limit:
        raise MessageError(f"{_show(value)} is no list of at most {limit} ints")
    return tuple(map(_integer, value))


def _range(value: Any) -> tuple[int, int]:
    ends = _integers(value, 2)
    if len(ends) != 2:
        raise MessageError(f"{_show(value)} is no range; give where it starts and stops")
    return ends[0], ends[1]


def _element(value: Any) -> Element:
    if not isinstance(value, dict) or set(value) != {"tensor", "index"}:
        raise MessageError(f"{_show(value)} is no element; give its tensor and index")
    return Element(_integer(value["tensor"]), _integers(value["index"]))


def _edits(value: Any) -> Edits:
    if not isinstance(value, (list, tuple)) or len(value) > MAX_EDITS:
        raise MessageError(f"{_show(value)} is no list of at most {MAX_EDITS} edits")
    return tuple([_edit(one) for one in value])


def _edit(value: Any) -> tuple[Element, float]:
    if not isinstance(value, dict) or set(value) != {"tensor", "index", "value"}:
        raise MessageError(f"{_show(value)} is no edit; give tensor, index and value")
    number = value["value"]
    if type(number) not in (int, float) or not math.isfinite(number):
        raise MessageError(f"{_show(number)} is no number that an element can have")
    return _element({"tensor": value["tensor"], "index": value["index"]}), float(number)


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > MAX_TEXT:
        raise MessageError(f"{_show(value)} is no text of at most {MAX_TEXT} characters")
    return value


def _show(value: Any) -> str:
    return shortened(repr(value), 60)


FIELDS: dict[str, Callable[[Any], Any]] = {
    "tensor": _integer,
    "index": _integers,
    "of": _element,
    "edits": _edits,
    "tensors": lambda value: _integers(value, MAX_THUMBNAILS),
    "tiles": _range,
    "rows": _range,
    "columns": _range,
    "text": _text,
}
QUESTIONS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "start": ((), ()),
    "thumbnails": (("tensors",), ("index", "edits")),
    "view": (("tensor",), ("index", "of", "edits", "tiles", "rows", "columns")),
    "shares": (("tensor", "index", "of"), ("edits",)),
    "explain": (("tensor", "of"), ("index", "edits")),
    "field": (("tensor", "of"), ("edits",)),
    "drivers": (("tensor", "of"), ("edits",)),
    "walk": (("of",), ("edits",)),
    "code": (("tensor",), ("of", "index", "edits")),
    "report": (("tensor", "of"), ("index", "edits")),
    "find": (("text",), ()),
}
"""The fields that each question needs, and those that it may have."""
SLOW = ("shares", "explain", "report")
"""Questions for which a model is followed operation by operation; the others do not wait for them."""
