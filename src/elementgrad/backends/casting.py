"""Casts between floating dtypes that keep the bits of a NaN, where those of the frameworks make one NaN of all.

A NaN has a sign, a bit that says whether it is quiet, and a payload. They pass between dtypes as the upper bits of the
mantissa, so that a number of half precision comes back from float32 as it was.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

Integers = Any
"""A tensor of signed integers, of any framework or of NumPy."""


class Layout(NamedTuple):
    """How many bits a floating dtype has, and how many of them are its mantissa."""

    bits: int
    mantissa: int

    @property
    def infinity(self) -> int:
        """The bits of plus infinity, after which NaNs begin."""
        return (1 << (self.bits - 1)) - (1 << self.mantissa)


LAYOUTS = {
    "float16": Layout(16, 10),
    "bfloat16": Layout(16, 7),
    "float32": Layout(32, 23),
    "float64": Layout(64, 52),
}
"""The dtypes between which NaNs are cast by their bits; all others are cast as the framework does."""


def nan_bits(bits: Integers, before: str, after: str, where: Callable[..., Integers]) -> Integers:
    """Return the bits that NaNs of one dtype have in another, given and returned as integers that both fit into.

    >>> import numpy as np
    >>> [hex(bit) for bit in nan_bits(np.array([0x7E00, 0x7C01]), "float16", "float32", np.where)]
    ['0x7fc00000', '0x7f802000']
    """
    source, target = LAYOUTS[before], LAYOUTS[after]
    payload = bits & ((1 << source.mantissa) - 1)
    wider = target.mantissa - source.mantissa
    if wider >= 0:
        payload = payload * (1 << wider)
    else:
        payload = payload // (1 << -wider)
        payload = where(payload == 0, payload + (1 << (target.mantissa - 1)), payload)  # else it would be infinity
    found = payload + target.infinity
    return where(bits < 0, found + -(1 << (target.bits - 1)), found)


def together(before: str, after: str) -> int:
    """Return the width of the integers in which NaNs of one dtype become those of another."""
    return max(LAYOUTS[before].bits, LAYOUTS[after].bits)


def cast_array(array: np.ndarray, dtype: Any) -> np.ndarray:
    """Return a NumPy array in another dtype, of NumPy's own or of those that frameworks have added."""
    dtype = np.dtype(dtype)
    if array.dtype == dtype:
        return array
    if array.dtype.kind == dtype.kind == "c":
        parts = cast_array(np.ascontiguousarray(array).view(array.real.dtype), np.empty(0, dtype).real.dtype)
        return parts.view(dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        plain = array.astype(dtype)
    before, after = array.dtype.name, dtype.name
    if not {before, after} <= LAYOUTS.keys():
        return plain
    bits = np.ascontiguousarray(array).view(f"i{array.dtype.itemsize}").astype(f"i{together(before, after) // 8}")
    found = nan_bits(bits, before, after, np.where).astype(f"i{dtype.itemsize}")
    return np.where(np.isnan(plain), found, plain.view(found.dtype)).view(dtype)
