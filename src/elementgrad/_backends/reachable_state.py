"""Finds what a recording left in the user's objects, and takes it out again.

While a function is recorded it computes tensors that have no numbers. It may put one into a cache: a dict, an
attribute, a global, an `lru_cache`. `ReachableState` saves the containers that a function can reach before it is
recorded. Those that hold a recorded tensor afterwards are restored; what else the function changed stays as it is.
"""

import gc
import sys
import sysconfig
import threading
from collections import ChainMap, UserDict, UserList, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache, partial
from inspect import getattr_static
from types import CellType, CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType, SimpleNamespace
from typing import Any
from weakref import CallableProxyType, ProxyType, WeakKeyDictionary, WeakValueDictionary

MAX_OBJECTS = 20_000
"""The most objects that are searched; of a function that reaches more, the rest is left out."""
MAX_ITEMS = 200_000
"""The most items of containers that are copied; a container that has more than are left is not looked into."""
MAX_DEPTH = 4
"""The levels of nested containers that are searched for recorded tensors."""
ATOMS = (
    *(str, bytes, int, float, complex, type(None), ModuleType, CodeType, range, slice),
    *(ProxyType, CallableProxyType),  # of an object that others hold; any look at a dead one is an error
)
HOLDERS = (SimpleNamespace, threading.local, WeakKeyDictionary, WeakValueDictionary, UserDict, UserList, ChainMap)
"""Objects of Python's own library that hold what the user puts into them."""
MISSING = object()

IsRecorded = Callable[[Any], bool]
Items = dict[Any, Any]


class ReachableState:
    """The containers, variables and caches that a function and its arguments can reach."""

    def __init__(self, *roots: Any):
        self.held_recorded = False
        """True once something was restored, as it held a recorded tensor."""
        self._seen: dict[int, Any] = {}
        self._saved: list[_Saved] = []
        self._items = 0
        self._package = _package_of(roots[0])
        ahead = list(roots)
        while ahead and len(self._seen) < MAX_OBJECTS:
            x = ahead.pop()
            if id(x) not in self._seen and not _is_atom(x) and not _is_array(x):
                self._seen[id(x)] = x  # an id is only its own while the object lives
                ahead.extend(self._look_into(x))  # `+=` leaves it to a wrapped tuple, such as Keras makes, which fails

    def restore(self, is_recorded: IsRecorded) -> None:
        """Restore all that holds a recorded tensor. It may be interrupted, and called again."""
        for saved in self._saved:
            if saved.restore(is_recorded):
                self.held_recorded = True

    def _look_into(self, x: Any) -> Iterable[Any]:
        """Save an object that can be changed, and return the objects that it holds."""
        if isinstance(x, (dict, list, deque, set, tuple, frozenset)):
            if self._items + len(x) > MAX_ITEMS:
                return ()  # data, and no cache; to copy it on every read would take longer than the read
            self._items += len(x)
        if isinstance(x, (dict, list, deque, set)):
            self._saved.append(_SavedContainer(x))
            return list(x.values()) if isinstance(x, dict) else list(x)
        if isinstance(x, (tuple, frozenset)):
            return x
        if isinstance(x, MethodType):
            return x.__self__, x.__func__
        if isinstance(x, partial):
            return x.func, x.args, x.keywords
        module = _module_of(x)
        users = _is_users_module(module) or _package(module) == self._package
        own = getattr(x, "__dict__", None)
        # `getattr_static` runs no code of the user's, whose `__getattr__` may do or raise anything.
        held: list[Any] = [getattr_static(x, "__wrapped__", None)] if users else []
        if isinstance(x, type):
            if users:
                self._saved.append(_SavedAttributes(x))
                held += dict(own or {}).values()
            return held
        if users and isinstance(x, FunctionType):
            names = set(_names_in(x.__code__))
            cells = x.__closure__ or ()
            self._saved += [_SavedGlobals(x.__globals__, names), *map(_SavedCell, cells)]
            held += [x.__globals__.get(name) for name in names]
            held += [*_contents(cells), x.__defaults__, x.__kwdefaults__]
        elif users and all(getattr_static(x, name, None) for name in ("cache_clear", "cache_info")):
            self._saved.append(_SavedCache(x))
        if isinstance(own, dict) and (users or isinstance(x, HOLDERS) or not _is_of_python(module)):
            self._saved.append(_SavedContainer(own))
            held += [*own.values(), type(x)]
        if users and any("__slots__" in vars(cls) for cls in type(x).__mro__):
            self._saved.append(_SavedAttributes(x))
            held += _attributes_of(x).values()
        return held


FRAMEWORKS = ("torch", "tensorflow", "keras", "jax", "jaxlib", "flax", "equinox", "transformers", "elementgrad")
"""Packages whose functions keep no tensors of the user's; the objects that they make may."""


def _module_of(x: Any) -> str:
    module = getattr(x, "__module__", None)
    return module if isinstance(module, str) else type(x).__module__


def _package(module: str) -> str:
    return module.partition(".")[0]


def _package_of(function: Any) -> str | None:
    package = _package(_module_of(function))
    return None if package in FRAMEWORKS or _is_of_python(package) else package


def _is_atom(x: Any) -> bool:
    return issubclass(type(x), ATOMS)


def _is_array(x: Any) -> bool:
    kind = type(x)
    return hasattr(kind, "shape") and hasattr(kind, "dtype")


@cache
def _is_of_python(module: str) -> bool:
    """Return True for a module of Python's own library."""
    return module == "builtins" or (_package(module) in sys.stdlib_module_names and module != "__main__")


@cache
def _is_users_module(name: str) -> bool:
    """Return True for a module that is neither of Python itself nor installed."""
    if _is_of_python(name) or _package(name) in FRAMEWORKS:
        return False
    file = getattr(sys.modules.get(name), "__file__", None)
    return file is None or not file.startswith(tuple(sysconfig.get_paths().values()))


def _names_in(code: CodeType) -> Iterator[str]:
    """Yield the names of globals and attributes in a function and in those that are defined inside of it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def _contents(cells: Iterable[CellType]) -> Iterator[Any]:
    for cell in cells:
        try:
            yield cell.cell_contents
        except ValueError:  # not filled yet
            continue


def _holds_recorded(x: Any, is_recorded: IsRecorded, depth: int = MAX_DEPTH) -> bool:
    if _is_atom(x):
        return False
    if is_recorded(x):
        return True
    if not depth:
        return False
    inside: Any = ()
    if isinstance(x, dict):
        inside = list(x.values())
    elif isinstance(x, (list, tuple, set, frozenset, deque)):
        inside = list(x)
    elif isinstance(getattr(x, "__dict__", None), dict):
        inside = list(vars(x).values())
    return any(_holds_recorded(each, is_recorded, depth - 1) for each in inside)


class _Saved:
    """Something that can be changed, as it was."""

    _undoing = False
    """True from the first undo on, which an interrupt may have left half done."""

    def changes(self) -> Iterable[Any]:
        """Return the values that it did not hold before."""
        raise NotImplementedError

    def undo(self) -> None:
        raise NotImplementedError

    def restore(self, is_recorded: IsRecorded) -> bool:
        self._undoing = self._undoing or any(_holds_recorded(x, is_recorded) for x in self.changes())
        if self._undoing:
            self.undo()
        return self._undoing


class _SavedContainer(_Saved):
    def __init__(self, container: Any):
        self._container = container
        self._before: Any = dict(container) if isinstance(container, dict) else list(container)

    def changes(self) -> Iterable[Any]:
        now, before = self._container, self._before
        if isinstance(now, dict):
            return [value for key, value in list(now.items()) if before.get(key, MISSING) is not value]
        known = set(map(id, before))
        return [value for value in list(now) if id(value) not in known]

    def undo(self) -> None:
        now, before = self._container, self._before
        if isinstance(now, dict):  # item by item, as it may be the attributes of an object that other threads use
            for key in [key for key in list(now) if key not in before]:
                now.pop(key, None)
            now.update({key: x for key, x in before.items() if now.get(key, MISSING) is not x})
            return
        now.clear()
        (now.update if isinstance(now, set) else now.extend)(before)


class _SavedGlobals(_Saved):
    """Some of the globals of a module."""

    def __init__(self, items: Items, names: Iterable[str]):
        self._items, self._before = items, {name: items.get(name, MISSING) for name in names}

    def _changed(self) -> Items:
        return {n: self._items.get(n, MISSING) for n, x in self._before.items() if self._items.get(n, MISSING) is not x}

    def changes(self) -> Iterable[Any]:
        return self._changed().values()

    def undo(self) -> None:
        for name in self._changed():
            if self._before[name] is MISSING:
                del self._items[name]
            else:
                self._items[name] = self._before[name]


class _SavedAttributes(_Saved):
    """The attributes of a class, or those of an object that are in slots."""

    def __init__(self, owner: Any):
        self._owner, self._before = owner, _attributes_of(owner)

    def _changed(self) -> Items:
        return {n: x for n, x in _attributes_of(self._owner).items() if self._before.get(n, MISSING) is not x}

    def changes(self) -> Iterable[Any]:
        return self._changed().values()

    def undo(self) -> None:
        kind: Any = type if isinstance(self._owner, type) else object  # a frozen object has a method that refuses
        for name in self._changed():
            if name in self._before:
                kind.__setattr__(self._owner, name, self._before[name])
            else:
                kind.__delattr__(self._owner, name)


def _attributes_of(x: Any) -> Items:
    """Return the attributes of a class, or those of another object that are in slots."""
    if isinstance(x, type):
        return dict(vars(x))
    found = {}
    for cls in type(x).__mro__:
        for name, slot in vars(cls).items() if "__slots__" in vars(cls) else ():
            if isinstance(slot, MemberDescriptorType):
                with suppress(AttributeError):  # not filled yet
                    found[name] = slot.__get__(x)
    return found


class _SavedCell(_Saved):
    """A variable that a function shares with the one around it."""

    def __init__(self, cell: CellType):
        self._cell, self._before = cell, list(_contents([cell]))

    def changes(self) -> Iterable[Any]:
        return [x for x in _contents([self._cell]) if not self._before or self._before[0] is not x]

    def undo(self) -> None:
        if self._before:
            self._cell.cell_contents = self._before[0]
        else:
            del self._cell.cell_contents


class _SavedCache(_Saved):
    """An `lru_cache`, which is emptied: its function fills it again with the same values."""

    def __init__(self, function: Any):
        self._function, self._before = function, function.cache_info()

    def changes(self) -> Iterable[Any]:
        if self._function.cache_info().misses == self._before.misses:
            return []
        # Its results are only seen by the garbage collector: one by one, or in a dict where their number has no limit.
        return gc.get_referents(self._function)

    def undo(self) -> None:
        self._function.cache_clear()
