"""Files: written so that a reader sees the old content or the new, even if the power fails, and `.npz` archives.

Pipes, terminals and other devices are not replaced but written into. Archives hold arrays of any name: `np.savez` takes
the names as keywords, so no array can be called `file`, and `np.load` looks names up with and without their ending, so
it may return another array for a name that ends with `.npy`.
"""

import errno
import io
import os
import re
import secrets
import shutil
import stat
import sys
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from elementgrad.errors import OptionError, quoted

NO_ROOM = (errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC))
"""Errors of a disk that is full, and of limits on the size of a file or of all files."""
STALE = 3600.0
"""Seconds after which a temporary file is taken for one that a killed process left behind."""
PATIENCE = 1.0
"""Seconds to wait for other programs to close a file, where an open file cannot be renamed over."""
DESCRIPTOR = re.compile(r"/proc/(self|thread-self|\d+)/fd/(\d+)|/dev/fd/(\d+)")
"""Paths of open descriptors; /dev/stdout is a link to one."""
LINKS = 40
"""The number of links to follow, as in Linux."""
NPY = ".npy"
NAME_LIMIT = 2**16 - 1
"""The most bytes of a name in a zip archive."""


def writable(path: str | os.PathLike[str], such_as: str = "report.html") -> Path:
    """Check that a file can be written to a path, before anything is computed for it."""
    try:
        path = Path(path)
    except TypeError:
        raise OptionError(f"{quoted(path)} is not a path; give the name of a file, such as {such_as!r}") from None
    if path.is_dir():
        raise OptionError(f"{path} is a directory; give the name of a file, such as '{path / such_as}'")
    if not path.resolve().parent.is_dir():
        raise OptionError(f"{path}: there is no directory {path.parent}; make it first")
    return path


def replace_file(path: str | os.PathLike[str], *parts: Any, mode: int | None = None) -> None:
    """Write parts of bytes to a file, as a whole or not at all; `mode` has its permissions, if not the usual ones.

    They go to a temporary file beside it, `.<name>.<16 hex digits>.tmp`, which is synced and renamed. A
    process that is killed while writing leaves that file behind; the first write to the same path an hour later
    removes it. A pipe or device is written into.
    """
    descriptor = _descriptor(path)
    if descriptor is not None or _is_special(path):
        _write_into(path if descriptor is None else descriptor, parts)
        return
    target = os.path.realpath(path)  # a link stays a link, as with open()
    directory, name = os.path.split(target)
    usual = None
    try:
        with open(target, "r+b") as old:  # refused where open() would refuse to write to it
            usual = stat.S_IMODE(os.fstat(old.fileno()).st_mode)
    except FileNotFoundError:
        os.stat(directory)
    remove_stale(directory, name)
    temporary = os.path.join(directory, f".{name}.{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb", opener=None if mode is None else partial(os.open, mode=mode)) as file:
            if mode is None and usual is not None:
                os.chmod(temporary, usual)
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        _rename(temporary, target, path)
    except BaseException as error:
        with suppress(OSError):
            os.unlink(temporary)
        if isinstance(error, OSError) and error.filename == temporary and error.filename2 is None:
            error.filename = os.fspath(path)  # the name that the caller knows
        elif isinstance(error, OSError) and error.filename is None and error.errno in NO_ROOM:
            text = f"{error.strerror}, so that nothing was changed; make room, or give another path"
            raise OSError(error.errno, text, os.fspath(path)) from error
        raise
    sync_directory(directory)


def _descriptor(path: str | os.PathLike[str]) -> int | None:
    """Return the open descriptor of this process that a path leads to, as /dev/stdout does; None if to none.

    Such a path cannot be replaced: it may be a pipe without a name, or the file that a shell redirects output to.
    """
    name = os.path.abspath(path)
    for _ in range(LINKS):
        match = DESCRIPTOR.fullmatch(name)
        if match is not None:
            process, number, short = match.groups()
            return int(number or short) if process in (None, "self", "thread-self", str(os.getpid())) else None
        try:
            link = os.readlink(name)
        except (OSError, ValueError):  # not a link
            return None
        name = os.path.normpath(os.path.join(os.path.dirname(name), link))
    return None


def _is_special(path: str | os.PathLike[str]) -> bool:
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def _write_into(where: str | os.PathLike[str] | int, parts: Iterable[Any]) -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # there may be none
            stream.flush()  # keeps the order of the output
    with open(where, "wb", closefd=not isinstance(where, int)) as file:
        for part in parts:
            file.write(part)


def _rename(temporary: str, target: str, path: str | os.PathLike[str]) -> None:
    """Rename over a file, with retries: Windows refuses it while a program, such as a virus scanner, has it open."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            os.replace(temporary, target)
            return
        except PermissionError as error:
            if time.monotonic() > deadline:
                text = "cannot be replaced, since another program has it open, or it is protected; close it there"
                raise PermissionError(error.errno, text, os.fspath(path)) from error
            time.sleep(0.05)


def remove_stale(directory: str, name: str) -> None:
    """Remove temporary files and folders that killed processes left behind."""
    with suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            middle = entry.name.removeprefix(f".{name}.").removesuffix(".tmp")
            if entry.name == f".{name}.{middle}.tmp" and len(middle) == 16:
                with suppress(OSError):
                    if time.time() - entry.stat(follow_symlinks=False).st_mtime > STALE:
                        remove = shutil.rmtree if entry.is_dir(follow_symlinks=False) else os.unlink
                        remove(entry.path)


def sync_directory(directory: str) -> None:
    """Make a rename durable, where the system can open a directory."""
    with suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class ArchiveError(ValueError):
    """A file is no archive of arrays, or an array cannot be stored in one."""


class StoredArray(NamedTuple):
    """One array of an archive: its dtype and shape, and a function that reads it."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    load: Callable[[], np.ndarray]


def read_npz(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Return the arrays of a file by their names; nothing in it is executed.

    Raises:
        ArchiveError: the file is damaged, of another kind, or holds something else than arrays.
        OSError: it cannot be opened.
    """
    with _open_npz(path) as (archive, members):
        return {_array_name(member): _read_array(archive, member) for member in members}


def describe_npz(path: str | os.PathLike[str]) -> dict[str, StoredArray]:
    """Return the arrays of a file by their names without reading them; raises what `read_npz` raises."""

    def load(member: zipfile.ZipInfo) -> np.ndarray:
        with _open_npz(path) as (archive, _):
            return _read_array(archive, member)

    with _open_npz(path) as (archive, members):
        headers = [(member, *_read_array_header(archive, member)) for member in members]
    return {_array_name(member): StoredArray(dtype, shape, partial(load, member)) for member, shape, dtype in headers}


@contextmanager
def _open_npz(path: str | os.PathLike[str]) -> Iterator[tuple[zipfile.ZipFile, list[zipfile.ZipInfo]]]:
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


def pack_npz(arrays: Mapping[str, np.ndarray]) -> bytes:
    """Return the content of a file with these arrays; the same ones give the same bytes.

    >>> import io, numpy as np
    >>> from elementgrad._files import pack_npz
    >>> np.load(io.BytesIO(pack_npz({"file": np.float32([1.0, 2.0])})))["file"]
    array([1., 2.], dtype=float32)
    """
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for name, array in arrays.items():
            member = zipfile.ZipInfo()
            member.filename = name + NPY  # not given to ZipInfo, which cuts a name off at a zero byte
            try:
                length = len(member.filename.encode())
            except UnicodeEncodeError:
                raise ArchiveError(f"{name!r} is no text that .npz has a place for; write .safetensors") from None
            if length > NAME_LIMIT:
                raise ArchiveError(f"a name of {length} bytes is too long for .npz; write .safetensors")
            with archive.open(member, "w", force_zip64=True) as file:
                np.lib.format.write_array(file, np.asanyarray(array), allow_pickle=False)
    return content.getvalue()


def _array_name(member: zipfile.ZipInfo) -> str:
    return member.orig_filename.removesuffix(NPY)  # as it is in the file, also with a separator of folders


def _read_array(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray:
    try:
        with archive.open(member) as file:
            return np.lib.format.read_array(file, allow_pickle=False)
    except ValueError as error:
        raise ArchiveError(f"{_array_name(member)!r}: {str(error).splitlines()[0]}") from None


def _read_array_header(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> tuple[tuple[int, ...], np.dtype[Any]]:
    with archive.open(member) as file:
        try:
            version = np.lib.format.read_magic(file)
            if version in HEADERS:
                shape, _, dtype = HEADERS[version](file)
                if dtype.hasobject:
                    raise ValueError("Object arrays cannot be loaded when allow_pickle=False")
                return shape, dtype
        except ValueError as error:
            raise ArchiveError(f"{_array_name(member)!r}: {str(error).splitlines()[0]}") from None
    array = _read_array(archive, member)
    return array.shape, array.dtype


HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
"""The readers of headers, by version; a later version holds structures, which no weights are."""


def _require_distinct(members: Iterable[zipfile.ZipInfo]) -> None:
    """Raise an error for two arrays of the same name or with overlapping bytes."""
    names: set[str] = set()
    end, before = 0, ""
    for member in sorted(members, key=lambda member: member.header_offset):
        name = _array_name(member)
        if name in names:
            raise ArchiveError(f"two arrays are called {name!r}")
        if member.header_offset < end:
            raise ArchiveError(f"{before!r} and {name!r} overlap")
        names.add(name)
        end, before = member.header_offset + member.compress_size, name
