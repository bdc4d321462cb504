"""A call of the user's function: `BoundCall` finds tensors in it by name, replaces some and returns others.

`TensorRef` is a tensor of a call by its name. `PartialCall` is a call as a function from some of its tensors to others.
`Operand` is one side of a Jacobian: a tensor, and which of its elements are indexed.
"""

import itertools
import math
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np

from elementgrad._backends import registry
from elementgrad._backends.base import Backend
from elementgrad._names import pytree
from elementgrad._names.arguments import (
    BoundArguments,
    NamedFunction,
    backend_of_code,
    positional_parameters,
    require_callable,
)
from elementgrad._names.backend import GIVEN, Model, Replacement, split_prefix
from elementgrad._names.capture import Capture, CaptureKey, Transform, without_capture
from elementgrad._names.stopping import RunStopped, SingleCalls, StopRule, remember, signature, single_calls
from elementgrad._place.grammar import listed, nearest
from elementgrad._place.index import normalize
from elementgrad._place.place import Place, is_pattern
from elementgrad._place.selection import Selection, resolve
from elementgrad.errors import DtypeError, FrameworkError, OptionError, PlaceError, SelectionError, TracedError

Tensor = Any
COMPUTED = ("activation", "given", "output")
"""The kinds of tensors that exist only once the function has run."""
OUTPUT = re.compile(r"output([.:]|$)")
_NUMBERED_GIVEN = re.compile(rf"(#\d+){re.escape(GIVEN)}(?=:|$)")
"""The input of one call, `cell#3.input:1`; captures call it `cell.input#3:1`."""
_GIVEN_NUMBER = re.compile(rf"{re.escape(GIVEN)}(#\d+)(?=:|$)")


@dataclass(eq=False, slots=True)
class TensorRef(pytree.Leaf):
    """A tensor of a call: an input by its position, a tensor that a model holds, or a value that the run computes."""

    name: str
    kind: str | None
    tensor: Tensor = None
    """None for a value that the run computes."""
    index: int | None = None
    """The position among the inputs."""
    exact: bool = False
    """True if a layer is known to have this very name, "#" and ":" included."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TensorRef) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    @property
    def _identity(self) -> tuple[Any, ...]:
        # A tensor that a model holds under two names is one tensor.
        return ("held", id(self.tensor)) if self.in_model else (self.name, self.kind, self.index)

    @property
    def key(self) -> CaptureKey:
        return CaptureKey(self.name, self.kind, self.exact)

    @property
    def computed(self) -> bool:
        """True for activations and outputs, which are known only after the forward."""
        return self.tensor is None

    @property
    def in_model(self) -> bool:
        """True for a parameter or buffer, which the function holds itself."""
        return self.tensor is not None and self.index is None

    @property
    def at_boundary(self) -> bool:
        """True for inputs and outputs, which are known without a look inside the function."""
        return self.index is not None or (self.kind == "output" and self.tensor is None)


ONLY_OUTPUT = TensorRef("", "output")
"""The only floating output, whatever it is called."""


@dataclass(slots=True)
class Operand(pytree.Leaf):
    """One side of a Jacobian: a tensor by its position among the inputs or outputs, or some of its elements."""

    name: str
    index: int
    tensor: Tensor
    of: tuple[int, ...]
    """The shape of the tensor; of one example, with a batch."""
    base: Selection | None = None
    """The elements that are indexed; None for all."""
    order: float | None = None
    """How many tensors the function had named before this one, if it is known when it is computed."""
    place: Place | None = None
    """The place that the user gave, in words that mean the same in another process."""

    @classmethod
    def at(
        cls, place: Place, name: str, index: int, tensor: Tensor, backend: Backend, batch: bool, order: float | None
    ) -> "Operand":
        """Return the elements of a tensor that a place names."""
        if backend.kind(tensor) not in "fc":
            raise DtypeError(f"{name} is of dtype {tensor.dtype}, which has no gradients; make it floating point first")
        shape = tuple(backend.shape(tensor))
        if None in shape:
            raise TracedError(f"the shape {shape} of {name} is not known while tracing; give it with a signature")
        shape = tuple(map(int, shape))
        if batch:
            if not shape:
                raise OptionError(f"{name} has no axes, so it holds no batch; leave batch=True out")
            shape = shape[1:]
        if not place.index:
            return cls(name, index, tensor, shape, None, order, place)
        named = Place(None, name, place.index, place.kind, pointwise=place.pointwise)
        return cls(name, index, tensor, shape, named.select(shape), order, place)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that is indexed."""
        return self.of if self.base is None else self.base.shape

    def select(self, index: Any, backend: Backend) -> Selection:
        """Return the elements of the whole tensor that an index into this operand names; `:` or `...` is all of it."""
        if isinstance(index, Place):
            if index.tensor is not None or index.name not in (None, self.name):
                raise PlaceError(f"{index} is not about {self.name}; give an index, such as eg.at[0, 5]")
            index = index.index
        if index is Ellipsis or (isinstance(index, slice) and index == slice(None)):
            return resolve((), self.of) if self.base is None else self.base
        items = normalize(index, backend)
        if len(self.shape) > 1 and not isinstance(index, tuple) and isinstance(items[0], int):
            raise SelectionError(
                f"{items[0]} for {self.name} of {len(self.shape)} axes: write ({items[0]}, ...) for all of that row, "
                "or one int per axis"
            )
        try:
            selection = resolve(items, self.shape)
        except SelectionError as error:
            raise SelectionError(f"{self.name}: {error}") from None
        if selection.traced:
            raise TracedError(f"{self.name}: the index is traced, so sweeps cannot be planned; use a concrete one")
        if self.base is None:
            return selection
        positions = np.asarray(self.base.flat().reshape(-1)[selection.flat()])
        return Selection.at_flat(positions, self.of or (1,))  # an index array needs an axis, and there may be none


class BoundCall:
    """A function and its arguments, with a name for each tensor in them: `x`, `params.weight`, `xs.0`.

    A model among the arguments has all of its names behind that of the argument: `model.fc.weight`. A function that is
    a model has them behind nothing.
    """

    def __init__(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], places: Sequence[Place] = ()
    ):
        if not callable(function):
            require_callable(function)
        self.function = function
        self._bound = BoundArguments.of(function, args, kwargs)
        self._leaves: list[tuple[str, int]] = []  # the argument in which each input is, and which leaf of all it is
        self._shared = pytree.SharedObjects()
        self.inputs: list[TensorRef] = []
        self._arrays: set[str] = set()  # the inputs that were given as NumPy arrays
        self._roots: dict[str, Any] = dict(function.roots) if isinstance(function, NamedFunction) else {}
        backends: dict[str, Backend] = {}
        for root in self._roots.values():
            backend = registry.module_of(root)[0]
            if backend is not None:
                backends[backend.name] = backend
        arrays: list[tuple[int, TensorRef, tuple[str, int]]] = []
        indices = itertools.count()
        for argument, leaves in self._bound.named_leaves(self._shared):
            for (name, leaf), index in zip(leaves, indices, strict=False):
                backend = registry.backend_of(leaf)
                if backend is not None:
                    self.inputs.append(TensorRef(name, "input", leaf, len(self.inputs)))
                    self._leaves.append((argument, index))
                elif isinstance(leaf, np.ndarray):
                    arrays.append((len(self.inputs), TensorRef(name, "input", leaf), (argument, index)))
                elif type(leaf) not in pytree.SIMPLE:
                    backend, root = registry.module_of(leaf)
                    if backend is not None:
                        self._roots[name] = root
                if backend is not None:
                    backends[backend.name] = backend
        if not backends:  # a function that takes no tensors is of the framework of those that it is asked about
            tensors = [place.tensor for place in places if place.tensor is not None]
            backends = {backend.name: backend for backend in map(registry.require_backend, tensors)}
        self.backend = _only_backend(function, backends, args, [ref.tensor for _, ref, _ in arrays])
        if arrays:
            self._add_arrays(arrays)
        self.output_name = "output"
        """The name of the only floating output, once the function has run."""
        self.orders: dict[CaptureKey, int] = {}
        """How many tensors were captured before each that was asked for."""
        self.runs = 0
        """How often the function was called."""

    def _add_arrays(self, arrays: Sequence[tuple[int, TensorRef, tuple[str, int]]]) -> None:
        """Make inputs of NumPy arrays, as tensors, where the framework takes arrays as such.

        The function itself gets the array, unless it is replaced.
        """
        for tensors_before, ref, leaf in arrays:
            tensor = self.backend.names.from_numpy(ref.tensor, self.model)
            if tensor is not None:
                position = tensors_before + len(self._arrays)
                self.inputs.insert(position, replace(ref, tensor=tensor))
                self._leaves.insert(position, leaf)
                self._arrays.add(ref.name)
        self.inputs = [replace(ref, index=index) for index, ref in enumerate(self.inputs)]

    @cached_property
    def model(self) -> Model:
        """The function, with the names that it holds."""
        own = self.backend.names.model.root_of(self.function)
        return self.backend.names.model(self.function, self._roots if own is None else {"": own} | self._roots)

    @property
    def arguments(self) -> Mapping[str, Any]:
        """The arguments by name."""
        return self._bound.arguments

    @property
    def is_model(self) -> bool:
        """True if the function is a model, or is given one."""
        return bool(self._roots) or registry.backend_of_model(self.function) is not None

    def find_source(self, place: Place) -> TensorRef:
        """Return the tensor that a place names, as one to differentiate by.

        A name that is not known yet may be that of a value which the run computes.
        """
        if place.write is not None:
            raise PlaceError(f"{place!r} is about a write in a recording, and this is a function; leave write out")
        if place.tensor is not None:
            return self._find_identical(place.tensor)
        if place.name is None:
            return self._only_input()
        if is_pattern(place.name):
            raise PlaceError(f"{place} is a pattern of several names, and one place is needed here; give one name")
        name = place.name if GIVEN not in place.name else _NUMBERED_GIVEN.sub(rf"{GIVEN}\1", place.name)
        name = self.model.canonical_name(name)
        named = [ref for ref in self.inputs if ref.name == name.replace(":", ".")] or self._find_alias(name)
        named += [TensorRef(name, kind, tensor, exact=True) for kind, tensor in self.model.lookup(name)]
        name = name if named else self._given_by_parameter(name)
        if OUTPUT.match(name):
            named.append(TensorRef(name, "output"))
        fitting = [ref for ref in named if place.kind in (None, ref.kind)]
        kinds = [ref.kind for ref in fitting]
        if len(set(kinds)) > 1:
            raise PlaceError(
                f"{' and '.join(sorted(map(str, set(kinds))))} are both named {name!r}; say which, as in "
                f'eg.at("{name}", kind="{kinds[0]}")'
            )
        if len(fitting) > 1:
            raise PlaceError(
                f"{len(fitting)} {kinds[0]}s are named {name!r}; rename the keys of the dicts that hold them"
            )
        if fitting:
            return fitting[0]
        is_container = place.kind is None and any(ref.name.startswith(f"{name}.") for ref in self.inputs)
        if is_container or place.kind not in (None, *COMPUTED):
            raise self._unknown_name_error(name, place.kind, [])
        return TensorRef(name, place.kind)

    def find_target(self, place: Place) -> TensorRef:
        """Return the tensor that a place names, as one to differentiate; without a name the only floating output."""
        return ONLY_OUTPUT if place.name is None else self.find_source(place)

    def operand(self, place: Place, ref: TensorRef, index: int, tensor: Tensor, batch: bool) -> Operand:
        """Return one side of a Jacobian, once the tensor of its source or target is known."""
        name = self.output_name if ref is ONLY_OUTPUT else ref.name
        order = -1 if ref.tensor is not None else math.inf if ref is ONLY_OUTPUT else self.orders.get(ref.key)
        if place.tensor is not None:
            place = Place(None, name, place.index, ref.kind, pointwise=place.pointwise)
        return Operand.at(place, name, index, tensor, self.backend, batch, order)

    def run(
        self,
        sources: Sequence[TensorRef],
        tensors: Sequence[Any],
        targets: Sequence[TensorRef],
        cuts: Mapping[CaptureKey, Transform] = MappingProxyType({}),
        stops: bool = False,
    ) -> list[Tensor]:
        """Call the function with the sources replaced by `tensors`, and return the targets.

        For a source that the run computes, `tensors` has a function of it, a tensor to add to it, or None to leave it
        as it is. A computed value that `cuts` names is transformed in any case. With `stops` the function is left as
        soon as nothing that it may still compute can matter.
        """
        inputs, replacements, transforms = {}, [], dict(cuts)
        for source, x in zip(sources, tensors, strict=True):
            if source.index is not None:
                inputs[source.index] = x
            elif source.computed:
                transforms[source.key] = _as_transform(x)
            elif x is not None:
                replacements.append(Replacement(source.name, source.tensor, x))
        kept = [target.key for target in targets if target.tensor is None and target is not ONLY_OUTPUT]
        capture = None
        # The output is there after the run, and needs no capture if it is one tensor, which all of its names mean then.
        only_output = not transforms and all(key.kind == key.name == "output" for key in kept)
        if not only_output:
            inner = stops and not any(target.computed and target.kind == "output" for target in targets)
            stop = self._stop_rule((*transforms, *kept)) if inner else None
            capture = Capture(self.backend, transforms, kept, stop=stop)
        returned, outputs = self._run(inputs, replacements, capture)
        if only_output and kept and outputs[0][0] != "output":
            capture = Capture(self.backend, {}, kept)
            capture.capture("output", "output", returned)
        if capture is not None:
            self._require_captured(capture)
        results = []
        for target in targets:
            if target is ONLY_OUTPUT:
                results.append(self._only_output(outputs))
            elif target.tensor is None:
                results.append(outputs[0][1] if capture is None else capture.tensors[target.key])
            else:
                replaced = [x for source, x in zip(sources, tensors, strict=True) if source == target and x is not None]
                results.append(replaced[0] if replaced else target.tensor)
        return results

    def replace_inputs(self, tensors: Mapping[str, Tensor]) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Return the arguments, by position and by name, with the inputs of these names replaced."""
        indices = {ref.name: index for index, ref in enumerate(self.inputs)}
        return self._bound.split(self._arguments({indices[name]: tensor for name, tensor in tensors.items()}))

    def capture_all(self, given: bool) -> Capture:
        """Run the function once and capture all that has a name, also what modules are given if `given` is True."""
        capture = Capture(self.backend, {}, [], everything=True, given=given)
        self._run({}, [], capture)
        return capture

    def _run(
        self, inputs: Mapping[int, Tensor], replacements: Sequence[Replacement], capture: Capture | None
    ) -> tuple[Any, list[tuple[str, Tensor]]]:
        """Call the function with some tensors replaced, and return what it returned, and its tensors by name."""
        self.runs += 1
        args, kwargs = self._bound.split(self._arguments(inputs))
        inside = capture if capture is not None and capture.inside else None
        if not replacements and inside is None:
            with without_capture():
                returned = self.backend.names.traceable(self.function)(*args, **kwargs)
        else:
            try:
                with without_capture(), self.model.prepare(replacements, inside) as function:
                    returned = self.backend.names.traceable(function)(*args, **kwargs)
            except (RunStopped, Exception) as error:
                if inside is None or not inside.stopped:
                    raise
                if isinstance(error, RunStopped):
                    return None, []
            if inside is not None and inside.stopped:  # the user's code caught what was to leave it
                if self._single_calls is not None:
                    self._single_calls.stops = False
                return None, []
            if inside is not None and self._single_calls is not None:
                remember(self._single_calls, self.signature, inside.names_of_one())
        outputs = self._named_outputs(returned)
        if not outputs and not (capture and capture.values):
            raise FrameworkError(f"the function returned {type(returned).__name__} and no tensor; return a tensor")
        if capture is not None:
            returned = capture.capture("output", "output", returned)
            outputs = self._named_outputs(returned)
        return returned, outputs

    @cached_property
    def _single_calls(self) -> SingleCalls | None:
        """The names that complete runs have shown to be called once; None for a function that is no model or method."""
        structure = self.model.structure() if "" in self.model.roots else None
        return None if structure is None else single_calls(self.model.roots[""], structure)

    @cached_property
    def signature(self) -> Hashable:
        """The method, and shapes, dtypes and plain values of arguments, on which calls of layers may depend."""
        return getattr(self.function, "__name__", ""), signature(pytree.named_leaves(self._bound.arguments, ""))

    def _stop_rule(self, keys: Sequence[CaptureKey]) -> StopRule | None:
        """Return where a run for these names may be left; None if it must not be."""
        known = self._single_calls
        if known is not None and not known.stops:
            return None
        single = set() if known is None else known.names.get(self.signature, set())
        # What a module is given may have the name of a layer inside of it, which is called later.
        numbered = [
            key for key in keys if key.numbered and not (key.base.endswith(GIVEN) and self.model.lookup(key.base))
        ]
        return StopRule(single.union([key.name for key in numbered]), self.model.may_stop)

    def _named_outputs(self, returned: Any) -> list[tuple[str, Tensor]]:
        outputs = []
        for name, leaf in pytree.named_leaves(returned, "output"):
            backend = registry.backend_of(leaf)
            if backend is self.backend:
                outputs.append((name, leaf))
            elif backend is not None:
                raise FrameworkError(
                    f"{name} is not a tensor of {self.backend.name} as the arguments are; use one framework"
                )
        return outputs

    def _arguments(self, inputs: Mapping[int, Tensor]) -> dict[str, Any]:
        """Return all arguments by name, with some of the inputs replaced."""
        arguments = dict(self._bound.arguments)
        leaves: dict[int, Tensor] = {}
        containers = set()
        for index, x in inputs.items():
            argument, leaf = self._leaves[index]
            if arguments[argument] is self.inputs[index].tensor or isinstance(arguments[argument], np.ndarray):
                arguments[argument] = x
            else:
                leaves[leaf] = x
                containers.add(argument)
        if self._arrays and not self.backend.names.mixes_arrays:
            for ref, (argument, leaf) in zip(self.inputs, self._leaves, strict=True):
                if argument in containers and ref.name in self._arrays:
                    leaves.setdefault(leaf, ref.tensor)
        # All arguments at once, since an object that several of them share stays one.
        return pytree.replace_leaves(arguments, leaves) if leaves else arguments

    def _find_alias(self, name: str) -> list[TensorRef]:
        """Return the input for which the model has a name of its own."""
        keywords = self._bound.keywords
        name = self._shared.first_path(name if keywords is None else name.removeprefix(f"{keywords}."))
        spellings = [name, *self.model.input_aliases().get(name, ())]
        matches = [ref for spelling in spellings for ref in self.inputs if ref.name == spelling][:1]
        is_only_input = name == self.model.only_input and len(self.inputs) == 1
        return matches or (self.inputs if is_only_input else [])

    def _given_by_parameter(self, name: str) -> str:
        """Return `model.input:x` for `model.x`, if `x` is a parameter of a model that is an argument; or the name."""
        for prefix, root in self.model.roots.items():
            rest = split_prefix(prefix, name) if prefix else None
            if not rest:
                continue
            parameter, mark, part = re.match(r"(\w*)(.?)(.*)", rest).groups()  # type: ignore[union-attr]
            if parameter and parameter == self.model.only_input:
                return f"{prefix}{GIVEN}{mark and ':0.'}{part}"
            if parameter in positional_parameters(self.backend.names.forward_of(root)):
                return f"{prefix}{GIVEN}:{parameter}{mark and '.'}{part}"
        return name

    def _find_identical(self, tensor: Tensor) -> TensorRef:
        registry.require_backend(tensor)
        same = [ref for ref in self.inputs if ref.tensor is tensor]
        if not same:
            bare, names = self.backend.names.unwrap_parameter(tensor), self.backend.names
            same = [TensorRef(name, kind, x) for name, kind, x in self.model.named_tensors() if x is bare][:1]
            closed_over = names.name_closed_over(tensor) if registry.backend_of(tensor) is self.backend else None
            if not same and closed_over is not None:
                return TensorRef(closed_over, "parameter", bare)
        if len(same) == 1:
            return same[0]
        if same:
            raise PlaceError(f"the tensor was given as {listed([ref.name for ref in same])}; say which by its name")
        given = f"none of the inputs {listed([ref.name for ref in self.inputs])}" if self.inputs else "not an input"
        given += self.backend.names.closure_limit
        raise PlaceError(f"the tensor is {given}; pass it to the function, or name one of the function's tensors")

    def _only_input(self) -> TensorRef:
        floats = [ref for ref in self.inputs if self.backend.kind(ref.tensor) in "fc"]
        if self._arrays:  # tensors come before arrays
            floats = [ref for ref in floats if ref.name not in self._arrays] or floats
        if len(floats) != 1:
            parameters = [name for name, kind, _ in self.model.named_tensors() if kind == "parameter"]
            inputs = [(ref.name, ref.tensor) for ref in self.inputs]
            raise _not_one_error(inputs, [ref.name for ref in floats], "input", "wrt", parameters)
        return floats[0]

    def _only_output(self, outputs: Sequence[tuple[str, Tensor]]) -> Tensor:
        floats = [(name, tensor) for name, tensor in outputs if self.backend.kind(tensor) in "fc"]
        if len(floats) != 1:
            raise _not_one_error(outputs, [name for name, _ in floats], "output", "of")
        self.output_name, tensor = floats[0]
        return tensor

    def _require_captured(self, capture: Capture) -> None:
        """Check that every name that was asked for is that of one tensor which the run captured."""
        for key, matches in capture.matches.items():
            if len(matches) == 1:
                self.orders[key] = matches[0].order
                continue
            similar = [
                name
                for name, value in capture.named_values()
                if value in matches or (not matches and value.base == key.base and key.kind in (None, value.kind))
            ]
            shown = _GIVEN_NUMBER.sub(rf"\1{GIVEN}", key.name)
            if similar:
                what = "is none of these" if key.marked and not matches else f"is {len(similar)} tensors here; name one"
                raise PlaceError(f"{shown!r} {what}: {listed(similar)}")
            layers = [key.base] if key.kind in (None, "activation") else []
            layers += [key.base.removesuffix(GIVEN)] if key.kind in (None, "given") and key.base.endswith(GIVEN) else []
            if any(("activation", None) in self.model.lookup(layer) for layer in layers):
                raise PlaceError(
                    f"{shown!r} is not computed with these arguments; name a layer that is called, or pass "
                    "arguments that lead to this one"
                )
            raise self._unknown_name_error(key.name, key.kind, [name for name, _ in capture.named_values()])

    def _unknown_name_error(self, name: str, kind: str | None, captured: Sequence[str]) -> PlaceError:
        for _, leaves in self._bound.named_leaves(pytree.SharedObjects()):
            for prefix, leaf in leaves:
                if name.startswith(prefix):  # a Keras model on another backend has no names
                    registry.require_keras_on_tensorflow(leaf)
                if name == prefix and isinstance(leaf, np.ndarray):
                    return PlaceError(f"{name!r} is a NumPy array, which carries no gradients; give a tensor")
        known = [(ref.name, "input") for ref in self.inputs]
        known += [(other, other_kind) for other, other_kind, _ in self.model.named_tensors()]
        known += [(other, "activation") for other in self.model.layers()] + [(other, "output") for other in captured]
        known += [(other + GIVEN, "given") for other in self.model.layers() if kind == "given"]
        names = [other for other, other_kind in known if kind in (None, other_kind)] or [other for other, _ in known]
        names += [other for other in self.model.aliases() if kind is None]
        if name in names:
            return PlaceError(f"{name!r} did not exist before this first run, which has built it; call again")
        noun = "input of a module" if kind == "given" else kind or "tensor"
        text = nearest(name, names)
        if not self.is_model and text.startswith("there are") and any(separator in name for separator in "./"):
            text += self.backend.names.model_hint  # it looks like the name of something in a model
        return PlaceError(f"no {noun} is named {name!r}; {text}")


@dataclass(frozen=True)
class PartialCall:
    """A call as a function from some of its tensors to others: the `TensorFunction` that backends linearize."""

    call: BoundCall
    sources: Sequence[TensorRef]
    targets: Sequence[TensorRef]
    cuts: Mapping[CaptureKey, Transform] = field(default_factory=dict)
    stops: bool = True
    """True to leave the function once all targets are there; False to see all of it run."""

    @property
    def function(self) -> Callable[..., Any]:
        return self.call.function

    @property
    def model(self) -> Model:
        return self.call.model

    @property
    def others(self) -> list[Tensor]:
        return [ref.tensor for ref in self.call.inputs if ref not in self.sources]

    @property
    def held(self) -> list[bool]:
        return [source.tensor is not None and source.index is None for source in self.sources]

    @property
    def inside(self) -> bool:
        return bool(self.cuts) or not all(ref.at_boundary for ref in (*self.sources, *self.targets))

    def __call__(self, *tensors: Any) -> list[Tensor]:
        return self.call.run(self.sources, tensors, self.targets, self.cuts, self.stops)


def _as_transform(new: Any) -> Transform:
    if new is None:
        return lambda value: value
    return new if callable(new) else lambda value: value + new


def _only_backend(
    function: Callable[..., Any], backends: Mapping[str, Backend], args: Sequence[Any], arrays: Sequence[np.ndarray]
) -> Backend:
    if len(backends) > 1:
        raise FrameworkError(
            f"the arguments are tensors of {' and '.join(sorted(backends))}; use one framework for all"
        )
    if backends:
        return next(iter(backends.values()))
    backend = registry.backend_of_model(function)
    if backend is None and (arrays or not args):
        backend = backend_of_code(function)
        if arrays and backend is not None and not backend.names.takes_arrays:
            backend = None
    return backend or registry.require_backend(next(iter(arrays or args), None))  # raises, and says what fits


def _not_one_error(
    named: Sequence[Any], floats: Sequence[str], kind: str, argument: str, parameters: Sequence[str] = ()
) -> Exception:
    """Return the error about a tensor that was left unnamed, where there is none or are several."""
    if floats:
        return PlaceError(
            f"there are {len(floats)} {kind}s, {listed(floats)}; name one, as in {argument}={floats[0]!r}"
        )
    if not named:
        first = f", as in {argument}={parameters[0]!r}" if parameters else ""
        return PlaceError(f"there is no {kind} tensor; name a tensor{first}")
    dtypes = listed([f"{name}: {tensor.dtype}" for name, tensor in named])
    hint = f"; name a parameter, as in {argument}={parameters[0]!r}" if parameters else ""
    return DtypeError(f"no {kind} is floating point ({dtypes}), and no other dtype has gradients{hint}")
