"""The history of a tensor: which elements were changed, and the bytes that were there before.

It lives as long as the tensor. With it patches of disjoint elements can be applied and undone in any order: each is
checked against the tensor as it was before all of them.
"""

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

import numpy as np

Tensor = Any
ReadBytes = Callable[[np.ndarray], np.ndarray]
"""A function that reads a tensor: flat int64 positions to uint8, one row of bytes per position, lowest byte first."""


def ascends(positions: np.ndarray) -> bool:
    """Return True if each position is larger than the one before."""
    return bool((positions[1:] > positions[:-1]).all())


def are_among(positions: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return a mask of the positions that are among `others`, much faster than `np.isin` if those ascend."""
    if not others.size:
        return np.zeros(positions.shape, bool)
    if not ascends(others):
        return np.isin(positions, others)
    return others[np.minimum(np.searchsorted(others, positions), others.size - 1)] == positions


class BitsAt(NamedTuple):
    """Bytes at some positions of a tensor, one row each."""

    positions: np.ndarray
    bits: np.ndarray

    def write_over(self, content: np.ndarray, positions: np.ndarray) -> None:
        """Replace rows of bytes that were read at some positions by those known here, whose positions must ascend."""
        if len(self.positions):
            at = np.minimum(np.searchsorted(self.positions, positions), len(self.positions) - 1)
            known = self.positions[at] == positions
            content[known] = self.bits[at[known]]


def first_bits(parts: Iterable[BitsAt | None]) -> BitsAt | None:
    """Return the bytes of all parts at ascending positions; where several have some, those of the first."""
    some = [part for part in parts if part is not None]
    if not some or (len(some) == 1 and ascends(some[0].positions)):
        return some[0] if some else None
    positions, first = np.unique(np.concatenate([part.positions for part in some]), return_index=True)
    return BitsAt(positions, np.concatenate([part.bits for part in some])[first])


@dataclass(eq=False)
class ElementChange:
    """A change of some elements of one tensor."""

    place: str
    positions: np.ndarray
    bits: np.ndarray
    """The bytes before the change."""
    written: np.ndarray | None = None
    """The bytes that were written; None while the elements train."""
    where: Any = None
    """The place, of which `place` is a text that may be cut short."""
    batch: object = None
    """The same object for all changes of one patch that was applied; None for elements that train."""
    undone: bool = False
    """True once the elements have been given back what they were before."""
    values: Any = None
    """The values that were taken back, in the dtype in which they were given."""
    number: int = 0
    """Later changes have larger numbers."""

    @property
    def is_noop(self) -> bool:
        """True if the bytes that were written are those that were there."""
        return self.written is not None and np.array_equal(self.written, self.bits)


class TensorHistory:
    """The changes of one tensor, the earliest first. A change that was overwritten since then is dropped.

    >>> import numpy as np
    >>> from elementgrad._train.history import ElementChange, TensorHistory
    >>> tensor = np.zeros((4, 1), np.uint8)  # stands for a tensor of four bytes
    >>> history = TensorHistory(tensor, tensor.__getitem__)
    >>> change = ElementChange("x[1]", np.array([1]), tensor[[1]], np.uint8([[7]]))
    >>> tensor[1] = 7
    >>> history.add(change)
    >>> history.find_overlap(np.array([0, 1])).place, history.bytes_before(np.array([0, 1])).tolist()
    ('x[1]', [[0], [0]])
    >>> tensor[1] = 8
    >>> history.find_overlap(np.array([0, 1])) is None
    True
    """

    def __init__(self, tensor: Tensor, read: ReadBytes):
        key = id(tensor)
        if key not in _changes or _changes[key][0]() is not tensor:
            _changes[key] = weakref.ref(tensor, lambda _: _changes.pop(key, None)), []
        self._all = _changes[key][1]
        self._read = read

    def add(self, change: ElementChange) -> None:
        """Add the latest change."""
        change.number = next(_numbers)
        self._all.append(change)

    def remove_all(self, changes: Iterable[ElementChange]) -> None:
        """Remove changes, where they are there."""
        ids = set(map(id, changes))
        self._all[:] = [change for change in self._all if id(change) not in ids]

    def changes(self) -> list[ElementChange]:
        """Return the changes that still show in the tensor, and forget the others."""
        while overwritten := self._find_overwritten():
            # Without them, more elements of earlier changes are on top, and may have been overwritten as well.
            self._all[:] = [change for change in self._all if id(change) not in overwritten]
        return self._all

    def _find_overwritten(self) -> set[int]:
        """Return the ids of changes that were overwritten: an element with no later change on top has other bytes."""
        if all(change.written is None for change in self._all):
            return set()
        width = self._read(np.zeros(0, np.int64)).shape[1]
        # After a change of the dtype nothing is left of what was written.
        other = {id(change) for change in self._all if change.written is not None and change.written.shape[1] != width}
        if other:
            return other
        if len(self._all) == 1 and (written := self._all[0].written) is not None:
            same = np.array_equal(self._read(self._all[0].positions), written)
            return set() if same else {id(self._all[0])}
        latest = self._all[::-1]
        numbers = np.repeat(np.arange(len(latest)), [len(change.positions) for change in latest])
        positions, first = np.unique(np.concatenate([change.positions for change in latest]), return_index=True)
        blank = [np.zeros((len(change.positions), width), np.uint8) for change in latest]
        rows = [zeros if each.written is None else each.written for each, zeros in zip(latest, blank, strict=True)]
        differs = (self._read(positions) != np.concatenate(rows)[first]).any(1)
        numbers = np.unique(numbers[first][differs])
        return {id(latest[number]) for number in numbers if latest[number].written is not None}

    def find_overlap(self, positions: np.ndarray) -> ElementChange | None:
        """Return a change of some of these elements."""
        changes = [change for change in self.changes() if not change.is_noop]
        return next((change for change in changes if are_among(positions, change.positions).any()), None)

    def find_later(self, changes: Iterable[ElementChange]) -> tuple[ElementChange, ElementChange] | None:
        """Return the first of some changes that a later change, which is returned too, has elements of."""
        every = self.changes()
        order = {id(change): number for number, change in enumerate(every)}
        changes = list(changes)
        first = min((order.get(id(change), len(every)) for change in changes), default=len(every))
        real = [(number, each) for number, each in enumerate(every) if number > first and not each.is_noop]
        if not real:
            return None
        numbers = np.repeat([number for number, _ in real], [len(change.positions) for _, change in real])
        positions = np.concatenate([change.positions for _, change in real])
        latest = np.lexsort((numbers, positions))
        latest = latest[np.append(positions[latest][1:] != positions[latest][:-1], True)]
        positions, numbers = positions[latest], numbers[latest]
        for change in changes:
            own = order.get(id(change), len(every))
            at = np.minimum(np.searchsorted(positions, change.positions), len(positions) - 1)
            if ((positions[at] == change.positions) & (numbers[at] > own)).any():
                after = [later for number, later in real if number > own]
                return change, next(later for later in after if np.isin(change.positions, later.positions).any())
        return None

    def originals(self) -> BitsAt | None:
        """Return the positions that were changed, each once, and the bytes there before the first change."""
        return first_bits(BitsAt(change.positions, change.bits) for change in self.changes())

    def bytes_before(self, positions: np.ndarray) -> np.ndarray:
        """Return the bytes at some positions before the first change."""
        bits = np.array(self._read(positions))
        originals = self.originals()
        if originals is not None:
            originals.write_over(bits, positions)
        return bits


_changes: dict[int, tuple["weakref.ref[Tensor]", list[ElementChange]]] = {}
_numbers = count()
