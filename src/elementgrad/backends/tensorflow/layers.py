"""Keras layers whose results pass by somebody: classes have another way of being called while somebody watches."""

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

from elementgrad.backends.tensorflow.patch import Patch, Replace

Layer = Any
Result = Any
Watch = Callable[[Layer, Result], Result]
"""What goes on in the place of the result of a layer."""
_patches: dict[tuple[type, str], Patch] = {}


class _Local(threading.local):
    def __init__(self) -> None:
        self.watches: list[Watch | None] = []
        self.called: list[Layer] = []
        self.trials = 0


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
    with ExitStack() as stack:
        if kind() is not None:
            stack.enter_context(_steps.on())
        for owner, name in owners:
            stack.enter_context(_patches.setdefault((owner, name), Patch(_installer(owner, name))).on())
        _local.watches.append(watch)
        stack.callback(_local.watches.pop)
        yield


def computing() -> bool:
    """Whether what layers give is used, and they do not run just for Keras to find out a shape."""
    scopes = sys.modules.get("keras.src.backend.common.symbolic_scope")
    return not _local.trials and not (scopes is not None and scopes.in_symbolic_scope())


def _owner(kind: type, name: str) -> type:
    """The class whose method is that of a kind of layer."""
    return next(owner for owner in kind.__mro__ if name in vars(owner))


def _installer(owner: type, name: str) -> Callable[[Replace], None]:
    """Replace a method by which a layer is called: from outside, or by another layer that takes a short cut."""

    def install(replace: Replace) -> None:
        original: Any = vars(owner)[name]

        @wraps(original)
        def call(layer: Layer, *args: Any, **kwargs: Any) -> Result:
            watch = _local.watches[-1] if _local.watches else None
            # One call has one result, also where `__call__` calls `call` and both call those of a base.
            inner = name == "call" and bool(_local.called) and _local.called[-1] is layer
            if watch is None or inner or _owner(type(layer), name) is not owner:
                return original(layer, *args, **kwargs)
            _local.called.append(layer)
            try:
                result = original(layer, *args, **kwargs)
            finally:
                _local.called.pop()
            return watch(layer, result) if computing() else result

        call.autograph_info__ = None  # type: ignore[attr-defined]  # by this sign AutoGraph leaves a function alone
        replace(owner, name, call)

    return install


def _install_steps(replace: Replace) -> None:
    """A loop over time steps that is not unrolled runs the first step once before, for its shape."""
    backend = sys.modules["keras.src.backend"]
    original = backend.rnn

    @wraps(original)
    def rnn(step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        first = iter([not kwargs.get("unroll")])

        def counted(*inputs: Any) -> Any:
            trial = next(first, False)
            _local.trials += trial
            try:
                return step(*inputs)
            finally:
                _local.trials -= trial

        return original(counted, *args, **kwargs)

    rnn.autograph_info__ = None  # type: ignore[attr-defined]
    replace(backend, "rnn", rnn)


_steps = Patch(_install_steps)
