"""The plan: from numbers of rows, columns and bytes to sweeps, their direction and how many run at once."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from elementgrad.plan import budget as bytes_of
from elementgrad.sparsity.colouring import Colouring

Mode = Literal["reverse", "forward"]
AT_ONCE = 3
"""Of the derivatives on the way about so many of the largest are held together: one read, one made, one on a detour."""


@dataclass(frozen=True)
class Task:
    """What is asked for, in numbers alone.

    `rows` and `columns` are distinct; `numbers` is how many come back. With a batch, rows, columns and sizes are
    those of one example.
    """

    rows: int
    columns: int
    of_size: int
    wrt_size: int
    numbers: int
    itemsize: int
    batch: int = 1


@dataclass(frozen=True)
class Plan:
    """What a read will do. It prints itself: what is asked, what the whole Jacobian would cost, what this costs.

    >>> import torch, elementgrad as eg
    >>> J = eg.jacobian(torch.tanh, torch.ones(1000, dtype=torch.float64))
    >>> plan = J.plan(slice(0, 40), 7)
    >>> plan.mode, plan.sweeps
    ('forward', 1)
    >>> print(plan)
    asked      40 rows, 1 column: 40 numbers, 320 B
    naive      1000 reverse sweeps for the whole Jacobian, 8 MB
    planned    1 forward sweep
    speed-up   1000x fewer sweeps
    """

    task: Task
    mode: Mode
    sweeps: int
    chunk: int
    """How many sweeps run at once."""
    bytes: int
    """About how much memory grows with the sweeps of one chunk, the result aside."""
    budget: int | None
    """The bytes that it may grow by; None for a single sweep, which needs none."""
    notes: tuple[str, ...] = ()
    colouring: Colouring | None = None
    """How rows and columns go together in sweeps, where a pattern is known and that is fewer."""

    @property
    def chunks(self) -> int:
        """How many times a chunk of sweeps runs."""
        return -(-self.sweeps // self.chunk)

    @property
    def naive(self) -> int:
        """The sweeps of a whole Jacobian by reverse mode, of which one would then pick."""
        return self.task.of_size * self.task.batch

    def __str__(self) -> str:
        task = self.task
        whole = task.of_size * task.wrt_size * task.batch**2 * task.itemsize
        rows, columns = _count(task.rows, "row"), _count(task.columns, "column")
        result = bytes_of.to_text(task.numbers * task.itemsize)
        lines = [
            ("asked", f"{rows}, {columns}: {_count(task.numbers, 'number')}, {result}"),
            ("naive", f"{_count(self.naive, 'reverse sweep')} for the whole Jacobian, {bytes_of.to_text(whole)}"),
            *self._colours(),
            ("planned", self._sweeps() + self._chunks()),
            ("speed-up", f"{_times(self.naive / max(1, self.sweeps))} fewer sweeps"),
            *(("note", note) for note in self.notes),
        ]
        return "\n".join(f"{name:<10} {text}" for name, text in lines)

    __repr__ = __str__

    def _sweeps(self) -> str:
        return _count(self.sweeps, f"{self.mode} sweep") if self.colouring is None else self.colouring.text

    def _colours(self) -> list[tuple[str, str]]:
        if self.colouring is None:
            return []
        rows, columns = _count(self.task.rows, "row"), _count(self.task.columns, "column")
        dense = ", which is dense" if 0 < min(self.task.rows, self.task.columns) <= self.sweeps else ""
        return [("coloured", f"{_count(self.sweeps, 'colour')} against {rows} and {columns}{dense}")]

    def _chunks(self) -> str:
        if self.budget is None:
            return ""
        grows = f"about {bytes_of.to_text(self.bytes)} of a budget of {bytes_of.to_text(self.budget)}"
        each = f"{self.chunks} chunks of {self.chunk}" if self.chunks > 1 else "one chunk"
        return f" in {each}, {grows}"


def direction(task: Task, without: Mapping[str, str]) -> Mode:
    """Rows are reverse sweeps and columns forward ones; whichever is fewer, unless this function cannot have it."""
    mode: Mode = "forward" if task.columns < task.rows else "reverse"
    other: Mode = "reverse" if mode == "forward" else "forward"
    return other if mode in without and other not in without else mode


def fit(
    task: Task, mode: Mode, work: int = 0, budget: int | None = None, notes: tuple[str, ...] = (), looped: bool = False
) -> Plan:
    """Fit the sweeps of a direction into a budget, in chunks of about equal size.

    `work` is the largest derivative that a sweep makes on its way, in bytes.
    """
    sweeps = task.columns if mode == "forward" else task.rows
    if sweeps <= 1 or budget is None:
        return Plan(task, mode, sweeps, max(1, sweeps), 0, None, notes)
    ends = (task.of_size + task.wrt_size) * task.batch * task.itemsize
    each = ends + AT_ONCE * work
    most = 1 if looped else max(1, min(sweeps, budget // each))
    chunk = -(-sweeps // -(-sweeps // most))
    if each > budget:
        notes = (*notes, f"one sweep takes about {bytes_of.to_text(each)}, more than the budget")
    return Plan(task, mode, sweeps, chunk, chunk * each, budget, notes)


def _times(ratio: float) -> str:
    return f"{ratio:.0f}x" if ratio >= 100 else f"{ratio:.3g}x"


def _count(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
