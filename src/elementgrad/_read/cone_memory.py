"""Remembers the calls whose recording did not pay, so that they are not recorded again.

Before a function is recorded nothing tells how much it computes, and a recording can take as long as the function. So
the first read that was recorded in vain is noted, and later reads of the same names, by arguments of the same shapes,
go the plain way at once. Nothing but this decision is kept, and it never changes an answer: where the function has
become another since, a cone that would pay is not used.
"""

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from types import CodeType, MethodType
from typing import Any

from elementgrad._names.call import BoundCall, TensorRef

MAX_CALLS = 64
"""Calls that are remembered of one function, the last ones."""

_functions: dict[int, tuple[weakref.ref[Any], OrderedDict[Hashable, None]]] = {}
"""By the id of the model, or of the code of a function, as models need not be hashable."""


class RecordingMemory:
    """The calls of one function, by its arguments and by what is read of it, that were recorded in vain."""

    def __init__(self, call: BoundCall, inputs: Sequence[TensorRef], outputs: Sequence[TensorRef]):
        function = call.function
        self._owner: Any = function
        if isinstance(function, MethodType):
            self._owner = function.__self__
        elif isinstance(getattr(function, "__code__", None), CodeType):
            # A lambda that is made anew for each read has the same code, and the same objects around it.
            self._owner = function.__code__
        around = tuple(map(id, _objects_around(function)))
        self._key = call.signature, around, *[tuple([ref.name for ref in refs]) for refs in (inputs, outputs)]

    def was_in_vain(self) -> bool:
        """Return True if such a call was recorded before and did not pay."""
        owner, calls = _functions.get(id(self._owner), (None, ()))
        return owner is not None and owner() is self._owner and self._key in calls

    def note(self) -> None:
        """Note that it does not pay to record such a call."""
        number = id(self._owner)
        owner, calls = _functions.get(number, (None, None))
        if calls is None or owner is None or owner() is not self._owner:
            try:
                owner = weakref.ref(self._owner, lambda _: _functions.pop(number, None))
            except TypeError:  # it is recorded again
                return
            calls = OrderedDict()
            _functions[number] = owner, calls
        calls[self._key] = None
        while len(calls) > MAX_CALLS:
            calls.popitem(last=False)


def _objects_around(function: Callable[..., Any]) -> Iterator[Any]:
    """Yield what a function closes over, and the globals that it uses: a model in it may be another the next time."""
    for cell in getattr(function, "__closure__", None) or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not filled yet
            continue
    code, names = getattr(function, "__code__", None), getattr(function, "__globals__", None)
    if isinstance(code, CodeType) and names is not None:
        for name in code.co_names:
            yield names.get(name)
