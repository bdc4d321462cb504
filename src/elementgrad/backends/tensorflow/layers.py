"""Keras layers whose results pass by somebody: classes have another way of being called while somebody watches."""

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

from elementgrad.backends.patch import Patch, Replace
from elementgrad.cleanup import assign, push, scope

Layer = Any
Result = Any
Watch = Callable[[Layer, Result], Result]
"""What goes on in the place of the result of a layer."""


@dataclass(eq=False)
class _Watching:
    """Somebody who watches, or who has what is inside not watched."""

    watch: Watch | None


class _Local(threading.local):
    watches: tuple[_Watching, ...] = ()
    called: tuple[Layer, ...] = ()
    trials: int = 0


_local = _Local()


def kind() -> type | None:
    """The base of all layers, if Keras is imported and computes with TensorFlow."""
    keras = sys.modules.get("keras")
    layer = getattr(keras, "Layer", None)
    return layer if keras is not None and layer is not None and keras.backend.backend() == "tensorflow" else None


@contextmanager
def watched(layers: Iterable[Layer], watch: Watch | None) -> Iterator[None]:
    """Have what these layers give pass by in this thread, in place of whoever watched before."""
    kinds = {type(layer) for layer in layers}
    owners = {(_owner(kind, name), name) for kind in kinds for name in ("__call__", "call")}
    with scope():
        if kind() is not None:
            _steps.enter()
        for owner, name in owners:
            _methods.enter(owner, name)
        push(_local, "watches", _Watching(watch))
        yield


@contextmanager
def entered() -> Iterator[None]:
    """Have it known in this thread which layers are being called, and change nothing."""
    base = kind()
    if base is None:
        yield
        return
    with scope():
        _methods.enter(base, "__call__")
        push(_local, "watches", _Watching(lambda _, result: result))
        yield


def calling() -> list[Layer]:
    """The layers that are being called, outermost first, as far as somebody watches."""
    return list(_local.called)


def computing() -> bool:
    """Whether what layers give is used, and they do not run just for Keras to find out a shape."""
    scopes = sys.modules.get("keras.src.backend.common.symbolic_scope")
    return not _local.trials and not (scopes is not None and scopes.in_symbolic_scope())


def _owner(kind: type, name: str) -> type:
    """The class whose method is that of a kind of layer."""
    return next(owner for owner in kind.__mro__ if name in vars(owner))


def _install_method(replace: Replace, owner: type, name: str) -> None:
    """Replace a method by which a layer is called: from outside, or by another layer that takes a short cut."""
    original: Any = vars(owner)[name]

    def call(layer: Layer, *args: Any, **kwargs: Any) -> Result:
        method = _bound(original, layer, type(layer))
        watch = _local.watches[-1].watch if _local.watches else None
        # One call has one result, also where `__call__` calls `call` and both call those of a base.
        inner = name == "call" and bool(_local.called) and _local.called[-1] is layer
        if watch is None or inner or _owner(type(layer), name) is not owner:
            return method(*args, **kwargs)
        with scope():
            assign(_local, "called", (*_local.called, layer))
            result = method(*args, **kwargs)
        return watch(layer, result) if computing() else result

    call.autograph_info__ = None  # type: ignore[attr-defined]  # by this sign AutoGraph leaves a function alone
    bare = isinstance(original, (staticmethod, classmethod)) or not hasattr(original, "__get__")
    replace(owner, name, _Bare(original, call) if bare else wraps(original)(call))


_methods = Patch(_install_method)


class _Bare:
    """Stands in for a method that does not take the layer: called on one, it knows of which."""

    def __init__(self, original: Any, call: Callable[..., Result]):
        self._original = original
        self._call = call

    def __get__(self, layer: Layer | None, kind: type) -> Any:
        method = _bound(self._original, layer, kind)
        return method if layer is None else wraps(method)(partial(self._call, layer))


def _bound(original: Any, layer: Layer | None, kind: type) -> Any:
    """What stands in a class, as it is found on a layer: any callable may stand there."""
    return original.__get__(layer, kind) if hasattr(original, "__get__") else original


def _install_steps(replace: Replace) -> None:
    """A loop over time steps that is not unrolled runs the first step once before, for its shape."""
    backend = sys.modules["keras.src.backend"]
    original = backend.rnn

    @wraps(original)
    def rnn(step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        first = iter([not kwargs.get("unroll")])

        def counted(*inputs: Any) -> Any:
            with scope():
                assign(_local, "trials", _local.trials + next(first, False))
                return step(*inputs)

        return original(counted, *args, **kwargs)

    rnn.autograph_info__ = None  # type: ignore[attr-defined]
    replace(backend, "rnn", rnn)


_steps = Patch(_install_steps)
