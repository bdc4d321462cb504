"""`Session`: a model with its arguments, and the answers to the questions of pages about it.

It has a method for each question. Where the numbers come from is in `tensors.py`.
"""

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import elementgrad as eg
from elementgrad import __version__
from elementgrad._cleanup import with_cleanup
from elementgrad._explore.messages import Element, Message, parse_message
from elementgrad._explore.spelling import Spelling
from elementgrad._explore.tensors import Tensors
from elementgrad._explore.views import (
    Layout,
    View,
    ViewWindow,
    is_narrow,
    plain_number,
    rank,
    thumbnail,
)
from elementgrad._explore.walk import Walker
from elementgrad._names.names import FLOATING, Name
from elementgrad._place.place import Place
from elementgrad._show.theme import THEMES
from elementgrad._show.values import has_channels_last
from elementgrad.errors import DtypeError, ElementgradError, OptionError, PlaceError, UnconnectedError, shortened

DRIVERS = 20


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
            self.tensors = Tensors(model, args, kwargs or {})
        self.names, self.backend = self.tensors.names, self.tensors.backend
        self._walker = Walker(self.tensors)
        self.tokens, count = _check_tokens(tokens)
        data = [self.names[tensor] for tensor in self.tensors.data]
        self.examples = self._count_examples(data, count)
        last = any(len(row.shape) > 2 and has_channels_last(row.shape, None, self.backend.name) for row in data)
        kinds = ["parameter" if row.kind == "input" and row not in data else row.kind for row in self.names]
        self.layouts = [
            Layout.of(row.shape, kind, self.examples, count, last) for row, kind in zip(self.names, kinds, strict=True)
        ]
        self.labels, self.example_labels = self._place_labels(labels)

    @property
    def title(self) -> str:
        name = getattr(self.tensors.model, "__name__", None) or type(self.tensors.model).__name__
        return f"{self.spelling.function} ({name})" if self.spelling.function != name else str(name)

    @with_cleanup  # or the verbs that it calls would not see the context
    def answer(self, message: Mapping[str, Any] | Message) -> dict[str, Any]:
        """Answer a question; an error of the question or of the user's model is the answer, too."""
        try:
            parsed = message if isinstance(message, Message) else parse_message(message)
            with self.surround():
                return ANSWERS[parsed.ask](self, parsed)
        except Exception as error:  # whatever the user's model raises is shown to the user
            return {"error": describe_error(error)}

    def close(self) -> None:
        """Forget all that was read."""
        self.tensors.forget()
        self._walker.forget()

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
                "editable": self.tensors.position_of(tensor) is not None and row.dtype.startswith(FLOATING[:2]),
                "layout": layout.to_dict(row.shape),
                "labels": self._has_classes(row, layout),
            }
            for tensor, (row, layout) in enumerate(zip(self.names, self.layouts, strict=True))
        ]
        return {
            "title": self.title,
            "framework": self.backend.name,
            "version": __version__,
            "names": rows,
            "source": self.tensors.default_source,
            "output": list(self.names).index(self.tensors.output),
            "examples": self.examples or 0,
            "exampleLabels": self.example_labels,
            "labels": self.labels,
            "tokens": self.tokens,
            "colours": {name: list(theme.gradient) for name, theme in THEMES.items()},
            "nonfinite": THEMES["light"].nonfinite,
        }

    def thumbnails(self, message: Message) -> dict[str, Any]:
        """Return small pictures of tensors, by their numbers."""
        for tensor in message.tensors:
            self.tensors.row(tensor)
        self.tensors.load_values(message.tensors, message.edits)
        pictures = {}
        for tensor in message.tensors:
            try:
                values = self.tensors.values(tensor, message.edits)
            except ElementgradError:
                continue  # such as complex numbers, which have no picture
            if values.size:
                example = message.index[:1] if message.index and self.layouts[tensor].example == 0 else ()
                pictures[tensor] = thumbnail(values, self.layouts[tensor], example)
        return {"thumbnails": pictures}

    def view(self, message: Message) -> dict[str, Any]:
        """Return the cells of a tensor that are in sight; with `of`, its gradient as well."""
        tensor = _given(message.tensor)
        row = self.tensors.row(tensor)
        values = self.tensors.values(tensor, message.edits)
        if not values.size:
            raise OptionError(f"{row.name} of shape {row.shape} has no elements, so there is nothing to draw")
        result: dict[str, Any] = {"tensor": tensor, "scale": self.tensors.scale_of_values(tensor, message.edits)}
        gradient = None
        if message.of is not None:
            result["of"] = {
                "tensor": message.of.tensor,
                "index": message.of.index,
                "value": plain_number(self.tensors.element_value(message.of, message.edits)),
                "narrow": is_narrow(self.tensors.values(message.of.tensor, message.edits)),
                "text": self.tensors.text(message.of),
            }
            try:
                gradient = self.tensors.gradient(message.of, tensor, message.edits)
                result["gradientScale"] = self.tensors.scale_of_gradient(message.of, tensor, message.edits)
            except (UnconnectedError, DtypeError) as error:
                result["missing"] = describe_error(error)
        layout = self.layouts[tensor]
        window = ViewWindow.of(layout, row.shape, message.index or (), message.tiles, message.rows, message.columns)
        return {**result, **View.of(layout, window, values, gradient).to_dict()}

    def shares(self, message: Message) -> dict[str, Any]:
        """Return the number, split by the uses of the source, as `eg.contributions` has them."""
        of, wrt = self.tensors.place(_given(message.of)), self.tensors.place(self._element(message))
        shares = self.tensors.call(eg.contributions, message.edits, of=of, wrt=wrt)
        numbers = [self.tensors.number(share.value) for share in shares]
        total = self.tensors.number(shares.total)
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
        diagnosis = self.tensors.call(eg.explain, message.edits, of=self.tensors.place(_given(message.of)), wrt=wrt)
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
        shape = self.tensors.row(tensor).shape
        try:
            places = {"of": self.tensors.place(of), "wrt": self.tensors.place(tensor)}
            place = self.tensors.call(eg.field, message.edits, **places)
            ends = [span.indices(size)[:2] for span, size in zip(_slices(place), shape, strict=True)]
            return {"field": ends if ends and all(stop > start for start, stop in ends) else None, "exact": True}
        except (ElementgradError, NotImplementedError):
            pass
        try:
            where = np.argwhere(self.tensors.gradient(of, tensor, message.edits))
        except (UnconnectedError, DtypeError):
            where = np.empty((0, len(shape)), dtype=np.intp)
        box = [[int(axis.min()), int(axis.max()) + 1] for axis in where.T] if where.size else None
        return {"field": box, "exact": False}

    def drivers(self, message: Message) -> dict[str, Any]:
        """Return the elements of the source with the largest gradients in size."""
        tensor = _given(message.tensor)
        gradient = self.tensors.gradient(_given(message.of), tensor, message.edits)
        values = self.tensors.values(tensor, message.edits)
        rows = [
            {
                "index": index,
                "text": self.tensors.text(Element(tensor, index)),
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
        step, slope, passed = self._walker.step_back(_given(message.of), message.edits)
        return {
            "tensor": step.tensor,
            "index": step.index,
            "source": self._walker.source_before(step, message.edits),
            "value": plain_number(slope),
            "passed": [{"tensor": each.tensor, "index": each.index} for each in passed],
        }

    def code(self, message: Message) -> dict[str, Any]:
        """Return the line of Python that gives the same numbers: the gradient, or without `of` the values."""
        edits: dict[Any, list[str]] = {}
        for element, number in message.edits:
            index = ", ".join(map(str, element.index)) or "..."
            edits.setdefault(self.tensors.position_of(element.tensor), []).append(f"[{index}].set({number!r})")
        source = self._source_place(message)
        places = {"of": source} if message.of is None else {"of": self.tensors.place(message.of), "wrt": source}
        return {"code": self.spelling.call("value" if message.of is None else "grad", places, edits)}

    def report(self, message: Message) -> dict[str, Any]:
        """Return the page that `eg.report` writes."""
        target, layout = _given(message.of), self.layouts[_given(message.tensor)]
        of, wrt, tokens = self.tensors.place(target), self._source_place(message), None
        if self.tokens and message.index is None and layout.kind == "tokens":
            axis = self.layouts[target.tensor].example
            example = 0 if axis is None else target.index[axis]
            tokens = self.tokens[example if len(self.tokens) > 1 else 0]
            if layout.example is not None:
                wrt = wrt[example]  # the texts are those of one example
        with TemporaryDirectory() as folder:
            path = Path(folder, "report.html")
            args, kwargs = self.tensors.arguments(message.edits)
            eg.report(path, self.tensors.model, *args, kwargs=kwargs, of=of, wrt=wrt, tokens=tokens)
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
        row = self.tensors.row(tensor)
        if not place.index:
            return {"tensor": tensor, "index": None}
        coordinates = np.asarray(place.select(row.shape).coords()).reshape(-1, len(row.shape))
        if len(coordinates) != 1:
            raise PlaceError(f"{place} names {len(coordinates)} elements; name one, with an int for each axis")
        return {"tensor": tensor, "index": [int(position) for position in coordinates[0]]}

    # Names and places

    def _element(self, message: Message) -> Element:
        element = Element(_given(message.tensor), _given(message.index))
        self.tensors.require_element(element)
        return element

    def _source_place(self, message: Message) -> Place:
        """Return the element that is asked about, or else the whole source."""
        return self.tensors.place(_given(message.tensor) if message.index is None else self._element(message))

    def _count_examples(self, inputs: Sequence[Name], tokens: int | None) -> int | None:
        """Return how many examples there are, if the first axis of an input and of the output counts them."""
        first = self.tensors.output.shape[:1]
        if not first or (tokens is not None and self.tokens and len(self.tokens) == 1 and first[0] == tokens):
            return None
        paired = [row for row in inputs if len(row.shape) > 1 and row.shape[:1] == first]
        return first[0] if paired and first[0] else None

    def _has_classes(self, row: Name, layout: Layout) -> bool:
        """Return True if the columns of a tensor's picture are the classes of the output."""
        is_computed = row.kind in ("output", "activation") and layout.kind in ("bars", "matrix", "tokens")
        return bool(self.labels) and is_computed and row.shape[-1] == len(self.labels)

    def _place_labels(self, labels: Sequence[Any] | None) -> tuple[list[str], list[str]]:
        """Return texts for the classes of the output, and for examples."""
        if labels is None:
            return [], []
        texts = _texts(labels, "labels")
        if self.tensors.output.shape and self.tensors.output.shape[-1] == len(texts):
            return texts, []
        if self.examples == len(texts):
            return [], texts
        raise OptionError(
            f"labels= has {len(texts)} texts, and the output has shape {tuple(self.tensors.output.shape)}; give one "
            "for each class, or one for each example"
        )


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


def describe_error(error: BaseException) -> str:
    """Return an error of the user's model or of a question in one sentence."""
    text = str(error).strip() or type(error).__name__
    return shortened(text if isinstance(error, ElementgradError) else f"{type(error).__name__}: {text}", 2000)


def _given(value: Any) -> Any:
    """Return a field that the question needs, which `parse_message` has checked."""
    assert value is not None
    return value


def _user_line(where: str | None) -> str | None:
    """Return a line of the user's; None for the start of our own thread, where a model has no line of its own."""
    return None if where is None or where.startswith(f"{os.path.basename(threading.__file__)}:") else where


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
