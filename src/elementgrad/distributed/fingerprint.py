"""By what a later call knows that an array on disk is of the same Jacobian."""

import hashlib
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from elementgrad import backends, tree
from elementgrad.backends import Backend
from elementgrad.distributed.part import numbers
from elementgrad.lazy import Jacobian
from elementgrad.plan.layout import Layout
from elementgrad.plan.sweep import PRECISION

Tensor = Any
NEAR = 0.75
"""Numbers are the same where they differ by less than this power of the precision: other threads sum otherwise."""


@dataclass(frozen=True)
class Fingerprint:
    """What a Jacobian is about: exactly what was asked and given, and the function by numbers that it leads to."""

    digest: str
    sketch: tuple[float, ...]
    """Products with generic weights of the value and of a few sweeps, each with the sum of the sizes in it."""
    precision: float

    def fits(self, digest: str, sketch: Sequence[float]) -> bool:
        """Whether another is about the same."""
        if digest != self.digest or len(sketch) != len(self.sketch):
            return False
        mine, other = (np.asarray(each, np.float64).reshape(-1, 2) for each in (self.sketch, sketch))
        return bool((np.abs(mine[:, 0] - other[:, 0]) <= self.precision**NEAR * (mine[:, 1] + other[:, 1])).all())


def fingerprint(jacobian: Jacobian, layout: Layout, swept: np.ndarray | None) -> Fingerprint:
    """Of a Jacobian that is cut into these blocks, with what sweeps from generic seeds gave."""
    backend, question = jacobian._backend, jacobian._question
    of, wrt = jacobian._of, jacobian._wrt
    asked = [backend.name, of.name, wrt.name, backend.dtype(wrt.tensor), layout.shape, layout.chunks, layout.mode]
    digest = hashlib.sha256(json.dumps([1, asked, jacobian._zero]).encode())
    for places in jacobian._places():
        digest.update(places.tobytes())
    if question is not None:
        for name, told in _told(question.function, question.args, question.kwargs, backend):
            digest.update(f"\n{name}:".encode())
            digest.update(told)
    sketch = [*_sketch(numbers(jacobian.value, backend)), *_sketch(swept)]
    precision = max(PRECISION[min(8, backend.itemsize(end.tensor))] for end in (of, wrt))
    return Fingerprint(digest.hexdigest(), tuple(sketch), precision)


def _told(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], backend: Backend
) -> Iterator[tuple[str, bytes]]:
    """All that is given to a function or held by it, as bytes; what has none shows in the numbers it leads to."""
    given = [leaf for i, arg in enumerate(args) for leaf in tree.leaves(arg, str(i))]
    given += [leaf for name in sorted(kwargs) for leaf in tree.leaves(kwargs[name], name)]
    held = [(f"{kind} {name}", tensor) for name, kind, tensor in backend.model(function).held()]
    for name, leaf in (*given, *held, *_reached(function, backend, set())):
        if type(leaf) in tree.SIMPLE:
            yield name, repr(leaf).encode()
        elif isinstance(leaf, np.ndarray) and leaf.dtype != object:
            yield name, f"{leaf.dtype} {leaf.shape} ".encode() + np.ascontiguousarray(leaf).tobytes()
        elif backends.owner(leaf) is backend and backend.kind(leaf) != "o":
            values = backend.read(leaf) if backend.kind(leaf) in "bi" else numbers(leaf, backend)
            head = f"{backend.dtype(leaf)} {tuple(backend.shape(leaf))} ".encode()
            yield name, head if values is None else head + np.ascontiguousarray(values).tobytes()
        else:
            yield name, type(leaf).__qualname__.encode()


def _reached(function: Any, backend: Backend, seen: set[int], above: str = "") -> Iterator[tuple[str, Any]]:
    """The tensors, arrays and parameters that a function of the user's reads without being given them.

    Other things, such as the names of files, may be others in a later call of the same function.
    """
    seen.add(id(function))
    try:
        found = inspect.getclosurevars(function)
    except (TypeError, ValueError):  # no function, or one that is not complete yet
        return
    every = sorted({**found.globals, **found.nonlocals}.items())
    for path, leaf in [leaf for name, value in every for leaf in tree.leaves(value, f"{above}{name}")]:
        if isinstance(leaf, np.ndarray) or backends.owner(leaf) is backend:
            yield f"reached {path}", leaf
        elif inspect.isfunction(leaf):
            if leaf.__module__ == function.__module__ and id(leaf) not in seen:
                yield from _reached(leaf, backend, seen, f"{path} ")
        elif callable(leaf) and not inspect.isroutine(leaf) and not inspect.isclass(leaf) and backend.models(leaf):
            yield from [(f"reached {path} {kind} {inner}", x) for inner, kind, x in backend.model(leaf).held()]


def _sketch(values: np.ndarray | None) -> Iterator[float]:
    """Two sums with generic weights, each with the sum of its sizes."""
    if values is None:
        return
    flat = np.ascontiguousarray(values).reshape(-1)
    flat = np.concatenate([flat.real, flat.imag]) if np.iscomplexobj(flat) else flat
    flat = np.nan_to_num(flat.astype(np.float64), nan=3.0, posinf=5.0, neginf=-5.0)
    for seed in (0, 1):
        random = np.random.default_rng(seed)
        weights = random.uniform(0.5, 1.5, flat.size) * random.choice([-1, 1], flat.size)
        yield float(weights @ flat)
        yield float(np.abs(weights) @ np.abs(flat))
