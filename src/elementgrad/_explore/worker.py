"""`Worker`: a thread for all reads of one model."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from itertools import count
from queue import PriorityQueue
from typing import Any

Call = tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]


class Worker:
    """A thread that calls functions one after another: reads of one model are never made at the same time."""

    def __init__(self) -> None:
        # In the order of the first number, then of the second, which no two have alike.
        self._queue: PriorityQueue[tuple[int, int, Call | None]] = PriorityQueue()
        self._numbers = count()
        self._closing = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="elementgrad-explore", daemon=True)
        self._thread.start()

    def submit(self, function: Callable[..., Any], *args: Any, slow: bool = False) -> "Future[Any]":
        """Return the result to come; `cancel` on it drops a call that has not begun.

        Args:
            function: What to call.
            *args: Its arguments.
            slow: It waits until no other call does, so that a page stays usable.
        """
        future: Future[Any] = Future()
        with self._lock:  # nothing comes behind the end of the queue
            if self._closing:
                future.cancel()
            else:
                self._queue.put((int(slow), next(self._numbers), (future, function, args)))
        return future

    def close(self) -> None:
        """Wait for the call that is running, drop all that wait, and end the thread. Later calls are dropped too."""
        with self._lock:
            self._closing = True
            self._queue.put((2, next(self._numbers), None))
        self._thread.join()

    def _run(self) -> None:
        while (call := self._queue.get()[2]) is not None:
            future, function, args = call
            if self._closing:
                future.cancel()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function(*args))
            except BaseException as error:
                future.set_exception(error)
