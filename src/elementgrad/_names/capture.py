"""Captures of named values on their way through a function: tags, the results of layers, the output.

A thread has a stack of open captures. `eg.tag`, and the hooks that backends put on layers, hand every named value to
the innermost one, and the function goes on with what it returns.

A run is stopped at the last value that was asked for, so that nothing behind it is computed. `name#k` is one value, and
once it is there nothing that follows can change the answer. A bare name is an error where its layer is called twice,
which only a run to the end can show. So the names that a complete run has computed once are remembered for the model
(`SingleCalls`), and a later run of the same model, by arguments of the same shapes, stops there. The run is left by an
exception that `except Exception` does not catch. Where the user's code catches it all the same, the values that were
captured before are right, and later runs of this model are not stopped.
"""

import itertools
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from elementgrad._backends import registry
from elementgrad._backends.base import Backend
from elementgrad._cleanup import defer, push, scope
from elementgrad._names import pytree
from elementgrad._names.arguments import positional_parameters
from elementgrad._names.backend import GIVEN, NamesBackend
from elementgrad.errors import PlaceError

Tensor = Any
Value = Any
"""A tensor, or a tuple, list or dict of them."""
Transform = Callable[[Tensor], Tensor]
MARKS = "#:[]()\n"
"""Characters that no tag may have: calls are counted behind a "#", parts named behind a ":", elements in brackets."""


class _CaptureState(threading.local):
    captures: tuple[tuple["Capture | None", Callable[[str], bool]], ...] = ()


_local = _CaptureState()
# The types of tensors whose tags do nothing without a capture, and so cost nothing. Neither this
# nor `MARKS` is a set: the compiler of PyTorch looks into no set in version 2.8.
_never_staged: tuple[type, ...] = ()
_no_capture = nullcontext()
_open_entries: list[object] = []  # captures open in any thread; a compiler of Python code checks for nothing if any are


def tag(value: Value, name: str) -> Value:
    """Give a value inside a function a name, by which `of` and `wrt` can ask for it.

    The second tensor that gets a name is `name#1`, and the first is `name#0` then. Parts of a tuple, list or dict are
    `name:0` or `name:key`. A tag costs nothing while no read asks for it, and stays in compiled code.

    Args:
        value: a tensor, or a tuple, list or dict of tensors.
        name: the name, a str without brackets, parentheses, `#` and `:`.

    Returns:
        The value, to be used from there on: for a read of that name, the tensors before and after the tag are two
        different ones.

    >>> import torch, elementgrad as eg
    >>> def f(x):
    ...     hidden = eg.tag(x ** 2, "hidden")
    ...     return hidden.sum() * 3
    >>> eg.grad(f, torch.tensor([1.0, 2.0]), wrt="hidden")
    tensor([3., 3.])
    >>> eg.grad(f, torch.tensor([1.0, 2.0]), of="hidden[1]")
    tensor([0., 4.])
    """
    global _never_staged
    if not isinstance(name, str) or not name or (not name.isidentifier() and any(mark in name for mark in MARKS)):
        raise PlaceError(f"{name!r} is not a name for a tag; give a str without brackets, parentheses, '#' and ':'")
    if not _open_entries and type(value) in _never_staged:
        return value
    if _open_entries:
        capture, here = _innermost()
        if capture is not None and here(name):
            return capture.capture("activation", name, value)
    backend = registry.backend_of(value)
    if backend is None:
        return _stage_parts(value, name)
    if type(backend.names).name_in_graph is NamesBackend.name_in_graph and backend.caches_type(type(value)):
        _never_staged = (*_never_staged, type(value))
    return backend.names.name_in_graph(value, name)


def _stage_parts(value: Value, name: str) -> Value:
    """Name the tensors of a value in the traced program; `Capture.capture_staged` reads these names."""
    leaves = [(key[1:], registry.backend_of(leaf)) for key, leaf in pytree.named_leaves(value, "")]
    count = len([backend for _, backend in leaves if backend is not None])
    if not count:
        registry.require_backend(value)  # raises, and says what fits
    parts, numbers = iter(leaves), itertools.count()

    def stage(leaf: Any) -> Any:
        key, backend = next(parts)
        if backend is None:
            return leaf
        return backend.names.name_in_graph(leaf, f"{name}:{next(numbers)}/{count}:{key}")

    return pytree.map_tree(value, stage)


# Where runs stop

MAX_SIGNATURES = 16
"""Shapes of arguments for which the names of one model are remembered."""


class RunStopped(BaseException):
    """Raised to leave a run once all requested values are captured."""


@dataclass(frozen=True)
class StopRule:
    """The names at which a run may stop."""

    single: Collection[str]
    """The names of one value: they say which call, or an earlier complete run has computed them once."""
    allowed: Callable[[], bool]
    """Returns True if the code that is running now can be left here."""


@dataclass
class SingleCalls:
    """The names that complete runs of one model have computed once."""

    structure: Hashable
    names: dict[Hashable, set[str]] = field(default_factory=dict)
    """By the method that ran and the signature of its arguments."""
    stops: bool = True
    """False once the model has caught the exception that leaves a run."""


_models: dict[int, tuple[weakref.ref[Any], SingleCalls]] = {}
"""By the id of the model, as models need not be hashable."""


def single_calls(model: Any, structure: Hashable) -> SingleCalls:
    """Return what is remembered of a model; nothing if its structure is not what it was."""
    known = _models.get(id(model))
    if known is not None and known[0]() is model:
        if known[1].structure == structure:
            return known[1]
        stops = known[1].stops
    else:
        stops = True
    key = id(model)
    memory = SingleCalls(structure, stops=stops)
    _models[key] = weakref.ref(model, lambda _: _models.pop(key, None)), memory
    return memory


def remember(memory: SingleCalls, call: Hashable, names: Iterable[str]) -> None:
    """Note names that a complete run has computed once."""
    if call not in memory.names and len(memory.names) >= MAX_SIGNATURES:
        memory.names.pop(next(iter(memory.names)), None)
    memory.names.setdefault(call, set()).update(names)


def signature(leaves: Iterable[tuple[str, Any]]) -> Hashable:
    """Return what the calls of layers may depend on in some arguments: shapes, dtypes and plain values."""
    parts: list[Hashable] = []
    for name, leaf in leaves:
        shape = getattr(leaf, "shape", None)
        if type(leaf) in pytree.SIMPLE:
            parts.append((name, type(leaf), leaf))
        elif shape is not None and (registry.backend_of(leaf) is not None or type(leaf).__module__ == "numpy"):
            parts.append((name, tuple(shape), str(leaf.dtype)))
        else:
            parts.append((name, id(leaf)))
    return tuple(parts)


def plain_attributes(values: Any) -> Hashable:
    """Return the numbers, flags and texts among the attributes of a module, on which its code may branch."""
    return tuple([(name, value) for name, value in values.items() if type(value) in pytree.SIMPLE])


# Captures


class CapturedValue(NamedTuple):
    """One tensor that a run captured."""

    kind: str
    base: str
    """The name, without the number of the call or a part."""
    call: int
    """How many values of this name came before it."""
    key: str
    """Which part of the named value it is; empty for all of it."""
    order: int
    """How many tensors were captured before it."""
    alone: bool = False
    """True if it is the only tensor in the named value, which the name without the part then means too."""
    other_key: str = ""
    """Another name of the part: the parameter for what a module is given by position, and the position if by name."""

    def spellings(self, numbered: bool) -> list[str]:
        """Return all names of the tensor, with or without the number of the call, the usual one first."""
        heads = [f"{self.base}#{self.call}" if numbered else self.base]
        tails = [f":{self.key}"] if self.key else [""]
        if self.key and self.kind == "output":
            tails = [f".{self.key}", *tails]
        if self.key and self.alone:
            tails = ["", *tails] if self.kind == "given" else [*tails, ""]
        if self.other_key:
            tails.append(f":{self.other_key}")
        if numbered and self.kind == "given":
            heads.insert(0, f"{self.base.removesuffix(GIVEN)}#{self.call}{GIVEN}")
        return [head + tail for head in heads for tail in tails]


class CaptureKey(NamedTuple):
    """The name of a value that a run is to capture."""

    name: str
    kind: str | None = None
    """The kind that it must be of, if the user gave one."""
    exact: bool = False
    """True if a layer is known to have this very name, "#" and ":" included."""

    @property
    def base(self) -> str:
        """The name without the number of a call or a part."""
        return self.name if self.exact else self.name.partition(":")[0].partition("#")[0]

    @property
    def marked(self) -> bool:
        """True if the name says which call or part."""
        return self.base != self.name

    @property
    def numbered(self) -> bool:
        """True if the name says which call, so that no later value can have it."""
        return self.marked and "#" in self.name

    def matches(self, value: CapturedValue) -> bool:
        head, colon, key = self.name.partition(":")
        text = head + colon + key.replace(":", ".")
        return self.kind in (None, value.kind) and text in (*value.spellings(False), *value.spellings(True))


class Capture:
    """One run of a function, in which some named values are replaced and some are kept."""

    def __init__(
        self,
        backend: Backend,
        transforms: Mapping[CaptureKey, Transform],
        kept: Sequence[CaptureKey],
        everything: bool = False,
        given: bool = False,
        stop: StopRule | None = None,
    ):
        self.stopped = False
        """True once the run was left, because all that is captured was there."""
        self._stop = stop
        self.everything = everything
        """True if all that has a name is captured, but for what modules are given."""
        self.given = given
        """True if what all modules are given is captured."""
        self.bases = {key.base for key in (*transforms, *kept)}
        """The names that are captured in any case."""
        self.inside = everything or any(key.kind != "output" for key in (*transforms, *kept))
        """True if there is more to capture than what the function returns."""
        self.values: list[CapturedValue] = []
        self.matches: dict[CaptureKey, list[CapturedValue]] = {key: [] for key in (*transforms, *kept)}
        self.tensors: dict[CaptureKey, Tensor] = {}
        self._latest: list[CaptureKey] = []
        """The kept names whose tensors are the run's own, and no snapshots yet."""
        self.described: dict[CapturedValue, tuple[tuple[int, ...], str]] = {}
        """Shape and dtype of everything, as the tensors themselves would keep a whole graph alive."""
        self._backend = backend
        self._transforms = transforms
        self._kept = kept
        self._calls: Counter[tuple[str, str]] = Counter()
        self._latest_part: dict[str, int] = {}
        """The number of the part that a traced program has named last, for each name."""

    @property
    def active(self) -> bool:
        """True if what this thread computes now is part of the run, and not of a read inside of it."""
        return _innermost()[0] is self

    def wants(self, base: str) -> bool:
        """Return True if the values of a name are captured."""
        return self.everything or base in self.bases

    def open(self, here: Callable[[str], bool] = lambda name: True) -> AbstractContextManager[None]:
        """Capture what this thread tags in a block, if `here(name)` is True; otherwise the tag is staged."""
        return _CaptureScope(self, here)

    def capture(
        self, kind: str, base: str, value: Value, other_keys: Mapping[str, str] = MappingProxyType({})
    ) -> Value:
        """Capture a value that has a name, and return what the run goes on with.

        `other_keys` has another name for some of its parts.

        Raises:
            RunStopped: nothing that the run may still compute is asked for.
        """
        if self.stopped:  # the user's code caught the exception, and its results do not matter any more
            return value
        leaves = list(pytree.named_leaves(value, ""))
        alone = sum([registry.backend_of(leaf) is self._backend for _, leaf in leaves]) == 1
        keys = iter([key[1:] for key, _ in leaves])
        # All parts of a value have the number of one call, also where an earlier call had fewer parts.
        call, count = self._calls[kind, base], len(self.values)
        value = pytree.map_tree(
            value, lambda leaf: self._capture_part(kind, base, call, next(keys), leaf, alone, other_keys)
        )
        self._calls[kind, base] = call + (len(self.values) > count)
        if kind != "output" and self._is_complete():
            self.stopped = True
            raise RunStopped
        self._take_snapshots()
        return value

    def _take_snapshots(self) -> None:
        """Keep what was captured as it is now, since the run goes on and may write to it."""
        for key in self._latest:
            self.tensors[key] = self._backend.names.snapshot(self.tensors[key])
        self._latest.clear()

    def _is_complete(self) -> bool:
        """Return True if each name has its value, no other value can have it, and the run can be left here."""
        stop = self._stop
        return (
            stop is not None
            and all(values and key.name in stop.single for key, values in self.matches.items())
            and stop.allowed()
        )

    def names_of_one(self) -> list[str]:
        """Return the names of which a complete run has shown that they are those of one tensor."""
        if not self.everything:
            return [key.name for key, values in self.matches.items() if len(values) == 1]
        counts = Counter(spelling for value in self.values for spelling in value.spellings(False))
        return [spelling for spelling, count in counts.items() if count == 1]

    def capture_given(
        self, path: str, args: Any, kwargs: Any, forward: Callable[..., Any] | None = None
    ) -> tuple[Any, Any]:
        """Capture what a module is given, by position or by name, and return what it goes on with."""
        positions = [(str(index), name) for index, name in enumerate(positional_parameters(forward))]
        other_keys = dict(positions[: len(args)]) | {name: index for index, name in positions[len(args) :]}
        value = self.capture("given", path + GIVEN, {**dict(enumerate(args)), **kwargs}, other_keys)
        return tuple([value[index] for index in range(len(args))]), {name: value[name] for name in kwargs}

    def capture_staged(self, name: str, tensor: Tensor) -> Tensor:
        """Capture a tensor that a traced program names, and return what the run goes on with.

        The parts of a value come one by one, in order: what does not come after the latest part is a new value.
        """
        base, _, part = name.partition(":")
        position, _, key = part.partition(":")
        number, count = map(int, position.split("/")) if position else (0, 1)
        self._calls["activation", base] += number <= self._latest_part.get(base, number)
        self._latest_part[base] = number
        call = self._calls["activation", base] - 1
        return self._capture_part("activation", base, call, key, tensor, count == 1)

    def _capture_part(
        self,
        kind: str,
        base: str,
        call: int,
        key: str,
        tensor: Any,
        alone: bool,
        other_keys: Mapping[str, str] = MappingProxyType({}),
    ) -> Any:
        """Capture one tensor of a value that has a name, and return what the run goes on with."""
        if registry.backend_of(tensor) is not self._backend or not self._backend.names.is_real_call(tensor):
            return tensor
        head, dot, rest = key.partition(".")
        other_key = other_keys[head] + dot + rest if head in other_keys else ""
        value = CapturedValue(kind, base, call, key, len(self.values), alone, other_key)
        self.values.append(value)
        matching = [wanted for wanted in self.matches if wanted.matches(value)]
        for wanted in matching:
            if not self._backend.names.is_single_value(tensor):
                raise PlaceError(
                    f"{wanted.name!r} is computed inside a loop or branch of a graph, so it has no single value; name "
                    "what comes out of it"
                )
            self.matches[wanted].append(value)
            tensor = self._transforms[wanted](tensor) if wanted in self._transforms else tensor
        for wanted in matching:
            if wanted in self._kept:
                self.tensors[wanted] = tensor
                self._latest.append(wanted)
        if self.everything:
            self.described[value] = tuple(self._backend.shape(tensor)), self._backend.dtype(tensor)
        return tensor

    def spelled_values(self) -> list[tuple[list[str], CapturedValue]]:
        """Return all that was captured, each with its names, the shortest that no other has first."""
        again = {(x.kind, x.base, x.key) for x in self.values if x.call}
        return [(x.spellings((x.kind, x.base, x.key) in again), x) for x in self.values]

    def named_values(self) -> list[tuple[str, CapturedValue]]:
        """Return all that was captured, each with the shortest name that no other has."""
        return [(spellings[0], value) for spellings, value in self.spelled_values()]


def without_capture() -> AbstractContextManager[None]:
    """Run what is inside without a capture: tags in it are its own, and not those of a run around it."""
    return _CaptureScope(None, lambda name: False) if _open_entries else _no_capture


class _CaptureScope(scope):
    """A `with` block in which the named values of this thread are handed to a capture, or to none."""

    __slots__ = ("_capture", "_here")

    def __init__(self, capture: Capture | None, here: Callable[[str], bool]):
        self._capture = capture
        self._here = here

    def __enter__(self) -> None:
        super().__enter__()
        entry = object()
        defer(_forget_entry, entry)
        push(_local, "captures", (self._capture, self._here))
        _open_entries.append(entry)


def _forget_entry(entry: object) -> None:
    if entry in _open_entries:
        _open_entries.remove(entry)


def _innermost() -> tuple[Capture | None, Callable[[str], bool]]:
    return _local.captures[-1] if _local.captures else (None, bool)
