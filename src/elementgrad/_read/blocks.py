"""`J.blocks()` and `J.dense(out=...)`: a whole Jacobian, planned once and read block by block."""

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from typing import Any

import numpy as np

from elementgrad._backends.autodiff import UnsupportedError
from elementgrad._cleanup import close_scopes_after
from elementgrad._read import budget
from elementgrad._read.budget import Progress, hushed
from elementgrad._read.jacobian import Jacobian
from elementgrad._read.plan import Block, BlockLayout, Plan
from elementgrad._read.workers import check_executor, results
from elementgrad._read.zarr import Store, check_out, fingerprint, numbers, part
from elementgrad.errors import FrameworkError

BUDGET = 256 * 10**6
"""What sweeps of one block may take where nobody says; the same everywhere, so that a later call cuts alike."""
ENOUGH = 64
"""So many blocks there are at least, if there are as many rows or columns: workers want something to do."""


class Blocks:
    """All blocks of a Jacobian, to be iterated over: each is read when it is its turn, or by workers.

    Made by `J.blocks()`. `len(blocks)` is how many there are, `blocks.plan` what is done: a block is a chunk of it.

    >>> import torch, elementgrad as eg
    >>> blocks = eg.jacobian(torch.sin, torch.zeros(1000)).blocks()
    >>> blocks
    <Blocks of the Jacobian of shape (1000, 1000): 63 blocks of 16 rows, 64 KB each>
    >>> float(sum(block.values.trace() for block in blocks if block.rows.start == 0))
    16.0
    """

    __module__ = "elementgrad"

    def __init__(self, jacobian: Jacobian, executor: Any = None):
        self._jacobian = jacobian
        self._executor: Executor | None = check_executor(executor, jacobian)
        self.plan, self._swept = _planned(jacobian)
        """What is done, by chunks that are the blocks."""
        sides = jacobian._examples, jacobian._of.shape, jacobian._wrt.shape
        self.layout = BlockLayout.cut(*sides, self.plan.mode, self._most())
        """Where the blocks are."""
        scale = self.layout.most / self.plan.chunk
        if not self._looped:
            self.plan = replace(self.plan, chunk=self.layout.most, bytes=math.ceil(self.plan.bytes * scale))

    def __len__(self) -> int:
        return len(self.layout)

    def __iter__(self) -> Iterator[Block]:
        for number, values in self.read(range(len(self.layout))):
            assert values is not None
            yield Block(*self.layout.bounds(number), values)

    def __repr__(self) -> str:
        layout, what = self.layout, "row" if self.layout.mode == "reverse" else "column"
        each = f"{layout.most} {what}" if layout.most == 1 else f"{layout.most} {what}s"
        size = budget.to_text(layout.numbers * self._dtype.itemsize)
        return f"<Blocks of the Jacobian of shape {layout.shape}: {len(layout)} blocks of {each}, {size} each>"

    def read(self, which: Sequence[int], store: Store | None = None) -> Iterator[tuple[int, np.ndarray | None]]:
        """Number and values of some blocks as they are done; no values for one that a worker has put into the store."""
        workers = "" if self._executor is None else " on workers"
        with Progress(len(self.layout), f"{len(self.layout)} blocks{workers}") as progress:
            done = len(self.layout) - len(which)
            for result in self._results(which, store):
                done += 1
                progress.done(done)
                yield result

    def stored(self, out: Any) -> Any:
        """All of them in a Zarr array on disk; those that are there already, and sound, are not computed again."""
        path, jacobian = check_out(out), self._jacobian
        asked = fingerprint(jacobian, self.layout, self._swept)
        store = Store.at(path, self.layout, self._dtype, repr(jacobian)[1:].partition(":")[0], asked)
        store.remove_damaged()
        for workers in (store, None):  # who may have written to a copy on a disk of their own: then values come back
            for number, values in self.read(store.missing(), workers):
                if values is not None:
                    store.write(number, values)
        return store.finish()

    def gathered(self) -> Any:
        """All of them in one tensor of the framework."""
        jacobian, layout = self._jacobian, self.layout
        jacobian._reader.require_room(math.prod(layout.shape))
        whole = np.empty(layout.shape, self._dtype)
        for number, values in self.read(range(len(layout))):
            assert values is not None
            whole[layout.region(number)] = values.reshape(layout.sizes(number))
        return jacobian._backend.cast(whole, jacobian._wrt.tensor)

    def _results(self, which: Sequence[int], store: Store | None) -> Iterator[tuple[int, np.ndarray | None]]:
        if self._executor is not None and which:
            yield from results(self._jacobian, self.plan, self.layout, self._executor, which, store)
            return
        for number in which:
            yield number, self._part(number)

    @close_scopes_after
    def _part(self, number: int) -> np.ndarray:
        with hushed():
            return part(self._jacobian, self.plan, self.layout, number)

    @property
    def _dtype(self) -> np.dtype:
        return numbers(self._jacobian._backend.zeros((1,), self._jacobian._wrt.tensor), self._jacobian._backend).dtype

    @property
    def _looped(self) -> bool:
        return self.plan.mode in self._jacobian._reader.looped

    def _most(self) -> int:
        """How many rows or columns a block has at most."""
        task, most = self.plan.task, self.plan.chunk
        if self._looped:  # one sweep after another: what counts is the result
            across = task.wrt_size if self.plan.mode == "reverse" else task.of_size
            most = max(1, (self.plan.budget or BUDGET) // max(1, across * task.batch * task.itemsize))
        if self._jacobian._reader.budget is None:
            most = min(most, -(-max(1, self.plan.sweeps) // ENOUGH))
        return most


def _planned(jacobian: Jacobian) -> tuple[Plan, np.ndarray | None]:
    """The plan of the whole in a direction that there is, and what two sweeps from generic seeds gave."""
    reader = replace(jacobian._reader, budget=jacobian._reader.budget or BUDGET)
    rows, columns = (math.prod(side.shape) for side in (jacobian._of, jacobian._wrt))
    places = jacobian._places()
    if not rows * columns:
        return reader.plan(rows, [columns], 0), None
    reader.require_apart()
    while True:
        plan = reader.plan(rows, [columns], reader.batch * rows * columns)
        cut = places if plan.mode == "reverse" else places[::-1]
        try:
            swept = reader.probed(plan.mode, cut[0])
            break
        except UnsupportedError as error:
            if reader.without:
                message = f"{reader.backend.name} can differentiate this in no direction: {error}"
                raise FrameworkError(message) from error
            reader.without[plan.mode] = str(error)
    if swept is None:
        jacobian._require_zero()
        return plan, None
    plan = reader.plan(rows, [columns], reader.batch * rows * columns, plan.mode)  # which knows more by now
    stack = numbers(swept, reader.backend).reshape(2, reader.batch, -1)
    return plan, stack[..., cut[1]]
