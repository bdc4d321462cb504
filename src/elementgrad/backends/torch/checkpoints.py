"""Checkpoints run a part of a function again when its gradients are asked for: while we look inside, they do not.

A reentrant one keeps no graph, so nothing inside has a derivative. Any other would run again after the tensors that we
replaced are back in their places. They differ from plain calls in the memory that they take alone.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from elementgrad.backends.patch import Patch, Replace
from elementgrad.cleanup import push, scope

REENTRANT, OTHER = "CheckpointFunction", "_checkpoint_without_reentrant_generator"
"""What the two sorts of checkpoints are called in PyTorch's module."""


@dataclass(eq=False)
class _Look:
    """One `straight` that a thread is in."""

    inside: bool
    faithful: bool


class _Local(threading.local):
    looks: tuple[_Look, ...] = ()


_local = _Local()


class straight(scope):  # noqa: N801
    """In here this thread's reentrant checkpoints are plain calls, and all others too if we look inside.

    With `faithful`, a reentrant one without a tracked argument stays what it is: nothing inside gets a gradient.
    """

    __slots__ = ("_faithful", "_inside")

    def __init__(self, inside: bool, faithful: bool = False):
        self._inside = inside
        self._faithful = faithful

    def __enter__(self) -> None:
        super().__enter__()
        call_plainly(self._inside, self._faithful)


def call_plainly(inside: bool, faithful: bool = False) -> None:
    """Do the same until the innermost open scope is left."""
    if "torch.utils.checkpoint" in sys.modules:
        push(_local, "looks", _Look(inside, faithful))
        _stand_ins.enter()


def _install(replace: Replace) -> None:
    module: Any = sys.modules["torch.utils.checkpoint"]
    replace(module, OTHER, _around(getattr(module, OTHER)))
    replace(module, REENTRANT, _Reentrant(getattr(module, REENTRANT)))


class _Reentrant:
    """Stands in for what a reentrant checkpoint calls, and is that for threads that are not ours."""

    def __init__(self, original: Any):
        self._original = original

    def apply(self, function: Any, preserve_rng_state: bool, *arguments: Any) -> Any:
        """Call the function plainly in our threads."""
        looks = _local.looks
        if looks and (not looks[-1].faithful or any(getattr(x, "requires_grad", False) for x in arguments)):
            return function(*arguments)
        return self._original.apply(function, preserve_rng_state, *arguments)


def _around(original: Callable[..., Iterator[None]]) -> Callable[..., Iterator[None]]:
    """Stand in for what other checkpoints do before and after their call."""

    def around(*arguments: Any, **options: Any) -> Iterator[None]:
        inside = any(look.inside for look in _local.looks)
        return _nothing() if inside else original(*arguments, **options)

    return around


def _nothing() -> Iterator[None]:
    """Do nothing before and after; a generator, as PyTorch throws into it what the call raises."""
    yield


_stand_ins = Patch(_install)
