"""`SweepRunner`: reads blocks, single entries and products of a derivative by running sweeps, on every framework alike.

A read is planned first (`plan`), then run in chunks that fit the budget. The runner remembers what reads find out:
sweeps that cannot run as a batch, which then run one by one; a direction without a rule, which the other one replaces;
inputs whose examples are known not to mix. Every forward sweep is compared with reverse ones before its numbers are
returned.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from typing import Any

import numpy as np

from elementgrad._backends.autodiff import (
    PRECISION,
    Linearization,
    NotBatchableError,
    Projection,
    TangentCheck,
    UnsupportedError,
)
from elementgrad._backends.base import Backend
from elementgrad._place.selection import Selection
from elementgrad._read.plan import (
    Mode,
    Plan,
    Progress,
    Task,
    choose_direction,
    default_budget,
    fit_to_budget,
    format_bytes,
    free_memory,
)
from elementgrad.errors import BatchError, FrameworkError, SizeError

Tensor = Any
Pick = Callable[[Tensor, int, int], Tensor]
"""From a batch of sweeps, (k, examples, elements), and its start and stop among all to the part that is kept."""
LARGEST_ITEMSIZE = 16
"""No number takes more bytes."""
UNCHECKED_BYTES = 10**8
"""Results of up to this many bytes are not compared with the free memory."""


@dataclass
class SweepRunner:
    """Sweeps between one output and one or several inputs. A derivative without a path is None.

    A tensor counts as `batch` examples of `of_size` or `wrt_sizes` elements; without a batch there is one example. What
    reads learn is in the last four fields. Threads may share a runner: an entry is only ever added, and always true.
    """

    backend: Backend
    linear: Linearization
    output: int
    inputs: Sequence[int]
    of_size: int = 0
    wrt_sizes: Sequence[int] = ()
    batch: int = 1
    budget: int | None = None
    missing_rules: dict[str, str] = field(default_factory=dict)
    """The directions that cannot be used, and why."""
    unbatchable: dict[str, str] = field(default_factory=dict)
    """The directions whose sweeps run one after another, and why."""
    unmixed_inputs: set[tuple[int, ...]] = field(default_factory=set)
    """Inputs whose examples are known not to mix."""
    transposes: bool = True
    """False once reverse sweeps turned out not to be transposed to forward ones."""

    def __post_init__(self) -> None:
        self.missing_rules.update(self.linear.missing_rules)

    def at(self, linear: Linearization) -> "SweepRunner":
        """Return the same reads of the function at another point."""
        return self.with_inputs(self.inputs, self.wrt_sizes, linear)

    def with_inputs(
        self, inputs: Sequence[int], wrt_sizes: Sequence[int], linear: Linearization | None = None
    ) -> "SweepRunner":
        """Return the same reads by other inputs, which learn together with these."""
        return SweepRunner(
            self.backend,
            self.linear if linear is None else linear,
            self.output,
            inputs,
            self.of_size,
            wrt_sizes,
            self.batch,
            self.budget,
            self.missing_rules,
            self.unbatchable,
            self.unmixed_inputs,
            self.transposes,
        )

    # Plans

    def plan(self, rows: int, columns: Sequence[int], numbers: int, mode: Mode | None = None) -> Plan:
        """Plan a read of distinct rows, and columns of each input, in the cheaper direction unless `mode` is given."""
        linear = self.linear
        x = linear.inputs[self.inputs[0]]
        of_size, wrt_size = self.of_size, sum(self.wrt_sizes)
        task = Task(rows, sum(columns), of_size, wrt_size, numbers, self.backend.itemsize(x), self.batch)
        mode = mode or choose_direction(task, self.missing_rules)
        notes = [f"no {other} sweeps: {why}" for other, why in self.missing_rules.items()]
        notes += [f"one sweep after another: {self.unbatchable[mode]}"] if mode in self.unbatchable else []
        sweeps = task.columns if mode == "forward" else rows
        if sweeps <= 1:
            return fit_to_budget(task, mode, notes=tuple(notes))
        if mode == "forward":
            peak = max(map(linear.peak_bytes, repeat(True), self.inputs, repeat([self.output]), columns))
        else:
            peak = linear.peak_bytes(False, self.output, self.inputs, sweeps)
        budget = self.budget or default_budget(self.backend.load("read").free_memory(x))
        return fit_to_budget(task, mode, peak, budget, tuple(notes), mode in self.unbatchable)

    def plan_block(self, rows: Selection, columns: Sequence[Selection]) -> Plan:
        """Plan a read of some elements with respect to some of each input."""
        numbers = self.batch * rows.size * sum(selection.size for selection in columns)
        return self.plan(_count_distinct(rows), [_count_distinct(selection) for selection in columns], numbers)

    # Reads

    def read_block(self, rows: Selection, columns: Sequence[Selection]) -> list[Tensor | None]:
        """Return the derivatives of all `rows` with respect to all `columns`, as (batch, rows, columns) per input."""
        numbers = self.batch * rows.size * sum([selection.size for selection in columns])
        if not numbers:
            return [self.zeros((self.batch, rows.size, selection.size)) for selection in columns]
        if self.linear.reads_blocks and self.batch == 1:
            blocks = self.linear.read_block(self.output, rows, self.inputs, columns)
            if blocks is not None:
                return [
                    None if block is None else self._reshape(block, (1, *self.backend.shape(block))) for block in blocks
                ]
        # The everyday read: one element and no batch leave nothing to plan.
        if rows.size == self.batch == 1 and "reverse" not in self.missing_rules:
            if numbers * LARGEST_ITEMSIZE > UNCHECKED_BYTES:
                self.check_room(numbers)
            try:
                return self._read_row(rows, columns)
            except UnsupportedError as error:
                self.missing_rules["reverse"] = str(error)
        return self._run_planned(lambda: self.plan_block(rows, columns), partial(self._read_block, rows, columns))

    def read_part(self, plan: Plan, rows: Selection, columns: Selection) -> Tensor | None:
        """Return a block by the plan of a larger one, in its direction unless that turns out to have no rule."""
        if self.batch * rows.size * columns.size:
            self.check_examples_do_not_mix()
            try:
                return self._read_block(rows, [columns], plan)[0]
            except UnsupportedError as error:
                self.missing_rules[plan.mode] = str(error)
        return self.read_block(rows, [columns])[0]

    def read_pairs(self, outs: np.ndarray, ins: np.ndarray) -> Tensor | None:
        """Return the derivative of one element with respect to one, for each pair of positions, as (batch, pairs)."""
        if not self.batch * len(outs):
            return self.zeros((self.batch, 0))

        def read(plan: Plan) -> Tensor | None:
            sources, targets = (outs, ins) if plan.mode == "reverse" else (ins, outs)
            positions, sweep_of_pair = np.unique(sources, return_inverse=True)
            order = np.argsort(sweep_of_pair, kind="stable")
            sweeps = sweep_of_pair[order]

            def pick(stack: Tensor, start: int, stop: int) -> Tensor:
                pairs = slice(*np.searchsorted(sweeps, [start, stop]))
                of = self.backend.shape(stack)
                parts = (sweeps[pairs] - start, range(of[1]), targets[order[pairs]])
                return self.backend.take(stack, Selection(of, parts, block=0, broadcast=(len(parts[0]),)))

            if plan.mode == "reverse":
                narrow = self._narrow([Selection.at_flat(ins, (self.wrt_sizes[0],))]) if self.linear.narrows else None
                runner, of_pair = (self, targets) if narrow is None else (narrow[0], narrow[1][0].flat().reshape(-1))
                targets = of_pair
                (parts,) = runner._sweep_rows(plan, positions, [pick])
            else:
                parts = self._sweep_columns(plan, self.inputs[0], positions, pick)
            inverse = np.empty_like(order)
            inverse[order] = np.arange(len(order))
            return self._join(parts, inverse, (1, 0))

        counts = len(np.unique(outs)), [len(np.unique(ins))]
        return self._run_planned(lambda: self.plan(*counts, self.batch * len(outs)), read)

    def product(self, factors: Tensor, forward: bool) -> Tensor | None:
        """Return `J @ v` or `u @ J` for a stack of factors; from the whole where that direction has no rule."""
        linear, backend, (number,) = self.linear, self.backend, self.inputs
        count, (wrt_size,) = backend.shape(factors)[0], self.wrt_sizes
        direct: Mode = "forward" if forward else "reverse"
        source, target = (wrt_size, self.of_size) if forward else (self.of_size, wrt_size)
        like = linear.outputs[self.output] if forward else linear.inputs[number]
        if not count * self.batch * source * target:  # a sum of nothing
            return backend.zeros((count, *backend.shape(like)), like)

        def plan() -> Plan:
            numbers = count * self.batch * target
            if direct in self.missing_rules:
                return self.plan(self.of_size, self.wrt_sizes, numbers)
            return self.plan(count, [count], numbers, direct)

        def contract(stack: Tensor, start: int, stop: int) -> Tensor:
            matrices = backend.load("read").transpose(backend.reshape(factors, (count, self.batch, source)), (1, 2, 0))
            return backend.load("read").transpose(
                backend.load("read").matmul(backend.load("read").transpose(stack, (1, 0, 2)), matrices), (1, 0, 2)
            )

        def read(plan: Plan) -> Tensor | None:
            if plan.mode == direct:
                return self.run(direct, factors, plan.chunk)[0]
            if forward:
                (parts,) = self._sweep_rows(plan, np.arange(target), [contract])
            else:
                parts = self._sweep_columns(plan, number, np.arange(target), contract)
            joined = self._join(parts, None, (2, 1, 0))
            return None if joined is None else backend.reshape(joined, (count, *backend.shape(like)))

        return self._run_planned(plan, read)

    def probe(self, mode: Mode, positions: np.ndarray) -> Tensor | None:
        """Run two sweeps from generic seeds for some elements: they show if there is a path and a rule."""
        like = self.linear.outputs[self.output] if mode == "reverse" else self.linear.inputs[self.inputs[0]]
        weights = np.zeros((2, self.batch, self.of_size if mode == "reverse" else self.wrt_sizes[0]))
        random = np.random.default_rng(0)
        shape = (2, self.batch, len(positions))
        weights[..., positions] = random.uniform(0.5, 1.5, shape) * random.choice([-1, 1], shape)
        return self.run(mode, self.backend.cast(weights.reshape(2, *self.backend.shape(like)), like), 2)[0]

    def zeros(self, shape: tuple[int, ...]) -> Tensor:
        """Return zeros of the dtype of a derivative."""
        return self.backend.zeros(shape, self.linear.inputs[self.inputs[0]])

    def check_room(self, numbers: int) -> None:
        """Raise `SizeError` for a result that exceeds the free memory: the system would just end the process."""
        x = self.linear.inputs[self.inputs[0]]
        size = numbers * self.backend.itemsize(x)
        if size > UNCHECKED_BYTES:
            free = self.backend.load("read").free_memory(x) or free_memory()
            if size > free:
                raise SizeError(
                    f"the result would take {format_bytes(size)}, and {format_bytes(free)} are free; read some "
                    "of its rows or columns at a time"
                )

    def check_examples_do_not_mix(self) -> None:
        """Raise `BatchError` if the examples of a batch mix; done once for each set of inputs."""
        inputs = tuple(self.inputs)
        if self.batch <= 1 or inputs in self.unmixed_inputs:
            return
        # Any two examples differ in a bit of their index, so that seeds that go by bits tell all of them apart.
        for bit in range((self.batch - 1).bit_length()):
            seeded = (np.arange(self.batch) >> bit & 1) == np.array([[0], [1]])
            for derivative in self._seed_examples(seeded):
                values = None if derivative is None else self.backend.read(derivative)
                if values is None:  # no path, or a traced program without numbers
                    continue
                values = np.abs(values).reshape(2, self.batch, -1)
                leaked = (values > 0) & np.isfinite(values) & ~seeded[..., None]
                if leaked.any():
                    raise BatchError(
                        f"the examples mix: example {leaked.any((0, 2)).argmax()} and another depend on each other, so "
                        "there is no Jacobian per example; leave batch=True out"
                    )
        self.unmixed_inputs.add(inputs)

    # Sweeps

    def run(self, mode: Mode, seeds: Tensor, chunk: int) -> list[Tensor | None]:
        """Sweep from a batch of seeds, for the output or for the first input, in chunks."""
        count = self.backend.shape(seeds)[0]
        return self.run_lazily(mode, lambda start, stop: seeds[start:stop], count, chunk)

    def run_lazily(
        self, mode: Mode, make_seeds: Callable[[int, int], Tensor], count: int, chunk: int
    ) -> list[Tensor | None]:
        """Sweep from `count` seeds, of which each chunk is made when it is needed."""
        sweep = self.vjp if mode == "reverse" else partial(self.jvp, self.inputs[0])
        chunks: list[list[Tensor | None]] = []

        def keep(derivatives: list[Tensor | None], start: int, stop: int) -> None:
            chunks.append(derivatives)

        self._run_chunks(mode, lambda start, stop: sweep(make_seeds(start, stop)), count, chunk, keep)
        if len(chunks) == 1:
            return chunks[0]
        return [None if parts[0] is None else self.backend.concat(parts) for parts in zip(*chunks, strict=True)]

    def vjp(self, seeds: Tensor) -> list[Tensor | None]:
        """Run one batch of reverse sweeps to all inputs."""
        return self.linear.vjp(self.output, self.inputs, seeds)

    def jvp(self, number: int, seeds: Tensor, positions: np.ndarray | None = None) -> list[Tensor | None]:
        """Run one batch of forward sweeps from an input, and check them; `positions` has the ones of one-hot seeds.

        They are transposed reverse sweeps, where the framework can and these turn out to be linear.
        """
        linear = self.linear
        project = partial(self._project, seeds, positions)
        if self.transposes and not linear.jvp_transposes_vjp:
            try:
                tangents, checked = linear.transpose_vjp(number, self.output, seeds, project)
                if tangents is None or checked or self._check_jvp_against_vjp(number, tangents, project):
                    return [tangents]
            except UnsupportedError:
                pass
            self.transposes = False
        (tangents,) = linear.jvp(number, [self.output], seeds)
        if tangents is None or linear.jvp_transposes_vjp:
            return [tangents]
        try:
            return [tangents if self._check_jvp_against_vjp(number, tangents, project) else None]
        except UnsupportedError as error:
            if self.backend.shape(seeds)[0] == 1:
                raise
            raise NotBatchableError(str(error)) from error  # one by one they may be right

    def _run_chunks(
        self,
        mode: Mode,
        sweep: Callable[[int, int], list[Tensor | None]],
        count: int,
        chunk: int,
        keep: Callable[[list[Tensor | None], int, int], None],
    ) -> None:
        """Run `count` sweeps in chunks; fall back to one at a time after `NotBatchableError`."""
        with Progress(count, f"{count} {mode} sweeps") as progress:
            start = 0
            while start < count:
                stop = min(start + (1 if mode in self.unbatchable else chunk), count)
                try:
                    derivatives = sweep(start, stop)
                except NotBatchableError as error:
                    self.unbatchable[mode] = str(error)
                    continue
                keep(derivatives, start, stop)
                start = stop
                progress.advance_to(start)

    @np.errstate(all="ignore")  # what overflows in half precision fails the comparison
    def _check_jvp_against_vjp(self, number: int, tangents: Tensor, project: Projection) -> bool:
        """Return True if there is a path; raise `UnsupportedError` if the tangents are not those of reverse sweeps.

        A traced program has no numbers to compare.
        """
        backend, y = self.backend, self.linear.outputs[self.output]
        forward = self._to_numpy(tangents)
        if forward is None:
            return True
        check = TangentCheck(forward, max(PRECISION[backend.itemsize(end)] for end in (y, self.linear.inputs[number])))
        seed = backend.cast(check.seed.reshape(1, *backend.shape(y)), y)
        check.expect(np.asarray(self._to_numpy(seed)))
        for sign, cotangent in ((1, seed), (-1, -seed)):
            try:
                (gradient,) = self.linear.vjp(self.output, [number], cotangent)
            except UnsupportedError:  # forward sweeps are all there is
                return True
            if gradient is None:
                return False
            check.compare(sign, project(np.asarray(self._to_numpy(gradient))))
        return True

    def _project(self, seeds: Tensor, positions: np.ndarray | None, derivative: np.ndarray) -> np.ndarray:
        """Return the products of a derivative with seeds; `positions` has the ones of one-hot seeds."""
        if positions is not None:
            return np.asarray(derivative.reshape(self.batch, -1)[:, positions].sum(0))
        values = np.asarray(self._to_numpy(seeds))
        return np.asarray((values.reshape(len(values), -1) * derivative.reshape(-1)).sum(-1))

    def _to_numpy(self, x: Tensor) -> np.ndarray | None:
        # Numbers of four bytes are enough to compare with, and need not be copied; fewer are widened.
        return self.backend.read(x) if self.backend.itemsize(x) >= 4 else self.backend.to_float64(x)

    def _seed_examples(self, examples: np.ndarray) -> list[Tensor | None]:
        """Return derivatives from seeds for some examples, by whichever direction there is."""
        linear, backend = self.linear, self.backend

        def make_seeds(like: Tensor) -> Tensor:
            shape = tuple(backend.shape(like))
            weights = np.random.default_rng(0).uniform(0.5, 1.5, shape)  # such that nothing cancels
            return backend.cast(examples.reshape(2, -1, *(1 for _ in shape[1:])) * weights, like)

        try:
            return self.run("reverse", make_seeds(linear.outputs[self.output]), 2)
        except UnsupportedError:
            return [
                self.with_inputs([number], self.wrt_sizes).run("forward", make_seeds(linear.inputs[number]), 2)[0]
                for number in self.inputs
            ]

    # Blocks

    def _run_planned(self, plan: Callable[[], Plan], read: Callable[[Plan], Any]) -> Any:
        """Read by the plan; where its direction turns out to have no rule, by the other."""
        self.check_examples_do_not_mix()
        while True:
            chosen = plan()
            self.check_room(chosen.task.numbers)
            try:
                return read(chosen)
            except UnsupportedError as error:
                self.note_missing_rule(chosen.mode, error)

    def note_missing_rule(self, mode: Mode, error: UnsupportedError) -> None:
        """Remember that a direction has no rule; raise `FrameworkError` if the other one has none either."""
        if self.missing_rules.keys() - {mode}:  # another thread may have noted this one meanwhile
            raise FrameworkError(f"{self.backend.name} can differentiate this in no direction: {error}") from error
        self.missing_rules[mode] = str(error)

    def _narrow(self, columns: Sequence[Selection]) -> tuple["SweepRunner", Sequence[Selection]] | None:
        """Return the same reverse reads from inputs that are the selected elements alone, where these are shorter."""
        if self.batch > 1:
            return None
        parts = [
            (None, None) if selection.size * 2 > math.prod(selection.of) else _distinct(selection)
            for selection in columns
        ]
        linear = self.linear.narrow(self.output, self.inputs, [positions for positions, _ in parts])
        if linear is None:
            return None
        sizes = [math.prod(self.backend.shape(x)) for x in linear.inputs]
        selections = [
            selection
            if positions is None or size != len(positions)
            else Selection.at_flat(np.arange(size) if inverse is None else inverse, (size,))
            for selection, (positions, inverse), size in zip(columns, parts, sizes, strict=True)
        ]
        return self.with_inputs(range(len(sizes)), sizes, linear), selections

    def _read_row(self, rows: Selection, columns: Sequence[Selection]) -> list[Tensor | None]:
        narrow = self._narrow(columns) if self.linear.narrows else None
        if narrow is not None:
            return narrow[0]._read_row(rows, narrow[1])
        linear, backend = self.linear, self.backend
        y, derivatives = linear.outputs[self.output], None
        if not rows.shape and rows.basic and rows.of == tuple(backend.shape(y)):
            derivatives = linear.vjp_of_element(self.output, self.inputs, rows.parts)
        if derivatives is None:
            derivatives = self.vjp(backend.load("read").one_hot_seeds(y, rows.flat().reshape(-1), 1))
        blocks: list[Tensor | None] = []
        for x, selection in zip(derivatives, columns, strict=True):
            x = x if x is None else self._reshape(x, selection.of)
            blocks.append(x if x is None or selection.whole else backend.take(x, selection))
        return blocks

    def _read_block(self, rows: Selection, columns: Sequence[Selection], plan: Plan) -> list[Tensor | None]:
        if plan.mode == "reverse":
            narrow = self._narrow(columns) if self.linear.narrows else None
            if narrow is not None:
                runner, columns = narrow
                sizes = [_count_distinct(selection) for selection in columns]
                return runner._read_block(
                    rows, columns, runner.plan(_count_distinct(rows), sizes, plan.task.numbers, "reverse")
                )
            positions, inverse = _distinct(rows)
            parts = self._sweep_rows(plan, positions, [self._make_pick(selection) for selection in columns])
            return [self._join(each, inverse, (1, 0, 2)) for each in parts]
        blocks = []
        for number, selection in zip(self.inputs, columns, strict=True):
            if not selection.size:
                blocks.append(self.zeros((self.batch, rows.size, 0)))
                continue
            positions, inverse = _distinct(selection)
            pick = self._make_pick(rows)
            blocks.append(self._join(self._sweep_columns(plan, number, positions, pick), inverse, (1, 2, 0)))
        return blocks

    def _sweep_rows(self, plan: Plan, positions: np.ndarray, picks: Sequence[Pick]) -> list[list[Tensor] | None]:
        picked: list[list[Tensor] | None] = [[] for _ in self.inputs]

        def keep(derivatives: list[Tensor | None], start: int, stop: int) -> None:
            for i, derivative in enumerate(derivatives):
                parts = picked[i]
                if derivative is None or parts is None:
                    picked[i] = None
                else:
                    parts.append(picks[i](self._stack(derivative, self.wrt_sizes[i]), start, stop))

        def sweep(start: int, stop: int) -> list[Tensor | None]:
            return self.vjp(self._one_hot_seeds(self.linear.outputs[self.output], positions[start:stop]))

        self._run_chunks("reverse", sweep, len(positions), plan.chunk, keep)
        return picked

    def _sweep_columns(self, plan: Plan, number: int, positions: np.ndarray, pick: Pick) -> list[Tensor] | None:
        picked: list[Tensor | None] = []

        def keep(derivatives: list[Tensor | None], start: int, stop: int) -> None:
            (derivative,) = derivatives
            picked.append(None if derivative is None else pick(self._stack(derivative, self.of_size), start, stop))

        def sweep(start: int, stop: int) -> list[Tensor | None]:
            part = positions[start:stop]
            return self.jvp(number, self._one_hot_seeds(self.linear.inputs[number], part), part)

        self._run_chunks("forward", sweep, len(positions), plan.chunk, keep)
        return None if picked[0] is None else picked

    def _one_hot_seeds(self, like: Tensor, positions: np.ndarray) -> Tensor:
        return self.backend.load("read").one_hot_seeds(like, positions.copy(), self.batch)

    def _stack(self, derivatives: Tensor, size: int) -> Tensor:
        return self._reshape(derivatives, (self.backend.shape(derivatives)[0], self.batch, size))

    def _reshape(self, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        # A reshape to the same shape takes as long as a small sweep.
        return x if tuple(self.backend.shape(x)) == shape else self.backend.reshape(x, shape)

    def _make_pick(self, selection: Selection) -> Pick:
        """Return a function that keeps the selected elements of every sweep and example."""
        if selection.whole:
            return lambda stack, start, stop: stack

        def pick(stack: Tensor, start: int, stop: int) -> Tensor:
            axes = tuple(self.backend.shape(stack)[:2])
            where = selection.behind(axes) if selection.basic else selection.stacked(axes)
            return self._reshape(self.backend.take(self._reshape(stack, where.of), where), (*axes, selection.size))

        return pick

    def _join(self, parts: list[Tensor] | None, inverse: np.ndarray | None, axes: tuple[int, ...]) -> Tensor | None:
        """Join the parts, repeat and order the sweeps as they were named, and bring the examples to the front."""
        if parts is None:
            return None
        backend = self.backend
        joined = parts[0] if len(parts) == 1 else backend.concat(parts)
        if inverse is not None and not np.array_equal(inverse, np.arange(backend.shape(joined)[0])):
            of = tuple(backend.shape(joined))
            rest = tuple(range(size) for size in of[1:])
            joined = backend.take(joined, Selection(of, (inverse, *rest), block=0, broadcast=inverse.shape))
        return joined if self.batch == 1 and axes[:2] == (1, 0) else backend.load("read").transpose(joined, axes)


def _count_distinct(selection: Selection) -> int:
    return selection.size if selection.unique else len(_distinct(selection)[0])


def _distinct(selection: Selection) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the positions to sweep from, each once, and where each named element is among them."""
    flat = selection.flat().reshape(-1)
    return (flat, None) if selection.unique else np.unique(flat, return_inverse=True)
