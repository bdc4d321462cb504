"""What is shown, as NumPy arrays: numbers of any framework, the scale of their colours, and fewer of them."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from elementgrad._backends import registry
from elementgrad._place.place import Place
from elementgrad._place.selection import Selection
from elementgrad.errors import DtypeError, FrameworkError, OptionError, TracedError

Tensor = Any
ROBUST = 95.0
"""The percentile of the sizes of all numbers that are not zero, by which the end of the colours is found."""
TIMES = 3.0
"""Colours go so many times as far, if there are numbers there."""
MARKS = 50
"""Marks that are drawn."""
FEW = 20
"""So few numbers are all shown in full."""
BROKEN: dict[str, Any] = {"NaN": np.isnan, "+inf": np.isposinf, "-inf": np.isneginf}
"""Numbers that have no place on a scale."""
COMPLEX = "complex numbers have no one picture; plot their real part, imaginary part or size"


def floats(what: Tensor) -> np.ndarray:
    """The numbers of a tensor of any framework, an array or a list, as float64.

    >>> from elementgrad._show.values import floats
    >>> floats([[1, 2]])
    array([[1., 2.]])
    """
    if "sparse" in str(getattr(what, "layout", "")) or hasattr(what, "dense_shape"):
        raise FrameworkError(f"this {type(what).__name__} is sparse, and is not made dense unasked; give a dense one")
    backend = registry.backend_of(what)
    if backend is None:
        return _array(what)
    if backend.kind(what) == "c":
        raise DtypeError(COMPLEX)
    try:
        values = backend.to_float64(what)
    except (TypeError, RuntimeError, NotImplementedError) as error:
        raise FrameworkError(f"the numbers of this {type(what).__name__} cannot be read: {error}") from None
    if values is None:
        raise TracedError("these numbers are being traced, so there is nothing to show yet; plot what comes out")
    return np.asarray(values)


def _array(what: Any) -> np.ndarray:
    if isinstance(what, (str, bytes, dict)):
        array = np.array(None)
    else:
        try:
            array = np.asarray(what)
        except (ValueError, TypeError):
            array = np.array(None)
    if array.dtype.kind == "c":
        raise DtypeError(COMPLEX)
    try:
        return array.astype(np.float64) if array.dtype.kind in "biufV" else _refuse(what)
    except (ValueError, TypeError):
        return _refuse(what)


def _refuse(what: Any) -> np.ndarray:
    key = "'x'" if isinstance(what, dict) else 0
    hint = f"; give one of its gradients, as in eg.plot(g[{key}])" if isinstance(what, (dict, list, tuple)) else ""
    raise FrameworkError(
        f"{type(what).__name__} is nothing to plot: give a tensor or array of gradients, a Jacobian, contributions, "
        f"elements, a patch, or a list of {{place: values}} for each step{hint}"
    )


@dataclass(frozen=True)
class Scale:
    """From where to where colours go, both sides of zero alike, and what that leaves out.

    >>> from elementgrad._show.values import Scale
    >>> scale = Scale.of(np.array([1.0, -1.0] * 50 + [50.0]))
    >>> scale.limit, scale.beyond
    (3.0, 1)
    """

    limit: float
    count: int
    nonzero: int
    beyond: int
    """How many finite numbers are larger in size than the limit."""
    lowest: float
    highest: float
    broken: dict[str, int]
    """How many are not finite, by kind."""

    @classmethod
    def of(cls, values: np.ndarray, limit: float | None = None) -> "Scale":
        """A limit that a few large numbers do not decide, or one that is given."""
        finite = values[np.isfinite(values)]
        sizes = np.abs(finite)
        largest = float(sizes.max(initial=0.0))
        found = _robust(sizes[sizes > 0], largest) if limit is None else _given(limit)
        return cls(
            found,
            values.size,
            int(np.count_nonzero(values)),
            int(np.count_nonzero(sizes > found)),
            float(finite.min()) if finite.size else 0.0,
            float(finite.max()) if finite.size else 0.0,
            {name: int(test(values).sum()) for name, test in BROKEN.items() if test(values).any()},
        )

    @property
    def notes(self) -> list[str]:
        """What a picture in these colours does not show, or may not be seen to show."""
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
    def finite(self) -> bool:
        """Whether any number is, so that there is a lowest and a highest."""
        return self.count > sum(self.broken.values())

    @property
    def described(self) -> str:
        """The numbers in a few words, for who cannot see them."""
        span = f" from {self.lowest:.3g} to {self.highest:.3g}" if self.finite else ", none of them finite"
        words = f"{self.count} numbers{span}, {self.nonzero} of them not zero"
        return "; ".join([words, *self.notes, *[f"{count} {name}" for name, count in self.broken.items()]])


def _robust(sizes: np.ndarray, largest: float) -> float:
    if sizes.size < FEW:
        return largest or 1.0
    return min(largest, TIMES * float(np.percentile(sizes, ROBUST, method="lower")))


def _given(limit: float) -> float:
    try:
        number = float(limit)
    except (TypeError, ValueError):
        number = 0.0
    if not 0 < number < np.inf:
        raise OptionError(f"limit={limit!r} is no end of a scale; give a number above zero, or leave it out")
    return number


def pooled(values: np.ndarray, most: int) -> tuple[np.ndarray, tuple[int, int]]:
    """A matrix of at most so many rows and columns, each cell the largest in size of a block; and the blocks' sizes.

    What is not finite comes before all else, so that nothing of it is lost.

    >>> from elementgrad._show.values import pooled
    >>> pooled(np.array([[0.0, -3.0, 1.0, 2.0]]), 2)
    (array([[-3.,  2.]]), (1, 2))
    """
    rows, columns = values.shape
    block = max(1, -(-rows // most)), max(1, -(-columns // most))
    if block == (1, 1):
        return values, block
    down, across = -(-rows // block[0]), -(-columns // block[1])
    padded = np.zeros((down * block[0], across * block[1]))
    padded[:rows, :columns] = values
    blocks = padded.reshape(down, block[0], across, block[1]).transpose(0, 2, 1, 3).reshape(down, across, -1)
    return strongest(blocks), block


def strongest(values: np.ndarray) -> np.ndarray:
    """The number that is largest in size along the last axis, with its sign; one that is not finite before all else."""
    sizes = np.where(np.isnan(values), np.inf, np.abs(values))
    return np.take_along_axis(values, sizes.argmax(axis=-1)[..., None], axis=-1)[..., 0]


def require_some(shape: tuple[int, ...]) -> None:
    """Refuse what has no elements."""
    if not math.prod(shape):
        raise OptionError(f"shape {shape} has no elements, so there is nothing to draw; name some")


def marked(mark: Any, shape: tuple[int, ...]) -> np.ndarray:
    """The coordinates of the elements to mark, one row each; none if there is nothing to mark.

    >>> from elementgrad._show.values import marked
    >>> marked("conv1[1, -1]", (2, 3)).tolist()
    [[1, 2]]
    """
    if mark is None:
        return np.zeros((0, len(shape)), np.int64)
    place = Place.parse(mark) if isinstance(mark, str) else mark
    selection = place.select(shape) if isinstance(place, Place) else Selection.resolve(place, shape)
    return np.asarray(selection.coords()).reshape(-1, len(shape))
