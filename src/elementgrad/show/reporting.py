"""`report`: a question about a function, or elements that were trained, as one HTML file."""

import os
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from elementgrad import tree
from elementgrad.errors import PlaceError
from elementgrad.extras import require
from elementgrad.markup import rows_of
from elementgrad.read import NOTHING
from elementgrad.show.answering import Question
from elementgrad.show.page import CARRIED, Facts, Image, Page, Part, Prose, Section, Table
from elementgrad.train.elements import Elements, patch_of
from elementgrad.train.patch import Patch
from elementgrad.train.replacement import writable

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
    answers = [Question(f, args, kwargs, *sides).answered(budget) for sides in product(tree.flat(of), tree.flat(wrt))]
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
    from elementgrad.show.steps import elements

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
