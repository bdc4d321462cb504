"""Calls that no mode of PyTorch's sees: the user's own `autograd.Function`s, and the transforms of `torch.func`."""

import threading
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, Protocol

import torch._functorch.eager_transforms
import torch._functorch.vmap
from torch.autograd.function import _SingleLevelFunction

from elementgrad.backends.patch import Patch, Replace
from elementgrad.cleanup import assign, contained, push, scope

WRAPPERS: Any = [(torch._functorch.vmap, "_add_batch_dim"), (torch._functorch.eager_transforms, "_wrap_for_grad")]
"""By these `torch.func` takes hold of its arguments."""


class Watcher(Protocol):
    """Who calls functions for the user."""

    def stand_in(self, x: Any) -> Any:
        """What takes the place of a tensor."""

    def run(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call one."""


class _Local(threading.local):
    watchers: tuple[Watcher, ...] = ()
    """Who watches in this thread, innermost last."""
    apart: int = 0
    """In how many `aside` the thread is."""


_local = _Local()


def watch(recorder: Watcher) -> None:
    """Have a recorder called for every function that this thread applies, until the innermost open scope is left."""
    push(_local, "watchers", recorder)
    _watched.enter()


def watchers() -> tuple[Any, ...]:
    """Who watches in this thread, innermost last."""
    return _local.watchers


class aside(scope):  # noqa: N801
    """While we work ourselves, no recording of this thread takes it for the user's."""

    __slots__ = ()

    def __enter__(self) -> None:
        super().__enter__()
        assign(_local, "apart", _local.apart + 1)


def watching() -> bool:
    """Whether what this thread does is the user's."""
    return not _local.apart


def _install(replace: Replace) -> None:
    """`Function.apply` finds the method of its base class, also where it was looked up before: there it is watched."""
    replace(_SingleLevelFunction, "apply", classmethod(_apply))
    for home, name in WRAPPERS:
        replace(home, name, _wrapping(getattr(home, name)))


_watched = Patch(_install)


@contained
def _apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    apply = super(_SingleLevelFunction, cls).apply
    for watcher in watchers() if watching() else ():
        apply = partial(_run, watcher, apply)
    return apply(*args, **kwargs)


def _run(watcher: Watcher, apply: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return watcher.run(apply, args, kwargs)


def _wrapping(original: Callable[..., Any]) -> Callable[..., Any]:
    """What `torch.func` wraps a tensor with, given the stand-in of a recorded one."""

    @contained
    @wraps(original)
    def wrap(x: Any, *args: Any) -> Any:
        for watcher in reversed(watchers()) if watching() else ():
            x = watcher.stand_in(x)
        return original(x, *args)

    return wrap
