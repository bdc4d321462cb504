"""The global seed of TensorFlow: every verb, and every run of a function in it, leaves it as it was.

Running the user's function without leaving a trace: whatever it writes to variables is written back.
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

from elementgrad._backends.monkeypatch import AttributePatch, Replace
from elementgrad._backends.tensorflow._compat import BaseResourceVariable, Context, ResourceVariable, context
from elementgrad._cleanup import assign, defer, push, scope


def snapshot() -> Callable[[], None]:
    """Note the seed; the undo that is returned puts it back."""
    return partial(restore, getattr(context.context(), "_seed", None))


def restore(seed: Any) -> None:
    """Put the seed back, and not by `tf.random.set_seed`, which would begin its sequence anew."""
    context.context()._seed = seed


WRITES = ("assign", "scatter_", "batch_scatter_", "_strided_slice_assign")
"""How the methods of a variable that change it begin."""
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
        """Where the caller stands: the function may itself have gone on into another graph."""
        return self.graph.as_default() if self.graph is not None else tf.init_scope()


class _IsolationState(threading.local):
    saved: tuple[_SavedVariables, ...] = ()


_local = _IsolationState()


@contextmanager
def undisturbed() -> Iterator[None]:
    """Afterwards variables hold what they held before, and operations draw the seeds that they would have drawn."""
    with scope():
        saved = _SavedVariables()
        defer(snapshot())
        defer(saved.restore)
        _watched.enter()
        push(_local, "saved", saved)
        yield


@contextmanager
def silenced() -> Iterator[None]:
    """Without what TensorFlow logs: of what is only tried the user need not hear."""
    with scope():
        assign(tf.get_logger(), "disabled", True)
        yield


def seeds() -> Seeds | None:
    """What operations draw their seeds from, where somebody has set one; nobody can draw the others again."""
    seed = getattr(context.context(), "_seed", None)
    return None if seed is None else (os.getpid(), seed, context.context()._rng.getstate())


@contextmanager
def seeded(drawn: Seeds | None) -> Iterator[None]:
    """Draw seeds as another process did."""
    if drawn is None:
        yield
        return
    here, (process, seed, state) = context.context(), drawn
    with scope():
        assign(here, "_seed", seed)
        assign(here, "_rng", random.Random())
        here._rng.setstate(state)
        if process != os.getpid():
            here.clear_kernel_cache()  # those that have drawn before would go on from there
        yield


def _apart(seeds: random.Random) -> random.Random:
    """Other seeds that follow from these: an operation that got one of theirs would draw on from where we left it."""
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
        replace(context.context(), "_rng", _apart(seeds))


def _wrap(replace: Replace, owner: Any, name: str, before: Callable[..., None]) -> None:
    original = getattr(owner, name)

    def watched(*arguments: Any, **options: Any) -> Any:
        before(*arguments, **options)
        return original(*arguments, **options)

    replace(owner, name, watched)


_watched = AttributePatch(_install)


def _save(handle: Any, dtype: Any) -> None:
    for saved in _local.saved:
        saved.save(handle, dtype)


def _save_losses(layer: Any) -> None:
    for saved in _local.saved:
        saved.save_losses(layer)


def _save_inputs(_: Any, name: Any, inputs: Any, *__: Any, **___: Any) -> None:
    """A compiled function may write to any of the variables that it is given."""
    for handle in inputs if _local.saved else ():
        if handle.dtype == tf.resource:
            data = getattr(handle, "_handle_data", None)
            if data is not None and data.is_set and len(data.shape_and_type) == 1:
                _save(handle, tf.as_dtype(data.shape_and_type[0].dtype))
