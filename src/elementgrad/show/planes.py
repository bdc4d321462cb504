"""An array with axes for pixels as a stack of planes, wherever its channels are."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from elementgrad.errors import OptionError
from elementgrad.index import to_text
from elementgrad.show.values import strongest

COLOURS = (1, 3, 4)
"""How many channels an image has."""


def without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape without leading axes of size one, such as that of a batch of one."""
    first = next((axis for axis, size in enumerate(shape) if size != 1), len(shape))
    return shape[first:]


def bare(coordinates: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Coordinates as positions in the flattened array."""
    if not shape:
        return np.zeros(len(coordinates), np.int64)
    return np.ravel_multi_index(tuple(coordinates.T), shape)


def channels_last(shape: tuple[int, ...], asked: Any, framework: str | None) -> bool:
    """Whether the last axis counts channels: as asked; else always on TensorFlow, or where only that one can."""
    if asked not in (None, "first", "last"):
        raise OptionError(f'channels={asked!r} is neither "first" nor "last"; give one of them, or leave it out')
    if asked is not None:
        return bool(asked == "last")
    return framework == "tensorflow" or (shape[-1] in COLOURS and shape[-3] not in COLOURS)


@dataclass(frozen=True)
class Planes:
    """Planes of pixels, what each is called, and which pixels are marked.

    >>> import numpy as np
    >>> from elementgrad.show.planes import Planes
    >>> planes = Planes.of(np.zeros((1, 4, 5, 3)), np.array([[0, 2, 1, 2]]), last=True)
    >>> planes.stack.shape, planes.names, planes.marks.tolist()
    ((3, 4, 5), ('[0, ..., 0]', '[0, ..., 1]', '[0, ..., 2]'), [[2, 2, 1]])
    """

    stack: np.ndarray
    names: tuple[str, ...]
    marks: np.ndarray
    """Rows of plane, row and column."""

    @classmethod
    def of(cls, values: np.ndarray, marks: np.ndarray, last: bool) -> "Planes":
        """The last two axes as planes, or those before the channels where these come last."""
        if values.ndim < 3:
            values = values.reshape((1,) * (3 - values.ndim) + values.shape)
            marks = np.concatenate([np.zeros((len(marks), 3 - marks.shape[1]), np.int64), marks], axis=1)
            return cls(values, ("",), marks)
        moved = np.moveaxis(values, -1, -3) if last else values
        order = [*range(values.ndim - 3), values.ndim - 1, values.ndim - 3, values.ndim - 2]
        marks = marks[:, order] if last else marks
        leading = moved.shape[:-2]
        names = [to_text((*index[:-1], ..., index[-1]) if last else index) for index in np.ndindex(*leading)]
        which = np.ravel_multi_index(tuple(marks[:, :-2].T), leading)
        return cls(moved.reshape(-1, *moved.shape[-2:]), tuple(names), np.column_stack([which, marks[:, -2:]]))

    def strongest(self) -> np.ndarray:
        """One plane of the numbers largest in size."""
        return strongest(np.moveaxis(self.stack, 0, -1)) if len(self.stack) > 1 else self.stack[0]

    @property
    def merged(self) -> list[str]:
        """What there is to say where one plane stands for several."""
        return [f"at each pixel the largest in size of {len(self.stack)} channels"] if len(self.stack) > 1 else []

    def largest(self, most: int) -> list[int]:
        """The numbers of the planes with the largest gradients, and of all that bear a mark, in order."""
        if len(self.stack) <= most:
            return list(range(len(self.stack)))
        sizes = np.where(np.isfinite(self.stack), np.abs(self.stack), np.inf).max(axis=(1, 2), initial=0.0)
        first = dict.fromkeys([*np.unique(self.marks[:, 0]).tolist(), *np.argsort(-sizes, kind="stable").tolist()])
        return sorted(list(first)[:most])
