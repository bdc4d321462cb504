"""`Session`: a model with its arguments, and the answers to the questions of pages about it.

Every number comes from a public verb, called as the copied code calls it. Values and gradients are kept for a while,
so that zooming, hovering and ranking read nothing again.
"""

import math
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import elementgrad as eg
from elementgrad import __version__
from elementgrad._cleanup import with_cleanup
from elementgrad._explore.messages import Edits, Element, Message, MessageError, parse_message
from elementgrad._explore.spelling import Spelling
from elementgrad._explore.views import (
    Layout,
    View,
    ViewWindow,
    describe_scale,
    is_narrow,
    plain_number,
    rank,
    thumbnail,
)
from elementgrad._names.call import BoundCall
from elementgrad._names.names import FLOATING, Name
from elementgrad._place.place import Place
from elementgrad._show.theme import THEMES
from elementgrad._show.values import has_channels_last
from elementgrad.errors import DtypeError, ElementgradError, OptionError, PlaceError, UnconnectedError, shortened

KEEP_BYTES = 256 << 20
"""Bytes of values and gradients that are kept."""
READ_BYTES = 64 << 20
"""Bytes of activations that one run gives."""
DRIVERS = 20
STEPS_AT_ONCE = 6
"""Layers before a target that a walk looks at first."""
MODEL_KINDS = ("parameter", "buffer")
Step = tuple[Element, Any, list[Element]]
"""A driver, its gradient, and the elements that were stepped over on the way to it."""


@dataclass(frozen=True)
class Failure:
    """An error of the user's model or of a question, for a page: one sentence."""

    text: str

    @classmethod
    def of(cls, error: BaseException) -> "Failure":
        text = str(error).strip() or type(error).__name__
        if isinstance(error, ElementgradError):
            return cls(shortened(text, 2000))
        return cls(shortened(f"{type(error).__name__}: {text}", 2000))


class Kept:
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


class Session:
    """A model and its arguments, ready to be asked about.

    >>> import torch
    >>> from elementgrad._explore.session import Session
    >>> session = Session(torch.nn.Linear(3, 2), [torch.ones(1, 3)])
    >>> [row["name"] for row in session.answer({"ask": "start"})["names"]]
    ['input', 'output', 'weight', 'bias']
    """

    @with_cleanup
    def __init__(
        self,
        model: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None = None,
        tokens: Sequence[Any] | None = None,
        labels: Sequence[Any] | None = None,
        spelling: Spelling | None = None,
        surround: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ):
        """Run the model once for its names.

        Args:
            model: A function or model.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            tokens: A text for each position of a sequence, or a list of them for each example.
            labels: A text for each class of the output, or else for each example.
            spelling: The words of the user's code for all of these.
            surround: Makes the context in which every question is answered.
        """
        self.surround = surround
        self.spelling = spelling or Spelling.of(None, model, args, kwargs or {})
        with surround():
            call = BoundCall(model, args, kwargs or {})
            # Arrays become tensors once, so that each input is one of the arguments itself, or inside one.
            self.args, self.kwargs = call.replace_inputs({ref.name: ref.tensor for ref in call.inputs})
            self.model, self.backend = model, call.backend
            self.names: Sequence[Name] = eg.names(model, *self.args, kwargs=self.kwargs)
        self._kept = Kept(KEEP_BYTES)
        self._last_step: tuple[tuple[Element, Edits], Step] | None = None
        outputs = [row for row in self.names if row.kind == "output"]
        inputs = [row for row in self.names if row.kind == "input"]
        self._output = next(iter([*filter(_has_slopes, outputs), *outputs, self.names[-1]]))
        self.tokens, count = _check_tokens(tokens)
        self.examples = self._count_examples(inputs, outputs, count)
        data = [self.names[tensor] for tensor in self._positions]
        last = any(len(row.shape) > 2 and has_channels_last(row.shape, None, self.backend.name) for row in data)
        self.layouts = [
            # What is inside of an argument is a parameter, as functions of JAX take them.
            Layout.of(
                row.shape, "parameter" if row in inputs and row not in data else row.kind, self.examples, count, last
            )
            for row in self.names
        ]
        self.labels, self.example_labels = self._place_labels(labels)

    @property
    def title(self) -> str:
        name = getattr(self.model, "__name__", None) or type(self.model).__name__
        return f"{self.spelling.function} ({name})" if self.spelling.function != name else str(name)

    @with_cleanup  # or the verbs that it calls would not see the context
    def answer(self, message: Mapping[str, Any] | Message) -> dict[str, Any]:
        """Answer a question; an error of the question or of the user's model is the answer, too."""
        try:
            parsed = message if isinstance(message, Message) else parse_message(message)
            with self.surround():
                return ANSWERS[parsed.ask](self, parsed)
        except Exception as error:  # whatever the user's model raises is shown to the user
            return {"error": Failure.of(error).text}

    def close(self) -> None:
        """Forget all that was read."""
        self._kept.clear()
        self._last_step = None

    # Questions

    def start(self, message: Message | None = None) -> dict[str, Any]:
        """Return all that a page needs before it asks anything."""
        rows = [
            {
                "name": row.name,
                "kind": row.kind,
                "shape": row.shape,
                "dtype": row.dtype,
                "floating": row.dtype.startswith(FLOATING[:2]),
                "editable": self._position_of(tensor) is not None and row.dtype.startswith(FLOATING[:2]),
                "layout": layout.to_dict(row.shape),
                "labels": tensor in self.labels,
            }
            for tensor, (row, layout) in enumerate(zip(self.names, self.layouts, strict=True))
        ]
        return {
            "title": self.title,
            "framework": self.backend.name,
            "version": __version__,
            "names": rows,
            "source": self._default_source,
            "output": list(self.names).index(self._output),
            "examples": self.examples or 0,
            "exampleLabels": self.example_labels,
            "labels": next(iter(self.labels.values()), []),
            "tokens": self.tokens,
            "colours": {name: list(theme.gradient) for name, theme in THEMES.items()},
            "nonfinite": THEMES["light"].nonfinite,
        }

    def thumbnails(self, message: Message) -> dict[str, Any]:
        """Return small pictures of tensors, by their numbers."""
        for tensor in message.tensors:
            self._row(tensor)
        self._load_values(message.tensors, message.edits)
        pictures = {}
        for tensor in message.tensors:
            try:
                values = self._values(tensor, message.edits)
            except ElementgradError:
                continue  # such as complex numbers, which have no picture
            if values.size:
                example = message.index[:1] if message.index and self.layouts[tensor].example == 0 else ()
                pictures[tensor] = thumbnail(values, self.layouts[tensor], example)
        return {"thumbnails": pictures}

    def view(self, message: Message) -> dict[str, Any]:
        """Return the cells of a tensor that are in sight; with `of`, its gradient as well."""
        tensor = _given(message.tensor)
        row = self._row(tensor)
        values = self._values(tensor, message.edits)
        if not values.size:
            raise OptionError(f"{row.name} of shape {row.shape} has no elements, so there is nothing to draw")
        result: dict[str, Any] = {"tensor": tensor, "scale": self._kept.describe(("value", tensor, message.edits))}
        gradient = None
        if message.of is not None:
            result["of"] = {
                "tensor": message.of.tensor,
                "index": message.of.index,
                "value": plain_number(self._element_value(message.of, message.edits)),
                "narrow": is_narrow(self._values(message.of.tensor, message.edits)),
                "text": self._text(message.of),
            }
            try:
                gradient = self._gradient(message.of, tensor, message.edits)
                result["gradientScale"] = self._kept.describe(("gradient", message.of, tensor, message.edits))
            except (UnconnectedError, DtypeError) as error:
                result["missing"] = Failure.of(error).text
        layout = self.layouts[tensor]
        window = ViewWindow.of(layout, row.shape, message.index or (), message.tiles, message.rows, message.columns)
        return {**result, **View.of(layout, window, values, gradient).to_dict()}

    def shares(self, message: Message) -> dict[str, Any]:
        """Return the number, split by the uses of the source, as `eg.contributions` has them."""
        of, wrt = _given(message.of), self._element(message)
        shares = self._call(eg.contributions, message.edits, of=self._place(of), wrt=self._place(wrt))
        numbers = [self._number(share.value) for share in shares]
        total = self._number(shares.total)
        return {
            "shares": [
                {"operation": share.operation, "where": _user_line(share.where), "value": plain_number(number)}
                for share, number in zip(shares, numbers, strict=True)
            ],
            "total": plain_number(total),
            "narrow": is_narrow(np.asarray(total)),
        }

    def explain(self, message: Message) -> dict[str, Any]:
        """Return the verdict of `eg.explain` on an element, or on the whole source."""
        wrt = self._source_place(message)
        diagnosis = self._call(eg.explain, message.edits, of=self._place(_given(message.of)), wrt=wrt)
        place = replace(diagnosis, where=_user_line(diagnosis.where)).place
        return {
            "verdict": diagnosis.verdict,
            "cause": diagnosis.cause,
            "sentence": diagnosis.sentence,
            "where": place if diagnosis.fix is not None else None,
            "evidence": list(diagnosis.evidence) if diagnosis.cause is None else [],
            "fix": diagnosis.fix,
        }

    def field(self, message: Message) -> dict[str, Any]:
        """Return the receptive field of the target in the source; without one, the box of gradients that are not zero.

        `eg.field` knows it from the operations alone, where a framework has cones. Elsewhere the numbers have to do.
        """
        of, tensor = _given(message.of), _given(message.tensor)
        shape = self._row(tensor).shape
        try:
            place = self._call(eg.field, message.edits, of=self._place(of), wrt=self._place(tensor))
            ends = [span.indices(size)[:2] for span, size in zip(_slices(place), shape, strict=True)]
            return {"field": ends if all(stop > start for start, stop in ends) else None, "exact": True}
        except (ElementgradError, NotImplementedError):
            pass
        try:
            where = np.nonzero(self._gradient(of, tensor, message.edits))
        except (UnconnectedError, DtypeError):
            return {"field": None, "exact": False}
        found = bool(where) and len(where[0]) > 0
        return {"field": [[int(axis.min()), int(axis.max()) + 1] for axis in where] if found else None, "exact": False}

    def drivers(self, message: Message) -> dict[str, Any]:
        """Return the elements of the source with the largest gradients in size."""
        tensor = _given(message.tensor)
        gradient = self._gradient(_given(message.of), tensor, message.edits)
        values = self._values(tensor, message.edits)
        rows = [
            {
                "index": index,
                "text": self._text(Element(tensor, index)),
                "gradient": plain_number(gradient[index]),
                "value": plain_number(values[index]),
            }
            for index in rank(gradient, values, DRIVERS)
        ]
        nonzero = int(np.count_nonzero(gradient))
        narrow, narrow_values = is_narrow(gradient), is_narrow(values)
        return {
            "drivers": rows,
            "nonzero": nonzero,
            "size": gradient.size,
            "narrow": narrow,
            "narrowValues": narrow_values,
        }

    def walk(self, message: Message) -> dict[str, Any]:
        """Return the strongest driver of the target in the layer before it, and the layer before that one.

        Layers that only hand the number on, as a reshape or a dropout in evaluation does, are stepped over; their
        elements are in `passed`, the nearest to the target first.
        """
        step, slope, passed = self._step_back(_given(message.of), message.edits)
        return {
            "tensor": step.tensor,
            "index": step.index,
            "source": self._source_before(step, message.edits),
            "value": plain_number(slope),
            "passed": [{"tensor": each.tensor, "index": each.index} for each in passed],
        }

    def code(self, message: Message) -> dict[str, Any]:
        """Return the line of Python that gives the same numbers: the gradient, or without `of` the values."""
        edits: dict[Any, list[str]] = {}
        for element, number in message.edits:
            index = ", ".join(map(str, element.index)) or "..."
            edits.setdefault(self._position_of(element.tensor), []).append(f"[{index}].set({number!r})")
        source = self._source_place(message)
        places = {"of": source} if message.of is None else {"of": self._place(message.of), "wrt": source}
        return {"code": self.spelling.call("value" if message.of is None else "grad", places, edits)}

    def report(self, message: Message) -> dict[str, Any]:
        """Return the page that `eg.report` writes."""
        of, wrt = self._place(_given(message.of)), self._source_place(message)
        tokens = None
        if self.tokens and message.index is None and self.layouts[_given(message.tensor)].kind == "tokens":
            tokens = self.tokens[0]
        with TemporaryDirectory() as folder:
            path = Path(folder, "report.html")
            args, kwargs = self._arguments(message.edits)
            eg.report(path, self.model, *args, kwargs=kwargs, of=of, wrt=wrt, tokens=tokens)
            return {"html": path.read_text("utf-8"), "file": "report.html"}

    def find(self, message: Message) -> dict[str, Any]:
        """Return the tensor and the element that a text names; the text is parsed, never evaluated."""
        place = Place.parse(message.text)
        fitting = [
            tensor for tensor, row in enumerate(self.names) if row.name == place.name and place.kind in (None, row.kind)
        ]
        if not fitting:
            raise PlaceError(f"no tensor is named {place.name!r}")
        tensor = fitting[0]
        row = self._row(tensor)
        if not place.index:
            return {"tensor": tensor, "index": None}
        coordinates = np.asarray(place.select(row.shape).coords()).reshape(-1, len(row.shape))
        if len(coordinates) != 1:
            raise PlaceError(f"{place} names {len(coordinates)} elements; name one, with an int for each axis")
        return {"tensor": tensor, "index": [int(position) for position in coordinates[0]]}

    # Reads

    def _call(self, verb: Callable[..., Any], edits: Edits, **options: Any) -> Any:
        args, kwargs = self._arguments(edits)
        return verb(self.model, *args, kwargs=kwargs, **options)

    def _arguments(self, edits: Edits) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Return the arguments with some input elements set to other values, in copies."""
        args, kwargs = list(self.args), dict(self.kwargs)
        for element, number in edits:
            key = self._position_of(element.tensor)
            if key is None:
                raise PlaceError(f"{self._row(element.tensor).name} is no input that can be edited")
            self._require_element(element)
            home: Any = args if isinstance(key, int) else kwargs
            home[key] = eg.at(home[key])[element.index].set(number)
        return args, kwargs

    def _values(self, tensor: int, edits: Edits) -> np.ndarray:
        array = self._kept.get(("value", tensor, edits))
        if array is not None:
            return array
        self._load_values([tensor], edits)
        array = self._kept.get(("value", tensor, edits))
        if array is None:
            raise DtypeError(f"{self._row(tensor).name} is of dtype {self._row(tensor).dtype}, which has no picture")
        return array

    def _load_values(self, tensors: Sequence[int], edits: Edits) -> None:
        """Read the values of tensors that are not kept, as many in one run as fit."""
        needed = [tensor for tensor in dict.fromkeys(tensors) if self._kept.get(("value", tensor, edits)) is None]
        needed = [tensor for tensor in needed if not self._row(tensor).dtype.startswith("complex")]
        args, kwargs = self._arguments(edits)
        call = BoundCall(self.model, args, kwargs)
        chunk: list[int] = []
        for tensor in needed:
            row = self._row(tensor)
            if row.kind in ("input", *MODEL_KINDS):  # known without a run
                self._keep_value(tensor, edits, call.find_source(self._place(tensor)).tensor)
                continue
            chunk.append(tensor)
            if sum(8 * math.prod(self._row(each).shape) for each in chunk) > READ_BYTES:
                self._run_for_values(chunk, edits)
                chunk = []
        self._run_for_values(chunk, edits)

    def _run_for_values(self, tensors: Sequence[int], edits: Edits) -> None:
        if tensors:
            places = [self._place(tensor) for tensor in tensors]
            for tensor, value in zip(tensors, self._call(eg.value, edits, of=places), strict=True):
                self._keep_value(tensor, edits, value)

    def _keep_value(self, tensor: int, edits: Edits, value: Any) -> None:
        self._kept.put(("value", tensor, edits), self._to_numpy(value))

    def _gradient(self, of: Element, tensor: int, edits: Edits) -> np.ndarray:
        """Return the gradient of an element with respect to a whole tensor, as `eg.grad` gives it."""
        self._require_element(of)
        key = "gradient", of, tensor, edits
        array = self._kept.get(key)
        if array is None:
            array = self._to_numpy(self._call(eg.grad, edits, of=self._place(of), wrt=self._place(tensor)))
            self._kept.put(key, array)
        return array

    def _step_back(self, of: Element, edits: Edits) -> Step:
        """Return the strongest driver of an element in the nearest layer before it, its gradient, and what is passed.

        Before the first layer are the inputs, or where no input has gradients, as with tokens, the parameters.
        """
        if self._last_step is not None and self._last_step[0] == (of, edits):
            return self._last_step[1]  # it was read for the source of the step before
        passed: list[Element] = []
        candidates, count = self._candidates_before(of.tensor), STEPS_AT_ONCE
        while candidates:
            # What is near is read at the cost of a few layers; if none of it will do, the rest takes few reads.
            group, candidates, count = candidates[:count], candidates[count:], 8 * count
            places = [self._place(tensor) for tensor in group]
            slopes = self._call(eg.grad, edits, of=self._place(of), wrt=places, unconnected="zero")
            gradients = {tensor: self._to_numpy(each) for tensor, each in zip(group, slopes, strict=True)}
            driving = [tensor for tensor in group if gradients[tensor].any()]
            self._load_values(driving, edits)
            for tensor in driving:
                gradient = gradients[tensor]
                best = rank(gradient, self._values(tensor, edits), 1)[0]
                driver, slope = Element(tensor, best), gradient[best]
                # One number that goes through unchanged is no step; x + 1 has a gradient of 1 as well, and is one.
                hands_on = slope == 1 and np.count_nonzero(gradient) == 1
                hands_on = hands_on and self._element_value(driver, edits) == self._element_value(of, edits)
                if not hands_on or self._row(tensor).kind != "activation":
                    self._last_step = (of, edits), (driver, slope, passed)
                    return driver, slope, passed
                passed.append(driver)
        raise PlaceError(f"nothing before {self._text(of)} has a gradient that is not zero")

    def _candidates_before(self, tensor: int) -> list[int]:
        """Return the tensors that a walk may step back to, the nearest first."""
        rows = list(enumerate(self.names))
        row = self._row(tensor)
        if row.kind not in ("output", "activation"):
            raise PlaceError(f"{row.name} is of kind {row.kind}, and nothing comes before it")
        layers = [other for other, each in rows if each.kind == "activation" and _has_slopes(each)]
        before = [other for other in layers if row.kind == "output" or other < tensor]
        inputs = [other for other, each in rows if each.kind == "input" and _has_slopes(each)]
        default = [other for other in inputs if other == self._default_source]
        parameters = [other for other, each in rows if each.kind == "parameter" and _has_slopes(each)]
        return [*before[::-1], *(default or inputs or parameters)]

    def _source_before(self, of: Element, edits: Edits) -> int:
        """Return the tensor by which an element is to be shown: the layer before it, if there is one."""
        if self._row(of.tensor).kind not in ("output", "activation"):
            return of.tensor
        try:
            return self._step_back(of, edits)[0].tensor
        except PlaceError:
            return self._default_source

    # Names and places

    def _row(self, tensor: int) -> Name:
        if not 0 <= tensor < len(self.names):
            raise MessageError(f"there is no tensor {tensor}; there are {len(self.names)}")
        return self.names[tensor]

    def _require_element(self, element: Element) -> None:
        shape = self._row(element.tensor).shape
        fits = len(element.index) == len(shape) and all(
            0 <= position < size for position, size in zip(element.index, shape, strict=True)
        )
        if not fits:
            raise MessageError(f"{list(element.index)} is no element of a tensor of shape {tuple(shape)}")

    def _element(self, message: Message) -> Element:
        element = Element(_given(message.tensor), _given(message.index))
        self._require_element(element)
        return element

    def _place(self, what: int | Element) -> Place:
        tensor = what if isinstance(what, int) else what.tensor
        row = self._row(tensor)
        same = [other for other in self.names if other.name == row.name]
        # The name is taken as it is: `eg.at` would parse it, and a module may be called anything.
        place = Place(None, row.name, kind=row.kind if len(same) > 1 else None)
        if isinstance(what, int) or not what.index:
            return place
        self._require_element(what)
        return place[what.index]

    def _source_place(self, message: Message) -> Place:
        """Return the element that is asked about, or else the whole source."""
        return self._place(_given(message.tensor) if message.index is None else self._element(message))

    def _text(self, element: Element) -> str:
        return str(self._place(element))

    def _position_of(self, tensor: int) -> int | str | None:
        """Return the position or the keyword of the argument that an input is; None for one inside of an argument."""
        return self._positions.get(tensor)

    @cached_property
    def _positions(self) -> dict[int, int | str]:
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
    def _default_source(self) -> int:
        """The floating input that goes with the output, or else the first activation that has gradients."""
        inputs = [tensor for tensor, row in enumerate(self.names) if row.kind == "input" and _has_slopes(row)]
        direct = [tensor for tensor in inputs if self._position_of(tensor) is not None]
        matching = [tensor for tensor in inputs if self.names[tensor].shape[:1] == self._output.shape[:1]]
        computed = [tensor for tensor, row in enumerate(self.names) if row.kind == "activation" and _has_slopes(row)]
        both = [tensor for tensor in direct if tensor in matching]
        has_data = not inputs or bool(direct)
        return [*both, *direct, *(matching if has_data else []), *computed, *inputs, 0][0]

    def _count_examples(self, inputs: Sequence[Name], outputs: Sequence[Name], tokens: int | None) -> int | None:
        """Return how many examples there are, if the first axis of an input and of the output counts them."""
        first = self._output.shape[:1]
        if not first or (tokens is not None and self.tokens and len(self.tokens) == 1 and first[0] == tokens):
            return None
        paired = [row for row in inputs if len(row.shape) > 1 and row.shape[:1] == first]
        return first[0] if paired and first[0] else None

    def _place_labels(self, labels: Sequence[Any] | None) -> tuple[dict[int, list[str]], list[str]]:
        """Return texts for elements by tensor, and for examples."""
        if labels is None:
            return {}, []
        texts = _texts(labels, "labels")
        if self._output.shape and self._output.shape[-1] == len(texts):
            fitting = [
                tensor
                for tensor, (row, layout) in enumerate(zip(self.names, self.layouts, strict=True))
                if row.kind in ("output", "activation") and layout.kind == "bars" and row.shape[-1] == len(texts)
            ]
            return dict.fromkeys(fitting, texts), []
        if self.examples == len(texts):
            return {}, texts
        raise OptionError(
            f"labels= has {len(texts)} texts, and the output has shape {tuple(self._output.shape)}; give one for each "
            "class, or one for each example"
        )

    # Numbers

    def _to_numpy(self, tensor: Any) -> np.ndarray:
        kind = self.backend.kind(tensor)
        # Integers go to JavaScript as float64, in which those up to 2**53 are exact.
        array = self.backend.to_numpy(tensor) if kind == "f" else self.backend.to_float64(tensor)
        if array is None:
            raise DtypeError("these numbers are traced, and cannot be shown")
        return np.asarray(array)

    def _number(self, tensor: Any) -> Any:
        return self._to_numpy(tensor).reshape(-1)[0]

    def _element_value(self, element: Element, edits: Edits) -> Any:
        self._require_element(element)
        return self._values(element.tensor, edits)[element.index]


ANSWERS: dict[str, Callable[[Session, Message], dict[str, Any]]] = {
    "start": Session.start,
    "thumbnails": Session.thumbnails,
    "view": Session.view,
    "shares": Session.shares,
    "explain": Session.explain,
    "field": Session.field,
    "drivers": Session.drivers,
    "walk": Session.walk,
    "code": Session.code,
    "report": Session.report,
    "find": Session.find,
}


def _given(value: Any) -> Any:
    """Return a field that the question needs, which `parse_message` has checked."""
    assert value is not None
    return value


def _user_line(where: str | None) -> str | None:
    """Return a line of the user's; None for the start of our own thread, where a model has no line of its own."""
    return None if where is None or where.startswith(f"{os.path.basename(threading.__file__)}:") else where


def _has_slopes(row: Name) -> bool:
    return row.dtype.startswith(FLOATING[:2])


def _slices(place: Place) -> list[slice]:
    return [slice(span.start, span.stop, span.step) for span in place.index]  # type: ignore[union-attr]


def _texts(texts: Any, option: str) -> list[str]:
    if isinstance(texts, (str, bytes)) or not hasattr(texts, "__iter__"):
        raise OptionError(f'{option}= takes a list of texts, as in {option}=["a", "cat"]')
    return [str(text) for text in texts]


def _check_tokens(tokens: Any) -> tuple[list[list[str]], int | None]:
    """Return the texts of each example, and how many there are in one."""
    if tokens is None:
        return [], None
    nested = not isinstance(tokens, (str, bytes)) and hasattr(tokens, "__iter__")
    rows = list(tokens) if nested else [tokens]
    if not any(isinstance(row, (list, tuple)) for row in rows):
        return [_texts(tokens, "tokens")], len(rows)
    checked = [_texts(row, "tokens") for row in rows]
    if len({len(row) for row in checked}) > 1:
        raise OptionError("tokens= has lists of different lengths; give as many texts for each example")
    return checked, len(checked[0])
