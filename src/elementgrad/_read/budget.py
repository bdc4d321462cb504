"""Memory and patience: parse a budget, find the free memory, print bytes, and show the progress of long work."""

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
from elementgrad._names.arguments import option_error
from elementgrad._names.pytree import SIMPLE
from elementgrad.errors import OptionError, quoted

UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
BUDGET_DIVISOR = 8
"""By default sweeps take at most one part in this many of the free memory."""
BUDGET_HINT = 'give bytes as an int, or a text such as "200MB" or "1.5 GiB"'
PROGRESS_DELAY = 2.0
"""Seconds before a progress bar is shown."""
_AMOUNT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?i?B)\s*", re.IGNORECASE)
_local = threading.local()


def parse_budget(budget: int | str | None) -> int | None:
    """Return a budget in bytes; None stands for a part of the free memory."""
    if budget is None:
        return None
    if isinstance(budget, str):
        match = _AMOUNT.fullmatch(budget)
        if match is None or match[2].upper() not in UNITS:
            raise OptionError(f"budget {quoted(budget)} is not an amount of memory; {BUDGET_HINT}")
        budget = int(float(match[1]) * UNITS[match[2].upper()])
    if not isinstance(budget, int) and type(budget) not in SIMPLE:
        raise option_error("budget", budget, f"is not an amount of memory; {BUDGET_HINT}")
    if isinstance(budget, bool) or not isinstance(budget, int) or budget <= 0:
        raise OptionError(f"budget {quoted(budget)} is not an amount of memory; {BUDGET_HINT}")
    return budget


def default_budget(free: int | None) -> int:
    """Return a part of what is free: on the device where that is known, on this machine otherwise."""
    return max(1, (free if free is not None else _free_memory_in(int(time.monotonic()))) // BUDGET_DIVISOR)


@lru_cache(maxsize=1)
def _free_memory_in(second: int) -> int:
    # Looked up once in a second of the clock, since that takes as long as a small sweep.
    return free_memory()


def free_memory() -> int:
    """Return the bytes of memory that are free on this machine, as far as it says."""
    try:
        with open("/proc/meminfo", "rb", buffering=0) as file:
            head = file.read(256)  # the number is in one of the first lines, and every read of a block needs it
        return int(head.partition(b"MemAvailable:")[2].split()[0]) * 1024
    except (OSError, IndexError, ValueError):
        try:
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
        except (AttributeError, OSError, ValueError):
            return 4 * 10**9


def format_bytes(count: float) -> str:
    """Return bytes for a person to read: three digits and a unit."""
    for unit in ("B", "KB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.0f} B" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


class Progress:
    """A counter that shows a bar once the work has taken a while: on a terminal, with rich installed."""

    def __init__(self, total: int, title: str):
        self._total = total
        self._title = title
        self._start = time.monotonic()
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> "Progress":
        return self

    def advance_to(self, count: int) -> None:
        """Set how many of the total are done."""
        if self._bar is not None:
            self._bar.update(self._task, completed=count)
        elif count < self._total and time.monotonic() - self._start > PROGRESS_DELAY:
            self._bar = _make_bar()
            if self._bar is not None:
                self._bar.start()
                self._task = self._bar.add_task(self._title, total=self._total, completed=count)

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()


@contextmanager
def no_progress() -> Iterator[None]:
    """Show no bar in this block, which is a part of work that is counted as a whole, here or in another process."""
    with scope():
        assign(_local, "silent", True)
        yield


def _make_bar() -> Any:
    if getattr(_local, "silent", False) or not sys.stderr.isatty():
        return None
    try:
        from rich import progress
        from rich.console import Console
    except ImportError:
        return None
    return progress.Progress(console=Console(stderr=True), transient=True)
