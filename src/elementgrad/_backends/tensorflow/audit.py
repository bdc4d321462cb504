"""The part of TensorFlow in `eg.audit`: which variables of a Keras model train, and a summary of the gradient of each.

A loss runs eagerly on a tape. A training step runs as it is: while it does, `tf.GradientTape.gradient` hands over what
it was asked for, and optimizers of Keras do nothing. Variables that it writes to are restored.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from elementgrad._audit.backend import (
    AuditBackend,
    AuditedParameter,
    GradientSummary,
    Sweep,
    follows_from_missing,
    result_of,
)
from elementgrad._backends.tensorflow import _compat
from elementgrad._backends.tensorflow.autodiff import run_functions_as_python
from elementgrad._backends.tensorflow.isolate import isolated
from elementgrad._backends.tensorflow.names import KerasModel
from elementgrad._backends.tensorflow.trace import is_user_rule
from elementgrad._backends.tensorflow.train.parameter import OWNER
from elementgrad._cleanup import AttributePatch, Replace, assign, safe_context, scope
from elementgrad._place.place import Place
from elementgrad._train.trainer import ElementGroup, PartialParameter
from elementgrad.errors import FrameworkError, OptionError

Tensor = Any


class TensorflowAudit(AuditBackend):
    """Audits Keras models."""

    def parameters(self, model: KerasModel) -> list[AuditedParameter]:  # type: ignore[override]
        if not getattr(model.function, "built", True):
            raise FrameworkError("the model is not built and has no variables yet; call it once, and then audit it")
        found = []
        for name, kind, variable in model._variables():
            owner = getattr(variable, OWNER, None)
            if kind != "parameter" or not tf.as_dtype(variable.dtype).is_floating or isinstance(owner, ElementGroup):
                continue
            if isinstance(owner, PartialParameter):
                found += [
                    _make_parameter(str(group.place), group.leaf, _freeze_reason(group.leaf), result_of(name))
                    for group in owner.groups
                ]
                found.append(_make_parameter(name, variable, "elements that do not train"))
            else:
                found.append(_make_parameter(name, variable, _freeze_reason(variable)))
        return found

    def summarize_loss(
        self,
        model: KerasModel,  # type: ignore[override]
        parameters: Sequence[AuditedParameter],
        loss: Callable[[Any], Tensor],
    ) -> Sweep:
        _require_eager()
        variables = [each.tensor for each in parameters]
        with isolated(), run_functions_as_python(), _RuleCalls() as rules:
            tape = tf.GradientTape(watch_accessed_variables=False)
            with safe_context(tape):
                for variable in variables:
                    tape.watch(variable)
                value = tf.convert_to_tensor(loss(model.function))
            gradients = tape.gradient(value, variables)
        pairs = zip(parameters, gradients, strict=True)
        summaries = {each.name: _summarize(gradient) for each, gradient in pairs if gradient is not None}
        return Sweep(summaries, rules.seen, _is_finite(value))

    def summarize_step(
        self,
        model: KerasModel,  # type: ignore[override]
        parameters: Sequence[AuditedParameter],
        step: Callable[[], Any],
    ) -> Sweep | None:
        _require_eager()
        names = {id(each.tensor): each.name for each in parameters}
        summaries: dict[str, GradientSummary] = {}
        with isolated(), run_functions_as_python(), _RuleCalls() as rules, _TapeCalls(compute=True) as calls:
            ended_by = None
            try:
                step()
            except Exception as error:
                if not calls.missing or not follows_from_missing(error, "tensorflow"):
                    raise
                ended_by = error
        for source, gradient in calls.gradients:
            name = names.get(id(_compat.variable_inside(source)))
            if name is not None and gradient is not None:
                summary = _summarize(gradient)
                summaries[name] = summary if name not in summaries else summaries[name].union(summary)
        finite = all(map(_is_finite, calls.targets))
        return Sweep(summaries, rules.seen, finite, ended_by) if calls.targets else None

    def loss_of_step(self, model: KerasModel, step: Callable[[], Any]) -> Callable[[], Tensor]:  # type: ignore[override]
        return partial(_loss_of, step)

    @contextmanager
    def undoing_steps(self, model: KerasModel) -> Iterator[None]:  # type: ignore[override]
        with isolated(), _TapeCalls(compute=True):
            yield


implementation = TensorflowAudit()


def _require_eager() -> None:
    if not tf.executing_eagerly():
        raise FrameworkError("eg.audit inside tf.function, where there are no numbers yet; call it outside")


def _make_parameter(name: str, variable: Any, frozen: str | None, place: Place | None = None) -> AuditedParameter:
    value = _compat.variable_inside(variable)
    return AuditedParameter(name, value, tuple(value.shape), tf.as_dtype(value.dtype).name, frozen, place)


def _freeze_reason(variable: Any) -> str | None:
    return None if variable.trainable else "trainable=False"


def _is_finite(loss: Tensor) -> bool:
    return bool(tf.reduce_all(tf.math.is_finite(loss)))


def _summarize(gradient: Any) -> GradientSummary:
    is_lookup = isinstance(gradient, tf.IndexedSlices)
    values = tf.convert_to_tensor(gradient)
    sizes = np.abs(values.numpy().astype(np.float32) if values.dtype.size < 4 else values.numpy())
    if not sizes.size:
        return GradientSummary(1.0)
    sizes = sizes.reshape(sizes.shape or (1,))
    # A layer's units are along the last axis, and its inputs along the one before; rows of a table along the first.
    axes = (0,) if is_lookup else dict.fromkeys([sizes.ndim - 1, max(0, sizes.ndim - 2)])
    slices = {axis: sizes.max(tuple([n for n in range(sizes.ndim) if n != axis])).astype(np.float64) for axis in axes}
    return GradientSummary(float(np.max(sizes)), slices, is_lookup)


class _TapeCalls(scope):
    """The calls of `GradientTape.gradient` in a step."""

    def __init__(self, compute: bool):
        self.compute = compute
        self.targets: list[Tensor] = []
        self.gradients: list[tuple[Any, Any]] = []

    @property
    def missing(self) -> bool:
        """True if a gradient was None."""
        return any(gradient is None for _, gradient in self.gradients)

    def __enter__(self) -> "_TapeCalls":
        super().__enter__()
        _patch.enter()
        assign(_local, "calls", self)
        return self

    def gradient(
        self, original: Callable[..., Any], tape: Any, target: Any, sources: Any, *args: Any, **kw: Any
    ) -> Any:
        """Ask a tape for the user, or only note what it is asked for."""
        self.targets += [tf.convert_to_tensor(y) for y in tf.nest.flatten(target)]
        results = original(tape, target, sources, *args, **kw) if self.compute else None
        flat = tf.nest.flatten(sources)
        results = tf.nest.map_structure(lambda _: None, sources) if results is None else results
        self.gradients += zip(flat, tf.nest.flatten(results), strict=True)
        return results


class _RuleCalls(scope):
    """Notes whether tapes are handed a derivative that the user wrote."""

    seen = False

    def __enter__(self) -> "_RuleCalls":
        super().__enter__()
        _rule_patch.enter()
        assign(_local, "rules", self)
        return self


class _CallState(threading.local):
    calls: _TapeCalls | None = None
    rules: _RuleCalls | None = None


_local = _CallState()


def _install(replace: Replace) -> None:
    gradient = tf.GradientTape.gradient

    def ask(tape: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        calls = _local.calls
        if calls is None:
            return gradient(tape, target, sources, *args, **kwargs)
        return calls.gradient(gradient, tape, target, sources, *args, **kwargs)

    replace(tf.GradientTape, "gradient", ask)
    for name in ("apply", "apply_gradients"):
        replace(keras.optimizers.Optimizer, name, _unless_called(getattr(keras.optimizers.Optimizer, name)))


def _unless_called(method: Callable[..., Any]) -> Callable[..., Any]:
    def apply(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs) if _local.calls is None else None

    return apply


def _install_rules(replace: Replace) -> None:
    for name in ("record_operation", "record_operation_backprop_only"):
        replace(_compat.record, name, _noting_rules(getattr(_compat.record, name)))


def _noting_rules(original: Callable[..., Any]) -> Callable[..., Any]:
    def record(op_type: Any, outputs: Any, inputs: Any, backward: Any, *args: Any, **kwargs: Any) -> Any:
        rules = _local.rules
        if rules is not None:
            rules.seen = rules.seen or is_user_rule(backward)
        return original(op_type, outputs, inputs, backward, *args, **kwargs)

    return record


_patch = AttributePatch(_install)
_rule_patch = AttributePatch(_install_rules)


def _loss_of(step: Callable[[], Any]) -> Tensor:
    """Run a step up to its end, and return the sum of what it asks its tapes about."""
    with _TapeCalls(compute=False) as calls:
        try:
            step()
        except Exception:  # without gradients it may refuse to go on
            if not calls.targets:
                raise
    if not calls.targets:
        raise OptionError("the step asked no tape when it ran again; let it do the same each time")
    losses = [tf.reduce_sum(target) for target in calls.targets]
    return losses[0] if len(losses) == 1 else tf.add_n(losses)
