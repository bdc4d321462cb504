"""Follow a recorded run again: tangents forwards, cotangents backwards, and which elements can move with which.

All of it goes through the operations of the record, one at a time, and none of it runs the user's function. A method
returns an entry for each operation that has one, or None if an operation on the way has no rule; the diagnosis then
leaves open what it would have said.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np

from elementgrad._explain.dependence import dependent_outputs
from elementgrad._explain.kinds import PADDING, why_nothing_leaves
from elementgrad._explain.path import DataPath
from elementgrad._explain.trace import (
    CotangentSizes,
    FiniteFlags,
    Numbers,
    Op,
    ReachOverlap,
    Tangents,
    TangentSizes,
    Trace,
    uneven_weights,
)

Tensor = Any
Chosen = tuple[Collection[int], np.ndarray]
"""Ids of values, and the flat positions of the elements of them that count."""


class Replay:
    """A recorded run, and the elements of its source and target that are asked about."""

    def __init__(self, trace: Trace, of: np.ndarray, weights: np.ndarray, wrt: np.ndarray):
        self.trace = trace
        self._ops = trace.graph.ops
        self._connected = trace.graph.connected
        self._numbers = trace.numbers
        self._of, self._weights, self._wrt = of, weights, wrt
        self._sources = [trace.graph.source, *trace.later_ids]
        self.is_random = trace.graph.is_random
        self._nonzero: dict[int, np.ndarray] = {}
        """By value, which elements have a gradient, once that was pulled back."""

    def tangents(self) -> Tangents | None:
        """Push tangents from the source's elements."""
        trace = self.trace
        with trace.following():
            pushed = self._push(self._ops, trace.source)
            if pushed is None:
                return None
            sizes, reached = pushed
            arriving = np.zeros(trace.target.shape) if reached is None else self._floats(reached)
        chosen = np.abs(arriving.reshape(-1)[self._of]).max(initial=0.0)
        return Tangents(sizes, float(chosen), bool(np.delete(arriving, self._of).any()))

    def _push(
        self, ops: Sequence[Op], source: Tensor, widen: Callable[[Op], Op] | None = None
    ) -> tuple[dict[Op, TangentSizes], Tensor | None] | None:
        """Push tangents through operations, which `widen` runs again in float64; others are dropped after their use.

        Return their sizes at each operation and that of the target; None if an operation has no rule.
        """
        numbers, target = self._numbers, self.trace.graph.target
        tangents = dict.fromkeys(self._sources, numbers.at(source, self._wrt, uneven_weights(len(self._wrt))))
        sizes: dict[Op, TangentSizes] = {}
        last_use = {value: op for op in ops for value in op.inputs if value != target}
        for op in ops:
            if not tangents:
                break
            here = op if widen is None else widen(op)
            pairs = zip(op.inputs, here.operands, strict=False)
            arriving = [tangents.get(value) if numbers.is_differentiable(x) else None for value, x in pairs]
            at_inputs = worst(numbers.size(t) for t in arriving if t is not None)
            if at_inputs == 0 or not here.operands:
                continue
            live = [value in self._connected for value in op.outputs[: len(op.results)]]
            leaving: Sequence[Tensor | None] = ()
            if any(live):
                try:
                    leaving = here.jvp(arriving)
                except Exception:  # it has no rule
                    return None
            triples = zip(op.outputs, leaving, live, strict=False)
            amounts = [(value, t, numbers.size(t)) for value, t, passes in triples if passes and t is not None]
            reached = {value: t for value, t, size in amounts if size != 0}
            at_outputs, cause = worst([size for _, _, size in amounts]), None
            if widen is None and any(live) and at_inputs > 0:
                cause = why_nothing_leaves(op, arriving, numbers, at_outputs != 0)
            if cause == PADDING:
                reached, at_outputs = {}, 0.0
            for value in {value for value in op.inputs if last_use.get(value) is op}:
                tangents.pop(value, None)
            tangents.update(reached)
            sizes[op] = TangentSizes(at_inputs, at_outputs, cause)
        return sizes, tangents.get(target)

    def _floats(self, x: Tensor) -> np.ndarray:
        return self._numbers.array(x).astype(np.float64)

    def gradient(self) -> Tensor | None:
        """Return the gradient for the whole source, or None if the framework's derivative has no path.

        Errors of the framework pass through.
        """
        trace, pulled = self.trace, None
        if trace.follows_rules:
            if trace.graph.target not in self._connected:
                return None
            with suppress(Exception):  # the framework's own gradient is to say what is wrong
                pulled = self._pulled
        if pulled is None or pulled[0] is None:
            return trace.gradient(self._of, self._weights)
        nothing = np.zeros(tuple(trace.source.shape))
        return self._numbers.like(nothing, trace.source) if pulled[1] is None else pulled[1]

    def cotangents(self) -> Mapping[Op, CotangentSizes] | None:
        """Pull back the gradient of the target's elements.

        Where an operation reads the source itself, only the source's chosen elements count at its inputs.
        """
        return self._pulled[0]

    @cached_property
    def _pulled(self) -> tuple[Mapping[Op, CotangentSizes] | None, Tensor | None]:
        """The sizes of the cotangents, and that of the source itself."""
        arrived: dict[int, Tensor] = {}
        target, source = self.trace.graph.target, self.trace.graph.source

        def see(value: int, cotangent: Tensor) -> None:
            nonzero = self._numbers.array(cotangent) != 0
            self._nonzero[value] = np.broadcast_to(True, nonzero.shape) if nonzero.all() else nonzero
            if value == source:
                arrived[value] = cotangent

        seed = {target: self._numbers.at(self.trace.target, self._of, self._weights)}
        chosen = self._sources, self._wrt
        with self.trace.following():
            sizes = pull_cotangents(self._ops, self._connected, seed, self._numbers, chosen, see)
        return sizes, arrived.get(source)

    def overlap(self) -> ReachOverlap | None:
        """Find, element by element, what can move with the source's elements and has a gradient.

        Dependence is followed through cuts as well. Values without a derivative are never alive.
        """
        numbers = self._numbers
        masks = dict.fromkeys(self._sources, mask_at(self.trace.source, self._wrt))
        with self.trace.following():
            for op in self._ops:
                if any(value in masks for value in op.inputs):
                    dependent = dependent_outputs(op, [masks.get(value) for value in op.inputs], numbers)
                    pairs = [pair for pair in zip(op.outputs, dependent, strict=False) if pair[1].any()]
                    # What is true everywhere takes no memory.
                    masks.update({n: np.broadcast_to(True, mask.shape) if mask.all() else mask for n, mask in pairs})
        if len(masks) > len(self._sources) and self._pulled[0] is None:
            return None
        alive = {n for n, nonzero in self._nonzero.items() if n in masks and (nonzero & masks[n]).any()}
        return ReachOverlap(set(masks), alive)

    def finite_flags(self) -> Mapping[Op, FiniteFlags]:
        """Check which inputs and outputs are finite."""
        with self.trace.following():
            return {op: finite_flags(op, self._numbers) for op in self._ops if op.operands}

    def is_finite_in_float64(self, op: Op, gradient: bool) -> bool:
        """Return True if one operation, on its own numbers in float64, gives finite results, or a finite `gradient`.

        False if it does not run in that precision, or ran in it.
        """
        numbers = self._numbers
        try:
            with self.trace.following(), numbers.in_float64():
                wide = self._widen(op, {})
                results: Sequence[Tensor | None] = wide.results
                if gradient:
                    wanted = [numbers.is_differentiable(x) for x in wide.operands]
                    seeds = [numbers.like(np.ones(tuple(y.shape)), y) for y in wide.results]
                    results = wide.vjp(seeds, wanted)
                return all(math.isfinite(numbers.size(x)) for x in results if x is not None)
        except Exception:  # it is made for another precision
            return False

    def gradient_size_in_float64(self) -> float | None:
        """Run all operations again in float64, with tangents; return the size of the target's.

        Values are dropped after their last use, so that this takes little memory. None if an operation does not run in
        float64, or gives numbers of less precision.
        """
        trace, numbers = self.trace, self._numbers
        needed = DataPath(trace.graph).to_target
        ops = [op for op in self._ops if op.results and not needed.isdisjoint(op.outputs)]
        last_use = {value: op for op in ops for value in op.inputs}
        values: dict[int, Tensor] = {}

        def widen(op: Op) -> Op:
            wide = self._widen(op, values)
            values.update(zip(op.outputs, wide.results, strict=True))
            for value in [value for value in op.inputs if last_use[value] is op]:
                values.pop(value, None)
            return wide

        try:
            with trace.following(), numbers.in_float64():
                source = numbers.widen(trace.source)
                values.update(dict.fromkeys(self._sources, source))
                pushed = self._push(ops, source, widen)
                if pushed is None:
                    return None
                return 0.0 if pushed[1] is None else float(np.abs(self._floats(pushed[1]).reshape(-1)[self._of]).max())
        except Exception:  # it is made for another precision
            return None

    def _widen(self, op: Op, values: Mapping[int, Tensor]) -> Op:
        """Return an operation that ran on other values in float64; TypeError if it cannot, or rounds them."""
        if not any(map(self._numbers.is_differentiable, op.operands)):
            return op  # it makes constants
        if not op.can_rerun:
            raise TypeError(f"{op.operation} does not run again")
        return self._run_again(op, values, True)

    def _run_again(self, op: Op, values: Mapping[int, Tensor], wide: bool) -> Op:
        numbers = self._numbers
        operands = [values.get(value, x) for value, x in zip(op.inputs, op.operands, strict=True)]
        if wide:
            operands = [numbers.widen(x) if numbers.is_differentiable(x) else x for x in operands]
        results = op.rerun(operands)
        if wide and any(numbers.is_differentiable(y) and numbers.array(y).itemsize < 8 for y in results):
            raise TypeError(f"{op.operation} rounds")
        return replace(op, operands=operands, results=results)

    def target_at(self, position: int, by: float, wide: bool = False) -> np.ndarray:
        """Return the target's chosen elements with one element of the source moved, in float64 if `wide`.

        What left the framework in the run stays as it was. TypeError if an operation rounds what is `wide`.
        """
        trace, numbers = self.trace, self._numbers
        with trace.following(), numbers.in_float64() if wide else nullcontext():
            x = numbers.moved(trace.source, position, by)
            source = numbers.like(x, numbers.widen(trace.source) if wide else trace.source)
            values: dict[int, Tensor] = dict.fromkeys(self._sources, source)
            for op in self._ops:
                if op.results and not values.keys().isdisjoint(op.inputs):
                    values.update(zip(op.outputs, self._run_again(op, values, wide).results, strict=True))
            target = values.get(trace.graph.target, trace.target)
            return self._floats(target).reshape(-1)[self._of]


def finite_flags(op: Op, numbers: Numbers) -> FiniteFlags:
    """Check which inputs and outputs of one operation are finite."""
    sides = [[x for x in side if numbers.is_differentiable(x)] for side in (op.operands, op.results)]
    inputs, outputs = [all(math.isfinite(numbers.size(x)) for x in side) for side in sides]
    inputs = inputs and all(map(math.isfinite, op.scalars))
    overflows = undefined = False
    if not outputs:
        operands, results = [[numbers.array(x) for x in side] for side in sides]
        overflows = all(x.all() for x in operands) and not any(np.isnan(x).any() for x in results)
        small = inputs and all(
            numbers.size(x) < float(np.finfo(a.dtype).max) ** 0.5 for x, a in zip(sides[0], operands, strict=True)
        )
        undefined = small and not any(np.isinf(x).any() for x in results)
    return FiniteFlags(inputs, outputs, bool(overflows), undefined)


def pull_cotangents(
    ops: Sequence[Op],
    connected: Collection[int],
    cotangents: dict[int, Tensor],
    numbers: Numbers,
    chosen: Chosen | None = None,
    see: Callable[[int, Tensor], object] = lambda value, cotangent: None,
    totals: Mapping[int, Tensor] = MappingProxyType({}),
) -> dict[Op, CotangentSizes] | None:
    """Pull cotangents back through the operations; return their sizes at each operation.

    With `chosen` only some elements of some values count. `see` gets every cotangent, which is then dropped. `totals`
    are known sums of all that arrives at some values, and replace what is pulled back to these.
    """
    sizes: dict[Op, CotangentSizes] = {}
    for op in reversed(ops):
        pulled_back = {value: cotangents.pop(value) for value in op.outputs if value in cotangents}
        for value, g in pulled_back.items():
            see(value, g)
        arriving = [totals.get(value, pulled_back.get(value)) for value in op.outputs]
        pairs = zip(op.inputs, op.operands, strict=False)
        wanted = [value in connected and numbers.is_differentiable(x) for value, x in pairs]
        if all(g is None for g in arriving) or not any(wanted) or not op.results:
            continue
        leaving: Sequence[Tensor | None] = ()
        if any(value in connected for value in op.outputs):
            try:
                leaving = op.vjp(arriving, wanted)
            except Exception as error:  # it has no rule
                op.error = error
                return None
        pulled = {n: g for n, g in enumerate(leaving) if g is not None and wanted[n]}
        for n, g in pulled.items():
            value = op.inputs[n]
            cotangents[value] = cotangents[value] + g if value in cotangents else g
        values = [(op.inputs[n], g) for n, g in pulled.items()]
        sizes[op] = cotangent_sizes([g for g in arriving if g is not None], values, numbers, chosen)
    for value, g in cotangents.items():
        see(value, g)
    return dict(reversed(sizes.items()))


def cotangent_sizes(
    arriving: Sequence[Tensor], leaving: Sequence[tuple[int, Tensor]], numbers: Numbers, chosen: Chosen | None
) -> CotangentSizes:
    """Return the sizes at one operation, of what arrives and of what leaves to each value.

    Where only chosen elements count at the inputs, outputs of the same shape count in the same places.
    """
    all_zero = all(numbers.size(g) == 0 for g in arriving)
    counted = [
        numbers.at(g, chosen[1], numbers.array(g).reshape(-1)[chosen[1]])
        if chosen is not None and value in chosen[0]
        else g
        for value, g in leaving
    ]
    at_outputs = worst(map(numbers.size, arriving))
    only = chosen is not None and bool(leaving) and all(value in chosen[0] for value, _ in leaving)
    same = [g for g in arriving if leaving and tuple(g.shape) == tuple(leaving[0][1].shape)]
    if chosen is not None and only and same:
        at_outputs = worst([float(np.abs(numbers.array(same[0]).reshape(-1)[chosen[1]]).max(initial=0.0))])
    at_inputs = worst(map(numbers.size, counted))
    where_nonfinite = at_outputs
    if not math.isfinite(at_inputs):
        where_nonfinite = _size_where_nonfinite(arriving, counted, at_outputs, numbers)
    return CotangentSizes(at_outputs, at_inputs, where_nonfinite, all_zero)


def _size_where_nonfinite(
    arriving: Sequence[Tensor], leaving: Sequence[Tensor], at_outputs: float, numbers: Numbers
) -> float:
    """Return the largest cotangent that arrives where what leaves is not finite, for shapes that broadcast.

    Otherwise, as for a product of matrices, it is unknown which outputs belong to which inputs.
    """
    largest = None
    for bad in [~np.isfinite(numbers.array(g)) for g in leaving]:
        if not bad.any():
            continue
        pairs = [_broadcast(numbers.array(g), bad) for g in arriving]
        found = [float(np.abs(pair[0][pair[1]]).max(initial=0.0)) for pair in pairs if pair is not None]
        if not found:
            return at_outputs
        largest = max(largest or 0.0, worst(found))
    return at_outputs if largest is None else largest


def _broadcast(a: np.ndarray, b: np.ndarray) -> Sequence[np.ndarray] | None:
    try:
        return np.broadcast_arrays(a, b)
    except ValueError:
        return None


def mask_at(like: Tensor, positions: np.ndarray) -> np.ndarray:
    mask = np.zeros(int(np.prod(like.shape, dtype=int)), bool)
    mask[positions] = True
    return mask.reshape(tuple(like.shape))


def worst(sizes: Iterable[float]) -> float:
    """Return the largest of some sizes; NaN if one is."""
    values = list(sizes)
    return math.nan if any(map(math.isnan, values)) else max(values, default=0.0)
