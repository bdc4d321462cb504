"""The interface that a backend implements for audits: `AuditBackend`."""

import math
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from elementgrad._backends.source_location import is_user_code
from elementgrad._names.backend import Model
from elementgrad._place.place import Place
from elementgrad.errors import FrameworkError

Tensor = Any


@dataclass(frozen=True, eq=False)
class AuditedParameter:
    """A parameter of a model, or elements of one that train by themselves."""

    name: str
    tensor: Tensor
    """The tensor by which the loss is differentiated."""
    shape: tuple[int, ...]
    dtype: str
    frozen: str | None = None
    """The reason why it is not meant to train, in a few words; None if it trains."""
    place: Place | None = None
    """The place to explain, where that is not the tensor. Of elements that train by a leaf, a record sees
    no step: what the layer returns then has the same fate."""

    @property
    def module(self) -> str:
        """The name of the module or layer that holds it."""
        return self.name.rpartition(separator_of(self.name))[0]

    @property
    def is_bias(self) -> bool:
        """True for one number per unit; it has several axes where units have, as in the heads of attention."""
        return len(self.shape) < 2 or self.name.rpartition(separator_of(self.name))[2] == "bias"


def separator_of(name: str) -> str:
    """Return what stands between the parts of a name: a slash in those of Keras, and a dot in others."""
    return "/" if "/" in name else "."


def result_of(parameter: str) -> Place | None:
    """Return the place of what the module of a parameter returns; None for a parameter of the model itself."""
    module = parameter.rpartition(separator_of(parameter))[0]
    return Place(None, module, kind="activation") if module else None


@dataclass(frozen=True)
class GradientSummary:
    """A few numbers about the gradient of one parameter."""

    largest: float
    """The largest absolute value; NaN or infinity if one element is."""
    slices: Mapping[int, np.ndarray] = field(default_factory=dict)
    """For the axes that may be those of units, the likeliest first: the largest absolute value in each slice."""
    is_lookup: bool = False
    """True if the loss takes some rows of it and not others, as an embedding does."""

    def union(self, other: "GradientSummary") -> "GradientSummary":
        """Return the summary of what two reverse sweeps reach together."""
        largest = other.largest if math.isfinite(self.largest) else self.largest
        slices = {
            axis: np.maximum(sizes, other.slices[axis]) for axis, sizes in self.slices.items() if axis in other.slices
        }
        return GradientSummary(
            max(self.largest, largest) if math.isfinite(largest) else largest,
            slices,
            self.is_lookup and other.is_lookup,
        )


Summaries = Mapping[str, GradientSummary]
"""Summaries by the names of the parameters; there is none for a parameter without a gradient."""


@dataclass(frozen=True)
class Sweep:
    """One run of a loss, and one reverse sweep."""

    summaries: Summaries
    has_rules: bool = False
    """True if the loss has operations whose derivatives the user wrote."""
    is_finite: bool = True
    """False if the loss itself is not finite."""
    ended_by: Exception | None = None
    """The error that a step ended with, if it follows from a gradient that is missing."""


def follows_from_missing(error: Exception, package: str) -> bool:
    """Return True if an error after a missing gradient is one that the framework raises, or that None has no numbers.

    All others are the user's own.
    """
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return "NoneType" in str(error) or not is_user_code(frame.f_code.co_filename, (package, "keras"))


class AuditBackend(ABC):
    """Finds the parameters of a model, and summarizes their gradients."""

    @abstractmethod
    def parameters(self, model: Model) -> list[AuditedParameter]:
        """Return all parameters that could have gradients, frozen ones too, in the model's order."""

    @abstractmethod
    def summarize_loss(
        self, model: Model, parameters: Sequence[AuditedParameter], loss: Callable[[Any], Tensor]
    ) -> Sweep:
        """Run `loss`, which returns one number, and one reverse sweep; disturb nothing."""

    def summarize_step(
        self, model: Model, parameters: Sequence[AuditedParameter], step: Callable[[], Any]
    ) -> Sweep | None:
        """Run a training step as it is, and undo what it did; None if it asked for no gradient."""
        raise self._no_steps_error()

    def loss_of_step(self, model: Model, step: Callable[[], Any]) -> Callable[[], Tensor]:
        """Return a function that runs a step, and returns the loss that it computes gradients of."""
        raise self._no_steps_error()

    def undoing_steps(self, model: Model) -> AbstractContextManager[Any]:
        """Return a context in which steps run as they are; what they change is undone at its end."""
        raise self._no_steps_error()

    def remarks(self, model: Model) -> list[str]:
        """Return what is to be said about how the model ran."""
        return []

    def _no_steps_error(self) -> FrameworkError:
        return FrameworkError(
            "a step that takes nothing has no gradients of its own on this framework; give the loss as a function of "
            "the parameters, as in eg.audit(params, lambda params: ...)"
        )
