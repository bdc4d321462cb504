"""`eg.report`: one HTML file about a derivative, about elements that were trained, or about an audit.

For each pair of places in `of` and `wrt`, a `ReportQuery` computes the derivative and its diagnosis, and a
`ReportItem` lays them out in sections. `page.py` writes these as HTML.
"""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from elementgrad._audit.result import Audit
from elementgrad._backends import registry
from elementgrad._explain.api import explain
from elementgrad._explain.diagnosis import Diagnosis
from elementgrad._files import writable
from elementgrad._html import rows_of
from elementgrad._names import pytree
from elementgrad._names.arguments import NOTHING, gather_arguments
from elementgrad._names.call import BoundCall, Operand
from elementgrad._names.names import expand_patterns
from elementgrad._place.place import ONLY, Place, parse_place, parse_target
from elementgrad._read.api import jacobian
from elementgrad._read.jacobian import Jacobian, operands
from elementgrad._show.page import (
    DOWNLOAD_LIMIT,
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
from elementgrad._show.plot import MAX_ENTRIES, drop_leading_ones
from elementgrad._show.theme import get_theme
from elementgrad._show.values import IMAGE_CHANNELS, Scale, has_channels_last, to_floats
from elementgrad._train.elements import Elements, patch_of
from elementgrad._train.patch import Patch, shorten
from elementgrad.errors import DtypeError, ElementgradError, PlaceError, SizeError, UnconnectedError, require_packages

TONES: dict[str, Tone] = {"flows": "good", "zero": "odd", "unconnected": "bad", "nonfinite": "bad", "mismatch": "bad"}
MAX_STEPS = 40
"""Steps of a path that are shown."""
MAX_PANELS = 16
"""Gradients in one picture."""
MAX_ELEMENTS = 200
"""Rows of the table of elements before and after."""


def report(
    path: str | os.PathLike[str],
    f: Callable[..., Any] | Elements | Patch | Audit,
    *args: Any,
    kwargs: Mapping[str, Any] = NOTHING,
    of: Any = None,
    wrt: Any = None,
    title: str | None = None,
    budget: int | str | None = None,
    tokens: Sequence[str] | None = None,
    channels: str | None = None,
    names_from: Any = None,
    **arguments: Any,
) -> Path:
    """Write one HTML file about a derivative, about what was trained, or about an audit.

    The file needs no network. It has the question, the gradient in pictures and in numbers to copy and download, the
    plan by which it was computed, and what `eg.explain` says, also where there is no gradient at all. For elements or
    a patch it shows what they were and what they are now.

    Args:
        path: Where the file is written.
        f: A function or model, or elements that train, or a patch, or what `eg.audit` returned.
        *args: Positional arguments of `f`.
        kwargs: Keyword arguments of `f`.
        of: The place to differentiate, or several, as for `eg.jacobian`.
        wrt: The place to differentiate with respect to, or several, also by a pattern such as `"h.*.weight[0]"`.
        title: The text at the head.
        budget: Memory for sweeps that run at once, in bytes or as a text such as `"200MB"`.
        tokens: One text for each position of a sequence, as for `eg.plot`.
        channels: `"first"` or `"last"`, as for `eg.plot`.
        names_from: A model that `f` calls, as for `eg.jacobian`.
        arguments: More keyword arguments of `f`.

    Returns:
        The path of the file.

    Raises:
        PlaceError: `of` or `wrt` names nothing.
        SizeError: The derivative has too many entries; name fewer elements.

    >>> import tempfile, pathlib, torch, elementgrad as eg
    >>> path = pathlib.Path(tempfile.mkdtemp(), "report.html")
    >>> eg.report(path, lambda x: (x**2).sum(), torch.tensor([1.0, 2.0]), title="squares") == path
    True
    >>> "<title>squares</title>" in path.read_text()
    True
    """
    require_packages("matplotlib jinja2 pygments", "eg.report", "show")
    writable(path)
    if isinstance(f, (Elements, Patch)):
        return _patch_page(patch_of(f) if isinstance(f, Elements) else f, title).write(path)
    if isinstance(f, Audit):
        return _audit_page(f, title).write(path)
    f, args, kwargs = gather_arguments(report, f, args, kwargs, arguments, names_from)
    parsed = pytree.map_tree(of, parse_target), pytree.map_tree(wrt, parse_place)
    sides = expand_patterns(BoundCall(f, args, kwargs, pytree.leaves_of(parsed[1])), *parsed)
    targets, places = ([None if place is ONLY else place for place in pytree.leaves_of(side)] for side in sides)
    queries = [ReportQuery(f, args, kwargs, *pair) for pair in product(targets, places)]
    if not queries:
        raise PlaceError("of or wrt names nothing; name a tensor, or leave it out where there is only one")
    shared = _answer_together(f, args, kwargs, targets, places, budget) if len(queries) > 1 else None
    answers = [(None, None)] * len(queries) if shared is None else shared
    items = [query.answer(budget, *answer) for query, answer in zip(queries, answers, strict=True)]
    together, pictures = _draw_together(items, tokens)
    sections = []
    for item in items:
        prefix = "" if len(items) == 1 else f"{' by '.join(item.names)}: "
        parts = item.make_sections(DOWNLOAD_LIMIT // len(items), tokens, channels, item not in together)
        for number, section in enumerate(parts):
            # With several questions, the contents have one entry for each.
            entry = None if len(items) == 1 else " by ".join(item.names) if number == 0 else ""
            sections.append(Section(prefix + section.title, section.parts, entry))
    first = items[0]
    others = f", and {len(items) - 1} more" if len(items) > 1 else ""
    lead = f"How {first.names[0]} changes with {first.names[1]}{others}."
    return Page(title or f"The gradient of {first.query.name}", sections, lead, pictures).write(path)


def _draw_together(items: "Sequence[ReportItem]", tokens: Any) -> "tuple[list[ReportItem], list[Part]]":
    """Draw gradients that are matrices of one shape in one picture; return whose they are, and the pictures."""
    by_shape: dict[tuple[int, ...], list[tuple[ReportItem, np.ndarray]]] = {}
    for item in items if tokens is None else ():
        matrix = item.matrix
        if matrix is not None:
            by_shape.setdefault(matrix.shape, []).append((item, matrix))
    drawn: list[ReportItem] = []
    pictures: list[Part] = []
    for group in by_shape.values():
        for several in [group[start : start + MAX_PANELS] for start in range(0, len(group), MAX_PANELS)]:
            if len(several) > 1:
                drawn += [item for item, _ in several]
                pictures.append(_picture_together(*zip(*several, strict=True)))
    return drawn, pictures


def _picture_together(items: "Sequence[ReportItem]", matrices: Sequence[np.ndarray]) -> Part:
    from elementgrad._show.pictures import draw_side_by_side  # imports matplotlib

    names = [" by ".join(item.names) for item in items]
    wrt = {item.names[1] for item in items}
    title = "Side by side"
    if len(wrt) == 1:
        names, title = [item.names[0] for item in items], f"By {next(iter(wrt))}"

    def draw(theme: str) -> Any:
        picture, notes, alt = draw_side_by_side(matrices, names, get_theme(theme))
        return picture.finish(title, alt, notes)

    return Image.drawn_by(draw)


def _answer_together(
    f: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    targets: list[Any],
    places: list[Any],
    budget: int | str | None,
) -> list[tuple[Jacobian, Diagnosis]] | None:
    """Return Jacobian and diagnosis of all pairs from one evaluation and one record of the function.

    None if a pair has neither, since its error is then to be raised for that pair alone.
    """
    options: dict[str, Any] = {"kwargs": kwargs, "of": targets, "wrt": places}
    try:
        derivatives = jacobian(f, *args, budget=budget, **options)
        diagnoses = explain(f, *args, **options)
    except ElementgradError:
        return None
    return [pair for row in zip(derivatives, diagnoses, strict=True) for pair in zip(*row, strict=True)]


def _audit_page(audit: Audit, title: str | None) -> Page:
    head: list[Part] = [Callout(audit.sentence, (), "good" if audit.ok else "bad")]
    sections = [Section("Result", head)]
    if audit.findings:
        heads, *rows = rows_of(audit)
        head.append(Table.of(heads, rows, MAX_ELEMENTS, "findings"))
        lines = [Callout(str(each), each.evidence, "bad") for each in audit.findings]
        sections.append(Section("Findings", lines))
    if audit.notes:
        notes = [Callout(str(each), [", ".join(each.parameters)], "odd") for each in audit.notes]
        sections.append(Section("Notes", notes))
    for word, names in (("Frozen", audit.frozen), ("Excepted", audit.excepted)):
        if names:
            sections.append(Section(word, [Prose(", ".join(names))]))
    return Page(title or "Which parameters learn", sections, "Every parameter: does it learn, and if not, why.")


def _patch_page(patch: Patch, title: str | None) -> Page:
    from elementgrad._show.pictures import elements_of_patch  # imports matplotlib

    names, before, after = elements_of_patch(patch)
    with np.errstate(invalid="ignore"):
        change = after - before
    largest = np.abs(change)[np.isfinite(change)].max(initial=0.0)
    unchanged = np.count_nonzero((before == after) | (np.isnan(before) & np.isnan(after)))
    rows = [
        [name, *[f"{number:.9g}" for number in numbers]]
        for name, *numbers in zip(names, before, after, change, strict=True)
    ]
    facts = [
        ("places", str(len(patch.entries))),
        ("elements", str(patch.size)),
        ("moved", f"{patch.size - unchanged} of {patch.size}"),
        ("largest change", f"{largest:.6g}"),
    ]
    heads, *places = rows_of(patch)
    picture: list[Part] = [Image.of(patch, title="Before and after")] if patch.size else [Prose("Nothing is named.")]
    elements = Table.of(["element", "before", "after", "change"], rows, MAX_ELEMENTS, "elements")
    sections = [
        Section("What was trained", [Facts(facts), Table(heads, places)]),
        Section("Before and after", picture),
        Section("The elements", [elements]),
    ]
    lead = "Every trained element, before and after; all others are unchanged."
    return Page(title or "What was trained", sections, lead)


@dataclass(frozen=True)
class ReportQuery:
    """A function with its arguments, the place to differentiate and the one with respect to which."""

    f: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    of: Any
    wrt: Any

    def answer(
        self, budget: int | str | None, derivative: Jacobian | None = None, diagnosis: Diagnosis | None = None
    ) -> "ReportItem":
        """Compute what is not given, the derivative and the diagnosis; raise its error if there is neither."""
        options = {"kwargs": self.kwargs, "of": self.of, "wrt": self.wrt}
        values: np.ndarray | None = None
        refusal: ElementgradError | None = None
        try:
            derivative = (
                derivative if derivative is not None else jacobian(self.f, *self.args, budget=budget, **options)
            )
            _require_small(derivative)
            values = to_floats(derivative.dense())
        except (UnconnectedError, DtypeError) as error:
            refusal = error
        try:
            diagnosis = diagnosis if diagnosis is not None else explain(self.f, *self.args, **options)
        except ElementgradError as error:
            if refusal is not None:
                raise refusal from None
            return ReportItem(self, derivative, values, None, str(error))
        return ReportItem(self, derivative, values, diagnosis, "")

    @property
    def wrt_values(self) -> np.ndarray | None:
        """The values of the tensor that `wrt` names; None for one that is known only after the forward."""
        tensor = BoundCall(self.f, self.args, self.kwargs).find_source(parse_place(self.wrt)).tensor
        return None if tensor is None else to_floats(tensor)

    @property
    def name(self) -> str:
        return str(getattr(self.f, "__name__", None) or type(self.f).__name__)


@dataclass(frozen=True, eq=False)
class ReportItem:
    """A query with its derivative and diagnosis, either of which may be missing."""

    query: ReportQuery
    jacobian: Jacobian | None
    values: np.ndarray | None
    """None if there is no gradient."""
    diagnosis: Diagnosis | None
    unexplained: str
    """The reason if there is no diagnosis."""

    @property
    def names(self) -> tuple[str, str]:
        """The texts of `of` and `wrt`."""
        if self.diagnosis is not None:
            return shorten(self.diagnosis.of), shorten(self.diagnosis.wrt)
        assert self.jacobian is not None
        places = parse_target(self.query.of), parse_place(self.query.wrt)
        of, wrt = [_place_text(side.name, place) for side, place in zip(operands(self.jacobian), places, strict=True)]
        return of, wrt

    @property
    def matrix(self) -> np.ndarray | None:
        """The gradient of one element, if it is drawn as rows and columns; None for images and feature maps."""
        if self.values is None or self.jacobian is None or not self.values.size:
            return None
        of, wrt = operands(self.jacobian)
        shape = drop_leading_ones(wrt.shape)
        if math.prod(of.shape) != 1 or len(shape) > 2:
            return None
        return self.values.reshape(shape if len(shape) == 2 else (1, -1))

    def make_sections(
        self, download_limit: int, tokens: Sequence[str] | None, channels: str | None, draws: bool
    ) -> list[Section]:
        """Return the question, the answer, the numbers, the plan and the path; with `draws` also a picture."""
        answer: list[Part] = [self._verdict()]
        sections = [Section("The question", self._question_parts()), Section("The answer", answer)]
        if self.values is not None and self.jacobian is not None:
            of, wrt = operands(self.jacobian)
            gradient, inputs, coords = self.values, None, None
            if math.prod(of.shape) == 1:
                gradient, inputs = self.values.reshape(wrt.shape), self.query.wrt_values
                coords = None if wrt.base is None else wrt.base.coords().reshape(-1, len(wrt.of))
            if inputs is not None and wrt.base is not None:
                inputs = inputs.reshape(-1)[wrt.base.flat()]
            answer.append(Facts(_summarize(self.values)))
            if draws:
                answer.append(self._picture(of, wrt, gradient, inputs, tokens, channels))
            name = f"gradient of {self.names[0]} by {self.names[1]}"
            sections.append(Section("The numbers", [NumbersTable.of(gradient, name, inputs, download_limit, coords)]))
            sections.append(Section("The plan", [Facts(self.jacobian.plan().lines)]))
        path = self._path_parts()
        return [*sections, Section("The path", path)] if path else sections

    def _question_parts(self) -> list[Part]:
        of, wrt = self.names
        rows = [("function", self.query.name), ("derivative of", of), ("with respect to", wrt)]
        if self.jacobian is not None:
            of_side, wrt_side = operands(self.jacobian)
            value = to_floats(self.jacobian.value)
            size = f"value {value.item():.6g}" if value.size == 1 else f"shape {of_side.shape}"
            backend = registry.require_backend(wrt_side.tensor)
            rows[1] = ("derivative of", f"{of}, {size}")
            rows[2] = ("with respect to", f"{wrt}, shape {wrt_side.shape}, {backend.dtype(wrt_side.tensor)}")
            rows.append(("framework", backend.name))
        name = str(getattr(self.query.f, "__name__", "model"))
        return [Facts(rows), Code(f'eg.grad({name if name.isidentifier() else "f"}, ..., of="{of}", wrt="{wrt}")')]

    def _verdict(self) -> Part:
        if self.diagnosis is None:
            return Callout(f"{self.names[0]} has a gradient with respect to {self.names[1]}.")
        lines = str(self.diagnosis).split("\n")
        odd = self.diagnosis.verdict == "flows" and self.diagnosis.cause is not None
        return Callout(lines[0], lines[1:], "odd" if odd else TONES[self.diagnosis.verdict])

    def _picture(
        self,
        of: Operand,
        wrt: Operand,
        gradient: np.ndarray,
        inputs: np.ndarray | None,
        tokens: Sequence[str] | None,
        channels: str | None,
    ) -> Part:
        if not gradient.size:
            return Prose("No elements are named, so there is nothing to draw.")
        title = f"{self.names[0]} by {self.names[1]}"
        if math.prod(of.shape) != 1:
            return Image.of(gradient.reshape(-1, math.prod(wrt.shape)), kind="matrix", title=title)
        if tokens is not None:
            return Image.of(gradient, tokens=tokens, title=title)
        framework = registry.require_backend(wrt.tensor).name
        if len(wrt.shape) > 2 and channels is None:
            channels = "last" if has_channels_last(wrt.shape, None, framework) else "first"
        is_one_image = (
            wrt.base is None
            and gradient.ndim == 4
            and len(gradient) == 1
            and gradient.shape[-1 if channels == "last" else 1] in IMAGE_CHANNELS
        )
        if inputs is not None and is_one_image:
            return Image.of(gradient, image=inputs, title=title, channels=channels)
        return Image.of(gradient, title=title, channels=channels)

    def _path_parts(self) -> list[Part]:
        if self.diagnosis is None:
            return [Prose(f"eg.explain does not answer here: {self.unexplained}.")]
        parts: list[Part] = [Prose(f"Evidence: {fact}.") for fact in self.diagnosis.evidence]
        steps = [
            (number, step, step.endswith("(broken here)"), getattr(step, "site", ""))
            for number, step in enumerate(self.diagnosis.path, 1)
        ]
        if len(steps) > MAX_STEPS:
            parts.append(
                Prose(f"{MAX_STEPS} of {len(steps)} operations: those at the ends, and the one that breaks it.")
            )
            steps = [step for step in steps if step[2] or not MAX_STEPS // 2 < step[0] <= len(steps) - MAX_STEPS // 2]
        return [*parts, StepList(steps)] if steps else parts


def _summarize(values: np.ndarray) -> list[tuple[str, str]]:
    scale = Scale.of(values)
    nonfinite = [(name, str(count)) for name, count in scale.nonfinite.items()]
    if values.size == 1:
        return [("gradient", f"{values.item():.8g}")]
    return [
        ("numbers", f"{values.size}, of which {scale.nonzero} are not zero"),
        ("range", f"{scale.lowest:.6g} to {scale.highest:.6g}" if scale.any_finite else "none is finite"),
        *nonfinite,
    ]


def _place_text(name: str, place: Place) -> str:
    index = Place(None, name, place.index, None, pointwise=place.pointwise)
    return shorten(str(index) if place.index else name)


def _require_small(derivative: Jacobian) -> None:
    size = math.prod(derivative.shape)
    if size > MAX_ENTRIES:
        raise SizeError(f'{derivative!r} has {size} entries, too many for a report; name fewer, as in of="output[0]"')
