"""The interface that a backend implements for edits: `EditBackend`."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elementgrad._backends.base import Backend, Kind
    from elementgrad._place.selection import Selection

Tensor = Any


class EditBackend(ABC):
    """The operations of edits and choices that are more than `take`, `put` and `where` of a `Backend`."""

    def __init__(self, backend: "Backend"):
        self._backend = backend

    def number_kind(self, value: Any) -> "Kind | None":
        """Return the kind of a number if it is one of the framework's own stand-ins for a Python number."""
        return None

    @abstractmethod
    def accumulate(self, x: Tensor, selection: "Selection", value: Any, multiply: bool) -> Tensor:
        """Return a copy of x with values added or multiplied at traced indices, which may repeat."""

    def only(self, x: Tensor, selection: "Selection") -> Tensor:
        """Return x with derivatives for the selected elements alone."""
        backend = self._backend
        if selection.mask is not None:
            return backend.where(selection.mask.values, x, backend.stop(x))
        return backend.put(backend.stop(x), selection, backend.take(x, selection))

    def stop_gradient_at(self, x: Tensor, selection: "Selection") -> Tensor:
        """Return x with derivatives for all but the selected elements."""
        backend = self._backend
        if selection.mask is not None:
            return backend.where(selection.mask.values, backend.stop(x), x)
        return backend.put(x, selection, backend.stop(backend.take(x, selection)))

    @abstractmethod
    def soft_choice(self, x: Tensor, logits: Tensor, axis: int) -> Tensor:
        """Return the mean of x along an axis, weighted by the softmax of the logits, in x's dtype."""

    @abstractmethod
    def hard_choice(self, x: Tensor, logits: Tensor, axis: int) -> Tensor:
        """Return the elements of x along an axis where the logits are largest."""

    @abstractmethod
    def straight_through(self, value: Tensor, surrogate: Tensor) -> Tensor:
        """Return `value` with the derivatives of `surrogate`."""
