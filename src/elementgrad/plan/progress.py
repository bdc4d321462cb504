"""A progress bar for work that lasts: on a terminal, where rich is installed; silent elsewhere."""

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

PATIENCE = 2.0
"""Seconds before anything is shown."""
Item = TypeVar("Item")


def shown(items: Iterable[Item], total: int, what: str) -> Iterator[Item]:
    """The items, one by one; once they have taken a while, a bar says how many are done."""
    start = time.monotonic()
    bar = task = None
    try:
        for done, item in enumerate(items):
            if bar is None and done and time.monotonic() - start > PATIENCE:
                bar = _bar()
                if bar is not None:
                    bar.start()
                    task = bar.add_task(what, total=total, completed=done)
            elif bar is not None:
                bar.update(task, completed=done)
            yield item
    finally:
        if bar is not None:
            bar.stop()


def _bar():  # type: ignore[no-untyped-def]
    if not sys.stderr.isatty():
        return None
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        return None
    return Progress(console=Console(stderr=True), transient=True)
