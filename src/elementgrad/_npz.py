"""Reads and writes `.npz` files with arrays of any name.

`np.savez` takes the names as keywords, so no array can be called `file`. `np.load` looks names up with and without
their ending, so it may return another array for a name that ends with `.npy`.
"""

import io
import os
import zipfile
from collections.abc import Iterable, Mapping

import numpy as np

ENDING = ".npy"
NAME_LIMIT = 2**16 - 1
"""Bytes that a name can have in a zip archive."""


class ArchiveError(ValueError):
    """A file is no archive of arrays, or an array cannot be stored in one."""


def read(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Return the arrays of a file by their names; nothing in it is executed.

    Raises:
        ArchiveError: the file is damaged, of another kind, or holds something else than arrays.
        OSError: it cannot be opened.
    """
    with open(path, "rb") as file:
        try:
            with zipfile.ZipFile(file) as archive:
                members = [member for member in archive.infolist() if not member.is_dir()]
                _require_distinct(members)
                return {_name(member): _array(archive, member) for member in members}
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
