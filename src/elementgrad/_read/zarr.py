"""One block of a Jacobian, as NumPy has it: read in the same way here and by a worker.

What single things are, as bytes that are the same in every process: words, tensors, code; and what objects hold.

All that a function is given or reads on its own, as bytes that are the same when the same program starts again.

Nothing here depends on addresses, on seeds of hashes or on the order of sets. What is the user's is walked through:
code, closures, globals that the code loads, attributes. Of objects of frameworks and of installed packages only data is
taken, since the rest (names, counters, caches) may be another in the next process.


By what a later call knows that an array on disk is of the same Jacobian.

A Jacobian on disk as a Zarr array, written block by block: a chunk that is there, and sound, is done.

Each chunk ends with a checksum of Zarr's crc32c codec. A call that goes on with an array reads the chunks that are
there once, removes those that do not decode, and computes them again with the missing ones.
"""

import argparse
import dis
import functools
import hashlib
import inspect
import json
import os
import re
import secrets
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from itertools import chain
from pathlib import Path, PurePath
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MethodDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    SimpleNamespace,
    WrapperDescriptorType,
)
from typing import Any

import numpy as np

from elementgrad._backends import registry
from elementgrad._backends.base import Backend
from elementgrad._names import pytree
from elementgrad._optional import require
from elementgrad._place.selection import Selection
from elementgrad._read.jacobian import Jacobian
from elementgrad._read.plan import BlockLayout, Plan
from elementgrad._read.sweeps import PRECISION
from elementgrad.errors import OptionError, TracedError, WorkerError, quoted

Tensor = Any


def part(jacobian: Jacobian, plan: Plan, layout: BlockLayout, number: int) -> np.ndarray:
    """The values of a block, (rows, columns), after the examples if there is a batch."""
    rows, columns = (jacobian._select(..., side) for side in (jacobian._of, jacobian._wrt))
    down, right = layout.bounds(number)
    if layout.mode == "reverse":
        rows = Selection.at_flat(rows.flat().reshape(-1)[down], rows.of)
    else:
        columns = Selection.at_flat(columns.flat().reshape(-1)[right], columns.of)
    coloured, reader = jacobian._block(rows, columns), jacobian._reader
    block = coloured.read(reader) if coloured else reader.part(plan, rows, columns)
    return numbers(jacobian._shaped(block, (rows.size, columns.size)), jacobian._backend)


def numbers(x: Tensor, backend: Backend) -> np.ndarray:
    """The values of a tensor; a dtype that NumPy lacks comes as float32, which holds it exactly."""
    values = backend.to_numpy(x)
    if values is None:
        raise TracedError(
            "blocks are numbers, and these are traced, so nobody knows them; read blocks outside of what is compiled"
        )
    return values


Content = bytes | memoryview
WORDS = (bool, int, float, complex, str, bytes)
ROUTINES = (BuiltinFunctionType, MethodDescriptorType, MethodWrapperType, WrapperDescriptorType)
"""Functions and methods of C."""


def of_tensor(value: Any) -> list[Content] | None:
    """An array, or a tensor of any framework; None for anything else."""
    if isinstance(value, np.ndarray):
        head = f"{value.dtype} {value.shape}".encode()
        return [head] if value.dtype.hasobject else [head, _bytes(value)]
    owner = registry.backend_of(value)
    if owner is None:
        return None
    head = f"{owner.dtype(value)} {tuple(owner.shape(value))}".encode()
    if owner.kind(value) == "o":
        return [head]
    try:
        values = owner.read(value) if owner.kind(value) in "bi" else numbers(value, owner)
    except Exception:  # one without numbers, such as PyTorch's on its device "meta"
        values = None
    return [head] if values is None else [head, _bytes(values)]


def of_word(value: Any) -> bytes:
    """A number, a string, or None."""
    base: Any = next((base for base in WORDS if isinstance(value, base)), None)
    return b"None" if base is None else f"{base.__name__} {base.__repr__(value)}".encode()


def of_set(value: set[Any] | frozenset[Any]) -> bytes:
    """The words in a set, in an order of their own, and how many members it has."""
    words = sorted(of_word(member) for member in value if isinstance(member, WORDS))
    return str(len(value)).encode() + b" ".join(words)


def of_kind(value: Any) -> bytes:
    """What something is."""
    named = value if isinstance(value, (type, FunctionType, *ROUTINES)) else type(value)
    return f"{attribute(named, '__module__')} {attribute(named, '__qualname__')}".encode()


def of_code(code: CodeType) -> bytes:
    """What a function does: nothing of where it stands, or of the names of its variables."""
    constants = [of_code(each) if isinstance(each, CodeType) else _constant(each) for each in code.co_consts]
    return b"\n".join([code.co_code, " ".join(code.co_names).encode(), *constants])


def home(value: Any) -> str | None:
    """The module that something was made in; a wrapper has copied the name of another."""
    if isinstance(value, FunctionType):
        return str(value.__globals__.get("__name__"))
    module = attribute(value if isinstance(value, (type, *ROUTINES)) else type(value), "__module__")
    return module if isinstance(module, str) else None


def loaded(code: CodeType) -> list[str]:
    """The globals that a function loads, also in functions inside of it."""
    steps = [step for each in _codes(code) for step in dis.get_instructions(each)]
    return sorted({step.argval for step in steps if step.opname == "LOAD_GLOBAL"})


def names(code: CodeType) -> set[str]:
    """The globals and attributes that a function names."""
    return {name for each in _codes(code) for name in each.co_names}


def held(value: Any) -> dict[str, Any]:
    """The attributes of an object, in slots or not."""
    slots = [name for kind in type(value).__mro__ for name in _slots(kind)]
    found = {name: attribute(value, name) for name in slots if name != "__dict__"}
    return found | dict(attribute(value, "__dict__") or {})


def attribute(value: Any, name: str) -> Any:
    """An attribute, or None, whatever an object of somebody else's does when it is asked."""
    try:
        return getattr(value, name, None)
    except Exception:
        return None


def _bytes(values: np.ndarray) -> memoryview:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8).data


def _constant(value: Any) -> bytes:
    return of_set(value) if isinstance(value, frozenset) else repr(value).encode()


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _slots(kind: type) -> list[str]:
    slots = vars(kind).get("__slots__", ())
    private = f"_{kind.__name__.lstrip('_')}"
    listed = [slots] if isinstance(slots, str) else list(slots)
    return [f"{private}{name}" if name.startswith("__") and not name.endswith("__") else name for name in listed]


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
    walk = _ContentWalk(function, backend)
    for name, value in (*[(f"argument {i}", arg) for i, arg in enumerate(args)], *sorted(kwargs.items())):
        yield from walk.visit(value, name, True, 0)
    yield from walk.visit(function, "", True, 0)


class _ContentWalk:
    """One walk, which comes by everything once."""

    def __init__(self, function: Any, backend: Backend):
        self._backend = backend
        self._package = _package(function)
        self._first: dict[int, tuple[str, Any]] = {}  # with what was found, so that no other gets its id

    def visit(self, value: Any, path: str, own: bool, depth: int) -> Found:
        """What is at a path. `own` says whether the user has put it there: then words count too."""
        found = of_tensor(value)
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
        if own and not self._owns(home(value)):  # what is the user's is known by what it does
            yield path, of_kind(value)
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
            yield from self.visit(attribute(value, "__self__"), _joined(path, "self"), False, depth)
        elif isinstance(value, type):
            yield from self._class(value, path, depth)
        else:
            yield from self._object(value, path, own, depth)

    def _items(self, value: dict[Any, Any], path: str, own: bool, depth: int) -> Found:
        items = list(value.items())
        if all(isinstance(key, WORDS) for key in value):
            items.sort(key=lambda item: of_word(item[0]))  # they may have come out of a set
        for number, (key, item) in enumerate(items):
            place = repr(key) if isinstance(key, WORDS) else number
            yield from self.visit(item, f"{path}[{place}]", own, depth)

    def _function(self, function: FunctionType, path: str, depth: int) -> Found:
        own, code = self._owns(home(function)), function.__code__
        if own:
            yield _joined(path, "code"), of_code(code)
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
        for name in loaded(code) if own else ():
            if name in function.__globals__:
                yield from self._global(function.__globals__[name], names(code), _joined(path, name), depth)

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
        if callable(value) and self._backend.names.is_model(value):
            model = self._backend.names.model(value)
            parts = [(_joined(path, name), part) for name, part in model.modules()]
            if parts:
                self._first.update({id(part): (name, part) for name, part in parts})
                for name, kind, tensor in model.named_tensors():
                    yield from self.visit(tensor, f"{kind} {_joined(path, name)}", True, depth)
                for name, part in parts:
                    yield from self._attributes(part, name, depth)
                return
        if self._owns(home(value)):
            yield from self._attributes(value, path, depth)
            return
        wrapped = attribute(value, "__wrapped__")
        if wrapped is not None:
            yield from self.visit(wrapped, path, own, depth)
        known = pytree.flatten_one_level(value)
        if known is not None:
            for key, branch in zip(*known[:2], strict=True):
                yield from self.visit(branch, path if key is None else _joined(path, str(key)), False, depth)
        elif own:  # and no deeper: what a package has inside of its objects is its own
            for name, inside in sorted(held(value).items()):
                yield from self.visit(inside, _joined(path, name), False, depth)

    def _attributes(self, value: Any, path: str, depth: int) -> Found:
        """What an object has, and what its class does. What a foreign base has put there is left out."""
        mine = [each for each in type(value).__mro__ if self._owns(each.__module__)]
        found = held(value)
        if len(mine) < len(type(value).__mro__) - 1:
            functions = [each for kind in mine for each in vars(kind).values() if inspect.isfunction(each)]
            named = {name for function in functions for name in names(function.__code__)}
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
        file = attribute(sys.modules.get(module or ""), "__file__") or ""
        return package in ("__main__", self._package) or not INSTALLED & set(Path(os.path.normcase(file)).parts)


def _word(value: Any) -> bytes | None:
    """What stands for itself; None for what has to be opened."""
    if value is None or isinstance(value, WORDS):
        return of_word(value)
    if isinstance(value, PLAIN):
        return f"{type(value).__qualname__} {value!s}".encode()
    if isinstance(value, (set, frozenset)):
        return of_set(value)
    if isinstance(value, (list, tuple, deque)) and set(map(type, value)) <= pytree.SIMPLE:
        return f"{type(value).__qualname__} {list(value)}".encode()
    return None


def _package(function: Any) -> str:
    """The package that a function is of, behind parts, methods and wrappers."""
    for _ in range(DEEPEST):
        inner = function.func if isinstance(function, functools.partial) else attribute(function, "__wrapped__")
        if isinstance(function, MethodType):
            inner = function.__self__
        if inner is None:
            break
        function = inner
    return str(attribute(function, "__module__")).partition(".")[0]


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name else path or name


VERSION = 2
"""Of what is compared: arrays of another are not gone on with."""
NEAR = 0.75
"""Numbers are the same where they differ by less than this power of the precision: other threads sum otherwise."""
GROUPS = 256
"""In so many groups numbers are compared, so that a few others among many are seen."""
NAMED = 200
"""Of so many things it is noted one by one what they were."""


@dataclass(frozen=True)
class Fingerprint:
    """What a Jacobian is about: exactly what was asked and given, and the function by numbers that it leads to."""

    digest: str
    parts: Mapping[str, str]
    """The same for the parts of it by their names, to tell which differs."""
    sketch: Sequence[Sequence[float]]
    """Of the value and of what sweeps gave: the largest number, and in its units a weighted sum and norm per group."""
    precision: float

    def to_attributes(self) -> dict[str, Any]:
        """As an array on disk has it."""
        return {"question": self.digest, "parts": dict(self.parts), "sketch": [list(each) for each in self.sketch]}

    def differing(self, other: Mapping[str, Any]) -> list[str] | None:
        """What is another in the attributes of an array: names, as far as they are known; None if nothing is."""
        if other.get("question") != self.digest:
            theirs = other.get("parts", {})
            return sorted(name for name in {*self.parts, *theirs} if self.parts.get(name) != theirs.get(name))
        near, sketch = self.precision**NEAR, other["sketch"]
        same = len(sketch) == len(self.sketch) and all(
            _alike(mine, theirs, near) for mine, theirs in zip(self.sketch, sketch, strict=True)
        )
        return None if same else ["numbers that the function leads to"]


def fingerprint(jacobian: Jacobian, layout: BlockLayout, swept: np.ndarray | None) -> Fingerprint:
    """Of a Jacobian that is cut into these blocks, with what sweeps from generic seeds gave."""
    backend, question = jacobian._backend, jacobian._question
    of, wrt = jacobian._of, jacobian._wrt
    asked: dict[str, Any] = {
        "framework": backend.name,
        "of": of.name,
        "wrt": wrt.name,
        "dtype": backend.dtype(wrt.tensor),
    }
    asked |= {"shape": layout.shape, "blocks": [layout.chunks, layout.mode], "unconnected": jacobian._zero}
    found: list[tuple[str, Content]] = [(name, json.dumps(each).encode()) for name, each in asked.items()]
    found += [("elements", places.tobytes()) for places in jacobian._places()]
    digests: dict[str, Any] = {}
    given = () if question is None else told(question.function, question.args, question.kwargs, backend)
    for path, content in chain(found, given):
        digest = digests.setdefault(_name(path), hashlib.sha256())
        digest.update(f"\n{path}:{len(content)}:".encode())
        digest.update(content)
    parts = {name: digest.hexdigest() for name, digest in digests.items()}
    whole = hashlib.sha256(json.dumps([VERSION, parts]).encode()).hexdigest()
    named = {name: parts[name][:12] for name in list(parts)[:NAMED]}
    sketch = [list(_sketch(values)) for values in (numbers(jacobian.value, backend), swept) if values is not None]
    precision = max(PRECISION[min(8, backend.itemsize(end.tensor))] for end in (of, wrt))
    return Fingerprint(whole, named, sketch, precision)


def _name(path: str) -> str:
    """The first two words of a path: `fit.data` of `fit.data[3].x`."""
    found = re.match(r"[^.\[]*(\.[^.\[]+)?", path)
    return (found[0] if found else "") or "function"


def _sketch(values: np.ndarray) -> Iterator[float]:
    """The largest number, and for each group, in units of it, a sum with generic weights and its norm."""
    flat = np.ascontiguousarray(values).reshape(-1)
    flat = flat.view(flat.real.dtype) if np.iscomplexobj(flat) else flat
    flat = np.nan_to_num(flat.astype(np.float64), nan=3.0, posinf=5.0, neginf=-5.0)
    largest = float(np.abs(flat).max(initial=0.0))
    yield largest
    random = np.random.default_rng(0)
    for group in np.array_split(flat, max(1, min(GROUPS, flat.size))):
        signs = np.where(random.random(group.size) < 0.5, -1.0, 1.0)
        weighted = random.uniform(0.5, 1.5, group.size) * signs * (group / (largest or 1.0))
        yield float(weighted.sum())
        yield float(np.linalg.norm(weighted))


def _alike(mine: Sequence[float], other: Sequence[float], near: float) -> bool:
    """Errors of single numbers add up as their norm does; each may be as large as one of the largest number."""
    if len(mine) != len(other) or abs(mine[0] - other[0]) > near * (mine[0] + other[0]):
        return False
    (sums, norms), (others, sizes) = (np.asarray(each[1:], np.float64).reshape(-1, 2).T for each in (mine, other))
    return bool((np.abs(sums - others) <= near * (norms + sizes + 1)).all())


KEY = "elementgrad"
"""Where in the attributes of an array it says which Jacobian it holds."""
MOST = 4
"""So many names of what differs are told."""
PATIENCE = 10.0
"""Seconds in which another process makes an array that it has begun to make."""


def check_out(out: Any) -> Path:
    """A path at which an array can be made or gone on with, before anything is computed for it."""
    if not isinstance(out, (str, os.PathLike)) or not str(out) or "://" in str(out):
        raise OptionError(f'out={quoted(out)} is no path; give the name of a directory, such as "j.zarr"')
    require("zarr", "out=", "distributed")
    path = Path(os.path.abspath(out))
    if path.is_file():
        raise OptionError(f'{out} is a file; give the name of a directory, such as "j.zarr"')
    if not path.parent.is_dir():
        raise OptionError(f"{out}: there is no directory {path.parent}; make it first")
    left = [name for name in (os.listdir(path) if path.is_dir() else []) if not name.endswith(".partial")]
    if left and "zarr.json" not in left:
        raise OptionError(f"{out} is a directory that holds something else; give another name")
    return path


class Store:
    """The array, and which of its chunks are there. Zarr renames a chunk into place once it is written."""

    def __init__(self, path: Path, layout: BlockLayout, array: Any):
        self.path = path
        self.array = array
        self._layout = layout

    @property
    def mark(self) -> str:
        """By what a worker knows that a path leads to this array, and to no other on a disk of its own."""
        return str(self.array.attrs[KEY]["mark"])

    @classmethod
    def at(cls, path: Path, layout: BlockLayout, dtype: np.dtype, name: str, asked: Fingerprint) -> "Store":
        """The array of a Jacobian: a new one, or the one there if it is of the same Jacobian."""
        if not (path / "zarr.json").exists():
            told: Any = {"jacobian": name, "mark": secrets.token_hex(8), "complete": False}
            told |= asked.to_attributes()
            try:
                _make(path, layout, dtype, {KEY: told})
            except OSError as error:
                raise OptionError(f"{path} cannot be made: {error}; give another name") from error
        try:
            store = cls(path, layout, _opened(path))
            told = store.array.attrs[KEY]
        except (KeyError, OSError, ValueError):  # a group, or an array of somebody else's
            raise OptionError(f"{path} holds something else; give another name") from None
        differing = asked.differing(told)
        if differing is not None:
            what = f": what differs is {', '.join(differing[:MOST])}" if differing else ""
            raise OptionError(
                f"{path} holds {told['jacobian']} of another function, point, plan or budget; give another name, or "
                f"remove it{what}"
            )
        if (store.array.shape, store.array.chunks, store.array.dtype) != (layout.shape, layout.chunks, dtype):
            raise OptionError(f"{path} is damaged: its zarr.json describes another array; remove it")
        return store

    @classmethod
    def shared(cls, path: Path, layout: BlockLayout, mark: str) -> "Store | None":
        """The same array in another process; None if that does not see it."""
        try:
            store = cls(path, layout, _opened(path))
            return store if store.mark == mark else None
        except (ImportError, KeyError, OSError, ValueError):
            return None

    def remove_damaged(self) -> None:
        """Remove the chunks that do not decode, so that they count as missing from now on."""
        damaged = [number for number in range(len(self._layout)) if not self._sound(number)]
        for number in damaged:
            self._chunk(number).unlink(missing_ok=True)
        if self.missing():  # a process that is killed before they are there again leaves an array that says so
            self._tell(complete=False)

    def missing(self) -> list[int]:
        """The blocks that are not there yet."""
        return [number for number in range(len(self._layout)) if not self._done(self._chunk(number))]

    def write(self, number: int, values: np.ndarray) -> None:
        """Put a block where it belongs."""
        try:
            self.array[self._layout.region(number)] = values.reshape(self._layout.sizes(number))
        except OSError as error:
            raise WorkerError(
                f"a block cannot be written to {self.path}: {error}; mend that, and the same call goes on"
            ) from error

    def finish(self) -> Any:
        """Say that all is there, if it is, clear away what killed processes left, and give the array to read."""
        import zarr

        missing = len(self.missing())
        if missing:
            raise WorkerError(
                f"{missing} blocks were written and are not in {self.path}; see whether somebody else clears it, and "
                "call again"
            )
        if not self.array.attrs[KEY]["complete"]:
            for left in self._partial():
                left.unlink(missing_ok=True)
            self._tell(complete=True)
        return zarr.open_array(str(self.path), mode="r")

    def _tell(self, complete: bool) -> None:
        told: Any = self.array.attrs[KEY]
        if told["complete"] != complete:
            self.array = self.array.update_attributes({KEY: dict(told) | {"complete": complete}})

    def _sound(self, number: int) -> bool:
        """Return whether a chunk decodes, or is not there at all."""
        if not self._done(self._chunk(number)):
            return True
        try:
            self.array[self._layout.region(number)]
        except OSError as error:
            raise OptionError(f"{self._chunk(number)} cannot be read: {error}; mend that, or remove it") from error
        except Exception:  # each codec raises what it likes
            return False
        return True

    @staticmethod
    def _done(chunk: Path) -> bool:
        """Whether a chunk is there; a machine that lost power may have left an empty one."""
        try:
            return chunk.stat().st_size > 0
        except FileNotFoundError:
            return False

    def _chunk(self, number: int) -> Path:
        return self.path / self.array.metadata.encode_chunk_key(self._layout.coordinates(number))

    def _partial(self) -> Iterator[Path]:
        return self.path.glob("c/**/*.partial")


def _make(path: Path, layout: BlockLayout, dtype: np.dtype, attributes: dict[str, Any]) -> None:
    """Make an array without chunks, unless another call that begins at once is the one to make it."""
    import zarr
    from zarr.codecs import Crc32cCodec, ZstdCodec

    path.mkdir(exist_ok=True)
    fill: Any = np.array(np.nan, dtype)[()]  # what is not there yet is no number
    options: Any = {"shape": layout.shape, "chunks": layout.chunks, "dtype": dtype, "fill_value": fill}
    with tempfile.TemporaryDirectory(dir=path, suffix=".partial") as beside:
        codecs = [ZstdCodec(), Crc32cCodec()]  # the checksum last, so that nothing damaged is decompressed
        zarr.create_array(store=beside, compressors=codecs, attributes=attributes, **options)
        made, target = Path(beside, "zarr.json"), path / "zarr.json"
        with suppress(FileExistsError):
            try:
                os.link(made, target)  # only to a name that is free
            except FileExistsError:
                raise
            except (OSError, AttributeError):  # a disk or system without hard links
                _move(made, target)


def _move(made: Path, target: Path) -> None:
    """Rename a file to a name that is free. Of several processes the one that makes a file beside it does so."""
    claim = target.with_name(f"{target.name}.partial")
    until = time.monotonic() + PATIENCE
    while not target.exists():
        try:
            claim.touch(exist_ok=False)
        except FileExistsError:
            if time.monotonic() > until:
                raise TimeoutError(f"a process that was to make it has left {claim.name} behind; remove it") from None
            time.sleep(0.01)
            continue
        try:
            if not target.exists():
                os.replace(made, target)
        finally:
            claim.unlink()


def _opened(path: Path) -> Any:
    import zarr

    with zarr.config.set({"array.write_empty_chunks": True}):  # a chunk that is not there is not done
        return zarr.open_array(str(path), mode="r+")
