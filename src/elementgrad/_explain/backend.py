"""The interface that a backend implements for explanations: `ExplainBackend`."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import numpy as np

from elementgrad._backends import registry
from elementgrad._backends.autodiff import TensorFunction
from elementgrad._backends.base import Backend
from elementgrad._explain.trace import LiveReport, Record
from elementgrad._names.arguments import referenced_values
from elementgrad.errors import FrameworkError

Tensor = Any
Picked = tuple[Tensor, np.ndarray | None]
"""A live tensor, and the flat positions of some of its elements; None for all."""


class ExplainBackend(ABC):
    """Runs functions and training steps under observation, and again at other values."""

    name: str

    @abstractmethod
    def record(self, run: TensorFunction, sources: Sequence[Tensor | None]) -> Record:
        """Run a function once, from some tensors (None for an activation) to others, and return the record."""

    @abstractmethod
    def run_at(self, run: TensorFunction, tensors: Sequence[Tensor | None]) -> Sequence[Tensor]:
        """Run a function at other values, as it would run if its first tensor were differentiated."""

    def maybe_compile(self, function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """Return a function that is called many times, compiled where that is faster."""
        return function

    def without_number_checks(self) -> AbstractContextManager[None]:
        """Turn off errors that the user has the framework raise at a NaN, since an explanation follows it instead."""
        return nullcontext()

    def report_live(self, of: Picked, wrt: Picked) -> LiveReport:
        """Report what two live tensors show of the path between them."""
        raise FrameworkError(
            f"live tensors of {self.name} do not say where they come from; give the function and its arguments, as in "
            "eg.explain(f, x)"
        )

    def report_step(
        self, function: Callable[[], Any], wrt: Tensor | None, positions: np.ndarray | None = None
    ) -> LiveReport | None:
        """Run the user's training step as it is, and report why it raised or what gradient a tensor got.

        With positions, report on these elements of the tensor. Return None if the step computes no gradient, or if
        steps cannot be watched.
        """
        return None


def backend_for_step(function: Any, wrt: Any = None) -> Backend:
    """Return the framework of a training step that takes no tensors.

    It is that of the tensor `wrt`, or of the first thing that the step's code refers to, or the first imported.
    """
    if wrt is not None:
        return registry.require_backend(wrt)
    able = [
        backend
        for backend in registry.imported_backends()
        if type(backend.load("explain")).report_step is not ExplainBackend.report_step
    ]
    if not able:
        raise FrameworkError(
            "a step without arguments can be watched on PyTorch and TensorFlow; give a function and its arguments"
        )
    for value in referenced_values(function) if len(able) > 1 else ():
        package = value.__name__.partition(".")[0] if isinstance(value, ModuleType) else None
        name = "tensorflow" if package == "keras" else package
        for backend in able:
            if name == backend.name or registry.backend_of(value) is backend or backend.names.is_model(value):
                return backend
    return able[0]
