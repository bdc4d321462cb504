"""One side of a Jacobian: a tensor with a name, and which of its elements are indexed."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from elementgrad import tree
from elementgrad.backends import Backend
from elementgrad.errors import DtypeError, OptionError, PlaceError, SelectionError, TracedError
from elementgrad.index import normalize
from elementgrad.place import Place
from elementgrad.resolve import resolve
from elementgrad.selection import Selection

Tensor = Any


@dataclass(frozen=True)
class Side(tree.Leaf):
    """One side of a Jacobian: a tensor by its number among the inputs or outputs, or some of its elements."""

    name: str
    number: int
    tensor: Tensor
    of: tuple[int, ...]
    """The shape of the tensor; of one example, with a batch."""
    base: Selection | None = None
    """The elements that the side is made of; None for all."""
    order: float | None = None
    """How many tensors the function had named before this one, if it is known when it is computed."""
    place: Place | None = None
    """What was asked for, in words that say the same in another process."""

    @classmethod
    def at(
        cls, place: Place, name: str, number: int, tensor: Tensor, backend: Backend, batch: bool, order: float | None
    ) -> "Side":
        """The elements that a place names of a tensor."""
        if backend.kind(tensor) not in "fc":
            raise DtypeError(f"{name} is of dtype {tensor.dtype}, which has no gradients; make it floating point first")
        shape = tuple(backend.shape(tensor))
        if None in shape:
            raise TracedError(f"the shape {shape} of {name} is not known while tracing; give it with a signature")
        shape = tuple(map(int, shape))
        if batch and not shape:
            raise OptionError(f"{name} has no axes, so it holds no batch; leave batch=True out")
        shape = shape[1:] if batch else shape
        if not place.index:
            return cls(name, number, tensor, shape, None, order, place)
        named = Place(None, name, place.index, place.kind, pointwise=place.pointwise)
        return cls(name, number, tensor, shape, named.select(shape), order, place)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that is indexed."""
        return self.of if self.base is None else self.base.shape

    def select(self, index: Any, backend: Backend) -> Selection:
        """The elements of the whole tensor that an index into this side names; a bare `:` or `...` is all of it."""
        if isinstance(index, Place):
            if index.tensor is not None or index.name not in (None, self.name):
                raise PlaceError(f"{index} is not about {self.name}; give an index, such as eg.at[0, 5]")
            index = index.index
        if index is Ellipsis or (isinstance(index, slice) and index == slice(None)):
            return resolve((), self.of) if self.base is None else self.base
        parts = normalize(index, backend)
        if len(self.shape) > 1 and not isinstance(index, tuple) and isinstance(parts[0], int):
            raise SelectionError(
                f"{parts[0]} for {self.name} of {len(self.shape)} axes: write ({parts[0]}, ...) for all of that row, "
                "or one int per axis"
            )
        try:
            chosen = resolve(parts, self.shape)
        except SelectionError as error:
            raise SelectionError(f"{self.name}: {error}") from None
        if chosen.traced:
            raise TracedError(f"{self.name}: the index is traced, so sweeps cannot be planned; use a concrete one")
        if self.base is None:
            return chosen
        positions = np.asarray(self.base.flat().reshape(-1)[chosen.flat()])
        return Selection.at_flat(positions, self.of or (1,))  # an index array needs an axis, and there may be none
