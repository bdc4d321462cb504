"""A progress bar for work that lasts: on a terminal, where rich is installed; silent elsewhere."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from elementgrad.cleanup import assign, scope

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
