"""Tells the user's own lines of code from those of frameworks and of this library."""

import contextlib
import functools
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from types import CodeType
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def normal_path(path: str) -> str:
    """Return a path in a form to compare: absolute, and in lower case where the file system ignores case."""
    return os.path.normcase(os.path.abspath(path))


BETWEEN = tuple(normal_path(str(module.__file__)) for module in (contextlib, functools, threading))
"""Files of the standard library that calls go through."""
SCRIPTS = ("elementgrad", "elementgrad.exe", "elementgrad-script.py")
"""The file that the command line is started by; the last two on Windows."""
TYPED = ("<stdin>", "<string>", "<ipython-input")
"""The start of file names of code that was typed in; other names in angle brackets are of generated code."""

OURS = os.path.dirname(os.path.dirname(normal_path(__file__)))
"""The folder of this library."""
_verbs: dict[CodeType, str] = {}
"""The public spelling of our functions that compute with the user's tensors, by their code."""


def spelled_as(text: str) -> Callable[[Function], Function]:
    """Register a function of ours under the text by which users call it, such as `eg.grad`.

    Explanations name it where a step of the user's program runs inside of it.
    """

    def register(function: Function) -> Function:
        _verbs[function.__code__] = text  # type: ignore[attr-defined]
        return function

    return register


def verb_of(code: CodeType) -> str | None:
    """Return the public spelling of the function with this code, such as `eg.grad`; None if it is not one of ours."""
    return _verbs.get(code)


def is_user_code(filename: str, packages: Iterable[str]) -> bool:
    """Return True if a file is the user's: it is in the folder of none of these packages, nor of this library."""
    if not filename or filename.startswith("<"):
        return filename.startswith(TYPED)
    path = normal_path(filename)
    folders = [folder + os.sep for name in (*packages, "elementgrad") for folder in _folders(name)]
    return not path.startswith((*folders, *BETWEEN)) and os.path.basename(path) not in SCRIPTS


def location_text(filename: str, line: int) -> str:
    """Return a line as `model.py:12`."""
    return f"{os.path.basename(filename)}:{line}"


def user_line_of(error: BaseException, is_user_file: Callable[[str], bool]) -> str | None:
    """Return the innermost line of the user's on which an error was raised."""
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    lines = [location_text(file, line) for file, line in frames if is_user_file(file)]
    return lines[-1] if lines else None


def _folders(package: str) -> list[str]:
    # A namespace package has no file of its own, and may have several folders.
    module = sys.modules.get(package)
    file = getattr(module, "__file__", None)
    return [_folder_of(file)] if file else [normal_path(folder) for folder in getattr(module, "__path__", ())]


@functools.cache
def _folder_of(file: str) -> str:
    return normal_path(os.path.dirname(file))
