"""What has been changed in a tensor and what stood there before, for as long as the tensor lives."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Tensor = Any
Read = Callable[[np.ndarray], np.ndarray]
"""Reads a tensor: flat positions to the bytes there, uint8 with one row each."""


@dataclass(eq=False)
class Change:
    """Elements of one tensor that were changed."""

    place: str
    positions: np.ndarray
    bits: np.ndarray
    """The bytes that stood there before."""
    written: np.ndarray | None = None
    """The bytes that were written; None while they train, and change."""

    @property
    def idle(self) -> bool:
        """Whether what was written is what stood there."""
        return self.written is not None and np.array_equal(self.written, self.bits)


class ChangeLog:
    """The changes of one tensor, the earliest first, without those that somebody has since written over.

    >>> import numpy as np
    >>> from elementgrad._train.history import ChangeLog, Change
    >>> tensor = np.zeros((4, 1), np.uint8)  # stands for a tensor of four bytes
    >>> ledger = ChangeLog(tensor, tensor.__getitem__)
    >>> mark = Change("x[1]", np.array([1]), tensor[[1]], np.uint8([[7]]))
    >>> tensor[1] = 7
    >>> ledger.add(mark)
    >>> ledger.overlapping(np.array([0, 1])).place, ledger.before(np.array([0, 1])).tolist()
    ('x[1]', [[0], [0]])
    >>> tensor[1] = 8
    >>> ledger.overlapping(np.array([0, 1])) is None
    True
    """

    def __init__(self, tensor: Tensor, read: Read):
        key = id(tensor)
        if key not in _marks or _marks[key][0]() is not tensor:
            _marks[key] = weakref.ref(tensor, lambda _: _marks.pop(key, None)), []
        self._all = _marks[key][1]
        self._read = read

    def add(self, mark: Change) -> None:
        """Note a change."""
        self._all.append(mark)

    def remove(self, mark: Change) -> None:
        """Forget a change that was taken back."""
        if mark in self._all:
            self._all.remove(mark)

    def holds(self, mark: Change) -> bool:
        """Whether a change is still there, and nobody has written over it."""
        return mark in self._live()

    def marks(self) -> tuple[Change, ...]:
        """All changes."""
        return tuple(self._live())

    def overlapping(self, positions: np.ndarray, after: Change | None = None) -> Change | None:
        """A change of some of these elements, among all or among those after another."""
        held = self._live()
        later = held if after is None else held[held.index(after) + 1 :] if after in held else []
        return next((mark for mark in later if not mark.idle and np.isin(positions, mark.positions).any()), None)

    def changed(self) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Where the tensor was changed, each position once, and the bytes that stood there first."""
        held = self._live()
        if not held:
            return None, None
        positions, first = np.unique(np.concatenate([mark.positions for mark in held]), return_index=True)
        return positions, np.concatenate([mark.bits for mark in held])[first]

    def before(self, positions: np.ndarray) -> np.ndarray:
        """The bytes that stood at some positions first."""
        bits = np.array(self._read(positions))
        changed, former = self.changed()
        if changed is not None and former is not None:
            at = np.minimum(np.searchsorted(changed, positions), len(changed) - 1)
            hit = changed[at] == positions
            bits[hit] = former[at[hit]]
        return bits

    def _live(self) -> list[Change]:
        later = np.zeros(0, np.int64)
        for mark in reversed(self._all.copy()):
            bare = ~np.isin(mark.positions, later)
            if mark.written is not None and not np.array_equal(self._read(mark.positions[bare]), mark.written[bare]):
                self._all.remove(mark)
            else:
                later = np.concatenate([later, mark.positions])
        return self._all


_marks: dict[int, tuple["weakref.ref[Tensor]", list[Change]]] = {}
