"""What single things are, as bytes that are the same in every process: words, tensors, code; and what objects hold."""

import dis
from collections.abc import Iterator
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MethodDescriptorType,
    MethodWrapperType,
    WrapperDescriptorType,
)
from typing import Any

import numpy as np

from elementgrad import backends
from elementgrad.distributed.part import numbers

Content = bytes | memoryview
WORDS = (bool, int, float, complex, str, bytes)
ROUTINES = (BuiltinFunctionType, MethodDescriptorType, MethodWrapperType, WrapperDescriptorType)
"""Functions and methods of C."""


def of_tensor(value: Any) -> list[Content] | None:
    """An array, or a tensor of any framework; None for anything else."""
    if isinstance(value, np.ndarray):
        head = f"{value.dtype} {value.shape}".encode()
        return [head] if value.dtype.hasobject else [head, _bytes(value)]
    owner = backends.owner(value)
    if owner is None:
        return None
    head = f"{owner.dtype(value)} {tuple(owner.shape(value))}".encode()
    if owner.kind(value) == "o":
        return [head]
    try:
        values = owner.read(value) if owner.kind(value) in "bi" else numbers(value, owner)
    except Exception:  # one without numbers, such as PyTorch's on its device "meta"
        values = None
    return [head] if values is None else [head, _bytes(values)]


def of_word(value: Any) -> bytes:
    """A number, a string, or None."""
    base: Any = next((base for base in WORDS if isinstance(value, base)), None)
    return b"None" if base is None else f"{base.__name__} {base.__repr__(value)}".encode()


def of_set(value: set[Any] | frozenset[Any]) -> bytes:
    """The words in a set, in an order of their own, and how many members it has."""
    words = sorted(of_word(member) for member in value if isinstance(member, WORDS))
    return str(len(value)).encode() + b" ".join(words)


def of_kind(value: Any) -> bytes:
    """What something is."""
    named = value if isinstance(value, (type, FunctionType, *ROUTINES)) else type(value)
    return f"{attribute(named, '__module__')} {attribute(named, '__qualname__')}".encode()


def of_code(code: CodeType) -> bytes:
    """What a function does: nothing of where it stands, or of the names of its variables."""
    constants = [of_code(each) if isinstance(each, CodeType) else _constant(each) for each in code.co_consts]
    return b"\n".join([code.co_code, " ".join(code.co_names).encode(), *constants])


def home(value: Any) -> str | None:
    """The module that something was made in; a wrapper has copied the name of another."""
    if isinstance(value, FunctionType):
        return str(value.__globals__.get("__name__"))
    module = attribute(value if isinstance(value, (type, *ROUTINES)) else type(value), "__module__")
    return module if isinstance(module, str) else None


def loaded(code: CodeType) -> list[str]:
    """The globals that a function loads, also in functions inside of it."""
    steps = [step for each in _codes(code) for step in dis.get_instructions(each)]
    return sorted({step.argval for step in steps if step.opname == "LOAD_GLOBAL"})


def names(code: CodeType) -> set[str]:
    """The globals and attributes that a function names."""
    return {name for each in _codes(code) for name in each.co_names}


def held(value: Any) -> dict[str, Any]:
    """The attributes of an object, in slots or not."""
    slots = [name for kind in type(value).__mro__ for name in _slots(kind)]
    found = {name: attribute(value, name) for name in slots if name != "__dict__"}
    return found | dict(attribute(value, "__dict__") or {})


def attribute(value: Any, name: str) -> Any:
    """An attribute, or None, whatever an object of somebody else's does when it is asked."""
    try:
        return getattr(value, name, None)
    except Exception:
        return None


def _bytes(values: np.ndarray) -> memoryview:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8).data


def _constant(value: Any) -> bytes:
    return of_set(value) if isinstance(value, frozenset) else repr(value).encode()


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _slots(kind: type) -> list[str]:
    slots = vars(kind).get("__slots__", ())
    private = f"_{kind.__name__.lstrip('_')}"
    listed = [slots] if isinstance(slots, str) else list(slots)
    return [f"{private}{name}" if name.startswith("__") and not name.endswith("__") else name for name in listed]
