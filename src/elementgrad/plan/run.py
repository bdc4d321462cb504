"""Reading derivatives by sweeps: blocks, single entries and products, for every framework alike."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Any

import numpy as np

from elementgrad.backends import Backend
from elementgrad.backends.linear import Linear, UnstackableError, UnsupportedError
from elementgrad.errors import FrameworkError
from elementgrad.plan import budget as bytes_of
from elementgrad.plan.batch import require_apart
from elementgrad.plan.plan import Mode, Plan, Task, choose, direction
from elementgrad.plan.progress import Progress
from elementgrad.selection import Selection

Tensor = Any
Keep = Callable[[Tensor, int, int], Tensor]
"""From a stack of sweeps, (k, batch, elements), and its place among all: what is kept, sweeps first."""

Sweep = Callable[[Tensor], list[Tensor | None]]
"""From a stack of seeds to a stack of derivatives for each end."""


@dataclass
class Reader:
    """Sweeps between one output and one or several inputs of a linearised function.

    A tensor counts as `batch` examples of `n` elements; without a batch there is one example. A derivative without a
    path comes back as None.
    """

    backend: Backend
    linear: Linear
    output: int
    inputs: Sequence[int]
    of_size: int
    wrt_sizes: Sequence[int]
    batch: int = 1
    budget: int | None = None
    apart: bool = False
    """Whether the examples of the batch are known not to mix."""

    def plan(self, rows: int, columns: Sequence[int], numbers: int) -> Plan:
        """The plan for so many distinct rows, and columns of each input."""
        linear = self.linear
        x = linear.inputs[self.inputs[0]]
        of_size, wrt_size = self.of_size, sum(self.wrt_sizes)
        task = Task(rows, sum(columns), of_size, wrt_size, numbers, self.backend.itemsize(x), self.batch)
        mode = direction(task, linear.without)
        notes = [f"no {other} sweeps: {why}" for other, why in linear.without.items()]
        notes += [f"one sweep after another: {linear.looped[mode]}"] if mode in linear.looped else []
        sweeps = task.columns if mode == "forward" else rows
        if sweeps <= 1:
            return choose(task, mode, notes=tuple(notes))
        if mode == "forward":
            work = max(map(linear.work, repeat(True), self.inputs, repeat([self.output]), columns))
        else:
            work = linear.work(False, self.output, self.inputs, sweeps)
        budget = self.budget or bytes_of.default(self.backend.free(x))
        return choose(task, mode, work, budget, tuple(notes), mode in linear.looped)

    def plan_of(self, rows: Selection, columns: Sequence[Selection]) -> Plan:
        """The plan for a block."""
        numbers = self.batch * rows.size * sum(selection.size for selection in columns)
        return self.plan(_count(rows), [_count(selection) for selection in columns], numbers)

    def block(self, rows: Selection, columns: Sequence[Selection]) -> list[Tensor | None]:
        """The derivatives of some elements with respect to some of each input, all with all, (batch, rows, columns)."""
        if not self.batch * rows.size * sum(selection.size for selection in columns):
            return [self.nothing((self.batch, rows.size, selection.size)) for selection in columns]

        def read(mode: Mode, plan: Plan) -> list[Tensor | None]:
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

        return self._run(lambda: self.plan_of(rows, columns), read)

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

        def plan() -> Plan:
            numbers = count * self.batch * target
            if direct in linear.without:
                return self.plan(self.of_size, self.wrt_sizes, numbers)
            itemsize = backend.itemsize(linear.inputs[number])
            return choose(Task(count, count, self.of_size, wrt_size, numbers, itemsize, self.batch), direct)

        def contract(stack: Tensor, start: int, stop: int) -> Tensor:
            factors = backend.transpose(backend.reshape(seeds, (count, self.batch, source)), (1, 2, 0))
            return backend.transpose(backend.matmul(backend.transpose(stack, (1, 0, 2)), factors), (1, 0, 2))

        def read(mode: Mode, plan: Plan) -> Tensor | None:
            if mode == direct:
                return self.each(mode, partial(self.push, number) if forward else self.pull, seeds)[0]
            if forward:
                (parts,) = self._reverse(plan, np.arange(target), [contract])
            else:
                parts = self._forward(plan, number, np.arange(target), contract)
            swept = self._arranged(parts, None, (2, 1, 0))
            like = linear.outputs[self.output] if forward else linear.inputs[number]
            return None if swept is None else backend.reshape(swept, (count, *backend.shape(like)))

        return self._run(plan, read)

    def _run(self, plan: Callable[[], Plan], read: Callable[[Mode, Plan], Any]) -> Any:
        """Read by the plan; where its direction turns out to have no rule, by the other."""
        require_apart(self)
        while True:
            chosen = plan()
            try:
                return read(chosen.mode, chosen)
            except UnsupportedError as error:
                without = self.linear.without
                if without:
                    message = f"{self.backend.name} can differentiate this in no direction: {error}"
                    raise FrameworkError(message) from error
                without[chosen.mode] = str(error)

    def _reverse(self, plan: Plan, places: np.ndarray, keep: Sequence[Keep]) -> list[list[Tensor] | None]:
        y = self.linear.outputs[self.output]
        kept: list[list[Tensor] | None] = [[] for _ in self.inputs]
        for start, stop, swept in self._sweeps(plan, y, places, self.pull):
            for i, derivative in enumerate(swept):
                parts = kept[i]
                if derivative is None or parts is None:
                    kept[i] = None
                else:
                    parts.append(keep[i](self._stack(derivative, self.wrt_sizes[i]), start, stop))
        return kept

    def _forward(self, plan: Plan, number: int, places: np.ndarray, keep: Keep) -> list[Tensor] | None:
        kept = []
        sweep = partial(self.push, number)
        for start, stop, (derivative,) in self._sweeps(plan, self.linear.inputs[number], places, sweep):
            if derivative is None:
                return None
            kept.append(keep(self._stack(derivative, self.of_size), start, stop))
        return kept

    def pull(self, seeds: Tensor) -> list[Tensor | None]:
        """Reverse sweeps to all inputs."""
        return self.linear.pull(self.output, self.inputs, seeds)

    def push(self, number: int, seeds: Tensor) -> list[Tensor | None]:
        """Forward sweeps from one input."""
        return self.linear.push(number, [self.output], seeds)

    def _sweeps(
        self, plan: Plan, like: Tensor, places: np.ndarray, sweep: Sweep
    ) -> Iterator[tuple[int, int, list[Tensor | None]]]:
        """Sweep from each place, in chunks; one by one from where they turn out not to go together."""
        looped = self.linear.looped
        with Progress(len(places), f"{len(places)} {plan.mode} sweeps") as progress:
            start = 0
            while start < len(places):
                stop = min(start + (1 if plan.mode in looped else plan.chunk), len(places))
                try:
                    swept = sweep(self.backend.units(like, places[start:stop].copy(), self.batch))
                except UnstackableError as error:
                    looped[plan.mode] = str(error)
                    continue
                yield start, stop, swept
                start = stop
                progress.done(start)

    def each(self, mode: Mode, sweep: Sweep, seeds: Tensor) -> list[Tensor | None]:
        """Sweep from given seeds, together or one by one."""
        count = self.backend.shape(seeds)[0]
        if count == 1 or mode not in self.linear.looped:
            try:
                return sweep(seeds)
            except UnstackableError as error:
                self.linear.looped[mode] = str(error)
        each = [sweep(seeds[i : i + 1]) for i in range(count)]
        return [None if of_one[0] is None else self.backend.concat(of_one) for of_one in zip(*each, strict=True)]

    def nothing(self, shape: tuple[int, ...]) -> Tensor:
        """What there is to read where nothing is asked for."""
        return self.backend.zeros(shape, self.linear.inputs[self.inputs[0]])

    def _stack(self, swept: Tensor, size: int) -> Tensor:
        return self.backend.reshape(swept, (self.backend.shape(swept)[0], self.batch, size))

    def _picker(self, selection: Selection) -> Keep:
        """Keep the selected elements of every sweep and example."""
        if selection.whole:
            return lambda stack, start, stop: stack

        def pick(stack: Tensor, start: int, stop: int) -> Tensor:
            axes = self.backend.shape(stack)[:2]
            where = selection.behind(axes) if selection.basic else selection.stacked(axes)
            taken = self.backend.take(self.backend.reshape(stack, where.of), where)
            return self.backend.reshape(taken, (*axes, selection.size))

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
        return joined if self.batch == 1 and axes[:2] == (1, 0) else backend.transpose(joined, axes)


def _count(selection: Selection) -> int:
    return selection.size if selection.unique else len(_distinct(selection)[0])


def _distinct(selection: Selection) -> tuple[np.ndarray, np.ndarray | None]:
    """The positions to sweep from, each once, and where each named element is among them."""
    flat = selection.flat().reshape(-1)
    return (flat, None) if selection.unique else np.unique(flat, return_inverse=True)
