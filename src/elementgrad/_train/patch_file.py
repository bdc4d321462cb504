"""The file of a patch: a safetensors file with a checksum over all that has a meaning.

A safetensors file is the length of a header, the header in JSON, and the bytes of the tensors. The metadata in the
header of a patch are `format`, `version`, `sha256` and `entries`: for each entry a JSON object with its place, name,
shape, dtypes, fingerprint and other names. Entry 0 has the tensors `0.values` and `0.originals`; scattered elements
have no place but `0.gaps` (gaps.py) or, if they do not ascend, `0.positions`. The checksum of each tensor is in its
entry, and `sha256` is over the header, so that one entry can be read and checked without the others.

Version 1 had a place for each entry, `0.indices` as int64, and one checksum over everything. It is read for good.
"""

import errno
import hashlib
import json
import math
import mmap
import os
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from itertools import pairwise
from operator import index as as_int
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from elementgrad._place.grammar import listed
from elementgrad._place.place import Place
from elementgrad._train.bits import VIEWS, BitArray
from elementgrad._train.entries import Entry, check_shape
from elementgrad._train.gaps import decode_gaps, encode_gaps
from elementgrad._train.history import BitsAt, ascends
from elementgrad.errors import ElementgradError, OptionError, PatchError

FORMAT = "elementgrad-patch"
VERSION = 2
LONGEST = 100_000_000
"""The most bytes of a header; the library reads no longer one either."""
OTHER_FORMATS = {
    b"PK": "a zip archive, such as torch.save, Keras and NumPy write",
    b"\x89HDF": "an HDF5 file, such as Keras writes",
    b"\x93NUMPY": "a NumPy array",
    b"\x80": "a pickle, which is never opened here",
}
"""The first bytes of files that a user may take for a patch."""
STORED_DTYPES = {
    "float64": ("F64", 1),
    "float32": ("F32", 1),
    "float16": ("F16", 1),
    "bfloat16": ("BF16", 1),
    "complex128": ("F64", 2),
    "complex64": ("F32", 2),
}
"""The safetensors name of a dtype, and how many of these make one number; other dtypes are stored as bytes."""
TENSORS = ("indices", "values", "originals")
"""The tensors of each entry in version 1."""
EXPANSION = 1 << 16
"""The most bytes that one compressed byte may stand for."""


class StoredTensor(NamedTuple):
    """One tensor of a file; the dtype is called as in safetensors."""

    dtype: str
    shape: tuple[int, ...]
    data: Any
    """Bytes, or an array or a part of a mapped file that has them."""


def encode_entries(entries: Sequence[Entry], compress: bool = False) -> tuple[dict[str, str], dict[str, StoredTensor]]:
    """Return the metadata and the tensors that a file stores for entries."""
    every: dict[str, StoredTensor] = {}
    descriptions = []
    for number, entry in enumerate(entries):
        tensors = {"values": _encode_numbers(entry.values)}
        if entry.originals is not None:
            tensors["originals"] = _encode_numbers(entry.originals)
        if entry.is_scattered:
            tensors |= _encode_positions(entry.indices)
        if entry.since is not None:
            tensors["since.gaps"] = _integers(encode_gaps(entry.since.positions))
            tensors["since.values"] = _encode_numbers(BitArray(entry.dtype, entry.since.bits))
        packed = {}
        if compress:
            packed = {name: [tensor.dtype, tensor.shape] for name, tensor in tensors.items()}
            tensors = {name: _compress(tensor) for name, tensor in tensors.items()}
        every |= {f"{number}.{name}": tensor for name, tensor in tensors.items()}
        descriptions.append(
            {
                **({} if entry.is_scattered else {"place": entry.place}),
                "name": entry.name,
                "shape": entry.shape,
                "dtype": entry.dtype,
                "values": entry.values.dtype,
                "fingerprint": entry.fingerprint,
                **({} if entry.tied is None else {"tied": entry.tied}),
                **({} if entry.originals is not None else {"sha256": entry.sha256}),
                **({"packed": packed} if packed else {}),
                "checksums": {name: hashlib.sha256(tensor.data).hexdigest() for name, tensor in tensors.items()},
            }
        )
    return {"entries": json.dumps(descriptions)}, every


def _encode_positions(positions: np.ndarray) -> dict[str, StoredTensor]:
    if ascends(positions):
        return {"gaps": _integers(encode_gaps(positions))}
    return {"positions": _integers(positions.astype("<u4" if positions.max() < 2**32 else "<u8"))}


def _integers(array: np.ndarray) -> StoredTensor:
    return StoredTensor(f"U{8 * array.dtype.itemsize}", array.shape, array)


class PatchFile:
    """The file of a patch, mapped into memory: entries are read, and checked, one at a time."""

    def __init__(self, path: str | os.PathLike[str]):
        if not isinstance(path, (str, os.PathLike)):
            raise OptionError(f"{type(path).__name__} is not a path; give that of the file of a patch")
        self.name = Path(path).name
        if Path(path).is_dir():
            text = (
                "it is a folder, and a patch is a file; give that, or the folder of an adapter with the weights that "
                "it is for, as in eg.Patch.read(folder, base=model)"
            )
            raise IsADirectoryError(errno.EISDIR, text, os.fspath(path))
        with open(path, "rb") as file:
            header = _read_header(file, self.name)
            meta = _check_metadata(header, self.name)
            start = file.tell()
            # Only now, since a file that is no patch may be large.
            try:
                data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))[start:]
            except (OSError, ValueError):  # a pipe
                data = memoryview(file.read())
        try:
            self._tensors = find_tensors(header, data)
        except LayoutError as error:
            text = _cut_text(header, len(data)) or _damage_text(error)
            raise PatchError(f"{self.name} is {text}") from None
        self._version = meta["version"]
        if meta.pop("sha256", None) != _checksum(meta, self._tensors):
            raise PatchError(f"{self.name} is {_damage_text('its checksum is not that of what it holds')}")
        self._described: list[dict[str, Any]] = self._read_checked(lambda: self._read_descriptions(meta["entries"]))

    def entries(self, wanted: Callable[[str], bool] = lambda name: True) -> Iterator[Entry]:
        """Yield the entries of tensors by their names. That all is as it was written does not mean it was by us."""
        for number, description in enumerate(self._described):
            if wanted(description["name"]):
                yield self._read_checked(lambda: self._read_entry(number, description))  # noqa: B023

    def _read_checked(self, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except (ValueError, TypeError, LookupError, RecursionError) as error:
            if isinstance(error, ElementgradError):
                raise PatchError(f"{self.name}: {error}") from None
            raise PatchError(f"{self.name}: the entries are not described as in a patch ({error!r})") from None

    def _read_descriptions(self, text: str) -> list[dict[str, Any]]:
        described = json.loads(text)
        checksums = TENSORS if self._version == "1" else None
        expected = {f"{i}.{name}" for i, one in enumerate(described) for name in checksums or one["checksums"]}
        if expected != set(self._tensors):
            raise PatchError(f"{len(described)} entries are described, and the tensors are {', '.join(self._tensors)}")
        for one in described:
            if not isinstance(one["name"], str):
                raise PatchError("the entries are not described as in a patch, by texts")
        return list(described)

    def _read_entry(self, number: int, description: dict[str, Any]) -> Entry:
        keys = ("name", "dtype", "values", "fingerprint") + (("place",) if self._version == "1" else ())
        texts = [description[key] for key in keys] + [description.get(key, "") for key in ("place", "sha256")]
        if not all(isinstance(text, str) for text in texts):
            raise PatchError("the entries are not described as in a patch, by texts")
        name, dtype, values_dtype, fingerprint = texts[:4]
        place = description.get("place")
        label = place or name
        tied = description.get("tied")
        if tied is not None and not (isinstance(tied, list) and all(isinstance(other, str) for other in tied)):
            raise PatchError(f"{label}: what else the tensor is called is {tied!r}, and not a list of names")
        tensors = {
            tensor: self._read_tensor(number, tensor, description)
            for tensor in (TENSORS if self._version == "1" else description["checksums"])
        }
        values = _decode_numbers(label, values_dtype, tensors["values"])
        originals = _decode_numbers(label, dtype, tensors["originals"]) if "originals" in tensors else None
        shape = check_shape(label, description["shape"])
        size = math.prod(shape)
        since = None
        if "since.values" in tensors:
            bits = _decode_numbers(label, dtype, tensors["since.values"]).bits
            since = BitsAt(_decode_positions(label, tensors, "since.", len(bits), size), bits)
        if place is not None and self._version != "1":
            if {"gaps", "positions"} & tensors.keys():
                raise PatchError(f"{label}: there is a place, and positions as well")
            selection = Place.parse(place).select(shape)
            if selection.size != len(values):
                raise PatchError(f"{label}: the place names {selection.size} elements, and there are {len(values)}")
            positions = selection.flat().reshape(-1)
        else:
            positions = _decode_positions(label, tensors, "", len(values), size)
        entry = Entry(
            place,
            name,
            shape,
            dtype,
            positions,
            values,
            originals,
            fingerprint,
            tied=None if tied is None else tuple(tied),
            sha256=description.get("sha256"),
            since=since,
        )
        entry.require_applicable()
        return entry

    def _read_tensor(self, number: int, name: str, description: dict[str, Any]) -> StoredTensor:
        stored = self._tensors[f"{number}.{name}"]
        if self._version == "1":
            return stored
        if hashlib.sha256(stored.data).hexdigest() != description["checksums"][name]:
            raise PatchError(
                f"the file is {_damage_text(f'the checksum of {number}.{name} is not that of what it holds')}"
            )
        packed = description.get("packed", {}).get(name)
        return stored if packed is None else _decompress(stored, packed[0], tuple(map(as_int, packed[1])))


def _decode_positions(
    label: str, tensors: Mapping[str, StoredTensor], prefix: str, count: int, size: int
) -> np.ndarray:
    known = {"indices": ("I64",), "positions": ("U32", "U64"), "gaps": ("U8", "U16", "U32", "U64")}
    name = next((name for name in known if prefix + name in tensors), None)
    if name is None:
        raise PatchError(f"{label}: there is neither a place nor positions")
    dtype, shape, data = tensors[prefix + name]
    if dtype not in known[name] or len(shape) != 1:
        what = "not I64 in one row" if name == "indices" else "not unsigned integers in one row"
        raise PatchError(f"{label}: {name} are {dtype} of shape {shape}, {what}")
    array = np.frombuffer(data, f"<{dtype[0].lower()}{int(dtype[1:]) // 8}")
    if name == "gaps":
        return decode_gaps(array, count, size)
    if name == "positions" and len(array) and array.max() >= size:
        raise PatchError(f"{label}: position {array.max()} is out of range for {size} elements")
    return array


def _zstandard(what: str) -> Any:
    try:
        return import_module("zstandard")
    except ImportError:
        raise ImportError(f"{what} needs zstandard; pip install zstandard") from None


def _compress(tensor: StoredTensor) -> StoredTensor:
    zstandard = _zstandard("compress=True")
    data = zstandard.ZstdCompressor(level=3).compress(tensor.data)
    return StoredTensor("U8", (len(data),), data)


def _decompress(stored: StoredTensor, dtype: str, shape: tuple[int, ...]) -> StoredTensor:
    zstandard = _zstandard("reading a compressed patch")
    size = math.prod(shape) * _width(dtype)
    if min(shape, default=0) < 0 or size > EXPANSION * len(stored.data):
        raise PatchError(f"a compressed tensor of {len(stored.data)} bytes cannot be {dtype} of shape {shape}")
    try:
        data = zstandard.ZstdDecompressor().decompress(stored.data, max_output_size=size) if size else b""
    except zstandard.ZstdError as error:
        raise PatchError(f"a tensor does not decompress ({error})") from None
    if len(data) != size:
        raise PatchError(f"a compressed tensor has {len(data)} bytes and is described as {dtype} of shape {shape}")
    return StoredTensor(dtype, shape, data)


def _encode_numbers(numbers: BitArray) -> StoredTensor:
    dtype, shape = _stored_form(numbers.dtype, len(numbers), numbers.bits.shape[1])
    return StoredTensor(dtype, shape, numbers.bits)


def _decode_numbers(place: str, dtype: str, stored: StoredTensor) -> BitArray:
    count = stored.shape[0] if stored.shape else 0
    width = np.dtype(VIEWS[dtype]).itemsize if dtype in VIEWS else stored.shape[-1] if stored.shape else 0
    if _stored_form(dtype, count, width) != (stored.dtype, stored.shape):
        raise PatchError(f"{place}: {dtype} is not stored as {stored.dtype} of shape {stored.shape}")
    return BitArray(dtype, np.frombuffer(stored.data, np.uint8).reshape(count, width))


def _stored_form(dtype: str, count: int, width: int) -> tuple[str, tuple[int, ...]]:
    """Return the dtype and shape in a file of `count` numbers of `width` bytes."""
    if dtype not in STORED_DTYPES:
        return "U8", (count, width)
    name, numbers = STORED_DTYPES[dtype]
    return name, (count,) if numbers == 1 else (count, numbers)


def pack(meta: Mapping[str, str], tensors: Mapping[str, StoredTensor]) -> list[Any]:
    """Return the content of a patch's file in parts; the same metadata and tensors give the same bytes."""
    meta = {"format": FORMAT, "version": str(VERSION), **meta}
    parts = pack_safetensors(tensors, {**meta, "sha256": _checksum(meta, tensors)})
    length = len(parts[0]) - 8
    if length > LONGEST:
        raise PatchError(
            f"the texts of the places take {length} bytes, and a file has room for {LONGEST}; name the elements by "
            "slices, or by lists where a mask marks few"
        )
    return parts


def pack_safetensors(tensors: Mapping[str, StoredTensor], meta: Mapping[str, str] | None = None) -> list[Any]:
    """Return the parts of a safetensors file: the length of the header and the header, and the tensors."""
    header: dict[str, Any] = {} if meta is None else {"__metadata__": meta}
    payload: list[Any] = []
    end = 0
    for name in sorted(tensors, key=lambda name: -_width(tensors[name].dtype)):  # so that each is aligned
        dtype, shape, data = tensors[name]
        size = memoryview(data).nbytes
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        payload.append(data)
        end += size
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    return [struct.pack("<Q", len(head)) + head, *payload]


class LayoutError(ValueError):
    """The header of a safetensors file does not describe what is behind it."""


def find_tensors(header: Mapping[str, Any], data: memoryview) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file as parts of its bytes, which they must fill without a gap."""
    tensors: dict[str, StoredTensor] = {}
    ranges = [(0, 0)]
    for name, of in header.items():
        if name == "__metadata__":
            continue
        try:
            dtype, shape = of["dtype"], tuple(map(as_int, of["shape"]))
            first, last = map(as_int, of["data_offsets"])
            size = math.prod(shape) * _width(dtype)
        except (TypeError, LookupError, ValueError, AttributeError):
            raise LayoutError(f"{name} is not described as a tensor") from None
        if min(shape, default=0) < 0 or not 0 <= first <= last <= len(data) or last - first != size:
            raise LayoutError(f"{name} does not fit into it")
        ranges.append((first, last))
        tensors[name] = StoredTensor(dtype, shape, data[first:last])
    if any(last != first for (_, last), (first, _) in pairwise([*sorted(ranges), (len(data), len(data))])):
        raise LayoutError("its tensors overlap or leave bytes between them")
    return tensors


def _read_header(file: BinaryIO, name: str) -> dict[str, Any]:
    """Return the header of a file; little is read of a file of another format."""
    head = file.read(9)
    length = int.from_bytes(head[:8], "little")
    if len(head) < 9:
        raise PatchError(
            f"{name} is {'cut short' if head else 'empty'}: it has {len(head)} bytes; save the patch again"
        )
    header: Any = None
    if head[8:] == b"{" and 0 < length <= LONGEST:
        head += file.read(length - 1)
        if len(head) < 8 + length:
            raise PatchError(
                f"{name} is cut short: its header has {len(head) - 8} of {length} bytes; save the patch again"
            )
        try:
            header = json.loads(head[8:], object_pairs_hook=unique_names)
        except (ValueError, RecursionError):
            raise PatchError(f"{name} is {_damage_text('its header does not parse')}") from None
    if not isinstance(header, dict):
        kind = next((f"{kind}, and" for start, kind in OTHER_FORMATS.items() if head.startswith(start)), "")
        raise PatchError(f"{name} is {kind} no safetensors file; give one that a patch was saved to".replace("  ", " "))
    return header


class RepeatedNameError(ValueError):
    """A name occurs twice in one JSON object, of which most parsers take the last."""


def unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs of a JSON object as a dict, or raise an error if a name stands twice."""
    unique = dict(pairs)
    if len(unique) < len(pairs):
        raise RepeatedNameError(repr(Counter(name for name, _ in pairs).most_common(1)[0][0]))
    return unique


def _check_metadata(header: dict[str, Any], name: str) -> dict[str, str]:
    """Return the metadata of a header, if it is that of a patch in a known version."""
    meta = header.get("__metadata__")
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        names = [tensor for tensor in header if tensor != "__metadata__"]
        holds = f"{len(names)} tensors ({listed(names)})" if names else "no tensors"
        raise PatchError(f"{name} is a safetensors file with {holds} and no patch; give one that a patch was saved to")
    version = meta.get("version")
    if not isinstance(version, str) or not version.isdecimal() or version == "0":
        raise PatchError(f"{name} is {_damage_text(f'its version is {version!r}')}")
    if int(version) > VERSION:
        raise PatchError(
            f"{name} is a patch of format version {version[:20]}, and this elementgrad reads up to version {VERSION}; "
            "update elementgrad"
        )
    if not all(isinstance(value, str) for value in meta.values()):
        raise PatchError(f"{name} is {_damage_text('its metadata is not all text')}")
    return dict(meta)


def _width(dtype: str) -> int:
    """Return the bytes of a number; safetensors names dtypes by their bits, as BF16, F8_E5M2 and C64, but for BOOL."""
    return int(dtype.partition("_")[0].lstrip("ABCDEFIOLU") or 8) // 8


def _cut_text(header: dict[str, Any], size: int) -> str | None:
    """Return what to say of a file whose end is missing; None if something else is wrong."""
    try:
        promised = max((of["data_offsets"][1] for tensor, of in header.items() if tensor != "__metadata__"), default=0)
        if size < promised:
            return f"cut short: {size} of {promised} bytes of its tensors are there; save the patch again"
    except (TypeError, LookupError):
        pass
    return None


def _damage_text(how: object) -> str:
    return f"damaged or was changed by another program ({how}); save the patch again"


def _checksum(meta: Mapping[str, str], tensors: Mapping[str, StoredTensor]) -> str:
    return hash_tensors(meta, tensors, with_bytes=meta["version"] == "1")


def hash_tensors(meta: Mapping[str, str], tensors: Mapping[str, StoredTensor], with_bytes: bool) -> str:
    """Hash metadata, names, dtypes and shapes of all tensors, and their bytes unless these are hashed elsewhere."""
    names = sorted(tensors)
    described = [sorted(meta.items()), [[name, tensors[name].dtype, tensors[name].shape] for name in names]]
    digest = hashlib.sha256(json.dumps(described).encode())
    for name in names if with_bytes else ():
        digest.update(tensors[name].data)
    return digest.hexdigest()
