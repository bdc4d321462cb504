"""Standard output and error, which may be closed, or know few characters, as on Windows where they are redirected.

How a command ends: its exit code, and what is said of an error.
"""

import codecs
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from io import TextIOWrapper

from elementgrad.errors import ElementgradError, shortened

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


FINDING, USAGE, THEIRS, INTERRUPTED, PIPE = 1, 2, 3, 130, 141
FRAMEWORKS = ("torch", "tensorflow", "keras", "jax", "jaxlib", "flax", "equinox", "optax", "numpy", "safetensors")
"""Packages whose own checks raise for bad input: what they say is told in one line."""
PYTHON = re.compile(r"""\b(of|wrt|unconnected|budget)=(["'])(.*?)\2""")


class InputError(ElementgradError, ValueError):
    """Something that was given on the command line cannot be used."""


def answered(command: Callable[[], int | None], debug: bool) -> int:
    """Run a command; whatever it raises becomes a line on stderr and an exit code."""
    try:
        code = command() or 0
        sys.stdout.flush()
        return code
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        return failed(error, debug)


def failed(error: BaseException, debug: bool = False) -> int:
    """Say what went wrong, and return the exit code."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, BrokenPipeError):  # whoever reads has seen enough
        silence()
        return PIPE
    theirs = their_traceback(error)
    if debug:
        traceback.print_exception(error)
    elif theirs is not None:
        sys.stderr.write(theirs)
    else:
        say(_in_a_line(error))
    try:
        sys.stdout.flush()
    except OSError:  # such as a disk that is full
        silence()
    return USAGE if theirs is None else THEIRS


def silence() -> None:
    """Have nothing more written to standard output, not at exit either, where Python would complain."""
    with suppress(OSError, ValueError, AttributeError):
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, sys.stdout.fileno())
        os.close(nothing)


def say(text: str) -> None:
    """A message, which is no result."""
    print(f"elementgrad: {shortened(text)}", file=sys.stderr)


def their_traceback(error: BaseException) -> str | None:
    """The traceback of an error that the user's code raised, without our frames; None if it was not theirs."""
    if isinstance(error, SyntaxError):
        own = error.filename is None or not _is_theirs(error.filename)
    else:
        own = not any(_is_theirs(frame.filename) for frame in traceback.extract_tb(error.__traceback__))
    if own:
        return None
    told = traceback.TracebackException.from_exception(error)
    for one in _chain(told):
        one.stack = traceback.StackSummary.from_list(_from_theirs(one.stack))
    return "".join(told.format())


def _chain(told: traceback.TracebackException | None) -> Iterator[traceback.TracebackException]:
    while told is not None:
        yield told
        told = told.__cause__ or told.__context__


def _from_theirs(frames: traceback.StackSummary) -> list[traceback.FrameSummary]:
    first = next((number for number, frame in enumerate(frames) if _is_theirs(frame.filename)), len(frames))
    return [frame for frame in frames[first:] if not _is_ours(frame.filename)]


def _is_ours(filename: str) -> bool:
    from elementgrad._backends.source_location import OURS, normal_path

    return normal_path(filename).startswith(OURS + os.sep)


def _is_theirs(filename: str) -> bool:
    """Whether a file is neither ours, nor of a framework, nor of Python itself."""
    from elementgrad._backends.source_location import is_user_code, normal_path

    path = normal_path(filename)
    library, *others = [normal_path(sysconfig.get_path(kind)) + os.sep for kind in ("stdlib", "purelib", "platlib")]
    python = path.startswith(library) and not path.startswith(tuple(others))
    return not python and is_user_code(filename, FRAMEWORKS) and not filename.startswith("<")


def typed(text: str) -> str:
    """A message that speaks of arguments in Python, in the words of the command line."""
    return PYTHON.sub(r"--\1 '\3'", text).replace("pass --", "give --")


def _in_a_line(error: BaseException) -> str:
    text = str(error).strip()
    if isinstance(error, ElementgradError):
        return typed(text)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if isinstance(error, ImportError):
        return text
    if isinstance(error, RecursionError):
        return "something that was given is nested too deep; give it with fewer brackets (--debug shows where)"
    first = text.splitlines()[0] if text else "no message"
    return f"{type(error).__name__}: {first} (--debug shows where)"
