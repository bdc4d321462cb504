"""`Tensors`: the tensors of a model by their numbers in the list of names, with places, values and gradients.

Every number comes from a public verb, called as the copied code calls it. Values and gradients are kept for a while,
so that zooming, hovering and ranking read nothing again.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

import elementgrad as eg
from elementgrad._explore.messages import MAX_INT, Edits, Element, MessageError
from elementgrad._explore.views import describe_scale
from elementgrad._names.call import BoundCall
from elementgrad._names.names import FLOATING, Name
from elementgrad._place.place import Place
from elementgrad.errors import DtypeError, PlaceError

KEEP_BYTES = 256 << 20
"""Bytes of values and gradients that are kept."""
READ_BYTES = 64 << 20
"""Bytes of activations that one run gives."""
MODEL_KINDS = ("parameter", "buffer")
ROUNDED = "integers beyond 2 to the 53 are rounded here"


class ArrayCache:
    """Arrays by key, of which the oldest go when there are too many bytes, and their scales."""

    def __init__(self, limit: int):
        self._limit = limit
        self._arrays: OrderedDict[Any, np.ndarray] = OrderedDict()
        self._scales: dict[Any, dict[str, Any]] = {}

    def get(self, key: Any) -> np.ndarray | None:
        if key in self._arrays:
            self._arrays.move_to_end(key)
        return self._arrays.get(key)

    def put(self, key: Any, array: np.ndarray) -> None:
        self._arrays[key] = array
        while len(self._arrays) > 1 and sum(array.nbytes for array in self._arrays.values()) > self._limit:
            oldest, _ = self._arrays.popitem(last=False)
            self._scales.pop(oldest, None)

    def describe(self, key: Any) -> dict[str, Any]:
        """Return the scale of an array that is kept; of a large one it takes a while, and zooming asks again."""
        if key not in self._scales:
            self._scales[key] = describe_scale(self._arrays[key])
        return self._scales[key]

    def clear(self) -> None:
        self._arrays.clear()
        self._scales.clear()


class Tensors:
    """The tensors of a model at its arguments.

    >>> import torch
    >>> from elementgrad._explore.tensors import Tensors
    >>> tensors = Tensors(torch.nn.Linear(3, 2), [torch.ones(1, 3)], {})
    >>> [row.name for row in tensors.names], tensors.values(0, ()).tolist()
    (['input', 'output', 'weight', 'bias'], [[1.0, 1.0, 1.0]])
    """

    def __init__(self, model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]):
        """Run the model once for its names."""
        call = BoundCall(model, args, kwargs)
        # Arrays become tensors once, so that each input is one of the arguments itself, or inside one.
        self.args, self.kwargs = call.replace_inputs({ref.name: ref.tensor for ref in call.inputs})
        self.model, self.backend = model, call.backend
        self.names: Sequence[Name] = eg.names(model, *self.args, kwargs=self.kwargs)
        outputs = [row for row in self.names if row.kind == "output"]
        self.output = next(iter([*filter(has_slopes, outputs), *outputs, self.names[-1]]))
        """The first output that has gradients."""
        self._cache = ArrayCache(KEEP_BYTES)

    def forget(self) -> None:
        """Drop all that was read."""
        self._cache.clear()

    def row(self, tensor: int) -> Name:
        if not 0 <= tensor < len(self.names):
            raise MessageError(f"there is no tensor {tensor}; there are {len(self.names)}")
        return self.names[tensor]

    def require_element(self, element: Element) -> None:
        shape = self.row(element.tensor).shape
        fits = len(element.index) == len(shape) and all(
            0 <= position < size for position, size in zip(element.index, shape, strict=True)
        )
        if not fits:
            raise MessageError(f"{list(element.index)} is no element of a tensor of shape {tuple(shape)}")

    def place(self, what: int | Element) -> Place:
        """Return the place of a tensor or of an element."""
        tensor = what if isinstance(what, int) else what.tensor
        row = self.row(tensor)
        same = [other for other in self.names if other.name == row.name]
        # The name is taken as it is: `eg.at` would parse it, and a module may be called anything.
        place = Place(None, row.name, kind=row.kind if len(same) > 1 else None)
        if isinstance(what, int) or not what.index:
            return place
        self.require_element(what)
        return place[what.index]

    def text(self, element: Element) -> str:
        return str(self.place(element))

    def position_of(self, tensor: int) -> int | str | None:
        """Return the position or the keyword of the argument that an input is; None for one inside of an argument."""
        return self.positions.get(tensor)

    @cached_property
    def positions(self) -> dict[int, int | str]:
        inputs = {ref.name: ref.tensor for ref in BoundCall(self.model, self.args, self.kwargs).inputs}
        arguments: list[tuple[int | str, Any]] = [*enumerate(self.args), *self.kwargs.items()]
        return {
            tensor: key
            for tensor, row in enumerate(self.names)
            if row.kind == "input"
            for key, argument in arguments
            if argument is inputs.get(row.name)
        }

    @cached_property
    def data(self) -> list[int]:
        """The inputs that are no parameters. Functions of JAX take these inside of an argument."""
        every = [tensor for tensor, row in enumerate(self.names) if row.kind == "input"]
        has_own = any(row.kind == "parameter" for row in self.names)
        return every if has_own or not self.positions else [tensor for tensor in every if tensor in self.positions]

    @cached_property
    def default_source(self) -> int:
        """The floating input that goes with the output, or else the first activation that has gradients."""
        floating = [tensor for tensor, row in enumerate(self.names) if has_slopes(row)]
        data = [tensor for tensor in floating if tensor in self.data]
        matching = [tensor for tensor in data if self.names[tensor].shape[:1] == self.output.shape[:1]]
        computed, inputs = [
            [tensor for tensor in floating if self.names[tensor].kind == kind] for kind in ("activation", "input")
        ]
        return [*matching, *data, *computed, *inputs, 0][0]

    def call(self, verb: Callable[..., Any], edits: Edits, **options: Any) -> Any:
        """Call a public verb on the model, with some input elements edited."""
        args, kwargs = self.arguments(edits)
        return verb(self.model, *args, kwargs=kwargs, **options)

    def arguments(self, edits: Edits) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Return the arguments with some input elements set to other values, in copies."""
        args, kwargs = list(self.args), dict(self.kwargs)
        for element, number in edits:
            key = self.position_of(element.tensor)
            if key is None:
                raise PlaceError(f"{self.row(element.tensor).name} is no input that can be edited")
            self.require_element(element)
            home: Any = args if isinstance(key, int) else kwargs
            home[key] = eg.at(home[key])[element.index].set(number)
        return args, kwargs

    def values(self, tensor: int, edits: Edits) -> np.ndarray:
        """Return the values of a tensor, as `eg.value` gives them."""
        array = self._cache.get(("value", tensor, edits))
        if array is not None:
            return array
        self.load_values([tensor], edits)
        array = self._cache.get(("value", tensor, edits))
        if array is None:
            raise DtypeError(f"{self.row(tensor).name} is of dtype {self.row(tensor).dtype}, which has no picture")
        return array

    def load_values(self, tensors: Sequence[int], edits: Edits) -> None:
        """Read the values of tensors that are not kept, as many in one run as fit."""
        needed = [tensor for tensor in dict.fromkeys(tensors) if self._cache.get(("value", tensor, edits)) is None]
        needed = [tensor for tensor in needed if not self.row(tensor).dtype.startswith("complex")]
        args, kwargs = self.arguments(edits)
        call = BoundCall(self.model, args, kwargs)
        chunk: list[int] = []
        for tensor in needed:
            row = self.row(tensor)
            if row.kind in ("input", *MODEL_KINDS):  # known without a run
                self._keep_value(tensor, edits, call.find_source(self.place(tensor)).tensor)
                continue
            chunk.append(tensor)
            if sum(8 * math.prod(self.row(each).shape) for each in chunk) > READ_BYTES:
                self._run_for_values(chunk, edits)
                chunk = []
        self._run_for_values(chunk, edits)

    def _run_for_values(self, tensors: Sequence[int], edits: Edits) -> None:
        if tensors:
            places = [self.place(tensor) for tensor in tensors]
            for tensor, value in zip(tensors, self.call(eg.value, edits, of=places), strict=True):
                self._keep_value(tensor, edits, value)

    def _keep_value(self, tensor: int, edits: Edits, value: Any) -> None:
        self._cache.put(("value", tensor, edits), self.to_numpy(value))

    def gradient(self, of: Element, tensor: int, edits: Edits) -> np.ndarray:
        """Return the gradient of an element with respect to a whole tensor, as `eg.grad` gives it."""
        self.require_element(of)
        key = "gradient", of, tensor, edits
        array = self._cache.get(key)
        if array is None:
            array = self.to_numpy(self.call(eg.grad, edits, of=self.place(of), wrt=self.place(tensor)))
            self._cache.put(key, array)
        return array

    def to_numpy(self, tensor: Any) -> np.ndarray:
        kind = self.backend.kind(tensor)
        # Integers go to JavaScript as float64, in which those up to 2**53 are exact.
        array = self.backend.to_numpy(tensor) if kind == "f" else self.backend.to_float64(tensor)
        if array is None:
            raise DtypeError("these numbers are traced, and cannot be shown")
        return np.asarray(array)

    def number(self, tensor: Any) -> Any:
        return self.to_numpy(tensor).reshape(-1)[0]

    def element_value(self, element: Element, edits: Edits) -> Any:
        self.require_element(element)
        return self.values(element.tensor, edits)[element.index]

    def scale_of_values(self, tensor: int, edits: Edits) -> dict[str, Any]:
        """Return the scale of values that were just read."""
        scale = self._cache.describe(("value", tensor, edits))
        is_rounded = not has_slopes(self.row(tensor)) and max(scale["highest"], -scale["lowest"]) >= MAX_INT
        return {**scale, "notes": [*scale["notes"], ROUNDED]} if is_rounded else scale

    def scale_of_gradient(self, of: Element, tensor: int, edits: Edits) -> dict[str, Any]:
        """Return the scale of a gradient that was just read."""
        return self._cache.describe(("gradient", of, tensor, edits))


def has_slopes(row: Name) -> bool:
    """Return True if a tensor is of a dtype that has gradients and a picture."""
    return row.dtype.startswith(FLOATING[:2])
