"""Places of one tensor that are to have no element in common."""

from collections.abc import Sequence

import numpy as np

from elementgrad.errors import DuplicateError


def repeated(positions: np.ndarray) -> int | None:
    """A position that stands twice."""
    ordered = np.sort(positions)
    again = ordered[1:][ordered[1:] == ordered[:-1]]
    return int(again[0]) if again.size else None


def require_apart(name: str, shape: tuple[int, ...], places: Sequence[tuple[str, np.ndarray]]) -> None:
    """Refuse an element of a tensor that two places name, for which of them would it belong to?

    >>> import numpy as np
    >>> from elementgrad.train.apart import require_apart
    >>> require_apart("fc.bias", (4,), [("fc.bias[:2]", np.array([0, 1])), ("fc.bias[1]", np.array([1]))])
    Traceback (most recent call last):
    elementgrad.errors.DuplicateError: fc.bias[1] is named by fc.bias[:2] and by fc.bias[1]; name each element once
    """
    twice = repeated(np.concatenate([np.zeros(0, np.int64), *[positions for _, positions in places]]))
    if twice is not None:
        one, other, *_ = [place for place, positions in places if twice in positions]
        raise DuplicateError(f"{element(name, shape, twice)} is named by {one} and by {other}; name each element once")


def element(name: str, shape: tuple[int, ...], position: int) -> str:
    """The text of one element of a tensor."""
    return f"{name}{[int(axis) for axis in np.unravel_index(position, shape)]}" if shape else name
