"""The arguments of a call by the names of a function's parameters."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

from elementgrad import backends

ANY = inspect.signature(lambda *args, **kwargs: None)
_signatures: WeakKeyDictionary[Any, inspect.Signature] = WeakKeyDictionary()


class Bound:
    """Arguments by the names of parameters, and how others are passed on in their place."""

    def __init__(self, arguments: dict[str, Any], positional: int, signature: inspect.Signature | None):
        self.arguments = arguments
        self._positional = positional
        self._signature = signature
        """None if all were given by position."""

    def passed(self, arguments: dict[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """The same arguments, or others of their names, as the function was given them: by position and by name."""
        if self._signature is None:
            return tuple(arguments.values()), {}
        bound = inspect.BoundArguments(self._signature, arguments)  # type: ignore[arg-type]
        # What was given by name is passed on by name: it may be that the function takes it in no other way.
        args, more = bound.args[: self._positional], bound.args[self._positional :]
        return args, dict(zip(list(arguments)[self._positional :], more, strict=False)) | bound.kwargs


def bind(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Bound:
    """Which parameter each argument is for; those of a model are the parameters of what the user wrote."""
    holder = backends.holder(function)
    function = function if holder is None else holder.called(function)
    names = None if kwargs else _names(function, len(args))
    if names is not None:
        return Bound(dict(zip(names, args, strict=True)), len(args), None)
    signature = _signature(function)
    return Bound(dict(signature.bind(*args, **kwargs).arguments), len(args), signature)


def _names(function: Callable[..., Any], count: int) -> Sequence[str] | None:
    """The names of so many arguments given by position, where a plain function takes just that.

    Its code says so at once. A signature is more to make than many a sweep.
    """
    method = getattr(function, "__func__", None)
    written = function if method is None else method
    if type(written) is not FunctionType or written.__dict__:  # what wraps another has its signature
        return None
    code, first = written.__code__, 0 if method is None else 1
    most = code.co_argcount - first
    least = most - len(written.__defaults__ or ())
    fits = least <= count <= most and not code.co_kwonlyargcount
    return code.co_varnames[first : first + count] if fits else None


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
