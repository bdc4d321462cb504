"""The calls of `backward` in a training step, and what they do to the `.grad` of one tensor."""

from collections.abc import Callable
from typing import Any

import torch

from elementgrad.backends.torch.functions import aside
from elementgrad.backends.witness import Step

Tensor = torch.Tensor


class Backwards:
    """Keeps what was called, and the gradient of the tensor that is followed, if there is one."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.target: int | None = None
        """What backward was called on last."""
        self.followed: Tensor | None = None
        self.gradient: Tensor | None = None
        self.accumulated: Step | None = None
        """What became of its .grad, and the call that added to one that was there."""

    def call(self, step: Step, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call backward for the user."""
        self.steps.append(step)
        self.target = step.takes[0] if step.takes else None
        before = self._grad()
        with aside():
            result = func(*args, **kwargs)
            after = self._grad()
            if after is not None and (before is None or not torch.equal(before, after)):
                self.gradient = after
                if before is not None and bool(before.any()):
                    self.accumulated = step
        return result

    def _grad(self) -> Tensor | None:
        x = self.followed
        if x is None or not (x.is_leaf or x.retains_grad) or x.grad is None:
            return None
        return x.grad.clone()
