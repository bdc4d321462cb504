"""Names in a Keras model: its layers and their variables, without the model's own name.

The results of layers are captured by replacing `__call__` and `call` of their classes while a capture is open
(`watch_layers`).
"""

import re
import sys
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import numpy as np
import tensorflow as tf

from elementgrad._backends.tensorflow._compat import convert_by_autograph, in_symbolic_scope, keras_backend
from elementgrad._backends.tensorflow.autodiff import (
    can_leave_run,
    is_in_inner_graph,
    python_function_of,
    run_functions_as_python,
)
from elementgrad._cleanup import AttributePatch, Replace, assign, defer, enter, push, scope
from elementgrad._names import pytree
from elementgrad._names.backend import GIVEN, Model, NamesBackend, Replacement, add_prefix, split_prefix
from elementgrad._names.capture import Capture
from elementgrad._names.stopping import plain_attributes
from elementgrad.errors import PlaceError

Layer = Any
Result = Any
Tensor = Any
Watch = Callable[[Layer, Result], Result]
"""Takes a layer and its result, and returns what the run goes on with."""
Arguments = tuple[Any, Any]
WatchGiven = Callable[[Layer, Any, Any], Arguments]
"""Takes a layer and its arguments by position and by name, and returns those that it goes on with."""
AUTOGRAPH = "autograph_info__"
"""AutoGraph leaves a function with this attribute alone."""


class KerasModel(Model):
    """A function with the Keras models or other layers that it is, is a method of, or is given.

    Layers read their variables themselves, and a tape can watch these. To replace values they are assigned, for as long
    as the function runs. While values are captured, compiled functions run as Python.
    """

    only_input = "inputs"

    @staticmethod
    def root_of(value: Any) -> Layer:
        return layer_of(value)

    @contextmanager
    def prepare(self, replacements: Sequence[Replacement], capture: Capture | None) -> Iterator[Callable[..., Any]]:
        with scope():
            defer(self._forget_layers)  # the run may make some
            for _, variable, value in replacements:
                defer(variable.assign, variable + 0)
                variable.assign(value)
            if capture is not None:
                enter(capture.open())
                enter(run_functions_as_python())
                enter(self._watch_layers(capture))
            yield self.function

    def named_tensors(self) -> Iterator[tuple[str, str, Tensor]]:
        return ((name, kind, variable._value) for name, kind, variable in self._variables())

    def layers(self) -> Iterator[str]:
        return (path for path, layer in self._layers() if path and not _is_input(layer))

    def modules(self) -> Iterator[tuple[str, Layer]]:
        return self._layers()

    def structure(self) -> Hashable:
        return tuple(
            [
                (path, id(layer), () if _is_of_keras(layer) else plain_attributes(vars(layer)))
                for path, layer in self._layers()
            ]
        )

    def may_stop(self) -> bool:
        return can_leave_run()

    def input_aliases(self) -> Mapping[str, Sequence[str]]:
        root = self.roots.get("")
        functional: Any = getattr(root, "_functional", None) or root
        structure = getattr(functional, "_inputs_struct", None)
        if structure is None or getattr(python_function_of(self.function), "__name__", "call") != "call":
            return {}
        # Keras takes them in the structure that the model was made with, in a dict by name, or in a list.
        places = {id(tensor): [place] for place, tensor in pytree.named_leaves(structure, "inputs")}
        for index, tensor in enumerate(functional.inputs):
            places[id(tensor)] += [f"inputs.{tensor.name}", f"inputs.{index}"]
        return {tensor.name: places[id(tensor)] for tensor in functional.inputs}

    def aliases(self) -> Mapping[str, str]:
        return self._attribute_paths()

    def canonical_name(self, name: str) -> str:
        """Return the path of names for a path of attributes: `dense_12/kernel` for `d.kernel` in `model.d.kernel`."""
        path, mark, rest = re.match(r"([^#:]*)(.?)(.*)", name).groups()  # type: ignore[union-attr]
        if any(other in (path, path.removesuffix(GIVEN)) for other, _ in self._layers() if other):
            return name  # to look at all attributes of a large model takes longer than to run it
        for ending in ("", GIVEN):
            known = None if "." not in path and ending else self._attribute_paths().get(path.removesuffix(ending))
            if known is not None and path.endswith(ending):
                return known + ending + mark + rest
        return name

    def stable_name(self, name: str) -> str:
        """Return the path of attributes for a name that Keras made up, which counts up in each process; or the name."""
        if not any(map(_is_automatic, self._components(name))):
            return name
        return next((path for path, known in self._attribute_paths().items() if known == name), name)

    def _components(self, name: str) -> list[Any]:
        """Return the layers on the path of a name, and its variable."""
        owners = [(path, layer) for path, layer in self._layers() if path == name or name.startswith(f"{path}/")]
        variables = [variable for other, _, variable in self._variables() if other == name]
        return [layer for path, layer in owners if path not in self.roots] + variables

    def _attribute_paths(self) -> dict[str, str]:
        """Return the name of each layer and variable by its path of attributes, where that is no name itself."""
        names: dict[str, str] = {}
        paths: dict[int, str] = {}
        for prefix, root in self.roots.items():
            paths.setdefault(id(root), prefix)
        for name, layer in self._layers():
            path = paths.get(id(layer))
            if path is None:
                continue
            for attribute, child in _attributes_of(layer):
                paths.setdefault(id(child), add_prefix(path, attribute))
            if name not in self.roots:
                names[path] = name
            for variable in (*layer._trainable_variables, *layer._non_trainable_variables):
                join = add_prefix if name in self.roots else _join
                names[add_prefix(path, _attribute_of(layer, variable))] = join(name, variable.name)
        taken = set(names.values())
        return {path: name for path, name in names.items() if path not in taken}

    def lookup(self, name: str) -> list[tuple[str, Tensor | None]]:
        name = self.canonical_name(name)
        variables = []
        if self._may_name_variable(name):
            variables = [(kind, variable) for other, kind, variable in self._variables() if other == name]
        layers = [path for path in self.layers() if path == name]
        variables = variables or ([] if layers else self._variables_by_path(name))
        for what, count in (("variables", len(variables)), ("layers", len(layers))):
            if count > 1:
                raise PlaceError(f"{count} {what} are named {name!r}; give them different names (name=...)")
        return [(kind, variable._value) for kind, variable in variables] + [("activation", None) for _ in layers]

    def _may_name_variable(self, name: str) -> bool:
        """Return False if no layer on the path of a name has such a variable: to list them all takes longer."""
        return any(
            name.endswith(variable.name)
            for path, layer in self._layers()
            if name.startswith(path)
            for variable in (*layer._trainable_variables, *layer._non_trainable_variables)
        )

    def _variables_by_path(self, name: str) -> list[tuple[str, Any]]:
        """Return the variables with this path in Keras, with or without the name of the model."""
        rests = [(root, split_prefix(prefix, name)) for prefix, root in self.roots.items()]
        paths = [path for root, rest in rests if rest for path in (rest, f"{root.name}/{rest}")]
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
                        join = add_prefix if path in self.roots else _join
                        yield join(path, variable.name), kind, variable

    _known_layers: Sequence[tuple[str, Layer]] | None = None

    def _forget_layers(self) -> None:
        self._known_layers = None

    def _layers(self) -> Iterator[tuple[str, Layer]]:
        """Yield every layer by its first path, a root by its prefix, as they were before the function ran."""
        if self._known_layers is None:
            self._known_layers = self._walk_layers()
        return iter(self._known_layers)

    def _walk_layers(self) -> list[tuple[str, Layer]]:
        layers: list[tuple[str, Layer]] = []
        seen: set[int] = set()

        def walk(layer: Layer, prefix: str, path: str) -> None:
            if id(layer) not in seen:
                seen.add(id(layer))
                layers.append((add_prefix(prefix, path), layer))
                for inner in layer._layers:
                    walk(inner, prefix, _join(path, inner.name))

        for prefix, root in self.roots.items():
            walk(root, prefix, "")
        return layers

    def _watch_layers(self, capture: Capture) -> Any:
        if not self.roots:
            return watch_layers((), None)
        paths = {id(layer): path for path, layer in self._layers() if not _is_input(layer)}
        others: dict[int, Layer] = {}  # layers that are not the model's, kept alive so that no other gets the same id

        def path_of(layer: Layer) -> str | None:
            if id(layer) not in paths and id(layer) not in others:
                others[id(layer)] = layer
                paths.update({id(new): path for path, new in self._walk_layers()})  # it may be of this run
            return paths.get(id(layer))

        def watch(layer: Layer, result: Any) -> Any:
            path = path_of(layer)
            wanted = path and capture.wants(path)
            return capture.capture("activation", str(path), result) if wanted else result

        def watch_given(layer: Layer, args: Any, kwargs: Any) -> Arguments:
            path = path_of(layer)
            if not path or not (capture.given or path + GIVEN in capture.bases):
                return args, kwargs
            args, kwargs = pytree.map_tree((args, kwargs), partial(_convert_array, layer))
            return capture.capture_given(path, args, kwargs, layer.call)

        # Where all names are those of known layers, no other layer has to be watched.
        wanted = {name.removesuffix(GIVEN) for name in capture.bases}
        named = [(path, layer) for path, layer in self._layers() if path in wanted]
        known = not (capture.everything or capture.given) and {path for path, _ in named} >= wanted
        return watch_layers([layer for _, layer in (named if known else self._layers())], watch, watch_given)


class TensorflowNames(NamesBackend):
    """Names in Keras models, eager or inside `tf.function`."""

    model = KerasModel
    takes_arrays = True
    mixes_arrays = False
    extra_keywords = ("training",)

    def is_model(self, function: Any) -> bool:
        return layer_of(function) is not None

    def forward_of(self, function: Callable[..., Any]) -> Callable[..., Any]:
        original = python_function_of(function)
        return original.call if layer_of(function) is original else original

    def traceable(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return function if tf.executing_eagerly() else convert_by_autograph(function)

    def from_numpy(self, array: Any, model: Model) -> Tensor | None:
        if array.dtype.kind not in "biufc":
            return None
        roots = list(model.roots.values())
        return _convert_array(roots[0], array) if len(roots) == 1 else tf.convert_to_tensor(array)

    def unwrap_parameter(self, x: Tensor) -> Tensor:
        value = getattr(x, "_value", None)
        return value if isinstance(value, tf.Variable) else x

    def name_closed_over(self, x: Tensor) -> str | None:
        variable = self.unwrap_parameter(x)
        return str(getattr(x, "path", variable.name)) if isinstance(variable, tf.Variable) else None

    def is_real_call(self, x: Tensor) -> bool:
        return is_computing()

    def is_single_value(self, x: Tensor) -> bool:
        return not is_in_inner_graph(x)


def layer_of(function: Any) -> Layer:
    """Return the layer that a function is, or is a method of, compiled or not; None if there is none."""
    kind = layer_type()
    if kind is None:
        return None
    function = python_function_of(function)
    owner = function if isinstance(function, kind) else getattr(function, "__self__", None)
    return owner if isinstance(owner, kind) else None


def _convert_array(layer: Layer, value: Any) -> Any:
    """Return a NumPy array as the tensor that a layer makes of it, in its own floating dtype; any other value as is."""
    if not isinstance(value, np.ndarray):
        return value
    return tf.convert_to_tensor(value, layer.input_dtype if value.dtype.kind == "f" else None)


def _attributes_of(layer: Layer) -> Iterator[tuple[str, Layer]]:
    """Yield the layers inside of a layer by their attributes, as `d` or `blocks.0`; public attributes come first."""
    inside = {id(inner) for inner in layer._layers}
    if not inside:
        return
    public = {name: value for name, value in vars(layer).items() if not name.startswith("_")}
    private = {name: value for name, value in vars(layer).items() if name.startswith("_")}
    for name, value in (*public.items(), ("layers", getattr(layer, "layers", ())), *private.items()):
        values = (
            value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
        )
        for key, each in ((name, value), *[(f"{name}.{key}", inner) for key, inner in values]):
            if id(each) in inside:
                yield key, each


def _attribute_of(layer: Layer, variable: Any) -> str:
    attributes = [name for name, value in vars(layer).items() if value is variable and not name.startswith("_")]
    return attributes[0] if attributes else str(variable.name)


def _is_automatic(owner: Any) -> bool:
    """Return True if Keras may have made up the name of a layer or variable: that of its class, and a number."""
    words = re.sub(r"(.)([A-Z][a-z]+)", r"\1_\2", type(owner).__name__)
    words = re.sub(r"([a-z])([A-Z])", r"\1_\2", words).lower()
    return re.fullmatch(rf"({re.escape(words)}|variable)(_\d+)?", owner.name) is not None


def _is_of_keras(layer: Layer) -> bool:
    return type(layer).__module__.startswith("keras.")


def _is_input(layer: Layer) -> bool:
    return type(layer).__name__ == "InputLayer"


def _join(path: str, name: str) -> str:
    return f"{path}/{name}" if path else name


@dataclass(eq=False)
class _LayerWatcher:
    """One use of `watch_layers`; without a watch, layers inside are not watched."""

    watch: Watch | None
    given: WatchGiven | None = None


class _LayerState(threading.local):
    watches: tuple[_LayerWatcher, ...] = ()
    called: tuple[Layer, ...] = ()
    before: tuple[Callable[[Layer], None], ...] = ()
    trials: int = 0
    """More than 0 while Keras runs a step of a loop only to find out its shape."""


_local = _LayerState()


def layer_type() -> type | None:
    """Return the base class of all layers, if Keras is imported and runs on TensorFlow."""
    keras = sys.modules.get("keras")
    layer = getattr(keras, "Layer", None)
    return layer if keras is not None and layer is not None and keras.backend.backend() == "tensorflow" else None


@contextmanager
def watch_layers(layers: Iterable[Layer], watch: Watch | None, given: WatchGiven | None = None) -> Iterator[None]:
    """Pass results and arguments of these layers through functions in this thread, in place of an outer watch."""
    kinds = {type(layer) for layer in layers}
    owners = {(_owner(kind, name), name) for kind in kinds for name in ("__call__", "call")}
    with scope():
        if layer_type() is not None:
            _steps.enter()
        for owner, name in owners:
            _methods.enter(owner, name)
        push(_local, "watches", _LayerWatcher(watch, given))
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


def run_before_layers(function: Callable[[Layer], None]) -> None:
    """Run a function on each layer that is called in this thread, until the innermost open scope is left."""
    base = layer_type()
    if base is not None:
        _methods.enter(base, "__call__")
        push(_local, "before", function)


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
        for function in _local.before:
            function(layer)
        method = _bind(original, layer, type(layer))
        watcher = _local.watches[-1] if _local.watches else None
        watch = None if watcher is None else watcher.watch
        # One call has one result, also where `__call__` calls `call`, and both call those of a base class.
        inner = name == "call" and bool(_local.called) and _local.called[-1] is layer
        if watch is None or inner or _owner(type(layer), name) is not owner:
            return method(*args, **kwargs)
        if watcher is not None and watcher.given is not None and is_computing():
            args, kwargs = watcher.given(layer, args, kwargs)
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
