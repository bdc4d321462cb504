"""Made programs that write to one tensor in place, and what each of their writes does, told independently."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

SIZE = 6
KINDS = ["set", "set", "set", "constant", "slice", "mask", "index", "whole", "copy", "out", "strided", "keep", "use"]
Step = tuple[str, list[int], list[float]]


@st.composite
def programs(draw: st.DrawFn, longest: int = 9) -> list[Step]:
    """Steps of a kind, with elements and coefficients for it."""
    elements = st.lists(st.integers(0, SIZE - 1), min_size=4, max_size=4)
    coefficients = st.lists(st.floats(-1.0, 1.0, width=16), min_size=3, max_size=3)
    return draw(st.lists(st.tuples(st.sampled_from(KINDS), elements, coefficients), min_size=2, max_size=longest))


def value(t: torch.Tensor, elements: list[int], numbers: list[float]) -> torch.Tensor:
    (_, i, j, k), (a, b, c) = elements, numbers
    return torch.sin(a * t[i] + 0.5) * t[j] + b * t[k] ** 2 + c


def run(program: list[Step], t: torch.Tensor, after: Callable[[int], None] = lambda step: None) -> torch.Tensor:
    """The program on a flat tensor, with a call after each step; gives a sum over all elements."""
    kept: list[Any] = []
    for number, (kind, elements, numbers) in enumerate(program):
        i, j = elements[:2]
        low, high = min(i, j), max(i, j) + 1
        if kind == "set":
            t[i] = value(t, elements, numbers)
        elif kind == "constant":
            t[i] = numbers[0]
        elif kind == "slice":
            t[low:high].mul_(numbers[0]).add_(t[elements[2]].clone())
        elif kind == "mask":
            t[t.detach() < numbers[0]] = value(t, elements, numbers)
        elif kind == "index":
            t[[low, high % SIZE]] += value(t, elements, numbers)
        elif kind == "whole":
            t.mul_(1 + 0.1 * numbers[0])
        elif kind == "copy":
            t[low:high] = torch.cos(t)[low:high] * t[elements[2]]
        elif kind == "out":
            torch.mul(t[elements[2]].clone(), t[elements[3]].clone(), out=t[i])
        elif kind == "strided":
            view = t[low::2]
            view.sub_(numbers[0] * view.sum())
        elif kind == "keep":
            kept.append((t * t).mean())
        elif kept:
            t[i] = kept[-1] * numbers[0] + t[j]
        after(number)
    return (t * torch.arange(1, SIZE + 1, dtype=t.dtype)).sum()


def written(program: list[Step], start: np.ndarray) -> list[list[set[int]]]:
    """For each step the elements that each of its writes wrote, in turn."""
    t, seen = torch.tensor(start), [start]
    run(program, t, lambda step: seen.append(t.numpy().copy()))
    writes: list[list[set[int]]] = []
    kept = 0
    for before, (kind, elements, numbers) in zip(seen, program, strict=False):
        i, j = elements[:2]
        span = set(range(min(i, j), max(i, j) + 1))
        kept += kind == "keep"
        whole = {
            "set": [{i}],
            "constant": [{i}],
            "slice": [span, span],
            "mask": [set(np.flatnonzero(before < numbers[0]).tolist())],
            "index": [{min(i, j), (max(i, j) + 1) % SIZE}],
            "whole": [set(range(SIZE))],
            "copy": [span],
            "out": [{i}],
            "strided": [set(range(min(i, j), SIZE, 2))],
            "keep": [],
            "use": [{i}] if kept else [],
        }
        writes.append(whole[kind])
    return writes


def source_step(writes: list[list[set[int]]], source: int, target: int | None) -> int | None:
    """The step after which the source is meant: the last that wrote it before the target was last written.

    None is the beginning. A target of None is computed from the whole at the end.
    """
    flat = [(step, elements) for step, parts in enumerate(writes) for elements in parts]
    end = len(flat)
    if target is not None:
        end = max([n for n, (_, elements) in enumerate(flat) if target in elements], default=0)
    steps = [step for step, elements in flat[:end] if source in elements]
    return steps[-1] if steps else None


def differenced(program: list[Step], start: np.ndarray, source: int, target: int | None, step: int | None) -> float:
    """The derivative by central differences, the source moved right after a step (or before the first)."""
    values = []
    for move in (1e-6, -1e-6):
        t = torch.tensor(start)

        def after(number: int, t: torch.Tensor = t, move: float = move) -> None:
            if number == step:
                t[source] += move

        if step is None:
            t[source] += move
        y = run(program, t, after)
        values.append(float(y if target is None else t[target]))
    return (values[0] - values[1]) / 2e-6
