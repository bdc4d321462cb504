"""Bytes: what a budget may be written as, how much memory is free, how an amount is read by a person.

A progress bar for work that lasts: on a terminal, where rich is installed; silent elsewhere.
"""

import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from elementgrad._cleanup import assign, scope
from elementgrad.errors import OptionError, quoted

UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
SHARE = 8
"""Sweeps take at most one part in so many of what is free, unless told otherwise."""
FITS = 'give bytes as an int, or a text such as "200MB" or "1.5 GiB"'
_TEXT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?i?B)\s*", re.IGNORECASE)


def parse(budget: int | str | None) -> int | None:
    """A budget in bytes; None leaves it to what is free."""
    if budget is None:
        return None
    if isinstance(budget, str):
        match = _TEXT.fullmatch(budget)
        if match is None or match[2].upper() not in UNITS:
            raise OptionError(f"budget {quoted(budget)} is no amount of memory; {FITS}")
        budget = int(float(match[1]) * UNITS[match[2].upper()])
    if isinstance(budget, bool) or not isinstance(budget, int) or budget <= 0:
        raise OptionError(f"budget {quoted(budget)} is no amount of memory; {FITS}")
    return budget


def default(free: int | None) -> int:
    """A part of what is free: on the device where that is known, on this machine otherwise."""
    return max(1, (free if free is not None else _available_in(int(time.monotonic()))) // SHARE)


@lru_cache(maxsize=1)
def _available_in(_: int) -> int:
    """What is free in this second of the clock: asking takes as long as a small sweep."""
    return available()


def to_text(count: float) -> str:
    """Bytes for a person: three digits and a unit."""
    for unit in ("B", "KB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.0f} B" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def available() -> int:
    """The bytes of memory that are free on this machine, as far as it says."""
    try:
        with open("/proc/meminfo", "rb", buffering=0) as file:
            told = file.read(256)  # it stands in one of the first lines, and every read of a block asks
        return int(told.partition(b"MemAvailable:")[2].split()[0]) * 1024
    except (OSError, IndexError, ValueError):
        try:
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
        except (AttributeError, OSError, ValueError):
            return 4 * 10**9


PATIENCE = 2.0
"""Seconds before anything is shown."""
_local = threading.local()


@contextmanager
def hushed() -> Iterator[None]:
    """For work that is a part of other work, whose bar counts it, here or in another process."""
    with scope():
        assign(_local, "hushed", True)
        yield


class Progress:
    """Counts what is done; once that has taken a while, a bar shows it until the end of the `with` block."""

    def __init__(self, total: int, what: str):
        self._total = total
        self._what = what
        self._start = time.monotonic()
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> "Progress":
        return self

    def done(self, count: int) -> None:
        """So many of the total are done by now."""
        if self._bar is not None:
            self._bar.update(self._task, completed=count)
        elif count < self._total and time.monotonic() - self._start > PATIENCE:
            self._bar = _bar()
            if self._bar is not None:
                self._bar.start()
                self._task = self._bar.add_task(self._what, total=self._total, completed=count)

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def _bar() -> Any:
    if getattr(_local, "hushed", False) or not sys.stderr.isatty():
        return None
    try:
        from rich import progress
        from rich.console import Console
    except ImportError:
        return None
    return progress.Progress(console=Console(stderr=True), transient=True)
