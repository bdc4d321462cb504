"""Writing a file so that whoever looks sees the old content or the new, even if the power fails in between."""

import os
import secrets
import stat
import time
from contextlib import suppress
from pathlib import Path

from elementgrad.errors import OptionError

STALE = 3600.0
"""Seconds after which a temporary file is one that a killed process left behind."""


def writable(path: str | os.PathLike[str], such_as: str = "report.html") -> Path:
    """A path to which a file can be written, before anything is computed for it."""
    try:
        path = Path(path)
    except TypeError:
        raise OptionError(f"{path!r} is no path; give the name of a file, such as {such_as!r}") from None
    if path.is_dir():
        raise OptionError(f"{path} is a directory; give the name of a file, such as '{path / such_as}'")
    if not path.resolve().parent.is_dir():
        raise OptionError(f"{path}: there is no directory {path.parent}; make it first")
    return path


def replace(path: str | os.PathLike[str], content: bytes) -> None:
    """Put content where path says, as a whole or not at all.

    It is written beside the file, as `.<name>.<16 hex digits>.tmp`, brought to the disk and renamed. A process that is
    killed while writing leaves that file behind; the first write to the same path an hour later removes it.
    """
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
        os.replace(temporary, target)
    except BaseException as error:
        with suppress(OSError):
            os.unlink(temporary)
        if isinstance(error, OSError) and error.filename == temporary and error.filename2 is None:
            error.filename = os.fspath(path)  # the name that the caller knows
        raise
    _bring_to_disk(directory)


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
