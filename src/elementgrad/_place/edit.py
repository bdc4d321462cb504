"""Functional edits of named elements, `eg.at(x)[i].set(v)` and the like.

Every edit is built from the backend's `take`, `put`, `where` and `stop`, after the value is checked against the tensor
and the selection. Elements that are not named are copied and never computed with, so a NaN among them reaches neither
the result nor its gradient. While `torch.compile` traces, an edit whose index is not normal yet runs as one opaque
step. What frameworks do differently, such as accumulating at traced indices, is the `EditBackend`.
"""

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from elementgrad._backends import registry
from elementgrad._backends.base import Backend, DtypeRange, Kind
from elementgrad._place.index import holds_tensors
from elementgrad._place.selection import Selection, Shape
from elementgrad.errors import BroadcastError, DtypeError, DuplicateError, FrameworkError

Tensor = Any
KINDS = "bifc"
KIND_NAMES = {"b": "a boolean", "i": "an integer", "f": "a floating", "c": "a complex"}
PYTHON_KINDS = {bool: "b", int: "i", float: "f", complex: "c"}


class EditBackend(ABC):
    """The operations of edits and choices that are more than `take`, `put` and `where` of a `Backend`."""

    def __init__(self, backend: Backend):
        self._backend = backend

    def number_kind(self, value: Any) -> Kind | None:
        """Return the kind of a number if it is one of the framework's own stand-ins for a Python number."""
        return None

    @abstractmethod
    def accumulate(self, x: Tensor, selection: Selection, value: Any, multiply: bool) -> Tensor:
        """Return a copy of x with values added or multiplied at traced indices, which may repeat."""

    def only(self, x: Tensor, selection: Selection) -> Tensor:
        """Return x with derivatives for the selected elements alone."""
        backend = self._backend
        if selection.mask is not None:
            return backend.where(selection.mask.values, x, backend.stop(x))
        return backend.put(backend.stop(x), selection, backend.take(x, selection))

    def stop_gradient_at(self, x: Tensor, selection: Selection) -> Tensor:
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


def take_copy(backend: Backend, x: Tensor, selection: Selection) -> Tensor:
    """Return the elements that `apply` passes to its function, which may write to them."""
    require_unique(selection, "apply")
    return backend.copy(backend.take(x, selection))


def set_(backend: Backend, x: Tensor, selection: Selection, value: Any) -> Tensor:
    require_unique(selection, "set")
    value = fit_value(backend, x, selection, value)
    if selection.mask is not None and selection.traced:
        return backend.where(selection.mask.values, backend.cast(value, x), x)
    return backend.put(x, selection, value)


def only(backend: Backend, x: Tensor, selection: Selection) -> Tensor:
    require_unique(selection, "only")
    require_gradient(backend, x, "only")
    return backend.edit.only(x, selection)


def stop(backend: Backend, x: Tensor, selection: Selection) -> Tensor:
    require_unique(selection, "stop")
    require_gradient(backend, x, "stop")
    return backend.edit.stop_gradient_at(x, selection)


@registry.opaque_to_compiler
def run(verb: str, x: Tensor, index: Any, *values: Any) -> Tensor:
    """Run an edit from an index as the user wrote it; compilers keep this as one step."""
    return registry.require_backend(x).call_uncompiled(_run, verb, x, index, *values)


def _run(verb: str, x: Tensor, index: Any, *values: Any) -> Tensor:
    backend = registry.require_backend(x)
    return VERBS[verb](backend, x, Selection.resolve(index, backend.shape(x)), *values)


def require_unique(selection: Selection, verb: str) -> None:
    # An element that is named twice has no single new value. Traced indices cannot be checked.
    repeated = selection.repeated
    if repeated:
        raise DuplicateError(f"{verb} names element {repeated} more than once; name it once, or use add or multiply")


def require_gradient(backend: Backend, x: Tensor, verb: str) -> None:
    if backend.kind(x) not in "fc":
        raise DtypeError(f"{verb} is about gradients and {x.dtype} has none; give a floating or complex tensor")


def fit_value(backend: Backend, x: Tensor, selection: Selection, value: Any) -> Any:
    """Return the value as a number, or as a tensor of x's dtype that broadcasts to the selection; or raise an error."""
    kind = PYTHON_KINDS.get(type(value))
    if kind is not None:
        return _number(backend, x, value, kind)
    owner = registry.backend_of(value)
    if owner is backend:
        shape = backend.shape(value)
        if value.dtype != x.dtype:
            _require_kind(backend, x, backend.kind(value))
            _require_narrower(backend, x, value)
            value = backend.cast(value, x)
        return _broadcastable(backend, value, shape, selection) if shape else value
    if owner is not None:
        raise FrameworkError(
            f"the tensor is {backend.name}'s and the value is {owner.name}'s; make the value {backend.name}'s first"
        )
    kind = backend.edit.number_kind(value)
    if kind is not None:
        return _number(backend, x, value, kind)
    array = _array(value)
    _require_kind(backend, x, "i" if array.dtype.kind in "uO" else array.dtype.kind)
    _require_range(backend, x, array)
    if array.dtype.kind == "O":  # ints that only a float can hold, if x is not refused
        array = array.astype(np.float64)
    return _broadcastable(backend, backend.cast(array, x), array.shape, selection)


def _number(backend: Backend, x: Tensor, value: Any, kind: str) -> Any:
    _require_kind(backend, x, kind)
    if type(value) not in (int, float, complex):  # a boolean, or a compiler's stand-in for a number
        return value
    limits = backend.dtype_range(x)
    if limits is not None:
        value = _clamp(x, limits, value)
    return float(value) if type(value) is int and backend.kind(x) != "i" else value


def _clamp(x: Tensor, limits: DtypeRange, value: Any) -> Any:
    """Return a number as the dtype of x rounds it at the ends of its range, where frameworks do not agree."""
    if type(value) is complex:
        return complex(_clamp(x, limits, value.real), _clamp(x, limits, value.imag))
    if type(value) is float and not math.isfinite(value):
        return value
    if not limits.holds(value):
        raise _out_of_range_error(x, limits, value)
    return min(max(value, limits.low), limits.high)


def _require_kind(backend: Backend, x: Tensor, kind: str) -> None:
    own = backend.kind(x)
    if kind not in KINDS or own not in KINDS or KINDS.index(kind) > KINDS.index(own):
        name = KIND_NAMES.get(kind, "a non-numeric")
        raise DtypeError(f"{name} value does not fit a tensor of {x.dtype}; cast one of them first")


def _require_narrower(backend: Backend, x: Tensor, value: Tensor) -> None:
    """Raise an error if a tensor has a number that x cannot hold.

    Its values are read only if its dtype has such numbers, since that waits for the device. Traced ones cannot be read.
    """
    ours, theirs = backend.dtype_range(x), backend.dtype_range(value)
    if ours is None or theirs is None or ours.contains(theirs):
        return
    values = backend.to_float64(value) if backend.kind(value) == "f" else backend.read(value)
    if values is not None:
        _require_range(backend, x, values)


def _require_range(backend: Backend, x: Tensor, values: np.ndarray) -> None:
    """Raise an error for numbers that x cannot hold: frameworks wrap them around, make them infinite or raise."""
    limits = backend.dtype_range(x)
    if limits is None or values.dtype.kind == "b":
        return
    for part in (values.real, values.imag) if values.dtype.kind == "c" else (values,):
        finite = part[np.isfinite(part)] if part.dtype.kind == "f" else part
        if finite.size:
            low, high = finite.min(), finite.max()
            for number in (high, low):
                number = number.item() if isinstance(number, np.generic) else number
                if not limits.holds(number):
                    raise _out_of_range_error(x, limits, number)


def _out_of_range_error(x: Tensor, limits: DtypeRange, number: Any) -> DtypeError:
    dtype = str(getattr(x.dtype, "name", x.dtype)).rpartition(".")[2]
    shown = number if abs(number) < 2**128 or isinstance(number, float) else f"an int of {number.bit_length()} bits"
    return DtypeError(f"{shown} does not fit {dtype}, which holds {limits.low} to {limits.high}; cast x first")


def _array(value: Any) -> np.ndarray:
    # A copy, so that a later write to the caller's array cannot change a gradient.
    if holds_tensors(value):
        raise FrameworkError("a list of tensors is not one value; stack them into a tensor first")
    try:
        array = np.array(value, order="C")
        if array.dtype.kind == "V":  # bfloat16 and the like, which NumPy only stores
            return array.astype(np.float64)
        if array.dtype.kind == "O" and array.size and all(type(number) is int for number in array.flat):
            return array  # ints of more than 64 bits
        array = array.astype(array.dtype.newbyteorder("="), copy=False)
        # NumPy has two types of 64 bits that are equal, and PyTorch knows one of them; 2**63 is of the other.
        array = array.view(array.dtype.str)
    except Exception:
        array = np.array(None)
    if array.dtype.kind not in "biufc":
        raise FrameworkError(
            f"{type(value).__name__} is not a value to put into a tensor; give a number, array or tensor"
        )
    return _narrow(array) if array.dtype.char in "gG" else array


def _narrow(array: np.ndarray) -> np.ndarray:
    """Return an array of long doubles in the widest dtype that frameworks have."""
    with np.errstate(over="ignore"):
        narrow = array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)
    lost = array[np.isfinite(array) & ~np.isfinite(narrow)]
    if lost.size:
        raise DtypeError(f"{lost.flat[0]!s} does not fit {narrow.dtype}, and no tensor holds more; scale it first")
    return narrow


def _broadcastable(backend: Backend, value: Any, shape: Shape, selection: Selection) -> Any:
    if not shape:
        return value
    if selection.mask is not None and selection.traced:
        raise BroadcastError(f"a traced mask names an unknown number of elements; give one number, not shape {shape}")
    target = selection.shape
    extra = len(shape) - len(target)
    if extra > 0 and all(size == 1 for size in shape[:extra]):  # as in NumPy's assignment
        shape = shape[extra:]
        value = backend.reshape(value, shape)
    fits = len(shape) <= len(target) and all(
        a in (1, b) or None in (a, b) for a, b in zip(shape[::-1], target[::-1], strict=False)
    )
    if not fits:
        raise BroadcastError(
            f"a value of shape {tuple(shape)} does not broadcast to the {target} elements named; reshape it"
        )
    return value


def _combine(
    backend: Backend, x: Tensor, selection: Selection, value: Any, combine: Callable[[Any, Any], Any]
) -> Tensor:
    if backend.kind(x) not in "ifc":
        raise DtypeError(f"add and multiply need numbers and the tensor is {x.dtype}; use set, or cast it first")
    value = fit_value(backend, x, selection, value)
    multiply = combine is operator.mul
    if selection.mask is not None and selection.mask.traced:
        # Unselected elements are replaced before they are computed with: 0 * inf would poison the gradient.
        mask = selection.mask.values
        safe = backend.where(mask, x, backend.cast(1 if multiply else 0, x))
        return backend.where(mask, backend.cast(combine(safe, value), x), x)
    if not selection.unique and selection.traced:
        return backend.edit.accumulate(x, selection, value, multiply)
    if not selection.unique:
        value = backend.broadcast(backend.cast(value, x), selection.shape)
        value, positions = _merge(backend, value, selection, combine)
        selection = Selection.at_flat(positions, selection.of)
    return backend.put(x, selection, combine(backend.take(x, selection), value))


def _merge(
    backend: Backend, value: Tensor, selection: Selection, combine: Callable[[Any, Any], Any]
) -> tuple[Tensor, np.ndarray]:
    """Combine the values of repeated elements pairwise until each element has one: log2(repeats) rounds.

    Only gathers and the operation itself, so derivatives of any order are those of the operation, at zeros too.
    """
    positions = selection.flat().reshape(-1)
    order = np.argsort(positions, kind="stable")
    positions = positions[order]
    value = _pick(backend, backend.reshape(value, (positions.size,)), order)
    while (positions[1:] == positions[:-1]).any():
        starts = np.flatnonzero(np.append(True, positions[1:] != positions[:-1]))
        rank = np.arange(positions.size) - np.repeat(starts, np.diff(np.append(starts, positions.size)))
        kept = np.flatnonzero(rank % 2 == 0)
        paired = kept[np.isin(kept + 1, np.flatnonzero(rank % 2 == 1))]
        both = combine(_pick(backend, value, paired), _pick(backend, value, paired + 1))
        value = _pick(backend, backend.put(value, Selection.at_flat(paired, positions.shape), both), kept)
        positions = positions[kept]
    return value, positions


def _pick(backend: Backend, vector: Tensor, positions: np.ndarray) -> Tensor:
    return backend.take(vector, Selection.at_flat(positions, tuple(backend.shape(vector))))


VERBS: dict[str, Callable[..., Tensor]] = {
    "get": lambda backend, x, selection: backend.take(x, selection),
    "take_copy": take_copy,
    "set": set_,
    "add": partial(_combine, combine=operator.add),
    "multiply": partial(_combine, combine=operator.mul),
    "only": only,
    "stop": stop,
}
"""The edits by name: functions of the backend, the tensor, the selection, and maybe a value."""
