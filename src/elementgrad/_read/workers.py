"""Blocks of a Jacobian that are read by the workers of an executor.

The driver (`read_on_workers`) pickles the function and its arguments once, keeps few tasks in flight, and sends a block
again whose worker was lost. A worker (`run_task`) evaluates the function when the first task of a Jacobian arrives,
keeps that evaluation for the next ones, and writes blocks to the array on disk itself if it sees that. What the
function raises in a worker is returned as a result and raised in the driver: it differs from a worker that was lost.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, CancelledError, Executor, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from elementgrad._backends.autodiff import PRECISION
from elementgrad._backends.base import Backend
from elementgrad._cleanup import close_scopes_after
from elementgrad._place.place import Place
from elementgrad._read import api
from elementgrad._read.jacobian import Jacobian, to_numpy
from elementgrad._read.plan import BlockLayout, Plan, default_budget, no_progress
from elementgrad._read.zarr import Store
from elementgrad._sparsity.pattern import Pattern
from elementgrad.errors import FrameworkError, OptionError, WorkerError, require_packages

MAX_EVALUATIONS = 2
"""The number of evaluations that a process keeps; the oldest goes first."""
IDLE_SECONDS = 300.0
"""An evaluation is dropped after this many seconds without a block, since others use the cluster too."""


@dataclass(frozen=True, eq=False)
class JacobianSpec:
    """The arguments of `jacobian`, or of `hessian`, for one output and one input, to be evaluated in any process."""

    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    zero: bool
    batch: bool
    create_graph: bool
    of: Place | None
    """For a Hessian, the input of its rows."""
    wrt: Place | None
    element: Place | None = None
    """The output element that has the Hessian."""

    @classmethod
    def of_jacobian(cls, jacobian: Jacobian) -> "JacobianSpec":
        """Return what evaluates a Jacobian anew."""
        origin, options = jacobian._origin, jacobian._options
        assert origin is not None
        flags = options.zero, options.batch is not None, origin.create_graph
        places = jacobian._of.place, jacobian._wrt.place, origin.element
        return cls(origin.call.function, origin.args, origin.kwargs, *flags, *places)

    def evaluate(self, budget: int | None, pattern: Pattern | None) -> Jacobian:
        """Evaluate the function, here and now."""
        options: Any = {"unconnected": "zero" if self.zero else "error", "batch": self.batch, "budget": budget}
        options |= {"kwargs": self.kwargs, "pattern": pattern}
        if self.element is None:
            return api.jacobian(self.function, *self.args, of=self.of, wrt=self.wrt, **options)
        if self.of == self.wrt:
            return api.hessian(self.function, *self.args, of=self.element, wrt=self.wrt, **options)
        options["pattern"] = None  # it is that of one of the four blocks
        return api.hessian(self.function, *self.args, of=self.element, wrt=[self.of, self.wrt], **options)[0][1]


@dataclass(frozen=True)
class JacobianPayload:
    """A Jacobian as another process can evaluate it."""

    framework: str
    ambient_state: Any
    """The state that the evaluation ran from beside its arguments, such as random numbers; restored first."""
    pickled_spec: bytes
    """The `JacobianSpec`, budget and pattern, by cloudpickle."""
    plan: Plan
    layout: BlockLayout
    value: np.ndarray
    """The value of the function in the driver: it must be the same in the worker."""


@dataclass(frozen=True)
class BlockTask:
    """One block to read. The payload comes with it, or in a file, or is known by its digest from before."""

    digest: str
    flight: str
    """The read that it is part of."""
    index: int
    attempt: int
    payload: bytes | None
    file: str | None
    out: str | None
    """The array to write to, for a process that sees it."""
    mark: str


@dataclass(frozen=True)
class BlockResult:
    """The outcome of a task. An exception that is raised instead is not the function's: a worker was lost.

    An empty one is for a read that was left early.
    """

    values: np.ndarray | None = None
    written: bool = False
    unknown: bool = False
    """True if the payload could not be loaded."""
    error: bytes | None = None
    """The function's own exception."""
    trace: str = ""


class WorkerEvaluation:
    """A function at its arguments, in this process, ready for blocks."""

    def __init__(self, pickled: bytes):
        payload: JacobianPayload = pickle.loads(pickled)
        self._backend: Backend = import_module(f"elementgrad._backends.{payload.framework}.tensor").backend
        with self._backend.load("read").restore_ambient_state(payload.ambient_state):
            spec, budget, pattern = _unpickle_spec(payload.pickled_spec)
            self._payload = replace(payload, pickled_spec=b"")
            self._jacobian: Jacobian = spec.evaluate(budget, pattern)
        self._check_value()
        self.last_used = time.monotonic()

    def read(self, task: BlockTask) -> BlockResult:
        """Read one block; write it if this process sees the array on disk, and return it otherwise."""
        payload = self._payload
        with self._backend.load("read").restore_ambient_state(payload.ambient_state):
            values = self._jacobian._read_part(payload.plan, payload.layout, task.index)
        self.last_used = time.monotonic()
        store = None if task.out is None else Store.open_shared(Path(task.out), payload.layout, task.mark)
        if store is None:
            return BlockResult(values=np.ascontiguousarray(values))
        store.write(task.index, values)
        return BlockResult(written=True)

    def _check_value(self) -> None:
        # A function that is random, or depends on what was not carried here, gives another value.
        here, there = to_numpy(self._jacobian.value, self._backend), self._payload.value
        of = self._jacobian._of
        near = PRECISION[min(8, self._backend.itemsize(of.tensor))] ** 0.5
        size = np.abs(there[np.isfinite(there)]).max(initial=0)
        if here.shape != there.shape or not np.allclose(here, there, near, near * size, equal_nan=True):
            raise FrameworkError(
                f"{of.name} has another value in a worker than where the Jacobian was made: the function is random in "
                "a way that cannot be carried over, or something that it depends on was changed since, or was not "
                "passed to it; seed it, pass it all as arguments, or make a new Jacobian"
            )


_evaluations: OrderedDict[str, WorkerEvaluation] = OrderedDict()
_abandoned: deque[str] = deque(maxlen=1000)
"""Reads that were left early in this process, whose threads may still run tasks of theirs."""
_is_tidying = False
_lock = threading.Lock()
"""One block at a time: the frameworks use all cores for one, and a second would take as much memory again."""


@close_scopes_after
def run_task(task: BlockTask) -> BlockResult:
    """Read a block in a worker; return what the function raises, so that it differs from a worker that was lost."""
    with no_progress(), _lock:
        if task.flight in _abandoned:
            return BlockResult()
        try:
            evaluation = _evaluations.get(task.digest)
            if evaluation is None:
                payload = _load_payload(task)
                if payload is None:
                    return BlockResult(unknown=True)
                evaluation = _cache_evaluation(task.digest, WorkerEvaluation(payload))
            return evaluation.read(task)
        except Exception as error:
            return BlockResult(error=_pickle_error(error), trace="".join(traceback.format_exception(error)))


def forget(digest: str, flight: str) -> None:
    """Drop a Jacobian and its remaining tasks in this process, where threads may have read its blocks."""
    with _lock:
        _abandoned.append(flight)
        _evaluations.pop(digest, None)


def _cache_evaluation(digest: str, evaluation: WorkerEvaluation) -> WorkerEvaluation:
    global _is_tidying
    _evaluations[digest] = evaluation
    if not _is_tidying:
        _is_tidying = True
        threading.Thread(target=_drop_idle, name="elementgrad-tidy", daemon=True).start()
    while len(_evaluations) > MAX_EVALUATIONS:
        _evaluations.popitem(last=False)
    return evaluation


def _drop_idle() -> None:
    """Drop evaluations that are not used any more, until none is left."""
    global _is_tidying
    while _is_tidying:
        time.sleep(min(1.0, IDLE_SECONDS))
        with _lock:
            now = time.monotonic()
            for digest in [digest for digest, each in _evaluations.items() if now - each.last_used >= IDLE_SECONDS]:
                del _evaluations[digest]
            _is_tidying = bool(_evaluations)


def _load_payload(task: BlockTask) -> bytes | None:
    if task.payload is not None or task.file is None:
        return task.payload
    try:
        content = Path(task.file).read_bytes()
    except OSError:  # another machine, another disk
        return None
    return content if hashlib.sha256(content).hexdigest() == task.digest else None


def _unpickle_spec(pickled: bytes) -> Any:
    try:
        return pickle.loads(pickled)
    except Exception as error:
        raise OptionError(
            f"the function or its arguments cannot be read in another process: {error}; install there what they come "
            "from, or make what does not pickle inside of the function"
        ) from error


def _pickle_error(error: Exception) -> bytes:
    import cloudpickle

    try:
        pickled: bytes = cloudpickle.dumps(error)
        pickle.loads(pickled)
        return pickled
    except Exception:
        return pickle.dumps(WorkerError(f"{type(error).__name__} in worker {os.getpid()}: {error}"))


INLINE_BYTES = 2**18
"""Payloads of up to this many bytes come with every task; larger ones are written to a file once."""
MAX_RETRIES = 3
"""The number of times that a block lost with its worker is sent again."""
MIN_IN_FLIGHT, MAX_IN_FLIGHT = 4, 1024
"""Tasks in flight: as many as fit into memory if all came back at once, and more while workers write themselves."""

MAIN_GUARD_HINT = 'in a script put what starts workers below if __name__ == "__main__":, since they import it'


def check_executor(executor: Any, jacobian: Jacobian) -> Executor | None:
    """Return the executor if it can be given blocks of this Jacobian; checked before anything is computed."""
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
    if jacobian._origin is None:
        raise OptionError("eager code that was recorded runs in no other process; put it into a function, eg.jacobian")
    if jacobian._origin.create_graph:
        raise OptionError("with create_graph=True results stay in a graph, which no other process has; leave it out")
    require_packages("cloudpickle", "executor=", "distributed")
    return executor


def read_on_workers(
    jacobian: Jacobian, plan: Plan, layout: BlockLayout, executor: Executor, which: Sequence[int], store: Store | None
) -> Iterator[tuple[int, np.ndarray | None]]:
    """Yield index and values of each block as it is done; None for the values that a worker has written itself."""
    payload = _make_payload(jacobian, plan, layout)
    each = layout.numbers * jacobian._backend.itemsize(jacobian._wrt.tensor)
    room = max(MIN_IN_FLIGHT, min(MAX_IN_FLIGHT, default_budget(None) // max(1, each)))
    with _write_payload(payload) as file:
        yield from _Flight(executor, payload, file, store, room).results(which)


class _Flight:
    """The tasks that were given to an executor and are not done."""

    def __init__(self, executor: Executor, payload: bytes, file: str | None, store: Store | None, room: int):
        self._executor = executor
        self._payload = payload
        self._store = store
        self._fitting = room
        self._pending: dict[Future[BlockResult], BlockTask] = {}
        self._losses: Counter[int] = Counter()
        self._done = 0
        self._values_came_back = False
        digest, inline = hashlib.sha256(payload).hexdigest(), payload if file is None else None
        out, mark = (None, "") if store is None else (str(store.path), store.mark)
        self._blank = BlockTask(digest, secrets.token_hex(8), 0, 0, inline, file, out, mark)

    def results(self, which: Sequence[int]) -> Iterator[tuple[int, np.ndarray | None]]:
        """Submit a task for each block and yield the results as they are done."""
        waiting = deque(which)
        try:
            while waiting or self._pending:
                while waiting and len(self._pending) < self._room:
                    self._submit(replace(self._blank, index=waiting.popleft()))
                for future in wait(self._pending, return_when=FIRST_COMPLETED).done:
                    task = self._pending.pop(future)
                    result = self._take_result(future, task)
                    if result is not None:
                        self._done += 1
                        self._values_came_back |= not result.written
                        yield task.index, result.values
        finally:
            for future in self._pending:
                future.cancel()
            forget(self._blank.digest, self._blank.flight)

    @property
    def _room(self) -> int:
        # With each block that a worker wrote one more may be in flight, until values come back.
        return self._fitting if self._values_came_back else min(MAX_IN_FLIGHT, self._fitting + self._done)

    def _submit(self, task: BlockTask) -> None:
        try:
            self._pending[self._executor.submit(run_task, task)] = task
        except BrokenExecutor as error:
            self._raise_broken(error)
        except RuntimeError as error:  # of every engine of Python's, and of MPI's
            if "bootstrapping" in str(error):  # where the script starts workers as they import it
                raise OptionError(
                    f"a worker cannot start a pool while it imports the script; {MAIN_GUARD_HINT}"
                ) from error
            raise OptionError(f"the executor takes no tasks: {error}; give one that is not shut down") from error

    def _take_result(self, future: Future[BlockResult], task: BlockTask) -> BlockResult | None:
        """Return the result of a task, or None if the task was sent once more."""
        retry = replace(task, attempt=task.attempt + 1)
        try:
            result = future.result()
        except BrokenExecutor as error:
            self._raise_broken(error)
        except (Exception, CancelledError) as error:  # not the function's own, which come as results
            self._losses[task.index] += 1
            if self._losses[task.index] > MAX_RETRIES:
                raise WorkerError(
                    f"a block was lost with its worker {MAX_RETRIES + 1} times, at last by {type(error).__name__}: "
                    f"{error}; {_remedy(error)}"
                ) from error
            self._submit(retry)
            return None
        if result.unknown:
            self._submit(replace(retry, payload=self._payload))
            return None
        if result.error is not None:
            raised: Exception = pickle.loads(result.error)
            raised.add_note(f"in a worker:\n{result.trace}")
            raise raised
        return result

    def _raise_broken(self, error: BaseException) -> NoReturn:
        hint = 'with out="j.zarr" what is done would be kept'
        if self._store is not None:
            hint = f"what was done is in {self._store.path}, and the same call resumes from there"
        raise WorkerError(
            f"a worker died after {self._done} blocks, and its pool takes no more tasks; "
            f"{'' if self._done else f'if it never began, which it tells on stderr, {MAIN_GUARD_HINT}; else '}"
            f"make a new pool and call again: {hint}"
        ) from error


def _remedy(error: BaseException) -> str:
    """Return what to do about workers that do not finish their tasks."""
    if isinstance(error, (ImportError, AttributeError, pickle.UnpicklingError)):
        return "install where workers run what is installed here: elementgrad[distributed], and the framework"
    if isinstance(error, CancelledError):
        return "keep the executor open, and do not cancel its tasks, until everything is read"
    return "give workers more memory, or a smaller budget"


def _make_payload(jacobian: Jacobian, plan: Plan, layout: BlockLayout) -> bytes:
    import cloudpickle

    backend, pickled = jacobian._backend, io.BytesIO()
    value = to_numpy(jacobian.value, backend)
    pattern = None if jacobian._known_pattern is None else jacobian._restrict(jacobian._known_pattern)
    table = ChainMap(dict(backend.load("read").reducers()), cloudpickle.CloudPickler.dispatch_table)
    pickler = type("Pickler", (cloudpickle.CloudPickler,), {"dispatch_table": table})  # which is read off the class
    try:
        pickler(pickled).dump((JacobianSpec.of_jacobian(jacobian), jacobian._runner.budget, pattern))
    except Exception as error:
        raise OptionError(
            f"the function or its arguments cannot be sent to another process: {error}; leave out objects "
            "such as files, locks and handles"
        ) from error
    state = backend.load("read").ambient_state(jacobian._runner.linear)
    return pickle.dumps(JacobianPayload(backend.name, state, pickled.getvalue(), plan, layout, value), protocol=5)


@contextmanager
def _write_payload(payload: bytes) -> Iterator[str | None]:
    """Write a large payload to a file for the time of a read, so that it is not sent with every task."""
    if len(payload) <= INLINE_BYTES:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="elementgrad-") as directory:
        path = os.path.join(directory, "payload")
        with open(path, "wb") as file:
            file.write(payload)
        yield path
