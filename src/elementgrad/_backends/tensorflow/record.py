"""Recording eager TensorFlow code: one persistent tape that watches the tensors."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from elementgrad._backends.autodiff import Linearization
from elementgrad._backends.tensorflow._compat import uid
from elementgrad._backends.tensorflow.autodiff import Sweep, TensorflowLinearization
from elementgrad._cleanup import defer, enter
from elementgrad._read.recorder import ElementRequest, Recorder, UseFlow
from elementgrad._sparsity.pattern import Pattern
from elementgrad.errors import FrameworkError, PlaceError

Tensor = Any


class TensorflowRecorder(Recorder):
    """A tape, and which eager tensors were made while it ran: TensorFlow numbers them all."""

    def __init__(self, tensors: Sequence[Tensor]):
        if not tf.executing_eagerly():
            raise FrameworkError("a recording inside tf.function; there eg.jacobian and eg.grad of a function will do")
        self._watched = [_own(x) for x in tensors]
        self._tape = tf.GradientTape(persistent=True, watch_accessed_variables=False)
        self._window = (0, sys.maxsize)

    def start(self) -> None:
        defer(self._close_window)
        self._window = (uid(), sys.maxsize)
        enter(self._tape)
        self._tape.watch(self._watched)

    def _close_window(self) -> None:
        if self._window[1] == sys.maxsize:
            self._window = (self._window[0], uid())

    def linear(self, of: Sequence[ElementRequest], wrt: Sequence[ElementRequest]) -> Linearization:
        outputs, inputs = [[self._find(asked) for asked in side] for side in (of, wrt)]
        return _RecordedTape(inputs, outputs, [self._tape], create_graph=False)

    def uses(self, of: ElementRequest, position: int, wrt: ElementRequest) -> list[UseFlow] | None:
        raise FrameworkError(
            "a recording of tensorflow does not know which operation used a tensor; put the code into a function and "
            "use eg.contributions"
        )

    def _find(self, asked: ElementRequest) -> Tensor:
        if asked.write is not None:
            raise PlaceError(f"write={asked.write} of a tensor of TensorFlow, which is never written to; leave it out")
        x = _own(asked.tensor)
        if any(x is watched for watched in self._watched):
            return x
        number = getattr(x, "_id", -1)
        if not tf.is_tensor(x) or isinstance(x, tf.Variable) or not self._window[0] <= number < self._window[1]:
            raise asked.outside()
        return x


class _RecordedTape(TensorflowLinearization):
    """Sweeps through the tape of a recording, which does not record them."""

    def value(self, output: int) -> Tensor:
        return tf.convert_to_tensor(self.outputs[output])

    def work(self, forward: bool, source: int, targets: Sequence[int], sweeps: int) -> int:
        with _paused(self._tapes[-1]):
            return super().work(forward, source, targets, sweeps)

    def pattern(self, output: int, input: int, local: bool) -> Pattern | None:
        with _paused(self._tapes[-1]):
            return super().pattern(output, input, local)

    def _swept(self, key: Any, sweep: Sweep, seeds: Tensor) -> list[Tensor | None]:
        with _paused(self._tapes[-1]):
            return super()._swept(key, sweep, seeds)


@contextmanager
def _paused(tape: Any) -> Iterator[None]:
    """Outside of its block, and inside of itself, a tape does not record anyway."""
    if not tape._recording:
        yield
        return
    with tape.stop_recording():
        yield


def _own(x: Tensor) -> Tensor:
    """TensorFlow's own variable inside one of Keras's."""
    inner = getattr(x, "value", None)
    return inner if not isinstance(x, (tf.Tensor, tf.Variable)) and isinstance(inner, tf.Variable) else x
