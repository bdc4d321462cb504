"""Standard output and error, which may be closed, or know few characters, as on Windows where they are redirected."""

import codecs
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from io import TextIOWrapper

PLAIN = {"→": "->", "…": "...", "·": ".", "█": "#", "▓": "%", "▒": "+", "░": ":", "─": "-", "━": "="} | {
    chr(0x2800 + dots): ":" if dots else " " for dots in range(256)
}
"""What stands for a character that an output does not know: arrows, shades, lines and the dots of Braille."""


def _plainly(error: UnicodeError) -> tuple[str | bytes, int]:
    """Write a character by others; one that has none here by its number."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    signs = error.object[error.start : error.end]
    plain = [PLAIN.get(sign) or sign.encode("ascii", "backslashreplace").decode() for sign in signs]
    return "".join(plain), error.end


codecs.register_error("elementgrad", _plainly)


def closed() -> bool:
    """Return whether there is no standard output, as after `>&-` in a shell."""
    return sys.stdout is None or sys.stdout.closed


def is_unicode() -> bool:
    """Return whether standard output knows every character."""
    return (getattr(sys.stdout, "encoding", None) or "utf-8").lower().startswith("utf")


@contextmanager
def forgiving() -> Iterator[None]:
    """Let everything be printed for a while: characters that a stream does not know by others, messages to nowhere."""
    with ExitStack() as stack:
        if sys.stderr is None:
            sys.stderr = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
            stack.callback(setattr, sys, "stderr", None)
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, TextIOWrapper) and not stream.closed:
                stack.callback(_set_errors, stream, stream.errors)
                _set_errors(stream, "elementgrad")
        yield


def _set_errors(stream: TextIOWrapper, errors: str | None) -> None:
    with suppress(OSError, ValueError):  # what is left to be written is written first, which may fail
        stream.reconfigure(errors=errors)
