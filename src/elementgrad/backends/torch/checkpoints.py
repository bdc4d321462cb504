"""Reentrant checkpoints keep no graph, so nothing inside has a derivative: while we run a function they run straight."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_local = threading.local()
_lock = threading.Lock()
_users = 0
_original: Any = None


class _Straight:
    """Stands in for PyTorch's own Function, and does what that does for threads that are not ours."""

    @staticmethod
    def apply(function: Any, preserve_rng_state: bool, *arguments: Any) -> Any:
        if getattr(_local, "depth", 0):
            return function(*arguments)
        return _original.apply(function, preserve_rng_state, *arguments)


@contextmanager
def straight() -> Iterator[None]:
    """In here this thread's reentrant checkpoints are plain calls; they differ in the memory that they take alone."""
    module: Any = sys.modules.get("torch.utils.checkpoint")
    if module is None:
        yield
        return
    _local.depth = getattr(_local, "depth", 0) + 1
    _count(module, +1)
    try:
        yield
    finally:
        _count(module, -1)
        _local.depth -= 1


def _count(module: Any, users: int) -> None:
    global _users, _original
    with _lock:
        _users += users
        if users == _users == 1:
            _original, module.CheckpointFunction = module.CheckpointFunction, _Straight
        elif _users == 0:
            module.CheckpointFunction = _original
