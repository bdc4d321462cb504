"""What runs in a worker: it evaluates a function once, and reads blocks of its Jacobian as it is asked for them."""

import hashlib
import os
import pickle
import threading
import time
import traceback
from collections import OrderedDict, deque
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from elementgrad.backends import Backend
from elementgrad.cleanup import contained
from elementgrad.distributed.part import numbers, part
from elementgrad.distributed.store import Store
from elementgrad.errors import FrameworkError, OptionError, WorkerError
from elementgrad.lazy import Jacobian
from elementgrad.plan.layout import Layout
from elementgrad.plan.plan import Plan
from elementgrad.plan.progress import hushed
from elementgrad.plan.sweep import PRECISION

KEPT = 2
"""So many evaluated functions are kept in a process; the oldest goes first."""
IDLE = 300.0
"""So many seconds without a block, and a function is kept no longer: a cluster is there for others too."""


@dataclass(frozen=True)
class Payload:
    """A Jacobian in words that another process understands."""

    framework: str
    surroundings: Any
    """What the evaluation ran from beside its arguments; it holds before they are unpickled."""
    asked: bytes
    """The question, by cloudpickle."""
    plan: Plan
    layout: Layout
    value: np.ndarray
    """What the function gave where it was asked: it must give the same here."""


@dataclass(frozen=True)
class Ticket:
    """One block to read. The payload comes with it, or in a file, or is known by its digest from before."""

    digest: str
    flight: str
    """The read that it is part of."""
    number: int
    attempt: int
    payload: bytes | None
    file: str | None
    out: str | None
    """The array to write to, for a process that sees it."""
    mark: str


@dataclass(frozen=True)
class Answer:
    """What came of a ticket. An exception that is raised instead is not the function's: a worker was lost.

    Without anything it is for a read that was left, where nobody looks at it.
    """

    values: np.ndarray | None = None
    written: bool = False
    unknown: bool = False
    """Whether the payload was not to be had."""
    error: bytes | None = None
    """The function's own exception."""
    trace: str = ""


class Evaluated:
    """A function at its arguments, in this process, ready for blocks."""

    def __init__(self, payload: bytes):
        told: Payload = pickle.loads(payload)
        self._backend: Backend = import_module(f"elementgrad.backends.{told.framework}").backend
        with self._backend.within(told.surroundings):
            question, budget, pattern = _unpickled(told.asked)
            self._told = replace(told, asked=b"")
            self._jacobian: Jacobian = question.ask(budget, pattern)
        self._require_same()
        self.used = time.monotonic()
        """When it was last asked for a block."""

    def read(self, ticket: Ticket) -> Answer:
        """One block: written, if this process sees where to, and given otherwise."""
        told = self._told
        with self._backend.within(told.surroundings):
            values = part(self._jacobian, told.plan, told.layout, ticket.number)
        self.used = time.monotonic()
        store = None if ticket.out is None else Store.shared(Path(ticket.out), told.layout, ticket.mark)
        if store is None:
            return Answer(values=np.ascontiguousarray(values))
        store.write(ticket.number, values)
        return Answer(written=True)

    def _require_same(self) -> None:
        """What is random, or depends on what was not carried here, gives another value."""
        here, there = numbers(self._jacobian.value, self._backend), self._told.value
        of = self._jacobian._of
        near = PRECISION[min(8, self._backend.itemsize(of.tensor))] ** 0.5
        size = np.abs(there[np.isfinite(there)]).max(initial=0)
        if here.shape != there.shape or not np.allclose(here, there, near, near * size, equal_nan=True):
            raise FrameworkError(
                f"{of.name} has another value in a worker than where the Jacobian was made: the function is random in "
                "a way that cannot be carried over, or something that it depends on was changed since, or was not "
                "passed to it; seed it, pass it all as arguments, or make the Jacobian anew"
            )


_kept: OrderedDict[str, Evaluated] = OrderedDict()
_left: deque[str] = deque(maxlen=1000)
"""Reads that were left early in this process, whose threads may still come with tickets of theirs."""
_tidying = False
_lock = threading.Lock()
"""One block at a time: what a Jacobian learns of itself in a read is not made for several threads."""


@contained
def run(ticket: Ticket) -> Answer:
    """Read a block; what the function raises is given back, so that it is told from a worker that was lost."""
    with hushed(), _lock:
        if ticket.flight in _left:
            return Answer()
        try:
            evaluated = _kept.get(ticket.digest)
            if evaluated is None:
                payload = _payload(ticket)
                if payload is None:
                    return Answer(unknown=True)
                evaluated = _keep(ticket.digest, Evaluated(payload))
            return evaluated.read(ticket)
        except Exception as error:
            return Answer(error=_pickled(error), trace="".join(traceback.format_exception(error)))


def forget(digest: str, flight: str) -> None:
    """Keep nothing of a Jacobian in this process, where its blocks were read by threads, nor read more for it."""
    with _lock:
        _left.append(flight)
        _kept.pop(digest, None)


def _keep(digest: str, evaluated: Evaluated) -> Evaluated:
    global _tidying
    _kept[digest] = evaluated
    if not _tidying:
        _tidying = True
        threading.Thread(target=_tidy, name="elementgrad-tidy", daemon=True).start()
    while len(_kept) > KEPT:
        _kept.popitem(last=False)
    return evaluated


def _tidy() -> None:
    """Let go of what nobody asks for any more, until nothing is kept."""
    global _tidying
    while _tidying:
        time.sleep(min(1.0, IDLE))
        with _lock:
            now = time.monotonic()
            for digest in [digest for digest, evaluated in _kept.items() if now - evaluated.used >= IDLE]:
                del _kept[digest]
            _tidying = bool(_kept)


def _payload(ticket: Ticket) -> bytes | None:
    if ticket.payload is not None or ticket.file is None:
        return ticket.payload
    try:
        content = Path(ticket.file).read_bytes()
    except OSError:  # another machine, another disk
        return None
    return content if hashlib.sha256(content).hexdigest() == ticket.digest else None


def _unpickled(asked: bytes) -> Any:
    try:
        return pickle.loads(asked)
    except Exception as error:
        raise OptionError(
            f"the function or its arguments cannot be read in another process: {error}; install there what they come "
            "from, or make what does not pickle inside of the function"
        ) from error


def _pickled(error: Exception) -> bytes:
    import cloudpickle

    try:
        pickled: bytes = cloudpickle.dumps(error)
        pickle.loads(pickled)
        return pickled
    except Exception:
        return pickle.dumps(WorkerError(f"{type(error).__name__} in worker {os.getpid()}: {error}"))
