"""Recordings of eager TensorFlow code: one persistent tape that watches the recorded tensors.

TensorFlow numbers eager tensors as it makes them, so the numbers at the start and the end of the block tell which
tensors were made in it.
"""

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
    """Records one block of eager code on a tape."""

    def __init__(self, tensors: Sequence[Tensor]):
        if not tf.executing_eagerly():
            raise FrameworkError("a recording inside tf.function; there eg.jacobian and eg.grad of a function will do")
        self._tensors = [_unwrap_variable(x) for x in tensors]
        self._tape = tf.GradientTape(persistent=True, watch_accessed_variables=False)
        self._window = (0, sys.maxsize)
        """Numbers of the tensors made in the block."""

    def start(self) -> None:
        defer(self._close_window)
        self._window = (uid(), sys.maxsize)
        enter(self._tape)
        self._tape.watch(self._tensors)

    def _close_window(self) -> None:
        if self._window[1] == sys.maxsize:
            self._window = (self._window[0], uid())

    def linear(self, of: Sequence[ElementRequest], wrt: Sequence[ElementRequest]) -> Linearization:
        outputs, inputs = [[self._find(request) for request in side] for side in (of, wrt)]
        return _RecordedTape(inputs, outputs, [self._tape], create_graph=False)

    def uses(self, of: ElementRequest, position: int, wrt: ElementRequest) -> list[UseFlow] | None:
        raise FrameworkError(
            "a recording of tensorflow does not know which operation used a tensor; put the code into a function and "
            "use eg.contributions"
        )

    def _find(self, request: ElementRequest) -> Tensor:
        if request.write is not None:
            raise PlaceError(
                f"write={request.write} of a tensor of TensorFlow, which is never written to; leave it out"
            )
        x = _unwrap_variable(request.tensor)
        if any(x is recorded for recorded in self._tensors):
            return x
        tensor_id = getattr(x, "_id", -1)
        if not tf.is_tensor(x) or isinstance(x, tf.Variable) or not self._window[0] <= tensor_id < self._window[1]:
            raise request.outside_error()
        return x


class _RecordedTape(TensorflowLinearization):
    """Sweeps through the tape of a recording, which is paused meanwhile so that it does not record them."""

    def value(self, output: int) -> Tensor:
        return tf.convert_to_tensor(self.outputs[output])

    def peak_bytes(self, forward: bool, source: int, targets: Sequence[int], sweeps: int) -> int:
        with _pause_tape(self._tapes[-1]):
            return super().peak_bytes(forward, source, targets, sweeps)

    def pattern(self, output: int, input: int, local: bool) -> Pattern | None:
        with _pause_tape(self._tapes[-1]):
            return super().pattern(output, input, local)

    def _trace_and_run(self, key: Any, sweep: Sweep, seeds: Tensor) -> list[Tensor | None]:
        with _pause_tape(self._tapes[-1]):
            return super()._trace_and_run(key, sweep, seeds)


@contextmanager
def _pause_tape(tape: Any) -> Iterator[None]:
    if not tape._recording:  # outside its block, or paused already; `stop_recording` would raise
        yield
        return
    with tape.stop_recording():
        yield


def _unwrap_variable(x: Tensor) -> Tensor:
    """Return TensorFlow's variable inside one of Keras."""
    inner = getattr(x, "value", None)
    return inner if not isinstance(x, (tf.Tensor, tf.Variable)) and isinstance(inner, tf.Variable) else x
