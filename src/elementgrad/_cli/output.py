"""Everything that a command prints besides its result: messages and errors, with the exit code that follows.

Also the streams themselves: standard output and error may be closed, or may know few characters, as on Windows where
they are redirected. Nothing is imported here that takes time, since the help needs it.
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

FINDING, USAGE, USER_ERROR, INTERRUPTED, BROKEN_PIPE = 1, 2, 3, 130, 141
PACKAGES = ("torch", "tensorflow", "keras", "jax", "jaxlib", "flax", "equinox", "optax", "numpy", "safetensors")
"""Packages whose own checks raise for bad input: their errors are shown in one line."""
PYTHON_ARGUMENT = re.compile(r"""\b(of|wrt|unconnected|budget)=(["'])(.*?)\2""")
REPLACEMENTS = {"→": "->", "…": "...", "·": ".", "█": "#", "▓": "%", "▒": "+", "░": ":", "─": "-", "━": "="} | {
    chr(0x2800 + dots): ":" if dots else " " for dots in range(256)
}
"""Characters for an output that does not know arrows, shades, lines and the dots of Braille."""


class InputError(ElementgradError, ValueError):
    """Something that was given on the command line cannot be used."""


def run_command(command: Callable[[], int | None], debug: bool) -> int:
    """Run a command and return its exit code; errors become a message on stderr."""
    try:
        code = command() or 0
        sys.stdout.flush()
        return code
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        return report_error(error, debug)


def report_error(error: BaseException, debug: bool = False) -> int:
    """Print an error to stderr and return the exit code."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, BrokenPipeError):  # the reader of a pipe has left
        silence_stdout()
        return BROKEN_PIPE
    user_error = user_traceback(error)
    if debug:
        traceback.print_exception(error)
    elif user_error is not None:
        sys.stderr.write(user_error)
    else:
        say(_one_line(error))
    try:
        sys.stdout.flush()
    except OSError:  # such as a disk that is full
        silence_stdout()
    return USAGE if user_error is None else USER_ERROR


def say(text: str) -> None:
    """Print a message, which is not a result, to stderr."""
    print(f"elementgrad: {shortened(text)}", file=sys.stderr)


def _one_line(error: BaseException) -> str:
    text = str(error).strip()
    if isinstance(error, ElementgradError):
        return to_cli_words(text)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if isinstance(error, ImportError):
        return text
    if isinstance(error, RecursionError):
        return "something that was given is nested too deep; give it with fewer brackets (--debug shows where)"
    first = text.splitlines()[0] if text else "no message"
    return f"{type(error).__name__}: {first} (--debug shows where)"


def to_cli_words(text: str) -> str:
    """Replace arguments of Python in a message by options of the command line."""
    return PYTHON_ARGUMENT.sub(r"--\1 '\3'", text).replace("pass --", "give --")


def user_traceback(error: BaseException) -> str | None:
    """Return the traceback of an error that the user's code raised, without our frames; None for other errors."""
    if isinstance(error, SyntaxError):
        from_user = error.filename is not None and _is_user_file(error.filename)
    else:
        from_user = any(_is_user_file(frame.filename) for frame in traceback.extract_tb(error.__traceback__))
    if not from_user:
        return None
    report = link = traceback.TracebackException.from_exception(error)
    while link is not None:
        link.stack = traceback.StackSummary.from_list(_user_frames(link.stack))
        link = link.__cause__ or link.__context__  # type: ignore[assignment]
    return "".join(report.format())


def _user_frames(frames: traceback.StackSummary) -> list[traceback.FrameSummary]:
    """Return the frames from the first of the user's on, without ours."""
    first = next((index for index, frame in enumerate(frames) if _is_user_file(frame.filename)), len(frames))
    return [frame for frame in frames[first:] if not _is_our_file(frame.filename)]


def _is_our_file(filename: str) -> bool:
    from elementgrad._backends.source_location import OURS, normal_path

    return normal_path(filename).startswith(OURS + os.sep)


def _is_user_file(filename: str) -> bool:
    """Return True for a file that is neither ours, nor of a framework, nor of Python itself."""
    from elementgrad._backends.source_location import is_user_code, normal_path

    path = normal_path(filename)
    library, *others = [normal_path(sysconfig.get_path(kind)) + os.sep for kind in ("stdlib", "purelib", "platlib")]
    python = path.startswith(library) and not path.startswith(tuple(others))
    return not python and is_user_code(filename, PACKAGES) and not filename.startswith("<")


def is_stdout_closed() -> bool:
    """Return True without a standard output, as after `>&-` in a shell."""
    return sys.stdout is None or sys.stdout.closed


def is_stdout_unicode() -> bool:
    return (getattr(sys.stdout, "encoding", None) or "utf-8").lower().startswith("utf")


def silence_stdout() -> None:
    """Write nothing more to standard output, not at exit either, where Python would complain."""
    with suppress(OSError, ValueError, AttributeError):
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, sys.stdout.fileno())
        os.close(nothing)


@contextmanager
def tolerant_streams() -> Iterator[None]:
    """Let every character be printed, and messages go nowhere where there is no stderr, for the time of a `with`."""
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


def _replace_characters(error: UnicodeError) -> tuple[str | bytes, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    characters = error.object[error.start : error.end]
    plain = [REPLACEMENTS.get(one) or one.encode("ascii", "backslashreplace").decode() for one in characters]
    return "".join(plain), error.end


codecs.register_error("elementgrad", _replace_characters)
