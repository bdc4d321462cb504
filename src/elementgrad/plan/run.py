"""Reading derivatives by sweeps: blocks, single entries and products, for every framework alike."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from operator import attrgetter
from typing import Any

import numpy as np

from elementgrad.backends.linear import Linear, UnsupportedError
from elementgrad.errors import FrameworkError, SizeError
from elementgrad.plan import budget as bytes_of
from elementgrad.plan.batch import require_apart
from elementgrad.plan.plan import Mode, Plan, Task, direction, fit
from elementgrad.plan.sweep import Sweeper
from elementgrad.selection import Selection

Tensor = Any
Keep = Callable[[Tensor, int, int], Tensor]
"""From a stack of sweeps, (k, batch, elements), and its place among all: what is kept, sweeps first."""
WIDEST = 16
"""No number takes more bytes."""
ROOM = 10**8
"""Results of up to so many bytes are not held against the memory that is free."""


@dataclass
class Reader(Sweeper):
    """Reads blocks, single entries and products. A derivative without a path comes back as None."""

    def at(self, linear: Linear) -> "Reader":
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
        budget = self.budget or bytes_of.default(self.backend.free(x))
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
        return self.sweep_from(mode, self.pulling() if mode == "reverse" else self.pushing(number), seeds, 2)[0]

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
            swept = self.linear.pull(self.output, self.inputs, self.backend.units(y, rows.flat().reshape(-1), 1))
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
            factors = backend.transpose(backend.reshape(seeds, (count, self.batch, source)), (1, 2, 0))
            return backend.transpose(backend.matmul(backend.transpose(stack, (1, 0, 2)), factors), (1, 0, 2))

        def read(mode: Mode, plan: Plan) -> Tensor | None:
            if mode == direct:
                sweep = self.pushing(number) if forward else self.pulling()
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
            free = self.backend.free(x) or bytes_of.available()
            if size > free:
                raise SizeError(
                    f"the result would take {bytes_of.to_text(size)}, and {bytes_of.to_text(free)} are free; read some "
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
        self.sweep("reverse", self.pulling(), seeds, len(places), plan.chunk, add)
        return kept

    def _forward(self, plan: Plan, number: int, places: np.ndarray, keep: Keep) -> list[Tensor] | None:
        kept: list[Tensor | None] = []

        def add(swept: list[Tensor | None], start: int, stop: int) -> None:
            (derivative,) = swept
            kept.append(None if derivative is None else keep(self._stack(derivative, self.of_size), start, stop))

        seeds = self.units(self.linear.inputs[number], places)
        self.sweep("forward", self.pushing(number), seeds, len(places), plan.chunk, add)
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
        return joined if self.batch == 1 and axes[:2] == (1, 0) else backend.transpose(joined, axes)


_size = attrgetter("size")


def _count(selection: Selection) -> int:
    return selection.size if selection.unique else len(_distinct(selection)[0])


def _distinct(selection: Selection) -> tuple[np.ndarray, np.ndarray | None]:
    """The positions to sweep from, each once, and where each named element is among them."""
    flat = selection.flat().reshape(-1)
    return (flat, None) if selection.unique else np.unique(flat, return_inverse=True)
