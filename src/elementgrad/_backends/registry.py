"""Finds the backend of a tensor or model, among the frameworks that are already imported."""

import sys
from collections.abc import Callable, Iterator
from functools import wraps
from types import FunctionType
from typing import Any, TypeVar, cast

from elementgrad._backends.base import Backend
from elementgrad._cleanup import with_cleanup
from elementgrad.errors import FrameworkError

Function = TypeVar("Function", bound=Callable[..., Any])
_backends: dict[type, Backend] = {}
_opaque: list[Callable[..., Any]] = []
_compilers: list[Callable[..., Any]] = []
_unsupported: dict[str, Exception] = {}
"""Why a framework that is imported has no backend: it is too old, or so new that names we rely on are gone."""
PACKAGES = {"torch": "torch", "tensorflow": "tensorflow", "keras": "tensorflow", "jax": "jax", "jaxlib": "jax"}
"""The packages whose classes belong to a framework."""


def opaque_to_compiler(function: Function) -> Function:
    """Mark a function that compilers of Python code must run as one step instead of tracing through it."""
    _opaque.append(function)
    for mark in _compilers:
        mark(function)
    return function


def register_compiler(mark: Callable[..., Any]) -> None:
    """Have a compiler's `mark` called on every function that is `opaque_to_compiler`, now or later."""
    _compilers.append(mark)
    for function in _opaque:
        mark(function)


def not_compiled(function: Function) -> Function:
    """Mark a verb that compilers of Python code must not trace; it also undoes all that it changes (`with_cleanup`)."""
    return uncompiled(with_cleanup(function))


def uncompiled(function: Function) -> Function:
    """Mark a function that compilers of Python code must not trace."""

    @wraps(function)
    def outer(*args: Any, **kwargs: Any) -> Any:
        compiler = _compiler()  # a function of its own: a graph break inside of its loop would not be possible
        return compiler.call_uncompiled(function, *args, **kwargs) if compiler else function(*args, **kwargs)

    outer.autograph_info__ = None  # type: ignore[attr-defined]  # AutoGraph leaves a function with this attribute alone
    return cast(Function, outer)


def backend_of(value: Any) -> Backend | None:
    """Return the backend of a tensor, or None if a value is no tensor of a framework that is imported."""
    kind = type(value)
    backend = _backends.get(kind)
    return backend if backend is not None else _search(kind)


def require_backend(value: Any) -> Backend:
    """Return the backend of a tensor, or raise an error that says what fits."""
    backend = backend_of(value)
    if backend is None:
        require_keras_on_tensorflow(value)
        raise FrameworkError(_not_a_tensor(value))
    return backend


def flatten_node(value: Any) -> tuple[Any, Any, Any] | None:
    """Return one level of a container that a framework knows, or None."""
    for backend in imported_backends():
        node = backend.names.flatten_node(value)
        if node is not None:
            return node
    return None


def is_shared_object(value: Any) -> bool:
    """Return True for a container that keeps its identity in a tree, and is not copied."""
    kind = type(value)
    if kind in (dict, list, tuple):
        return False
    return any(backend.names.is_shared_object(value) for backend in imported_backends())


def backend_of_model(function: Any) -> Backend | None:
    """Return the backend whose model a function is, or None; raise an error for Keras on another backend."""
    if type(function) is FunctionType and not function.__dict__:
        return None  # models are objects, or methods of one; a function with attributes may wrap such a method
    require_keras_on_tensorflow(function)
    for backend in imported_backends():
        if backend.names.is_model(function):
            return backend
    _require_supported(type(function))
    return None


def no_model_error(model: Any, problem: str) -> FrameworkError:
    """Return the error for what has no parameters: `problem` says what it is not, unless it is a container without any.

    Args:
        model: What was given as a model.
        problem: A part of a sentence, as in "is not a model with parameters".
    """
    fitting = "give a torch.nn.Module, a Keras model or a pytree of jax.Array"
    if isinstance(model, (dict, list, tuple)):
        return FrameworkError(
            f"this {type(model).__name__} has no jax.Array in it, so it holds no parameters; {fitting}"
        )
    return FrameworkError(f"{type(model).__name__} {problem}; {fitting}, such as a dict of parameters")


def module_of(value: Any) -> tuple[Backend, Any] | tuple[None, None]:
    """Return the module that a value is, or is a method of, and its backend; None twice if it is none with names.

    Keras on another backend than TensorFlow has no names that can be used.
    """
    layer = getattr(sys.modules.get("keras"), "Layer", None)
    if not callable(value) or (layer is not None and isinstance(value, layer) and not _is_keras_on_tensorflow()):
        return None, None
    for backend in imported_backends():
        root = backend.names.model.root_of(value)
        if root is not None:
            return backend, root
    return None, None


def _is_keras_on_tensorflow() -> bool:
    return bool(sys.modules["keras"].backend.backend() == "tensorflow")


def _compiler() -> Backend | None:
    for backend in imported_backends():
        if backend.compiles_here():
            return backend
    return None


def _search(kind: type) -> Backend | None:
    for backend in imported_backends():
        if backend.owns(kind):
            if backend.caches_type(kind):
                _backends[kind] = backend
            return backend
    _require_supported(kind)
    return None


def _require_supported(kind: type) -> None:
    """Raise if a class is of a framework that has no backend in the version that is installed."""
    if _unsupported:
        for base in kind.__mro__:
            package = PACKAGES.get(base.__module__.partition(".")[0], "")
            error = _unsupported.get(package)
            if error is not None:
                version = sys.modules[package].__version__
                remedy = f"pip install 'elementgrad[{package}]' gets one that is"
                raise FrameworkError(f"{package} {version} is not supported: {error}; {remedy}") from error


def imported_backends() -> Iterator[Backend]:
    """Yield the backends of the frameworks that are imported."""
    # By plain import statements: `torch.compile` can trace no others.
    if sys.modules.get("torch") is not None and "torch" not in _unsupported:
        try:
            from elementgrad._backends.torch.tensor import backend as torch_backend
        except (ImportError, AttributeError) as error:
            _unsupported["torch"] = error
        else:
            yield torch_backend
    if sys.modules.get("tensorflow") is not None and "tensorflow" not in _unsupported:
        try:
            from elementgrad._backends.tensorflow.tensor import backend as tensorflow_backend
        except (ImportError, AttributeError) as error:
            _unsupported["tensorflow"] = error
        else:
            yield tensorflow_backend
    if sys.modules.get("jax") is not None and "jax" not in _unsupported:
        try:
            from elementgrad._backends.jax.tensor import backend as jax_backend
        except (ImportError, AttributeError) as error:
            _unsupported["jax"] = error
        else:
            yield jax_backend


def require_keras_on_tensorflow(function: Any) -> None:
    """Raise an error for a model or variable of Keras on another backend.

    Its layers do not read their variables from where the model keeps them. On PyTorch such a model is a module whose
    parameters have other names and are not those that it computes with: derivatives by them would be missing, and
    elements of them would not train.
    """
    keras = sys.modules.get("keras")
    layer = getattr(keras, "Layer", None)
    if keras is None or layer is None:
        return
    kinds = layer, keras.Variable
    value = function if isinstance(function, kinds) else getattr(function, "__self__", None)
    if isinstance(value, kinds) and (backend := keras.backend.backend()) != "tensorflow":
        kind = "model" if isinstance(value, layer) else "variable"
        raise FrameworkError(
            f"{type(value).__name__} is a Keras {kind} on the {backend} backend, and only Keras on TensorFlow is "
            "supported; set KERAS_BACKEND=tensorflow before Keras is imported, or read derivatives with respect to its "
            "inputs by giving a function, such as lambda x: model(x)"
        )


def _not_a_tensor(value: Any) -> str:
    kind = type(value)
    what = "a NumPy array carries no gradients" if kind.__module__ == "numpy" else f"{kind.__name__} is not a tensor"
    return (
        f"{what}; give a torch.Tensor, tf.Tensor, tf.Variable or jax.Array "
        "(torch.as_tensor(x), tf.convert_to_tensor(x) or jnp.asarray(x) make one)"
    )
