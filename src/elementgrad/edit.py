"""Functional edits of named elements: built once from a backend's `take`, `put`, `where` and `stop`.

Untouched elements are copied and never computed with, so a NaN or inf among them reaches neither result nor gradient.
"""

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from elementgrad import backends
from elementgrad.backends import Backend
from elementgrad.errors import BroadcastError, DtypeError, DuplicateError, FrameworkError
from elementgrad.selection import Selection, Shape

Tensor = Any
KINDS = "bifc"
KIND_NAMES = {"b": "boolean", "i": "integer", "f": "floating", "c": "complex", "o": "non-numeric"}
PYTHON_KINDS = {bool: "b", int: "i", float: "f", complex: "c"}


def get(backend: Backend, x: Tensor, selection: Selection) -> Tensor:
    """The named elements."""
    return backend.take(x, selection)


def get_distinct(backend: Backend, x: Tensor, selection: Selection) -> Tensor:
    """What `apply` computes with."""
    require_unique(selection, "apply")
    return backend.take(x, selection)


def set_(backend: Backend, x: Tensor, selection: Selection, value: Any) -> Tensor:
    """A copy with the named elements replaced."""
    require_unique(selection, "set")
    value = fit(backend, x, selection, value)
    if selection.mask is not None and selection.traced:
        return backend.where(selection.mask.values, backend.cast(value, x), x)
    return backend.put(x, selection, value)


def add(backend: Backend, x: Tensor, selection: Selection, value: Any) -> Tensor:
    """A copy with values added to the named elements."""
    return _combine(backend, x, selection, value, operator.add, neutral=0)


def multiply(backend: Backend, x: Tensor, selection: Selection, value: Any) -> Tensor:
    """A copy with the named elements multiplied."""
    return _combine(backend, x, selection, value, operator.mul, neutral=1)


def only(backend: Backend, x: Tensor, selection: Selection) -> Tensor:
    """The same values, with gradients for the named elements alone."""
    require_unique(selection, "only")
    require_gradient(backend, x, "only")
    return backend.only(x, selection)


def stop(backend: Backend, x: Tensor, selection: Selection) -> Tensor:
    """The same values, with gradients for all but the named elements."""
    require_unique(selection, "stop")
    require_gradient(backend, x, "stop")
    return backend.all_but(x, selection)


VERBS: dict[str, Callable[..., Tensor]] = {
    "get": get,
    "get_distinct": get_distinct,
    "set": set_,
    "add": add,
    "multiply": multiply,
    "only": only,
    "stop": stop,
}


@backends.whole
def run(verb: str, x: Tensor, index: Any, *values: Any) -> Tensor:
    """An edit from an index as the user wrote it, for compilers to run as one step."""
    return backends.find(x).uncompiled(_run, verb, x, index, *values)


def _run(verb: str, x: Tensor, index: Any, *values: Any) -> Tensor:
    backend = backends.find(x)
    return VERBS[verb](backend, x, Selection.resolve(index, backend.shape(x)), *values)


def require_unique(selection: Selection, verb: str) -> None:
    """An element named twice has no one new value; traced indices cannot be checked."""
    if not selection.unique and not selection.traced:
        raise DuplicateError(
            f"{verb} names element {selection.repeated()} more than once; name it once, or use add or multiply"
        )


def require_gradient(backend: Backend, x: Tensor, verb: str) -> None:
    """An integer has no derivative to keep or stop."""
    if backend.kind(x) not in "fc":
        raise DtypeError(f"{verb} is about gradients and {x.dtype} has none; give a floating or complex tensor")


def fit(backend: Backend, x: Tensor, selection: Selection, value: Any) -> Any:
    """The value as a number, or a tensor of x's dtype that broadcasts to the selection; or an error before any work."""
    kind = PYTHON_KINDS.get(type(value))
    shape: Shape = ()
    if kind is None:
        owner = backends.owner(value)
        if owner is backend:
            shape = backend.shape(value)
            if value.dtype == x.dtype:
                return _broadcastable(backend, value, shape, selection) if shape else value
            kind = backend.kind(value)
        elif owner is None:
            value = _array(value)
            shape, kind = value.shape, value.dtype.kind.replace("u", "i")
        else:
            raise FrameworkError(
                f"the tensor is {backend.name}'s and the value is {owner.name}'s; make the value {backend.name}'s first"
            )
    if KINDS.find(kind) > KINDS.find(backend.kind(x)):
        raise DtypeError(f"a {KIND_NAMES[kind]} value does not fit a tensor of {x.dtype}; cast one of them first")
    if type(value) in PYTHON_KINDS:
        return value
    value = backend.cast(value, x)
    return _broadcastable(backend, value, shape, selection) if shape else value


def _array(value: Any) -> np.ndarray:
    try:
        array = np.asarray(value)
    except Exception:
        array = np.empty((), dtype=object)
    if array.dtype.kind not in "biufc":
        raise FrameworkError(
            f"{type(value).__name__} is not a value to put into a tensor; give a number, array or tensor"
        )
    return array


def _broadcastable(backend: Backend, value: Any, shape: Shape, selection: Selection) -> Any:
    if selection.mask is not None and selection.traced:
        raise BroadcastError(f"a traced mask names an unknown number of elements; give one number, not shape {shape}")
    target = selection.shape
    extra = len(shape) - len(target)
    if extra > 0 and all(size == 1 for size in shape[:extra]):  # as in NumPy's assignment
        shape = shape[extra:]
        value = backend.reshape(value, shape)
    ok = len(shape) <= len(target) and all(
        a in (1, b) or None in (a, b) for a, b in zip(shape[::-1], target[::-1], strict=False)
    )
    if not ok:
        raise BroadcastError(f"a value of shape {tuple(shape)} does not broadcast to the {target} elements named")
    return value


def _combine(
    backend: Backend, x: Tensor, selection: Selection, value: Any, combine: Callable[[Any, Any], Any], neutral: int
) -> Tensor:
    value = fit(backend, x, selection, value)
    if selection.mask is not None and selection.traced:
        # Unselected elements are replaced before they are computed with: 0 * inf would poison the gradient.
        mask = selection.mask.values
        safe = backend.where(mask, x, backend.cast(neutral, x))
        return backend.where(mask, backend.cast(combine(safe, value), x), x)
    if not selection.unique and selection.traced:
        return backend.accumulate(x, selection, value, multiply=combine is operator.mul)
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
