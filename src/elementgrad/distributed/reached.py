"""All that a function is given or reads on its own, as bytes that are the same when the same program starts again.

Nothing here depends on addresses, on seeds of hashes or on the order of sets. What is the user's is walked through:
code, closures, globals that the code loads, attributes. Of objects of frameworks and of installed packages only data is
taken, since the rest (names, counters, caches) may be another in the next process.
"""

import argparse
import functools
import inspect
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path, PurePath
from types import FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from elementgrad import tree
from elementgrad.backends import Backend
from elementgrad.distributed import content
from elementgrad.distributed.content import ROUTINES, WORDS, Content

Found = Iterator[tuple[str, Content]]
"""Where something is, `"fit.data"`, and what."""
FOREIGN = {"elementgrad", "torch", "tensorflow", "keras", "jax", "jaxlib", "numpy", *sys.stdlib_module_names}
INSTALLED = {"site-packages", "dist-packages"}
PLAIN = (Enum, PurePath, range, np.dtype, np.generic)
BAGS = (SimpleNamespace, argparse.Namespace)
"""Types of Python's own whose content is the user's."""
APART = {"__init__", "__new__", "__post_init__", "__repr__", "__str__", "__eq__", "__hash__", "__reduce__"}
"""Methods that are there to make objects, and to look at them: what they made is seen itself."""
DEEPEST = 40
"""What is deeper inside of other things shows in the numbers that the function leads to."""


def told(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], backend: Backend) -> Found:
    """All that is given to a function or held by it; what has no bytes shows in the numbers that it leads to."""
    walk = _Walk(function, backend)
    for name, value in (*[(f"argument {i}", arg) for i, arg in enumerate(args)], *sorted(kwargs.items())):
        yield from walk.visit(value, name, True, 0)
    yield from walk.visit(function, "", True, 0)


class _Walk:
    """One walk, which comes by everything once."""

    def __init__(self, function: Any, backend: Backend):
        self._backend = backend
        self._package = _package(function)
        self._first: dict[int, tuple[str, Any]] = {}  # with what was found, so that no other gets its id

    def visit(self, value: Any, path: str, own: bool, depth: int) -> Found:
        """What is at a path. `own` says whether the user has put it there: then words count too."""
        found = content.of_tensor(value)
        if found is not None:
            yield from [(path, each) for each in found]
            return
        word = _word(value)
        if word is not None or isinstance(value, ModuleType) or depth > DEEPEST:
            if own and word is not None:
                yield path, word
            return
        if id(value) in self._first:
            if own:
                yield path, f"that of {self._first[id(value)][0]}".encode()
            return
        self._first[id(value)] = path, value
        if own and not self._owns(content.home(value)):  # what is the user's is known by what it does
            yield path, content.of_kind(value)
        yield from self._opened(value, path, own, depth + 1)

    def _opened(self, value: Any, path: str, own: bool, depth: int) -> Found:
        if isinstance(value, (dict, *BAGS)):
            yield from self._items(value if isinstance(value, dict) else vars(value), path, own, depth)
        elif isinstance(value, (list, tuple, deque)):
            for number, item in enumerate(value):
                yield from self.visit(item, f"{path}[{number}]", own, depth)
        elif isinstance(value, functools.partial):
            yield from self.visit(value.func, path, own, depth)
            yield from self.visit(value.args, _joined(path, "args"), True, depth)
            yield from self.visit(value.keywords, _joined(path, "keywords"), True, depth)
        elif isinstance(value, (MethodType, classmethod, staticmethod)):
            yield from self.visit(value.__func__, path, own, depth)
            yield from self.visit(getattr(value, "__self__", None), _joined(path, "self"), own, depth)
        elif isinstance(value, (property, functools.cached_property)):
            yield from self.visit(getattr(value, "fget", None) or getattr(value, "func", None), path, own, depth)
        elif isinstance(value, FunctionType):
            yield from self._function(value, path, depth)
        elif isinstance(value, ROUTINES):
            yield from self.visit(content.attribute(value, "__self__"), _joined(path, "self"), False, depth)
        elif isinstance(value, type):
            yield from self._class(value, path, depth)
        else:
            yield from self._object(value, path, own, depth)

    def _items(self, value: dict[Any, Any], path: str, own: bool, depth: int) -> Found:
        items = list(value.items())
        if all(isinstance(key, WORDS) for key in value):
            items.sort(key=lambda item: content.of_word(item[0]))  # they may have come out of a set
        for number, (key, item) in enumerate(items):
            place = repr(key) if isinstance(key, WORDS) else number
            yield from self.visit(item, f"{path}[{place}]", own, depth)

    def _function(self, function: FunctionType, path: str, depth: int) -> Found:
        own, code = self._owns(content.home(function)), function.__code__
        if own:
            yield _joined(path, "code"), content.of_code(code)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                inside = cell.cell_contents
            except ValueError:  # not filled yet
                continue
            yield from self.visit(inside, _joined(path, name), own, depth)
        defaults = (*(function.__defaults__ or ()), *sorted((function.__kwdefaults__ or {}).items()))
        if defaults:
            yield from self.visit(defaults, _joined(path, "defaults"), own, depth)
        for name, value in sorted(vars(function).items()):  # what it wraps, above all
            yield from self.visit(value, _joined(path, "" if name == "__wrapped__" else name), own, depth)
        for name in content.loaded(code) if own else ():
            if name in function.__globals__:
                yield from self._global(function.__globals__[name], content.names(code), _joined(path, name), depth)

    def _global(self, value: Any, named: set[str], path: str, depth: int) -> Found:
        """What stands in a module; of a module of the user's, what the code has the name of."""
        if not isinstance(value, ModuleType):
            yield from self.visit(value, path, True, depth)
        elif self._owns(value.__name__):
            for name in sorted(named & vars(value).keys()):
                yield from self.visit(vars(value)[name], _joined(path, name), True, depth)

    def _class(self, kind: type, path: str, depth: int) -> Found:
        for each in kind.__mro__:
            for name, value in sorted(vars(each).items()) if self._owns(each.__module__) else ():
                if name not in APART and (not name.startswith("__") or inspect.isfunction(value)):
                    yield from self.visit(value, _joined(path, name), True, depth)

    def _object(self, value: Any, path: str, own: bool, depth: int) -> Found:
        if callable(value) and self._backend.models(value):
            model = self._backend.model(value)
            parts = [(_joined(path, name), part) for name, part in model.parts()]
            if parts:
                self._first.update({id(part): (name, part) for name, part in parts})
                for name, kind, tensor in model.held():
                    yield from self.visit(tensor, f"{kind} {_joined(path, name)}", True, depth)
                for name, part in parts:
                    yield from self._attributes(part, name, depth)
                return
        if self._owns(content.home(value)):
            yield from self._attributes(value, path, depth)
            return
        wrapped = content.attribute(value, "__wrapped__")
        if wrapped is not None:
            yield from self.visit(wrapped, path, own, depth)
        known = tree.opened(value)
        if known is not None:
            for key, branch in zip(*known[:2], strict=True):
                yield from self.visit(branch, path if key is None else _joined(path, str(key)), False, depth)
        elif own:  # and no deeper: what a package has inside of its objects is its own
            for name, inside in sorted(content.held(value).items()):
                yield from self.visit(inside, _joined(path, name), False, depth)

    def _attributes(self, value: Any, path: str, depth: int) -> Found:
        """What an object has, and what its class does. What a foreign base has put there is left out."""
        mine = [each for each in type(value).__mro__ if self._owns(each.__module__)]
        found = content.held(value)
        if len(mine) < len(type(value).__mro__) - 1:
            functions = [each for kind in mine for each in vars(kind).values() if inspect.isfunction(each)]
            named = {name for function in functions for name in content.names(function.__code__)}
            named |= {name for name in found if name[:1] != "_" and isinstance(found[name], (bool, int, float))}
            found = {name: found[name] for name in found if name in named}
        if mine:
            yield from self.visit(type(value), _joined(path, type(value).__name__), True, depth)
        for name in sorted(found):
            yield from self.visit(found[name], _joined(path, name), True, depth)

    def _owns(self, module: str | None) -> bool:
        """Whether a module is the user's: no framework's, nor installed, unless the function is of that package."""
        package = (module or "builtins").partition(".")[0]
        if package in FOREIGN:
            return False
        file = content.attribute(sys.modules.get(module or ""), "__file__") or ""
        return package in ("__main__", self._package) or not INSTALLED & set(Path(os.path.normcase(file)).parts)


def _word(value: Any) -> bytes | None:
    """What stands for itself; None for what has to be opened."""
    if value is None or isinstance(value, WORDS):
        return content.of_word(value)
    if isinstance(value, PLAIN):
        return f"{type(value).__qualname__} {value!s}".encode()
    if isinstance(value, (set, frozenset)):
        return content.of_set(value)
    if isinstance(value, (list, tuple, deque)) and set(map(type, value)) <= tree.SIMPLE:
        return f"{type(value).__qualname__} {list(value)}".encode()
    return None


def _package(function: Any) -> str:
    """The package that a function is of, behind parts, methods and wrappers."""
    for _ in range(DEEPEST):
        inner = function.func if isinstance(function, functools.partial) else content.attribute(function, "__wrapped__")
        if isinstance(function, MethodType):
            inner = function.__self__
        if inner is None:
            break
        function = inner
    return str(content.attribute(function, "__module__")).partition(".")[0]


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name else path or name
