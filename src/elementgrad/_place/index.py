"""The normal form of an index: ints, spans, `...` and frozen arrays, as NumPy understands them.

An index is written before its tensor's shape is known (`eg.at("fc.weight")[3, :]`), so this module knows nothing of
shapes; `selection.py` resolves an index against one.
"""

from collections.abc import Sequence
from operator import index as as_int
from types import EllipsisType
from typing import Any, NamedTuple

import numpy as np

from elementgrad._backends import registry
from elementgrad._backends.base import Backend
from elementgrad.errors import FrameworkError, SelectionError, quoted

VALID_ITEMS = "an index is made of ints, slices, `...`, integer arrays and boolean masks"

AXES_LIMIT = 64
"""Axes that an array of NumPy can have."""


class Span(NamedTuple):
    """A slice that can be hashed (Python's own cannot before 3.12)."""

    start: int | None
    stop: int | None
    step: int | None

    def __str__(self) -> str:
        start, stop, step = ("" if bound is None else quoted(bound) for bound in self)
        return f"{start}:{stop}:{step}" if step else f"{start}:{stop}"


class IndexArray:
    """An integer array or boolean mask inside an index: a read-only copy, or a tensor whose values are traced.

    A traced tensor (an argument under `jax.jit`, `tf.function`, `torch.compile` or vmap) has a shape and no values, so
    its entries cannot be checked.
    """

    __slots__ = ("boolean", "shape", "tracer", "values")

    def __init__(self, values: Any, shape: tuple[int, ...], boolean: bool, tracer: Backend | None = None):
        self.values = values
        self.shape = shape
        self.boolean = boolean
        self.tracer = tracer

    @property
    def traced(self) -> bool:
        """True if there are no values to read."""
        return self.tracer is not None

    def readable(self, why: str) -> np.ndarray:
        """Return the values, or raise an error that says why they are needed."""
        return self.values if self.tracer is None else self.tracer.require_concrete(self.values, why)

    @classmethod
    def freeze(cls, array: np.ndarray) -> "IndexArray":
        """Return a read-only copy, so that a later write to the caller's array cannot change what was named."""
        kind = array.dtype.kind
        if array.dtype == np.uint64:
            array = np.minimum(array, np.uint64(np.iinfo(np.int64).max))
        boolean = kind == "b"
        values = np.array(array, np.bool_ if boolean else np.int64, order="C")
        values.setflags(write=False)
        return cls(values, values.shape, boolean)

    def __reduce__(self) -> tuple[Any, ...]:
        return IndexArray.freeze, (self.readable("traced indices cannot be copied or pickled; use concrete ones"),)

    @property
    def axes(self) -> int:
        """The number of axes of the tensor that it takes: a mask as many as it has, an integer array one."""
        return len(self.shape) if self.boolean else 1

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, IndexArray):
            return NotImplemented
        if self.traced or other.traced:
            return self.values is other.values
        same_form = self.boolean == other.boolean and self.shape == other.shape
        return same_form and self.values.tobytes() == other.values.tobytes()

    def __hash__(self) -> int:
        return hash((self.shape, self.boolean, id(self.values) if self.traced else self.values.tobytes()))

    def __str__(self) -> str:
        if self.traced:
            return f"<traced {'mask' if self.boolean else 'indices'} {self.shape}>"
        if self.values.size == 0 and (self.boolean or self.shape != (0,)):
            return f"{'bool' if self.boolean else 'int'}({', '.join(map(str, self.shape))})"
        return str(self.values.tolist()).replace("True", "true").replace("False", "false")


def out_of_range_error(index: int, axis: int, size: int) -> SelectionError:
    return SelectionError(f"index {quoted(index)} is out of range for axis {axis} of size {size}")


Item = int | Span | EllipsisType | IndexArray
Index = tuple[Item, ...]


def normalize(index: Any, home: Backend | None = None) -> Index:
    """Return an index, as written in `x[...]`, in normal form; `home` is the backend of x, if known."""
    if type(index) is int:
        return (index,)
    if isinstance(index, tuple):
        return tuple([item if type(item) is int else _item(item, home) for item in index])
    return (_item(index, home),)


def denormalize(index: Index) -> tuple[Any, ...]:
    """Return an index in normal form as the user would write it, with slices and arrays."""
    items: list[Any] = []
    for item in index:
        items.append(slice(*item) if isinstance(item, Span) else item.values if isinstance(item, IndexArray) else item)
    return tuple(items)


def to_text(index: Index) -> str:
    """Return the index as text, brackets included; `grammar.parse` reads it back."""
    return f"[{', '.join('...' if item is Ellipsis else _item_text(item) for item in index)}]"


def _item_text(item: Any) -> str:
    return quoted(item) if type(item) is int else str(item)


def _item(item: Any, home: Backend | None) -> Item:
    if type(item) is int or item is Ellipsis or isinstance(item, (Span, IndexArray)):
        return item
    if type(item) is slice:
        start, stop, step = item.start, item.stop, item.step
        bounds = (
            start if start is None or type(start) is int else _bound(start),
            stop if stop is None or type(stop) is int else _bound(stop),
            step if step is None or type(step) is int else _bound(step),
        )
        return tuple.__new__(Span, bounds)  # half the time of Span(*bounds), on a path of few microseconds
    if item is None:
        raise SelectionError(
            f"None (newaxis) adds an axis and names no element; {VALID_ITEMS}; reshape the tensor instead"
        )
    if isinstance(item, (np.ndarray, list)):
        return _from_array(item)
    backend = registry.backend_of(item)
    if backend is not None:
        if home not in (None, backend):
            raise FrameworkError(
                f"the tensor is {home.name}'s and the index is {backend.name}'s; use one framework for both"
            )
        return _from_tensor(item, backend)
    is_array = isinstance(item, (bool, np.generic, Sequence)) or hasattr(item, "__array__")
    if is_array and not isinstance(item, (str, bytes)):
        return _from_array(item)
    try:
        return as_int(item)
    except TypeError:
        raise SelectionError(f"{quoted(item)} of type {type(item).__name__} is not an index; {VALID_ITEMS}") from None


def _bound(bound: Any) -> int:
    try:
        return as_int(bound)
    except TypeError:
        raise SelectionError(f"slice bound {quoted(bound)} is not an int; {VALID_ITEMS}") from None


def holds_tensors(value: Any, depth: int = 0) -> bool:
    """Return True if a list has tensors in it: NumPy would read their values and drop their gradients.

    Lists that are nested deeper than any array are not looked into, as NumPy refuses them.
    """
    if not isinstance(value, (list, tuple)) or depth > AXES_LIMIT:
        return False
    return any(
        type(entry) is not int and (registry.backend_of(entry) or holds_tensors(entry, depth + 1)) for entry in value
    )


def _from_array(item: Any) -> Item:
    if holds_tensors(item):
        raise SelectionError("a list of tensors is not an index; stack them into one tensor first")
    try:
        array = np.asarray(item)
        if not isinstance(item, np.ndarray) and array.dtype.kind in "Of":
            # An empty list has no dtype of its own, and a compiler's own ints are ints as well.
            array = np.array([as_int(entry) for entry in array.flat], dtype=np.int64).reshape(array.shape)
    except OverflowError:
        raise SelectionError(f"{quoted(item)} holds an int that is out of range for any axis") from None
    except TypeError:
        raise SelectionError(f"{quoted(item)} holds what is not an int; {VALID_ITEMS}") from None
    except Exception:
        raise SelectionError(f"{type(item).__name__} does not make one array; its rows must be of one length") from None
    if array.dtype.kind not in "biu":
        raise SelectionError(f"an index array of dtype {array.dtype} cannot name elements; {VALID_ITEMS}")
    if array.ndim == 0 and array.dtype.kind != "b":
        return int(array)
    return IndexArray.freeze(array)


def _from_tensor(item: Any, backend: Backend) -> Item:
    kind = backend.kind(item)
    if kind not in "bi":
        raise SelectionError(f"an index tensor of dtype {item.dtype} cannot name elements; {VALID_ITEMS}")
    values = backend.read(item)
    if values is not None:
        return _from_array(values)
    return IndexArray(item, backend.shape(item), boolean=kind == "b", tracer=backend)
