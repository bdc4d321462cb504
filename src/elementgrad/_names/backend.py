"""The interface that a backend implements for names: `NamesBackend`, and the `Model` that it returns."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

Tensor = Any
Node = tuple[Sequence[Any], Sequence[Any], Callable[[Sequence[Any]], Any]]
"""Keys and contents of one level of a container, and a function that rebuilds it from other contents."""


class CaptureLike(Protocol):
    """One run, by which the results of layers pass."""

    @property
    def everything(self) -> bool:
        """Whether the results of all layers are to pass by."""

    @property
    def bases(self) -> set[str]:
        """The names whose values are to pass by, without the number of a call or a part."""

    @property
    def listening(self) -> bool:
        """Whether what this thread computes now is part of the run."""

    def open(self, here: Callable[[str], bool] = ...) -> Any:
        """A context in which this thread's tags pass by, where `here` says so of a name; elsewhere they are staged."""

    def meet(self, kind: str, base: str, value: Any) -> Any:
        """A value that bears a name: what goes on in its place."""

    def pass_on(self, kind: str, base: str, key: str, tensor: Any, alone: bool = False) -> Any:
        """One part of a value that bears a name."""


class Model:
    """A function of the user's, with the tensors that it holds and the layers whose results have names."""

    def __init__(self, function: Callable[..., Any]):
        self.function = function

    def held(self) -> Iterator[tuple[str, str, Tensor]]:
        """Name, kind and tensor of all that it holds."""
        return iter(())

    def layers(self) -> Iterator[str]:
        """The names of all layers."""
        return iter(())

    def parts(self) -> Iterator[tuple[str, Any]]:
        """Name and object of all that it is made of, itself by an empty name."""
        return iter(())

    def inputs(self) -> Mapping[str, Sequence[str]]:
        """Names of its own that a model has for inputs, and what each may be called among the arguments."""
        return {}

    def bearing(self, name: str) -> list[tuple[str, Tensor | None]]:
        """Kind and tensor of what bears a name; a layer's result is an activation, whose tensor nobody has yet."""
        return []

    @contextmanager
    def running(self, new: Mapping[str, Tensor], passage: CaptureLike | None) -> Iterator[Callable[..., Any]]:
        """What to call, with some of the tensors replaced and named values passing by."""
        if passage is None:
            yield self.function
        else:
            with passage.open():
                yield self.function


class NamesBackend:
    """The framework's part in finding tensors by name. The defaults are those of plain functions and eager tensors."""

    def is_model(self, function: Any) -> bool:
        """Return True if a function holds tensors or layers that have names."""
        return False

    def model(self, function: Callable[..., Any]) -> Model:
        """Return a function together with the names that it holds."""
        return Model(function)

    def forward_of(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function whose signature a call of a model has."""
        return function

    def traceable(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the user's function in the form to call here, where code may be rewritten (AutoGraph) or copied."""
        return function

    def flatten_node(self, value: Any) -> Node | None:
        """Return one level of a container of the framework's own, or None for anything else."""
        return None

    def unwrap_parameter(self, x: Tensor) -> Tensor:
        """Return the tensor that a model computes with, for the object that users see as its parameter."""
        return x

    def snapshot(self, x: Tensor) -> Tensor:
        """Return a captured tensor as it is now, whatever is written to it later, with the same derivatives."""
        return x

    def is_real_call(self, x: Tensor) -> bool:
        """Return True if a named value is computed here, and not traced only for its shape."""
        return True

    def is_single_value(self, x: Tensor) -> bool:
        """Return True if a named value is one value, and not one for each iteration of a loop in a graph."""
        return True

    def name_in_graph(self, x: Tensor, name: str) -> Tensor:
        """Return a traced tensor with a name that stays in the traced program; any other tensor as it is."""
        return x
