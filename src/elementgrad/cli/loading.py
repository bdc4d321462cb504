"""What the user calls by `file.py:name` or `package.module:name`."""

import importlib.util
import inspect
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import FunctionType, ModuleType
from typing import Any

from elementgrad.cli.failures import InputError
from elementgrad.text import nearest

FITS = "give file.py:name or package.module:name"


@contextmanager
def workplace() -> Iterator[None]:
    """Where the user's files can be loaded: what they print is no result, and afterwards `sys` is as it was."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # what TensorFlow tells of the machine when it is imported
    path, modules, stdout = sys.path.copy(), set(_loaded), sys.stdout
    sys.stdout = sys.stderr
    try:
        yield
    finally:
        sys.stdout = stdout
        sys.path[:] = path
        for name in set(_loaded) - modules:
            sys.modules.pop(_loaded.pop(name), None)


@contextmanager
def notice(text: str) -> Iterator[None]:
    """Say on a terminal what takes its time, for as long as it does."""
    shown = sys.stderr.isatty()
    if shown:
        print(f"{text} ...", end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        if shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def is_reference(text: str) -> bool:
    """Whether a text looks like `file.py:name` or `package.module:name`."""
    home, colon, name = text.rpartition(":")
    dotted = all(part.isidentifier() for part in home.split("."))
    return bool(colon) and (home.endswith(".py") or dotted) and name.removesuffix("()").replace(".", "_").isidentifier()


def load(text: str) -> tuple[Any, ModuleType]:
    """The object that a text names, and the module it stands in; it is called first if it is a factory.

    A class is one, and a function that takes no arguments, and whatever has `()` behind its name.
    """
    found, module = find(text)
    if not text.endswith("()") and not is_factory(found):
        return found, module
    needed = _needed(found)
    if needed:
        raise InputError(f"{text} takes {', '.join(needed)} and cannot be called without; name a factory that can")
    return found(), module


def find(text: str) -> tuple[Any, ModuleType]:
    """The object that a text names, as it is, and the module it stands in."""
    home, colon, name = text.rpartition(":")
    if not colon or not home or not name:
        raise InputError(f"{text!r} names no object; {FITS}")
    module = _from_file(home) if home.endswith(".py") else _imported(home, text)
    found: Any = module
    for part in name.removesuffix("()").split("."):
        if not hasattr(found, part):
            known = [other for other in vars(module) if not other.startswith("_")]
            raise InputError(f"{home} has no {name.removesuffix('()')!r}; {nearest(part, known)}")
        found = getattr(found, part)
    return found, module


def is_factory(found: Any) -> bool:
    """Whether an object is there to be called without arguments: a class, or a function that can take none."""
    if inspect.isclass(found):
        return True
    return isinstance(found, FunctionType) and not inspect.signature(found).parameters


def _needed(found: Any) -> list[str]:
    """The arguments that a call cannot do without, as far as can be told."""
    if not callable(found):
        raise InputError(f"{type(found).__name__} cannot be called; leave () out")
    try:
        parameters = inspect.signature(found).parameters.values()
    except (TypeError, ValueError):
        return []
    fixed = [one for one in parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    return [one.name for one in fixed if one.default is one.empty]


_loaded: dict[str, str] = {}
"""Files that are loaded, and the names of their modules."""


def _from_file(path: str) -> ModuleType:
    """A file as a module of its own name, loaded once, with its folder in `sys.path` as for `python file.py`."""
    file = os.path.realpath(path)
    key = os.path.normcase(file)
    if not os.path.isfile(file):
        raise InputError(f"{path} is no file; {FITS}")
    if key in _loaded:
        return sys.modules[_loaded[key]]
    sys.path.insert(0, os.path.dirname(file))
    name = os.path.basename(file).removesuffix(".py")
    there = sys.modules.get(name)
    if there is not None and _same(getattr(there, "__file__", None), key):
        return there
    if there is not None:
        name = f"{name}_{len(_loaded)}"  # a module of that name is imported already, from elsewhere
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise InputError(f"{path} cannot be loaded as Python; {FITS}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: dataclasses and pickles look themselves up there
    _loaded[key] = name
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name], _loaded[key]
        raise
    return module


def _same(one: str | None, other: str) -> bool:
    return one is not None and os.path.normcase(os.path.realpath(one)) == other


def _imported(home: str, text: str) -> ModuleType:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as for `python -m`
    try:
        return import_module(home)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{home}.".startswith(f"{error.name}."):
            raise
        file = f"; is {home}.py meant?" if os.path.isfile(f"{home}.py") else ""
        raise InputError(f"{text!r}: there is no module {error.name!r}{file or f'; {FITS}'}") from None
    except (TypeError, ValueError):  # a name that no module can have
        raise InputError(f"{text!r} names no module; {FITS}") from None
