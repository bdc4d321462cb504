"""Lines of the user's own code, among all that a framework notes of where something was made."""

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterable
from types import CodeType
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def normal(path: str) -> str:
    """Return a path as it can be compared with another: absolute, and in one case where the system knows no other."""
    return os.path.normcase(os.path.abspath(path))


BETWEEN = tuple(normal(str(module.__file__)) for module in (contextlib, functools))
"""Files of Python's own that calls go through."""
SCRIPTS = ("elementgrad", "elementgrad.exe", "elementgrad-script.py")
"""The file that the command line is started by; the last two on Windows."""
TYPED = ("<stdin>", "<string>", "<ipython-input")
"""How names begin of what was typed in and stands in no file; other names in brackets are of code that is generated."""

OURS = os.path.dirname(os.path.dirname(normal(__file__)))
"""Where this library lives."""
_verbs: dict[CodeType, str] = {}
"""How users write the functions of ours that compute with their tensors, by the code that runs."""


def spelled_as(text: str) -> Callable[[Function], Function]:
    """Register a function of ours under the text by which users call it, such as `eg.grad`.

    Explanations name it where a step of the user's program runs inside of it.
    """

    def register(function: Function) -> Function:
        _verbs[function.__code__] = text  # type: ignore[attr-defined]
        return function

    return register


def verb_of(code: CodeType) -> str | None:
    """Return how users write the function of ours that runs this code: `eg.at(...).stop`, `eg.grad`; None if none."""
    return _verbs.get(code)


def is_users(filename: str, packages: Iterable[str]) -> bool:
    """Whether code in a file is the user's: it stands in the folder of none of these packages, nor of ours."""
    if not filename or filename.startswith("<"):
        return filename.startswith(TYPED)
    path = normal(filename)
    folders = [folder + os.sep for name in (*packages, "elementgrad") for folder in _folders(name)]
    return not path.startswith((*folders, *BETWEEN)) and os.path.basename(path) not in SCRIPTS


def spelled(filename: str, line: int) -> str:
    """A line, as in `model.py:12`."""
    return f"{os.path.basename(filename)}:{line}"


def _folders(package: str) -> list[str]:
    """Where a package lives that is imported; one without a file of its own may live in several folders."""
    module = sys.modules.get(package)
    file = getattr(module, "__file__", None)
    folders = [os.path.dirname(file)] if file else getattr(module, "__path__", ())
    return [normal(folder) for folder in folders]
