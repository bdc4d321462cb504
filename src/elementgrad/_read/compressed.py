"""Read the entries of a sparse Jacobian in as many sweeps as its pattern has colours."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from elementgrad._backends.autodiff import UnsupportedError
from elementgrad._backends.base import Backend
from elementgrad._read.plan import Mode, Plan, Task
from elementgrad._read.sweeps import PRECISION, SweepRunner
from elementgrad._sparsity.coloring import Coloring, Shapes, color
from elementgrad._sparsity.pattern import Pattern
from elementgrad.errors import FrameworkError

Tensor = Any
READY = 10**7
"""Seeds of up to so many numbers are made once; more are made as they are needed."""


@dataclass
class EntryRequest:
    """Entries of a whole Jacobian by row and column, in any order, with repeats; those outside the pattern are zero."""

    pattern: Pattern
    """The pattern of the whole tensors, flattened, with every entry of the rows or columns that are read."""
    rows: np.ndarray
    columns: np.ndarray
    symmetric: bool = False
    shapes: Shapes = ((), ())
    """Those of the tensors, whose elements the rows and the columns are."""

    def __post_init__(self) -> None:
        self.given_pattern = self.pattern
        if self.symmetric:
            self.pattern = self.pattern | self.pattern.T
        at = self.pattern.positions(self.rows, self.columns)
        inside = at >= 0
        rows, columns = np.zeros(self.pattern.shape[0], dtype=bool), np.zeros(self.pattern.shape[1], dtype=bool)
        rows[self.rows[inside]] = True
        columns[self.columns[inside]] = True
        near = rows[self.pattern.rows] | columns[self.pattern.columns]  # no other can collide with one of them
        if not near.all():
            self.pattern = Pattern.from_keys(self.pattern.keys[near], self.pattern.shape)
            at = self.pattern.positions(self.rows, self.columns)
        self.at = at
        """The entry of the pattern that each is; -1 for one outside."""
        self.needed = np.zeros(self.pattern.size, dtype=bool)
        self.needed[at[inside]] = True

    def without_symmetry(self) -> "EntryRequest":
        """Return the same entries of a matrix that need not be symmetric."""
        return EntryRequest(self.given_pattern, self.rows, self.columns, shapes=self.shapes)

    def color(self, missing_rules: Mapping[str, str]) -> Coloring:
        """Return the fewest sweeps for the entries, in the directions that have a rule."""
        needed = None if self.symmetric else self.needed
        return color(self.pattern, needed, self.symmetric, missing_rules, self.shapes)


class Compressed:
    """Entries coloured once, to be read at any point: seeds and positions are ready."""

    def __init__(self, request: EntryRequest, runner: SweepRunner, coloring: Coloring | None = None):
        self.request = request
        self._color(runner, coloring)

    def plan(self, runner: SweepRunner) -> Plan:
        """Return the plan of a read."""
        request, coloring = self.request, self.coloring
        numbers = len(request.at)
        parts = [runner.plan(coloring.reverse, [coloring.forward], numbers, mode) for mode in self._seeds]
        main = max(parts, key=lambda part: part.sweeps, default=runner.plan(0, [0], numbers, "reverse"))
        counts = len(np.unique(request.rows)), len(np.unique(request.columns))
        task = Task(*counts, runner.of_size, sum(runner.wrt_sizes), numbers, main.task.itemsize, runner.batch)
        return replace(main, task=task, sweeps=coloring.sweeps, colouring=coloring)

    def read(self, runner: SweepRunner) -> Tensor | None:
        """Return the value of each entry, in one dimension; None if there is no path."""
        while True:
            values, check = self.sweep(runner)
            if self.is_symmetric(values, check, runner):
                return values
            self.drop_symmetry(runner)

    def sweep(self, runner: SweepRunner) -> tuple[Tensor | None, Tensor | None]:
        """Return the values, and the product that `is_symmetric` looks at. It can be traced as part of a program."""
        while True:
            mode: Mode
            try:
                parts = []
                for mode, seeds in self._seeds.items():
                    (stack,) = runner.run_lazily(mode, seeds, seeds.count, self._chunk(mode, runner))
                    if stack is None:
                        return None, None
                    parts.append(runner.backend.reshape(stack, (-1,)))
            except UnsupportedError as error:
                runner.missing_rules[mode] = str(error)
                self._color(runner)
                continue
            check = parts[0][-runner.of_size :] if self.coloring.kind == "symmetric" else None
            return self._gather(parts, runner), check

    def is_symmetric(self, values: Tensor | None, check: Tensor | None, runner: SweepRunner) -> bool:
        """Return True if the matrix is symmetric, or was not taken to be.

        One sweep from generic numbers, beside those of the colours, must be what the entries say. A traced program has
        no numbers to compare.
        """
        backend, request, size = runner.backend, self.request, runner.of_size
        if check is None:
            return True
        product, entries = backend.to_float64(check), backend.to_float64(values)
        if product is None or entries is None:
            return True
        precision = PRECISION[backend.itemsize(runner.linear.inputs[runner.inputs[0]])]
        weighted = entries * _generic_weights(size)[request.rows]
        expected, sizes = (np.bincount(request.columns, part, size) for part in (weighted, np.abs(weighted)))
        wrong = np.abs(product - expected) > precision**0.5 * (sizes + np.abs(product))
        return not (wrong & np.isfinite(product)).any()

    def drop_symmetry(self, runner: SweepRunner) -> None:
        """Colour anew without symmetry, as for a rule of the user's own whose derivative is not symmetric."""
        self.request = self.request.without_symmetry()
        self._color(runner)

    def _color(self, runner: SweepRunner, coloring: Coloring | None = None) -> None:
        if len(runner.missing_rules) > 1:
            raise FrameworkError(
                f"{runner.backend.name} can differentiate this in no direction: {runner.missing_rules}"
            )
        backend, request = runner.backend, self.request
        coloring = coloring or request.color(runner.missing_rules)
        if request.symmetric and coloring.kind != "symmetric":
            request = self.request = request.without_symmetry()
            coloring = request.color(runner.missing_rules)
        y, x = runner.linear.outputs[runner.output], runner.linear.inputs[runner.inputs[0]]
        symmetric = coloring.kind == "symmetric"
        self.coloring = coloring
        self._seeds: dict[Mode, _Seeds] = {}
        self._chunks: dict[Mode, int] = {}
        if coloring.forward:
            self._seeds["forward"] = _Seeds(backend, coloring.columns, symmetric, x)
        if coloring.reverse:
            self._seeds["reverse"] = _Seeds(backend, coloring.rows, symmetric, y)
        length = coloring.forward * runner.of_size + coloring.reverse * sum(runner.wrt_sizes)
        length += runner.of_size if symmetric else 0
        positions = np.full(request.pattern.size + 1, length)  # the last is for entries outside, which are zero
        positions[:-1][request.needed | request.symmetric] = coloring.places
        self._has_outside = bool((request.at < 0).any())
        self._index = backend.load("read").index(positions[request.at], x)

    def _chunk(self, mode: Mode, runner: SweepRunner) -> int:
        # Planned at the first read, since a plan looks at every step of a sweep.
        if mode not in self._chunks:
            count = self._seeds[mode].count
            self._chunks[mode] = runner.plan(count, [count], len(self.request.at), mode).chunk
        return self._chunks[mode]

    def _gather(self, parts: list[Tensor], runner: SweepRunner) -> Tensor:
        backend = runner.backend
        if self._has_outside or not parts:
            parts = [*parts, runner.zeros((1,))]
        like = runner.linear.inputs[runner.inputs[0]]
        parts = [part if part.dtype == like.dtype else backend.cast(part, like) for part in parts]
        return backend.load("read").gather(parts[0] if len(parts) == 1 else backend.concat(parts), self._index)


class _Seeds:
    """Seeds for each colour: one where the colour is. A generic one comes last, if asked for. Few are kept ready."""

    def __init__(self, backend: Backend, colors: np.ndarray, with_generic: bool, like: Tensor):
        self.count = int(colors.max()) + 1 + with_generic
        self._backend, self._like = backend, like
        (self._colored,) = np.nonzero(colors >= 0)
        self._colors = colors[self._colored]
        self._size, self._with_generic = len(colors), with_generic
        self._ready = self._make(0, self.count) if self.count * self._size <= READY else None

    def __call__(self, start: int, stop: int) -> Tensor:
        if self._ready is None:
            return self._make(start, stop)
        return self._ready if stop - start == self.count else self._ready[start:stop]

    def _make(self, start: int, stop: int) -> Tensor:
        seeds = np.zeros((stop - start, self._size))
        here = (self._colors >= start) & (self._colors < stop)
        seeds[self._colors[here] - start, self._colored[here]] = 1
        if self._with_generic and stop == self.count:
            seeds[-1] = _generic_weights(self._size)
        return self._backend.cast(seeds.reshape(len(seeds), *self._backend.shape(self._like)), self._like)


@lru_cache(maxsize=4)
def _generic_weights(size: int) -> np.ndarray:
    """Return numbers that every dtype holds exactly, of both signs."""
    random = np.random.default_rng(1)
    return random.integers(8, 24, size) / 16 * random.choice([-1, 1], size)
