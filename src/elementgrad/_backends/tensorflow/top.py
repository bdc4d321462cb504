"""`eg.top` for Keras: gradients of losses, a few variables at a time, and the largest elements of a tensor.

The model runs with tensors in place of its variables, so that nothing is written to. The gradient of each is handed on
as soon as the sweep has it, and dropped.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from elementgrad._backends.tensorflow._compat import should_record_backprop
from elementgrad._backends.tensorflow.autodiff import run_functions_as_python
from elementgrad._backends.tensorflow.graph_ops import see_operations
from elementgrad._backends.tensorflow.isolate import isolated
from elementgrad._backends.tensorflow.names import KerasModel
from elementgrad._cleanup import enter, scope
from elementgrad._train.top_backend import TopBackend, group_by_size, require_same_losses
from elementgrad.errors import FrameworkError, UnconnectedError

Tensor = Any
"""A tf.Tensor, a tf.Variable or an array."""
Give = Callable[[str, Tensor], None]


class TensorflowTop(TopBackend):
    """Ranks elements of Keras models."""

    def parameter_gradients(
        self,
        model: KerasModel,
        parameters: Mapping[str, Tensor],
        losses: Callable[..., Iterable[Tensor]],
        squared: bool,
        give: Give,
    ) -> None:
        """Pass on gradients. A list of losses has one tape.

        An iterator has a tape for each loss, and is run again for each group of parameters; the sums of a group are
        together no larger than the largest parameter.
        """
        if not tf.executing_eagerly():
            raise FrameworkError("elements are ranked before a function is compiled; call this outside of tf.function")
        sizes = {name: parameter.shape.num_elements() for name, parameter in parameters.items()}
        groups = [{name: parameters[name] for name in group} for group in group_by_size(sizes)]
        first_values: list[float] = []
        reached: set[int] = set()
        for number, group in enumerate(groups):
            with isolated(), run_functions_as_python(), _StandIns(model) as stand_ins:
                tape = stand_ins.new_tape(group if number else parameters)
                with tape, stand_ins.turns:
                    returned = losses()
                    if isinstance(returned, list):
                        returned = [tf.convert_to_tensor(loss) for loss in returned]
                        _require_reached(returned, {at for at, loss in enumerate(returned) if tape.records(loss)})
                stand_ins.require_unwritten(tape)
                if isinstance(returned, list):
                    _sweep_list(tape, groups, returned, squared, give)
                    return
                values: list[float] = []
                samples = _sample_each(stand_ins, tape, group, returned, squared, values, reached)
                del tape  # it would hold the first graph while the others are made
                _give_sums(group, samples, squared, give)
            first_values = first_values if number else values
            require_same_losses(first_values, values)
        _require_reached(first_values, reached)

    def pieces(self, x: Tensor) -> Iterator[np.ndarray]:
        return _pieces(x)


implementation = TensorflowTop()


def _require_reached(losses: Sequence[Any], reached: set[int]) -> None:
    if len(reached) < len(losses):
        raise UnconnectedError(
            "a loss has no gradient, as after .numpy() or tf.stop_gradient; return what is computed from the model "
            "that loss_fn is given"
        )


class _StandIns(scope):
    """A context in which tensors stand in for the variables of a model, as in Keras's stateless calls."""

    def __init__(self, model: KerasModel):
        self._variables = {id(variable._value): variable for _, _, variable in model._variables()}
        mapping = [(variable, _read(variable._value)) for variable in self._variables.values()]
        self._scope = keras.StatelessScope(mapping, collect_losses=True)
        self._watched: Mapping[str, Tensor] = {}
        self.turns = TurnCounter()

    def __enter__(self) -> "_StandIns":
        super().__enter__()
        enter(self._scope)
        return self

    def new_tape(self, parameters: Mapping[str, Tensor]) -> "_GivingTape":
        """Return a tape that watches some of the variables from here on, and no other tape watches any."""
        for parameter in self._watched.values():
            self._set(parameter, _read(parameter))
        self._watched = parameters
        return _GivingTape(parameters, self._set)

    def require_unwritten(self, tape: "_GivingTape") -> None:
        """Raise an error if a watched variable was written to, so that its gradient would be lost."""
        for name, value in tape.values.items():
            if self._scope.get_current_value(self._variables[id(self._watched[name])]) is not value:
                raise FrameworkError(f"loss_fn has written to {name}; write to a copy of it instead")

    def _set(self, parameter: Tensor, value: Tensor) -> None:
        self._scope.add_update((self._variables[id(parameter)], value))


class _GivingTape(scope):
    """A tape that hands on the gradient of each parameter when it is complete, and keeps none."""

    def __init__(self, parameters: Mapping[str, Tensor], set_value: Callable[[Tensor, Tensor], None]):
        self._parameters = parameters
        self._tape = tf.GradientTape(persistent=True, watch_accessed_variables=False)
        self._takers: list[Give] = []  # apart: a tape that refers to itself would stay for a while
        self.values: dict[str, Tensor] = {}
        """The tensors that stand in for the parameters."""
        with self:
            for name, parameter in parameters.items():
                self._tape.watch(parameter)
                self.values[name] = _tap_gradient(name, parameter, self._takers)
                set_value(parameter, self.values[name])

    def __enter__(self) -> None:
        super().__enter__()
        enter(self._tape)

    def records(self, loss: Tensor) -> bool:
        """Return True if a loss has a gradient; call it while the tape records."""
        return bool(should_record_backprop([loss]))

    def sweep(self, losses: list[Tensor], seeds: list[Tensor] | None, take: Give) -> None:
        """Run one reverse sweep that hands each gradient to `take`."""
        self._takers.append(take)
        try:
            direct = self._tape.gradient(losses, list(self._parameters.values()), seeds)
        finally:
            self._takers.clear()
        for name, gradient in zip(self._parameters, direct, strict=True):
            if gradient is not None:
                raise FrameworkError(
                    f"the loss uses {name} past Keras, as by its _value; take it from the layer that has it"
                )


def _tap_gradient(name: str, parameter: Tensor, takers: list[Give]) -> Tensor:
    """Return the value of a parameter, whose gradient goes to `takers` and no further."""

    def vjp(gradient: Any) -> None:
        for take in takers:
            take(name, gradient)

    return tf.custom_gradient(lambda value: (tf.identity(value), vjp))(_read(parameter))


class TurnCounter(scope):
    """Finds out whether eager code that runs in turns uses in one turn what it computed in another.

    TensorFlow numbers eager tensors in the order in which they are made. Of each tensor that a tape follows, its number
    is all that is remembered.
    """

    def __init__(self) -> None:
        self._start = self._turn = _next_id()
        self._recorded = bytearray()
        self.shared = False
        """True once a tensor of an earlier turn was used."""

    def __enter__(self) -> "TurnCounter":
        super().__enter__()
        see_operations(self._on_operation)
        return self

    def end(self) -> None:
        """End a turn."""
        self._turn = _next_id()

    def check(self, x: Tensor) -> None:
        """Record that a tensor is used, or made, in this turn."""
        number = x._id - self._start if isinstance(x, tf.Tensor) and hasattr(x, "_id") else -1
        if number < 0 or not x.dtype.is_floating:
            return
        if x._id < self._turn:
            self.shared |= number < len(self._recorded) and bool(self._recorded[number])
        elif should_record_backprop([x]):
            self._recorded.extend(bytes(max(0, number + 1 - len(self._recorded))))
            self._recorded[number] = 1

    def _on_operation(self, kind: Any, inputs: Any, attributes: Any, outputs: Any, *_: Any, **__: Any) -> None:
        # Inputs as well: the results of a custom gradient are recorded only after their operation.
        for x in (*inputs, *outputs):
            self.check(x)


def _next_id() -> int:
    return tf.constant(0)._id


Sample = tuple[_GivingTape, Tensor, Tensor]
"""A tape, a loss on it, and a seed."""


def _sweep_list(
    tape: _GivingTape, groups: Sequence[Mapping[str, Tensor]], losses: list[Tensor], squared: bool, give: Give
) -> None:
    # Of one number, the largest squares are those of the largest derivatives.
    if not squared or sum(loss.shape.num_elements() for loss in losses) == 1:
        tape.sweep(losses, None, lambda name, gradient: give(name, tf.convert_to_tensor(gradient)))
        return
    for group in groups:
        samples = ((tape, loss, seed) for loss in losses for seed in _one_hot_seeds(loss))
        _give_sums(group, samples, squared, give)


def _sample_each(
    stand_ins: _StandIns,
    tape: _GivingTape,
    group: Mapping[str, Tensor],
    losses: Iterable[Tensor],
    squared: bool,
    values: list[float],
    reached: set[int],
) -> Iterator[Sample]:
    """Yield each loss on a tape of its own, so that the graph of one alone is held."""
    ahead = map(tf.convert_to_tensor, losses)
    while True:
        with tape, stand_ins.turns:
            some = list(islice(ahead, 1))
            for loss in some:
                stand_ins.turns.check(loss)
                reached |= {len(values)} if tape.records(loss) else set()
        stand_ins.require_unwritten(tape)
        if stand_ins.turns.shared:
            raise FrameworkError(
                "the losses that loss_fn yields share what was computed for one of them; return them in a list"
            )
        if not some:
            return
        values.append(float(tf.reduce_sum(some[0])))
        for seed in _one_hot_seeds(some[0]) if squared else [tf.ones_like(some[0])]:
            yield tape, some[0], seed
        stand_ins.turns.end()
        tape = stand_ins.new_tape(group)


def _one_hot_seeds(loss: Tensor) -> Iterator[Tensor]:
    size = loss.shape.num_elements()
    for number in range(size):
        yield tf.reshape(tf.one_hot(number, size, dtype=loss.dtype), loss.shape)


def _give_sums(group: Mapping[str, Tensor], samples: Iterable[Sample], squared: bool, give: Give) -> None:
    """Give the sum over samples for each parameter that one of them reaches."""
    sums: dict[str, np.ndarray] = {}

    def add(name: str, gradient: Any) -> None:
        if name not in group:
            return
        shape = tuple(group[name].shape)
        total = sums.setdefault(name, np.zeros(shape))
        if isinstance(gradient, tf.IndexedSlices):  # of rows that were looked up, some of them more than once
            rows, row_of = np.unique(gradient.indices.numpy(), return_inverse=True)
            values = np.zeros((len(rows), *shape[1:]))
            np.add.at(values, row_of.reshape(-1), _to_float64(gradient.values))
            total[rows] += np.square(values) if squared else values
            return
        flat, start = total.reshape(-1), 0
        for piece in _pieces(gradient):
            flat[start : start + len(piece)] += np.square(piece) if squared else piece
            start += len(piece)

    for tape, loss, seed in samples:
        tape.sweep([loss], [seed], add)
        del tape, loss
    for name in list(sums):
        give(name, tf.convert_to_tensor(sums.pop(name)))


def _pieces(x: Tensor) -> Iterator[np.ndarray]:
    """Yield the elements in order, in float64, a piece at a time: no copy of the whole."""
    flat = tf.reshape(_read(x) if isinstance(x, tf.Variable) else x, [-1])
    for start in range(0, flat.shape[0], TopBackend.PIECE):
        yield _to_float64(flat[start : start + TopBackend.PIECE])


def _to_float64(x: Tensor) -> np.ndarray:
    return np.asarray(x.numpy(), np.float64)


def _read(variable: Tensor) -> Tensor:
    return tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)
