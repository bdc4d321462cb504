"""One small package per framework, found by the type of the tensor given, among the frameworks already imported."""

import sys
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, TypeVar, cast

from elementgrad._backends.base import Backend
from elementgrad._cleanup import with_cleanup
from elementgrad.errors import FrameworkError

Function = TypeVar("Function", bound=Callable[..., Any])
_found: dict[type, Backend] = {}
_opaque: list[Callable[..., Any]] = []
_compilers: list[Callable[..., Any]] = []


def opaque_to_compiler(function: Function) -> Function:
    """Mark a function that compilers of Python code must run as one step instead of tracing through it."""
    _opaque.append(function)
    for keep in _compilers:
        keep(function)
    return function


def register_compiler(keep: Callable[..., Any]) -> None:
    """For a framework with such a compiler: have it keep every function marked `whole`, now or later."""
    _compilers.append(keep)
    for function in _opaque:
        keep(function)


def not_compiled(function: Function) -> Function:
    """Mark a verb that compilers of Python code must not look into: it runs as it stands, and leaves nothing behind."""
    return uncompiled(with_cleanup(function))


def uncompiled(function: Function) -> Function:
    """Mark a function that compilers of Python code must not look into."""

    @wraps(function)
    def outer(*arguments: Any, **options: Any) -> Any:
        compiler = _compiler()  # apart: a compiler cannot leave its work from inside a loop
        return (
            compiler.call_uncompiled(function, *arguments, **options) if compiler else function(*arguments, **options)
        )

    outer.autograph_info__ = None  # type: ignore[attr-defined]  # by this sign AutoGraph leaves a function alone
    return cast(Function, outer)


def backend_of(value: Any) -> Backend | None:
    """The backend whose tensor this is, or None if it is no tensor of a framework that is imported."""
    kind = type(value)
    backend = _found.get(kind)
    return backend if backend is not None else _search(kind)


def require_backend(value: Any) -> Backend:
    """The backend whose tensor this is; anything else is an error that says what fits."""
    backend = backend_of(value)
    if backend is None:
        raise FrameworkError(_not_a_tensor(value))
    return backend


def flatten_node(value: Any) -> tuple[Any, Any, Any] | None:
    """The keys and contents of a container that a framework knows, and a function that puts others in."""
    for backend in imported():
        found = backend.names.flatten_node(value)
        if found is not None:
            return found
    return None


def backend_of_model(function: Any) -> Backend | None:
    """The backend of which a function is a model; a Keras model that computes with another one is refused."""
    require_keras_on_tensorflow(function)
    return next((backend for backend in imported() if backend.names.is_model(function)), None)


def _compiler() -> Backend | None:
    """The backend that compiles Python code which is called from here."""
    for backend in imported():
        if backend.compiles_here():
            return backend
    return None


def _search(kind: type) -> Backend | None:
    for backend in imported():
        if backend.owns(kind):
            if backend.caches_type(kind):
                _found[kind] = backend
            return backend
    return None


def imported() -> Iterator[Backend]:
    """The backends of the frameworks imported so far. Plain import statements: `torch.compile` can trace no others."""
    if sys.modules.get("torch") is not None:
        from elementgrad._backends.torch.tensor import backend as torch_backend

        yield torch_backend
    if sys.modules.get("tensorflow") is not None:
        from elementgrad._backends.tensorflow.tensor import backend as tensorflow_backend

        yield tensorflow_backend
    if sys.modules.get("jax") is not None:
        from elementgrad._backends.jax.tensor import backend as jax_backend

        yield jax_backend


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
