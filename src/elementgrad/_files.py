"""Write a file so that a reader sees the old content or the new, even if the power fails in between.

Pipes, terminals and other devices are not replaced but written into.
"""

import os
import re
import secrets
import shutil
import stat
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from elementgrad.errors import OptionError, quoted

STALE = 3600.0
"""Seconds after which a temporary file is taken for one that a killed process left behind."""
PATIENCE = 1.0
"""Seconds to wait for other programs to close a file, where an open file cannot be renamed over."""
DESCRIPTOR = re.compile(r"/proc/(self|thread-self|\d+)/fd/(\d+)|/dev/fd/(\d+)")
"""Paths of open descriptors; /dev/stdout is a link to one."""
LINKS = 40
"""The number of links to follow, as in Linux."""


def writable(path: str | os.PathLike[str], such_as: str = "report.html") -> Path:
    """Check that a file can be written to a path, before anything is computed for it."""
    try:
        path = Path(path)
    except TypeError:
        raise OptionError(f"{quoted(path)} is no path; give the name of a file, such as {such_as!r}") from None
    if path.is_dir():
        raise OptionError(f"{path} is a directory; give the name of a file, such as '{path / such_as}'")
    if not path.resolve().parent.is_dir():
        raise OptionError(f"{path}: there is no directory {path.parent}; make it first")
    return path


def replace_file(path: str | os.PathLike[str], *parts: Any) -> None:
    """Write parts of bytes to a file, as a whole or not at all.

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
    mode = None
    try:
        with open(target, "r+b") as old:  # refused where open() would refuse to write to it
            mode = stat.S_IMODE(os.fstat(old.fileno()).st_mode)
    except FileNotFoundError:
        os.stat(directory)
    remove_stale(directory, name)
    temporary = os.path.join(directory, f".{name}.{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb") as file:
            if mode is not None:
                os.chmod(temporary, mode)
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
