"""Clean-up that an interrupt cannot skip.

Ctrl-C is an exception that can be raised between any two instructions, also in a `finally`, in an `__exit__`, or on the
way from a `with` to its body. So whatever changes something of the user's or of a framework's registers first what
undoes it (`defer`), and changes it then. What is registered belongs to the innermost open scope of the thread. Leaving
a scope undoes all that was registered in it, and in scopes inside of it that an interrupt left open, latest first. The
outermost scope is that of the public verb (`guarded`).

One rule makes this work: an undo is idempotent. One that was interrupted runs again from its start, and one whose
change never happened does no harm. Where several calls must all happen or none, they are made `atomically`.
"""

import io
import sys
import threading
import time
import weakref
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, _GeneratorContextManager, suppress
from dataclasses import dataclass
from functools import partial, wraps
from types import CodeType
from typing import Any, TypeVar, cast

Undos = list[Callable[[], object]]
Function = TypeVar("Function", bound=Callable[..., Any])
Value = TypeVar("Value")
Snapshot = Callable[[], Callable[[], None]]
"""Notes the state of a framework in this thread, and returns an undo that puts it back."""
MISSING = object()
_snapshots: list[Snapshot] = []


class _Thread(threading.local):
    def __init__(self) -> None:
        self.scopes: list[scope] = []
        self.held: list[tuple[weakref.ref[Any], Undos]] = []
        """What blocks of code of the user's changed, and the objects that undo it when the blocks end."""


_thread = _Thread()


class scope:  # noqa: N801
    """A block of code that undoes what was registered in it when it is left, however it is left.

    >>> from elementgrad._cleanup import defer, scope
    >>> with scope():
    ...     defer(print, "first")
    ...     defer(print, "second")
    second
    first
    """

    __slots__ = ("undos",)

    def __enter__(self) -> Any:
        self.undos: Undos = []
        _thread.scopes.append(self)
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def undo(self) -> None:
        """Undo what was registered in this scope alone."""
        undo_all(self.undos)

    def close(self) -> None:
        """Undo what was registered since this scope was entered; a scope that was left already has nothing."""
        # A generator that an interrupt left behind closes its scope when it is collected, which may be long after the
        # scopes around it have, in the middle of another verb, or in another thread.
        scopes = _thread.scopes
        if scopes and scopes[-1] is self and not self.undos and type(self).undo is scope.undo:
            scopes.pop()  # the usual case, for which every sweep waits
            return
        raised: BaseException | None = None
        while self in scopes:
            try:
                scopes[-1].undo()
            except (KeyboardInterrupt, SystemExit) as error:
                raised = error  # held back, until this is done again
                continue
            except BaseException as error:
                raised = raised or error
            scopes.pop()
        if raised is not None:
            try:
                raise raised
            finally:
                del raised  # or it and this frame would keep each other, and the user's tensors with them


def undo_all(undos: Undos) -> None:
    """Run undos, latest first, and remove them; what one of them raises is raised when all have run."""
    if not undos:
        return
    scopes = _thread.scopes
    height = len(scopes)
    raised: BaseException | None = None
    while undos:
        try:
            undos[-1]()
        except (KeyboardInterrupt, SystemExit) as error:
            raised = error  # held back; the undo that it hit runs again, after the scopes that it was in are left
            for inner in scopes[height : height + 1]:
                inner.close()
            continue
        except BaseException as error:
            raised = raised or error
        undos.pop()
    if raised is not None:
        try:
            raise raised
        finally:
            del raised


def atomically(*steps: "partial[Any]") -> list[Any]:
    """Call functions that are written in C one after the other, so that no interrupt comes between them.

    Python looks for signals between instructions of its own, and while this loop runs there are none.
    """
    return list(map(partial.__call__, steps))


def defer(undo: Callable[..., object], *arguments: Any) -> None:
    """Register an idempotent undo with the innermost open scope, before the change that it undoes."""
    _thread.scopes[-1].undos.append(partial(undo, *arguments) if arguments else undo)


def assign(owner: Any, name: str, value: Any) -> None:
    """Set an attribute until the innermost open scope is left."""
    defer(put_back, owner, name, vars(owner).get(name, MISSING))
    setattr(owner, name, value)


def put_back(owner: Any, name: str, value: Any) -> None:
    """Give an attribute its former value; `MISSING` if its owner had none of its own."""
    if value is not MISSING:
        setattr(owner, name, value)
    elif name in vars(owner):
        delattr(owner, name)


def push(owner: Any, name: str, item: Any) -> None:
    """Append an object to a tuple in an attribute until the innermost open scope is left."""
    defer(_remove, owner, name, item)
    setattr(owner, name, (*getattr(owner, name), item))


def _remove(owner: Any, name: str, item: Any) -> None:
    setattr(owner, name, tuple([other for other in getattr(owner, name) if other is not item]))


def enter(manager: AbstractContextManager[Value]) -> Value:
    """Enter a context until the innermost open scope is left.

    A `with` statement would not do: an interrupt between its body and `__exit__` skips the latter.
    """
    context = _Context(manager)
    _thread.scopes[-1].undos.append(context.leave)
    return context.enter()


class _Context:
    """A context manager that is left once, if it was entered."""

    __slots__ = ("_inside", "_manager")

    def __init__(self, manager: AbstractContextManager[Any]):
        self._manager = manager
        self._inside = False

    # The call and the note that it happened are one statement each, so that no interrupt comes between them.
    def enter(self) -> Any:
        value, self._inside = self._manager.__enter__(), True
        return value

    def leave(self) -> None:
        if self._inside:
            self._inside = bool(self._manager.__exit__(None, None, None)) and False
        else:  # a generator that was interrupted on its way back has done its part; one that ended has nothing to do
            generator = getattr(self._manager, "gen", None)
            if generator is not None:
                generator.close()


_MANAGED = (_GeneratorContextManager.__enter__.__code__, _GeneratorContextManager.__exit__.__code__)


def finish_blocks(error: BaseException | None) -> None:
    """Finish the generators of `with` statements that an interrupt kept from calling them again.

    The interrupt has them in its traceback. They would go on when that is forgotten, and undo what they did after all
    else is undone: PyTorch so takes a mode off for a moment, and would put it back when the mode was left.
    """
    while error is not None:
        trace = error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code in _MANAGED:
                with suppress(Exception):
                    trace.tb_frame.f_locals["self"].gen.close()
            trace = trace.tb_next
        error = error.__context__


class entered(scope):  # noqa: N801
    """Be in a context in a block of code, which is left also where a `with` on the context itself would not be."""

    __slots__ = ("_manager",)

    def __init__(self, manager: AbstractContextManager[Any]):
        self._manager = manager

    def __enter__(self) -> Any:
        super().__enter__()
        return enter(self._manager)


class Lock:
    """A lock that no interrupt can leave taken: what takes it says so by one atomic operation, and the undo looks.

    A thread that has it may take it again. Others wait by looking now and then, as it is taken for moments, or by
    threads that have a model to themselves.
    """

    def __init__(self) -> None:
        self._holder: dict[str, _Holder] = {}

    def take(self) -> None:
        """Take the lock until the innermost open scope is left."""
        me = _Holder(threading.get_ident())
        defer(self._give_back, me)
        while True:
            holder = self._holder.setdefault("holder", me)
            if holder.thread == me.thread:
                return
            time.sleep(0.0002)

    def taken(self) -> "taken":
        """Return a block of code that has the lock."""
        return taken(self)

    def _give_back(self, me: "_Holder") -> None:
        if self._holder.get("holder") is me:
            del self._holder["holder"]


@dataclass(frozen=True, eq=False)
class _Holder:
    thread: int


class taken(scope):  # noqa: N801
    """A block of code that has a lock."""

    __slots__ = ("_lock",)

    def __init__(self, lock: Lock):
        self._lock = lock

    def __enter__(self) -> None:
        super().__enter__()
        self._lock.take()


class Held:
    """What a `committed` verb registered, for an object that undoes it later: a recording when its block ends."""

    def __init__(self) -> None:
        self._undos: list[Undos] = []
        self._thread = threading.get_ident()

    def hold(self, owner: object) -> None:
        """Take what is registered with the innermost open scope, now and later.

        If several interrupts in a row keep a block from undoing it, its owner does so when it dies (`give_up`). If that
        is interrupted too, or happens in another thread, the next verb of this thread does.
        """
        undos = _thread.scopes[-1].undos
        self._thread = threading.get_ident()
        self._undos.append(undos)
        _thread.held.append((weakref.ref(owner), undos))

    def undo(self) -> None:
        """Undo what was registered."""
        for undos in self._undos:
            undo_all(undos)

    def give_up(self) -> None:
        """Undo what is left, unless this is another thread: modes can be left in the thread alone that is in them."""
        if self._thread == threading.get_ident():
            self.undo()


class at_end:  # noqa: N801
    """The `__exit__` of a class whose instances have something `Held`.

    A `with` statement looks it up before it enters, and calls what it found: a method that is written in C.
    """

    def __get__(self, owner: Any, kind: type | None = None) -> Callable[..., None]:
        return _exit if owner is None else _End(owner).__exit__


def _exit(owner: Any, *error: Any) -> None:
    """End a block, for those who look the method up in the class, as `contextlib.ExitStack` does."""
    owner._held.undo()


class _End(io.IOBase):
    """The end of a block, which no interrupt can skip.

    An `__exit__` that is written in Python can be interrupted at its first instruction, before any `try` in it, and
    nothing would call it again. That of a file is written in C. It calls `close`, which here goes to a generator that
    waits inside of a `try`, so that there is no instruction which an interrupt could hit before.
    """

    closed = True  # or it would be closed when it dies, also if somebody but looked at the method

    def __init__(self, owner: Any):
        self._owner = owner  # which may have no other name during its block
        ended: list[bool] = []
        generator = _undone(owner._held, ended)
        next(generator)
        steps = map(partial.__call__, [partial(ended.append, True), partial(generator.close)])
        returned: list[Any] = []
        self.close = partial(returned.extend, steps)  # type: ignore[method-assign]


def _undone(held: Held, ended: list[bool]) -> Generator[None, None, None]:
    try:
        yield
    finally:
        if ended:  # and not only forgotten
            try:
                held.undo()
            finally:  # once more, as an interrupt may have come first; what is done already is not done again
                held.undo()


def on_entry(snapshot: Snapshot) -> None:
    """For a framework that has modes in each thread: have every verb leave them as it found them."""
    _snapshots.append(snapshot)


def guarded(function: Function) -> Function:
    """Mark a public verb: all that it changes is undone when it returns or raises, whatever interrupts it."""

    @wraps(function)
    def verb(*arguments: Any, **options: Any) -> Any:
        block = _Verb()
        try:
            with block:
                return function(*arguments, **options)
        finally:  # once more, as an interrupt may have skipped the end of the block
            block.close()

    _verbs.add(verb.__code__)  # type: ignore[attr-defined]
    return cast(Function, verb)


def committed(function: Function) -> Function:
    """Mark a public verb whose changes are to stay: what it registers is undone only if it does not return.

    The result is all that the caller has in hand to take the changes back with. So nothing may come between the moment
    at which they are final, which is the removal of the scope, and the return. Both stand on one line and neither is a
    call, after which alone Python looks for interrupts; for the same reason this is the outermost decorator.
    """

    @wraps(function)
    def verb(*arguments: Any, **options: Any) -> Any:
        block = _Verb()
        scopes = _thread.scopes
        height = len(scopes)
        try:
            try:
                block.__enter__()
                height = scopes.index(block)
                result = function(*arguments, **options)
                del scopes[height]; return result  # noqa: E702  # fmt: skip
            except BaseException:
                block.close()
                raise
        except BaseException:
            block.close()
            raise

    verb.autograph_info__ = None  # type: ignore[attr-defined]  # by this sign AutoGraph leaves a function alone
    _verbs.add(verb.__code__)  # type: ignore[attr-defined]
    return cast(Function, verb)


def contained(function: Function) -> Function:
    """Mark code of ours that runs inside of the user's and not of a verb, such as a hook or the call of a layer.

    No verb is around it that would leave the scopes which an interrupt left open, so that it does so itself.
    """

    @wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        scopes = _thread.scopes
        height = len(scopes)
        try:
            return function(*arguments, **options)
        finally:
            if len(scopes) > height:
                scopes[height].close()

    _verbs.add(call.__code__)  # type: ignore[attr-defined]
    return cast(Function, call)


_verbs: set[CodeType] = set()
"""The code around all scopes: while none of it runs in a thread, no scope of the thread is open for good reason."""


class _Verb(scope):
    """The scope of a public verb."""

    __slots__ = ("_ambient",)

    def __enter__(self) -> Any:
        _undo_leftovers()
        self._ambient = [snapshot() for snapshot in _snapshots]
        return super().__enter__()

    def undo(self) -> None:
        try:
            super().undo()
        finally:
            for restore in self._ambient:
                restore()


def _undo_leftovers() -> None:
    """Undo what a verb left that ended before it had undone everything, as by several interrupts in a row."""
    if _thread.held:
        for owner, undos in _thread.held:
            if owner() is None:
                undo_all(undos)
        _thread.held = [(owner, undos) for owner, undos in _thread.held if undos]
    scopes = _thread.scopes
    if not scopes:
        return
    frame: Any = sys._getframe(2)  # of the verb that begins
    while (frame := frame.f_back) is not None:
        if frame.f_code in _verbs:
            return  # this one runs inside of another, whose scopes are open for good reason
    scopes[0].close()
