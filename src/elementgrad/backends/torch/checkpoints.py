"""Checkpoints run a part of a function again when its gradients are asked for: while we look inside, they do not.

A reentrant one keeps no graph, so nothing inside has a derivative. Any other would run again after the tensors that we
replaced are back in their places. They differ from plain calls in the memory that they take alone.
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_local = threading.local()
_lock = threading.Lock()
_users = 0
_originals: dict[str, Any] = {}


class _Straight:
    """Stands in for the Function of reentrant checkpoints, and is that for threads that are not ours."""

    @staticmethod
    def apply(function: Any, preserve_rng_state: bool, *arguments: Any) -> Any:
        if getattr(_local, "inside", ()):
            return function(*arguments)
        return _originals["CheckpointFunction"].apply(function, preserve_rng_state, *arguments)


def _around(*arguments: Any, **options: Any) -> Iterator[None]:
    """Stands in for what other checkpoints do before and after their call."""
    if any(getattr(_local, "inside", ())):
        return iter((None,))
    return _originals["_checkpoint_without_reentrant_generator"](*arguments, **options)


STRAIGHT = {"CheckpointFunction": _Straight, "_checkpoint_without_reentrant_generator": _around}


@contextmanager
def straight(inside: bool) -> Iterator[None]:
    """In here this thread's reentrant checkpoints are plain calls, and all others too if we look inside."""
    module: Any = sys.modules.get("torch.utils.checkpoint")
    if module is None:
        yield
        return
    stack = _local.__dict__.setdefault("inside", [])
    stack.append(inside)
    _count(module, +1)
    try:
        yield
    finally:
        _count(module, -1)
        stack.pop()


def _count(module: Any, users: int) -> None:
    global _users
    with _lock:
        _users += users
        if users == _users == 1:
            _originals.update({name: getattr(module, name) for name in STRAIGHT})
            module.__dict__.update(STRAIGHT)
        elif _users == 0:
            module.__dict__.update(_originals)
