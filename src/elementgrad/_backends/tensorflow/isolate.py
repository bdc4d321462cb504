"""Runs the user's function without leaving a trace: variables, losses of layers and the global seed are restored.

While a function is isolated, the methods of variables that write are replaced by ones that first save the value.
"""

import os
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, cached_property, partial
from typing import Any

import tensorflow as tf

from elementgrad._backends.tensorflow._compat import (
    WRITES,
    BaseResourceVariable,
    ResourceVariable,
    context,
    global_seed,
    variable_dtype,
)
from elementgrad._cleanup import AttributePatch, Replace, assign, defer, push, scope


def snapshot() -> Callable[[], None]:
    """Return a function that restores the global seed as it is now."""
    return partial(_restore_seed, global_seed())


def _restore_seed(seed: Any) -> None:
    # Not by `tf.random.set_seed`, which would restart its sequence.
    context.context()._seed = seed


ASSIGNMENTS = ("assign", "assign_add", "assign_sub")
"""The methods of a variable that write to it and are its own. It makes its first value by their functions as well."""
LOSSES = ("add_loss", "_clear_losses")
"""The methods of a Keras layer that change the losses of its last call."""
Seeds = tuple[int, Any, Any]
"""The process, its global seed, and the state of what draws a seed for each operation."""


class _SavedVariables:
    """The values that variables had before they were first written to, and the losses that layers had."""

    def __init__(self) -> None:
        self.graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        self.values: dict[int, tuple[Any, Any]] = {}
        self.losses: dict[int, tuple[Any, list[Any], set[int]]] = {}

    def save(self, handle: Any, dtype: Any) -> None:
        if id(handle) not in self.values:
            with self._outside():
                value = tf.identity(tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype))
            self.values[id(handle)] = handle, value

    def save_losses(self, layer: Any) -> None:
        self.losses.setdefault(id(layer), (layer, list(layer._losses), set(layer._loss_ids)))

    def restore(self) -> None:
        with self._outside() if self.values else nullcontext():
            for handle, value in self.values.values():
                tf.raw_ops.AssignVariableOp(resource=handle, value=value)
        for layer, losses, ids in self.losses.values():
            layer._losses[:] = losses
            layer._loss_ids.clear()
            layer._loss_ids.update(ids)

    def _outside(self) -> Any:
        """Return the context of the caller's graph; the function itself may have entered another one."""
        return self.graph.as_default() if self.graph is not None else tf.init_scope()


class _IsolationState(threading.local):
    saved: tuple[_SavedVariables, ...] = ()


_local = _IsolationState()


def isolated() -> "IsolatedRun":
    """Return a `with` block that restores variables, and lets operations draw the seeds that they would have drawn."""
    return IsolatedRun()


class IsolatedRun(scope):
    """A block that leaves no trace. It is no generator, as every sweep has one."""

    __slots__ = ()

    def __enter__(self) -> None:
        super().__enter__()
        try:
            saved = _SavedVariables()
            defer(snapshot())
            defer(saved.restore)
            _writes.enter_for_verb()
            push(_local, "saved", saved)
        except BaseException:
            self.close()
            raise


@contextmanager
def without_log() -> Iterator[None]:
    """Turn off TensorFlow's log for what is only tried."""
    with scope():
        assign(tf.get_logger(), "disabled", True)
        yield


def seeds() -> Seeds | None:
    """Return what operations draw their seeds from, if the user set a global seed; others cannot be drawn again."""
    seed = global_seed()
    return None if seed is None else (os.getpid(), seed, context.context()._rng.getstate())


@contextmanager
def with_seeds(seeds: Seeds | None) -> Iterator[None]:
    """Draw seeds inside as another process did."""
    if seeds is None:
        yield
        return
    here, (process, seed, state) = context.context(), seeds
    with scope():
        assign(here, "_seed", seed)
        assign(here, "_rng", random.Random())
        here._rng.setstate(state)
        if process != os.getpid():
            here.clear_kernel_cache()  # cached kernels would go on from the seeds that they have drawn
        yield


class _DerivedSeeds:
    """Another sequence of seeds: the user's operations must not share seeds with those of an isolated run.

    It is made when the first is drawn, as few functions draw any.
    """

    def __init__(self, seeds: random.Random):
        self._seeds = seeds

    @cached_property
    def _derived(self) -> random.Random:
        ahead = random.Random()
        ahead.setstate(self._seeds.getstate())
        return random.Random(ahead.getrandbits(64) ^ 0x5EED)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._derived, name)


def _install(replace: Replace) -> None:
    # Functions are replaced where that will do: to replace an attribute of a class takes far longer.
    for owner in (BaseResourceVariable, ResourceVariable):
        for name in ASSIGNMENTS:
            if name in vars(owner):
                _wrap(replace, owner, name, _save_variable)
    for module, name in WRITES:
        _wrap(replace, module, name, _save_handle)
    # Of the one context, and not of its class: each change of a class has Python look up all its methods anew.
    _wrap(replace, context.context(), "call_function", _save_inputs)
    layer: Any = getattr(sys.modules.get("keras"), "Layer", None)
    if hasattr(layer, LOSSES[-1]):
        add, clear = LOSSES
        _wrap(replace, layer, add, _save_losses)
        replace(layer, clear, _clear_saved_losses(getattr(layer, clear)))
    seeds = getattr(context.context(), "_rng", None)
    if seeds is not None:
        replace(context.context(), "_rng", _DerivedSeeds(seeds))


def _wrap(replace: Replace, owner: Any, name: str, before: Callable[..., None]) -> None:
    replace(owner, name, _call_before(before, getattr(owner, name)))


@cache
def _call_before(before: Callable[..., None], original: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        before(*args, **kwargs)
        return original(*args, **kwargs)

    return wrapper


_writes = AttributePatch(_install)


def _save_variable(variable: Any, *_: Any, **__: Any) -> None:
    if _local.saved:
        _save(variable.handle, variable.dtype)


def _save_handle(*arguments: Any, **options: Any) -> None:
    if _local.saved:
        handle = next(iter((*arguments, *options.values())))  # by whatever name, it comes first
        dtype = variable_dtype(handle)
        if dtype is not None:
            _save(handle, dtype)


def _save(handle: Any, dtype: Any) -> None:
    for saved in _local.saved:
        saved.save(handle, dtype)


def _save_losses(layer: Any, *_: Any, **__: Any) -> None:
    for saved in _local.saved:
        saved.save_losses(layer)


@cache
def _clear_saved_losses(original: Callable[..., Any]) -> Callable[..., Any]:
    def clear_losses(layer: Any) -> None:
        if layer._losses or layer._loss_ids:
            _save_losses(layer)
        elif not layer._layers:
            # Each call of a model clears the losses of all its layers, most of which have none. To find that out here
            # takes a tenth of the time that Keras takes to clear nothing.
            return
        original(layer)

    return clear_losses


def _save_inputs(name: Any, inputs: Any, *_: Any, **__: Any) -> None:
    # A compiled function may write to any of the variables that it takes.
    for handle in inputs if _local.saved else ():
        if handle.dtype == tf.resource:
            dtype = variable_dtype(handle)
            if dtype is not None:
                _save(handle, dtype)
