"""Sweeps through a linearised function, together or one by one, and a reverse sweep that vouches for forward ones.

Whether the examples of a batch keep apart, as `batch=True` takes for granted.

Reading derivatives by sweeps: blocks, single entries and products, for every framework alike.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import repeat
from operator import attrgetter
from typing import Any

import numpy as np

from elementgrad._backends.autodiff import Linearization, NotBatchableError, UnsupportedError
from elementgrad._backends.base import Backend
from elementgrad._place.selection import Selection
from elementgrad._read.budget import Progress, available, default, to_text
from elementgrad._read.plan import Mode, Plan, Task, direction, fit
from elementgrad.errors import BatchError, FrameworkError, SizeError

Tensor = Any
Sweep = Callable[[Tensor], list[Tensor | None]]
"""From a stack of seeds to a stack of derivatives for each end, None for one without a path."""
PRECISION = {2: 2.0**-8, 4: 2.0**-23, 8: 2.0**-52}
"""By the bytes of a number; of the two formats of two bytes the coarser one."""


@dataclass
class SweepRunner:
    """Sweeps between one output and one or several inputs.

    A tensor counts as `batch` examples of `n` elements; without a batch there is one example.
    """

    backend: Backend
    linear: Linearization
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

    def vjp_sweep(self) -> Sweep:
        """Reverse sweeps to all inputs."""
        return partial(self.linear.vjp, self.output, self.inputs)

    def jvp_sweep(self, number: int) -> Sweep:
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
                except NotBatchableError as error:
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
        return lambda start, stop: self.backend.load("read").one_hot_seeds(like, places[start:stop].copy(), self.batch)

    def _push(self, number: int, seeds: Tensor) -> list[Tensor | None]:
        (pushed,) = self.linear.jvp(number, [self.output], seeds)
        if pushed is None or self.linear.mirrored:
            return [pushed]
        try:
            return [pushed if self._vouched(number, seeds, pushed) else None]
        except UnsupportedError as error:
            if self.backend.shape(seeds)[0] == 1:
                raise
            raise NotBatchableError(str(error)) from error  # one by one they may be right

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
        forward, given = backend.to_float64(pushed), backend.to_float64(seeds)
        if forward is None or given is None:
            return True
        forward, given = forward.reshape(len(given), -1), given.reshape(len(given), -1)
        sizes = np.abs(forward)
        largest = sizes.max(0)
        if not np.isfinite(largest).all():
            raise UnsupportedError("they are not finite, and then the two directions differ")
        probe = _generic(largest.size) / np.where(largest > 0, largest, 1)
        seed = backend.cast(probe.reshape(1, *backend.shape(y)), y)
        seen = np.asarray(backend.to_float64(seed)).reshape(-1)
        precision = max(PRECISION[backend.itemsize(end)] for end in (y, self.linear.inputs[number]))
        near = precision**0.5 * _along(sizes, np.abs(seen))
        ahead = _along(forward, seen)
        chunk = 1 if self.linear.traces else min(2, len(given))  # no more at once than there were
        pulling = partial(self.linear.vjp, self.output, [number])
        try:
            (pulled,) = self.sweep_from("reverse", pulling, backend.concat([seed, -seed]), chunk)
        except UnsupportedError:  # forward sweeps are all there is
            return True
        if pulled is None:
            return False
        for sign, reverse in zip((1, -1), np.asarray(backend.to_float64(pulled)).reshape(2, -1), strict=True):
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


def require_apart(sweeper: SweepRunner) -> None:
    """Raise if examples mix. Any two differ in a bit of their number: seeds that go by bits tell them apart."""
    for bit in range(max(0, sweeper.batch - 1).bit_length()):
        seeded = (np.arange(sweeper.batch) >> bit & 1) == np.array([[0], [1]])
        for derivative in _seeded(sweeper, seeded):
            values = None if derivative is None else sweeper.backend.read(derivative)
            if values is None:  # no path, or nobody can know while tracing
                continue
            values = np.abs(values).reshape(2, sweeper.batch, -1)
            leaked = (values > 0) & np.isfinite(values) & ~seeded[..., None]
            if leaked.any():
                raise BatchError(
                    f"the examples mix: example {leaked.any((0, 2)).argmax()} and another depend on each other, so "
                    "they have no Jacobians of their own; leave batch=True out"
                )


def _seeded(sweeper: SweepRunner, examples: np.ndarray) -> list[Tensor | None]:
    """Derivatives from seeds for some examples, by whichever direction there is."""
    linear, backend = sweeper.linear, sweeper.backend

    def seeds(like: Tensor) -> Tensor:
        shape = tuple(backend.shape(like))
        weights = np.random.default_rng(0).uniform(0.5, 1.5, shape)  # such that nothing cancels
        return backend.cast(examples.reshape(2, -1, *(1 for _ in shape[1:])) * weights, like)

    try:
        return sweeper.sweep_from("reverse", sweeper.vjp_sweep(), seeds(linear.outputs[sweeper.output]), 2)
    except UnsupportedError:
        return [
            sweeper.sweep_from("forward", sweeper.jvp_sweep(number), seeds(linear.inputs[number]), 2)[0]
            for number in sweeper.inputs
        ]


Keep = Callable[[Tensor, int, int], Tensor]
"""From a stack of sweeps, (k, batch, elements), and its place among all: what is kept, sweeps first."""
WIDEST = 16
"""No number takes more bytes."""
ROOM = 10**8
"""Results of up to so many bytes are not held against the memory that is free."""


@dataclass
class EntryReader(SweepRunner):
    """Reads blocks, single entries and products. A derivative without a path comes back as None."""

    def at(self, linear: Linearization) -> "EntryReader":
        """The same reads of the function at another point."""
        return replace(self, linear=linear)

    def plan(self, rows: int, columns: Sequence[int], numbers: int, mode: Mode | None = None) -> Plan:
        """The plan for so many distinct rows, and columns of each input; in the cheaper direction unless told."""
        linear = self.linear
        x = linear.inputs[self.inputs[0]]
        of_size, wrt_size = self.of_size, sum(self.wrt_sizes)
        task = Task(rows, sum(columns), of_size, wrt_size, numbers, self.backend.itemsize(x), self.batch)
        mode = mode or direction(task, self.without)
        notes = [f"no {other} sweeps: {why}" for other, why in self.without.items()]
        notes += [f"one sweep after another: {self.looped[mode]}"] if mode in self.looped else []
        sweeps = task.columns if mode == "forward" else rows
        if sweeps <= 1:
            return fit(task, mode, notes=tuple(notes))
        if mode == "forward":
            work = max(map(linear.work, repeat(True), self.inputs, repeat([self.output]), columns))
        else:
            work = linear.work(False, self.output, self.inputs, sweeps)
        budget = self.budget or default(self.backend.load("read").free_memory(x))
        return fit(task, mode, work, budget, tuple(notes), mode in self.looped)

    def plan_of(self, rows: Selection, columns: Sequence[Selection]) -> Plan:
        """The plan for a block."""
        numbers = self.batch * rows.size * sum(selection.size for selection in columns)
        return self.plan(_count(rows), [_count(selection) for selection in columns], numbers)

    def block(self, rows: Selection, columns: Sequence[Selection]) -> list[Tensor | None]:
        """The derivatives of some elements with respect to some of each input, all with all, (batch, rows, columns)."""
        numbers = self.batch * rows.size * sum(map(_size, columns))
        if not numbers:
            return [self.nothing((self.batch, rows.size, selection.size)) for selection in columns]
        if rows.size == self.batch == 1 and "reverse" not in self.without:
            if numbers * WIDEST > ROOM:
                self.require_room(numbers)
            try:
                return self._row(rows, columns)
            except UnsupportedError as error:
                self.without["reverse"] = str(error)

        return self._run(lambda: self.plan_of(rows, columns), partial(self._read, rows, columns))

    def part(self, plan: Plan, rows: Selection, columns: Selection) -> Tensor | None:
        """A block by a plan that was made for more than it: in that direction, unless it turns out to have no rule."""
        if self.batch * rows.size * columns.size:
            self.require_apart()
            try:
                return self._read(rows, [columns], plan.mode, plan)[0]
            except UnsupportedError as error:
                self.without[plan.mode] = str(error)
        return self.block(rows, [columns])[0]

    def probed(self, mode: Mode, places: np.ndarray) -> Tensor | None:
        """Two sweeps from generic seeds for some elements: whether there is a path and a rule, and numbers for all."""
        number = self.inputs[0]
        like = self.linear.outputs[self.output] if mode == "reverse" else self.linear.inputs[number]
        weights = np.zeros((2, self.batch, self.of_size if mode == "reverse" else self.wrt_sizes[0]))
        random = np.random.default_rng(0)
        shape = (2, self.batch, len(places))
        weights[..., places] = random.uniform(0.5, 1.5, shape) * random.choice([-1, 1], shape)
        seeds = self.backend.cast(weights.reshape(2, *self.backend.shape(like)), like)
        return self.sweep_from(mode, self.vjp_sweep() if mode == "reverse" else self.jvp_sweep(number), seeds, 2)[0]

    def _read(self, rows: Selection, columns: Sequence[Selection], mode: Mode, plan: Plan) -> list[Tensor | None]:
        if mode == "reverse":
            places, again = _distinct(rows)
            kept = self._reverse(plan, places, [self._picker(selection) for selection in columns])
            return [self._arranged(parts, again, (1, 0, 2)) for parts in kept]
        blocks = []
        for number, selection in zip(self.inputs, columns, strict=True):
            if not selection.size:
                blocks.append(self.nothing((self.batch, rows.size, 0)))
                continue
            places, again = _distinct(selection)
            parts = self._forward(plan, number, places, self._picker(rows))
            blocks.append(self._arranged(parts, again, (1, 2, 0)))
        return blocks

    def _row(self, rows: Selection, columns: Sequence[Selection]) -> list[Tensor | None]:
        """The derivatives of one element, of which there is no batch: the everyday read, with nothing to plan."""
        y, swept = self.linear.outputs[self.output], None
        if not rows.shape and rows.basic and rows.of == tuple(self.backend.shape(y)):
            swept = self.linear.row(self.output, self.inputs, rows.parts)
        if swept is None:
            seeds = self.backend.load("read").one_hot_seeds(y, rows.flat().reshape(-1), 1)
            swept = self.linear.vjp(self.output, self.inputs, seeds)
        return [
            None if x is None else self._taken(self._reshaped(x, selection.of), selection)
            for x, selection in zip(swept, columns, strict=True)
        ]

    def _taken(self, x: Tensor, selection: Selection) -> Tensor:
        return x if selection.whole else self.backend.take(x, selection)

    def pairs(self, outs: np.ndarray, ins: np.ndarray) -> Tensor | None:
        """The derivative of one element with respect to one, for each pair of positions: (batch, pairs)."""
        if not self.batch * len(outs):
            return self.nothing((self.batch, 0))

        def read(mode: Mode, plan: Plan) -> Tensor | None:
            swept, kept = (outs, ins) if mode == "reverse" else (ins, outs)
            places, owner = np.unique(swept, return_inverse=True)
            order = np.argsort(owner, kind="stable")
            rank = owner[order]

            def pick(stack: Tensor, start: int, stop: int) -> Tensor:
                chosen = slice(*np.searchsorted(rank, [start, stop]))
                of = self.backend.shape(stack)
                parts = (rank[chosen] - start, range(of[1]), kept[order[chosen]])
                return self.backend.take(stack, Selection(of, parts, block=0, broadcast=(len(parts[0]),)))

            if mode == "reverse":
                (parts,) = self._reverse(plan, places, [pick])
            else:
                parts = self._forward(plan, self.inputs[0], places, pick)
            again = np.empty_like(order)
            again[order] = np.arange(len(order))
            return self._arranged(parts, again, (1, 0))

        counts = len(np.unique(outs)), [len(np.unique(ins))]
        return self._run(lambda: self.plan(*counts, self.batch * len(outs)), read)

    def product(self, seeds: Tensor, forward: bool) -> Tensor | None:
        """`J @ v` for a stack of v, or `u @ J` for a stack of u; by the other direction where this one has no rule."""
        linear, backend, (number,) = self.linear, self.backend, self.inputs
        count, (wrt_size,) = backend.shape(seeds)[0], self.wrt_sizes
        direct: Mode = "forward" if forward else "reverse"
        source, target = (wrt_size, self.of_size) if forward else (self.of_size, wrt_size)
        like = linear.outputs[self.output] if forward else linear.inputs[number]
        if not count * self.batch * source * target:  # a sum of nothing
            return backend.zeros((count, *backend.shape(like)), like)

        def plan() -> Plan:
            numbers = count * self.batch * target
            if direct in self.without:
                return self.plan(self.of_size, self.wrt_sizes, numbers)
            return self.plan(count, [count], numbers, direct)

        def contract(stack: Tensor, start: int, stop: int) -> Tensor:
            reading = backend.load("read")
            factors = reading.transpose(backend.reshape(seeds, (count, self.batch, source)), (1, 2, 0))
            return reading.transpose(reading.matmul(reading.transpose(stack, (1, 0, 2)), factors), (1, 0, 2))

        def read(mode: Mode, plan: Plan) -> Tensor | None:
            if mode == direct:
                sweep = self.jvp_sweep(number) if forward else self.vjp_sweep()
                return self.sweep_from(mode, sweep, seeds, plan.chunk)[0]
            if forward:
                (parts,) = self._reverse(plan, np.arange(target), [contract])
            else:
                parts = self._forward(plan, number, np.arange(target), contract)
            swept = self._arranged(parts, None, (2, 1, 0))
            return None if swept is None else backend.reshape(swept, (count, *backend.shape(like)))

        return self._run(plan, read)

    def require_apart(self) -> None:
        """Raise if the examples of a batch mix; looked at once for each output and its inputs."""
        ends = self.output, *self.inputs
        if ends not in self.linear.apart:
            require_apart(self)
            self.linear.apart.add(ends)

    def _run(self, plan: Callable[[], Plan], read: Callable[[Mode, Plan], Any]) -> Any:
        """Read by the plan; where its direction turns out to have no rule, by the other."""
        self.require_apart()
        while True:
            chosen = plan()
            self.require_room(chosen.task.numbers)
            try:
                return read(chosen.mode, chosen)
            except UnsupportedError as error:
                if self.without:
                    message = f"{self.backend.name} can differentiate this in no direction: {error}"
                    raise FrameworkError(message) from error
                self.without[chosen.mode] = str(error)

    def require_room(self, numbers: int) -> None:
        """Refuse a result that fits into no memory: the system would end the process without a word."""
        x = self.linear.inputs[self.inputs[0]]
        size = numbers * self.backend.itemsize(x)
        if size > ROOM:
            free = self.backend.load("read").free_memory(x) or available()
            if size > free:
                raise SizeError(
                    f"the result would take {to_text(size)}, and {to_text(free)} are free; read some "
                    "of its rows or columns at a time"
                )

    def _reverse(self, plan: Plan, places: np.ndarray, keep: Sequence[Keep]) -> list[list[Tensor] | None]:
        kept: list[list[Tensor] | None] = [[] for _ in self.inputs]

        def add(swept: list[Tensor | None], start: int, stop: int) -> None:
            for i, derivative in enumerate(swept):
                parts = kept[i]
                if derivative is None or parts is None:
                    kept[i] = None
                else:
                    parts.append(keep[i](self._stack(derivative, self.wrt_sizes[i]), start, stop))

        seeds = self.units(self.linear.outputs[self.output], places)
        self.sweep("reverse", self.vjp_sweep(), seeds, len(places), plan.chunk, add)
        return kept

    def _forward(self, plan: Plan, number: int, places: np.ndarray, keep: Keep) -> list[Tensor] | None:
        kept: list[Tensor | None] = []

        def add(swept: list[Tensor | None], start: int, stop: int) -> None:
            (derivative,) = swept
            kept.append(None if derivative is None else keep(self._stack(derivative, self.of_size), start, stop))

        seeds = self.units(self.linear.inputs[number], places)
        self.sweep("forward", self.jvp_sweep(number), seeds, len(places), plan.chunk, add)
        return None if kept[0] is None else kept

    def nothing(self, shape: tuple[int, ...]) -> Tensor:
        """What there is to read where nothing is asked for."""
        return self.backend.zeros(shape, self.linear.inputs[self.inputs[0]])

    def _stack(self, swept: Tensor, size: int) -> Tensor:
        return self._reshaped(swept, (self.backend.shape(swept)[0], self.batch, size))

    def _reshaped(self, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        """In this shape; not a step where it has it already, since one takes as long as a small sweep."""
        return x if tuple(self.backend.shape(x)) == shape else self.backend.reshape(x, shape)

    def _picker(self, selection: Selection) -> Keep:
        """Keep the selected elements of every sweep and example."""
        if selection.whole:
            return lambda stack, start, stop: stack

        def pick(stack: Tensor, start: int, stop: int) -> Tensor:
            axes = tuple(self.backend.shape(stack)[:2])
            where = selection.behind(axes) if selection.basic else selection.stacked(axes)
            taken = self.backend.take(self._reshaped(stack, where.of), where)
            return self._reshaped(taken, (*axes, selection.size))

        return pick

    def _arranged(self, parts: list[Tensor] | None, again: np.ndarray | None, axes: tuple[int, ...]) -> Tensor | None:
        """Join what was kept, repeat and order the sweeps as they were named, and bring the batch to the front."""
        if parts is None:
            return None
        backend = self.backend
        joined = parts[0] if len(parts) == 1 else backend.concat(parts)
        if again is not None and not np.array_equal(again, np.arange(backend.shape(joined)[0])):
            of = tuple(backend.shape(joined))
            rest = tuple(range(size) for size in of[1:])
            joined = backend.take(joined, Selection(of, (again, *rest), block=0, broadcast=again.shape))
        return joined if self.batch == 1 and axes[:2] == (1, 0) else backend.load("read").transpose(joined, axes)


_size = attrgetter("size")


def _count(selection: Selection) -> int:
    return selection.size if selection.unique else len(_distinct(selection)[0])


def _distinct(selection: Selection) -> tuple[np.ndarray, np.ndarray | None]:
    """The positions to sweep from, each once, and where each named element is among them."""
    flat = selection.flat().reshape(-1)
    return (flat, None) if selection.unique else np.unique(flat, return_inverse=True)
