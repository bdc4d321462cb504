"""Calls that no mode of PyTorch's sees: the user's own `autograd.Function`s, and the transforms of `torch.func`."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, Protocol

import torch._functorch.eager_transforms
import torch._functorch.vmap
from torch.autograd.function import _SingleLevelFunction

WRAPPERS: Any = [(torch._functorch.vmap, "_add_batch_dim"), (torch._functorch.eager_transforms, "_wrap_for_grad")]
"""By these `torch.func` takes hold of its arguments."""


class Watcher(Protocol):
    """Who calls functions for the user."""

    def stand_in(self, x: Any) -> Any:
        """What takes the place of a tensor."""

    def run(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call one."""


_local = threading.local()
_lock = threading.Lock()
_users = 0


@contextmanager
def watched_by(recorder: Watcher) -> Iterator[None]:
    """Have a recorder called for every function that this thread applies."""
    stack = watchers()
    stack.append(recorder)
    _count(+1)
    try:
        yield
    finally:
        _count(-1)
        stack.remove(recorder)


def watchers() -> list[Any]:
    """Who watches in this thread, innermost last."""
    return _local.__dict__.setdefault("stack", [])


@contextmanager
def aside() -> Iterator[None]:
    """While we work ourselves, no recording of this thread takes it for the user's."""
    _local.apart = getattr(_local, "apart", 0) + 1
    try:
        yield
    finally:
        _local.apart -= 1


def watching() -> bool:
    """Whether what this thread does is the user's."""
    return not getattr(_local, "apart", 0)


def _count(users: int) -> None:
    """`Function.apply` finds the method of its base class, also where it was looked up before: there it is watched."""
    global _users
    with _lock:
        _users += users
        if _users == users == 1:
            _SingleLevelFunction.apply = classmethod(_apply)  # type: ignore[attr-defined]
            for home, name in WRAPPERS:
                setattr(home, name, _wrapping(getattr(home, name)))
        elif _users == 0:
            del _SingleLevelFunction.apply  # type: ignore[attr-defined]
            for home, name in WRAPPERS:
                setattr(home, name, getattr(home, name).__wrapped__)


def _apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    apply = super(_SingleLevelFunction, cls).apply
    for watcher in watchers() if watching() else ():
        apply = partial(_run, watcher, apply)
    return apply(*args, **kwargs)


def _run(watcher: Watcher, apply: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return watcher.run(apply, args, kwargs)


def _wrapping(original: Callable[..., Any]) -> Callable[..., Any]:
    """What `torch.func` wraps a tensor with, given the stand-in of a recorded one."""

    @wraps(original)
    def wrap(x: Any, *args: Any) -> Any:
        for watcher in reversed(watchers()) if watching() else ():
            x = watcher.stand_in(x)
        return original(x, *args)

    wrap.__wrapped__ = original  # type: ignore[attr-defined]
    return wrap
