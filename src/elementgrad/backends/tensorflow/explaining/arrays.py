"""Watching NumPy take the numbers of eager tensors: it reads their memory, and asks them for nothing on the way.

A tensor lends its memory to `np.tanh(x)` or `np.asarray(x)` without any of its methods being called. So those names of
NumPy's are replaced while code is watched, and do what they did.
"""

import sys
from collections.abc import Callable, Sequence
from functools import wraps
from types import CodeType
from typing import Any

import numpy as np
from tensorflow.python.framework.ops import _EagerTensorBase

from elementgrad.backends.patch import Replace

Note = Callable[[CodeType, Sequence[Any]], None]
"""Told the code that calls NumPy, and the tensors whose numbers it hands over."""
MAKES = ("array", "asarray", "asanyarray", "ascontiguousarray", "asfortranarray", "asarray_chkfinite")
"""Functions that make an array, and that NumPy offers nobody to take over."""
ASIDE = frozenset(
    """
    shape ndim size result_type common_type can_cast min_scalar_type iscomplexobj isrealobj may_share_memory
    shares_memory zeros_like ones_like empty_like full_like array_repr array_str array2string
    """.split()  # noqa: SIM905
)
"""Functions that take nothing of the numbers of a tensor, or only print them."""


class _Ufunc:
    """A function of NumPy's that works element by element, with all its attributes."""

    def __init__(self, original: np.ufunc, note: Note):
        self._original = original
        self._note = note

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        _look(self._note, args, sys._getframe(1).f_code)
        return self._original(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def __eq__(self, other: Any) -> bool:
        return self._original is (other._original if isinstance(other, _Ufunc) else other)

    def __hash__(self) -> int:
        return hash(self._original)

    def __reduce__(self) -> Any:
        return _named, (self._original.__name__,)  # where nobody watches it is the function itself


def _named(name: str) -> Any:
    return getattr(np, name)


def install(replace: Replace, note: Note) -> None:
    """Have NumPy's functions say which tensors they take numbers of."""
    for name, original in [pair for pair in vars(np).items() if isinstance(pair[1], np.ufunc)]:
        replace(np, name, _Ufunc(original, note))
    for name in [name for name in MAKES if hasattr(np, name)]:
        replace(np, name, _noting(getattr(np, name), note))

    def array_function(_: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """NumPy calls this for its other functions, in place of what they do."""
        if func.__name__ not in ASIDE:
            _look(note, args, sys._getframe(1).f_code)
        return func._implementation(*args, **kwargs)

    replace(_EagerTensorBase, "__array_function__", array_function)


def _noting(original: Callable[..., Any], note: Note) -> Callable[..., Any]:
    @wraps(original)
    def make(*args: Any, **kwargs: Any) -> Any:
        _look(note, args, sys._getframe(1).f_code)
        return original(*args, **kwargs)

    return make


def _look(note: Note, args: Sequence[Any], code: CodeType) -> None:
    given = [x for each in args for x in (each if isinstance(each, (list, tuple)) else (each,))]
    tensors = [x for x in given if isinstance(x, _EagerTensorBase)]
    if tensors:
        note(code, tensors)
