"""One question about a derivative, answered: the numbers, the plan, the diagnosis, and the sections that show them.

`report`: a question about a function, or elements that were trained, as one HTML file.
"""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from elementgrad._backends import registry
from elementgrad._explain.api import explain
from elementgrad._explain.diagnosis import Diagnosis
from elementgrad._files import writable
from elementgrad._html import rows_of
from elementgrad._names import pytree
from elementgrad._names.call import BoundCall, Operand
from elementgrad._optional import require
from elementgrad._place.place import Place
from elementgrad._read.api import NOTHING, jacobian, parsed, parsed_target
from elementgrad._read.jacobian import Jacobian, sides
from elementgrad._show.heatmaps import COLOURS, channels_last
from elementgrad._show.page import (
    CARRIED,
    Callout,
    Code,
    Facts,
    Image,
    NumbersTable,
    Page,
    Part,
    Prose,
    Section,
    StepList,
    Table,
    Tone,
)
from elementgrad._show.plot import READ
from elementgrad._show.values import Scale, floats
from elementgrad._train.elements import Elements, patch_of
from elementgrad._train.patch import Patch, shorten
from elementgrad.errors import DtypeError, ElementgradError, PlaceError, SizeError, UnconnectedError

TONES: dict[str, Tone] = {"flows": "good", "zero": "odd", "unconnected": "bad", "nonfinite": "bad", "mismatch": "bad"}
STEPS = 40
"""Steps of a path that are shown."""


@dataclass(frozen=True)
class ReportQuery:
    """What is differentiated with respect to what."""

    f: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    of: Any
    wrt: Any

    def answered(self, budget: int | str | None) -> "ReportItem":
        """Compute the derivative, and ask why it is what it is."""
        refused: ElementgradError | None = None
        made: Jacobian | None = None
        values: np.ndarray | None = None
        try:
            made = jacobian(self.f, *self.args, kwargs=self.kwargs, of=self.of, wrt=self.wrt, budget=budget)
            _require_small(made)
            values = floats(made.dense())
        except (UnconnectedError, DtypeError) as error:
            refused = error
        try:
            found = explain(self.f, *self.args, kwargs=self.kwargs, of=self.of, wrt=self.wrt)
        except ElementgradError as error:
            if refused is not None:
                raise refused from None
            return ReportItem(self, made, values, None, str(error))
        return ReportItem(self, made, values, found, "")

    @property
    def values(self) -> np.ndarray | None:
        """The numbers that it is differentiated with respect to; None for what is there only in a run."""
        tensor = BoundCall(self.f, self.args, self.kwargs).find_source(parsed(self.wrt)).tensor
        return None if tensor is None else floats(tensor)

    @property
    def name(self) -> str:
        """What the function is called."""
        return str(getattr(self.f, "__name__", None) or type(self.f).__name__)


@dataclass(frozen=True)
class ReportItem:
    """A question, and what was found."""

    question: ReportQuery
    jacobian: Jacobian | None
    values: np.ndarray | None
    """None where there is no gradient."""
    diagnosis: Diagnosis | None
    unexplained: str
    """Why there is no diagnosis."""

    @property
    def names(self) -> tuple[str, str]:
        """The texts of both places."""
        if self.diagnosis is not None:
            return shorten(self.diagnosis.of), shorten(self.diagnosis.wrt)
        assert self.jacobian is not None
        places = parsed_target(self.question.of), parsed(self.question.wrt)
        of, wrt = [_text(side.name, place) for side, place in zip(sides(self.jacobian), places, strict=True)]
        return of, wrt

    def sections(self, before: str, room: int, tokens: Sequence[str] | None, channels: str | None) -> list[Section]:
        """The question, the answer, the numbers, the plan and the path, under headings that begin alike."""
        answer: list[Part] = [self._verdict()]
        made = [Section("The question", self._asked()), Section("The answer", answer)]
        if self.values is not None and self.jacobian is not None:
            of, wrt = sides(self.jacobian)
            whole = self.values.reshape(wrt.shape) if math.prod(of.shape) == 1 else self.values
            beside = self.question.values if math.prod(of.shape) == 1 else None
            if beside is not None and wrt.base is not None:
                beside = beside.reshape(-1)[wrt.base.flat()]
            answer += [Facts(_summary(self.values)), *self._pictures(of, wrt, whole, beside, tokens, channels)]
            numbers = NumbersTable.of(whole, f"gradient of {self.names[0]} by {self.names[1]}", beside, room)
            made.append(Section("The numbers", [numbers]))
            made.append(Section("The plan", [Facts(self.jacobian.plan().lines)]))
        path = self._path()
        if path:
            made.append(Section("The path", path))
        return [Section(before + section.title, section.parts) for section in made] if before else made

    def _asked(self) -> list[Part]:
        of, wrt = self.names
        rows = [("function", self.question.name), ("derivative of", of), ("with respect to", wrt)]
        if self.jacobian is not None:
            outer, inner = sides(self.jacobian)
            value = floats(self.jacobian.value)
            size = f"value {value.item():.6g}" if value.size == 1 else f"shape {outer.shape}"
            backend = registry.require_backend(inner.tensor)
            rows[1] = ("derivative of", f"{of}, {size}")
            rows[2] = ("with respect to", f"{wrt}, shape {inner.shape}, {backend.dtype(inner.tensor)}")
            rows.append(("framework", backend.name))
        name = str(getattr(self.question.f, "__name__", "model"))
        return [Facts(rows), Code(f'eg.grad({name if name.isidentifier() else "f"}, ..., of="{of}", wrt="{wrt}")')]

    def _verdict(self) -> Part:
        if self.diagnosis is None:
            return Callout(f"{self.names[0]} has a gradient with respect to {self.names[1]}.")
        lines = str(self.diagnosis).split("\n")
        odd = self.diagnosis.verdict == "flows" and self.diagnosis.cause is not None
        return Callout(lines[0], lines[1:], "odd" if odd else TONES[self.diagnosis.verdict])

    def _pictures(
        self,
        of: Operand,
        wrt: Operand,
        whole: np.ndarray,
        beside: np.ndarray | None,
        tokens: Sequence[str] | None,
        channels: str | None,
    ) -> list[Part]:
        if not whole.size:
            return [Prose("No elements are named, so there is nothing to draw.")]
        title = f"{self.names[0]} by {self.names[1]}"
        if math.prod(of.shape) != 1:
            return [Image.of(whole.reshape(-1, math.prod(wrt.shape)), kind="matrix", title=title)]
        if tokens is not None:
            return [Image.of(whole, tokens=tokens, title=title)]
        framework = registry.require_backend(wrt.tensor).name
        if len(wrt.shape) > 2 and channels is None:
            channels = "last" if channels_last(wrt.shape, None, framework) else "first"
        image = beside is not None and wrt.base is None and len(whole.shape) == 4 and len(whole) == 1
        if image and whole.shape[-1 if channels == "last" else 1] in COLOURS:
            return [Image.of(whole, image=beside, title=title, channels=channels)]
        return [Image.of(whole, title=title, channels=channels)]

    def _path(self) -> list[Part]:
        if self.diagnosis is None:
            return [Prose(f"eg.explain does not answer here: {self.unexplained}.")]
        parts: list[Part] = [Prose(f"Seen: {fact}.") for fact in self.diagnosis.evidence]
        steps = [(number, step, step.endswith("(broken here)")) for number, step in enumerate(self.diagnosis.path, 1)]
        if len(steps) > STEPS:
            parts.append(Prose(f"{STEPS} of {len(steps)} operations: those at the ends, and the one that breaks it."))
            steps = [step for step in steps if step[2] or not STEPS // 2 < step[0] <= len(steps) - STEPS // 2]
        return [*parts, StepList(steps)] if steps else parts


def _summary(values: np.ndarray) -> list[tuple[str, str]]:
    scale = Scale.of(values)
    broken = [(name, str(count)) for name, count in scale.broken.items()]
    if values.size == 1:
        return [("gradient", f"{values.item():.8g}")]
    return [
        ("numbers", f"{values.size}, of which {scale.nonzero} are not zero"),
        ("range", f"{scale.lowest:.6g} to {scale.highest:.6g}" if scale.finite else "none is finite"),
        *broken,
    ]


def _text(name: str, place: Place) -> str:
    index = Place(None, name, place.index, None, pointwise=place.pointwise)
    return shorten(str(index) if place.index else name)


def _require_small(made: Jacobian) -> None:
    size = math.prod(made.shape)
    if size > READ:
        raise SizeError(f'{made!r} has {size} entries, too many for a report; name fewer, as in of="output[0]"')


TOUCHED = 200
"""Rows of the table of elements before and after."""


def report(
    path: str | os.PathLike[str],
    f: Callable[..., Any] | Elements | Patch,
    *args: Any,
    kwargs: Mapping[str, Any] = NOTHING,
    of: Any = None,
    wrt: Any = None,
    title: str | None = None,
    budget: int | str | None = None,
    tokens: Sequence[str] | None = None,
    channels: str | None = None,
) -> Path:
    """Write one HTML file about a derivative, or about what was trained, and return its path.

    The file needs no network: the question, the gradient in pictures and in numbers to copy and download, the plan by
    which it was computed, and what `eg.explain` says, also where there is no gradient at all. `f`, `of`, `wrt` and
    `budget` are those of `eg.jacobian`, and `tokens` and `channels` those of `eg.plot`. With elements or a patch
    instead of a function, the file shows what they were and what they are now.

    >>> import tempfile, pathlib, torch, elementgrad as eg
    >>> path = pathlib.Path(tempfile.mkdtemp(), "report.html")
    >>> eg.report(path, lambda x: (x**2).sum(), torch.tensor([1.0, 2.0]), title="squares") == path
    True
    >>> "<title>squares</title>" in path.read_text()
    True
    """
    require("matplotlib jinja2 pygments", "eg.report", "show")
    writable(path)
    if isinstance(f, (Elements, Patch)):
        return _trained(patch_of(f) if isinstance(f, Elements) else f, title).write(path)
    answers = [
        ReportQuery(f, args, kwargs, *sides).answered(budget)
        for sides in product(pytree.leaves_of(of), pytree.leaves_of(wrt))
    ]
    if not answers:
        raise PlaceError("of or wrt names nothing; name a tensor, or leave it out where there is only one")
    sections = []
    for answer in answers:
        before = "" if len(answers) == 1 else f"{' by '.join(answer.names)}: "
        sections += answer.sections(before, CARRIED // len(answers), tokens, channels)
    first = answers[0]
    more = f", and {len(answers) - 1} more" if len(answers) > 1 else ""
    lead = f"How {first.names[0]} changes with {first.names[1]}{more}."
    return Page(title or f"The gradient of {first.question.name}", sections, lead).write(path)


def _trained(patch: Patch, title: str | None) -> Page:
    """What elements were, and what they are."""
    from elementgrad._show.steps import elements

    names, before, after = elements(patch)
    with np.errstate(invalid="ignore"):
        moved = after - before
    far = np.abs(moved)[np.isfinite(moved)].max(initial=0.0)
    same = np.count_nonzero((before == after) | (np.isnan(before) & np.isnan(after)))
    rows = [
        [name, *[f"{number:.9g}" for number in numbers]]
        for name, *numbers in zip(names, before, after, moved, strict=True)
    ]
    facts = [
        ("places", str(len(patch.entries))),
        ("elements", str(patch.size)),
        ("moved", f"{patch.size - same} of {patch.size}"),
        ("largest move", f"{far:.6g}"),
    ]
    heads, *places = rows_of(patch)
    drawn: list[Part] = [Image.of(patch, title="Before and after")] if patch.size else [Prose("Nothing is named.")]
    touched = Table.of(["element", "before", "after", "change"], rows, TOUCHED, "elements")
    sections = [
        Section("What was trained", [Facts(facts), Table(heads, places)]),
        Section("Before and after", drawn),
        Section("The elements", [touched]),
    ]
    lead = "Every element that trained, what it was and what it is now; all others are as they were."
    return Page(title or "What was trained", sections, lead)
