"""`J.blocks()` and `J.dense(out=...)`: a whole Jacobian, planned once and read block by block."""

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from elementgrad._backends.autodiff import UnsupportedError
from elementgrad._cleanup import close_scopes_after
from elementgrad._read.jacobian import Jacobian, to_numpy
from elementgrad._read.plan import Block, BlockLayout, Mode, Plan, Progress, format_bytes, no_progress, pluralize
from elementgrad._read.sweeps import SweepRunner
from elementgrad._read.workers import check_executor, read_on_workers
from elementgrad._read.zarr import Fingerprint, Store, check_out, fingerprint

BLOCK_BUDGET = 256 * 10**6
"""The default budget of one block; the same everywhere, so that a later call cuts alike."""
MIN_BLOCKS = 64
"""There are at least this many blocks, if there are as many rows or columns, to keep workers busy."""


class Blocks:
    """All blocks of a Jacobian, to be iterated over: each is read when the loop gets to it, or by workers.

    Made by `J.blocks()`. `len(blocks)` is their number, and `blocks.plan` the plan, of which a block is a chunk.

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
        self.plan, self._probes = _plan_whole(jacobian)
        """The plan, whose chunks are the blocks."""
        sides = jacobian._examples, jacobian._of.shape, jacobian._wrt.shape
        self.layout = BlockLayout.cut(*sides, self.plan.mode, self._rows_per_block())
        """The positions of the blocks."""
        scale = self.layout.largest / self.plan.chunk
        if not self._is_looped:
            self.plan = replace(self.plan, chunk=self.layout.largest, bytes=math.ceil(self.plan.bytes * scale))

    def __len__(self) -> int:
        return len(self.layout)

    def __iter__(self) -> Iterator[Block]:
        for index, values in self.read(range(len(self.layout))):
            assert values is not None
            yield Block(*self.layout.bounds(index), values)

    def __repr__(self) -> str:
        layout = self.layout
        each = pluralize(layout.largest, "row" if layout.mode == "reverse" else "column")
        size = format_bytes(layout.numbers * self._dtype.itemsize)
        return f"<Blocks of the Jacobian of shape {layout.shape}: {len(layout)} blocks of {each}, {size} each>"

    def read(self, which: Sequence[int], store: Store | None = None) -> Iterator[tuple[int, np.ndarray | None]]:
        """Read some blocks.

        Args:
            which: The indices of the blocks.
            store: Where workers may write blocks themselves.

        Returns:
            Index and values of each block as it is done; None for the values that a worker wrote to the store.
        """
        workers = "" if self._executor is None else " on workers"
        with Progress(len(self.layout), f"{len(self.layout)} blocks{workers}") as progress:
            done = len(self.layout) - len(which)
            for result in self._results(which, store):
                done += 1
                progress.advance_to(done)
                yield result

    def stored(self, out: Any) -> Any:
        """Write all blocks to a Zarr array on disk; those that are there already, and sound, are not computed again.

        Args:
            out: The path of the array.

        Returns:
            The Zarr array, to be read.
        """
        path, jacobian = check_out(out), self._jacobian
        wanted = self._fingerprint()
        store = Store.at(path, self.layout, self._dtype, repr(jacobian)[1:].partition(":")[0], wanted)
        store.remove_damaged()
        # Workers may have written to a copy on a disk of their own. What is missing then is read once more.
        for worker_store in (store, None):
            for index, values in self.read(store.missing_blocks(), worker_store):
                if values is not None:
                    store.write(index, values)
        return store.finish()

    def _fingerprint(self) -> Fingerprint:
        """Return what tells this Jacobian from others in an array on disk."""
        probe = partial(_probe, self._jacobian._runner, self._jacobian, self.plan.mode)
        return fingerprint(self._jacobian, self.layout, probe, self._probes)

    def gathered(self) -> Any:
        """Return all blocks in one tensor of the framework."""
        jacobian, layout = self._jacobian, self.layout
        jacobian._runner.check_room(math.prod(layout.shape))
        whole = np.empty(layout.shape, self._dtype)
        for index, values in self.read(range(len(layout))):
            assert values is not None
            whole[layout.region(index)] = values.reshape(layout.sizes(index))
        return jacobian._backend.cast(whole, jacobian._wrt.tensor)

    def _results(self, which: Sequence[int], store: Store | None) -> Iterator[tuple[int, np.ndarray | None]]:
        if self._executor is not None and which:
            yield from read_on_workers(self._jacobian, self.plan, self.layout, self._executor, which, store)
            return
        for index in which:
            yield index, self._read_part(index)

    @close_scopes_after
    def _read_part(self, index: int) -> np.ndarray:
        with no_progress():
            return self._jacobian._read_part(self.plan, self.layout, index)

    @property
    def _dtype(self) -> np.dtype:
        backend = self._jacobian._backend
        return to_numpy(backend.zeros((1,), self._jacobian._wrt.tensor), backend).dtype

    @property
    def _is_looped(self) -> bool:
        return self.plan.mode in self._jacobian._runner.unbatchable

    def _rows_per_block(self) -> int:
        task, limit = self.plan.task, self.plan.chunk
        if self._is_looped:  # one sweep after another: only the result takes memory
            across = task.wrt_size if self.plan.mode == "reverse" else task.of_size
            limit = max(1, (self.plan.budget or BLOCK_BUDGET) // max(1, across * task.batch * task.itemsize))
        if self._jacobian._runner.budget is None:
            limit = min(limit, -(-max(1, self.plan.sweeps) // MIN_BLOCKS))
        return limit


def _plan_whole(jacobian: Jacobian) -> tuple[Plan, np.ndarray | None]:
    """Return the plan of the whole in a direction that has a rule, and the numbers of two sweeps from generic seeds."""
    runner = replace(jacobian._runner, budget=jacobian._runner.budget or BLOCK_BUDGET)
    rows, columns = (math.prod(side.shape) for side in (jacobian._of, jacobian._wrt))
    if not rows * columns:
        return runner.plan(rows, [columns], 0), None
    runner.check_examples_do_not_mix()
    numbers = runner.batch * rows * columns
    while True:
        plan = runner.plan(rows, [columns], numbers)
        try:
            probes = _probe(runner, jacobian, plan.mode)
            break
        except UnsupportedError as error:
            runner.note_missing_rule(plan.mode, error)
    if probes is None:
        jacobian._require_zero_allowed()
        return plan, None
    plan = runner.plan(rows, [columns], numbers, plan.mode)  # once more, since the probes may have found out something
    return plan, probes


def _probe(runner: SweepRunner, jacobian: Jacobian, mode: Mode) -> np.ndarray | None:
    """Return the numbers of two sweeps from generic seeds."""
    of_positions, wrt_positions = jacobian._positions()
    sources, targets = (of_positions, wrt_positions) if mode == "reverse" else (wrt_positions, of_positions)
    probes = runner.probe(mode, sources)
    return None if probes is None else to_numpy(probes, runner.backend).reshape(2, runner.batch, -1)[..., targets]
