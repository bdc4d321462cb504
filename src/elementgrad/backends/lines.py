"""Lines of the user's own code, among all that a framework notes of where something was made."""

import contextlib
import functools
import os
import sys
from collections.abc import Iterable


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
EDITS = ("get", "set", "add", "multiply", "apply", "only", "stop")
"""What is done to elements by `eg.at`."""
READS = {"read.py": ("grad", "jacobian", "hessian", "contributions"), "choice.py": ("choose",)}
"""Functions of ours that compute with the user's tensors, by the file that they stand in."""


def is_users(filename: str, packages: Iterable[str]) -> bool:
    """Whether code in a file is the user's: it stands in the folder of none of these packages, nor of ours."""
    if not filename or filename.startswith("<"):
        return filename.startswith(TYPED)
    path = normal(filename)
    folders = [folder + os.sep for name in (*packages, "elementgrad") for folder in _folders(name)]
    return not path.startswith((*folders, *BETWEEN)) and os.path.basename(path) not in SCRIPTS


def verb(filename: str, name: str) -> str | None:
    """What the user writes to call a function of ours, if it is one that computes: `eg.at(...).stop`, `eg.grad`."""
    folder, file = os.path.split(normal(filename))
    if folder != OURS:
        return None
    if file == "place.py" and name in EDITS:
        return f"eg.at(...).{name}"
    return f"eg.{name}" if name in READS.get(file, ()) else None


def spelled(filename: str, line: int) -> str:
    """A line, as in `model.py:12`."""
    return f"{os.path.basename(filename)}:{line}"


def _folders(package: str) -> list[str]:
    """Where a package lives that is imported; one without a file of its own may live in several folders."""
    module = sys.modules.get(package)
    file = getattr(module, "__file__", None)
    folders = [os.path.dirname(file)] if file else getattr(module, "__path__", ())
    return [normal(folder) for folder in folders]
