"""`eg.watch` in Keras: look at the variables and the loss after each step of `fit`.

Keras compiles forward, backward and update into one function, which stays as it is. The values of all variables are
kept by reference before each step: TensorFlow copies a variable on its next write while its value is referred to. So
nothing is lost when a step turns out to be bad, and forward, loss and gradients can be run again, one operation at a
time.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from elementgrad._backends.tensorflow import _compat
from elementgrad._backends.tensorflow.autodiff import run_functions_as_python
from elementgrad._backends.tensorflow.explain_rules import NUMBERS, is_differentiable
from elementgrad._backends.tensorflow.isolate import isolated
from elementgrad._backends.tensorflow.names import KerasModel
from elementgrad._backends.tensorflow.trace import TensorflowOpRecorder
from elementgrad._cleanup import defer, enter, scope, with_cleanup
from elementgrad._names import pytree
from elementgrad._place.grammar import nearest
from elementgrad._place.place import Place
from elementgrad._watch.backend import (
    CapturedStep,
    Hit,
    NamedValue,
    ReplayedRun,
    Rule,
    StepRecord,
    WatchBackend,
    Watcher,
    WatchOptions,
)
from elementgrad._watch.elements import largest_element, nonfinite_element, positions_of
from elementgrad.errors import FrameworkError, OptionError, PlaceError

Tensor = Any
Values = dict[str, Tensor]
DATA = ("x", "y", "sample_weight")
"""The parts of a batch, as `fit` calls them."""


class KerasWatcher(Watcher):
    """Watches the steps of one `fit`."""

    def __init__(self, model: Any, optimizer: Any, options: WatchOptions):
        if options.loss is not None:
            raise OptionError("the loss of a Keras model is compiled with it, and is followed anyway; leave loss= out")
        self._model, self._options = model, options
        self._step = 0
        self._rules: dict[str, tuple[str, Place, Rule]] = {}
        self._gradients: dict[str, Any] = {}
        """Gradients at the places of rules, which the step writes there,"""
        self._computed: set[str] = set()
        """those of them that it computes,"""
        self._taken: Any = None
        """and whether the optimizer takes the step, or skips it."""

    def start(self) -> None:
        model = self._model
        _build_optimizer(model)
        if model.train_function is None:
            model.make_train_function()
        defer(_restore_function, model, model.train_function)
        self._bind_rules()
        model.train_function = partial(self.run, model.train_function)

    def _bind_rules(self) -> None:
        """Find the variables of the rules, and have the step keep their gradients."""
        known = dict(variables_of(self._model))
        for text, (place, rule) in self._options.rules.items():
            name = f"parameter:{place.name}"
            if name not in known:
                names = [each.partition(":")[2] for each in known if each.startswith("parameter:")]
                raise PlaceError(f"no parameter is named {place.name!r}; {nearest(str(place.name), names)}")
            if place.index:
                place.select(tuple(known[name].shape))
            self._rules[text] = name, place, rule
        optimizer = self._model.optimizer
        if not self._rules or optimizer is None:
            return
        original = optimizer.apply_gradients
        watched = {name: known[name] for name, _, _ in self._rules.values()}
        self._gradients = {
            name: tf.Variable(tf.zeros(v.shape, v.dtype), trainable=False) for name, v in watched.items()
        }

        self._taken = tf.Variable(True, trainable=False)

        def apply_gradients(pairs: Any, *args: Any, **kwargs: Any) -> Any:
            pairs = list(pairs)
            gradients = {id(_compat.variable_inside(v)): g for g, v in pairs if g is not None}
            self._taken.assign(_takes_step(optimizer, list(gradients.values())))
            factor = optimizer.scale_loss(tf.ones([]))
            for name in [name for name, wanted in watched.items() if id(wanted) in gradients]:
                gradient = tf.convert_to_tensor(gradients[id(watched[name])])
                self._gradients[name].assign(gradient / tf.cast(factor, gradient.dtype))
                self._computed.add(name)
            return original(pairs, *args, **kwargs)

        defer(vars(optimizer).pop, "apply_gradients", None)
        object.__setattr__(optimizer, "apply_gradients", apply_gradients)
        self._model.make_train_function(force=True)

    def run(self, original: Callable[..., Any], iterator: Any) -> Any:
        """Run the steps of one call of the train function, and look at each."""
        logs = None
        for _ in range(int(self._model.steps_per_execution)):
            try:
                data = next(iterator)
            except StopIteration:
                if logs is None:
                    raise
                return logs
            before = {name: _value(variable) for name, variable in all_variables(self._model)}
            logs = original(iter([data]))
            self._look(data, before, logs)
            self._step += 1
        return logs

    @with_cleanup
    def _look(self, data: Any, before: Values, logs: Any) -> None:
        variables = dict(all_variables(self._model))
        after = {name: _value(v) for name, v in variables.items() if name.startswith("parameter:")}
        floats = [x for x in after.values() if is_differentiable(x)]
        loss = logs.get("loss") if isinstance(logs, dict) else None
        watched = floats + ([] if loss is None else [tf.convert_to_tensor(loss)])
        captured = partial(self._capture, data, before)
        if watched and not bool(_are_finite(watched)):
            record = partial(record_step, self._model, data, before)
            for name, x in after.items():
                element = nonfinite_element(name.partition(":")[2], x, NUMBERS)
                if element is None:
                    continue
                shape, index = tuple(x.shape), element.index
                state = {
                    _state_name(variables[key]): float(np.asarray(value)[index])
                    for key, value in before.items()
                    if key.startswith("optimizer:") and tuple(value.shape) == shape
                }
                tripped = f"{element.place} is {element.value!r} after the step"
                update = Hit(
                    tripped,
                    self._step,
                    captured=captured,
                    cause="update",
                    place=element.place,
                    value=element.value,
                    module=name.partition(":")[2].rpartition("/")[0],
                    state=state,
                )
                self._options.stop(Hit(tripped, self._step, 0, record, captured, otherwise=update))
            self._options.stop(Hit("the loss is not finite", self._step, 0, record, captured))
        is_taken = self._taken is not None and bool(self._taken)
        for text, (name, place, rule) in self._rules.items():
            if not is_taken or name not in self._computed:
                continue
            g = self._gradients[name].value()
            picked = tf.gather(tf.reshape(g, [-1]), positions_of(place, tuple(g.shape))) if place.index else g
            if bool(np.asarray(rule(picked)).all()):
                where, number = largest_element(str(place.name), place, NUMBERS.array(g))
                hit = Hit(
                    f"the gradient of {text} is such that its rule is true",
                    self._step,
                    captured=captured,
                    cause="rule",
                    place=where,
                    value=number,
                    where=_line_of(self._model, data, before, name),
                    module=str(place.name).rpartition("/")[0],
                )
                self._options.stop(hit)

    def _capture(self, data: Any, before: Values) -> CapturedStep:
        results = {name: _value(v) for name, v in all_variables(self._model) if not name.startswith("random:")}
        return CapturedStep(
            describe(self._model), ((data,), {}), before, results=results, settings={"tensorflow": tf.__version__}
        )


def _takes_step(optimizer: Any, gradients: Sequence[Any]) -> Tensor:
    """Return False if an optimizer skips the step, since scaled gradients are not finite."""
    if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return tf.constant(True)
    parts = [g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients]
    return tf.reduce_all([tf.reduce_all(tf.math.is_finite(g)) for g in parts])


def _build_optimizer(model: Any) -> None:
    """Make the optimizer's variables, as its first step would: what a step starts from is kept."""
    if model.optimizer is not None and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)


def _restore_function(model: Any, original: Any) -> None:
    model.train_function = original


def record_step(model: Any, data: Any, before: Mapping[str, Tensor]) -> StepRecord:
    """Run the forward and the loss of a step again from earlier values, with every operation recorded."""
    x, y, sample_weight = _unpack(data)
    recorder = TensorflowOpRecorder(KerasModel(model), record_step.__code__)
    tape = tf.GradientTape(persistent=True)
    with restored(model, before), isolated():
        x, y, sample_weight = pytree.map_tree((x, y, sample_weight), _as_tensor)
        enter(tape)
        parts = zip(DATA, (x, y, sample_weight), strict=True)
        named = [leaf for name, part in parts for leaf in pytree.named_leaves(part, name)]
        inputs = [(name, leaf) for name, leaf in named if isinstance(leaf, tf.Tensor)]
        ids = [recorder.value_id(leaf) for _, leaf in inputs]
        with run_functions_as_python(), recorder.record_thread():
            y_pred = model(x, training=True) if _compat.takes_training(model) else model(x)
            compute = _compat.compute_loss_of(model)
            loss = tf.convert_to_tensor(compute(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=True))
            outputs = [(name, out) for name, out in pytree.named_leaves(y_pred, "output") if isinstance(out, tf.Tensor)]
            named_outputs = [NamedValue(name, "output", recorder.value_id(out), out) for name, out in outputs]
            final = NamedValue("the loss", "output", recorder.value_id(loss), loss)
        held = [NamedValue(name, "input", value, leaf) for (name, leaf), value in zip(inputs, ids, strict=True)]
        for name, variable in variables_of(model):
            kind, _, text = name.partition(":")
            values = recorder.variable_values.get(_compat.tensor_id(_compat.variable_inside(variable).handle), [None])
            held.append(NamedValue(text, kind, values[0], before[name]))
    if recorder.error is not None:
        raise recorder.error
    floats = [value for value in held if is_differentiable(value.tensor)]
    everything = frozenset([value for op in recorder.ops for value in (*op.inputs, *op.outputs)])
    named_outputs = [value for value in named_outputs if is_differentiable(value.tensor)]
    return StepRecord("tensorflow", recorder.ops, everything, NUMBERS, floats, named_outputs, final)


def _unpack(data: Any) -> tuple[Any, Any, Any]:
    parts = list(data) if isinstance(data, (tuple, list)) else [data]
    return tuple([*parts, None, None][:3])  # type: ignore[return-value]


def _line_of(model: Any, data: Any, before: Values, name: str) -> str | None:
    """Return the line at which a variable is read."""
    try:
        record = record_step(model, data, before)
    except Exception:  # the rule is true whether or not the line is known
        return None
    ids = {value.id for value in record.held if value.name == name.partition(":")[2]}
    return next((op.where for op in record.ops if ids & set(op.inputs)), None)


def variables_of(model: Any) -> list[tuple[str, Any]]:
    """Return the variables of a model as `parameter:name` and `buffer:name`."""
    return [
        (f"{kind}:{name}", _compat.variable_inside(variable))
        for name, kind, variable in KerasModel(model).named_tensors()
    ]


def all_variables(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield all that a step reads and writes, but for metrics: variables, states of random numbers, the optimizer."""
    known = variables_of(model)
    yield from known
    seen = {id(variable) for _, variable in known}
    others = [variable for variable in model.variables if id(_compat.variable_inside(variable)) not in seen]
    yield from ((f"random:{variable.path}", variable) for variable in others)
    optimizer = model.optimizer
    yield from ((f"optimizer:{n}", variable) for n, variable in enumerate(optimizer.variables if optimizer else ()))


@contextmanager
def restored(model: Any, before: Mapping[str, Tensor]) -> Iterator[None]:
    """Give variables earlier values until the end of the block."""
    with scope():
        for name, variable in all_variables(model):
            if name in before:
                defer(variable.assign, tf.identity(_value(variable)))
                variable.assign(before[name])
        yield


def _value(variable: Any) -> Tensor:
    """Return the value of a variable without a copy; the next write to it makes one."""
    return tf.convert_to_tensor(_compat.variable_inside(variable))


def _state_name(variable: Any) -> str:
    return str(getattr(variable, "path", None) or variable.name).rpartition("/")[2]


def _as_tensor(x: Any) -> Any:
    return tf.convert_to_tensor(x) if isinstance(x, (np.ndarray, tf.Tensor)) else x


@tf.function(reduce_retracing=False)
def _are_finite(tensors: Sequence[Tensor]) -> Tensor:
    parts = [part for x in tensors for part in ((tf.math.real(x), tf.math.imag(x)) if x.dtype.is_complex else (x,))]
    return tf.reduce_all(tf.stack([tf.reduce_all(tf.math.is_finite(x)) for x in parts]))


def describe(model: Any) -> dict[str, Any]:
    return {
        name.partition(":")[2]: [name.partition(":")[0], list(v.shape), str(v.dtype)] for name, v in variables_of(model)
    }


class KerasWatchRuns(WatchBackend):
    """Watches and replays steps of Keras models."""

    name = "tensorflow"

    def watcher(self, model: Any, optimizer: Any, options: WatchOptions) -> Watcher:
        if not variables_of(model):
            raise FrameworkError(f"{type(model).__name__} has no variables, so there is no training to watch")
        return KerasWatcher(model, optimizer, options)

    def describe(self, model: Any) -> Mapping[str, Any]:
        return describe(model)

    def to_bytes(self, x: Any) -> tuple[str, tuple[int, ...], np.ndarray, Mapping[str, Any]]:
        if not isinstance(x, (tf.Tensor, tf.Variable)) or not (x.dtype.is_numpy_compatible and x.dtype != tf.string):
            raise TypeError(type(x).__name__)
        array = np.asarray(x)
        if array.dtype.hasobject:
            raise TypeError(type(x).__name__)
        return array.dtype.name, array.shape, np.frombuffer(array.tobytes(), np.uint8), {}

    def from_bytes(
        self, dtype: str, shape: tuple[int, ...], content: np.ndarray, properties: Mapping[str, Any]
    ) -> Tensor:
        kind = tf.as_dtype(dtype)
        return tf.constant(np.frombuffer(content.tobytes(), kind.as_numpy_dtype).reshape(shape), kind)

    def run(self, model: Any, captured: CapturedStep, loss: Callable[..., Any] | None) -> ReplayedRun:
        if model.optimizer is None:
            raise OptionError("the model is not compiled; call model.compile as in the run, so that its step can run")
        (data,), _ = captured.arguments
        _build_optimizer(model)
        with restored(model, captured.held):
            model.make_train_function()
            model.train_function(iter([data]))
            results = {
                name: tf.identity(_value(v)) for name, v in all_variables(model) if not name.startswith("random")
            }
        return ReplayedRun(results, partial(record_step, model, data, captured.held))


implementation = KerasWatchRuns()
