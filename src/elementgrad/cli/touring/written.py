"""What an answer gave, as text: numbers of any framework, and whatever prints itself."""

from typing import Any

import numpy as np

from elementgrad import backends

WIDE = 5
"""A matrix of more columns is shown in shades, two characters for each number."""
SHADES = "·░▒▓█"


def written(value: Any) -> str:
    """A value as plain text: a tensor as its numbers, and a large matrix as shades.

    >>> from elementgrad.cli.touring.written import written
    >>> written([[1.0, 0.25], [0.0, 1e-9]]), written("as it is"), written(True)
    ('[[1, 0.25],\\n [0, 1e-09]]', 'as it is', 'True')
    """
    if value is None or isinstance(value, (str, bool, int)):
        return str(value)
    numbers = array(value)
    if numbers is not None:
        return shades(numbers) if is_picture(numbers) else _numbers(numbers.tolist())
    if isinstance(value, tuple) and all(isinstance(size, int) for size in value):
        return str(tuple(value))
    if isinstance(value, (list, tuple)):
        return ", ".join(map(written, value))
    return str(value)


def told(value: Any) -> str:
    """A value as text where there is a picture of it elsewhere: of a large matrix the size alone."""
    numbers = None if isinstance(value, str) else array(value)
    if numbers is not None and is_picture(numbers):
        return f"{' x '.join(map(str, numbers.shape))} numbers: see the picture"
    return written(value)


def array(value: Any) -> np.ndarray | None:
    """The numbers of a tensor or a list of floats; None of anything else."""
    if backends.owner(value) is not None:
        value = backends.find(value).floats(value)
    if isinstance(value, (list, tuple)) and not isinstance(np.array(value, object).flat[0], float):
        return None
    return np.asarray(value) if isinstance(value, (np.ndarray, float, list, tuple)) else None


def is_picture(numbers: np.ndarray) -> bool:
    """Whether these are so many numbers that they are looked at rather than read."""
    return numbers.ndim == 2 and min(numbers.shape) > WIDE


def shades(numbers: np.ndarray) -> str:
    """A matrix by the size of its numbers: the larger, the darker."""
    sizes = np.abs(numbers)
    steps = np.ceil(4 * sizes / (sizes.max() or 1)).astype(int)
    return "\n".join("".join(SHADES[step] * 2 for step in row) for row in steps)


def _numbers(numbers: Any) -> str:
    if not isinstance(numbers, list):
        return f"{numbers:.4g}"
    between = ",\n " if numbers and isinstance(numbers[0], list) else ", "
    return f"[{between.join(map(_numbers, numbers))}]"
