"""What several processes gain, and what it takes to put a Jacobian on disk that would not fit into memory."""

import multiprocessing
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any

import elementgrad as eg
from benchmarks.harness import Row

WIDTH = 2048
TWO = 0.7
"""Of the time of one process, on two cores or more."""
ROWS, COLUMNS, BUDGET, DISK_MB = 16384, 32768, "128MB", 600


def pool(processes: int) -> ProcessPoolExecutor:
    """Processes of one thread each, as many of them are used."""
    os.environ["OMP_NUM_THREADS"] = "1"  # read by those that are spawned from here on
    return ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"))


def torch_distributed() -> Iterator[Row]:
    import torch

    x = torch.randn(WIDTH)
    weights = [torch.randn(WIDTH, WIDTH) / WIDTH**0.5 for _ in range(6)]

    def deep(x: Any, weights: Any) -> Any:
        for weight in weights:
            x = torch.tanh(weight @ x)
        return x

    jacobian = eg.jacobian(deep, x, weights, wrt="x", budget="4MB")
    before = os.environ.get("OMP_NUM_THREADS")
    with ExitStack() as stack:
        pools = {processes: stack.enter_context(pool(processes)) for processes in (1, 2, 4)}
        reads = {processes: partial(jacobian.dense, executor=one) for processes, one in pools.items()}
        torch.testing.assert_close(reads[2](), reads[4]())
        for processes in (2, 4):
            name = f"torch {WIDTH} x {WIDTH}, six layers, {processes} processes"
            yield Row(name, reads[processes], reads[1], "1 process", TWO, repeats=3)
        yield from torch_on_disk(pools[2])
    if before is None:
        os.environ.pop("OMP_NUM_THREADS")
    else:
        os.environ["OMP_NUM_THREADS"] = before


def torch_on_disk(two: ProcessPoolExecutor) -> Iterator[Row]:
    """Memory is that of the driver; sweeps of a block may take the budget."""
    import torch

    x, narrow, wide = torch.randn(COLUMNS), torch.randn(64, COLUMNS) / COLUMNS, torch.randn(ROWS, 64)
    f = lambda x, narrow, wide: torch.tanh(wide @ (narrow @ x))  # noqa: E731
    jacobian = eg.jacobian(f, x, narrow, wide, wrt="x", budget=BUDGET)

    def stored(executor: Any) -> None:
        with tempfile.TemporaryDirectory() as directory:
            jacobian.dense(executor=executor, out=os.path.join(directory, "j.zarr"))

    size = f"{ROWS * COLUMNS * 4 / 1e9:.1f} GB to Zarr"
    for name, executor in (("here", None), ("2 processes", two)):
        ours = partial(stored, executor)
        yield Row(f"torch {size}, {name}", ours, jacobian.dense, "in memory", most_mb=DISK_MB, repeats=1)


SUITES = {"distributed-torch": torch_distributed}
