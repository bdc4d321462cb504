"""Runs the user's function without leaving a trace: variables, losses of layers and the global seed are restored.

While a function is isolated, the methods of variables that write are replaced by ones that first save the value.
"""

import os
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import tensorflow as tf

from elementgrad._backends.tensorflow._compat import (
    BaseResourceVariable,
    Context,
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


WRITES = ("assign", "scatter_", "batch_scatter_", "_strided_slice_assign")
"""The start of the names of a variable's methods that write to it."""
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
        with self._outside():
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


@contextmanager
def isolated() -> Iterator[None]:
    """Restore variables afterwards, and let operations draw the seeds that they would have drawn."""
    with scope():
        saved = _SavedVariables()
        defer(snapshot())
        defer(saved.restore)
        _writes.enter()
        push(_local, "saved", saved)
        yield


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


def _derived_seeds(seeds: random.Random) -> random.Random:
    """Return another sequence of seeds: the user's operations must not share seeds with those of an isolated run."""
    ahead = random.Random()
    ahead.setstate(seeds.getstate())
    return random.Random(ahead.getrandbits(64) ^ 0x5EED)


def _install(replace: Replace) -> None:
    for owner in (BaseResourceVariable, ResourceVariable):
        for name in [name for name in vars(owner) if name.startswith(WRITES)]:
            _wrap(replace, owner, name, lambda variable, *_, **__: _save(variable.handle, variable.dtype))
    skip = "_skip_single_var"
    _wrap(replace, tf.random.Generator, skip, lambda _, variable, *__: _save(variable.handle, variable.dtype))
    _wrap(replace, Context, "call_function", _save_inputs)
    layer = getattr(sys.modules.get("keras"), "Layer", None)
    for name in LOSSES if hasattr(layer, LOSSES[-1]) else ():
        _wrap(replace, layer, name, lambda layer, *_, **__: _save_losses(layer))
    seeds = getattr(context.context(), "_rng", None)
    if seeds is not None:
        replace(context.context(), "_rng", _derived_seeds(seeds))


def _wrap(replace: Replace, owner: Any, name: str, before: Callable[..., None]) -> None:
    original = getattr(owner, name)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        before(*args, **kwargs)
        return original(*args, **kwargs)

    replace(owner, name, wrapper)


_writes = AttributePatch(_install)


def _save(handle: Any, dtype: Any) -> None:
    for saved in _local.saved:
        saved.save(handle, dtype)


def _save_losses(layer: Any) -> None:
    for saved in _local.saved:
        saved.save_losses(layer)


def _save_inputs(_: Any, name: Any, inputs: Any, *__: Any, **___: Any) -> None:
    # A compiled function may write to any of the variables that it takes.
    for handle in inputs if _local.saved else ():
        if handle.dtype == tf.resource:
            dtype = variable_dtype(handle)
            if dtype is not None:
                _save(handle, dtype)
