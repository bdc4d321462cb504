"""The names inside a Keras model: its layers and their variables, without the model's own name."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from elementgrad import tree
from elementgrad.backends.model import Model, Passage
from elementgrad.backends.tensorflow import layers
from elementgrad.backends.tensorflow.staging import unstaged, written
from elementgrad.cleanup import defer, enter, scope
from elementgrad.errors import PlaceError

Layer = Any
Tensor = Any


def root(function: Any) -> Layer:
    """The layer that a function is, or is a method of, compiled or not; None if there is none."""
    kind = layers.kind()
    if kind is None:
        return None
    function = written(function)
    owner = function if isinstance(function, kind) else getattr(function, "__self__", None)
    return owner if isinstance(owner, kind) else None


class TensorflowModel(Model):
    """A function. While somebody wants to meet what it computes, compiled functions in it run as Python."""

    @contextmanager
    def running(self, new: Mapping[str, Tensor], passage: Passage | None) -> Iterator[Callable[..., Any]]:
        if passage is None:
            yield self.function
        else:
            with scope():
                enter(passage.open())
                enter(unstaged())
                enter(self._passing(passage))
                yield self.function

    def _passing(self, passage: Passage) -> Any:
        return layers.watched((), None)


class KerasModel(TensorflowModel):
    """A Keras model or any other layer, or a method of one.

    Its variables are read by the layers themselves, and a tape can watch them: to try out other values, these are
    assigned for as long as it runs.
    """

    def __init__(self, function: Callable[..., Any]):
        super().__init__(function)
        self._root: Layer = root(function)

    @contextmanager
    def running(self, new: Mapping[str, Tensor], passage: Passage | None) -> Iterator[Callable[..., Any]]:
        variables = [
            (variable, new[name]) for name in new for _, variable in self.bearing(name) if variable is not None
        ]
        with scope():
            for variable, value in variables:
                defer(variable.assign, variable + 0)
                variable.assign(value)
            yield enter(super().running({}, passage))

    def held(self) -> Iterator[tuple[str, str, Tensor]]:
        return ((name, kind, variable._value) for name, kind, variable in self._variables())

    def layers(self) -> Iterator[str]:
        return (path for path, layer in self._layers() if path and not _is_input(layer))

    def parts(self) -> Iterator[tuple[str, Layer]]:
        return self._layers()

    def inputs(self) -> Mapping[str, Sequence[str]]:
        functional: Any = getattr(self._root, "_functional", None) or self._root
        structure = getattr(functional, "_inputs_struct", None)
        if structure is None or getattr(written(self.function), "__name__", "call") != "call":
            return {}
        # Keras takes them in the structure that the model was made with, in a dict by name, or in a list.
        places = {id(tensor): [place] for place, tensor in tree.leaves(structure, "inputs")}
        for number, tensor in enumerate(functional.inputs):
            places[id(tensor)] += [f"inputs.{tensor.name}", f"inputs.{number}"]
        return {tensor.name: places[id(tensor)] for tensor in functional.inputs}

    def bearing(self, name: str) -> list[tuple[str, Tensor | None]]:
        found = [(kind, variable) for other, kind, variable in self._variables() if other == name]
        found = found or [(kind, variable) for kind, variable in self._by_path(name)]
        called = [path for path in self.layers() if path == name]
        for what, count in (("variables", len(found)), ("layers", len(called))):
            if count > 1:
                raise PlaceError(f"{count} {what} are named {name!r}; make them with names of their own (name=...)")
        return [(kind, variable._value) for kind, variable in found] + [("activation", None) for _ in called]

    def _by_path(self, name: str) -> list[tuple[str, Any]]:
        """What Keras itself calls so, with or without the name of the model."""
        spelled = (name, f"{self._root.name}/{name}")
        return [(kind, variable) for _, kind, variable in self._variables() if variable.path in spelled]

    def _variables(self) -> Iterator[tuple[str, str, Any]]:
        """Name, kind and variable; those that a layer would train are parameters, frozen or not."""
        seen = set()
        for path, layer in self._layers():
            for kind, variables in (
                ("parameter", layer._trainable_variables),
                ("buffer", layer._non_trainable_variables),
            ):
                for variable in variables:
                    if variable._value is not None and id(variable) not in seen:  # None until it is initialized
                        seen.add(id(variable))
                        yield _joined(path, variable.name), kind, variable

    def _layers(self) -> Iterator[tuple[str, Layer]]:
        """Every layer by its first path, the root by an empty one."""
        seen: set[int] = set()

        def walk(layer: Layer, path: str) -> Iterator[tuple[str, Layer]]:
            if id(layer) not in seen:
                seen.add(id(layer))
                yield path, layer
                for inner in layer._layers:
                    yield from walk(inner, _joined(path, inner.name))

        return walk(self._root, "")

    def _passing(self, passage: Passage) -> Any:
        paths = {id(layer): path for path, layer in self._layers() if not _is_input(layer)}
        others: dict[int, Layer] = {}  # kept, so that no other gets the same id

        def passed(layer: Layer, result: Any) -> Any:
            if id(layer) not in paths and id(layer) not in others:
                others[id(layer)] = layer
                paths.update({id(new): path for path, new in self._layers()})  # it may have been made in this run
            path = paths.get(id(layer))
            if path and (passage.everything or path in passage.bases):
                return passage.meet("activation", path, result)
            return result

        return layers.watched([layer for _, layer in self._layers()], passed)


def _is_input(layer: Layer) -> bool:
    return type(layer).__name__ == "InputLayer"


def _joined(path: str, name: str) -> str:
    return f"{path}/{name}" if path else name
