"""What a function holds that has names of its own: parameters, buffers and layers. A plain function holds nothing."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

Tensor = Any


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
