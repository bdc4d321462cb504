"""Where a run is stopped, so that nothing behind the last requested value is computed.

`name#k` is one value, and once it is there nothing that follows can change the answer. A bare name is an error where
its layer is called twice, which only a run to the end can show. So the names that a complete run has computed once are
remembered for the model (`SingleCalls`), and a later run of the same model, by arguments of the same shapes, stops
there. The run is left by an exception that `except Exception` does not catch. Where the user's code catches it all the
same, the values that were captured before are right, and later runs of this model are not stopped.
"""

import weakref
from collections.abc import Callable, Collection, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

from elementgrad._backends import registry
from elementgrad._names import pytree

MAX_SIGNATURES = 16
"""Shapes of arguments for which the names of one model are remembered."""


class RunStopped(BaseException):
    """Raised to leave a run once all requested values are captured."""


@dataclass(frozen=True)
class StopRule:
    """The names at which a run may stop."""

    single: Collection[str]
    """The names of one value: they say which call, or an earlier complete run has computed them once."""
    allowed: Callable[[], bool]
    """Returns True if the code that is running now can be left here."""


@dataclass
class SingleCalls:
    """The names that complete runs of one model have computed once."""

    structure: Hashable
    names: dict[Hashable, set[str]] = field(default_factory=dict)
    """By the method that ran and the signature of its arguments."""
    stops: bool = True
    """False once the model has caught the exception that leaves a run."""


_models: dict[int, tuple[weakref.ref[Any], SingleCalls]] = {}
"""By the id of the model, as models need not be hashable."""


def single_calls(model: Any, structure: Hashable) -> SingleCalls:
    """Return what is remembered of a model; nothing if its structure is not what it was."""
    known = _models.get(id(model))
    if known is not None and known[0]() is model:
        if known[1].structure == structure:
            return known[1]
        stops = known[1].stops
    else:
        stops = True
    key = id(model)
    memory = SingleCalls(structure, stops=stops)
    _models[key] = weakref.ref(model, lambda _: _models.pop(key, None)), memory
    return memory


def remember(memory: SingleCalls, call: Hashable, names: Iterable[str]) -> None:
    """Note names that a complete run has computed once."""
    if call not in memory.names and len(memory.names) >= MAX_SIGNATURES:
        memory.names.pop(next(iter(memory.names)), None)
    memory.names.setdefault(call, set()).update(names)


def signature(leaves: Iterable[tuple[str, Any]]) -> Hashable:
    """Return what the calls of layers may depend on in some arguments: shapes, dtypes and plain values."""
    parts: list[Hashable] = []
    for name, leaf in leaves:
        shape = getattr(leaf, "shape", None)
        if type(leaf) in pytree.SIMPLE:
            parts.append((name, type(leaf), leaf))
        elif shape is not None and (registry.backend_of(leaf) is not None or type(leaf).__module__ == "numpy"):
            parts.append((name, tuple(shape), str(leaf.dtype)))
        else:
            parts.append((name, id(leaf)))
    return tuple(parts)


def plain_attributes(values: Any) -> Hashable:
    """Return the numbers, flags and texts among the attributes of a module, on which its code may branch."""
    return tuple([(name, value) for name, value in values.items() if type(value) in pytree.SIMPLE])
