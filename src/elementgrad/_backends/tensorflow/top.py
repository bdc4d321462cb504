"""Telling whether eager code that is run in turns uses in one turn what it computed in another.

Derivatives of losses with respect to variables, one at a time, and the largest elements of a tensor.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from elementgrad._backends import topk
from elementgrad._backends.tensorflow._compat import context, op_callbacks, should_record_backprop
from elementgrad._backends.tensorflow.autodiff import unstaged
from elementgrad._backends.tensorflow.isolate import isolated
from elementgrad._backends.tensorflow.names import KerasModel
from elementgrad._backends.topk import group_by_size
from elementgrad._cleanup import defer, enter, scope
from elementgrad._train.backend import TopBackend
from elementgrad.errors import FrameworkError, UnconnectedError

Tensor = Any


class TurnCounter(scope):
    """Numbers the turns, and remembers of each tensor that a tape follows whether it is of an earlier one.

    TensorFlow numbers eager tensors in the order in which they are made. That is all that is remembered of them.
    """

    def __init__(self) -> None:
        self._start = self._turn = _next()
        self._followed = bytearray()
        self.shared = False
        """Whether something of an earlier turn was used."""

    def __enter__(self) -> "TurnCounter":
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


# tf.Tensor, tf.Variable or an array
Give = Callable[[str, Tensor], None]


def slopes(
    model: KerasModel,
    parameters: Mapping[str, Tensor],
    losses: Callable[[], Iterable[Tensor]],
    squared: bool,
    give: Give,
) -> None:
    """Give the derivative of the sum of the losses for each parameter, or the sum of the squares of theirs.

    Tensors stand in for the variables, as Keras itself has it where models are pure functions: nothing is written to.
    A list of losses has one tape. What yields them has one for each, and is run again for each group of parameters
    whose sums are no larger together than the largest parameter.
    """
    if not tf.executing_eagerly():
        raise FrameworkError("elements are ranked before a function is compiled; call this outside of tf.function")
    sizes = {name: parameter.shape.num_elements() for name, parameter in parameters.items()}
    groups = [{name: parameters[name] for name in group} for group in group_by_size(sizes)]
    before: list[float] = []
    reached: set[int] = set()
    for number, group in enumerate(groups):
        with isolated(), unstaged(), _LentVariables(model) as lent:
            first = lent.taped(group if number else parameters)
            with first, lent.turns:
                found = losses()
                if isinstance(found, list):
                    found = [tf.convert_to_tensor(loss) for loss in found]
                    _require_reached(found, {at for at, loss in enumerate(found) if first.follows(loss)})
            lent.require_unwritten(first)
            if isinstance(found, list):
                _from_list(first, groups, found, squared, give)
                return
            values: list[float] = []
            samples = _one_by_one(lent, first, group, found, squared, values, reached)
            del first  # which would hold the first graph while the others are made
            _sum(group, samples, squared, give)
        before = before if number else values
        if len(values) != len(before) or not np.allclose(values, before, 1e-3, 1e-6, equal_nan=True):
            raise FrameworkError(
                "loss_fn gives other losses when it is asked again, as it is for each group of parameters; start it "
                "from the same data each time, or return a list of losses"
            )
    _require_reached(before, reached)


def _require_reached(losses: Sequence[Any], reached: set[int]) -> None:
    """Each loss has a gradient."""
    if len(reached) < len(losses):
        raise UnconnectedError(
            "a loss has no gradient, as behind .numpy() and tf.stop_gradient; return what is computed from the model "
            "that loss_fn is given"
        )


def largest(x: Tensor, count: int, floor: float, minus: Tensor | None) -> tuple[np.ndarray, np.ndarray]:
    """Size and position of the elements that are largest in size; see `Backend.topk_abs`."""
    return topk.topk_abs(_pieces(x), None if minus is None else _pieces(minus), count, floor)


class _LentVariables(scope):
    """A run of the model in which tensors stand in for its variables."""

    def __init__(self, model: KerasModel):
        self._variables = {id(variable._value): variable for _, _, variable in model._variables()}
        mapping = [(variable, _read(variable._value)) for variable in self._variables.values()]
        self._scope = keras.StatelessScope(mapping, collect_losses=True)
        self._followed: Mapping[str, Tensor] = {}
        self.turns = TurnCounter()

    def __enter__(self) -> "_LentVariables":
        super().__enter__()
        enter(self._scope)
        return self

    def taped(self, parameters: Mapping[str, Tensor]) -> "_Taped":
        """A tape that follows some of the variables from here on, and no other follows any."""
        for parameter in self._followed.values():
            self._lend(parameter, _read(parameter))
        self._followed = parameters
        return _Taped(parameters, self._lend)

    def require_unwritten(self, taped: "_Taped") -> None:
        """Nothing that a tape follows was written to since; it would be another variable."""
        for name, value in taped.values.items():
            if self._scope.get_current_value(self._variables[id(self._followed[name])]) is not value:
                raise FrameworkError(f"loss_fn has written to {name}; write to a copy of it instead")

    def _lend(self, parameter: Tensor, value: Tensor) -> None:
        self._scope.add_update((self._variables[id(parameter)], value))


class _Taped(scope):
    """A tape that hands on the gradient of each parameter when it is whole, and keeps none."""

    def __init__(self, parameters: Mapping[str, Tensor], lend: Callable[[Tensor, Tensor], None]):
        self._parameters = parameters
        self._tape = tf.GradientTape(persistent=True, watch_accessed_variables=False)
        self._takers: list[Give] = []  # apart: a tape that refers to itself would stay for a while
        self.values: dict[str, Tensor] = {}
        """What stands in for the parameters."""
        with self:
            for name, parameter in parameters.items():
                self._tape.watch(parameter)
                self.values[name] = _tapped(name, parameter, self._takers)
                lend(parameter, self.values[name])

    def __enter__(self) -> None:
        super().__enter__()
        enter(self._tape)

    def follows(self, loss: Tensor) -> bool:
        """Whether a loss has a gradient; asked while the tape records."""
        return bool(should_record_backprop([loss]))

    def back(self, losses: list[Tensor], seeds: list[Tensor] | None, take: Give) -> None:
        """One sweep back that hands on each gradient."""
        self._takers.append(take)
        try:
            past = self._tape.gradient(losses, list(self._parameters.values()), seeds)
        finally:
            self._takers.clear()
        for name, gradient in zip(self._parameters, past, strict=True):
            if gradient is not None:
                raise FrameworkError(
                    f"the loss uses {name} past Keras, as by its _value; take it from the layer that has it"
                )


def _tapped(name: str, parameter: Tensor, takers: list[Give]) -> Tensor:
    """The value of a parameter, whose gradient goes to whoever takes it and no further."""

    def back(gradient: Any) -> None:
        for take in takers:
            take(name, gradient)

    return tf.custom_gradient(lambda value: (tf.identity(value), back))(_read(parameter))


def _from_list(
    taped: _Taped, groups: Sequence[Mapping[str, Tensor]], losses: list[Tensor], squared: bool, give: Give
) -> None:
    if not squared or sum(loss.shape.num_elements() for loss in losses) == 1:  # the largest square is of the largest
        taped.back(losses, None, lambda name, gradient: give(name, tf.convert_to_tensor(gradient)))
        return
    for group in groups:
        samples = ((taped, loss, seed) for loss in losses for seed in _units(loss))
        _sum(group, samples, squared, give)


Sample = tuple[_Taped, Tensor, Tensor]
"""A tape, a loss on it, and a seed."""


def _one_by_one(
    lent: _LentVariables,
    taped: _Taped,
    group: Mapping[str, Tensor],
    losses: Iterable[Tensor],
    squared: bool,
    values: list[float],
    reached: set[int],
) -> Iterator[Sample]:
    """Each loss on a tape of its own, so that the graph of one alone is held."""
    ahead = map(tf.convert_to_tensor, losses)
    while True:
        with taped, lent.turns:
            some = list(islice(ahead, 1))
            for loss in some:
                lent.turns.check(loss)
                reached |= {len(values)} if taped.follows(loss) else set()
        lent.require_unwritten(taped)
        if lent.turns.shared:
            raise FrameworkError(
                "the losses that loss_fn yields share what was computed for one of them; return them in a list"
            )
        if not some:
            return
        values.append(float(tf.reduce_sum(some[0])))
        for seed in _units(some[0]) if squared else [tf.ones_like(some[0])]:
            yield taped, some[0], seed
        lent.turns.end()
        taped = lent.taped(group)


def _units(loss: Tensor) -> Iterator[Tensor]:
    size = loss.shape.num_elements()
    for number in range(size):
        yield tf.reshape(tf.one_hot(number, size, dtype=loss.dtype), loss.shape)


def _sum(group: Mapping[str, Tensor], samples: Iterable[Sample], squared: bool, give: Give) -> None:
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
            np.add.at(values, row_of.reshape(-1), _wide(gradient.values))
            total[rows] += np.square(values) if squared else values
            return
        flat, start = total.reshape(-1), 0
        for piece in _pieces(gradient):
            flat[start : start + len(piece)] += np.square(piece) if squared else piece
            start += len(piece)

    for taped, loss, seed in samples:
        taped.back([loss], [seed], add)
        del taped, loss
    for name in list(sums):
        give(name, tf.convert_to_tensor(sums.pop(name)))


def _pieces(x: Tensor) -> Iterator[np.ndarray]:
    """The elements in order, in float64, a piece at a time: no copy of the whole."""
    flat = tf.reshape(_read(x) if isinstance(x, tf.Variable) else x, [-1])
    for start in range(0, flat.shape[0], topk.PIECE):
        yield _wide(flat[start : start + topk.PIECE])


def _wide(x: Tensor) -> np.ndarray:
    return np.asarray(x.numpy(), np.float64)


def _read(variable: Tensor) -> Tensor:
    return tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)


class TensorflowTop(TopBackend):
    parameter_gradients = staticmethod(slopes)
    topk_abs = staticmethod(largest)


implementation = TensorflowTop()
