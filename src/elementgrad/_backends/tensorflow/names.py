"""Names in a Keras model: its layers and their variables, without the model's own name.

The results of layers are captured by replacing `__call__` and `call` of their classes while a capture is open
(`watch_layers`).
"""

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import tensorflow as tf

from elementgrad._backends.tensorflow._compat import convert_by_autograph, in_symbolic_scope, keras_backend
from elementgrad._backends.tensorflow.autodiff import is_in_inner_graph, python_function_of, run_functions_as_python
from elementgrad._cleanup import AttributePatch, Replace, assign, defer, enter, push, scope
from elementgrad._names import pytree
from elementgrad._names.backend import Model, NamesBackend
from elementgrad._names.capture import Capture
from elementgrad.errors import PlaceError

Layer = Any
Result = Any
Tensor = Any
Watch = Callable[[Layer, Result], Result]
"""Takes a layer and its result, and returns what the run goes on with."""
AUTOGRAPH = "autograph_info__"
"""AutoGraph leaves a function with this attribute alone."""


class TensorflowNames(NamesBackend):
    """Names in Keras models, eager or inside `tf.function`."""

    def is_model(self, function: Any) -> bool:
        return layer_of(function) is not None

    def model(self, function: Callable[..., Any]) -> Model:
        return TensorflowModel(function) if layer_of(function) is None else KerasModel(function)

    def forward_of(self, function: Callable[..., Any]) -> Callable[..., Any]:
        original = python_function_of(function)
        return original.call if layer_of(function) is original else original

    def traceable(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return function if tf.executing_eagerly() else convert_by_autograph(function)

    def unwrap_parameter(self, x: Tensor) -> Tensor:
        value = getattr(x, "_value", None)
        return value if isinstance(value, tf.Variable) else x

    def is_real_call(self, x: Tensor) -> bool:
        return is_computing()

    def is_single_value(self, x: Tensor) -> bool:
        return not is_in_inner_graph(x)


class TensorflowModel(Model):
    """A function. While its values are captured, the compiled functions in it run as Python."""

    @contextmanager
    def prepare(self, replacements: Mapping[str, Tensor], capture: Capture | None) -> Iterator[Callable[..., Any]]:
        if capture is None:
            yield self.function
        else:
            with scope():
                enter(capture.open())
                enter(run_functions_as_python())
                enter(self._watch_layers(capture))
                yield self.function

    def _watch_layers(self, capture: Capture) -> Any:
        return watch_layers((), None)


class KerasModel(TensorflowModel):
    """A Keras model or any other layer, or a method of one.

    Its layers read the variables themselves, and a tape can watch these. To replace values they are assigned, for as
    long as the model runs.
    """

    def __init__(self, function: Callable[..., Any]):
        super().__init__(function)
        self._root: Layer = layer_of(function)

    @contextmanager
    def prepare(self, replacements: Mapping[str, Tensor], capture: Capture | None) -> Iterator[Callable[..., Any]]:
        variables = [
            (variable, x)
            for name, x in replacements.items()
            for _, variable in self.lookup(name)
            if variable is not None
        ]
        with scope():
            for variable, value in variables:
                defer(variable.assign, variable + 0)
                variable.assign(value)
            yield enter(super().prepare({}, capture))

    def named_tensors(self) -> Iterator[tuple[str, str, Tensor]]:
        return ((name, kind, variable._value) for name, kind, variable in self._variables())

    def layers(self) -> Iterator[str]:
        return (path for path, layer in self._layers() if path and not _is_input(layer))

    def modules(self) -> Iterator[tuple[str, Layer]]:
        return self._layers()

    def input_aliases(self) -> Mapping[str, Sequence[str]]:
        functional: Any = getattr(self._root, "_functional", None) or self._root
        structure = getattr(functional, "_inputs_struct", None)
        if structure is None or getattr(python_function_of(self.function), "__name__", "call") != "call":
            return {}
        # Keras takes them in the structure that the model was made with, in a dict by name, or in a list.
        places = {id(tensor): [place] for place, tensor in pytree.named_leaves(structure, "inputs")}
        for index, tensor in enumerate(functional.inputs):
            places[id(tensor)] += [f"inputs.{tensor.name}", f"inputs.{index}"]
        return {tensor.name: places[id(tensor)] for tensor in functional.inputs}

    def lookup(self, name: str) -> list[tuple[str, Tensor | None]]:
        variables = [(kind, variable) for other, kind, variable in self._variables() if other == name]
        variables = variables or self._variables_by_path(name)
        layers = [path for path in self.layers() if path == name]
        for what, count in (("variables", len(variables)), ("layers", len(layers))):
            if count > 1:
                raise PlaceError(f"{count} {what} are named {name!r}; make them with names of their own (name=...)")
        return [(kind, variable._value) for kind, variable in variables] + [("activation", None) for _ in layers]

    def _variables_by_path(self, name: str) -> list[tuple[str, Any]]:
        """Return the variables with this path in Keras, with or without the name of the model."""
        paths = (name, f"{self._root.name}/{name}")
        return [(kind, variable) for _, kind, variable in self._variables() if variable.path in paths]

    def _variables(self) -> Iterator[tuple[str, str, Any]]:
        """Yield name, kind and variable; those that a layer would train are parameters, frozen or not."""
        seen = set()
        for path, layer in self._layers():
            for kind, variables in (
                ("parameter", layer._trainable_variables),
                ("buffer", layer._non_trainable_variables),
            ):
                for variable in variables:
                    if variable._value is not None and id(variable) not in seen:  # None until it is initialized
                        seen.add(id(variable))
                        yield _join(path, variable.name), kind, variable

    def _layers(self) -> Iterator[tuple[str, Layer]]:
        """Yield every layer by its first path, the root by an empty one."""
        seen: set[int] = set()

        def walk(layer: Layer, path: str) -> Iterator[tuple[str, Layer]]:
            if id(layer) not in seen:
                seen.add(id(layer))
                yield path, layer
                for inner in layer._layers:
                    yield from walk(inner, _join(path, inner.name))

        return walk(self._root, "")

    def _watch_layers(self, capture: Capture) -> Any:
        paths = {id(layer): path for path, layer in self._layers() if not _is_input(layer)}
        others: dict[int, Layer] = {}  # layers that are not the model's, kept alive so that no other gets the same id

        def watch(layer: Layer, result: Any) -> Any:
            if id(layer) not in paths and id(layer) not in others:
                others[id(layer)] = layer
                paths.update({id(new): path for path, new in self._layers()})  # it may have been made in this run
            path = paths.get(id(layer))
            if path and (capture.everything or path in capture.bases):
                return capture.capture("activation", path, result)
            return result

        return watch_layers([layer for _, layer in self._layers()], watch)


def layer_of(function: Any) -> Layer:
    """Return the layer that a function is, or is a method of, compiled or not; None if there is none."""
    kind = layer_type()
    if kind is None:
        return None
    function = python_function_of(function)
    owner = function if isinstance(function, kind) else getattr(function, "__self__", None)
    return owner if isinstance(owner, kind) else None


def _is_input(layer: Layer) -> bool:
    return type(layer).__name__ == "InputLayer"


def _join(path: str, name: str) -> str:
    return f"{path}/{name}" if path else name


@dataclass(eq=False)
class _LayerWatcher:
    """One use of `watch_layers`; without a watch, layers inside are not watched."""

    watch: Watch | None


class _LayerState(threading.local):
    watches: tuple[_LayerWatcher, ...] = ()
    called: tuple[Layer, ...] = ()
    trials: int = 0
    """More than 0 while Keras runs a step of a loop only to find out its shape."""


_local = _LayerState()


def layer_type() -> type | None:
    """Return the base class of all layers, if Keras is imported and runs on TensorFlow."""
    keras = sys.modules.get("keras")
    layer = getattr(keras, "Layer", None)
    return layer if keras is not None and layer is not None and keras.backend.backend() == "tensorflow" else None


@contextmanager
def watch_layers(layers: Iterable[Layer], watch: Watch | None) -> Iterator[None]:
    """Pass the results of these layers through `watch` in this thread, in place of an outer watch."""
    kinds = {type(layer) for layer in layers}
    owners = {(_owner(kind, name), name) for kind in kinds for name in ("__call__", "call")}
    with scope():
        if layer_type() is not None:
            _steps.enter()
        for owner, name in owners:
            _methods.enter(owner, name)
        push(_local, "watches", _LayerWatcher(watch))
        yield


@contextmanager
def track_layer_calls() -> Iterator[None]:
    """Track in this thread which layers are being called (`current_layers`), and change nothing."""
    base = layer_type()
    if base is None:
        yield
        return
    with scope():
        _methods.enter(base, "__call__")
        push(_local, "watches", _LayerWatcher(lambda _, result: result))
        yield


def current_layers() -> list[Layer]:
    """Return the layers that are being called, outermost first, as far as they are watched or tracked."""
    return list(_local.called)


def is_computing() -> bool:
    """Return True unless layers run only for Keras to find out a shape."""
    return not _local.trials and not in_symbolic_scope()


def _owner(kind: type, name: str) -> type:
    return next(owner for owner in kind.__mro__ if name in vars(owner))


def _install_method(replace: Replace, owner: type, name: str) -> None:
    """Replace `__call__`, by which users call a layer, or `call`, by which some layers call others directly."""
    original: Any = vars(owner)[name]

    def call(layer: Layer, *args: Any, **kwargs: Any) -> Result:
        method = _bind(original, layer, type(layer))
        watch = _local.watches[-1].watch if _local.watches else None
        # One call has one result, also where `__call__` calls `call`, and both call those of a base class.
        inner = name == "call" and bool(_local.called) and _local.called[-1] is layer
        if watch is None or inner or _owner(type(layer), name) is not owner:
            return method(*args, **kwargs)
        with scope():
            assign(_local, "called", (*_local.called, layer))
            result = method(*args, **kwargs)
        return watch(layer, result) if is_computing() else result

    setattr(call, AUTOGRAPH, None)
    bare = isinstance(original, (staticmethod, classmethod)) or not hasattr(original, "__get__")
    replace(owner, name, _UnboundMethod(original, call) if bare else wraps(original)(call))


_methods = AttributePatch(_install_method)


class _UnboundMethod:
    """Replaces a callable that does not take the layer, such as a static method, and passes the layer on."""

    def __init__(self, original: Any, call: Callable[..., Result]):
        self._original = original
        self._call = call

    def __get__(self, layer: Layer | None, kind: type) -> Any:
        method = _bind(self._original, layer, kind)
        return method if layer is None else wraps(method)(partial(self._call, layer))


def _bind(original: Any, layer: Layer | None, kind: type) -> Any:
    # Any callable may be a class attribute, also one that is no descriptor.
    return original.__get__(layer, kind) if hasattr(original, "__get__") else original


def _install_steps(replace: Replace) -> None:
    """Count as trials the first steps of loops over time: Keras runs each once more, for its shape, unless unrolled."""
    backend = keras_backend()
    original = backend.rnn

    @wraps(original)
    def rnn(step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        first = iter([not kwargs.get("unroll")])

        def count_trial(*inputs: Any) -> Any:
            with scope():
                assign(_local, "trials", _local.trials + next(first, False))
                return step(*inputs)

        return original(count_trial, *args, **kwargs)

    setattr(rnn, AUTOGRAPH, None)
    replace(backend, "rnn", rnn)


_steps = AttributePatch(_install_steps)
