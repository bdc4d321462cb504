"""The plan of a read: from numbers of rows, columns and bytes to sweeps, their direction and how many run at once.

`BlockLayout` cuts a whole Jacobian into blocks of rows or columns, which are boxes in an array of its shape. All of
this is arithmetic: nothing here runs a sweep. Behind it are the budget of memory that a plan has to fit, and the bar
that shows the progress of long work.
"""

import math
import os
import re
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from elementgrad._cleanup import assign, scope
from elementgrad._html import grid, never_raise
from elementgrad._names.arguments import option_error
from elementgrad._names.pytree import SIMPLE
from elementgrad._sparsity.coloring import Coloring
from elementgrad.errors import OptionError, quoted

Mode = Literal["reverse", "forward"]
Shape = tuple[int, ...]
LIVE_DERIVATIVES = 3
"""About how many of the largest intermediate derivatives are alive at once: one read, one written, one elsewhere."""


@dataclass(frozen=True)
class Task:
    """A read in numbers alone.

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
    """The plan of a read. It prints itself: what is asked, what the whole Jacobian would cost, what this costs.

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

    __module__ = "elementgrad"

    task: Task
    mode: Mode
    sweeps: int
    chunk: int
    """The number of sweeps that run at once."""
    bytes: int
    """About the memory that one chunk of sweeps takes, the result aside."""
    budget: int | None
    """The bytes that a chunk may take; None for a single sweep, which needs none."""
    notes: tuple[str, ...] = ()
    colouring: Coloring | None = None
    """The rows and columns that share a sweep, where a pattern is known and that takes fewer sweeps."""
    cone: str | None = None
    """The part of the function that runs, where it was recorded for cones."""

    @property
    def chunks(self) -> int:
        """The number of chunks."""
        return -(-self.sweeps // self.chunk)

    @property
    def naive(self) -> int:
        """The sweeps of a whole Jacobian by reverse mode, from which one would then pick."""
        return self.task.of_size * self.task.batch

    @property
    def lines(self) -> tuple[tuple[str, str], ...]:
        """The lines that it prints, as pairs of a word and a text."""
        task = self.task
        whole = task.of_size * task.wrt_size * task.batch**2 * task.itemsize
        rows, columns = pluralize(task.rows, "row"), pluralize(task.columns, "column")
        result = format_bytes(task.numbers * task.itemsize)
        return (
            ("asked", f"{rows}, {columns}: {pluralize(task.numbers, 'number')}, {result}"),
            ("naive", f"{pluralize(self.naive, 'reverse sweep')} for the whole Jacobian, {format_bytes(whole)}"),
            *self._color_lines(),
            ("planned", self._sweep_text() + self._chunk_text()),
            *([] if self.cone is None else [("cone", self.cone)]),
            ("speed-up", f"{_format_ratio(self.naive / max(1, self.sweeps))} fewer sweeps"),
            *(("note", note) for note in self.notes),
        )

    def __str__(self) -> str:
        return "\n".join(f"{name:<10} {text}" for name, text in self.lines)

    __repr__ = __str__

    @never_raise
    def _repr_html_(self) -> str:
        return grid(self.lines, heads=False)

    def _sweep_text(self) -> str:
        return pluralize(self.sweeps, f"{self.mode} sweep") if self.colouring is None else self.colouring.text

    def _color_lines(self) -> list[tuple[str, str]]:
        if self.colouring is None:
            return []
        rows, columns = pluralize(self.task.rows, "row"), pluralize(self.task.columns, "column")
        dense = ", which is dense" if 0 < min(self.task.rows, self.task.columns) <= self.sweeps else ""
        return [("coloured", f"{pluralize(self.sweeps, 'colour')} against {rows} and {columns}{dense}")]

    def _chunk_text(self) -> str:
        if self.budget is None:
            return ""
        grows = f"about {format_bytes(self.bytes)} of a budget of {format_bytes(self.budget)}"
        each = f"{self.chunks} chunks of {self.chunk}" if self.chunks > 1 else "one chunk"
        return f" in {each}, {grows}"


def choose_direction(task: Task, missing_rules: Mapping[str, str]) -> Mode:
    """Return the direction with fewer sweeps, reverse ones for rows or forward ones for columns, if it has a rule."""
    mode: Mode = "forward" if task.columns < task.rows else "reverse"
    other: Mode = "reverse" if mode == "forward" else "forward"
    return other if mode in missing_rules and other not in missing_rules else mode


def fit_to_budget(
    task: Task, mode: Mode, peak: int = 0, budget: int | None = None, notes: tuple[str, ...] = (), looped: bool = False
) -> Plan:
    """Fit the sweeps of a direction into a budget, in chunks of about equal size.

    `peak` is the size of the largest intermediate derivative of a sweep, in bytes. With `looped` they run one by one.
    """
    sweeps = task.columns if mode == "forward" else task.rows
    if sweeps <= 1 or budget is None:
        return Plan(task, mode, sweeps, max(1, sweeps), 0, None, notes)
    ends = (task.of_size + task.wrt_size) * task.batch * task.itemsize
    each = ends + LIVE_DERIVATIVES * peak
    limit = 1 if looped else max(1, min(sweeps, budget // each))
    chunk = -(-sweeps // -(-sweeps // limit))
    if each > budget:
        notes = (*notes, f"one sweep takes about {format_bytes(each)}, more than the budget")
    return Plan(task, mode, sweeps, chunk, chunk * each, budget, notes)


def _format_ratio(ratio: float) -> str:
    return f"{ratio:.0f}x" if ratio >= 100 else f"{ratio:.3g}x"


def pluralize(count: int, noun: str) -> str:
    """Return a count with its noun, as in `3 rows`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


@dataclass(frozen=True)
class Block:
    """Some rows of a Jacobian with all columns, or the other way round; `J.blocks()` gives them.

    `rows` and `columns` are slices into the output and the input, both flattened, so that a block is a part of the
    Jacobian as a matrix: `matrix[block.rows, block.columns]` is `block.values`. With `batch=True` there is such a
    matrix for each example, and `matrices[:, block.rows, block.columns]` is `block.values`.

    >>> import torch, elementgrad as eg
    >>> J = eg.jacobian(lambda x: x[:3] ** 2, torch.arange(4.0))
    >>> next(iter(J.blocks()))
    Block(rows=slice(0, 1, None), columns=slice(0, 4, None), values=array([[0., 0., 0., 0.]], dtype=float32))
    """

    __module__ = "elementgrad"

    rows: slice
    columns: slice
    values: np.ndarray


@dataclass(frozen=True)
class BlockLayout:
    """The positions of all blocks. Each is one piece of the flattened side that is cut, and a box of it as well."""

    examples: Shape
    of: Shape
    wrt: Shape
    mode: Mode
    box: Shape
    """The sizes of a block along the axes of the side that is cut; the last along an axis may be smaller."""

    @classmethod
    def cut(cls, examples: Shape, of: Shape, wrt: Shape, mode: Mode, limit: int) -> "BlockLayout":
        """Return blocks of at most `limit` rows, for reverse sweeps, or columns.

        >>> from elementgrad._read.plan import BlockLayout
        >>> [BlockLayout.cut((), (4, 10), (7,), "reverse", limit).box for limit in (25, 6)]
        [(2, 10), (1, 5)]
        """
        box: list[int] = []
        for size in reversed(of if mode == "reverse" else wrt):
            size = max(1, size)
            fits = min(size, limit)
            box.append(-(-size // -(-size // fits)))  # of about equal size
            limit = max(1, limit // size) if fits == size else 1
        return cls(examples, of, wrt, mode, tuple(reversed(box)))

    @property
    def side(self) -> Shape:
        """The shape of the side that is cut."""
        return self.of if self.mode == "reverse" else self.wrt

    @property
    def shape(self) -> Shape:
        """The shape of the whole."""
        return (*self.examples, *self.of, *self.wrt)

    @property
    def chunks(self) -> Shape:
        """The shape of a block in an array of the whole's shape."""
        sides = (*self.box, *self.wrt) if self.mode == "reverse" else (*self.of, *self.box)
        return tuple([max(1, size) for size in (*self.examples, *sides)])

    @property
    def grid(self) -> Shape:
        """The number of blocks along each axis of the whole."""
        return tuple([-(-size // chunk) for size, chunk in zip(self.shape, self.chunks, strict=True)])

    def __len__(self) -> int:
        return math.prod(self.grid)

    @property
    def largest(self) -> int:
        """The number of rows or columns of the largest block."""
        return math.prod(self.box)

    @property
    def numbers(self) -> int:
        """The size of the largest block."""
        return math.prod(self.chunks)

    def coordinates(self, index: int) -> Shape:
        """Return the place of a block in the grid."""
        return tuple(map(int, np.unravel_index(index, self.grid))) if self.grid else ()

    def region(self, index: int) -> tuple[slice, ...]:
        """Return the box of a block in an array of the whole's shape."""
        boxes = zip(self.coordinates(index), self.chunks, self.shape, strict=True)
        return tuple([slice(at * chunk, min((at + 1) * chunk, size)) for at, chunk, size in boxes])

    def sizes(self, index: int) -> Shape:
        """Return the shape of that box."""
        return tuple([piece.stop - piece.start for piece in self.region(index)])

    def bounds(self, index: int) -> tuple[slice, slice]:
        """Return the rows and columns of a block."""
        first = len(self.examples) + (0 if self.mode == "reverse" else len(self.of))
        box = self.region(index)[first : first + len(self.side)]
        start = 0
        for size, piece in zip(self.side, box, strict=True):
            start = start * size + piece.start
        cut = slice(start, start + math.prod([piece.stop - piece.start for piece in box]))
        if self.mode == "reverse":
            return cut, slice(0, math.prod(self.wrt))
        return slice(0, math.prod(self.of)), cut


# Memory and patience

UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
BUDGET_DIVISOR = 8
"""By default sweeps take at most one part in this many of the free memory."""
BUDGET_HINT = 'give bytes as an int, or a text such as "200MB" or "1.5 GiB"'
PROGRESS_DELAY = 2.0
"""Seconds before a progress bar is shown."""
_AMOUNT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?i?B)\s*", re.IGNORECASE)
_local = threading.local()


def parse_budget(budget: int | str | None) -> int | None:
    """Return a budget in bytes; None stands for a part of the free memory."""
    if budget is None:
        return None
    if isinstance(budget, str):
        match = _AMOUNT.fullmatch(budget)
        if match is None or match[2].upper() not in UNITS:
            raise OptionError(f"budget {quoted(budget)} is not an amount of memory; {BUDGET_HINT}")
        budget = int(float(match[1]) * UNITS[match[2].upper()])
    if not isinstance(budget, int) and type(budget) not in SIMPLE:
        raise option_error("budget", budget, f"is not an amount of memory; {BUDGET_HINT}")
    if isinstance(budget, bool) or not isinstance(budget, int) or budget <= 0:
        raise OptionError(f"budget {quoted(budget)} is not an amount of memory; {BUDGET_HINT}")
    return budget


def default_budget(free: int | None) -> int:
    """Return a part of what is free: on the device where that is known, on this machine otherwise."""
    return max(1, (free if free is not None else _free_memory_in(int(time.monotonic()))) // BUDGET_DIVISOR)


@lru_cache(maxsize=1)
def _free_memory_in(second: int) -> int:
    # Looked up once in a second of the clock, since that takes as long as a small sweep.
    return free_memory()


def free_memory() -> int:
    """Return the bytes of memory that are free on this machine, as far as it says."""
    try:
        with open("/proc/meminfo", "rb", buffering=0) as file:
            head = file.read(256)  # the number is in one of the first lines, and every read of a block needs it
        return int(head.partition(b"MemAvailable:")[2].split()[0]) * 1024
    except (OSError, IndexError, ValueError):
        try:
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
        except (AttributeError, OSError, ValueError):
            return 4 * 10**9


def format_bytes(count: float) -> str:
    """Return bytes for a person to read: three digits and a unit."""
    for unit in ("B", "KB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.0f} B" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


class Progress:
    """A counter that shows a bar once the work has taken a while: on a terminal, with rich installed."""

    def __init__(self, total: int, title: str):
        self._total = total
        self._title = title
        self._start = time.monotonic()
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> "Progress":
        return self

    def advance_to(self, count: int) -> None:
        """Set how many of the total are done."""
        if self._bar is not None:
            self._bar.update(self._task, completed=count)
        elif count < self._total and time.monotonic() - self._start > PROGRESS_DELAY:
            self._bar = _make_bar()
            if self._bar is not None:
                self._bar.start()
                self._task = self._bar.add_task(self._title, total=self._total, completed=count)

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()


@contextmanager
def no_progress() -> Iterator[None]:
    """Show no bar in this block, which is a part of work that is counted as a whole, here or in another process."""
    with scope():
        assign(_local, "silent", True)
        yield


def _make_bar() -> Any:
    if getattr(_local, "silent", False) or not sys.stderr.isatty():
        return None
    try:
        from rich import progress
        from rich.console import Console
    except ImportError:
        return None
    return progress.Progress(console=Console(stderr=True), transient=True)
