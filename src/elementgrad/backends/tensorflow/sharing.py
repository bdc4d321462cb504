"""Telling whether eager code that is run in turns uses in one turn what it computed in another."""

from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.eager.record import should_record_backprop
from tensorflow.python.framework import op_callbacks

from elementgrad.cleanup import defer, scope

Tensor = Any


class Turns(scope):
    """Numbers the turns, and remembers of each tensor that a tape follows whether it is of an earlier one.

    TensorFlow numbers eager tensors in the order in which they are made. That is all that is remembered of them.
    """

    def __init__(self) -> None:
        self._start = self._turn = _next()
        self._followed = bytearray()
        self.shared = False
        """Whether something of an earlier turn was used."""

    def __enter__(self) -> "Turns":
        super().__enter__()
        see_operations(self._met)
        return self

    def end(self) -> None:
        """End a turn."""
        self._turn = _next()

    def check(self, x: Tensor) -> None:
        """Note that a tensor is used, or made, in this turn."""
        number = x._id - self._start if isinstance(x, tf.Tensor) and hasattr(x, "_id") else -1
        if number < 0 or not x.dtype.is_floating:
            return
        if x._id < self._turn:
            self.shared |= number < len(self._followed) and bool(self._followed[number])
        elif should_record_backprop([x]):
            self._followed.extend(bytes(max(0, number + 1 - len(self._followed))))
            self._followed[number] = 1

    def _met(self, kind: Any, inputs: Any, attributes: Any, outputs: Any, *_: Any, **__: Any) -> None:
        # Also what goes in: the results of rules of the user's own are followed only after their operation.
        for x in (*inputs, *outputs):
            self.check(x)


def see_operations(see: Any) -> None:
    """Have something called after each operation of this thread, until the innermost open scope is left."""
    seen: Any = lambda *args, **kwargs: see(*args, **kwargs)  # noqa: E731  # one of its own, to be removed alone
    defer(_remove, seen)
    op_callbacks.add_op_callback(seen)


def _remove(seen: Any) -> None:
    if seen in context.context().op_callbacks:
        op_callbacks.remove_op_callback(seen)


def _next() -> int:
    return tf.constant(0)._id
