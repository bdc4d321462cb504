"""Weights in a file, by their bytes: what a patch can be put into where no model and no framework is at hand."""

import io
import json
import math
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from operator import index
from typing import Any, NoReturn

import numpy as np

from elementgrad.backends.training import Part, Trainer
from elementgrad.errors import DtypeError, FrameworkError, PatchError, PlaceError
from elementgrad.text import listed, nearest
from elementgrad.train.numbers import VIEWS, Numbers
from elementgrad.train.replacement import replace
from elementgrad.train.storage import Stored, joined

ENDINGS = (".safetensors", ".npz")
DTYPES = {
    **{f"F{8 * width}": f"float{8 * width}" for width in (2, 4, 8)},
    **{
        f"{sign.upper() or ''}I{8 * width}".replace("UI", "U"): f"{sign}int{8 * width}"
        for sign in ("", "u")
        for width in (1, 2, 4, 8)
    },
    "BF16": "bfloat16",
    "C64": "complex64",
    "BOOL": "bool",
}
"""The names of dtypes in safetensors, and ours."""


class Held:
    """One tensor by its bytes, which may be written to."""

    def __init__(self, dtype: str, shape: Sequence[int], bits: np.ndarray):
        self.dtype = dtype
        self.shape = tuple(shape)
        self.bits = bits
        """uint8, one row per element, the lowest byte first."""

    @classmethod
    def of(cls, array: np.ndarray) -> "Held":
        """A NumPy array, copied."""
        numbers = Numbers.of(array)
        return cls(numbers.dtype, array.shape, np.array(numbers.bits))


class Weights:
    """Tensors by name, read from a file and written to one.

    >>> import tempfile, numpy as np
    >>> from elementgrad.train.weights import Weights
    >>> path = tempfile.mkdtemp() + "/weights.npz"
    >>> np.savez(path, bias=np.float32([1.0, 2.0]))
    >>> weights = Weights.read(path)
    >>> weights.tensors["bias"].bits[0] = weights.tensors["bias"].bits[1]
    >>> weights.write(path)
    >>> np.load(path)["bias"]
    array([2., 2.], dtype=float32)
    """

    def __init__(self, tensors: Mapping[str, Held], packed: bytearray | None = None):
        self.tensors = dict(tensors)
        self._packed = packed
        """The file as it was read, in which the bytes of the tensors are written to."""

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> "Weights":
        """The tensors of a .safetensors or .npz file."""
        path = os.fspath(path)
        if path.endswith(".npz"):
            try:
                with np.load(path, allow_pickle=False) as held:
                    return cls({name: Held.of(held[name]) for name in held.files})
            except (ValueError, EOFError) as error:
                raise PatchError(f"{path} holds no weights: {str(error).splitlines()[0]}") from None
        with open(path, "rb") as file:
            packed = bytearray(file.read())
        return cls(dict(_unpacked(path, packed)), packed)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write all tensors to a file, as a whole or not at all; in the format they came in nothing else changes."""
        path = os.fspath(path)
        if path.endswith(".safetensors"):
            replace(path, bytes(self._packed) if self._packed is not None else _pack(self.tensors))
            return
        unknown = [name for name, held in self.tensors.items() if held.dtype == "bfloat16" or held.dtype not in VIEWS]
        if unknown:
            raise PatchError(
                f"{self.tensors[unknown[0]].dtype} of {unknown[0]} has no place in .npz; write .safetensors"
            )
        file = io.BytesIO()
        arrays = {
            name: np.frombuffer(held.bits.tobytes(), VIEWS[held.dtype]).reshape(held.shape)
            for name, held in self.tensors.items()
        }
        np.savez(file, **arrays)  # type: ignore[arg-type]
        replace(path, file.getvalue())


class WeightsPart(Part):
    """Elements of a tensor in a file."""

    def __init__(self, tensor: Held, positions: np.ndarray, values: Numbers, originals: Numbers):
        self.tensor, self.positions, self.leaf, self.originals = tensor, positions, values, originals


class WeightsTrainer(Trainer):
    """How a patch comes into weights and out of them; training needs a model."""

    elsewhere: Mapping[str, str] = {}

    def __init__(self, weights: Weights):
        self._tensors = weights.tensors

    def names(self) -> Iterator[str]:
        """All of them."""
        return iter(self._tensors)

    def parameter(self, name: str) -> Held:
        """The tensor of that name."""
        if name not in self._tensors:
            raise PlaceError(f"no tensor named {name!r}; {nearest(name, list(self._tensors))}")
        return self._tensors[name]

    def named(self, *_: Any) -> NoReturn:
        """Tensors are not at hand."""
        raise PlaceError(f"weights in a file are named by texts; there are: {listed(list(self._tensors))}")

    lone = named

    def training(self, tensor: Held) -> Sequence[Part]:
        """None does."""
        return ()

    def check(self, tensor: Held, name: str) -> None:
        """Refuse what is never patched."""
        if not tensor.dtype.startswith(("float", "bfloat", "complex")):
            raise DtypeError(f"{name} is {tensor.dtype}, and only floats are patched; name a tensor of floats")

    def dtype(self, given: Any) -> Any:
        """As it is."""
        return given

    def part(self, tensor: Held, positions: np.ndarray, dtype: Any, values: Any = None, originals: Any = None) -> Part:
        """The elements with their values from a patch."""
        held = Numbers(tensor.dtype, tensor.bits[positions])
        return WeightsPart(tensor, positions, held if values is None else values, originals or held)

    def write(self, part: Part) -> None:
        """Put the values in, rounded to the dtype of the tensor."""
        part.tensor.bits[part.positions] = part.leaf.rounded(part.tensor.dtype).bits

    def restore(self, part: Part) -> None:
        """Put the originals in."""
        part.tensor.bits[part.positions] = part.originals.bits

    def bits(self, tensor: Any, positions: np.ndarray | None = None) -> tuple[str, np.ndarray]:
        """The bytes of some elements."""
        return tensor.dtype, tensor.bits if positions is None else tensor.bits[positions]

    def start(self, *_: Any, **__: Any) -> NoReturn:
        """Nothing trains here."""
        raise FrameworkError("weights in a file do not train; load them into a model")

    stop = check_loss = gradients = start


def _unpacked(path: str, packed: bytearray) -> Iterator[tuple[str, Held]]:
    """The tensors of a safetensors file, whose bytes are those of the file."""
    try:
        end = 8 + struct.unpack("<Q", packed[:8])[0]
        header = json.loads(packed[8:end])
        described = [(name, *_described(one)) for name, one in header.items() if name != "__metadata__"]
    except (struct.error, ValueError, LookupError, TypeError, AttributeError, OverflowError):
        raise PatchError(f"{path} is no safetensors file; give one that weights were saved to") from None
    for name, dtype, shape, first, last in described:
        size = math.prod(shape)
        if min(shape, default=0) < 0 or not 0 <= first <= last <= len(packed) - end or (size and (last - first) % size):
            raise PatchError(f"{path} is damaged: {name} does not fit into it")
        bits = np.frombuffer(memoryview(packed)[end + first : end + last], np.uint8)
        yield name, Held(DTYPES.get(dtype, dtype), shape, bits.reshape(size, -1) if size else bits.reshape(0, 1))


def _described(one: Mapping[str, Any]) -> tuple[str, tuple[int, ...], int, int]:
    """What a header says of a tensor: dtype, shape, and where its bytes begin and end."""
    first, last = map(index, one["data_offsets"])
    return str(one["dtype"]), tuple(map(index, one["shape"])), first, last


def _pack(tensors: Mapping[str, Held]) -> bytes:
    names = {ours: theirs for theirs, ours in DTYPES.items()}
    for name, held in tensors.items():
        if held.dtype not in names:
            raise PatchError(f"{held.dtype} of {name} has no place in .safetensors; write .npz")
    return joined({name: Stored(names[held.dtype], held.shape, held.bits.tobytes()) for name, held in tensors.items()})
