"""Numbers to be drawn, as NumPy arrays: read from tensors of any framework, scaled, pooled, and marked.

Nothing here needs matplotlib.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from elementgrad._backends import registry
from elementgrad._place.index import to_text
from elementgrad._place.place import Place
from elementgrad._place.selection import Selection
from elementgrad.errors import DtypeError, FrameworkError, OptionError, TracedError

Tensor = Any
PERCENTILE = 95.0
STRETCH = 3.0
"""Colours end at this many times the percentile of the sizes that are not zero, or at the largest if that is less."""
FEW = 20
"""For fewer numbers, colours end at the largest."""
MAX_MARKS = 50
NONFINITE: dict[str, Any] = {"NaN": np.isnan, "+inf": np.isposinf, "-inf": np.isneginf}
"""Numbers that have no place on a scale, by the function that finds them."""
IMAGE_CHANNELS = (1, 3, 4)
COMPLEX_ERROR = "complex numbers have no one picture; plot their real part, imaginary part or size"


def to_floats(what: Tensor) -> np.ndarray:
    """Return the numbers of a tensor of any framework, an array or a list as float64.

    >>> from elementgrad._show.values import to_floats
    >>> to_floats([[1, 2]])
    array([[1., 2.]])
    """
    if "sparse" in str(getattr(what, "layout", "")) or hasattr(what, "dense_shape"):
        raise FrameworkError(f"this {type(what).__name__} is sparse, and is not made dense unasked; give a dense one")
    backend = registry.backend_of(what)
    if backend is None:
        return _array_to_floats(what)
    if backend.kind(what) == "c":
        raise DtypeError(COMPLEX_ERROR)
    try:
        values = backend.to_float64(what)
    except (TypeError, RuntimeError, NotImplementedError) as error:
        raise FrameworkError(f"the numbers of this {type(what).__name__} cannot be read: {error}") from None
    if values is None:
        raise TracedError("these numbers are being traced, so there is nothing to show yet; plot what comes out")
    return np.asarray(values)


def _array_to_floats(what: Any) -> np.ndarray:
    try:
        array = np.asarray(None if isinstance(what, (str, bytes, dict)) else what)
        if array.dtype.kind in "biufV":
            return array.astype(np.float64)
    except (ValueError, TypeError):
        array = np.array(None)
    if array.dtype.kind == "c":
        raise DtypeError(COMPLEX_ERROR)
    key = "'x'" if isinstance(what, dict) else 0
    hint = f"; give one of its gradients, as in eg.plot(g[{key}])" if isinstance(what, (dict, list, tuple)) else ""
    raise FrameworkError(
        f"{type(what).__name__} is nothing to plot: give a tensor or array of gradients, a Jacobian, contributions, "
        f"elements, a patch, or a list of {{place: values}} for each step{hint}"
    )


def require_elements(shape: tuple[int, ...]) -> None:
    if not math.prod(shape):
        raise OptionError(f"shape {shape} has no elements, so there is nothing to draw; name some")


@dataclass(frozen=True)
class Scale:
    """The range of colours, the same on both sides of zero, and what it leaves out.

    >>> from elementgrad._show.values import Scale
    >>> scale = Scale.of(np.array([1.0, -1.0] * 50 + [50.0]))
    >>> scale.limit, scale.beyond
    (3.0, 1)
    """

    limit: float
    count: int
    nonzero: int
    beyond: int
    """The count of finite numbers that are larger in size than the limit."""
    lowest: float
    highest: float
    nonfinite: dict[str, int]
    """The counts of numbers that are not finite, by kind."""

    @classmethod
    def of(cls, values: np.ndarray, limit: float | None = None, weighty: bool = False) -> "Scale":
        """Return the scale with a given limit, or with one that a few large numbers do not decide.

        With `weighty`, only the numbers decide that carry most of the size, and not how many small ones there are.
        """
        finite = values[np.isfinite(values)]
        sizes = np.abs(finite)
        deciding = sizes[carries_most(sizes)] if weighty else sizes
        limit = _robust_limit(deciding) if limit is None else _check_limit(limit)
        return cls(
            limit,
            values.size,
            int(np.count_nonzero(values)),
            int(np.count_nonzero(sizes > limit)),
            float(finite.min()) if finite.size else 0.0,
            float(finite.max()) if finite.size else 0.0,
            {name: int(test(values).sum()) for name, test in NONFINITE.items() if test(values).any()},
        )

    @property
    def notes(self) -> list[str]:
        """Remarks on numbers that a picture in these colours does not show."""
        notes = []
        if self.beyond:
            largest = max(self.highest, -self.lowest)
            notes.append(
                f"{self.beyond} of {self.count} numbers {'is' if self.beyond == 1 else 'are'} beyond the scale, "
                f"up to {largest:.3g} in size"
            )
        if not self.nonzero:
            notes.append("all zero")
        return notes

    @property
    def any_finite(self) -> bool:
        return self.count > sum(self.nonfinite.values())

    @property
    def description(self) -> str:
        """The numbers in words, for those who cannot see the picture."""
        span = f" from {self.lowest:.3g} to {self.highest:.3g}" if self.any_finite else ", none of them finite"
        words = f"{self.count} numbers{span}, {self.nonzero} of them not zero"
        return "; ".join([words, *self.notes, *[f"{count} {name}" for name, count in self.nonfinite.items()]])


def carries_most(sizes: np.ndarray) -> np.ndarray:
    """Return a mask of the fewest numbers whose squares add up to `PERCENTILE` of those of all.

    Squares, since that is what the length of a gradient is made of: many tiny numbers, such as normalisation leaves on
    every pixel, are no part of a receptive field.

    >>> import numpy as np
    >>> from elementgrad._show.values import carries_most
    >>> carries_most(np.array([0.4, 1e-5, 0.3, 1e-5])).tolist()
    [True, False, True, False]
    """
    squares = np.square(sizes / (sizes.max(initial=0.0) or 1.0)).reshape(-1)
    order = np.argsort(-squares, kind="stable")
    before = np.cumsum(squares[order]) - squares[order]
    mask = np.zeros(squares.shape, np.bool_)
    mask[order] = (before < PERCENTILE / 100 * squares.sum()) & (squares[order] > 0)
    return mask.reshape(sizes.shape)


def _robust_limit(sizes: np.ndarray) -> float:
    largest = float(sizes.max(initial=0.0))
    sizes = sizes[sizes > 0]
    if sizes.size < FEW:
        return largest or 1.0
    return min(largest, STRETCH * float(np.percentile(sizes, PERCENTILE, method="lower")))


def _check_limit(limit: Any) -> float:
    try:
        number = float(limit)
    except (TypeError, ValueError):
        number = 0.0
    if not 0 < number < np.inf:
        raise OptionError(f"limit={limit!r} is not a limit of a scale; give a number above zero, or leave it out")
    return number


def pool(values: np.ndarray, size: int) -> tuple[np.ndarray, tuple[int, int]]:
    """Reduce a matrix to at most `size` rows and columns; return it and the shape of the block behind each cell.

    A cell has the number that is largest in size, so that nothing large or not finite is lost.

    >>> from elementgrad._show.values import pool
    >>> pool(np.array([[0.0, -3.0, 1.0, 2.0]]), 2)
    (array([[-3.,  2.]]), (1, 2))
    """
    rows, columns = values.shape
    block = max(1, -(-rows // size)), max(1, -(-columns // size))
    if block == (1, 1):
        return values, block
    down, across = -(-rows // block[0]), -(-columns // block[1])
    padded = np.zeros((down * block[0], across * block[1]))
    padded[:rows, :columns] = values
    blocks = padded.reshape(down, block[0], across, block[1]).transpose(0, 2, 1, 3).reshape(down, across, -1)
    return max_by_size(blocks), block


def max_by_size(values: np.ndarray) -> np.ndarray:
    """Return the number that is largest in size along the last axis, with its sign; NaN and inf are the largest."""
    sizes = np.where(np.isnan(values), np.inf, np.abs(values))
    return np.take_along_axis(values, sizes.argmax(axis=-1)[..., None], axis=-1)[..., 0]


def mark_coordinates(mark: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Return the coordinates of the elements to mark, one row each.

    >>> from elementgrad._show.values import mark_coordinates
    >>> mark_coordinates("conv1[1, -1]", (2, 3)).tolist()
    [[1, 2]]
    """
    if mark is None:
        return np.zeros((0, len(shape)), np.int64)
    place = Place.parse(mark) if isinstance(mark, str) else mark
    selection = place.select(shape) if isinstance(place, Place) else Selection.resolve(place, shape)
    return np.asarray(selection.coords()).reshape(-1, len(shape))


def move_marks(marks: np.ndarray, shape: tuple[int, ...], new_shape: tuple[int, ...]) -> np.ndarray:
    """Return marks in the coordinates of another shape of the same size."""
    return np.stack(np.unravel_index(flat_positions(marks, shape), new_shape), axis=-1)


def flat_positions(coordinates: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return coordinates as positions in the flattened array."""
    if not shape:
        return np.zeros(len(coordinates), np.int64)
    return np.ravel_multi_index(tuple(coordinates.T), shape)


def has_channels_last(shape: tuple[int, ...], channels: Any, framework: str | None) -> bool:
    """Return True if the last axis has the channels: as given, always on TensorFlow, or if only that axis can."""
    if channels not in (None, "first", "last"):
        raise OptionError(f'channels={channels!r} is neither "first" nor "last"; give one of them, or leave it out')
    if channels is not None:
        return bool(channels == "last")
    return framework == "tensorflow" or (shape[-1] in IMAGE_CHANNELS and shape[-3] not in IMAGE_CHANNELS)


@dataclass(frozen=True)
class Planes:
    """Planes of pixels with their names, and the pixels that are marked.

    >>> import numpy as np
    >>> from elementgrad._show.values import Planes
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
        """Split an array into planes of its last two axes, or of those before the channels if these come last."""
        if values.ndim < 3:
            values = values.reshape((1,) * (3 - values.ndim) + values.shape)
            marks = np.concatenate([np.zeros((len(marks), 3 - marks.shape[1]), np.int64), marks], axis=1)
            return cls(values, ("",), marks)
        moved = np.moveaxis(values, -1, -3) if last else values
        order = [*range(values.ndim - 3), values.ndim - 1, values.ndim - 3, values.ndim - 2]
        marks = marks[:, order] if last else marks
        leading = moved.shape[:-2]
        names = [to_text((*index[:-1], ..., index[-1]) if last else index) for index in np.ndindex(*leading)]
        planes = np.ravel_multi_index(tuple(marks[:, :-2].T), leading)
        return cls(moved.reshape(-1, *moved.shape[-2:]), tuple(names), np.column_stack([planes, marks[:, -2:]]))

    def merge(self) -> tuple[np.ndarray, list[str]]:
        """Return one plane of the numbers largest in size, and a note if there were several."""
        if len(self.stack) == 1:
            return self.stack[0], []
        merged = max_by_size(np.moveaxis(self.stack, 0, -1))
        return merged, [f"at each pixel the largest in size of {len(self.stack)} channels"]

    def choose_largest(self, count: int) -> list[int]:
        """Return the indices of all planes with a mark and of those with the largest gradients, in order."""
        if len(self.stack) <= count:
            return list(range(len(self.stack)))
        sizes = np.where(np.isfinite(self.stack), np.abs(self.stack), np.inf).max(axis=(1, 2), initial=0.0)
        ranked = dict.fromkeys([*np.unique(self.marks[:, 0]).tolist(), *np.argsort(-sizes, kind="stable").tolist()])
        return sorted(list(ranked)[:count])
