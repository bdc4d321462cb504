"""What code asks of gradients as it runs: `backward()`, `torch.autograd.grad`, and the `.grad` of a tensor."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from elementgrad import tree
from elementgrad.backends.torch.explaining.callers import caller
from elementgrad.backends.torch.functions import aside
from elementgrad.backends.witness import Step
from elementgrad.cleanup import entered

Tensor = torch.Tensor


class Asking:
    """What was asked last, and what became of it."""

    def __init__(self) -> None:
        self.followed: Tensor | None = None
        """The tensor whose .grad is looked at, if one is."""
        self.gradient: Tensor | None = None
        self.accumulated: Step | None = None
        """What became of its .grad, and the backward that added to it."""
        self.backwards: list[Step] = []
        self.target: int | None = None
        """What backward was called on last."""
        self.sides: tuple[Sequence[Sequence[Tensor]], str] | None = None
        """What `torch.autograd.grad` was asked last, outputs and inputs, and where."""
        self.missing: tuple[Tensor, Step] | None = None
        """The tensor that is no leaf and whose .grad was read last and is None, and where."""

    def backward(self, func: Callable[..., Any], args: Any, kwargs: Any, path: str, roots: Sequence[int]) -> Any:
        """Call backward for the user."""
        step = Step("backward", caller().where, path, tuple(roots))
        self.backwards.append(step)
        self.target = step.takes[0] if step.takes else None
        before = self._held()
        with aside():
            result = func(*args, **kwargs)
            after = self._held()
            if after is not None and (before is None or not torch.equal(before, after)):
                self.gradient = after
                if before is not None and bool(before.any()):
                    self.accumulated = step
        return result

    def _held(self) -> Tensor | None:
        x = self.followed
        kept = x is not None and (x.is_leaf or x.retains_grad)
        return x.grad.clone() if kept and x is not None and x.grad is not None else None

    def note(self, outputs: Any = None, inputs: Any = None, *_: Any, **__: Any) -> None:
        """That `torch.autograd.grad` is asked."""
        found = [[x for x in tree.flat(side) if isinstance(x, Tensor)] for side in (outputs, inputs)]
        self.sides = found, caller().where

    def read(self, func: Callable[..., Any], x: Tensor, path: str) -> Any:
        """Read the .grad of a tensor for the user."""
        if not x.requires_grad or x.is_leaf or x.retains_grad:
            return func(x)
        with entered(warnings.catch_warnings()):
            warnings.simplefilter("ignore")  # that it is no leaf is what will be said
            gradient = func(x)
        if gradient is None:
            self.missing = x, Step(".grad", caller().where, path)
        return gradient
