"""One small package per framework, found by the type of the tensor given, among the frameworks already imported."""

import inspect
import sys
from collections.abc import Callable, Iterator
from functools import wraps
from types import ModuleType
from typing import Any, TypeVar, cast

from elementgrad.backends.protocol import Backend
from elementgrad.cleanup import guarded
from elementgrad.errors import FrameworkError

__all__ = ["Backend", "eager", "find", "holder", "on_whole", "opened", "owner", "plain", "whole"]

Function = TypeVar("Function", bound=Callable[..., Any])
_found: dict[type, Backend] = {}
_whole: list[Callable[..., Any]] = []
_compilers: list[Callable[..., Any]] = []


def whole(function: Function) -> Function:
    """Mark a function that compilers of Python code must run as one step instead of tracing through it."""
    _whole.append(function)
    for keep in _compilers:
        keep(function)
    return function


def on_whole(keep: Callable[..., Any]) -> None:
    """For a framework with such a compiler: have it keep every function marked `whole`, now or later."""
    _compilers.append(keep)
    for function in _whole:
        keep(function)


def plain(function: Function) -> Function:
    """Mark a verb that compilers of Python code must not look into: it runs as it stands, and leaves nothing behind."""
    return uncompiled(guarded(function))


def uncompiled(function: Function) -> Function:
    """Mark a function that compilers of Python code must not look into."""

    @wraps(function)
    def outer(*arguments: Any, **options: Any) -> Any:
        compiler = _compiler()  # apart: a compiler cannot leave its work from inside a loop
        return compiler.uncompiled(function, *arguments, **options) if compiler else function(*arguments, **options)

    outer.autograph_info__ = None  # type: ignore[attr-defined]  # by this sign AutoGraph leaves a function alone
    return cast(Function, outer)


def owner(value: Any) -> Backend | None:
    """The backend whose tensor this is, or None if it is no tensor of a framework that is imported."""
    kind = type(value)
    backend = _found.get(kind)
    return backend if backend is not None else _search(kind)


def find(value: Any) -> Backend:
    """The backend whose tensor this is; anything else is an error that says what fits."""
    backend = owner(value)
    if backend is None:
        raise FrameworkError(_not_a_tensor(value))
    return backend


def opened(value: Any) -> tuple[Any, Any, Any] | None:
    """The keys and contents of a container that a framework knows, and a function that puts others in."""
    for backend in _imported():
        found = backend.opened(value)
        if found is not None:
            return found
    return None


def holder(function: Any) -> Backend | None:
    """The backend of which a function is a model; a Keras model that computes with another one is refused."""
    require_keras_on_tensorflow(function)
    return _holder(function)


def _holder(function: Any) -> Backend | None:
    for backend in _imported():
        if backend.models(function):
            return backend
    return None


def eager(function: Any, wrt: Any = None) -> Backend:
    """The framework that can watch a step which nobody gives tensors to: that of the tensor asked about, or of what
    the step mentions, or the first imported."""
    if wrt is not None:
        return find(wrt)
    able = [backend for backend in _imported() if type(backend).step is not Backend.step]
    if not able:
        raise FrameworkError(
            "a step without arguments can be watched on PyTorch and TensorFlow; give a function and its arguments"
        )
    for value in _mentioned(function) if len(able) > 1 else ():
        package = value.__name__.partition(".")[0] if isinstance(value, ModuleType) else None
        named = "tensorflow" if package == "keras" else package
        for backend in able:
            if named == backend.name or owner(value) is backend or _holder(value) is backend:
                return backend
    return able[0]


def _mentioned(function: Any) -> list[Any]:
    """The values of the names that a function uses and does not define."""
    try:
        found = inspect.getclosurevars(inspect.unwrap(getattr(function, "python_function", function)))
    except (TypeError, ValueError):  # it is not written in Python, or uses a name that has no value yet
        return []
    return [*found.nonlocals.values(), *found.globals.values()]


def _compiler() -> Backend | None:
    """The backend that compiles Python code which is called from here."""
    for backend in _imported():
        if backend.compiles():
            return backend
    return None


def _search(kind: type) -> Backend | None:
    for backend in _imported():
        if backend.owns(kind):
            if backend.remembers(kind):
                _found[kind] = backend
            return backend
    return None


def _imported() -> Iterator[Backend]:
    """The backends of the frameworks imported so far. Plain import statements: `torch.compile` can trace no others."""
    if sys.modules.get("torch") is not None:
        import elementgrad.backends.torch

        yield elementgrad.backends.torch.backend
    if sys.modules.get("tensorflow") is not None:
        import elementgrad.backends.tensorflow

        yield elementgrad.backends.tensorflow.backend
    if sys.modules.get("jax") is not None:
        import elementgrad.backends.jax

        yield elementgrad.backends.jax.backend


def require_keras_on_tensorflow(function: Any) -> None:
    """Refuse a Keras model on another backend, whose layers do not read their variables from where they are kept.

    On PyTorch such a model is a module whose parameters bear other names and are not those that it computes with, so
    that derivatives by them would be missing, and elements of them would not train.
    """
    keras = sys.modules.get("keras")
    layer = getattr(keras, "Layer", None)
    if keras is None or layer is None:
        return
    model = function if isinstance(function, layer) else getattr(function, "__self__", None)
    if isinstance(model, layer) and (backend := keras.backend.backend()) != "tensorflow":
        raise FrameworkError(
            f"{type(model).__name__} is a Keras model on the {backend} backend, and only Keras on TensorFlow is "
            "supported; set KERAS_BACKEND=tensorflow before Keras is imported, or read derivatives with respect to its "
            "inputs by giving a function, such as lambda x: model(x)"
        )


def _not_a_tensor(value: Any) -> str:
    kind = type(value)
    given = "a NumPy array carries no gradients" if kind.__module__ == "numpy" else f"{kind.__name__} is not a tensor"
    return (
        f"{given}; give a torch.Tensor, tf.Tensor, tf.Variable or jax.Array "
        "(torch.as_tensor(x), tf.convert_to_tensor(x) or jnp.asarray(x) make one)"
    )
