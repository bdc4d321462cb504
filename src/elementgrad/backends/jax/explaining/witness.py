"""A run of a JAX function, watched, and followed again by the numbers that it left."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from elementgrad.backends.jax.explaining import words
from elementgrad.backends.jax.explaining.calls import merged
from elementgrad.backends.jax.explaining.numbers import ended, finite, is_bound, largest, plain, worst
from elementgrad.backends.jax.explaining.steps import Taken, connect, smooth
from elementgrad.backends.jax.explaining.watch import Watch
from elementgrad.backends.jax.linear import JaxLinear, plain_errors
from elementgrad.backends.linear import Run, reason
from elementgrad.backends.witness import Account, Met, Pulled, Pushed, Remark, Seen, Step, Witness, arriving, weights
from elementgrad.errors import TracedError

Array = Any


class JaxWitness(Witness):
    """Runs a function on its numbers under a trace that sees every operation, and keeps all of them."""

    def __init__(self, run: Run, source: Array | None):
        if any(isinstance(x, jax.core.Tracer) for x in (source, *run.others)):
            raise TracedError("explain looks at numbers, and code that is traced has none; call it outside of jax.jit")
        self._run = run
        self._given = source
        watch = Watch(run.others)
        with plain_errors(), watch.on():
            (target,) = run(watch.source if source is None else watch.source(source))
        self._first = watch.first
        self._last = watch.number(target)
        self._steps = merged(watch.steps, self._last)
        self.source = watch.first.value
        self.target = watch.value(target)
        connected = connect(self._steps, watch.first.number)
        told = [_told(step) for step in self._steps]
        remarks = [Remark("custom-rule", "", step) for step in told if step.own and connected & set(step.gives)]
        remarks += [Remark("out-of-range", step.note, step) for step in told if step.note and step.stops is None]
        draws = any(not words.DRAWS.isdisjoint({step.name, *step.inner}) for step in watch.steps)
        self.account = Account(told, watch.first.number, self._last, connected, remarks, draws)

    @cached_property
    def _linear(self) -> JaxLinear:
        return JaxLinear.of(self._run, [self._given])

    def gradient(self, of: np.ndarray, weights: np.ndarray) -> Array | None:
        seed = np.zeros(self.target.size)
        seed[of] = weights
        cotangent = jnp.asarray(seed.reshape(1, *self.target.shape), self.target.dtype)
        (pulled,) = self._linear.pull(0, [0], cotangent)
        return None if pulled is None else pulled[0]

    def refusal(self, error: Exception) -> Remark | None:
        why = f"jax refuses to differentiate it: {reason(error)}"
        exits = [step for step in self.account.steps if step.stops == "left-framework" and not step.decides]
        if isinstance(error, jax.errors.JAXTypeError) and exits:
            return Remark("left-framework", why, exits[0])
        for taken, step in zip(self._steps, self.account.steps, strict=True):
            missing = self._refused(taken)
            if missing is not None:
                return Remark(step.stops or "no-rule", reason(missing), step)
        where = words.raised(error)  # the function ran as it is, so that it was the tracing
        return Remark(None, why, Step("a transformation of jax", where))

    def _refused(self, step: Taken) -> Exception | None:
        """Why a step cannot be differentiated in reverse, if it cannot."""
        active, able = self._active(step), [n for n, x in enumerate(step.gives) if x in self.account.connected]
        if step.refused is not None or not active or not able:
            return step.refused
        try:
            step.pull({number: jnp.zeros_like(step.results[number]) for number in able}, active)
        except Exception as error:
            return error
        return None

    def _active(self, step: Taken) -> list[int]:
        connected = self.account.connected
        return [n for n, x in enumerate(step.takes) if x in connected and smooth(step.operands[n])]

    def push(self, wrt: np.ndarray) -> tuple[Sequence[Pushed | None], np.ndarray] | None:
        seed = np.zeros(self.source.size)
        seed[wrt] = weights(len(wrt))
        tangents = {self._first.number: jnp.asarray(seed.reshape(self.source.shape), self.source.dtype)}
        pushed: list[Pushed | None] = []
        for step in self._steps:
            came = {n: tangents[x] for n, x in enumerate(step.takes) if x in tangents and smooth(step.operands[n])}
            if not came:
                pushed.append(Pushed(0.0, 0.0))
                continue
            arrives = worst(map(largest, came.values()))
            went: dict[int, Array] = {}
            if arrives and any(value in self.account.connected for value in step.gives):
                try:
                    went = step.push(came)
                except Exception:  # a rule is missing on the way
                    return None
            leaves = worst(map(largest, went.values()))
            tangents.update({step.gives[n]: tangent for n, tangent in went.items()})
            cause = ended(step, came) if arrives > 0 and (leaves == 0 or is_bound(step)) else None
            pushed.append(Pushed(arrives, leaves, cause))
        reached = tangents.get(self._last)
        return pushed, np.zeros(self.target.shape) if reached is None else np.asarray(reached, np.float64)

    def pull(self, of: np.ndarray, weights: np.ndarray, wrt: np.ndarray) -> Sequence[Pulled | None] | None:
        swept = self._swept(of, weights, wrt)
        return None if swept is None else swept[0]

    def meet(self, of: np.ndarray, weights: np.ndarray, wrt: np.ndarray) -> Met | None:
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
        return Met(set(masks), alive)

    def _swept(
        self, of: np.ndarray, weights: np.ndarray, wrt: np.ndarray
    ) -> tuple[list[Pulled | None], dict[int, Array]] | None:
        """What comes back by each step, and the gradient of each value."""
        seed = np.zeros(self.target.size)
        seed[of] = weights
        gradients = {self._last: jnp.asarray(seed.reshape(self.target.shape), self.target.dtype)}
        pulled: list[Pulled | None] = [None] * len(self._steps)
        for place in range(len(self._steps))[::-1]:
            step = self._steps[place]
            came = {n: gradients[x] for n, x in enumerate(step.gives) if x in gradients}
            active = self._active(step)
            if not came or not active:
                continue
            try:
                went = step.pull(came, active)
            except Exception:  # a rule is missing on the way
                return None
            asked = {n: self._asked(step.takes[n], gradient, wrt) for n, gradient in went.items()}
            arrives, leaves = worst(map(largest, came.values())), worst(map(largest, asked.values()))
            pulled[place] = Pulled(arrives, leaves, _there(came, asked, arrives), arrives == 0)
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

    def values(self) -> Sequence[Seen | None] | None:
        return [_seen(step) for step in self._steps]


def _told(step: Taken) -> Step:
    return Step(
        step.word,
        step.where,
        step.path,
        tuple(step.takes),
        tuple(step.gives),
        step.stops,
        step.note,
        step.own,
        step.decides,
        quiet=step.quiet,
    )


def _seen(step: Taken) -> Seen:
    takes = [plain(x) for x in step.operands if smooth(x)]
    grows = all(x.all() for x in takes) and not any(np.isnan(plain(x)).any() for x in step.results if smooth(x))
    return Seen(all(map(finite, step.operands)), all(map(finite, step.results)), bool(grows))


def _there(came: dict[int, Array], went: dict[int, Array], arrives: float) -> float:
    """The largest gradient that arrives where what leaves is not finite."""
    found = None
    for gradient in went.values():
        bad = ~np.isfinite(plain(gradient))
        if not bad.any():
            continue
        there = [size for each in came.values() if (size := arriving(plain(each), bad)) is not None]
        if not there:
            return arrives
        found = max(found or 0.0, worst(there))
    return arrives if found is None else found
