"""The user's own `autograd.Function`s, which no mode of PyTorch's sees."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch.autograd.function import _SingleLevelFunction


class Watcher(Protocol):
    """Who calls functions for the user."""

    @property
    def watching(self) -> bool:
        """Whether it does so now."""

    def run(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call one."""


_local = threading.local()
_lock = threading.Lock()
_users = 0


@contextmanager
def watched_by(recorder: Watcher) -> Iterator[None]:
    """Have a recorder called for every function that this thread applies."""
    stack: list[Watcher] = _local.__dict__.setdefault("stack", [])
    stack.append(recorder)
    _count(+1)
    try:
        yield
    finally:
        _count(-1)
        stack.remove(recorder)


def _count(users: int) -> None:
    """`Function.apply` finds the method of its base class, also where it was looked up before: there it is watched."""
    global _users
    with _lock:
        _users += users
        if _users == users == 1:
            _SingleLevelFunction.apply = classmethod(_apply)  # type: ignore[attr-defined]
        elif _users == 0:
            del _SingleLevelFunction.apply  # type: ignore[attr-defined]


def _apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    original = super(_SingleLevelFunction, cls).apply
    stack = getattr(_local, "stack", ())
    if not stack or not stack[-1].watching:
        return original(*args, **kwargs)
    return stack[-1].run(original, args, kwargs)
