"""By what a later call knows that an array on disk is of the same Jacobian."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from elementgrad.distributed.content import Content
from elementgrad.distributed.part import numbers
from elementgrad.distributed.reached import told
from elementgrad.lazy import Jacobian
from elementgrad.plan.layout import Layout
from elementgrad.plan.sweep import PRECISION

VERSION = 2
"""Of what is compared: arrays of another are not gone on with."""
NEAR = 0.75
"""Numbers are the same where they differ by less than this power of the precision: other threads sum otherwise."""
GROUPS = 256
"""In so many groups numbers are compared, so that a few others among many are seen."""
NAMED = 200
"""Of so many things it is noted one by one what they were."""


@dataclass(frozen=True)
class Fingerprint:
    """What a Jacobian is about: exactly what was asked and given, and the function by numbers that it leads to."""

    digest: str
    parts: Mapping[str, str]
    """The same for the parts of it by their names, to tell which differs."""
    sketch: Sequence[Sequence[float]]
    """Of the value and of what sweeps gave: the largest number, and in its units a weighted sum and norm per group."""
    precision: float

    def to_attributes(self) -> dict[str, Any]:
        """As an array on disk has it."""
        return {"question": self.digest, "parts": dict(self.parts), "sketch": [list(each) for each in self.sketch]}

    def differing(self, other: Mapping[str, Any]) -> list[str] | None:
        """What is another in the attributes of an array: names, as far as they are known; None if nothing is."""
        if other.get("question") != self.digest:
            theirs = other.get("parts", {})
            return sorted(name for name in {*self.parts, *theirs} if self.parts.get(name) != theirs.get(name))
        near, sketch = self.precision**NEAR, other["sketch"]
        same = len(sketch) == len(self.sketch) and all(
            _alike(mine, theirs, near) for mine, theirs in zip(self.sketch, sketch, strict=True)
        )
        return None if same else ["numbers that the function leads to"]


def fingerprint(jacobian: Jacobian, layout: Layout, swept: np.ndarray | None) -> Fingerprint:
    """Of a Jacobian that is cut into these blocks, with what sweeps from generic seeds gave."""
    backend, question = jacobian._backend, jacobian._question
    of, wrt = jacobian._of, jacobian._wrt
    asked: dict[str, Any] = {
        "framework": backend.name,
        "of": of.name,
        "wrt": wrt.name,
        "dtype": backend.dtype(wrt.tensor),
    }
    asked |= {"shape": layout.shape, "blocks": [layout.chunks, layout.mode], "unconnected": jacobian._zero}
    found: list[tuple[str, Content]] = [(name, json.dumps(each).encode()) for name, each in asked.items()]
    found += [("elements", places.tobytes()) for places in jacobian._places()]
    digests: dict[str, Any] = {}
    given = () if question is None else told(question.function, question.args, question.kwargs, backend)
    for path, content in chain(found, given):
        digest = digests.setdefault(_name(path), hashlib.sha256())
        digest.update(f"\n{path}:{len(content)}:".encode())
        digest.update(content)
    parts = {name: digest.hexdigest() for name, digest in digests.items()}
    whole = hashlib.sha256(json.dumps([VERSION, parts]).encode()).hexdigest()
    named = {name: parts[name][:12] for name in list(parts)[:NAMED]}
    sketch = [list(_sketch(values)) for values in (numbers(jacobian.value, backend), swept) if values is not None]
    precision = max(PRECISION[min(8, backend.itemsize(end.tensor))] for end in (of, wrt))
    return Fingerprint(whole, named, sketch, precision)


def _name(path: str) -> str:
    """The first two words of a path: `fit.data` of `fit.data[3].x`."""
    found = re.match(r"[^.\[]*(\.[^.\[]+)?", path)
    return (found[0] if found else "") or "function"


def _sketch(values: np.ndarray) -> Iterator[float]:
    """The largest number, and for each group, in units of it, a sum with generic weights and its norm."""
    flat = np.ascontiguousarray(values).reshape(-1)
    flat = flat.view(flat.real.dtype) if np.iscomplexobj(flat) else flat
    flat = np.nan_to_num(flat.astype(np.float64), nan=3.0, posinf=5.0, neginf=-5.0)
    largest = float(np.abs(flat).max(initial=0.0))
    yield largest
    random = np.random.default_rng(0)
    for group in np.array_split(flat, max(1, min(GROUPS, flat.size))):
        signs = np.where(random.random(group.size) < 0.5, -1.0, 1.0)
        weighted = random.uniform(0.5, 1.5, group.size) * signs * (group / (largest or 1.0))
        yield float(weighted.sum())
        yield float(np.linalg.norm(weighted))


def _alike(mine: Sequence[float], other: Sequence[float], near: float) -> bool:
    """Errors of single numbers add up as their norm does; each may be as large as one of the largest number."""
    if len(mine) != len(other) or abs(mine[0] - other[0]) > near * (mine[0] + other[0]):
        return False
    (sums, norms), (others, sizes) = (np.asarray(each[1:], np.float64).reshape(-1, 2).T for each in (mine, other))
    return bool((np.abs(sums - others) <= near * (norms + sizes + 1)).all())
