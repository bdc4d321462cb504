"""An extension of Griffe: examples in docstrings are shown as code, as a reader of the source sees them."""

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"(?:^|(?<=\n))(>>> (?:.+(?:\n|$))+)")


class Examples(griffe.Extension):
    """Fences every example, from its first prompt to the empty line behind what it prints."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for everything that has been read."""
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub(fenced, obj.docstring.value)


def fenced(example: re.Match[str]) -> str:
    """An example as a block of code."""
    return f"```pycon\n{example[1].rstrip()}\n```\n"
