"""What runs in a worker: it evaluates a function once, and reads blocks of its Jacobian as it is asked for them.

Blocks from workers: few tasks in flight, what was lost tried again, what the function raises passed on.
"""

import hashlib
import io
import os
import pickle
import secrets
import tempfile
import threading
import time
import traceback
from collections import ChainMap, Counter, OrderedDict, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, CancelledError, Executor, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from elementgrad._backends.base import Backend
from elementgrad._cleanup import close_scopes_after
from elementgrad._optional import require
from elementgrad._read.budget import default, hushed
from elementgrad._read.jacobian import Jacobian
from elementgrad._read.plan import BlockLayout, Plan
from elementgrad._read.sweeps import PRECISION
from elementgrad._read.zarr import Store, numbers, part
from elementgrad.errors import FrameworkError, OptionError, WorkerError

KEPT = 2
"""So many evaluated functions are kept in a process; the oldest goes first."""
IDLE = 300.0
"""So many seconds without a block, and a function is kept no longer: a cluster is there for others too."""


@dataclass(frozen=True)
class JacobianPayload:
    """A Jacobian in words that another process understands."""

    framework: str
    surroundings: Any
    """What the evaluation ran from beside its arguments; it holds before they are unpickled."""
    asked: bytes
    """The question, by cloudpickle."""
    plan: Plan
    layout: BlockLayout
    value: np.ndarray
    """What the function gave where it was asked: it must give the same here."""


@dataclass(frozen=True)
class BlockTask:
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
class BlockResult:
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


class WorkerEvaluation:
    """A function at its arguments, in this process, ready for blocks."""

    def __init__(self, payload: bytes):
        told: JacobianPayload = pickle.loads(payload)
        self._backend: Backend = import_module(f"elementgrad._backends.{told.framework}.tensor").backend
        with self._backend.load("read").restore_ambient_state(told.surroundings):
            question, budget, pattern = _unpickled(told.asked)
            self._told = replace(told, asked=b"")
            self._jacobian: Jacobian = question.ask(budget, pattern)
        self._require_same()
        self.used = time.monotonic()
        """When it was last asked for a block."""

    def read(self, ticket: BlockTask) -> BlockResult:
        """One block: written, if this process sees where to, and given otherwise."""
        told = self._told
        with self._backend.load("read").restore_ambient_state(told.surroundings):
            values = part(self._jacobian, told.plan, told.layout, ticket.number)
        self.used = time.monotonic()
        store = None if ticket.out is None else Store.shared(Path(ticket.out), told.layout, ticket.mark)
        if store is None:
            return BlockResult(values=np.ascontiguousarray(values))
        store.write(ticket.number, values)
        return BlockResult(written=True)

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


_kept: OrderedDict[str, WorkerEvaluation] = OrderedDict()
_left: deque[str] = deque(maxlen=1000)
"""Reads that were left early in this process, whose threads may still come with tickets of theirs."""
_tidying = False
_lock = threading.Lock()
"""One block at a time: what a Jacobian learns of itself in a read is not made for several threads."""


@close_scopes_after
def run(ticket: BlockTask) -> BlockResult:
    """Read a block; what the function raises is given back, so that it is told from a worker that was lost."""
    with hushed(), _lock:
        if ticket.flight in _left:
            return BlockResult()
        try:
            evaluated = _kept.get(ticket.digest)
            if evaluated is None:
                payload = _load_payload(ticket)
                if payload is None:
                    return BlockResult(unknown=True)
                evaluated = _keep(ticket.digest, WorkerEvaluation(payload))
            return evaluated.read(ticket)
        except Exception as error:
            return BlockResult(error=_pickled(error), trace="".join(traceback.format_exception(error)))


def forget(digest: str, flight: str) -> None:
    """Keep nothing of a Jacobian in this process, where its blocks were read by threads, nor read more for it."""
    with _lock:
        _left.append(flight)
        _kept.pop(digest, None)


def _keep(digest: str, evaluated: WorkerEvaluation) -> WorkerEvaluation:
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


def _load_payload(ticket: BlockTask) -> bytes | None:
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


INLINE = 2**18
"""Payloads of up to so many bytes come with every task; larger ones are written to a file once."""
TRIES = 3
"""How often a block that was lost with its worker is tried again."""
FEWEST, MOST = 4, 1024
"""Tasks in flight: as many as fit into memory if all came back at once, and more while workers write themselves."""

GUARD = 'in a script put what starts workers below if __name__ == "__main__":, since they import it'


def check_executor(executor: Any, jacobian: Jacobian) -> Executor | None:
    """An executor that can be given blocks of this Jacobian, before anything is computed."""
    if executor is None:
        return None
    if not isinstance(executor, Executor):
        hint = "client.get_executor()" if hasattr(executor, "get_executor") else "ProcessPoolExecutor"
        raise OptionError(f"executor is {type(executor).__name__}; give a concurrent.futures.Executor, such as {hint}")
    start = getattr(getattr(executor, "_mp_context", None), "get_start_method", lambda: "")()
    if start == "fork":
        raise OptionError(
            "a pool that forks copies frameworks in the middle of their work, and hangs; give "
            'ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn"))'
        )
    if jacobian._question is None:
        raise OptionError("eager code that was recorded runs in no other process; put it into a function, eg.jacobian")
    if jacobian._question.create_graph:
        raise OptionError("with create_graph=True results stay in a graph, which no other process has; leave it out")
    require("cloudpickle", "executor=", "distributed")
    return executor


def results(
    jacobian: Jacobian, plan: Plan, layout: BlockLayout, executor: Executor, which: Sequence[int], store: Store | None
) -> Iterator[tuple[int, np.ndarray | None]]:
    """The number and values of each block as it is done; no values for one that a worker has written itself."""
    payload = _make_payload(jacobian, plan, layout)
    each = layout.numbers * jacobian._backend.itemsize(jacobian._wrt.tensor)
    fitting = max(FEWEST, min(MOST, default(None) // max(1, each)))
    with _filed(payload) as file:
        yield from _Flight(executor, payload, file, store, fitting).results(which)


class _Flight:
    """The tasks that were given to an executor and are not done."""

    def __init__(self, executor: Executor, payload: bytes, file: str | None, store: Store | None, fitting: int):
        self._executor = executor
        self._payload = payload
        self._store = store
        self._fitting = fitting
        self._pending: dict[Future[BlockResult], BlockTask] = {}
        self._lost: Counter[int] = Counter()
        self._done = 0
        self._given = False
        """Whether a block came back with its values."""
        digest, inline = hashlib.sha256(payload).hexdigest(), payload if file is None else None
        out, mark = (None, "") if store is None else (str(store.path), store.mark)
        self._blank = BlockTask(digest, secrets.token_hex(8), 0, 0, inline, file, out, mark)

    def results(self, which: Sequence[int]) -> Iterator[tuple[int, np.ndarray | None]]:
        left = deque(which)
        try:
            while left or self._pending:
                while left and len(self._pending) < self._room:
                    self._submit(replace(self._blank, number=left.popleft()))
                for future in wait(self._pending, return_when=FIRST_COMPLETED).done:
                    ticket = self._pending.pop(future)
                    answer = self._answer(future, ticket)
                    if answer is not None:
                        self._done += 1
                        self._given |= not answer.written
                        yield ticket.number, answer.values
        finally:
            for future in self._pending:
                future.cancel()
            forget(self._blank.digest, self._blank.flight)

    @property
    def _room(self) -> int:
        """How many may be in flight: with each that was written one more, until one was not."""
        return self._fitting if self._given else min(MOST, self._fitting + self._done)

    def _submit(self, ticket: BlockTask) -> None:
        try:
            self._pending[self._executor.submit(run, ticket)] = ticket
        except BrokenExecutor as error:
            self._broken(error)
        except RuntimeError as error:  # of every engine of Python's, and of MPI's
            if "bootstrapping" in str(error):  # Python's word where a worker starts workers as it imports the script
                raise OptionError(f"a worker cannot start a pool while it imports the script; {GUARD}") from error
            raise OptionError(f"the executor takes no tasks: {error}; give one that is not shut down") from error

    def _answer(self, future: Future[BlockResult], ticket: BlockTask) -> BlockResult | None:
        """What came of a task; None if it was sent once more."""
        again = replace(ticket, attempt=ticket.attempt + 1)
        try:
            answer = future.result()
        except BrokenExecutor as error:
            self._broken(error)
        except (Exception, CancelledError) as error:  # not the function's own, which come as answers
            self._lost[ticket.number] += 1
            if self._lost[ticket.number] > TRIES:
                raise WorkerError(
                    f"a block was lost with its worker {TRIES + 1} times, at last by {type(error).__name__}: {error}; "
                    f"{_remedy(error)}"
                ) from error
            self._submit(again)
            return None
        if answer.unknown:
            self._submit(replace(again, payload=self._payload))
            return None
        if answer.error is not None:
            own: Exception = pickle.loads(answer.error)
            own.add_note(f"in a worker:\n{answer.trace}")
            raise own
        return answer

    def _broken(self, error: BaseException) -> NoReturn:
        kept = 'with out="j.zarr" what is done would be kept'
        if self._store is not None:
            kept = f"what was done is in {self._store.path}, and the same call goes on from there"
        raise WorkerError(
            f"a worker died after {self._done} blocks, and its pool takes no more tasks; "
            f"{'' if self._done else f'if it never began, which it tells on stderr, {GUARD}; else '}"
            f"make a new pool and call again: {kept}"
        ) from error


def _remedy(error: BaseException) -> str:
    """What to do about workers that do not come to an answer."""
    if isinstance(error, (ImportError, AttributeError, pickle.UnpicklingError)):
        return "install where workers run what is installed here: elementgrad[distributed], and the framework"
    if isinstance(error, CancelledError):
        return "leave the executor open, and its tasks alone, until all is read"
    return "give workers more memory, or a smaller budget"


def _make_payload(jacobian: Jacobian, plan: Plan, layout: BlockLayout) -> bytes:
    """All that a worker needs, as bytes."""
    import cloudpickle

    backend, asked = jacobian._backend, io.BytesIO()
    value = numbers(jacobian.value, backend)
    pattern = None if jacobian._known is None else jacobian._within(jacobian._known)
    table = ChainMap(dict(backend.load("read").reducers()), cloudpickle.CloudPickler.dispatch_table)
    pickler = type("Pickler", (cloudpickle.CloudPickler,), {"dispatch_table": table})  # which is read off the class
    try:
        pickler(asked).dump((jacobian._question, jacobian._reader.budget, pattern))
    except Exception as error:
        raise OptionError(
            f"the function or its arguments cannot be sent to another process: {error}; leave out what is no data, "
            "such as files, locks and handles"
        ) from error
    surroundings = backend.load("read").ambient_state(jacobian._reader.linear)
    return pickle.dumps(JacobianPayload(backend.name, surroundings, asked.getvalue(), plan, layout, value), protocol=5)


@contextmanager
def _filed(payload: bytes) -> Iterator[str | None]:
    """A large payload in a file for the time of a read, so that it is not sent with every task."""
    if len(payload) <= INLINE:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="elementgrad-") as directory:
        path = os.path.join(directory, "payload")
        with open(path, "wb") as file:
            file.write(payload)
        yield path
