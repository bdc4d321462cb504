"""One call of a function of JAX's as one step, though it runs as several operations.

A run of a JAX function, watched, and followed again by the numbers that it left.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from elementgrad._backends.autodiff import TensorFunction, reason
from elementgrad._backends.jax import explain_rules
from elementgrad._backends.jax.autodiff import JaxLinearization, plain_errors
from elementgrad._backends.jax.explain_rules import (
    JaxOp,
    connect,
    ended,
    finite,
    is_bound,
    largest,
    plain,
    smooth,
    worst,
)
from elementgrad._backends.jax.trace import JaxOpRecorder
from elementgrad._explain.backend import ExplainBackend
from elementgrad._explain.trace import (
    CotangentSizes,
    FiniteFlags,
    Hint,
    Op,
    OpGraph,
    ReachOverlap,
    TangentSizes,
    Trace,
    largest_where,
    uneven_weights,
)
from elementgrad.errors import TracedError

Array = Any


def merged(steps: Sequence[JaxOp], target: int) -> list[JaxOp]:
    """The steps, with those that follow each other in one call made one.

    So what such a function does inside of itself is its own business: a softmax subtracts its largest element, cut off
    from derivatives, and is differentiable all the same.
    """
    runs = [list(run) for _, run in groupby(steps, key=_call)]
    last = {value: number for number, run in enumerate(runs) for step in run for value in step.takes}
    last[target] = len(runs)
    return [run[0] if len(run) == 1 else _one(run, number, last) for number, run in enumerate(runs)]


def _call(step: JaxOp) -> Any:
    return step.group if step.group is not None else id(step)


def _one(run: Sequence[JaxOp], number: int, last: Mapping[int, int]) -> JaxOp:
    made = {value for step in run for value in step.gives}
    taken = {v: x for step in run for v, x in zip(step.takes, step.operands, strict=True) if v not in made}
    given = {v: x for step in run for v, x in zip(step.gives, step.results, strict=True) if last.get(v, -1) > number}
    takes, gives = list(taken), list(given)

    def function(*operands: Array) -> list[Array]:
        values = dict(zip(takes, operands, strict=True))
        for step in run:
            values.update(zip(step.gives, step.function(*[values[v] for v in step.takes]), strict=True))
        return [values[v] for v in gives]

    first = run[0]
    whole = JaxOp("call", {}, function, list(taken.values()), takes, first.where, first.word, path=first.path)
    whole.inner = frozenset(name for step in run for name in step.inner)
    whole.unsafe = any(step.unsafe for step in run)
    whole.results, whole.gives = list(given.values()), gives
    whole.passing = [x for step in run for x in step.results if not smooth(x)]
    whole.arrays = _written(run)
    whole.quiet = all(step.quiet for step in run)
    whole.note = next(_notes(run), "")
    return whole


def _written(run: Sequence[JaxOp]) -> frozenset[int]:
    """The values that lead to the array that one of the steps writes into."""
    found: set[int] = set()
    for step in reversed(run):
        found |= step.arrays
        if not found.isdisjoint(step.gives) and not step.arrays:
            found.update(step.takes)
    return frozenset(found)


def _notes(run: Sequence[JaxOp]) -> Iterator[str]:
    return (step.note for step in run if step.note)


class JaxTrace(Trace):
    """Runs a function on its numbers under a trace that sees every operation, and keeps all of them."""

    def __init__(self, run: TensorFunction, source: Array | None):
        if any(isinstance(x, jax.core.Tracer) for x in (source, *run.others)):
            raise TracedError("explain looks at numbers, and code that is traced has none; call it outside of jax.jit")
        self._run = run
        self._given = source
        watch = JaxOpRecorder(run.others)
        with plain_errors(), watch.on():
            (target,) = run(watch.source if source is None else watch.source(source))
        self._first = watch.first
        self._last = watch.number(target)
        self._steps = merged(watch.steps, self._last)
        self.source = watch.first.value
        self.target = watch.value(target)
        connected = connect(self._steps, watch.first.number)
        told = [_told(step) for step in self._steps]
        remarks = [
            Hint("custom-rule", "", step) for step in told if step.custom_gradient and connected & set(step.outputs)
        ]
        remarks += [Hint("out-of-range", step.note, step) for step in told if step.note and step.cut_cause is None]
        draws = any(not explain_rules.DRAWS.isdisjoint({step.name, *step.inner}) for step in watch.steps)
        self.graph = OpGraph(told, watch.first.number, self._last, connected, remarks, draws)

    @cached_property
    def _linear(self) -> JaxLinearization:
        return JaxLinearization.of(self._run, [self._given])

    def gradient(self, of: np.ndarray, weights: np.ndarray) -> Array | None:
        seed = np.zeros(self.target.size)
        seed[of] = weights
        cotangent = jnp.asarray(seed.reshape(1, *self.target.shape), self.target.dtype)
        (pulled,) = self._linear.vjp(0, [0], cotangent)
        return None if pulled is None else pulled[0]

    def hint_for_error(self, error: Exception) -> Hint | None:
        why = f"jax refuses to differentiate it: {reason(error)}"
        exits = [step for step in self.graph.ops if step.cut_cause == "left-framework" and not step.branches]
        if isinstance(error, jax.errors.JAXTypeError) and exits:
            return Hint("left-framework", why, exits[0])
        for taken, step in zip(self._steps, self.graph.ops, strict=True):
            missing = self._refused(taken)
            if missing is not None:
                return Hint(step.cut_cause or "no-rule", reason(missing), step)
        where = explain_rules.raised(error)  # the function ran as it is, so that it was the tracing
        return Hint(None, why, Op("a transformation of jax", where))

    def _refused(self, step: JaxOp) -> Exception | None:
        """Why a step cannot be differentiated in reverse, if it cannot."""
        active, able = self._active(step), [n for n, x in enumerate(step.gives) if x in self.graph.connected]
        if step.refused is not None or not active or not able:
            return step.refused
        try:
            step.vjp({number: jnp.zeros_like(step.results[number]) for number in able}, active)
        except Exception as error:
            return error
        return None

    def _active(self, step: JaxOp) -> list[int]:
        connected = self.graph.connected
        return [n for n, x in enumerate(step.takes) if x in connected and smooth(step.operands[n])]

    def tangent_sizes(self, wrt: np.ndarray) -> tuple[Sequence[TangentSizes | None], np.ndarray] | None:
        seed = np.zeros(self.source.size)
        seed[wrt] = uneven_weights(len(wrt))
        tangents = {self._first.number: jnp.asarray(seed.reshape(self.source.shape), self.source.dtype)}
        pushed: list[TangentSizes | None] = []
        for step in self._steps:
            came = {n: tangents[x] for n, x in enumerate(step.takes) if x in tangents and smooth(step.operands[n])}
            if not came:
                pushed.append(TangentSizes(0.0, 0.0))
                continue
            arrives = worst(map(largest, came.values()))
            went: dict[int, Array] = {}
            if arrives and any(value in self.graph.connected for value in step.gives):
                try:
                    went = step.jvp(came)
                except Exception:  # a rule is missing on the way
                    return None
            leaves = worst(map(largest, went.values()))
            tangents.update({step.gives[n]: tangent for n, tangent in went.items()})
            cause = ended(step, came) if arrives > 0 and (leaves == 0 or is_bound(step)) else None
            pushed.append(TangentSizes(arrives, leaves, cause))
        reached = tangents.get(self._last)
        return pushed, np.zeros(self.target.shape) if reached is None else np.asarray(reached, np.float64)

    def cotangent_sizes(
        self, of: np.ndarray, weights: np.ndarray, wrt: np.ndarray
    ) -> Sequence[CotangentSizes | None] | None:
        swept = self._swept(of, weights, wrt)
        return None if swept is None else swept[0]

    def reach_overlap(self, of: np.ndarray, weights: np.ndarray, wrt: np.ndarray) -> ReachOverlap | None:
        swept = self._swept(of, weights, wrt)
        if swept is None:
            return None
        mask = np.zeros(self.source.size, bool)
        mask[wrt] = True
        masks = {self._first.number: mask.reshape(self.source.shape)}
        for step in self._steps:
            if any(value in masks for value in step.takes):
                found = step.touched([masks.get(value) for value in step.takes])
                masks.update({value: mask for value, mask in zip(step.gives, found, strict=True) if mask.any()})
        gradients = swept[1]
        alive = {value for value, mask in masks.items() if value in gradients and plain(gradients[value])[mask].any()}
        return ReachOverlap(set(masks), alive)

    def _swept(
        self, of: np.ndarray, weights: np.ndarray, wrt: np.ndarray
    ) -> tuple[list[CotangentSizes | None], dict[int, Array]] | None:
        """What comes back by each step, and the gradient of each value."""
        seed = np.zeros(self.target.size)
        seed[of] = weights
        gradients = {self._last: jnp.asarray(seed.reshape(self.target.shape), self.target.dtype)}
        pulled: list[CotangentSizes | None] = [None] * len(self._steps)
        for place in range(len(self._steps))[::-1]:
            step = self._steps[place]
            came = {n: gradients[x] for n, x in enumerate(step.gives) if x in gradients}
            active = self._active(step)
            if not came or not active:
                continue
            try:
                went = step.vjp(came, active)
            except Exception:  # a rule is missing on the way
                return None
            asked = {n: self._asked(step.takes[n], gradient, wrt) for n, gradient in went.items()}
            arrives, leaves = worst(map(largest, came.values())), worst(map(largest, asked.values()))
            pulled[place] = CotangentSizes(arrives, leaves, _there(came, asked, arrives), arrives == 0)
            for n, gradient in went.items():
                number = step.takes[n]
                gradients[number] = gradients[number] + gradient if number in gradients else gradient
        return pulled, gradients

    def _asked(self, number: int, gradient: Array, wrt: np.ndarray) -> Array:
        """A gradient, of the source at the elements asked for alone."""
        if number != self._first.number:
            return gradient
        mask = np.zeros(gradient.size, bool)
        mask[wrt] = True
        return np.where(mask.reshape(gradient.shape), plain(gradient), 0)

    def finite_flags(self) -> Sequence[FiniteFlags | None] | None:
        return [_seen(step) for step in self._steps]


def _told(step: JaxOp) -> Op:
    return Op(
        step.word,
        step.where,
        step.path,
        tuple(step.takes),
        tuple(step.gives),
        step.stops,
        step.note,
        step.own,
        step.decides,
        hidden=step.quiet,
    )


def _seen(step: JaxOp) -> FiniteFlags:
    takes = [plain(x) for x in step.operands if smooth(x)]
    grows = all(x.all() for x in takes) and not any(np.isnan(plain(x)).any() for x in step.results if smooth(x))
    return FiniteFlags(all(map(finite, step.operands)), all(map(finite, step.results)), bool(grows))


def _there(came: dict[int, Array], went: dict[int, Array], arrives: float) -> float:
    """The largest gradient that arrives where what leaves is not finite."""
    found = None
    for gradient in went.values():
        bad = ~np.isfinite(plain(gradient))
        if not bad.any():
            continue
        there = [size for each in came.values() if (size := largest_where(plain(each), bad)) is not None]
        if not there:
            return arrives
        found = max(found or 0.0, worst(there))
    return arrives if found is None else found


class JaxExplain(ExplainBackend):
    name = "jax"

    def trace(self, run: TensorFunction, source: Array | None, probe: bool) -> Trace:
        return JaxTrace(run, source)

    def run_at(self, run: TensorFunction, tensors: Sequence[Array | None]) -> Sequence[Array]:
        return run(*tensors)

    def maybe_compile(self, function: Callable[[Array], Array]) -> Callable[[Array], Array]:
        return jax.jit(function)


implementation = JaxExplain()
