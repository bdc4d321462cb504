"""Reads and writes `.npz` files with arrays of any name.

`np.savez` takes the names as keywords, so no array can be called `file`. `np.load` looks names up with and without
their ending, so it may return another array for a name that ends with `.npy`.
"""

import io
import os
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np

ENDING = ".npy"
NAME_LIMIT = 2**16 - 1
"""Bytes that a name can have in a zip archive."""


class ArchiveError(ValueError):
    """A file is no archive of arrays, or an array cannot be stored in one."""


class StoredArray(NamedTuple):
    """One array of a file: its dtype and shape, and a function that reads it."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    load: Callable[[], np.ndarray]


def read(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Return the arrays of a file by their names; nothing in it is executed.

    Raises:
        ArchiveError: the file is damaged, of another kind, or holds something else than arrays.
        OSError: it cannot be opened.
    """
    with _open(path) as (archive, members):
        return {_name(member): _array(archive, member) for member in members}


def describe(path: str | os.PathLike[str]) -> dict[str, StoredArray]:
    """Return the arrays of a file by their names without reading them; raises what `read` raises."""

    def load(member: zipfile.ZipInfo) -> np.ndarray:
        with _open(path) as (archive, _):
            return _array(archive, member)

    with _open(path) as (archive, members):
        headers = [(member, *_header(archive, member)) for member in members]
    return {_name(member): StoredArray(dtype, shape, partial(load, member)) for member, shape, dtype in headers}


@contextmanager
def _open(path: str | os.PathLike[str]) -> Iterator[tuple[zipfile.ZipFile, list[zipfile.ZipInfo]]]:
    with open(path, "rb") as file:
        try:
            with zipfile.ZipFile(file) as archive:
                members = [member for member in archive.infolist() if not member.is_dir()]
                _require_distinct(members)
                yield archive, members
        except ArchiveError:
            raise
        except Exception as error:  # each codec raises errors of its own, and so does the header of an array
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ArchiveError(reason[0].lower() + reason[1:]) from error


def pack(arrays: Mapping[str, np.ndarray]) -> bytes:
    """Return the content of a file with these arrays; the same ones give the same bytes.

    >>> import io, numpy as np
    >>> from elementgrad import _npz
    >>> np.load(io.BytesIO(_npz.pack({"file": np.float32([1.0, 2.0])})))["file"]
    array([1., 2.], dtype=float32)
    """
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for name, array in arrays.items():
            member = zipfile.ZipInfo()
            member.filename = name + ENDING  # not given to ZipInfo, which cuts a name off at a zero byte
            try:
                length = len(member.filename.encode())
            except UnicodeEncodeError:
                raise ArchiveError(f"{name!r} is no text that .npz has a place for; write .safetensors") from None
            if length > NAME_LIMIT:
                raise ArchiveError(f"a name of {length} bytes is too long for .npz; write .safetensors")
            with archive.open(member, "w", force_zip64=True) as file:
                np.lib.format.write_array(file, np.asanyarray(array), allow_pickle=False)
    return content.getvalue()


def _name(member: zipfile.ZipInfo) -> str:
    return member.orig_filename.removesuffix(ENDING)  # as it is in the file, also with a separator of folders


def _array(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray:
    try:
        with archive.open(member) as file:
            return np.lib.format.read_array(file, allow_pickle=False)
    except ValueError as error:
        raise ArchiveError(f"{_name(member)!r}: {str(error).splitlines()[0]}") from None


def _header(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> tuple[tuple[int, ...], np.dtype[Any]]:
    with archive.open(member) as file:
        try:
            version = np.lib.format.read_magic(file)
            if version in HEADERS:
                shape, _, dtype = HEADERS[version](file)
                if dtype.hasobject:
                    raise ValueError("Object arrays cannot be loaded when allow_pickle=False")
                return shape, dtype
        except ValueError as error:
            raise ArchiveError(f"{_name(member)!r}: {str(error).splitlines()[0]}") from None
    array = _array(archive, member)
    return array.shape, array.dtype


HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
"""The readers of headers, by version; a later version holds structures, which no weights are."""


def _require_distinct(members: Iterable[zipfile.ZipInfo]) -> None:
    """Raise an error for two arrays of the same name or with overlapping bytes."""
    names: set[str] = set()
    end, before = 0, ""
    for member in sorted(members, key=lambda member: member.header_offset):
        name = _name(member)
        if name in names:
            raise ArchiveError(f"two arrays are called {name!r}")
        if member.header_offset < end:
            raise ArchiveError(f"{before!r} and {name!r} overlap")
        names.add(name)
        end, before = member.header_offset + member.compress_size, name
