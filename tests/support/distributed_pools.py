"""Engines for tests: how processes are started, and pools of threads that behave as clusters do."""

import multiprocessing
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).parents[2]
QUIET = {
    "OMP_NUM_THREADS": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".pytest_cache" / "jax"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}
"""As it is here: one thread, and JAX's programs from the same cache."""
SPAWN = multiprocessing.get_context("spawn")


class Elsewhere(ThreadPoolExecutor):
    """An engine whose workers see no file of the driver's."""

    def submit(self, function, ticket):
        return super().submit(function, replace(ticket, file=ticket.file and "/elsewhere", out="/elsewhere"))


class Losing(ThreadPoolExecutor):
    """An engine that loses every task so often."""

    def __init__(self, times: int, error: BaseException):
        super().__init__(1)
        self.times = times
        self.error = error

    def submit(self, function, ticket):
        if ticket.attempt < self.times:
            future: Future = Future()
            future.set_exception(self.error)
            return future
        return super().submit(function, ticket)


class Copied(ThreadPoolExecutor):
    """An engine whose workers see a copy of the array at the same path, on a disk of their own."""

    def __init__(self, copy: Path):
        super().__init__(2)
        self.copy = copy

    def submit(self, function, ticket):
        return super().submit(function, replace(ticket, out=ticket.out and str(self.copy)))


class Gated(ThreadPoolExecutor):
    """An engine that does one task, and the next when it is let."""

    def __init__(self):
        super().__init__(1)
        self.gate = threading.Event()
        self.futures: list[Future] = []

    def submit(self, function, ticket):
        self.futures.append(super().submit(self._run, function, ticket, bool(self.futures)))
        return self.futures[-1]

    def _run(self, function, ticket, waits):
        assert not waits or self.gate.wait(60)
        return function(ticket)

    def shutdown(self, *options, **more):
        self.gate.set()  # also where a test fails
        super().shutdown(*options, **more)


class Counted(ThreadPoolExecutor):
    """An engine that notes how many tasks it has at once; from a certain one on its workers do not see the disk."""

    def __init__(self, seeing: int):
        super().__init__(1)
        self.seeing = seeing
        self.given = 0
        self.most: dict[int, int] = {}
        self.pending: set[Future] = set()

    def submit(self, function, ticket):
        self.given += 1
        ticket = ticket if self.given <= self.seeing else replace(ticket, out="/elsewhere")
        self.pending = {future for future in self.pending if not future.done()}
        future = super().submit(function, ticket)
        self.pending.add(future)
        self.most[self.given] = len(self.pending)
        return future
