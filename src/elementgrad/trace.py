"""Names to tensors: what the inputs and outputs of a function are called, and how to run it on other inputs."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any
from weakref import WeakKeyDictionary

from elementgrad import backends, tree
from elementgrad.backends import Backend
from elementgrad.errors import DtypeError, FrameworkError, OptionError, PlaceError, SelectionError, TracedError
from elementgrad.index import normalize
from elementgrad.place import Place
from elementgrad.resolve import resolve
from elementgrad.selection import Selection

Tensor = Any
Wanted = str | Place | Tensor | None
"""What `of` and `wrt` take: the text of a place, a place, one of the tensors given, or None for the only one."""
ANY = inspect.signature(lambda *args, **kwargs: None)
_signatures: WeakKeyDictionary[Any, inspect.Signature] = WeakKeyDictionary()


class Call:
    """A function and its arguments, with a name for each tensor in them: `x`, `params.weight`, `xs.0`.

    It is the seam between names and derivatives: whatever else can be named and replaced (activations, parameters)
    joins `inputs` and `outputs` here.
    """

    def __init__(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]):
        if not callable(function):
            raise FrameworkError(f"{type(function).__name__} cannot be called; give a function and then its arguments")
        self._bound = _bind(function, args, kwargs)
        leaves = [leaf for name, value in self._bound.arguments.items() for leaf in tree.leaves(value, name)]
        self._leaves = [number for number, (_, leaf) in enumerate(leaves) if backends.owner(leaf) is not None]
        self.inputs = [leaves[number] for number in self._leaves]
        self.outputs: list[str] = []
        self.backend = _one_backend(self.inputs, args)
        self.function = function

    def run(self, inputs: Sequence[int], tensors: Sequence[Tensor]) -> list[Tensor]:
        """Call the function with some of its inputs replaced; all tensors in what it returns."""
        new = {self._leaves[number]: tensor for number, tensor in zip(inputs, tensors, strict=True)}
        arguments = tree.replaced(dict(self._bound.arguments), new)
        bound = inspect.BoundArguments(self._bound.signature, arguments)  # type: ignore[arg-type]
        returned = self.backend.traceable(self.function)(*bound.args, **bound.kwargs)
        named = [(name, leaf) for name, leaf in tree.leaves(returned, "output") if backends.owner(leaf) is not None]
        if not named:
            raise FrameworkError(f"the function returned {type(returned).__name__} and no tensor; return a tensor")
        for name, tensor in named:
            if backends.owner(tensor) is not self.backend:
                raise FrameworkError(
                    f"{name} is not a tensor of {self.backend.name} as the arguments are; use one framework"
                )
        self.outputs = [name for name, _ in named]
        return [tensor for _, tensor in named]


@dataclass(frozen=True)
class Run:
    """A call as a function of some of its inputs."""

    call: Call
    inputs: Sequence[int]

    @property
    def function(self) -> Callable[..., Any]:
        """What the user wrote."""
        return self.call.function

    @property
    def others(self) -> list[Tensor]:
        """The other inputs, which are passed on as they are."""
        return [tensor for number, (_, tensor) in enumerate(self.call.inputs) if number not in self.inputs]

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        """All tensors of what the function returns."""
        return self.call.run(self.inputs, tensors)


@dataclass(frozen=True)
class Side:
    """One side of a Jacobian: a tensor by its number among the inputs or outputs, or some of its elements."""

    name: str
    number: int
    tensor: Tensor
    of: tuple[int, ...]
    """The shape of the tensor; of one example, with a batch."""
    base: Selection | None = None
    """The elements that the side is made of; None for all."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that is indexed."""
        return self.of if self.base is None else self.base.shape

    def select(self, index: Any, backend: Backend) -> Selection:
        """The elements of the whole tensor that an index into this side names; a bare `:` or `...` is all of it."""
        if isinstance(index, Place):
            if index.tensor is not None or index.name not in (None, self.name):
                raise PlaceError(f"{index} is not about {self.name}; give an index, such as eg.at[0, 5]")
            index = index.index
        if index is Ellipsis or (isinstance(index, slice) and index == slice(None)):
            return resolve((), self.of) if self.base is None else self.base
        parts = normalize(index, backend)
        if len(self.shape) > 1 and not isinstance(index, tuple) and isinstance(parts[0], int):
            raise SelectionError(
                f"{parts[0]} for {self.name} of {len(self.shape)} axes: write ({parts[0]}, ...) for all of that row, "
                "or one int per axis"
            )
        try:
            chosen = resolve(parts, self.shape)
        except SelectionError as error:
            raise SelectionError(f"{self.name}: {error}") from None
        if chosen.traced:
            raise TracedError(f"{self.name}: the index is traced, so sweeps cannot be planned; use a concrete one")
        if self.base is None:
            return chosen
        return Selection.at_flat(self.base.flat().reshape(-1)[chosen.flat()], self.of)


def find(named: Sequence[tuple[str, Tensor]], wanted: Wanted, kind: str, backend: Backend, batch: bool) -> Side:
    """The input or output that somebody asks for."""
    place = wanted if isinstance(wanted, Place) else Place(wanted)
    if place.kind not in (None, kind):
        raise PlaceError(f"{place} is not an {kind}")
    if place.tensor is not None:
        number = _by_identity(named, place.tensor, kind)
    elif place.name is not None:
        number = _by_name(named, place.name, kind)
    else:
        number = _the_only_one(named, kind, backend)
    name, tensor = named[number]
    if backend.kind(tensor) not in "fc":
        raise DtypeError(f"{name} is of dtype {tensor.dtype}, which has no gradients; make it floating point first")
    shape = _known(name, backend.shape(tensor))
    if batch and not shape:
        raise OptionError(f"{name} has no axes, so it holds no batch; leave batch=True out")
    shape = shape[1:] if batch else shape
    base = Place(None, name, place.index, place.kind, pointwise=place.pointwise).select(shape) if place.index else None
    return Side(name, number, tensor, shape, base)


def _bind(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> inspect.BoundArguments:
    target = getattr(function, "forward", function) if hasattr(function, "named_modules") else function
    return _signature(target).bind(*args, **kwargs)


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    """The signature, found once for the method of a class: that takes as long as a small read."""
    method = getattr(function, "__func__", None)
    known = _signatures.get(method) if method is not None else None
    if known is None:
        try:
            known = inspect.signature(function)
        except (TypeError, ValueError):  # written in C
            known = ANY
        if method is not None:
            _signatures[method] = known
    return known


def _one_backend(inputs: Sequence[tuple[str, Tensor]], args: Sequence[Any]) -> Backend:
    if not inputs:
        backends.find(args[0] if args else None)
    found = {backends.find(tensor).name: backends.find(tensor) for _, tensor in inputs}
    if len(found) > 1:
        raise FrameworkError(f"the arguments are tensors of {' and '.join(sorted(found))}; use one framework for all")
    return next(iter(found.values()))


def _by_name(named: Sequence[tuple[str, Tensor]], name: str, kind: str) -> int:
    wanted = name.replace(":", ".")
    numbers = [number for number, (other, _) in enumerate(named) if other == wanted]
    if len(numbers) == 1:
        return numbers[0]
    if numbers:
        raise PlaceError(f"{len(numbers)} {kind}s are named {name!r}; rename the keys of the dicts that hold them")
    names = [other for other, _ in named]
    inside = [other for other in names if other.startswith(f"{wanted}.")]
    nearest = inside or get_close_matches(wanted, names, n=3) or names
    raise PlaceError(
        f"no {kind} is named {name!r}; {'nearest' if nearest != names else 'there are'}: {_listed(nearest)}"
    )


def _by_identity(named: Sequence[tuple[str, Tensor]], tensor: Tensor, kind: str) -> int:
    backends.find(tensor)
    numbers = [number for number, (_, other) in enumerate(named) if other is tensor]
    if len(numbers) == 1:
        return numbers[0]
    names = _listed([name for name, _ in named])
    if numbers:
        raise PlaceError(f"the tensor was given as {_listed([named[n][0] for n in numbers])}; say which by its name")
    raise PlaceError(f"the tensor is none of the {kind}s {names}; pass it to the function, or name one of these")


def _the_only_one(named: Sequence[tuple[str, Tensor]], kind: str, backend: Backend) -> int:
    numbers = [number for number, (_, tensor) in enumerate(named) if backend.kind(tensor) in "fc"]
    if len(numbers) == 1:
        return numbers[0]
    argument = "wrt" if kind == "input" else "of"
    if not numbers:
        raise DtypeError(
            f"no {kind} is floating point ({_listed([f'{name}: {tensor.dtype}' for name, tensor in named])}), "
            "and nothing else has gradients"
        )
    names = [named[number][0] for number in numbers]
    raise PlaceError(f"there are {len(names)} {kind}s, {_listed(names)}; name one, as in {argument}={names[0]!r}")


def _known(name: str, shape: Sequence[Any]) -> tuple[int, ...]:
    if None in shape:
        raise TracedError(f"the shape {tuple(shape)} of {name} is not known while tracing; give it with a signature")
    return tuple(int(size) for size in shape)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
