"""Values on their way through a function, met by name: tags, the results of layers, the output."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from elementgrad._backends import registry
from elementgrad._backends.base import Backend
from elementgrad._cleanup import Lock, defer, push, scope
from elementgrad._names import pytree
from elementgrad._names.backend import NamesBackend
from elementgrad.errors import PlaceError

Tensor = Any
Value = Any
"""A tensor, or a tuple, list or dict of them."""
Transform = Callable[[Tensor], Tensor]
MARKS = frozenset("#:[]()\n")
"""What no name of a tag may hold: calls are counted behind a "#", parts named behind a ":", elements in brackets."""


class _CaptureState(threading.local):
    passages: tuple[tuple["Capture | None", Callable[[str], bool]], ...] = ()


_local = _CaptureState()
_lock = Lock()
_nothing_to_do: set[type] = set()  # types of tensors that no framework stages: so a tag costs next to nothing
_nothing = nullcontext()
_entries: set[object] = set()  # passages open in any thread
_open = 0  # how many: a plain number, which a compiler of Python code can look at for nothing


def tag(value: Value, name: str) -> Value:
    """Give a value inside a function a name, by which `of` and `wrt` can ask for it; it is passed on as it is.

    A tensor that gets the name again is `name#1`, and the first is `name#0` then. Parts of a tuple, list or dict are
    `name:0` or `name:key`. Tags cost nothing while nobody asks, and stay in compiled code. Go on with what is returned:
    what a tag was put on and what comes out of it are two tensors to whoever asks.

    >>> import torch, elementgrad as eg
    >>> def f(x):
    ...     hidden = eg.tag(x ** 2, "hidden")
    ...     return hidden.sum() * 3
    >>> eg.grad(f, torch.tensor([1.0, 2.0]), wrt="hidden")
    tensor([3., 3.])
    >>> eg.grad(f, torch.tensor([1.0, 2.0]), of="hidden[1]")
    tensor([0., 4.])
    """
    if not isinstance(name, str) or not name or not MARKS.isdisjoint(name):
        raise PlaceError(f"{name!r} is no name for a tag; give a str without brackets, parentheses, '#' and ':'")
    if not _open and type(value) in _nothing_to_do:
        return value
    if _open:
        passage, here = _current()
        if passage is not None and here(name):
            return passage.meet("activation", name, value)
    backend = registry.backend_of(value)
    if backend is None:
        return _staged(value, name)
    if type(backend.names).name_in_graph is NamesBackend.name_in_graph and backend.caches_type(type(value)):
        _nothing_to_do.add(type(value))
    return backend.names.name_in_graph(value, name)


@dataclass(frozen=True)
class CapturedValue:
    """One tensor that a run met: of which kind and name, in which call of that name, as which part."""

    kind: str
    base: str
    call: int
    key: str
    order: int
    """How many were met before it."""
    alone: bool = False
    """Whether it is the only tensor in the value that bears the name, which then means it as well."""

    def spelled(self, numbered: bool) -> list[str]:
        """All that it is called, with or without the number of the call, the usual one first."""
        head = f"{self.base}#{self.call}" if numbered else self.base
        tails = [f":{self.key}"] if self.key else [""]
        if self.key and self.kind == "output":
            tails = [f".{self.key}", *tails]
        if self.key and self.alone:
            tails = [*tails, ""]
        return [head + tail for tail in tails]


@dataclass(frozen=True)
class CaptureKey:
    """The name of a value that a run is to meet, and what kind it must be, if somebody said so."""

    name: str
    kind: str | None = None
    whole: bool = False
    """Whether something is known to bear all of the name, marks included."""

    @property
    def base(self) -> str:
        """What bears the name, without the number of a call or a part."""
        return self.name if self.whole else self.name.partition(":")[0].partition("#")[0]

    @property
    def marked(self) -> bool:
        """Whether it names a call or a part."""
        return self.base != self.name

    def fits(self, met: CapturedValue) -> bool:
        """Whether this is the value that is meant."""
        head, colon, key = self.name.partition(":")
        text = head + colon + key.replace(":", ".")
        return self.kind in (None, met.kind) and text in (*met.spelled(False), *met.spelled(True))


class Capture:
    """One run of a function: it changes the values that somebody wants to change, and keeps those that they want."""

    def __init__(
        self,
        backend: Backend,
        changed: Mapping[CaptureKey, Transform],
        kept: Sequence[CaptureKey],
        everything: bool = False,
    ):
        self.everything = everything
        """Whether all that can be met is to be met."""
        self.bases = {wanted.base for wanted in (*changed, *kept)}
        """What else is to be met."""
        self.inside = everything or any(wanted.kind != "output" for wanted in (*changed, *kept))
        """Whether there is more to meet than what the function returns."""
        self.met: list[CapturedValue] = []
        self.matches: dict[CaptureKey, list[CapturedValue]] = {wanted: [] for wanted in (*changed, *kept)}
        self.tensors: dict[CaptureKey, Tensor] = {}
        self.described: dict[CapturedValue, tuple[tuple[int, ...], str]] = {}
        """The shape and dtype of everything: their tensors would keep a whole graph alive."""
        self._backend = backend
        self._changed = changed
        self._kept = kept
        self._calls: Counter[tuple[str, str, str]] = Counter()

    @property
    def listening(self) -> bool:
        """Whether what this thread computes now is part of the run, and not of a read inside of it."""
        return _current()[0] is self

    @contextmanager
    def open(self, here: Callable[[str], bool] = lambda name: True) -> Iterator[None]:
        """Meet what this thread tags, where `here` says so of a name; elsewhere it is staged."""
        with _entered(self, here):
            yield

    def meet(self, kind: str, base: str, value: Value) -> Value:
        """A value that bears a name: what goes on in its place."""
        leaves = list(pytree.named_leaves(value, ""))
        alone = sum([registry.backend_of(leaf) is self._backend for _, leaf in leaves]) == 1
        keys = iter([key[1:] for key, _ in leaves])
        return pytree.map_tree(value, lambda leaf: self.pass_on(kind, base, next(keys), leaf, alone))

    def pass_on(self, kind: str, base: str, key: str, tensor: Any, alone: bool = False) -> Any:
        """One part of a value that bears a name."""
        if registry.backend_of(tensor) is not self._backend or not self._backend.names.is_real_call(tensor):
            return tensor
        met = CapturedValue(kind, base, self._calls[kind, base, key], key, len(self.met), alone)
        self._calls[kind, base, key] += 1
        self.met.append(met)
        fitting = [wanted for wanted in self.matches if wanted.fits(met)]
        for wanted in fitting:
            if not self._backend.names.is_single_value(tensor):
                raise PlaceError(
                    f"{wanted.name!r} is computed inside a loop or branch of a graph, so it has no single value; name "
                    "what comes out of it"
                )
            self.matches[wanted].append(met)
            tensor = self._changed[wanted](tensor) if wanted in self._changed else tensor
        for wanted in fitting:
            if wanted in self._kept:
                self.tensors[wanted] = self._backend.names.snapshot(tensor)
        if self.everything:
            self.described[met] = tuple(self._backend.shape(tensor)), self._backend.dtype(tensor)
        return tensor

    def named(self) -> list[tuple[str, CapturedValue]]:
        """All that was met, each by the shortest name that is its own."""
        return [(met.spelled(self._calls[met.kind, met.base, met.key] > 1)[0], met) for met in self.met]


def apart() -> AbstractContextManager[None]:
    """For a run that asks for no tags: those in it are its own, and none of a run around it."""
    return _entered(None, lambda name: False) if _open else _nothing


@contextmanager
def _entered(passage: Capture | None, here: Callable[[str], bool]) -> Iterator[None]:
    with scope():
        me = object()
        defer(_close, me)
        push(_local, "passages", (passage, here))
        _note_open(me)
        yield


def _note_open(me: object) -> None:
    global _open
    with _lock.taken():
        _entries.add(me)
        _open = len(_entries)


def _close(me: object) -> None:
    global _open
    with _lock.taken():
        _entries.discard(me)
        _open = len(_entries)


def _current() -> tuple[Capture | None, Callable[[str], bool]]:
    return _local.passages[-1] if _local.passages else (None, bool)


def _staged(value: Value, name: str) -> Value:
    """The tensors inside a value staged one by one, as `name:key`, or as `name::key` where there is only one."""
    leaves = [(key[1:], registry.backend_of(leaf)) for key, leaf in pytree.named_leaves(value, "")]
    tensors = [key for key, backend in leaves if backend is not None]
    if not tensors:
        registry.require_backend(value)  # says what fits
    colon = "::" if len(tensors) == 1 else ":"
    parts = iter(leaves)

    def staged(leaf: Any) -> Any:
        key, backend = next(parts)
        return leaf if backend is None else backend.names.name_in_graph(leaf, f"{name}{colon}{key}")

    return pytree.map_tree(value, staged)
