"""The arguments of a call by the names of a function's parameters."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from elementgrad import backends

ANY = inspect.signature(lambda *args, **kwargs: None)
_signatures: WeakKeyDictionary[Any, inspect.Signature] = WeakKeyDictionary()


def bind(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> inspect.BoundArguments:
    """Which parameter each argument is for; those of a model are the parameters of what the user wrote."""
    holder = backends.holder(function)
    return _signature(function if holder is None else holder.called(function)).bind(*args, **kwargs)


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    """The signature, found once for the method of a class: that takes as long as a small read."""
    method = getattr(function, "__func__", None)
    known = _signatures.get(method) if method is not None else None
    if known is None:
        try:
            known = inspect.signature(function)
        except (TypeError, ValueError):  # written in C
            known = ANY
        if method is not None:
            _signatures[method] = known
    return known
