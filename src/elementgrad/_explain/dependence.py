"""Find which output elements of an operation depend on some of its input elements, by running it on other numbers.

Derivatives cannot tell: a rectifier that is flat here, or a factor that is zero here, hides what its output is computed
from. So the operation runs again on several sets of other numbers, twice each, with only the elements in question moved
in between. Integers stay as they are, since another index may not exist; booleans do not.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from elementgrad._explain.trace import Numbers, Op, uneven_weights

BROADCASTS = ("elementwise", "product")
"""Kinds of operations of which an element depends on the elements in the same place alone."""
ADDS = ("move", "lookup", "sum", "matrix product")
"""Kinds of operations that give more wherever one of several ones becomes a two."""
SAMPLES = (
    ("around zero", 2.0),
    ("positive", 0.125),
    ("as they are", 100.0),
    ("as they are", 2.0),
    ("as they are", 0.01),
)
"""The numbers on which an operation runs, and how far elements move to both sides of them."""
Masks = Sequence[np.ndarray | None]
"""A mask for each operand; None for those that do not move."""


def dependent_outputs(op: Op, masks: Masks, numbers: Numbers) -> list[np.ndarray]:
    """Return a mask for each result of an operation."""
    if not op.results:  # a write to state, whose elements stay in their places
        return [mask for mask in masks if mask is not None][:1]
    shapes = [tuple(y.shape) for y in op.results]
    if not op.can_rerun:
        return guess_dependent_outputs(masks, shapes)
    others = [x for x, m in zip(op.operands, masks, strict=True) if m is not None and not numbers.is_differentiable(x)]
    if any(numbers.array(x).dtype.kind != "b" for x in others):
        return [np.ones(shape, bool) for shape in shapes]  # another index may lead anywhere
    moving = [mask for mask in masks if mask is not None]
    if op.kind in BROADCASTS and 0 not in op.scalars and len(shapes) == 1:
        return [np.array(np.broadcast_to(np.logical_or.reduce(np.broadcast_arrays(*moving)), shapes[0]))]
    adds = op.kind in ADDS and 0 not in op.scalars
    if adds and not op.misses and all(mask.all() for mask in moving) and _moves_all(op, masks, numbers):
        return [np.ones(shape, bool) for shape in shapes]
    inputs = [numbers.array(x) for x in op.operands]
    samples = (("ones", 0.5),) if adds else SAMPLES
    dependent = [np.zeros(shape, bool) for shape in shapes]
    succeeded = False
    random = np.random.default_rng(0)
    for sample, distance in samples:
        base = [_sample(x, sample, random) for x in inputs]
        fixed = [numbers.like(x, y) if m is None else None for x, m, y in zip(base, masks, op.operands, strict=True)]
        try:
            sides = [_rerun_moved(op, base, masks, fixed, by, numbers) for by in (-distance, distance)]
            pairs = list(zip(*sides, strict=True))
        except Exception:  # the operation refuses these numbers
            continue
        if [a.shape for a, _ in pairs] != list(shapes) or [b.shape for _, b in pairs] != list(shapes):
            continue
        succeeded = True
        dependent = [np.asarray(mask | _differs(a, b)) for mask, (a, b) in zip(dependent, pairs, strict=True)]
        if all(mask.all() for mask in dependent):
            break
    return dependent if succeeded else guess_dependent_outputs(masks, shapes)


def _moves_all(op: Op, masks: Masks, numbers: Numbers) -> bool:
    """Return True if all results move where whole operands do: all that it moves to other places, or different ones."""
    if op.kind == "move":
        return not any(m is None and numbers.is_differentiable(x) for m, x in zip(masks, op.operands, strict=True))
    values = [value for value, mask in zip(op.inputs, masks, strict=False) if mask is not None]
    return len(op.results) == 1 and len(set(values)) == len(values)


def _rerun_moved(
    op: Op, arrays: Sequence[np.ndarray], masks: Masks, fixed: Sequence[Any], by: float, numbers: Numbers
) -> list[np.ndarray]:
    """Run an operation with masked elements moved; `fixed` are the operands that have none."""
    operands = [
        numbers.like(_move(array, mask, by), x) if mask is not None else other
        for array, mask, x, other in zip(arrays, masks, op.operands, fixed, strict=True)
    ]
    return [numbers.array(y) for y in op.rerun(operands)]


def _rerun(op: Op, arrays: Sequence[np.ndarray], numbers: Numbers) -> list[np.ndarray]:
    operands = [numbers.like(array, x) for array, x in zip(arrays, op.operands, strict=True)]
    return [numbers.array(y) for y in op.rerun(operands)]


def guess_dependent_outputs(masks: Sequence[np.ndarray | None], shapes: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
    """Return masks for an operation that must not run again, as it calls the user's code or may never end.

    An output of the inputs' shape is taken to depend on them element by element, and any other in all of its elements.
    """
    moving = [mask for mask in masks if mask is not None]
    elementwise = {shape: all(mask.shape == shape for mask in moving) for shape in shapes}
    return [np.logical_or.reduce(moving) if elementwise[shape] else np.ones(shape, bool) for shape in shapes]


def is_tied(op: Op, masks: Masks, numbers: Numbers) -> bool:
    """Return True if masked elements are level with what a maximum or the like chose instead of them.

    Then the least move of them shows in the output. So no rule is needed for which elements compete with each other:
    those of a window, of an axis or of a segment.
    """
    try:
        inputs = [numbers.array(x) for x in op.operands]
        before = _rerun(op, inputs, numbers)
        for direction in (1.0, -1.0):
            nudged = [
                x
                if mask is None or x.dtype.kind != "f"
                else _nudge(x, mask, direction * (1 << 16 if numbers.dtype(operand) == "bfloat16" else 1))
                for x, mask, operand in zip(inputs, masks, op.operands, strict=True)
            ]
            pairs = zip(before, _rerun(op, nudged, numbers), strict=True)
            if any(a.dtype.kind in "fc" and _differs(a, b).any() for a, b in pairs):
                return True
    except Exception:  # it cannot run again
        pass
    return False


def _nudge(x: np.ndarray, mask: np.ndarray, units: float) -> np.ndarray:
    """Move elements by units in the last place, and zeros by the least number that no processor flushes to zero."""
    nudged = np.array(x)
    least = np.finfo(x.dtype).tiny
    values = np.where(np.abs(x) < least, np.copysign(least, units), x + units * np.abs(np.spacing(x)))
    chosen = mask & np.isfinite(x)
    nudged[chosen] = values[chosen].astype(x.dtype)
    return nudged


def _sample(x: np.ndarray, sample: str, random: np.random.Generator) -> np.ndarray:
    if sample == "as they are" or x.dtype.kind not in "fcb":
        return x
    if x.dtype.kind == "b":
        return np.full(x.shape, sample == "positive")  # both ways of a choice have their turn
    if sample == "ones":
        return np.ones(x.shape, x.dtype)
    values = random.uniform(-1, 1, x.shape) if sample == "around zero" else random.uniform(0.5, 1, x.shape)
    return np.asarray(values, x.dtype)


def _move(x: np.ndarray, mask: np.ndarray, by: float) -> np.ndarray:
    """Move elements by uneven amounts, since many functions see differences alone."""
    result = np.array(x)
    with np.errstate(over="ignore"):
        if mask.all() and x.dtype.kind != "b":  # no element is picked
            result += (by * uneven_weights(x.size).reshape(x.shape)).astype(x.dtype)
            return result
        result[mask] = by > 0 if x.dtype.kind == "b" else x[mask] + by * uneven_weights(int(mask.sum()))
    return result


def _differs(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    same = a == b
    return ~(same | ((a != a) & (b != b))) if a.dtype.kind in "fc" else ~same
