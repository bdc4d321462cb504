"""Follow rows and channels of a parameter to the operation that loses their gradient, and judge what it is.

A unit with a zero gradient is dead for this batch. Behind a rectifier that may be chance: in a fresh network some
channels are below zero for all of a small batch. What counts is how far: a unit lies apart if its inputs are far below
those of the other units of the layer, or hardly move while those of the others do.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from elementgrad._explain.causes import CAUSE_BY_OPERATION
from elementgrad._explain.dependence import dependent_outputs
from elementgrad._explain.kinds import MATRIX_PRODUCT, PRODUCT, RECTIFIER, find_zero_factors, why_nothing_leaves
from elementgrad._explain.path import DataPath
from elementgrad._explain.trace import Numbers, Op, Trace, uneven_weights

Tensor = Any
HARMLESS_CAUSES = frozenset({"row-not-used", "unused", "not-selected", "dropped", "tie", "cancelled", None})
"""The batch, the numbers drawn or a choice take other elements: no fault of the model."""
FAR, RATHER_FAR = 12.0, 4.0
"""A unit lies apart if its largest input is this many spreads of the layer below the middle of it. In fresh networks
with rectifiers it is up to 6."""
STEADY = 12.0
"""A unit lies apart if its mean is this many of its own spreads below zero,"""
MORE_STEADY, RATHER_STEADY = 40.0, 15.0
"""and if that is this many times what is usual in the layer. In fresh networks it is up to 12 times."""
MOST = 0.75
"""If more than this share of at least `ENOUGH` units is dead, that is no chance."""
ENOUGH = 8


@dataclass(frozen=True)
class LostGradient:
    """An operation behind which elements have a gradient, and in front of which they have none."""

    op: Op
    masks: Sequence[np.ndarray | None]
    """The elements of each operand."""
    is_cut: bool = False

    def cause(self, numbers: Numbers) -> str | None:
        """Return why nothing comes through."""
        if self.is_cut:
            return self.op.cut_cause
        tangents = [
            None if mask is None or not numbers.is_differentiable(x) else numbers.like(_uneven(mask), x)
            for mask, x in zip(self.masks, self.op.operands, strict=True)
        ]
        try:
            return why_nothing_leaves(self.op, tangents, numbers) or usual_cause(self.op)
        except Exception:  # the operation has no jvp
            return usual_cause(self.op)


def _uneven(mask: np.ndarray) -> np.ndarray:
    values = np.zeros(mask.shape)
    values[mask] = uneven_weights(int(mask.sum()))
    return values


def usual_cause(op: Op) -> str | None:
    """Return the cause that usually ends a derivative in an operation."""
    if op.custom_gradient:
        return "custom-rule"
    if op.kind == RECTIFIER:
        return "dead-relu"
    cause = CAUSE_BY_OPERATION.get(op.operation) or op.cut_cause
    return "masked" if cause == "cancelled" and op.kind == MATRIX_PRODUCT else cause


def follow_slices(
    trace: Trace, path: DataPath, arrivals: Mapping[int, np.ndarray], mask: np.ndarray
) -> LostGradient | None:
    """Follow elements of the source forwards to where something that depends on them has a gradient.

    Of several such operations the first that is no cut; None if there is none.
    """
    numbers, connected = trace.numbers, trace.graph.connected
    masks: dict[int, np.ndarray] = dict.fromkeys([trace.graph.source, *trace.later_ids], mask)
    cuts = []
    for op in trace.graph.ops:
        if masks.keys().isdisjoint(op.inputs) or not op.results or path.to_target.isdisjoint(op.outputs):
            continue
        arriving = [masks.get(value) for value in op.inputs[: len(op.operands)]]
        if path.is_cut(op) and not connected.isdisjoint(op.inputs):
            cuts.append(LostGradient(op, arriving, is_cut=True))
            continue
        dependent = dependent_outputs(op, arriving, numbers)
        reached = {value: each for value, each in zip(op.outputs, dependent, strict=False) if each.any()}
        if any(value in arrivals and arrivals[value][each].any() for value, each in reached.items()):
            return LostGradient(op, arriving)
        masks.update(reached)
    return cuts[0] if cuts else None


def lies_apart(lost: LostGradient, numbers: Numbers) -> bool:
    """Return True if dead units are far from what other numbers could wake."""
    pairs = [(mask, x) for mask, x in zip(lost.masks, lost.op.operands, strict=True) if mask is not None]
    if len(pairs) != 1:
        return True
    mask, x = pairs[0][0], numbers.array(pairs[0][1]).astype(np.float64)
    axis = _unit_axis(mask)
    if axis is None:
        return bool(mask.all())
    others = tuple([n for n in range(x.ndim) if n != axis])
    dead = mask.any(axis=others)
    # Other units that are dead as well tell nothing about where units usually are.
    silent = (x <= 0).all(axis=others)
    if silent.mean() > MOST and silent.size >= ENOUGH:
        return True
    units = np.moveaxis(x, axis, 0).reshape(x.shape[axis], -1)
    usual = units[~silent] if (~silent).any() else units
    means, spreads = units.mean(1), units.std(1)
    layer = max(float(usual.std()), float(np.finfo(np.float64).tiny))
    far = (float(np.median(usual)) - units[dead].max(1)) / layer
    with np.errstate(divide="ignore", invalid="ignore"):  # a single row has no spread
        steadiness = np.abs(means) / spreads
        typical = max(float(np.median(steadiness[~silent])), 0.05) if (~silent).any() else np.inf
        steady, ratio = steadiness[dead] > STEADY, steadiness[dead] / typical
    either = (far > FAR) | (steady & (ratio > MORE_STEADY)) | ((far > RATHER_FAR) & (ratio > RATHER_STEADY))
    return bool((either & (means[dead] < 0)).all())


def _unit_axis(mask: np.ndarray) -> int | None:
    """Return the axis along which a mask takes whole slices, and not all of them."""
    for axis in range(mask.ndim):
        others = tuple([n for n in range(mask.ndim) if n != axis])
        units = mask.any(axis=others)
        if not units.all() and np.array_equal(units, mask.all(axis=others)):
            return axis
    return None


@dataclass(frozen=True)
class ZeroFactor:
    """Zeros that a value is multiplied by, and where they come from."""

    maker: Op | None
    """The operation that made them of other numbers, or read them first; None if that is the product itself."""
    sources: frozenset[int]
    """The sources that they are computed from, if nothing but zeros in these makes them."""

    @classmethod
    def of(cls, op: Op, path: DataPath, makers: Mapping[int, Op], numbers: Numbers) -> "ZeroFactor | None":
        """Find the operand of a product that is all zero, and walk back to what made it so."""
        pairs = list(zip(op.inputs, op.operands, strict=False))
        zeros = [v for v, x in pairs if v not in path.from_source and _is_zero(x, numbers)]
        zeros = zeros or [v for v, x in pairs if v != path.graph.source and _is_zero(x, numbers)]
        if not zeros:
            return None
        if len(zeros) > 1:  # statistics and biases are often zero, too, and stop nothing
            tangents = [
                numbers.like(uneven_weights(math.prod(x.shape)).reshape(tuple(x.shape)), x)
                if v in path.from_source and numbers.is_differentiable(x)
                else None
                for v, x in pairs
            ]
            zeros = [op.inputs[n] for n in find_zero_factors(op, tangents, numbers)] or zeros
        given: set[int] = set()
        made: list[Op] = []
        readers: list[Op] = []
        ahead, seen = [(zeros[0], op)], {zeros[0]}
        while ahead:
            value, reader = ahead.pop()
            maker = makers.get(value)
            if maker is None or not maker.operands:
                given.add(value)
                readers += [reader] if reader is not op else []
                continue
            operands = list(zip(maker.inputs, maker.operands, strict=False))
            through = [v for v, x in operands if _is_zero(x, numbers)]
            made += [] if through else [maker]
            is_product = maker.kind in (PRODUCT, MATRIX_PRODUCT)
            readers += [maker] if is_product else []
            new = [v for v in (through[:1] if is_product else through) if v not in seen]
            seen.update(new)
            ahead += [(v, maker) for v in new]
        # Statistics and biases of a normalisation are often zero and make none: a product with a zero does.
        readers.sort(key=lambda each: each.kind not in (PRODUCT, MATRIX_PRODUCT))
        return cls(next(iter([*made, *readers]), None), frozenset(() if made else given))


def _is_zero(x: Tensor, numbers: Numbers) -> bool:
    try:
        return not numbers.array(x).any()
    except (TypeError, ValueError, NotImplementedError):  # a key or a handle
        return False
