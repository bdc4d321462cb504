"""Hooks on every optimizer and module of the process: they are there while elements train, and at no other time."""

import sys
from collections.abc import Callable, MutableMapping
from inspect import getfile
from typing import Any
from weakref import ref

import torch

from elementgrad.cleanup import Lock

STEPPING, HOLDING = getfile(torch.optim.Optimizer), getfile(torch.nn.Module)
RUNNING = {(STEPPING, "wrapper"), (HOLDING, "add_module"), (HOLDING, "__setattr__")}
"""The functions in which PyTorch goes through such hooks, which must not change meanwhile."""
_wanted: list[tuple[MutableMapping[int, Any], Any]] = []
_users: dict[int, "ref[Any]"] = {}
_lock = Lock()


def while_training(hooks: MutableMapping[int, Any]) -> Callable[[Any], Any]:
    """Mark a hook that is to be among PyTorch's for as long as elements train.

    It is put there as registering it does. That can be done twice, and an interrupt cannot come between the hook and a
    handle to remove it with.
    """

    def mark(hook: Any) -> Any:
        _wanted.append((hooks, hook))
        return hook

    return mark


def need(user: Any) -> None:
    """Have the hooks registered, until `user` is done or is no more."""
    with _lock.taken():
        key = id(user)
        _users[key] = ref(user, lambda gone: _lose(key, gone))
        for hooks, hook in _wanted:
            hooks[id(hook)] = hook


def done(user: Any) -> None:
    """Remove the hooks if nothing else needs them."""
    with _lock.taken():
        _users.pop(id(user), None)
        _tidy()


def _lose(key: int, gone: "ref[Any]") -> None:
    with _lock.taken():
        if _users.get(key) is gone:
            del _users[key]
        _tidy()


def _tidy() -> None:
    """Remove the hooks after the last user, unless PyTorch goes through them right now, in whichever thread.

    Garbage is collected at any time, also in the middle of a step. Then they stay, and do nothing, until elements train
    or are released the next time.
    """
    if not _users and not any(_running(frame) for frame in sys._current_frames().values()):
        for hooks, hook in _wanted:
            hooks.pop(id(hook), None)


def _running(frame: Any) -> bool:
    while frame is not None and (frame.f_code.co_filename, frame.f_code.co_name) not in RUNNING:
        frame = frame.f_back
    return frame is not None
