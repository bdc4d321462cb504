"""`eg.watch` in Keras: look at the variables and the loss after each step of `fit`.

Keras compiles forward, backward and update into one function, which stays as it is. The values of all variables are
kept by reference before each step: TensorFlow copies a variable on its next write while its value is referred to. So
nothing is lost when a step turns out to be bad, and forward, loss and gradients can be run again, one operation at a
time.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from elementgrad._backends.tensorflow import _compat, audit
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
from elementgrad._watch.elements import BadElement, find_nonfinite, largest_element, positions_of
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
        self._rules: dict[str, tuple[GradientTap, Place, Rule]] = {}
        self._taps: list[GradientTap] = []
        self._ready = False
        """True once the variables are known, from which a step can be run again."""

    def start(self) -> None:
        model = self._model
        if is_built(model):
            self._prepare()
        if model.train_function is None:
            model.make_train_function()
        defer(_restore_function, model, model.train_function)
        if self._options.rules:
            optimizers = optimizers_of(model)
            if not optimizers:
                raise OptionError("the model has no optimizer, so that rules see no gradients; compile it with one")
            for optimizer in optimizers:
                defer(vars(optimizer).pop, "apply", None)
                object.__setattr__(optimizer, "apply", partial(_apply, optimizer.apply, optimizer, self._taps))
            model.make_train_function(force=True)
        model.train_function = partial(self.run, model.train_function)

    def _prepare(self) -> None:
        """Make what needs the variables of the model: the optimizer's own, and those of the rules."""
        require_variables(self._model)
        build_optimizer(self._model)
        known = {name.partition(":")[2]: v for name, v in variables_of(self._model) if name.startswith("parameter:")}
        taps: dict[str, GradientTap] = {}
        for text, (place, rule) in self._options.rules.items():
            name = str(place.name)
            if name not in known:
                raise PlaceError(f"no parameter is named {name!r}; {nearest(name, list(known))}")
            if place.index:
                place.select(tuple(known[name].shape))
            tap = taps.setdefault(name, GradientTap(known[name]))
            self._rules[text] = tap, place, rule
        self._taps += taps.values()
        self._ready = True

    def _build(self, data: Any) -> None:
        """Make the variables of a model that gets them in its first step, as Keras does it for other backends."""
        if type(self._model).call is not keras.Model.call:  # one that cannot be called is built by its own step alone
            with suppress(Exception):
                _compat.build_symbolically(self._model, pytree.map_tree(data, _as_tensor))
        if is_built(self._model):
            self._prepare()

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
            if not self._ready:
                self._build(data)
            if self._ready:
                before = {name: _value(variable) for name, variable in all_variables(self._model)}
                logs = original(iter([data]))
                self._look(data, before, logs)
            else:
                logs = original(iter([data]))
                self._prepare()
                self._look_at_built()
            self._step += 1
        return logs

    def _look_at_built(self) -> None:
        """Look at the variables after the step that made them, which cannot run again."""
        named = [(name.partition(":")[2], _value(v)) for name, v in variables_of(self._model)]
        bad = find_nonfinite(named, NUMBERS)
        if bad is not None:
            evidence = ["the model got its variables in this step, which cannot run again; build it before fit"]
            self._options.stop(Hit(f"{bad} after the step", self._step, place=bad.place, evidence=evidence))

    @with_cleanup
    def _look(self, data: Any, before: Values, logs: Any) -> None:
        after = {name: _value(v) for name, v in variables_of(self._model) if name.startswith("parameter:")}
        floats = [x for x in after.values() if is_differentiable(x)]
        loss = logs.get("loss") if isinstance(logs, dict) else None
        watched = floats + ([] if loss is None else [tf.convert_to_tensor(loss)])
        captured = partial(self._capture, data, before)
        if watched and not bool(_are_finite(watched)):
            record = partial(record_step, self._model, data, before)
            bad = find_nonfinite([(name.partition(":")[2], x) for name, x in after.items()], NUMBERS)
            if bad is None:
                self._options.stop(Hit("the loss is not finite", self._step, 0, record, captured))
            else:
                tripped = f"{bad} after the step"
                update = self._made_by_update(bad, tripped, before, captured)
                self._options.stop(Hit(tripped, self._step, 0, record, captured, otherwise=update))
        self._judge_rules(data, before)

    def _made_by_update(
        self, bad: BadElement, tripped: str, before: Values, captured: Callable[[], CapturedStep]
    ) -> Hit:
        """Return the hit that blames the optimizer, with its state of the element."""
        variables = dict(all_variables(self._model))
        shape = tuple(before[f"parameter:{bad.name}"].shape)
        slots = [(name, x) for name, x in before.items() if name.startswith("optimizer:") and tuple(x.shape) == shape]
        return Hit(
            tripped,
            self._step,
            captured=captured,
            cause="update",
            place=bad.place,
            value=bad.value,
            module=bad.name.rpartition("/")[0],
            state={_state_name(variables[name]): float(np.asarray(x)[bad.index]) for name, x in slots},
        )

    def _judge_rules(self, data: Any, before: Values) -> None:
        taken = {id(tap) for tap, _, _ in self._rules.values() if bool(tap.taken)}
        for text, (tap, place, rule) in self._rules.items():
            if id(tap) not in taken:
                continue
            tap.taken.assign(False)
            g = tap.gradient.value()
            picked = tf.gather(tf.reshape(g, [-1]), positions_of(place, tuple(g.shape))) if place.index else g
            if not rule(picked):
                continue
            where, number = largest_element(str(place.name), place, NUMBERS.array(g))
            hit = Hit(
                f"the gradient of {text} is such that its rule is true",
                self._step,
                captured=partial(self._capture, data, before),
                cause="rule",
                place=where,
                value=number,
                where=_line_of(self._model, data, before, str(place.name)),
                module=str(place.name).rpartition("/")[0],
            )
            self._options.stop(hit)

    def _capture(self, data: Any, before: Values) -> CapturedStep:
        results = {name: _value(v) for name, v in all_variables(self._model) if not name.startswith("random:")}
        return CapturedStep(
            describe(self._model), ((data,), {}), before, results=results, settings={"tensorflow": tf.__version__}
        )


class GradientTap:
    """The gradient of a variable, which the optimizer writes here at each step that it takes."""

    def __init__(self, variable: Any):
        self.variable = variable
        self.gradient = tf.Variable(tf.zeros(variable.shape, variable.dtype), trainable=False)
        self.taken = tf.Variable(False, trainable=False)

    def see(self, gradient: Any, factor: Tensor, taken: Tensor) -> None:
        """Keep a gradient without the factor of the loss."""
        dense = tf.convert_to_tensor(gradient)
        self.gradient.assign(dense / tf.cast(factor, dense.dtype))
        self.taken.assign(taken)


def _apply(
    original: Callable[..., Any],
    optimizer: Any,
    taps: Sequence[GradientTap],
    grads: Any,
    trainable_variables: Any = None,
) -> Any:
    """Apply gradients for the user, and show them to taps; all ways to step an optimizer of Keras end here."""
    grads = list(grads)
    variables = _compat.trained_variables(optimizer) if trainable_variables is None else list(trainable_variables)
    gradients = {id(_compat.variable_inside(v)): g for g, v in zip(grads, variables, strict=False) if g is not None}
    taken, factor = _takes_step(optimizer, list(gradients.values())), optimizer.scale_loss(tf.ones([]))
    for tap in taps:
        if id(tap.variable) in gradients:
            tap.see(gradients[id(tap.variable)], factor, taken)
    return original(grads, trainable_variables if trainable_variables is None else variables)


def _takes_step(optimizer: Any, gradients: Sequence[Any]) -> Tensor:
    """Return False if an optimizer skips the step, since scaled gradients are not finite."""
    if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return tf.constant(True)
    parts = [g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients]
    return tf.reduce_all([tf.reduce_all(tf.math.is_finite(g)) for g in parts])


def optimizers_of(model: Any) -> list[Any]:
    """Return the optimizer that a model is compiled with, and those that it has as attributes, as a GAN does."""
    found = [model.optimizer, *vars(model).values()]
    return list({id(each): each for each in found if isinstance(each, keras.optimizers.Optimizer)}.values())


def is_built(model: Any) -> bool:
    """Return True if a model has its variables; one of several models, as a GAN is, may never be called itself."""
    return bool(variables_of(model)) and (model.built or _has_built_layers(model))


def _has_built_layers(model: Any) -> bool:
    return all(layer.built for layer in model.layers)


def require_variables(model: Any) -> None:
    if not variables_of(model):
        raise FrameworkError(f"{type(model).__name__} has no variables, so there is no training to watch")


def build_optimizer(model: Any) -> None:
    """Make the optimizer's variables, as its first step would: what a step starts from is kept."""
    if model.optimizer is not None and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)


def _restore_function(model: Any, original: Any) -> None:
    model.train_function = original


def record_step(model: Any, data: Any, before: Mapping[str, Tensor]) -> StepRecord:
    """Run the forward and the loss of a step again from earlier values, with every operation recorded.

    Of a `train_step` that the user wrote, that is all up to where it asks for gradients.
    """
    recorder = TensorflowOpRecorder(KerasModel(model), record_step.__code__)
    tape = tf.GradientTape(persistent=True)
    with restored(model, before), isolated():
        data = pytree.map_tree(data, _as_tensor)
        x, y, sample_weight = _unpack(data)
        enter(tape)
        parts = zip(DATA, (x, y, sample_weight), strict=True)
        named = [leaf for name, part in parts for leaf in pytree.named_leaves(part, name)]
        inputs = [(name, leaf) for name, leaf in named if isinstance(leaf, tf.Tensor)]
        ids = [recorder.value_id(leaf) for _, leaf in inputs]
        with run_functions_as_python(), recorder.record_thread():
            if type(model).train_step is not keras.Model.train_step:
                step, y_pred = partial(model.train_step, data), None
                loss = audit.implementation.loss_of_step(KerasModel(model), step)()
            else:
                y_pred = model(x, training=True) if _compat.takes_training(model) else model(x)
                compute = _compat.compute_loss_of(model)
                loss = compute(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=True)
            loss = tf.convert_to_tensor(loss)
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
    ids = {value.id for value in record.held if value.name == name}
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
    for number, optimizer in enumerate(optimizers_of(model)):
        yield from ((f"optimizer:{number}.{n}", variable) for n, variable in enumerate(optimizer.variables))


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
        if model.built and _has_built_layers(model):
            require_variables(model)
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
        if not optimizers_of(model):
            raise OptionError("the model is not compiled; call model.compile as in the run, so that its step can run")
        (data,), _ = captured.arguments
        build_optimizer(model)
        with restored(model, captured.held):
            model.make_train_function()
            model.train_function(iter([data]))
            results = {
                name: tf.identity(_value(v)) for name, v in all_variables(model) if not name.startswith("random")
            }
        return ReplayedRun(results, partial(record_step, model, data, captured.held))


implementation = KerasWatchRuns()
