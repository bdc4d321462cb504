"""Tensors and texts in a safetensors file that tells when it was damaged: a checksum covers all that has a meaning.

A safetensors file is the length of a header, the header in JSON, and the bytes of the tensors. It is written here by
hand, since the library's function for that takes other arguments in each version; the library reads it, strictly.
"""

import hashlib
import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from elementgrad.errors import PatchError
from elementgrad.extras import require
from elementgrad.text import listed

FORMAT = "elementgrad-patch"
VERSION = 1
LONGEST = 100_000_000
"""Bytes of a header; the library reads no longer one either."""
OTHERS = {
    b"PK": "a zip archive, such as torch.save, Keras and NumPy write",
    b"\x89HDF": "an HDF5 file, such as Keras writes",
    b"\x93NUMPY": "a NumPy array",
    b"\x80": "a pickle, which is never opened here",
}
"""How files begin that somebody may give for a patch."""


class Stored(NamedTuple):
    """One tensor of a file."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def pack(meta: Mapping[str, str], tensors: Mapping[str, Stored]) -> bytes:
    """The content of a file with these tensors and texts; the same ones give the same bytes."""
    text = {"format": FORMAT, "version": str(VERSION), **meta}
    content = joined(tensors, {**text, "sha256": _checksum(text, tensors)})
    length = int.from_bytes(content[:8], "little")
    if length > LONGEST:
        raise PatchError(
            f"the texts of the places take {length} bytes, and a file has room for {LONGEST}; name the elements by "
            "slices, or by lists where a mask marks few"
        )
    return content


def joined(tensors: Mapping[str, Stored], text: Mapping[str, str] | None = None) -> bytes:
    """The bytes of a safetensors file: the length of the header, the header, the tensors."""
    header: dict[str, Any] = {} if text is None else {"__metadata__": text}
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


def unpack(path: str | os.PathLike[str]) -> tuple[dict[str, str], dict[str, Stored]]:
    """The texts and tensors of a file; a `PatchError` if they are not as they were written."""
    require("safetensors", "reading a patch", "train")
    from safetensors import SafetensorError, deserialize

    with open(path, "rb") as file:
        head, header = _header(file, Path(path).name)
        text = _text(header, Path(path).name)
        content = head + file.read()  # only now, for what is no patch may be large
    try:
        read = deserialize(content)
    except SafetensorError as error:
        raise PatchError(f"{Path(path).name} is {_cut(header, len(content) - len(head)) or _damaged(error)}") from None
    tensors = {name: Stored(of["dtype"], tuple(of["shape"]), bytes(of["data"])) for name, of in read}
    if text.pop("sha256", None) != _checksum(text, tensors):
        raise PatchError(f"{Path(path).name} is {_damaged('its checksum is not that of what it holds')}")
    return text, tensors


def _header(file: BinaryIO, name: str) -> tuple[bytes, dict[str, Any]]:
    """The beginning of a file, and the header that it is; of a file of another kind little is read."""
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
            raise PatchError(f"{name} is {_damaged('its header does not parse')}") from None
    if not isinstance(header, dict):
        kind = next((f"{kind}, and" for start, kind in OTHERS.items() if head.startswith(start)), "")
        raise PatchError(f"{name} is {kind} no safetensors file; give one that a patch was saved to".replace("  ", " "))
    return head, header


def _text(header: dict[str, Any], name: str) -> dict[str, str]:
    """The texts in a header, if it is the header of a patch and of a version that is understood."""
    text = header.get("__metadata__")
    if not isinstance(text, dict) or text.get("format") != FORMAT:
        held = [tensor for tensor in header if tensor != "__metadata__"]
        holds = f"{len(held)} tensors ({listed(held)})" if held else "no tensors"
        raise PatchError(f"{name} is a safetensors file with {holds} and no patch; give one that a patch was saved to")
    version = text.get("version")
    if not isinstance(version, str) or not version.isdecimal() or version == "0":
        raise PatchError(f"{name} is {_damaged(f'its version is {version!r}')}")
    if version != str(VERSION):
        raise PatchError(
            f"{name} is a patch of format version {version[:20]}, and this elementgrad reads version {VERSION}; "
            "update elementgrad"
        )
    if not all(isinstance(value, str) for value in text.values()):
        raise PatchError(f"{name} is {_damaged('its metadata is not all text')}")
    return dict(text)


def _width(dtype: str) -> int:
    """The bytes of a number, which the names of dtypes tell in bits: BF16, C64, and BOOL that has one byte."""
    return int(dtype.lstrip("ABCDEFIOLU") or 8) // 8


def _cut(header: dict[str, Any], held: int) -> str | None:
    """How much is missing at the end, if that is what is wrong."""
    try:
        promised = max((of["data_offsets"][1] for tensor, of in header.items() if tensor != "__metadata__"), default=0)
        if held < promised:
            return f"cut short: {held} of {promised} bytes of its tensors are there; save the patch again"
    except (TypeError, LookupError):
        pass  # then more is wrong
    return None


def _damaged(how: object) -> str:
    return f"damaged or was changed by other hands ({how}); save the patch again"


def _checksum(text: Mapping[str, str], tensors: Mapping[str, Stored]) -> str:
    """Over all texts but itself, and name, dtype, shape and bytes of all tensors, in an order of its own."""
    names = sorted(tensors)
    described = [sorted(text.items()), [[name, tensors[name].dtype, tensors[name].shape] for name in names]]
    digest = hashlib.sha256(json.dumps(described).encode())
    for name in names:
        digest.update(tensors[name].data)
    return digest.hexdigest()
