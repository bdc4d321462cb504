"""Checkpoints run a part of a function again when its gradients are asked for: while we look inside, they do not.

A reentrant one keeps no graph, so nothing inside has a derivative. Any other would run again after the tensors that we
replaced are back in their places. They differ from plain calls in the memory that they take alone.
"""

import sys
import threading
from collections.abc import Iterator
from typing import Any

REENTRANT, OTHER = "CheckpointFunction", "_checkpoint_without_reentrant_generator"
"""What the two sorts of checkpoints are called in PyTorch's module."""
_local = threading.local()
_lock = threading.Lock()


class straight:  # noqa: N801
    """In here this thread's reentrant checkpoints are plain calls, and all others too if we look inside.

    With `faithful`, a reentrant one without a tracked argument stays what it is: nothing inside gets a gradient.
    """

    def __init__(self, inside: bool, faithful: bool = False):
        self._inside = inside
        self._faithful = faithful
        self._module = sys.modules.get("torch.utils.checkpoint")

    def __enter__(self) -> None:
        if self._module is not None:
            with _lock:
                if not _stand_ins:
                    _stand_ins.append(_StandIns(self._module))
                _stand_ins[0].users += 1
            _local.__dict__.setdefault("inside", []).append((self._inside, self._faithful))

    def __exit__(self, *_: object) -> None:
        if self._module is not None:
            _local.inside.pop()
            with _lock:
                _stand_ins[0].users -= 1
                if not _stand_ins[0].users:
                    _stand_ins.pop().remove()


class _StandIns:
    """Stand in for what both sorts of checkpoints look up, and are that for threads that are not ours."""

    def __init__(self, module: Any):
        self.users = 0
        self._module = module
        self._reentrant = getattr(module, REENTRANT)
        self._other = getattr(module, OTHER)
        setattr(module, REENTRANT, self)
        setattr(module, OTHER, self.around)

    def remove(self) -> None:
        """Put back what was there."""
        setattr(self._module, REENTRANT, self._reentrant)
        setattr(self._module, OTHER, self._other)

    def apply(self, function: Any, preserve_rng_state: bool, *arguments: Any) -> Any:
        """What a reentrant checkpoint calls."""
        entered = getattr(_local, "inside", ())
        if entered and (not entered[-1][1] or any(getattr(x, "requires_grad", False) for x in arguments)):
            return function(*arguments)
        return self._reentrant.apply(function, preserve_rng_state, *arguments)

    def around(self, *arguments: Any, **options: Any) -> Iterator[None]:
        """What other checkpoints do before and after their call."""
        looking = any(inside for inside, _ in getattr(_local, "inside", ()))
        return iter((None,)) if looking else self._other(*arguments, **options)


_stand_ins: list[_StandIns] = []
