"""Captures of named values on their way through a function: tags, the results of layers, the output.

A thread has a stack of open captures. `eg.tag` (`tag.py`), and the hooks that backends put on layers, hand every named
value to the innermost one, and the function goes on with what it returns. At the last value that was asked for, the
capture stops the run where that is possible (`stopping.py`).
"""

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any, NamedTuple

from elementgrad._backends import registry
from elementgrad._backends.base import Backend
from elementgrad._cleanup import defer, push, scope
from elementgrad._names import pytree
from elementgrad._names.arguments import positional_parameters
from elementgrad._names.backend import GIVEN
from elementgrad._names.stopping import RunStopped, StopRule
from elementgrad.errors import PlaceError

Tensor = Any
Value = Any
"""A tensor, or a tuple, list or dict of them."""
Transform = Callable[[Tensor], Tensor]


class _CaptureState(threading.local):
    captures: tuple[tuple["Capture | None", Callable[[str], bool]], ...] = ()


_local = _CaptureState()
_no_capture = nullcontext()
open_entries: list[object] = []
"""An entry for each capture that is open in any thread; a compiler of Python code checks for nothing if there are any.
"""


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
        return innermost()[0] is self

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
    return _CaptureScope(None, lambda name: False) if open_entries else _no_capture


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
        open_entries.append(entry)


def _forget_entry(entry: object) -> None:
    if entry in open_entries:
        open_entries.remove(entry)


def innermost() -> tuple[Capture | None, Callable[[str], bool]]:
    """Return the innermost capture of this thread, and a function that says which names it takes here."""
    return _local.captures[-1] if _local.captures else (None, bool)
