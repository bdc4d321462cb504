"""The file of a patch: a safetensors file with a checksum over all that has a meaning.

A safetensors file is the length of a header, the header in JSON, and the bytes of the tensors. The metadata in the
header of a patch are `format`, `version`, `sha256` and `entries`: for each entry a JSON object with its place, name,
shape, dtypes, fingerprint and other names. Entry 0 has the tensors `0.indices`, `0.values` and `0.originals`.

The file is written by hand, since the library's function for that takes other arguments in each version; the library
reads it, strictly.
"""

import hashlib
import json
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from elementgrad._place.grammar import listed
from elementgrad._train.entries import Entry
from elementgrad._train.numbers import VIEWS, BitArray
from elementgrad.errors import ElementgradError, PatchError, require_packages

FORMAT = "elementgrad-patch"
VERSION = 1
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


class StoredTensor(NamedTuple):
    """One tensor of a file; the dtype is called as in safetensors."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def encode_entries(entries: Sequence[Entry]) -> tuple[dict[str, str], dict[str, StoredTensor]]:
    """Return the metadata and the tensors that a file stores for entries."""
    tensors: dict[str, StoredTensor] = {}
    for number, entry in enumerate(entries):
        tensors[f"{number}.indices"] = StoredTensor("I64", entry.indices.shape, entry.indices.astype("<i8").tobytes())
        tensors[f"{number}.values"] = _encode_numbers(entry.values)
        tensors[f"{number}.originals"] = _encode_numbers(entry.originals)
    descriptions = [
        {
            "place": entry.place,
            "name": entry.name,
            "shape": entry.shape,
            "dtype": entry.dtype,
            "values": entry.values.dtype,
            "fingerprint": entry.fingerprint,
            **({} if entry.tied is None else {"tied": entry.tied}),
        }
        for entry in entries
    ]
    return {"entries": json.dumps(descriptions)}, tensors


def decode_entries(meta: Mapping[str, str], tensors: Mapping[str, StoredTensor]) -> Iterator[Entry]:
    """Yield the entries of a file. Its checksum is right, which does not mean that it was written by us."""
    try:
        descriptions = json.loads(meta["entries"])
        expected = {f"{number}.{tensor}" for number in range(len(descriptions)) for tensor in TENSORS}
        if expected != set(tensors):
            raise PatchError(f"{len(descriptions)} entries are described, and the tensors are {', '.join(tensors)}")
        for number, description in enumerate(descriptions):
            entry = _decode_entry(description, *[tensors[f"{number}.{tensor}"] for tensor in TENSORS])
            entry.require_applicable()
            yield entry
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        if isinstance(error, ElementgradError):
            raise
        raise PatchError(f"the entries are not described as in a patch ({error!r})") from None


def _decode_entry(
    description: dict[str, Any], indices: StoredTensor, values: StoredTensor, originals: StoredTensor
) -> Entry:
    keys = ("place", "name", "dtype", "values", "fingerprint")
    place, name, dtype, values_dtype, fingerprint = texts = [description[key] for key in keys]
    if not all(isinstance(text, str) for text in texts):
        raise PatchError("the entries are not described as in a patch, by texts")
    tied = description.get("tied")
    if tied is not None and not (isinstance(tied, list) and all(isinstance(other, str) for other in tied)):
        raise PatchError(f"{place}: what else the tensor is called is {tied!r}, and not a list of names")
    if indices.dtype != "I64" or len(indices.shape) != 1:
        raise PatchError(f"{place}: indices are {indices.dtype} of shape {indices.shape}, not I64 in one row")
    return Entry(
        place,
        name,
        description["shape"],
        dtype,
        np.frombuffer(indices.data, "<i8"),
        _decode_numbers(place, values_dtype, values),
        _decode_numbers(place, dtype, originals),
        fingerprint,
        None if tied is None else tuple(tied),
    )


def _encode_numbers(numbers: BitArray) -> StoredTensor:
    dtype, shape = _stored_form(numbers.dtype, len(numbers), numbers.bits.shape[1])
    return StoredTensor(dtype, shape, numbers.bits.tobytes())


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


def pack(meta: Mapping[str, str], tensors: Mapping[str, StoredTensor]) -> bytes:
    """Return the content of a patch's file; the same metadata and tensors give the same bytes."""
    meta = {"format": FORMAT, "version": str(VERSION), **meta}
    content = pack_safetensors(tensors, {**meta, "sha256": _checksum(meta, tensors)})
    length = int.from_bytes(content[:8], "little")
    if length > LONGEST:
        raise PatchError(
            f"the texts of the places take {length} bytes, and a file has room for {LONGEST}; name the elements by "
            "slices, or by lists where a mask marks few"
        )
    return content


def pack_safetensors(tensors: Mapping[str, StoredTensor], meta: Mapping[str, str] | None = None) -> bytes:
    """Return the bytes of a safetensors file: the length of the header, the header, the tensors."""
    header: dict[str, Any] = {} if meta is None else {"__metadata__": meta}
    payload: list[bytes] = []
    end = 0
    for name in sorted(tensors, key=lambda name: -_width(tensors[name].dtype)):  # so that each is aligned
        dtype, shape, data = tensors[name]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + len(data)]}
        payload.append(data)
        end += len(data)
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    return b"".join([struct.pack("<Q", len(head)), head, *payload])


def unpack(path: str | os.PathLike[str]) -> tuple[dict[str, str], dict[str, StoredTensor]]:
    """Return the metadata and tensors of a patch's file; raise a `PatchError` if they are not as they were written."""
    require_packages("safetensors", "reading a patch", "train")
    from safetensors import SafetensorError, deserialize

    name = Path(path).name
    with open(path, "rb") as file:
        head, header = _read_header(file, name)
        meta = _check_metadata(header, name)
        content = head + file.read()  # only now, since a file that is no patch may be large
    try:
        read = deserialize(content)
    except SafetensorError as error:
        raise PatchError(f"{name} is {_cut_text(header, len(content) - len(head)) or _damage_text(error)}") from None
    tensors = {name: StoredTensor(of["dtype"], tuple(of["shape"]), bytes(of["data"])) for name, of in read}
    if meta.pop("sha256", None) != _checksum(meta, tensors):
        raise PatchError(f"{name} is {_damage_text('its checksum is not that of what it holds')}")
    return meta, tensors


def _read_header(file: BinaryIO, name: str) -> tuple[bytes, dict[str, Any]]:
    """Return the beginning of a file, and the header in it; little is read of a file of another format."""
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
            header = json.loads(head[8:])
        except (ValueError, RecursionError):
            raise PatchError(f"{name} is {_damage_text('its header does not parse')}") from None
    if not isinstance(header, dict):
        kind = next((f"{kind}, and" for start, kind in OTHER_FORMATS.items() if head.startswith(start)), "")
        raise PatchError(f"{name} is {kind} no safetensors file; give one that a patch was saved to".replace("  ", " "))
    return head, header


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
    if version != str(VERSION):
        raise PatchError(
            f"{name} is a patch of format version {version[:20]}, and this elementgrad reads version {VERSION}; "
            "update elementgrad"
        )
    if not all(isinstance(value, str) for value in meta.values()):
        raise PatchError(f"{name} is {_damage_text('its metadata is not all text')}")
    return dict(meta)


def _width(dtype: str) -> int:
    """Return the bytes of a number; safetensors names dtypes by their bits, such as BF16 and C64, but for BOOL."""
    return int(dtype.lstrip("ABCDEFIOLU") or 8) // 8


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
    return f"damaged or was changed by other hands ({how}); save the patch again"


def _checksum(meta: Mapping[str, str], tensors: Mapping[str, StoredTensor]) -> str:
    """Hash all metadata but the checksum, and name, dtype, shape and bytes of all tensors, in a fixed order."""
    names = sorted(tensors)
    described = [sorted(meta.items()), [[name, tensors[name].dtype, tensors[name].shape] for name in names]]
    digest = hashlib.sha256(json.dumps(described).encode())
    for name in names:
        digest.update(tensors[name].data)
    return digest.hexdigest()
