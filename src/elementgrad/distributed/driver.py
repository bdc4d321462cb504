"""Blocks from workers: few tasks in flight, what was lost tried again, what the function raises passed on."""

import hashlib
import io
import os
import pickle
import secrets
import tempfile
from collections import ChainMap, Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, CancelledError, Executor, Future, wait
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np

from elementgrad.distributed import worker
from elementgrad.distributed.part import numbers
from elementgrad.distributed.store import Store
from elementgrad.distributed.worker import Answer, Payload, Ticket
from elementgrad.errors import OptionError, WorkerError
from elementgrad.extras import require
from elementgrad.lazy import Jacobian
from elementgrad.plan import budget as bytes_of
from elementgrad.plan.layout import Layout
from elementgrad.plan.plan import Plan

INLINE = 2**18
"""Payloads of up to so many bytes come with every task; larger ones are written to a file once."""
TRIES = 3
"""How often a block that was lost with its worker is tried again."""
FEWEST, MOST = 4, 1024
"""Tasks in flight: as many as fit into memory if all came back at once, and more while workers write themselves."""

GUARD = 'in a script put what starts workers below if __name__ == "__main__":, since they import it'


def checked(executor: Any, jacobian: Jacobian) -> Executor | None:
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
    jacobian: Jacobian, plan: Plan, layout: Layout, executor: Executor, which: Sequence[int], store: Store | None
) -> Iterator[tuple[int, np.ndarray | None]]:
    """The number and values of each block as it is done; no values for one that a worker has written itself."""
    payload = _payload(jacobian, plan, layout)
    each = layout.numbers * jacobian._backend.itemsize(jacobian._wrt.tensor)
    fitting = max(FEWEST, min(MOST, bytes_of.default(None) // max(1, each)))
    with _filed(payload) as file:
        yield from _Flight(executor, payload, file, store, fitting).results(which)


class _Flight:
    """The tasks that were given to an executor and are not done."""

    def __init__(self, executor: Executor, payload: bytes, file: str | None, store: Store | None, fitting: int):
        self._executor = executor
        self._payload = payload
        self._store = store
        self._fitting = fitting
        self._pending: dict[Future[Answer], Ticket] = {}
        self._lost: Counter[int] = Counter()
        self._done = 0
        self._given = False
        """Whether a block came back with its values."""
        digest, inline = hashlib.sha256(payload).hexdigest(), payload if file is None else None
        out, mark = (None, "") if store is None else (str(store.path), store.mark)
        self._blank = Ticket(digest, secrets.token_hex(8), 0, 0, inline, file, out, mark)

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
            worker.forget(self._blank.digest, self._blank.flight)

    @property
    def _room(self) -> int:
        """How many may be in flight: with each that was written one more, until one was not."""
        return self._fitting if self._given else min(MOST, self._fitting + self._done)

    def _submit(self, ticket: Ticket) -> None:
        try:
            self._pending[self._executor.submit(worker.run, ticket)] = ticket
        except BrokenExecutor as error:
            self._broken(error)
        except RuntimeError as error:  # of every engine of Python's, and of MPI's
            if "bootstrapping" in str(error):  # Python's word where a worker starts workers as it imports the script
                raise OptionError(f"a worker cannot start a pool while it imports the script; {GUARD}") from error
            raise OptionError(f"the executor takes no tasks: {error}; give one that is not shut down") from error

    def _answer(self, future: Future[Answer], ticket: Ticket) -> Answer | None:
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


def _payload(jacobian: Jacobian, plan: Plan, layout: Layout) -> bytes:
    """All that a worker needs, as bytes."""
    import cloudpickle

    backend, asked = jacobian._backend, io.BytesIO()
    value = numbers(jacobian.value, backend)
    pattern = None if jacobian._known is None else jacobian._within(jacobian._known)
    table = ChainMap(dict(backend.reducers()), cloudpickle.CloudPickler.dispatch_table)
    pickler = type("Pickler", (cloudpickle.CloudPickler,), {"dispatch_table": table})  # which is read off the class
    try:
        pickler(asked).dump((jacobian._question, jacobian._reader.budget, pattern))
    except Exception as error:
        raise OptionError(
            f"the function or its arguments cannot be sent to another process: {error}; leave out what is no data, "
            "such as files, locks and handles"
        ) from error
    surroundings = backend.surroundings(jacobian._reader.linear)
    return pickle.dumps(Payload(backend.name, surroundings, asked.getvalue(), plan, layout, value), protocol=5)


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
