"""Weights in a .safetensors or .npz file: patches go into them without a model and without a framework."""

import json
import math
import mmap
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from operator import index
from types import MappingProxyType
from typing import Any, NoReturn

import numpy as np

from elementgrad._files import ArchiveError, StoredArray, describe_npz, pack_npz, replace_file
from elementgrad._place.grammar import listed, nearest
from elementgrad._train.bits import VIEWS, BitArray
from elementgrad._train.patch_file import RepeatedNameError, StoredTensor, pack_safetensors, unique_names
from elementgrad._train.trainer import ElementGroup, ResolvedPlace, Trainer
from elementgrad.errors import DtypeError, FrameworkError, PatchError, PlaceError

ENDINGS = (".safetensors", ".npz")
DTYPES = {
    **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
    **{f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"U{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "C64": "complex64",
    "BOOL": "bool",
}
"""The names of dtypes in safetensors to ours."""


class FileTensor:
    """One tensor by its bytes, which can be written to; they are read when they are first needed."""

    def __init__(
        self, dtype: str, shape: Sequence[int], bits: np.ndarray | Callable[[], np.ndarray], is_buffer: bool = False
    ):
        self.dtype = dtype
        self.shape = tuple(shape)
        self.is_buffer = is_buffer
        """True for a buffer of a model."""
        self.start = 0
        """Where it begins in a mapped file."""
        self.file: mmap.mmap | None = None
        """The mapped file."""
        self._bits = bits

    @classmethod
    def of(cls, array: np.ndarray) -> "FileTensor":
        """Return a copy of a NumPy array."""
        numbers = BitArray.of(array)
        return cls(numbers.dtype, array.shape, np.array(numbers.bits))

    @property
    def bits(self) -> np.ndarray:
        """The bytes, to write to: uint8, one row per element, the lowest byte first."""
        bits = self.read()
        self._bits = bits if bits.flags.writeable else np.array(bits)
        return self._bits

    def read(self) -> np.ndarray:
        """Return the bytes, which are not kept if they have to be read first; these may be a tensor of the user's."""
        if not callable(self._bits):
            return self._bits
        bits = self._bits().view()
        bits.setflags(write=False)
        return bits

    def unload(self, first: int = 0, last: int | None = None) -> None:
        """Give the pages of some elements in a mapped file back to the system, by default of all.

        They are read again when they are needed.
        """
        if self.file is None or not hasattr(mmap, "MADV_DONTNEED") or self.is_copy:
            return
        bits = self.read()
        begin, size = self.start + first * bits.shape[1], bits[first:last].size
        if size:  # an empty tensor may begin where the file ends
            page = begin - begin % mmap.PAGESIZE
            self.file.madvise(mmap.MADV_DONTNEED, page, begin + size - page)

    @property
    def is_copy(self) -> bool:
        """True if the bytes are in memory, and may have been written to."""
        return not callable(self._bits) and self._bits.flags.writeable


class Weights:
    """Tensors by name, read from a file and written to one.

    The file is mapped and not loaded: a tensor that is written to is copied first, and the rest stays on the disk.

    >>> import tempfile, numpy as np
    >>> from elementgrad._train.weights import Weights
    >>> path = tempfile.mkdtemp() + "/weights.npz"
    >>> np.savez(path, bias=np.float32([1.0, 2.0]))
    >>> weights = Weights.read(path)
    >>> weights.tensors["bias"].bits[0] = weights.tensors["bias"].bits[1]
    >>> weights.write(path)
    >>> np.load(path)["bias"]
    array([2., 2.], dtype=float32)
    """

    def __init__(
        self,
        tensors: Mapping[str, FileTensor],
        packed: memoryview | None = None,
        knows_ties: bool = False,
        metadata: Mapping[str, Any] = MappingProxyType({}),
    ):
        self.tensors = dict(tensors)
        self.metadata = metadata
        """The metadata of a safetensors file."""
        self.knows_ties = knows_ties
        """True if a tied tensor is listed under each of its names."""
        self._packed = packed
        """The file as it was read; the bytes of the tensors are views of it."""

    def names_of(self, tensor: FileTensor) -> Sequence[str]:
        """Return all names of a tensor."""
        return self._names[id(tensor)]

    @cached_property
    def _names(self) -> Mapping[int, Sequence[str]]:
        names: dict[int, list[str]] = {}
        for name, tensor in self.tensors.items():
            names.setdefault(id(tensor), []).append(name)
        return names

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> "Weights":
        """Open the tensors of a .safetensors or .npz file."""
        path = os.fspath(path)
        if path.endswith(".npz"):
            try:
                return cls({name: _open_archived(path, array) for name, array in describe_npz(path).items()})
            except (ArchiveError, DtypeError) as error:
                raise PatchError(f"{path} holds no weights: {error}") from None
        with open(path, "rb") as file:
            try:
                packed = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            except (OSError, ValueError):  # an empty file or a pipe
                packed = memoryview(file.read())
        tensors, metadata = _unpack(path, packed)
        return cls(tensors, packed, metadata=metadata)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write all tensors to a file, as a whole or not at all; in the format they came in nothing else changes."""
        path = os.fspath(path)
        if path.endswith(".safetensors"):
            replace_file(path, *(pack_tensors(self.tensors) if self._packed is None else self._parts(self._packed)))
            return
        unknown = [name for name, x in self.tensors.items() if x.dtype == "bfloat16" or x.dtype not in VIEWS]
        if unknown:
            raise PatchError(
                f"{self.tensors[unknown[0]].dtype} of {unknown[0]} has no place in .npz; write .safetensors"
            )
        arrays = {
            name: np.frombuffer(tensor.bits.tobytes(), VIEWS[tensor.dtype]).reshape(tensor.shape)
            for name, tensor in self.tensors.items()
        }
        try:
            content = pack_npz(arrays)
        except ArchiveError as error:
            raise PatchError(str(error)) from None
        replace_file(path, content)

    def _parts(self, packed: memoryview) -> Iterator[Any]:
        """Yield the file as it was read, with the tensors that were written to in their places."""
        end = 0
        for tensor in sorted(self.tensors.values(), key=lambda tensor: tensor.start):
            if tensor.is_copy:
                yield packed[end : tensor.start]
                yield tensor.bits
                end = tensor.start + tensor.bits.size
        yield packed[end:]


def _open_archived(path: str, array: StoredArray) -> FileTensor:
    def load() -> np.ndarray:
        try:
            return np.array(BitArray.of(array.load()).bits)
        except ArchiveError as error:
            raise PatchError(f"{path} holds no weights: {error}") from None

    name = array.dtype.name
    if name not in VIEWS:
        raise DtypeError(f"an array of {name} has no numbers to keep; there are: {', '.join(VIEWS)}")
    return FileTensor(name, array.shape, load)


class WeightsTrainer(Trainer):
    """Puts patches into weights of a file and takes them back; training needs a model."""

    freezes = False

    def __init__(self, weights: Weights):
        self._tensors = weights.tensors

    def names(self) -> Iterator[str]:
        return iter(self._tensors)

    def parameter(self, name: str) -> FileTensor:
        if name not in self._tensors:
            raise PlaceError(f"no tensor named {name!r}; {nearest(name, list(self._tensors))}")
        return self._tensors[name]

    def name_of(self, *_: Any) -> NoReturn:
        raise PlaceError(f"weights in a file are named by texts; there are: {listed(list(self._tensors))}")

    only_parameter = name_of

    def check_parameter(self, tensor: FileTensor, name: str) -> None:
        return  # tensors of any dtype are patched by their bytes

    def read_bits(self, tensor: Any, positions: np.ndarray | None = None) -> tuple[str, np.ndarray]:
        bits = tensor.read() if isinstance(tensor, FileTensor) else tensor.bits
        return tensor.dtype, bits if positions is None else bits[positions]

    def parse_dtype(self, dtype: Any) -> Any:
        return dtype

    def make_group(self, target: ResolvedPlace, dtype: Any, values: Any = None, originals: Any = None) -> ElementGroup:
        initial = target.current or BitArray(target.tensor.dtype, target.tensor.read()[target.positions])
        return ElementGroup(target, initial if values is None else values, originals or initial, initial)

    def groups_of(self, tensor: FileTensor) -> Sequence[ElementGroup]:
        return ()

    def write_to_parameter(self, group: ElementGroup) -> None:
        self._write(group, group.leaf.round_to(group.tensor.dtype))

    def restore(self, group: ElementGroup) -> None:
        self._write(group, group.originals)

    def cancel(self, groups: Sequence[ElementGroup]) -> None:
        for group in groups:
            self._write(group, group.initial)

    def _write(self, group: ElementGroup, values: BitArray) -> None:
        group.tensor.bits[group.positions] = values.bits

    def start(self, *_: Any, **__: Any) -> NoReturn:
        raise FrameworkError("weights in a file do not train; load them into a model")

    stop = check_loss = gradients = start


def _read_header(path: str, packed: memoryview) -> tuple[int, dict[str, Any], Any]:
    """Return where the tensors of a safetensors file begin, how it describes each of them, and its metadata."""
    try:
        end = 8 + struct.unpack("<Q", packed[:8])[0]
        if end > len(packed):
            raise ValueError
        header = json.loads(bytes(packed[8:end]), object_pairs_hook=unique_names)
        metadata = header.pop("__metadata__", None)
        return end, {name: _describe(of) for name, of in header.items()}, metadata
    except (struct.error, ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        twice = f", since it names {error} twice" if isinstance(error, RepeatedNameError) else ""
        raise PatchError(f"{path} is not a safetensors file{twice}; give one that weights were saved to") from None


def _unpack(path: str, packed: memoryview) -> tuple[dict[str, FileTensor], dict[str, Any]]:
    """Return the tensors of a safetensors file, as views of its bytes, and its metadata."""
    end, header, metadata = _read_header(path, packed)
    described = [(name, *of) for name, of in header.items()]
    for name, dtype, shape, first, last in described:
        size = math.prod(shape)
        known = DTYPES.get(dtype, dtype)
        width = np.dtype(VIEWS[known]).itemsize if known in VIEWS else (last - first) // max(1, size)
        if min(shape, default=0) < 0 or not 0 <= first <= last <= len(packed) - end or last - first != width * size:
            raise PatchError(f"{path} is damaged: {name} does not fit into it")
    filled = sorted((first, last, name) for name, _, _, first, last in described if first < last)
    for (_, last, name), (first, _, other) in pairwise(filled):
        if first < last:
            raise PatchError(
                f"{path} is damaged: {name} and {other} overlap in it, so that a change of one would change the other; "
                "save the weights again"
            )
    tensors = {}
    for name, dtype, shape, first, last in described:
        bits = np.frombuffer(packed[end + first : end + last], np.uint8)
        size = math.prod(shape)
        tensor = FileTensor(DTYPES.get(dtype, dtype), shape, bits.reshape(size, -1) if size else bits.reshape(0, 1))
        tensor.start = end + first
        tensor.file = packed.obj if isinstance(packed.obj, mmap.mmap) else None
        tensors[name] = tensor
    return tensors, metadata if isinstance(metadata, dict) else {}


def _describe(of: Mapping[str, Any]) -> tuple[str, tuple[int, ...], int, int]:
    """Return the dtype, the shape, and the first and last offset of a tensor in a header."""
    first, last = map(index, of["data_offsets"])
    return str(of["dtype"]), tuple(map(index, of["shape"])), first, last


def pack_tensors(tensors: Mapping[str, FileTensor], meta: Mapping[str, str] | None = None) -> list[Any]:
    """Return the parts of a safetensors file with these tensors."""
    names = {ours: theirs for theirs, ours in DTYPES.items()}
    if "__metadata__" in tensors:
        raise PatchError("a tensor called __metadata__ has no place in .safetensors; write .npz")
    for name, tensor in tensors.items():
        if tensor.dtype not in names:
            raise PatchError(f"{tensor.dtype} of {name} has no place in .safetensors; write .npz")
    stored = {
        name: StoredTensor(names[x.dtype], x.shape, np.ascontiguousarray(x.read())) for name, x in tensors.items()
    }
    return pack_safetensors(stored, meta)
