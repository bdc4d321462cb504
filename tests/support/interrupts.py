"""Raise KeyboardInterrupt at the lines of the library that a call runs, one after the other, and look what it left."""

import gc
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import elementgrad

SOURCE = str(Path(elementgrad.__file__).parent)
Line = tuple[str, int]


class Tracer:
    """Counts how often each line of the library runs in this thread, and raises at one of them.

    With `source`, the lines are those of files whose path begins with it.
    """

    def __init__(self, stop: tuple[Line, int] | None = None, source: str = SOURCE):
        self.hits: Counter[Line] = Counter()
        self.raised = False
        self._stop = stop
        self._source = source

    def __enter__(self) -> "Tracer":
        self._before = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._line if frame.f_code.co_filename.startswith(self._source) else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            line = frame.f_code.co_filename, frame.f_lineno
            self.hits[line] += 1
            if not self.raised and self._stop is not None and self._stop == (line, self.hits[line]):
                self.raised = True
                raise KeyboardInterrupt
        return self._line


def points(call: Callable[[], Any], source: str = SOURCE) -> list[tuple[Line, int]]:
    """Return the first and the last run of each line of the library that a call runs."""
    with Tracer(source=source) as tracer:
        call()
    return [(line, hit) for line, hits in tracer.hits.items() for hit in sorted({1, hits})]


def interrupted(call: Callable[[], Any], stop: tuple[Line, int], source: str = SOURCE) -> bool:
    """Run a call with an interrupt at one point; say whether it was raised to the caller.

    It is not where the call does not come by this time, such as in code that runs once in a process, and where Python
    itself reports it and goes on, as it does in callbacks of weak references.
    """
    tracer = Tracer(stop, source)
    reported = []
    before, sys.unraisablehook = sys.unraisablehook, reported.append
    try:
        with tracer:
            call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.unraisablehook = before
        gc.collect(0)  # frames of the call that the exception kept
    assert not tracer.raised or reported, f"an interrupt at {spelled(stop)} was swallowed"
    return False


def spelled(stop: tuple[Line, int]) -> str:
    """Return a point as text."""
    (path, line), hit = stop
    return f"{path.removeprefix(SOURCE)}:{line}, run {hit}"


def some(stops: list[tuple[Line, int]], every: int) -> Iterator[tuple[Line, int]]:
    """Yield every so-maniest point, spread over the call."""
    return iter(stops[::every])
