"""`Worker`: a thread for all reads of one model."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any


class Worker:
    """A thread that calls functions one after another: reads of one model are never made at the same time."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]] | None] = SimpleQueue()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="elementgrad-explore", daemon=True)
        self._thread.start()

    def submit(self, function: Callable[..., Any], *args: Any) -> "Future[Any]":
        """Return the result to come; `cancel` on it drops a call that has not begun."""
        future: Future[Any] = Future()
        if self._closing:
            future.cancel()
        else:
            self._queue.put((future, function, args))
        return future

    def close(self) -> None:
        """Wait for the call that is running, drop all that wait, and end the thread. Later calls are dropped too."""
        self._closing = True
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            future, function, args = item
            if self._closing:
                future.cancel()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function(*args))
            except BaseException as error:
                future.set_exception(error)
