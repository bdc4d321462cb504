"""The memory of an explained run: an id for each value that tensors had, and copies of what was overwritten."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from elementgrad._explain.trace import Hint, Op

Tensor = torch.Tensor


class SavedValues:
    """The tensors that operations read and made, by value id. They share memory with the user's own until a write.

    Just before something is written to, what is saved of its memory is copied.
    """

    def __init__(self, keeps: bool) -> None:
        self._keeps = keeps
        self._tensors: dict[int, Tensor] = {}
        self._memory: dict[int, set[int]] = {}

    def save(self, value_id: int | None, x: Tensor) -> None:
        if not self._keeps or value_id is None or value_id in self._tensors:
            return
        self._tensors[value_id] = x.detach()
        address = storage_address(x)
        if address:
            self._memory.setdefault(address, set()).add(value_id)

    def copy_before_write(self, tensors: Sequence[Tensor]) -> None:
        for value_id in {n for x in tensors for n in self._memory.pop(storage_address(x), ())}:
            self._tensors[value_id] = self._tensors[value_id].clone()

    def of(self, ids: Sequence[int]) -> list[Tensor]:
        return [self._tensors[n] for n in ids] if all(n in self._tensors for n in ids) else []


class ValueIds:
    """An id for each tensor, and a new one after each write to its memory."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Tensor], int, int | None]] = {}
        self._memory: dict[int, list[weakref.ref[Tensor]]] = {}
        self._count = 0

    def assign(self, x: Tensor, value_id: int | None = None) -> int:
        """Give a tensor an id: a new one, or that of a tensor which it stands for."""
        entries, key = self._entries, id(x)
        if value_id is None:
            value_id = self._count
            self._count += 1
        known = entries.get(key)
        if known is None or known[0]() is not x:
            memory = storage_address(x)
            ref = weakref.ref(x, lambda _: entries.pop(key, None))
            if memory:
                alive = [other for other in self._memory.get(memory, ()) if other() is not None]
                self._memory[memory] = [*alive, ref]
        else:
            ref = known[0]
        entries[key] = ref, value_id, version_of(x)
        return value_id

    def has_counted_write(self, x: Tensor) -> bool:
        """Return True if a tensor has counted a write since it got its id."""
        return version_of(x) != self._entries[id(x)][2]

    def get(self, x: Tensor) -> int | None:
        entry = self._entries.get(id(x))
        return entry[1] if entry is not None and entry[0]() is x else None

    def aliases(self, x: Tensor) -> list[Tensor]:
        """Return the known tensors that are alive and overlap with the memory of one."""
        tensors = [ref() for ref in self._memory.get(storage_address(x), ())]
        begin, end = _byte_span(x)
        spans = [(other, _byte_span(other)) for other in tensors if other is not None and other is not x]
        return [other for other, (first, last) in spans if first < end and begin < last]


def storage_address(x: Tensor) -> int:
    """Return where the storage of a tensor begins; 0 if it has none."""
    try:
        return x.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # a fake tensor without memory
        return 0


def _byte_span(x: Tensor) -> tuple[int, int]:
    """Return from where to where a tensor lies in its storage."""
    if x.layout is not torch.strided or not x.numel():
        return 0, 0
    last = sum([(size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)])
    begin = int(x.storage_offset()) * x.element_size()
    return begin, begin + (int(last) + 1) * x.element_size()


def version_of(x: Tensor) -> int | None:
    """Return how many writes a tensor has counted; tensors of inference mode count none."""
    return None if x.is_inference() else x._version


@dataclass(frozen=True)
class Overwrite:
    """A write in place to a tensor that an operation had used before."""

    op: Op
    shape: tuple[int, ...]
    maker: str
    """The function that made the tensor."""


@dataclass(frozen=True)
class HiddenWrite:
    """A write that autograd does not see, with the values that it changed and how many operations ran before it."""

    hint: Hint
    overwritten: frozenset[int | None]
    position: int


def is_same(x: Tensor, y: Tensor) -> bool:
    """Return True if two tensors have the same numbers; NaN counts as a number."""
    return torch.equal(x, y) or bool(((x == y) | (x != x) & (y != y)).all())


def detach_all(args: Any) -> list[Any]:
    return [detach(x) for x in args]


def detach(x: Any) -> Any:
    return x.detach() if isinstance(x, Tensor) and x.requires_grad else x
