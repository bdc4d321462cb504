"""Numbers to the bit: `BitArray` keeps numbers of any framework's dtype, and casts keep the bits of a NaN.

The casts of the frameworks turn every NaN into the same one. A NaN has a sign, a quiet bit and a payload. Here they
pass between dtypes as the upper bits of the mantissa, so that half precision survives a trip through float32.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from elementgrad.errors import DtypeError, PatchError

Integers = Any
"""A tensor of signed integers, of any framework or of NumPy."""


class FloatLayout(NamedTuple):
    """The number of bits of a floating dtype, and of its mantissa."""

    bits: int
    mantissa: int

    @property
    def infinity(self) -> int:
        """The bits of plus infinity; those of NaNs are larger."""
        return (1 << (self.bits - 1)) - (1 << self.mantissa)


LAYOUTS = {
    "float16": FloatLayout(16, 10),
    "bfloat16": FloatLayout(16, 7),
    "float32": FloatLayout(32, 23),
    "float64": FloatLayout(64, 52),
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
    positive = payload + target.infinity
    return where(bits < 0, positive + -(1 << (target.bits - 1)), positive)


def common_width(before: str, after: str) -> int:
    """Return the width of the integers in which NaNs of one dtype become those of another."""
    return max(LAYOUTS[before].bits, LAYOUTS[after].bits)


def array_bits(array: Any) -> tuple[str, np.ndarray]:
    """Return the name of an array's dtype, and its elements as rows of bytes."""
    array = np.asarray(array)
    # By its bytes, since an array without elements or axes cannot always be viewed.
    return array.dtype.name, np.frombuffer(array.tobytes(), np.uint8).reshape(array.size, array.dtype.itemsize)


def cast_array(array: np.ndarray, dtype: Any) -> np.ndarray:
    """Cast a NumPy array to another dtype, NumPy's own or one that a framework has added."""
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
    bits = np.ascontiguousarray(array).view(f"i{array.dtype.itemsize}").astype(f"i{common_width(before, after) // 8}")
    nans = nan_bits(bits, before, after, np.where).astype(f"i{dtype.itemsize}")
    return np.where(np.isnan(plain), nans, plain.view(nans.dtype)).view(dtype)


VIEWS = {
    "float64": "<f8",
    "float32": "<f4",
    "float16": "<f2",
    "bfloat16": "<u2",  # unknown to NumPy: the upper half of a float32
    "complex128": "<c16",
    "complex64": "<c8",
    **{f"{sign}int{8 * width}": f"<{sign or 'i'}{width}" for sign in ("", "u") for width in (1, 2, 4, 8)},
    "bool": "|b1",
}
"""The known dtypes, and the NumPy dtype of their bits."""


def is_floating(dtype: str) -> bool:
    """Return True if a dtype of a name holds floats or complex numbers, including those that NumPy lacks."""
    return dtype.startswith(("float", "bfloat", "complex"))


@dataclass(frozen=True, eq=False, repr=False)
class BitArray:
    """Numbers of one dtype by their bits; equal only if every bit is, so -0.0 is not 0.0 and a NaN equals itself.

    An unknown dtype, such as `float8_e4m3fn`, is kept as well, but cannot be turned to floats.

    >>> import numpy as np
    >>> from elementgrad._train.bits import BitArray
    >>> BitArray.of(np.float32([1.0, -0.0])) == BitArray.of(np.float32([1.0, 0.0]))
    False
    >>> BitArray("bfloat16", np.uint8([[0x80, 0x3F], [0x20, 0xC1]])).floats().tolist()
    [1.0, -10.0]
    """

    dtype: str
    """The name of the dtype, such as "float32" or "bfloat16"."""
    bits: np.ndarray
    """The bytes, the lowest first: uint8, one row per number, read-only."""

    def __post_init__(self) -> None:
        bits = np.asarray(self.bits, order="C")
        if bits.flags.writeable or not bits.flags.owndata:
            bits = np.array(bits)  # a copy, so that it cannot change
        if bits.dtype != np.uint8 or bits.ndim != 2 or not bits.shape[1]:
            raise PatchError(
                f"bits of {self.dtype} are {bits.dtype} of shape {bits.shape}; give uint8, one row of bytes per number"
            )
        width = np.dtype(VIEWS[self.dtype]).itemsize if self.dtype in VIEWS else bits.shape[1]
        if bits.shape[1] != width:
            raise PatchError(f"a {self.dtype} has {width} bytes, and the rows of bits have {bits.shape[1]}")
        bits.setflags(write=False)
        object.__setattr__(self, "bits", bits)

    @classmethod
    def of(cls, array: np.ndarray) -> "BitArray":
        """Return the elements of a NumPy array in C order; it may have the bfloat16 of JAX and TensorFlow."""
        array = np.asarray(array)
        name = array.dtype.name
        if name not in VIEWS:
            raise DtypeError(f"an array of {name} has no numbers to keep; there are: {', '.join(VIEWS)}")
        if array.dtype.byteorder != "|" and name != "bfloat16":
            array = array.astype(VIEWS[name], copy=False)
        return cls(*array_bits(array))

    def floats(self) -> np.ndarray:
        """Return the numbers as float64, or complex128 if they are complex.

        >>> import numpy as np
        >>> from elementgrad._train.bits import BitArray
        >>> BitArray.of(np.float16([0.5, np.inf])).floats()
        array([0.5, inf])
        """
        if self.dtype not in VIEWS:
            raise DtypeError(f"{self.dtype} cannot be turned to floats here; its bits hold the numbers")
        numbers = self._view()
        if self.dtype == "bfloat16":
            numbers = _widen_bfloat16(numbers)
        with np.errstate(invalid="ignore"):  # a signalling NaN
            return numbers.astype(np.complex128 if numbers.dtype.kind == "c" else np.float64)

    def round_to(self, dtype: str) -> "BitArray":
        """Round to another floating dtype: to the nearest number, and to the even one of two equally near.

        >>> import numpy as np
        >>> from elementgrad._train.bits import BitArray
        >>> BitArray.of(np.float32([1.00390625, 1.01171875])).round_to("bfloat16").floats().tolist()
        [1.0, 1.015625]
        """
        if dtype == self.dtype:
            return self
        if not {dtype, self.dtype} <= VIEWS.keys():
            raise DtypeError(f"{self.dtype} cannot be rounded to {dtype} here")
        numbers = self._view()
        if "bfloat16" not in (self.dtype, dtype):
            return BitArray.of(cast_array(numbers, VIEWS[dtype]))
        wide = _widen_bfloat16(numbers) if self.dtype == "bfloat16" else cast_array(numbers, "<f4")
        if dtype != "bfloat16":
            return BitArray.of(cast_array(wide, VIEWS[dtype]))
        bits = wide.view("<u4")
        # Adding a half of the last place, less one bit unless the number is odd, rounds ties to even.
        half = ((bits >> 16) & 1) + 0x7FFF
        nans = nan_bits(wide.view("<i4"), "float32", dtype, np.where)
        upper = np.where(np.isnan(wide), nans & 0xFFFF, (bits + half) >> 16).astype("<u2")
        return BitArray(dtype, np.frombuffer(upper.tobytes(), np.uint8).reshape(len(upper), 2))

    def _view(self) -> np.ndarray:
        return self.bits.reshape(-1).view(VIEWS[self.dtype])

    def __len__(self) -> int:
        return len(self.bits)

    def __getitem__(self, rows: np.ndarray | slice) -> "BitArray":
        bits = self.bits[rows]
        bits.setflags(write=False)
        return BitArray(self.dtype, bits)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BitArray):
            return NotImplemented
        return self.dtype == other.dtype and np.array_equal(self.bits, other.bits)

    def __hash__(self) -> int:
        return hash((self.dtype, self.bits.tobytes()))

    def __repr__(self) -> str:
        shown = np.array2string(self.floats(), threshold=8, edgeitems=3) if self.dtype in VIEWS else f"of {len(self)}"
        return f"<Numbers {self.dtype} {shown}>"


def _widen_bfloat16(bits: np.ndarray) -> np.ndarray:
    """Return bfloat16, given as uint16, as float32."""
    return (bits.astype("<u4") << 16).view("<f4")
