"""What several processes gain, and what it takes to put a Jacobian on disk that would not fit into memory."""

import multiprocessing
import os
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import elementgrad as eg
from benchmarks.harness import Row

WIDTH = 2048
SEVERAL = 0.7
"""Of the time of one process, on two cores or more."""
ROWS, COLUMNS, BUDGET, DISK_MB = 16384, 32768, "128MB", 600


def torch_distributed() -> Iterator[Row]:
    with pools(1, 2, 4) as workers:
        yield from torch_in_memory(workers)
        yield from torch_on_disk(workers)


@contextmanager
def pools(*sizes: int) -> Iterator[Mapping[int, Executor]]:
    """Pools of so many processes, of one thread each."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"  # read by those that are spawned
    try:
        with ExitStack() as stack:
            spawn = multiprocessing.get_context("spawn")
            yield {size: stack.enter_context(ProcessPoolExecutor(size, spawn)) for size in sizes}
    finally:
        del os.environ["OMP_NUM_THREADS"]
        if before is not None:
            os.environ["OMP_NUM_THREADS"] = before


def torch_in_memory(workers: Mapping[int, Executor]) -> Iterator[Row]:
    import torch

    x = torch.randn(WIDTH)
    weights = [torch.randn(WIDTH, WIDTH) / WIDTH**0.5 for _ in range(6)]

    def deep(x: Any, weights: Any) -> Any:
        for weight in weights:
            x = torch.tanh(weight @ x)
        return x

    jacobian = eg.jacobian(deep, x, weights, wrt="x", budget="4MB")
    reads = {processes: partial(jacobian.dense, executor=pool) for processes, pool in workers.items()}
    torch.testing.assert_close(reads[2](), reads[4]())
    name = f"torch {WIDTH} x {WIDTH}, six layers"
    yield Row(f"{name}, here", jacobian.dense, reads[1], "1 process", repeats=3)
    for processes in (2, 4):
        yield Row(f"{name}, {processes} processes", reads[processes], reads[1], "1 process", SEVERAL, repeats=3)


def torch_on_disk(workers: Mapping[int, Executor]) -> Iterator[Row]:
    """Memory is that of the driver; sweeps of a block may take the budget."""
    import torch

    x, narrow, wide = torch.randn(COLUMNS), torch.randn(64, COLUMNS) / COLUMNS, torch.randn(ROWS, 64)
    f = lambda x, narrow, wide: torch.tanh(wide @ (narrow @ x))  # noqa: E731
    jacobian = eg.jacobian(f, x, narrow, wide, wrt="x", budget=BUDGET)

    def stored(executor: Executor | None) -> None:
        with tempfile.TemporaryDirectory() as directory:
            jacobian.dense(executor=executor, out=os.path.join(directory, "j.zarr"))

    name, here = f"torch {ROWS * COLUMNS * 4 / 1e9:.1f} GB to Zarr", partial(stored, None)
    yield Row(f"{name}, here", here, jacobian.dense, "in memory", most_mb=DISK_MB, repeats=1)
    for processes, bound in ((1, None), (2, SEVERAL), (4, SEVERAL)):
        ours = partial(stored, workers[processes])
        yield Row(f"{name}, {processes} processes", ours, here, "here", bound, most_mb=DISK_MB, repeats=3)


SUITES = {"distributed-torch": torch_distributed}
