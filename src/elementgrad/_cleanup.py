"""Clean-up that Ctrl-C cannot skip.

Ctrl-C is an exception that can be raised between any two instructions: in a `finally`, in an `__exit__`, or on the way
from a `with` to its body. So code that changes something of the user or of a framework first registers the undo
(`defer`), and then makes the change. The undo belongs to the innermost open scope of the thread. Leaving a scope runs
all undos that were registered in it, and in scopes inside of it that an interrupt left open, the latest first. The
outermost scope is that of the public verb (`with_cleanup`).

This works because every undo is idempotent: one that was interrupted runs again from its start, and one whose change
never happened does no harm. Where several changes must all happen or none, they are made by `call_atomically`.
"""

import io
import sys
import threading
import time
import weakref
from collections.abc import Callable, Generator, Hashable
from contextlib import AbstractContextManager, _GeneratorContextManager, suppress
from functools import partial, wraps
from operator import call
from types import CodeType
from typing import Any, TypeVar, cast

Undos = list[Callable[[], object]]
Function = TypeVar("Function", bound=Callable[..., Any])
Value = TypeVar("Value")
Snapshot = Callable[[], Callable[[], None]]
"""Takes a snapshot of the state of a framework in this thread, and returns a function that restores it."""
MISSING = object()
_snapshots: list[Snapshot] = []
Replace = Callable[[Any, str, Any], None]
"""Replaces an attribute: owner, name, new value."""


class _Thread(threading.local):
    def __init__(self) -> None:
        self.scopes: list[scope] = []
        self.owned: list[tuple[weakref.ref[Any], Undos]] = []
        """Undos of `OwnedUndos`, each with the object that runs them when the user's block ends."""


_thread = _Thread()


class scope:  # noqa: N801
    """A block of code that runs the undos registered in it when it is left, however it is left.

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

    def undo(self) -> None:
        """Run the undos of this scope alone."""
        undo_all(self.undos)

    def close(self, *_: object) -> None:
        """Run all undos registered since this scope was entered; none if it was left already."""
        # A generator that an interrupt left behind closes its scope when it is collected, which may be long after the
        # scopes around it have, in the middle of another verb, or in another thread.
        scopes = _thread.scopes
        if scopes and scopes[-1] is self and not self.undos and type(self).undo is scope.undo:
            scopes.pop()  # the usual case, kept fast as every sweep has scopes
            return
        raised: BaseException | None = None
        while self in scopes:
            try:
                scopes[-1].undo()
            except (KeyboardInterrupt, SystemExit) as error:
                raised = error  # raised at the end; the undos run again first
                continue
            except BaseException as error:
                raised = raised or error
            scopes.pop()
        if raised is not None:
            try:
                raise raised
            finally:
                del raised  # or it and this frame would keep each other alive, and the user's tensors with them

    __exit__ = close


def undo_all(undos: Undos) -> None:
    """Run undos, the latest first, and remove them; an error of one of them is raised when all have run."""
    if not undos:
        return
    scopes = _thread.scopes
    height = len(scopes)
    raised: BaseException | None = None
    while undos:
        try:
            undos[-1]()
        except (KeyboardInterrupt, SystemExit) as error:
            # Raised at the end; the undo that it hit runs again, once the scopes inside of it are closed.
            raised = error
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


def call_atomically(*steps: "partial[Any]") -> list[Any]:
    """Call functions that are written in C one after the other, with no interrupt between them.

    Python handles signals between bytecode instructions, and this loop runs in C.
    """
    return list(map(partial.__call__, steps))


def defer(undo: Callable[..., object], *arguments: Any) -> None:
    """Register an idempotent undo with the innermost open scope, before the change that it undoes."""
    _thread.scopes[-1].undos.append(partial(undo, *arguments) if arguments else undo)


def assign(owner: Any, name: str, value: Any) -> None:
    """Set an attribute until the innermost open scope is left."""
    defer(restore_attribute, owner, name, vars(owner).get(name, MISSING))
    setattr(owner, name, value)


def restore_attribute(owner: Any, name: str, value: Any) -> None:
    """Give an attribute its former value, or remove it if that is `MISSING`."""
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

    A `with` statement is not enough: an interrupt between its body and `__exit__` skips the latter.
    """
    context = _Context(manager)
    _thread.scopes[-1].undos.append(context.leave)
    return context.enter()


class _Context:
    """A context manager that is exited once, if it was entered."""

    __slots__ = ("_inside", "_manager")

    def __init__(self, manager: AbstractContextManager[Any]):
        self._manager = manager
        self._inside = False

    # The call and the flag that records it are one statement each, so that no interrupt comes between them.
    def enter(self) -> Any:
        value, self._inside = self._manager.__enter__(), True
        return value

    def leave(self) -> None:
        if self._inside:
            self._inside = bool(self._manager.__exit__(None, None, None)) and False
        else:  # an interrupt came between the generator's part and the flag; closing one that ended does nothing
            generator = getattr(self._manager, "gen", None)
            if generator is not None:
                generator.close()


_MANAGED = (_GeneratorContextManager.__enter__.__code__, _GeneratorContextManager.__exit__.__code__)


def close_generators(error: BaseException | None) -> None:
    """Close the generators of `@contextmanager` blocks whose end an interrupt skipped.

    They are in the traceback of the interrupt. Without this they would end when the traceback is freed, and restore
    something after all else is undone: PyTorch takes a mode off for a moment in such a block, and would put it back
    after the mode was left.
    """
    while error is not None:
        trace = error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code in _MANAGED:
                with suppress(Exception):
                    trace.tb_frame.f_locals["self"].gen.close()
            trace = trace.tb_next
        error = error.__context__


class safe_context(scope):  # noqa: N801
    """A `with` block on a context manager whose `__exit__` no interrupt can skip."""

    __slots__ = ("_manager",)

    def __init__(self, manager: AbstractContextManager[Any]):
        self._manager = manager

    def __enter__(self) -> Any:
        super().__enter__()
        return enter(self._manager)


class Lock:
    """A re-entrant lock that no interrupt can leave locked.

    Taking it and recording its holder are one atomic operation (`dict.setdefault`), and the undo checks the holder.
    Other threads poll, since the lock is held for moments, or by a thread that needs a model for itself.
    """

    def __init__(self) -> None:
        self._holder: dict[str, list[int]] = {}
        """The thread that holds it, in a list of this one holder, by which `_release` knows it."""

    def take(self) -> None:
        """Take the lock until the innermost open scope is left."""
        me = [threading.get_ident()]
        defer(self._release, me)
        while self._holder.setdefault("holder", me) != me:
            time.sleep(0.0002)

    def hold(self) -> "_LockScope":
        """Return a `with` block that holds the lock."""
        return _LockScope(self)

    def is_held_elsewhere(self) -> bool:
        """Return True if another thread holds the lock."""
        holder = self._holder.get("holder")
        return holder is not None and holder[0] != threading.get_ident()

    def _release(self, me: list[int]) -> None:
        if self._holder.get("holder") is me:
            del self._holder["holder"]


class _LockScope(scope):
    __slots__ = ("_lock",)

    def __init__(self, lock: Lock):
        self._lock = lock

    def __enter__(self) -> None:
        super().__enter__()
        self._lock.take()


class OwnedUndos:
    """The undos of a `with_rollback` verb whose changes last until an object ends them: a recording and its block."""

    def __init__(self) -> None:
        self._undos: list[Undos] = []
        self._thread = threading.get_ident()

    def adopt(self, owner: object) -> None:
        """Take over what is registered with the innermost open scope, now and later.

        If several interrupts in a row keep the block from running these undos, the owner does so in its `__del__`
        (`undo_in_thread`). If that is interrupted too, or happens in another thread, the next verb of this thread does.
        """
        undos = _thread.scopes[-1].undos
        self._thread = threading.get_ident()
        self._undos.append(undos)
        _thread.owned.append((weakref.ref(owner), undos))

    def undo(self) -> None:
        for undos in self._undos:
            undo_all(undos)

    def undo_in_thread(self) -> None:
        """Run the remaining undos, unless in another thread: a mode can be left only in the thread that is in it."""
        if any(self._undos) and self._thread == threading.get_ident():
            self.undo()


class InterruptSafeExit:
    """The `__exit__` of a class whose instances have `OwnedUndos` in `_undos`.

    A `with` statement looks it up before it enters, and gets a method that is written in C.
    """

    def __get__(self, owner: Any, kind: type | None = None) -> Callable[..., None]:
        return _exit if owner is None else _BlockEnd(owner).__exit__


def _exit(owner: Any, *error: Any) -> None:
    # For those that look the method up in the class, as `contextlib.ExitStack` does.
    owner._undos.undo()


class _BlockEnd(io.IOBase):
    """The end of a block that no interrupt can skip.

    An `__exit__` that is written in Python can be interrupted at its first instruction, before any `try` in it, and
    nothing would call it again. The `__exit__` of a file is written in C and calls `close`. That goes here to a
    generator which waits inside of a `try`, so that there is no instruction before it for an interrupt to hit.
    """

    closed = True  # or `close` would run when it is freed, also after a mere lookup of the method

    def __init__(self, owner: Any):
        self._owner = owner  # kept alive during its block, where it may have no other reference
        ended: list[bool] = []
        generator = _undo_at_close(owner._undos, ended)
        next(generator)
        steps = map(partial.__call__, [partial(ended.append, True), partial(generator.close)])
        returned: list[Any] = []
        self.close = partial(returned.extend, steps)  # type: ignore[method-assign]


def _undo_at_close(owned: OwnedUndos, ended: list[bool]) -> Generator[None, None, None]:
    try:
        yield
    finally:
        if ended:  # and not only freed
            try:
                owned.undo()
            finally:  # once more, as an interrupt may have come first; undos that have run are gone
                owned.undo()


def register_snapshot(snapshot: Snapshot) -> None:
    """Have every verb restore what a framework keeps for each thread, such as its modes."""
    _snapshots.append(snapshot)


def with_cleanup(function: Function) -> Function:
    """Decorate a public verb: all that it changes is undone when it returns or raises, whatever interrupts it."""

    @wraps(function)
    def verb(*args: Any, **kwargs: Any) -> Any:
        block = _Verb()
        try:
            with block:
                return function(*args, **kwargs)
        finally:  # once more, as an interrupt may have skipped the end of the block
            block.close()

    _verbs.add(verb.__code__)  # type: ignore[attr-defined]
    return cast(Function, verb)


def with_rollback(function: Function) -> Function:
    """Decorate a public verb whose changes last: what it registers is undone only if it does not return.

    The caller can take the changes back only through the result. So no interrupt may come between the moment at which
    the changes become final, which is the removal of the scope, and the return. Both stand on one line and neither is a
    call, after which alone Python handles interrupts; for the same reason this is the outermost decorator.
    """

    @wraps(function)
    def verb(*args: Any, **kwargs: Any) -> Any:
        block = _LastingVerb()
        scopes = _thread.scopes
        height = len(scopes)
        try:
            try:
                block.__enter__()
                height = scopes.index(block)
                result = function(*args, **kwargs)
                del scopes[height]; return result  # noqa: E702  # fmt: skip
            except BaseException:
                block.close()
                raise
        except BaseException:
            block.close()
            raise

    verb.autograph_info__ = None  # type: ignore[attr-defined]  # AutoGraph leaves a function with this attribute alone
    _verbs.add(verb.__code__)  # type: ignore[attr-defined]
    return cast(Function, verb)


def close_scopes_after(function: Function) -> Function:
    """Decorate our code that the user's code calls without a verb around it, such as a hook or the call of a layer.

    It closes the scopes that an interrupt left open in it, as no verb would.
    """

    @wraps(function)
    def inner(*args: Any, **kwargs: Any) -> Any:
        scopes = _thread.scopes
        height = len(scopes)
        try:
            return function(*args, **kwargs)
        finally:
            if len(scopes) > height:
                scopes[height].close()

    _verbs.add(inner.__code__)  # type: ignore[attr-defined]
    return cast(Function, inner)


_verbs: set[CodeType] = set()
"""The code of all decorated verbs: while none of it runs in a thread, an open scope of the thread is a leftover."""


class _Verb(scope):
    """The scope of a verb. The first of its undos, which run last, restore what frameworks keep for each thread."""

    __slots__ = ()

    def __enter__(self) -> Any:
        if _thread.owned or _thread.scopes:
            _undo_leftovers()
        self.undos = list(map(call, _snapshots))
        _thread.scopes.append(self)
        return self


class _LastingVerb(scope):
    """The scope of a verb whose changes may outlast it: frameworks are restored only if it does not return."""

    __slots__ = ("_ambient",)

    def __enter__(self) -> Any:
        if _thread.owned or _thread.scopes:
            _undo_leftovers()
        self._ambient = list(map(call, _snapshots))
        return super().__enter__()

    def undo(self) -> None:
        try:
            super().undo()
        finally:
            for restore in self._ambient:
                restore()


def _undo_leftovers() -> None:
    """Run undos that an earlier verb left behind, as after several interrupts in a row."""
    if _thread.owned:
        for owner, undos in _thread.owned:
            if owner() is None:
                undo_all(undos)
        _thread.owned = [(owner, undos) for owner, undos in _thread.owned if undos]
    scopes = _thread.scopes
    if not scopes:
        return
    frame: Any = sys._getframe(2)  # of the verb that starts
    while (frame := frame.f_back) is not None:
        if frame.f_code in _verbs:
            return  # this verb runs inside of another, whose scopes are rightly open
    scopes[0].close()


class AttributePatch:
    """Ref-counted monkey-patch: installed by the first user, removed by the last, thread-safe.

    `install(replace, *of)` replaces the attributes. The replacements must behave like the originals in threads that do
    not use the patch. With `of`, such as a class to patch, there is one patch for each `of`, counted by itself.
    """

    def __init__(self, install: Callable[..., None]):
        self._install = install
        self._lock = Lock()
        self._patches: dict[tuple[Hashable, ...], _InstalledPatch] = {}

    def enter(self, *of: Hashable) -> None:
        """Replace the attributes until the innermost open scope is left."""
        user = object()
        defer(self._leave, of, user)
        self._add(user, of)

    def enter_for_verb(self, *of: Hashable) -> None:
        """Replace the attributes until the verb ends that is running, so that they are replaced once for all of it.

        If the verb's changes may outlast it there is no such end, and the innermost scope is used.
        """
        verb = _thread.scopes[0]
        if not isinstance(verb, _Verb):
            self.enter(*of)
            return
        patch = self._patches.get(of)
        if patch is None or verb not in patch.users:
            verb.undos.append(partial(self._leave, of, verb))
            self._add(verb, of)

    def _add(self, user: object, of: tuple[Hashable, ...]) -> None:
        with self._lock.hold():
            patch = self._patches.setdefault(of, _InstalledPatch())
            patch.users.add(user)
            if not patch.installed:
                self._install(patch.replace, *of)
                patch.installed = True

    def _leave(self, of: tuple[Hashable, ...], user: object) -> None:
        with self._lock.hold():
            patch = self._patches.get(of)
            if patch is None or user not in patch.users:
                return
            if len(patch.users) == 1:
                patch.restore()
                del self._patches[of]
            patch.users.discard(user)


class _InstalledPatch:
    """The attributes that are replaced now. The original of an inherited one is `MISSING`: its owner has none."""

    def __init__(self) -> None:
        self.users: set[object] = set()
        self.installed = False
        self._originals: list[tuple[Any, str, Any]] = []

    def replace(self, owner: Any, name: str, new: Any) -> None:
        original = vars(owner).get(name, MISSING)
        self._originals.append((owner, name, original))
        setattr(owner, name, new)

    def restore(self) -> None:
        self.installed = False
        while self._originals:
            restore_attribute(*self._originals[-1])
            self._originals.pop()
