"""Find and name single elements of tensors, in the same way on all backends."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from elementgrad._explain.trace import Numbers
from elementgrad._place.place import Place
from elementgrad._place.selection import resolve

Tensor = Any


def first_bad(array: np.ndarray) -> tuple[int, ...]:
    flat = int(np.argmin(np.isfinite(array).reshape(-1)))
    return tuple([int(i) for i in np.unravel_index(flat, array.shape)])


@dataclass(frozen=True)
class BadElement:
    """An element that is not finite."""

    name: str
    """The name of the tensor."""
    index: tuple[int, ...]
    value: float

    @property
    def place(self) -> str:
        return place_text(self.name, self.index)

    def __str__(self) -> str:
        return f"{self.place} is {self.value!r}"


def find_nonfinite(named: Iterable[tuple[str, Tensor]], numbers: Numbers) -> BadElement | None:
    """Return the first element that is not finite, of the first of these tensors that has one."""
    for name, x in named:
        if numbers.is_differentiable(x) and not math.isfinite(numbers.size(x)):
            array = numbers.array(x)
            index = first_bad(array)
            return BadElement(name, index, bad_float(array[index]))
    return None


def place_text(name: str, index: Sequence[int]) -> str:
    return f"{name}[{', '.join(map(str, index))}]" if index else name


def bad_float(value: Any) -> float:
    """Return a number as a float: of a complex one the part that is not finite."""
    if np.iscomplexobj(value):
        return float(value.real) if not math.isfinite(value.real) else float(value.imag)
    return float(value)


def largest_element(name: str, place: Place, array: np.ndarray) -> tuple[str, float | None]:
    """Return the place and the value of the largest element of an array that a rule is about; None if it is empty."""
    positions = positions_of(place, array.shape)
    if not positions.size:
        return name, None
    first = int(positions[np.argmax(np.abs(array.reshape(-1)[positions]))])
    index = [int(i) for i in np.unravel_index(first, array.shape)]
    return place_text(name, index), float(np.real(array.reshape(-1)[first]))


def positions_of(place: Place, shape: tuple[int, ...]) -> np.ndarray:
    """Return the flat positions of the elements that a place names; all if it has no index."""
    selection = place.select(shape) if place.index else resolve((), shape)
    return np.array(selection.flat()).reshape(-1)
