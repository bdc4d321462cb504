"""Checkpoints run a part of a function again when its gradients are asked for: while we look inside, they do not.

A reentrant one keeps no graph, so nothing inside has a derivative. Any other would run again after the tensors that we
replaced are back in their places. They differ from plain calls in the memory that they take alone.
"""

import sys
import threading
from collections.abc import Iterator
from typing import Any

from elementgrad.backends.patch import Patch, Replace

REENTRANT, OTHER = "CheckpointFunction", "_checkpoint_without_reentrant_generator"
"""What the two sorts of checkpoints are called in PyTorch's module."""
_local = threading.local()


class straight:  # noqa: N801  a context, and no generator: every evaluation waits for it
    """In here this thread's reentrant checkpoints are plain calls, and all others too if we look inside."""

    def __init__(self, inside: bool):
        self._inside = inside
        self._on = "torch.utils.checkpoint" in sys.modules

    def __enter__(self) -> None:
        if self._on:
            _calls.begin()
            _local.__dict__.setdefault("inside", []).append(self._inside)

    def __exit__(self, *_: object) -> None:
        if self._on:
            _local.inside.pop()
            _calls.end()


class _Straight:
    """Stands in for the Function of reentrant checkpoints, and is that for threads that are not ours."""

    def __init__(self, original: Any):
        self._original = original

    def apply(self, function: Any, preserve_rng_state: bool, *arguments: Any) -> Any:
        if getattr(_local, "inside", ()):
            return function(*arguments)
        return self._original.apply(function, preserve_rng_state, *arguments)


def _install(replace: Replace) -> None:
    module = sys.modules["torch.utils.checkpoint"]
    original = getattr(module, OTHER)

    def around(*arguments: Any, **options: Any) -> Iterator[None]:
        """Stands in for what other checkpoints do before and after their call."""
        return iter((None,)) if any(getattr(_local, "inside", ())) else original(*arguments, **options)

    replace(module, REENTRANT, _Straight(getattr(module, REENTRANT)))
    replace(module, OTHER, around)


_calls = Patch(_install)
