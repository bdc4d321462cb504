"""Reading the entries of a sparse Jacobian in as many sweeps as it has colours."""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from elementgrad._backends.autodiff import UnsupportedError
from elementgrad._backends.base import Backend
from elementgrad._read.plan import Mode, Plan, Task
from elementgrad._read.sweeps import PRECISION, EntryReader
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
    """That of the whole tensors, flattened; it must hold all that is in the rows or columns of the entries."""
    rows: np.ndarray
    columns: np.ndarray
    symmetric: bool = False
    shapes: Shapes = ((), ())
    """Those of the tensors, whose elements the rows and the columns are."""

    def __post_init__(self) -> None:
        self.given = self.pattern
        if self.symmetric:
            self.pattern = self.pattern | self.pattern.T
        at = self.pattern.positions(self.rows, self.columns)
        found = at >= 0
        near = np.zeros(self.pattern.shape[0], dtype=bool), np.zeros(self.pattern.shape[1], dtype=bool)
        near[0][self.rows[found]] = True
        near[1][self.columns[found]] = True
        kept = near[0][self.pattern.rows] | near[1][self.pattern.columns]  # nothing else can be in the way
        if not kept.all():
            self.pattern = Pattern.from_keys(self.pattern.keys[kept], self.pattern.shape)
            at = self.pattern.positions(self.rows, self.columns)
        self.at = at
        """Which entry of the pattern each is; -1 for one outside."""
        self.needed = np.zeros(self.pattern.size, dtype=bool)
        self.needed[at[found]] = True

    def plainly(self) -> "EntryRequest":
        """The same, without the claim that the matrix is symmetric."""
        return EntryRequest(self.given, self.rows, self.columns, shapes=self.shapes)

    def coloured(self, without: Any) -> Coloring:
        """The fewest sweeps for the entries, in the directions that can be had."""
        needed = None if self.symmetric else self.needed
        return color(self.pattern, needed, self.symmetric, without, self.shapes)


class Compressed:
    """Entries coloured once, to be read at any point: seeds and places are ready."""

    def __init__(self, asked: EntryRequest, reader: EntryReader, found: Coloring | None = None):
        self.asked = asked
        self._colour(reader, found)

    def _colour(self, reader: EntryReader, found: Coloring | None = None) -> None:
        if len(reader.without) > 1:
            raise FrameworkError(f"{reader.backend.name} can differentiate this in no direction: {reader.without}")
        backend, asked = reader.backend, self.asked
        found = found or asked.coloured(reader.without)
        if asked.symmetric and found.kind != "symmetric":
            found = asked.plainly().coloured(reader.without)
            asked = self.asked = asked.plainly()
        y, x = reader.linear.outputs[reader.output], reader.linear.inputs[reader.inputs[0]]
        self.colouring = found
        self._seeds: dict[Mode, _Seeds] = {}
        self._chunks: dict[Mode, int] = {}
        more = found.kind == "symmetric"
        if found.forward:
            self._seeds["forward"] = _Seeds(backend, found.columns, more, x)
        if found.reverse:
            self._seeds["reverse"] = _Seeds(backend, found.rows, more, y)
        length = found.forward * reader.of_size + found.reverse * sum(reader.wrt_sizes)
        length += reader.of_size if found.kind == "symmetric" else 0
        places = np.full(asked.pattern.size + 1, length)  # the last is for what is outside: zero
        places[:-1][asked.needed | asked.symmetric] = found.places
        self._outside = bool((asked.at < 0).any())
        self._index = backend.load("read").index(places[asked.at], x)

    def plan(self, reader: EntryReader) -> Plan:
        """What a read will do."""
        asked, found = self.asked, self.colouring
        numbers = len(asked.at)
        parts = [reader.plan(found.reverse, [found.forward], numbers, mode) for mode in self._seeds]
        main = max(parts, key=lambda part: part.sweeps, default=reader.plan(0, [0], numbers, "reverse"))
        counts = len(np.unique(asked.rows)), len(np.unique(asked.columns))
        task = Task(*counts, reader.of_size, sum(reader.wrt_sizes), numbers, main.task.itemsize, reader.batch)
        return replace(main, task=task, sweeps=found.sweeps, colouring=found)

    def read(self, reader: EntryReader) -> Tensor | None:
        """The value of each entry, in one dimension; None if there is no path."""
        while True:
            values, more = self.sweep(reader)
            if self.mirrored(values, more, reader):
                return values
            self.colour_plainly(reader)

    def sweep(self, reader: EntryReader) -> tuple[Tensor | None, Tensor | None]:
        """The values, and what `mirrored` looks at: a read that can be a part of a program that is traced."""
        while True:
            mode: Mode
            try:
                swept = []
                for mode, seeds in self._seeds.items():
                    sweep = reader.vjp_sweep() if mode == "reverse" else reader.jvp_sweep(reader.inputs[0])
                    (stack,) = reader.swept(mode, sweep, seeds, seeds.count, self._chunk(mode, reader))
                    if stack is None:
                        return None, None
                    swept.append(reader.backend.reshape(stack, (-1,)))
            except UnsupportedError as error:
                reader.without[mode] = str(error)
                self._colour(reader)
                continue
            more = swept[0][-reader.of_size :] if self.colouring.kind == "symmetric" else None
            return self._gathered(swept, reader), more

    def mirrored(self, values: Tensor | None, more: Tensor | None, reader: EntryReader) -> bool:
        """Whether the matrix is symmetric, if it was taken to be: a sweep from generic numbers, beside those of the
        colours, is what the entries say. While a program is traced there are no numbers to look at."""
        backend, asked, size = reader.backend, self.asked, reader.of_size
        if more is None:
            return True
        ends, numbers = backend.to_float64(more), backend.to_float64(values)
        if ends is None or numbers is None:
            return True
        precision = PRECISION[backend.itemsize(reader.linear.inputs[reader.inputs[0]])]
        weighted = numbers * _generic(size)[asked.rows]
        own, sizes = (np.bincount(asked.columns, part, size) for part in (weighted, np.abs(weighted)))
        wrong = np.abs(ends - own) > precision**0.5 * (sizes + np.abs(ends))
        return not (wrong & np.isfinite(ends)).any()

    def colour_plainly(self, reader: EntryReader) -> None:
        """Do without symmetry, as for a rule of the user's own whose derivative is not symmetric."""
        self.asked = self.asked.plainly()
        self._colour(reader)

    def _chunk(self, mode: Mode, reader: EntryReader) -> int:
        """How many sweeps run at once: found out at the first read, since it takes a look at every step of them."""
        if mode not in self._chunks:
            count = self._seeds[mode].count
            self._chunks[mode] = reader.plan(count, [count], len(self.asked.at), mode).chunk
        return self._chunks[mode]

    def _gathered(self, swept: list[Tensor], reader: EntryReader) -> Tensor:
        backend = reader.backend
        if self._outside or not swept:
            swept = [*swept, reader.nothing((1,))]
        like = reader.linear.inputs[reader.inputs[0]]
        swept = [part if part.dtype == like.dtype else backend.cast(part, like) for part in swept]
        return backend.load("read").gather(swept[0] if len(swept) == 1 else backend.concat(swept), self._index)


class _Seeds:
    """Seeds for each colour: one where the colour is. One more is generic, if asked for. Few are kept ready."""

    def __init__(self, backend: Backend, colours: np.ndarray, more: bool, like: Tensor):
        self.count = int(colours.max()) + 1 + more
        self._backend, self._like = backend, like
        (self._coloured,) = np.nonzero(colours >= 0)
        self._colours = colours[self._coloured]
        self._size, self._more = len(colours), more
        self._ready = self._made(0, self.count) if self.count * self._size <= READY else None

    def __call__(self, start: int, stop: int) -> Tensor:
        if self._ready is None:
            return self._made(start, stop)
        return self._ready if stop - start == self.count else self._ready[start:stop]

    def _made(self, start: int, stop: int) -> Tensor:
        seeds = np.zeros((stop - start, self._size))
        mine = (self._colours >= start) & (self._colours < stop)
        seeds[self._colours[mine] - start, self._coloured[mine]] = 1
        if self._more and stop == self.count:
            seeds[-1] = _generic(self._size)
        return self._backend.cast(seeds.reshape(len(seeds), *self._backend.shape(self._like)), self._like)


@lru_cache(maxsize=4)
def _generic(size: int) -> np.ndarray:
    """Numbers that hold in every dtype exactly, of both signs."""
    random = np.random.default_rng(1)
    return random.integers(8, 24, size) / 16 * random.choice([-1, 1], size)
