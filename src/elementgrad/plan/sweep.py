"""Sweeps through a linearised function, together or one by one, and a reverse sweep that vouches for forward ones."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np

from elementgrad.backends import Backend
from elementgrad.backends.linear import Linear, UnstackableError, UnsupportedError
from elementgrad.plan.plan import Mode
from elementgrad.plan.progress import Progress

Tensor = Any
Sweep = Callable[[Tensor], list[Tensor | None]]
"""From a stack of seeds to a stack of derivatives for each end, None for one without a path."""
PRECISION = {2: 2.0**-8, 4: 2.0**-23, 8: 2.0**-52}
"""By the bytes of a number; of the two formats of two bytes the coarser one."""


@dataclass
class Sweeper:
    """Sweeps between one output and one or several inputs.

    A tensor counts as `batch` examples of `n` elements; without a batch there is one example.
    """

    backend: Backend
    linear: Linear
    output: int
    inputs: Sequence[int]
    of_size: int
    wrt_sizes: Sequence[int]
    batch: int = 1
    budget: int | None = None

    @property
    def looped(self) -> dict[str, str]:
        """The directions whose sweeps run one after another, and why."""
        return self.linear.looped[self.output]

    @property
    def without(self) -> dict[str, str]:
        """The directions that cannot be had, and why."""
        return self.linear.without[self.output]

    def pulling(self) -> Sweep:
        """Reverse sweeps to all inputs."""
        return partial(self.linear.pull, self.output, self.inputs)

    def pushing(self, number: int) -> Sweep:
        """Forward sweeps from one input."""
        return partial(self._push, number)

    def sweep(
        self,
        mode: Mode,
        sweep: Sweep,
        seeds: Callable[[int, int], Tensor],
        count: int,
        chunk: int,
        keep: Callable[[list[Tensor | None], int, int], None],
    ) -> None:
        """Sweep from so many seeds in chunks, or one by one from where they turn out not to go together."""
        with Progress(count, f"{count} {mode} sweeps") as progress:
            start = 0
            while start < count:
                stop = min(start + (1 if mode in self.looped else chunk), count)
                try:
                    swept = sweep(seeds(start, stop))
                except UnstackableError as error:
                    self.looped[mode] = str(error)
                    continue
                keep(swept, start, stop)
                start = stop
                progress.done(start)

    def sweep_from(self, mode: Mode, sweep: Sweep, seeds: Tensor, chunk: int) -> list[Tensor | None]:
        """Sweep from a stack of given seeds to stacks of derivatives."""
        return self.swept(mode, sweep, lambda start, stop: seeds[start:stop], self.backend.shape(seeds)[0], chunk)

    def swept(
        self, mode: Mode, sweep: Sweep, seeds: Callable[[int, int], Tensor], count: int, chunk: int
    ) -> list[Tensor | None]:
        """The same from so many seeds that are made when they are needed."""
        kept: list[list[Tensor | None]] = []
        self.sweep(mode, sweep, seeds, count, chunk, lambda swept, *_: kept.append(swept))
        if len(kept) == 1:
            return kept[0]
        return [None if parts[0] is None else self.backend.concat(parts) for parts in zip(*kept, strict=True)]

    def units(self, like: Tensor, places: np.ndarray) -> Callable[[int, int], Tensor]:
        """Seeds for a tensor, one for each of these positions in it, in each example."""
        return lambda start, stop: self.backend.units(like, places[start:stop].copy(), self.batch)

    def _push(self, number: int, seeds: Tensor) -> list[Tensor | None]:
        (pushed,) = self.linear.push(number, [self.output], seeds)
        if pushed is None or self.linear.mirrored:
            return [pushed]
        try:
            return [pushed if self._vouched(number, seeds, pushed) else None]
        except UnsupportedError as error:
            if self.backend.shape(seeds)[0] == 1:
                raise
            raise UnstackableError(str(error)) from error  # one by one they may be right

    def _vouched(self, number: int, seeds: Tensor, pushed: Tensor) -> bool:
        """Whether there is a path at all; an error if the numbers are not those of reverse sweeps.

        A forward sweep goes by other rules, and may run the function again: it knows nothing of gradient hooks, of a
        state that the first run has changed, of a reverse rule that is no derivative or not linear. Or it transposes a
        reverse sweep, as if that were linear. Reverse sweeps from a generic seed and from its negative are enough to
        hold a stack of forward ones against: what is cut off on one side of zero, as guided backpropagation does, shows
        on the other. The seed is scaled so that no large row hides a small one. While a program is traced there are no
        numbers to look at.
        """
        backend, y = self.backend, self.linear.outputs[self.output]
        forward, given = backend.floats(pushed), backend.floats(seeds)
        if forward is None or given is None:
            return True
        forward, given = forward.reshape(len(given), -1), given.reshape(len(given), -1)
        sizes = np.abs(forward)
        largest = sizes.max(0)
        if not np.isfinite(largest).all():
            raise UnsupportedError("they are not finite, and then the two directions differ")
        probe = _generic(largest.size) / np.where(largest > 0, largest, 1)
        seed = backend.cast(probe.reshape(1, *backend.shape(y)), y)
        seen = np.asarray(backend.floats(seed)).reshape(-1)
        precision = max(PRECISION[backend.itemsize(end)] for end in (y, self.linear.inputs[number]))
        near = precision**0.5 * _along(sizes, np.abs(seen))
        ahead = _along(forward, seen)
        chunk = 1 if self.linear.traces else min(2, len(given))  # no more at once than there were
        pulling = partial(self.linear.pull, self.output, [number])
        try:
            (pulled,) = self.sweep_from("reverse", pulling, backend.concat([seed, -seed]), chunk)
        except UnsupportedError:  # forward sweeps are all there is
            return True
        if pulled is None:
            return False
        for sign, reverse in zip((1, -1), np.asarray(backend.floats(pulled)).reshape(2, -1), strict=True):
            if not (np.abs(sign * ahead - _along(given, reverse)) <= near).all():
                raise UnsupportedError("they give other numbers than reverse sweeps, or not the same when run again")
        return True


@lru_cache(maxsize=8)
def _generic(size: int) -> np.ndarray:
    """Weights that no function cancels but by chance; positive, as the seeds of rows are."""
    return np.random.default_rng(0).uniform(0.5, 1.5, size)


def _along(stack: np.ndarray, vector: np.ndarray) -> np.ndarray:
    """A product without the threads of a matrix library, which would wait for those of the framework."""
    return np.einsum("ij,j->i", stack, vector)
