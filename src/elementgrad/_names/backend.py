"""The interface that a backend implements for names: `NamesBackend`, and the `Model` that it returns."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elementgrad._names.capture import Capture

Tensor = Any
Node = tuple[Sequence[Any], Sequence[Any], Callable[[Sequence[Any]], Any]]
"""One level of a container: the keys of its contents (None for the only content of a box, which bears the name of the
box), the contents, and a function that rebuilds the container around other contents."""


class Model:
    """A function of the user, with the tensors that it holds and its layers. A plain function has neither."""

    def __init__(self, function: Callable[..., Any]):
        self.function = function

    def named_tensors(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield name, kind ("parameter" or "buffer") and tensor of all that the function holds."""
        return iter(())

    def layers(self) -> Iterator[str]:
        """Yield the names of all layers."""
        return iter(())

    def modules(self) -> Iterator[tuple[str, Any]]:
        """Yield name and object of all that the model is made of, itself by an empty name."""
        return iter(())

    def input_aliases(self) -> Mapping[str, Sequence[str]]:
        """Return the model's own names of its inputs, each with what that input may be called as an argument."""
        return {}

    def lookup(self, name: str) -> list[tuple[str, Tensor | None]]:
        """Return kind and tensor of everything with a name; the result of a layer is an activation without a tensor."""
        return []

    @contextmanager
    def prepare(self, replacements: Mapping[str, Tensor], capture: "Capture | None") -> Iterator[Callable[..., Any]]:
        """Yield the function to call, with some of its tensors replaced and its named values captured."""
        if capture is None:
            yield self.function
        else:
            with capture.open():
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
