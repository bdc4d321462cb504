"""The arguments of a call by the names of a function's parameters.

A tensor that has a name, before anybody has run the function that it belongs to.

One side of a Jacobian: a tensor with a name, and which of its elements are indexed.

Names to tensors: what inputs, parameters, activations and outputs are called, and a run in which they are met.
"""

import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import FunctionType, MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from elementgrad._backends import registry
from elementgrad._backends.base import Backend
from elementgrad._names import pytree
from elementgrad._names.backend import Model
from elementgrad._names.capture import Capture, CaptureKey, Transform, apart
from elementgrad._place.grammar import listed, nearest
from elementgrad._place.index import normalize
from elementgrad._place.place import Place
from elementgrad._place.selection import Selection, resolve
from elementgrad.errors import DtypeError, FrameworkError, OptionError, PlaceError, SelectionError, TracedError, quoted

ANY = inspect.signature(lambda *args, **kwargs: None)
_signatures: WeakKeyDictionary[Any, inspect.Signature] = WeakKeyDictionary()


class BoundArguments:
    """Arguments by the names of parameters, and how others are passed on in their place."""

    def __init__(self, arguments: dict[str, Any], positional: int, signature: inspect.Signature | None):
        self.arguments = arguments
        self._positional = positional
        self._signature = signature
        """None if all were given by position."""

    def passed(self, arguments: dict[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """The same arguments, or others of their names, as the function was given them: by position and by name."""
        if self._signature is None:
            return tuple(arguments.values()), {}
        bound = inspect.BoundArguments(self._signature, arguments)  # type: ignore[arg-type]
        # What was given by name is passed on by name: it may be that the function takes it in no other way.
        args, more = bound.args[: self._positional], bound.args[self._positional :]
        return args, dict(zip(list(arguments)[self._positional :], more, strict=False)) | bound.kwargs


def bind(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> BoundArguments:
    """Which parameter each argument is for; those of a model are the parameters of what the user wrote."""
    holder = registry.backend_of_model(function)
    function = function if holder is None else holder.names.forward_of(function)
    names = None if kwargs else _names(function, len(args))
    if names is not None:
        return BoundArguments(dict(zip(names, args, strict=True)), len(args), None)
    signature = _signature(function)
    return BoundArguments(dict(signature.bind(*args, **kwargs).arguments), len(args), signature)


def _names(function: Callable[..., Any], count: int) -> Sequence[str] | None:
    """The names of so many arguments given by position, where a plain function takes just that.

    Its code says so at once. A signature is more to make than many a sweep.
    """
    method = getattr(function, "__func__", None)
    written = function if method is None else method
    if type(written) is not FunctionType or written.__dict__:  # what wraps another has its signature
        return None
    code, first = written.__code__, 0 if method is None else 1
    most = code.co_argcount - first
    least = most - len(written.__defaults__ or ())
    fits = least <= count <= most and not code.co_kwonlyargcount
    return code.co_varnames[first : first + count] if fits else None


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


Tensor = Any


@dataclass(frozen=True, eq=False)
class TensorRef(pytree.Leaf):
    """A tensor that has a name: an input by its number, what a model holds by its name, or what a run will meet."""

    name: str
    kind: str | None
    tensor: Tensor = None
    """None for what is met."""
    number: int | None = None
    whole: bool = False
    """Whether a layer is known to bear all of the name."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TensorRef) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> tuple[Any, ...]:
        """One tensor that a model holds under two names is one."""
        return ("held", id(self.tensor)) if self.held else (self.name, self.kind, self.number)

    @property
    def wanted(self) -> CaptureKey:
        """Its name, for a run to meet it."""
        return CaptureKey(self.name, self.kind, self.whole)

    @property
    def met(self) -> bool:
        """Whether its tensor is there only once the function has run."""
        return self.tensor is None

    @property
    def held(self) -> bool:
        """Whether the function holds it itself, as a model does its parameters."""
        return self.tensor is not None and self.number is None

    @property
    def outside(self) -> bool:
        """Whether it is an argument or an output, so that nobody must look inside the function."""
        return self.number is not None or (self.kind == "output" and self.tensor is None)


ONLY_OUTPUT = TensorRef("", "output")
"""The only floating output, whatever it is called."""


@dataclass(frozen=True)
class Operand(pytree.Leaf):
    """One side of a Jacobian: a tensor by its number among the inputs or outputs, or some of its elements."""

    name: str
    number: int
    tensor: Tensor
    of: tuple[int, ...]
    """The shape of the tensor; of one example, with a batch."""
    base: Selection | None = None
    """The elements that the side is made of; None for all."""
    order: float | None = None
    """How many tensors the function had named before this one, if it is known when it is computed."""
    place: Place | None = None
    """What was asked for, in words that say the same in another process."""

    @classmethod
    def at(
        cls, place: Place, name: str, number: int, tensor: Tensor, backend: Backend, batch: bool, order: float | None
    ) -> "Operand":
        """The elements that a place names of a tensor."""
        if backend.kind(tensor) not in "fc":
            raise DtypeError(f"{name} is of dtype {tensor.dtype}, which has no gradients; make it floating point first")
        shape = tuple(backend.shape(tensor))
        if None in shape:
            raise TracedError(f"the shape {shape} of {name} is not known while tracing; give it with a signature")
        shape = tuple(map(int, shape))
        if batch and not shape:
            raise OptionError(f"{name} has no axes, so it holds no batch; leave batch=True out")
        shape = shape[1:] if batch else shape
        if not place.index:
            return cls(name, number, tensor, shape, None, order, place)
        named = Place(None, name, place.index, place.kind, pointwise=place.pointwise)
        return cls(name, number, tensor, shape, named.select(shape), order, place)

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
        positions = np.asarray(self.base.flat().reshape(-1)[chosen.flat()])
        return Selection.at_flat(positions, self.of or (1,))  # an index array needs an axis, and there may be none


MET = ("activation", "output")
"""The kinds whose tensors are there once the function has run."""
OUTPUT = re.compile(r"output([.:]|$)")


def require_callable(function: Any) -> None:
    """Refuse what is no function."""
    if not callable(function):
        raise FrameworkError(f"{type(function).__name__} cannot be called; give a function and then its arguments")


class BoundCall:
    """A function and its arguments, with a name for each tensor in them: `x`, `params.weight`, `xs.0`."""

    def __init__(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]):
        require_callable(function)
        if type(kwargs) not in (dict, MappingProxyType) and not isinstance(kwargs, Mapping):  # a slow question
            raise OptionError(
                f"kwargs={quoted(kwargs)} is no dict; give arguments by name, as in kwargs={{'mask': mask}}"
            )
        self._bound = bind(function, args, kwargs)
        self._homes: list[tuple[str, int]] = []  # the argument in which each input is, and which leaf of it
        self.inputs: list[TensorRef] = []
        found: dict[str, Backend] = {}
        for argument, value in self._bound.arguments.items():
            for number, (name, leaf) in enumerate(pytree.named_leaves(value, argument)):
                backend = registry.backend_of(leaf)
                if backend is not None:
                    self.inputs.append(TensorRef(name, "input", leaf, len(self.inputs)))
                    self._homes.append((argument, number))
                    found[backend.name] = backend
        self.backend = _one_backend(function, found, args)
        self.function = function
        self.output = "output"
        """What the only output is called."""
        self.orders: dict[CaptureKey, int] = {}
        """How many tensors were met before each that was asked for."""

    @cached_property
    def model(self) -> Model:
        """The function, with the names that it holds."""
        return self.backend.names.model(self.function)

    def source(self, place: Place) -> TensorRef:
        """What a place is about; a name that nothing bears yet may be met when the function runs."""
        if place.write is not None:
            raise PlaceError(f"{place!r} is about a write in a recording, and this is a function; leave write out")
        if place.tensor is not None:
            return self._by_identity(place.tensor)
        if place.name is None:
            return self._only_input()
        name = place.name
        named = [source for source in self.inputs if source.name == name.replace(":", ".")] or self._by_alias(name)
        named += [TensorRef(name, kind, tensor, whole=True) for kind, tensor in self.model.bearing(name)]
        if OUTPUT.match(name):
            named.append(TensorRef(name, "output"))
        fitting = [source for source in named if place.kind in (None, source.kind)]
        kinds = [source.kind for source in fitting]
        if len(set(kinds)) > 1:
            raise PlaceError(
                f"{' and '.join(sorted(map(str, set(kinds))))} are both named {name!r}; say which, as in "
                f'eg.at("{name}", kind="{kinds[0]}")'
            )
        if len(fitting) > 1:
            raise PlaceError(
                f"{len(fitting)} {kinds[0]}s are named {name!r}; rename the keys of the dicts that hold them"
            )
        inside = place.kind is None and any(source.name.startswith(f"{name}.") for source in self.inputs)
        if not fitting and (inside or place.kind not in (None, *MET)):
            raise self.unknown(name, place.kind, [])
        return fitting[0] if fitting else TensorRef(name, place.kind)

    def target(self, place: Place) -> TensorRef:
        """What a place is about, as something to derive; without a name it is the only floating output."""
        return ONLY_OUTPUT if place.name is None else self.source(place)

    def side(self, place: Place, source: TensorRef, number: int, tensor: Tensor, batch: bool) -> Operand:
        """A source or target as one side of a Jacobian, once its tensor is there."""
        name = self.output if source is ONLY_OUTPUT else source.name
        order = -1 if not source.met else math.inf if source is ONLY_OUTPUT else self.orders.get(source.wanted)
        if place.tensor is not None:
            place = Place(None, name, place.index, source.kind, pointwise=place.pointwise)
        return Operand.at(place, name, number, tensor, self.backend, batch, order)

    def unknown(self, name: str, kind: str | None, met: Sequence[str]) -> PlaceError:
        """The error about a name that nothing bears."""
        held = [(other, sort) for other, sort, _ in self.model.held()]
        known = [(source.name, "input") for source in self.inputs] + held
        known += [(other, "activation") for other in self.model.layers()] + [(other, "output") for other in met]
        names = [other for other, sort in known if kind in (None, sort)] or [other for other, _ in known]
        if name in names:
            return PlaceError(f"{name!r} was not there before this first run, which has built it; ask again")
        return PlaceError(f"no {kind or 'tensor'} is named {name!r}; {nearest(name, names)}")

    def run(
        self,
        sources: Sequence[TensorRef],
        tensors: Sequence[Any],
        targets: Sequence[TensorRef],
        cuts: Mapping[CaptureKey, Transform] = MappingProxyType({}),
    ) -> list[Tensor]:
        """Call the function with some of its tensors replaced, and give those that are asked for.

        For what the run meets, the replacement is a function of it, a tensor to add to it, or None to leave it. What is
        met where there is a cut is changed in any case.
        """
        new, held, changes = {}, {}, dict(cuts)
        for source, x in zip(sources, tensors, strict=True):
            if source.number is not None:
                new[source.number] = x
            elif source.met:
                changes[source.wanted] = _change(x)
            elif x is not None:
                held[source.name] = x
        kept = [target.wanted for target in targets if target.met and target is not ONLY_OUTPUT]
        passage = Capture(self.backend, changes, kept) if changes or kept else None
        outputs = self._run(new, held, passage)
        if passage is not None:
            self._require_met(passage)
        given = []
        for target in targets:
            if target is ONLY_OUTPUT:
                given.append(self._only_output(outputs))
            elif passage is not None and target.met:
                given.append(passage.tensors[target.wanted])
            else:
                replaced = [x for source, x in zip(sources, tensors, strict=True) if source == target and x is not None]
                given.append(replaced[0] if replaced else target.tensor)
        return given

    def everything(self) -> Capture:
        """One run that meets all that has a name."""
        passage = Capture(self.backend, {}, [], everything=True)
        self._run({}, {}, passage)
        return passage

    def _run(
        self, new: Mapping[int, Tensor], held: Mapping[str, Tensor], passage: Capture | None
    ) -> list[tuple[str, Tensor]]:
        args, kwargs = self._bound.passed(self._arguments(new))
        inside = passage if passage is not None and passage.inside else None
        if not held and inside is None:
            with apart():
                returned = self.backend.names.traceable(self.function)(*args, **kwargs)
        else:
            with apart(), self.model.running(held, inside) as function:
                returned = self.backend.names.traceable(function)(*args, **kwargs)
        named = []
        for name, leaf in pytree.named_leaves(returned, "output"):
            backend = registry.backend_of(leaf)
            if backend is self.backend:
                named.append((name, leaf))
            elif backend is not None:
                raise FrameworkError(
                    f"{name} is not a tensor of {self.backend.name} as the arguments are; use one framework"
                )
        if not named and not (passage and passage.met):
            raise FrameworkError(f"the function returned {type(returned).__name__} and no tensor; return a tensor")
        if passage is not None:
            returned = passage.meet("output", "output", returned)
            named = [
                (name, leaf)
                for name, leaf in pytree.named_leaves(returned, "output")
                if registry.backend_of(leaf) is not None
            ]
        return named

    def _arguments(self, new: Mapping[int, Tensor]) -> dict[str, Any]:
        """All arguments, with some of the inputs replaced."""
        arguments = dict(self._bound.arguments)
        parts: dict[str, dict[int, Tensor]] = {}
        for number, x in new.items():
            argument, leaf = self._homes[number]
            if arguments[argument] is self.inputs[number].tensor:
                arguments[argument] = x
            else:
                parts.setdefault(argument, {})[leaf] = x
        for argument, others in parts.items():
            arguments[argument] = pytree.replace_leaves(arguments[argument], others)
        return arguments

    def _by_alias(self, name: str) -> list[TensorRef]:
        """The input for which the model has a name of its own."""
        places = self.model.inputs().get(name, ())
        return [source for place in places for source in self.inputs if source.name == place][:1]

    def _by_identity(self, tensor: Tensor) -> TensorRef:
        registry.require_backend(tensor)
        same = [source for source in self.inputs if source.tensor is tensor]
        if not same:
            bare = self.backend.names.unwrap_parameter(tensor)
            same = [TensorRef(name, kind, other) for name, kind, other in self.model.held() if other is bare][:1]
        if len(same) == 1:
            return same[0]
        if same:
            names = listed([source.name for source in same])
            raise PlaceError(f"the tensor was given as {names}; say which by its name")
        names = listed([source.name for source in self.inputs])
        raise PlaceError(f"the tensor is none of the inputs {names}; pass it to the function, or name one of these")

    def _only_input(self) -> TensorRef:
        floats = [source for source in self.inputs if self.backend.kind(source.tensor) in "fc"]
        if len(floats) != 1:
            held = [name for name, kind, _ in self.model.held() if kind == "parameter"]
            raise _not_one([(s.name, s.tensor) for s in self.inputs], [s.name for s in floats], "input", "wrt", held)
        return floats[0]

    def _only_output(self, outputs: Sequence[tuple[str, Tensor]]) -> Tensor:
        floats = [(name, tensor) for name, tensor in outputs if self.backend.kind(tensor) in "fc"]
        if len(floats) != 1:
            raise _not_one(outputs, [name for name, _ in floats], "output", "of")
        self.output, tensor = floats[0]
        return tensor

    def _require_met(self, passage: Capture) -> None:
        """Every name that was asked for is borne by one tensor that the run met."""
        for wanted, met in passage.matches.items():
            if len(met) == 1:
                self.orders[wanted] = met[0].order
                continue
            alike = [name for name, other in passage.named() if other in met or (not met and other.base == wanted.base)]
            if alike:
                what = "is none of these" if wanted.marked and not met else f"is {len(alike)} tensors here; name one"
                raise PlaceError(f"{wanted.name!r} {what}: {listed(alike)}")
            if ("activation", None) in self.model.bearing(wanted.base):
                raise PlaceError(
                    f"{wanted.name!r} is not computed with these arguments; name a layer that is called, or pass "
                    "arguments that lead to this one"
                )
            raise self.unknown(wanted.name, wanted.kind, [name for name, _ in passage.named()])


@dataclass(frozen=True)
class PartialCall:
    """A call as a function from some of its tensors to others."""

    call: BoundCall
    sources: Sequence[TensorRef]
    targets: Sequence[TensorRef]
    cuts: Mapping[CaptureKey, Transform] = field(default_factory=dict)

    @property
    def function(self) -> Callable[..., Any]:
        """What the user wrote."""
        return self.call.function

    @property
    def others(self) -> list[Tensor]:
        """The other inputs, which are passed on as they are."""
        return [source.tensor for source in self.call.inputs if source not in self.sources]

    @property
    def held(self) -> list[bool]:
        """Which of the sources the function holds itself."""
        return [source.held for source in self.sources]

    @property
    def inside(self) -> bool:
        """Whether it replaces, changes or gives tensors that are neither arguments nor outputs."""
        named = (*self.sources, *self.targets)
        return bool(self.cuts) or not all(source.outside for source in named)

    def __call__(self, *tensors: Any) -> list[Tensor]:
        """The tensors that are asked for."""
        return self.call.run(self.sources, tensors, self.targets, self.cuts)


def _change(new: Any) -> Transform:
    if new is None:
        return lambda met: met
    return new if callable(new) else lambda met: met + new


def _one_backend(function: Callable[..., Any], found: Mapping[str, Backend], args: Sequence[Any]) -> Backend:
    holder = registry.backend_of_model(function) if not found else None
    if holder is not None:
        return holder
    if not found:
        registry.require_backend(args[0] if args else None)
    if len(found) > 1:
        raise FrameworkError(f"the arguments are tensors of {' and '.join(sorted(found))}; use one framework for all")
    return next(iter(found.values()))


def _not_one(named: Sequence[Any], floats: Sequence[str], kind: str, argument: str, held: Any = ()) -> Exception:
    """The error about what was left unnamed, and is none or several; a model's parameters might be meant."""
    if floats:
        several = f"there are {len(floats)} {kind}s, {listed(floats)}"
        return PlaceError(f"{several}; name one, as in {argument}={floats[0]!r}")
    dtypes = listed([f"{name}: {tensor.dtype}" for name, tensor in named])
    other = f"; name a parameter, as in {argument}={held[0]!r}" if held else ""
    return DtypeError(f"no {kind} is floating point ({dtypes}), and no other dtype has gradients{other}")
