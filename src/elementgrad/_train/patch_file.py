"""Writing a file so that whoever looks sees the old content or the new, even if the power fails in between.

What is no file, such as a pipe, a terminal or another device, is written into and stays what it is.


Tensors and texts in a safetensors file that tells when it was damaged: a checksum covers all that has a meaning.

A safetensors file is the length of a header, the header in JSON, and the bytes of the tensors. It is written here by
hand, since the library's function for that takes other arguments in each version; the library reads it, strictly.
"""

import hashlib
import json
import os
import re
import secrets
import stat
import struct
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from elementgrad._optional import require
from elementgrad._place.grammar import listed
from elementgrad.errors import OptionError, PatchError, quoted

STALE = 3600.0
"""Seconds after which a temporary file is one that a killed process left behind."""
PATIENCE = 1.0
"""Seconds in which other programs let go of a file, where the system does not rename over one that is open."""
DESCRIPTOR = re.compile(r"/proc/(self|thread-self|\d+)/fd/(\d+)|/dev/fd/(\d+)")
"""Names of what a process has open, such as its output: /dev/stdout leads to one."""
LINKS = 40
"""Links that are followed, as by Linux."""


def writable(path: str | os.PathLike[str], such_as: str = "report.html") -> Path:
    """A path to which a file can be written, before anything is computed for it."""
    try:
        path = Path(path)
    except TypeError:
        raise OptionError(f"{quoted(path)} is no path; give the name of a file, such as {such_as!r}") from None
    if path.is_dir():
        raise OptionError(f"{path} is a directory; give the name of a file, such as '{path / such_as}'")
    if not path.resolve().parent.is_dir():
        raise OptionError(f"{path}: there is no directory {path.parent}; make it first")
    return path


def replace_file(path: str | os.PathLike[str], content: bytes) -> None:
    """Put content where path says, as a whole or not at all.

    It is written beside the file, as `.<name>.<16 hex digits>.tmp`, brought to the disk and renamed. A process that is
    killed while writing leaves that file behind; the first write to the same path an hour later removes it. A pipe or
    device is written into.
    """
    descriptor = _descriptor(path)
    if descriptor is not None or _is_special(path):
        _pour(path if descriptor is None else descriptor, content)
        return
    target = os.path.realpath(path)  # a link stays a link, as with open()
    directory, name = os.path.split(target)
    mode = None
    try:
        with open(target, "r+b") as old:  # refused where open() would refuse to write to it
            mode = stat.S_IMODE(os.fstat(old.fileno()).st_mode)
    except FileNotFoundError:
        os.stat(directory)
    _sweep(directory, name)
    temporary = os.path.join(directory, f".{name}.{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb") as file:
            if mode is not None:
                os.chmod(temporary, mode)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        _rename(temporary, target, path)
    except BaseException as error:
        with suppress(OSError):
            os.unlink(temporary)
        if isinstance(error, OSError) and error.filename == temporary and error.filename2 is None:
            error.filename = os.fspath(path)  # the name that the caller knows
        raise
    _bring_to_disk(directory)


def _descriptor(path: str | os.PathLike[str]) -> int | None:
    """Return which open descriptor of this process a path leads to, as /dev/stdout does; None if to none.

    Such a name is no way to a file: what it leads to may be a pipe without a name, or the file that a shell redirects
    output to, which must not be replaced while the shell holds it.
    """
    name = os.path.abspath(path)
    for _ in range(LINKS):
        found = DESCRIPTOR.fullmatch(name)
        if found is not None:
            process, number, short = found.groups()
            return int(number or short) if process in (None, "self", "thread-self", str(os.getpid())) else None
        try:
            leads = os.readlink(name)
        except (OSError, ValueError):  # no link
            return None
        name = os.path.normpath(os.path.join(os.path.dirname(name), leads))
    return None


def _is_special(path: str | os.PathLike[str]) -> bool:
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def _pour(where: str | os.PathLike[str] | int, content: bytes) -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # there may be none
            stream.flush()  # what was printed before comes before
    with open(where, "wb", closefd=not isinstance(where, int)) as file:
        file.write(content)


def _rename(temporary: str, target: str, path: str | os.PathLike[str]) -> None:
    """Rename over a file. Windows refuses that while any program has it open, such as one that looks for viruses."""
    until = time.monotonic() + PATIENCE
    while True:
        try:
            os.replace(temporary, target)
            return
        except PermissionError as error:
            if time.monotonic() > until:
                held = "cannot be replaced, since another program has it open, or it is protected; close it there"
                raise PermissionError(error.errno, held, os.fspath(path)) from error
            time.sleep(0.05)


def _sweep(directory: str, name: str) -> None:
    """Remove what killed processes left behind; a live one needs no hour to write a patch."""
    with suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            middle = entry.name.removeprefix(f".{name}.").removesuffix(".tmp")
            if entry.name == f".{name}.{middle}.tmp" and len(middle) == 16:
                with suppress(OSError):
                    if time.time() - entry.stat(follow_symlinks=False).st_mtime > STALE:
                        os.unlink(entry.path)


def _bring_to_disk(directory: str) -> None:
    """Make the renaming last, where the system can open a directory."""
    with suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


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


class StoredTensor(NamedTuple):
    """One tensor of a file."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def pack(meta: Mapping[str, str], tensors: Mapping[str, StoredTensor]) -> bytes:
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


def joined(tensors: Mapping[str, StoredTensor], text: Mapping[str, str] | None = None) -> bytes:
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


def unpack(path: str | os.PathLike[str]) -> tuple[dict[str, str], dict[str, StoredTensor]]:
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
    tensors = {name: StoredTensor(of["dtype"], tuple(of["shape"]), bytes(of["data"])) for name, of in read}
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


def _checksum(text: Mapping[str, str], tensors: Mapping[str, StoredTensor]) -> str:
    """Over all texts but itself, and name, dtype, shape and bytes of all tensors, in an order of its own."""
    names = sorted(tensors)
    described = [sorted(text.items()), [[name, tensors[name].dtype, tensors[name].shape] for name in names]]
    digest = hashlib.sha256(json.dumps(described).encode())
    for name in names:
        digest.update(tensors[name].data)
    return digest.hexdigest()
