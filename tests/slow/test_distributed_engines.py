"""Engines that read Jacobians: what they are refused, what they lose, workers that are killed, reads that are left."""

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

import elementgrad as eg
from elementgrad._read import workers as driver
from elementgrad._read import workers as worker
from elementgrad._read.zarr import Store
from tests.support.distributed_functions import arguments, net, watched
from tests.support.distributed_pools import QUIET, ROOT, SPAWN, Counted, Gated, Losing


def test_options_that_cannot_be_are_refused_before_any_work(tmp_path):
    threads = ThreadPoolExecutor(1)
    J = eg.jacobian(lambda x: x**2, torch.ones(3))
    (tmp_path / "file").write_text("")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("")
    shut = ThreadPoolExecutor(1)
    shut.shutdown()
    refused = [
        ({"executor": 4}, "executor is int; give a concurrent.futures.Executor"),
        ({"executor": shut}, "takes no tasks: .*; give one that is not shut down"),
        ({"executor": ProcessPoolExecutor(1, multiprocessing.get_context("fork"))}, "a pool that forks"),
        ({"out": 3}, "out=3 is not a path"),
        ({"out": ""}, "out='' is not a path"),
        ({"out": "/proc/j.zarr"}, "/proc/j.zarr cannot be made"),
        ({"out": "s3://bucket/j.zarr"}, "is not a path"),
        ({"out": tmp_path / "file"}, "is a file"),
        ({"out": tmp_path / "none" / "j.zarr"}, "there is no directory"),
        ({"out": tmp_path / "full"}, "holds something else"),
    ]
    for options, why in refused:
        with pytest.raises(eg.OptionError, match=why):
            J.dense(**options)
    x = torch.ones(3)
    with eg.record(x) as rec:
        y = x * 2
    with pytest.raises(eg.OptionError, match="recorded runs in no other process"):
        rec.jacobian(y, x).dense(executor=threads)
    with pytest.raises(eg.OptionError, match="stay in a graph"):
        eg.jacobian(lambda x: x**2, x, create_graph=True).blocks(threads)
    lock = threading.Lock()
    with pytest.raises(eg.OptionError, match=r"cannot be sent to another process: .* lock"):
        eg.jacobian(lambda x: x**2 if lock else x, x).dense(executor=threads)
    with pytest.raises(eg.UnconnectedError):
        eg.jacobian(lambda x: x.detach() * 2, x).blocks()


class Unreadable:
    """Something that can be pickled, and not be read again."""

    def __reduce__(self):
        return unreadable, ()


def unreadable():
    raise ValueError("not in this process")


def test_functions_that_workers_cannot_read_are_an_error():
    there = Unreadable()
    told = r"cannot be read in another process: not in .* make what does not"
    with ThreadPoolExecutor(1) as threads, pytest.raises(eg.OptionError, match=told):
        eg.jacobian(lambda x: x**2 if there else x, torch.arange(3.0)).dense(executor=threads)


def test_lost_blocks_are_retried_a_few_times():
    J = eg.jacobian(lambda x: x**2, torch.arange(4.0))
    lost = OSError("the connection was closed")
    with Losing(driver.MAX_RETRIES, lost) as pool:
        assert torch.equal(J.dense(executor=pool), J.dense())
    remedies = {
        lost: "give workers more memory, or a smaller budget",
        ModuleNotFoundError("No module named 'elementgrad'"): "install where workers run what is installed here",
        CancelledError(): "keep the executor open",
    }
    for error, remedy in remedies.items():
        with Losing(driver.MAX_RETRIES + 1, error) as pool, pytest.raises(eg.WorkerError, match=f"4 times.*; {remedy}"):
            J.dense(executor=pool)


def test_leaving_the_loop_early_cancels_pending_blocks(tmp_path):
    log = tmp_path / "log"
    J = eg.jacobian(watched(str(log)), *arguments(), wrt="x", budget=5_000)
    with Gated() as pool:
        for _ in J.blocks(pool):
            break
        assert [future.cancelled() for future in pool.futures[2:]] == [True] * (len(J.blocks()) - 2)
        before = len(log.read_text().splitlines())
        pool.gate.set()  # for the one that had begun
        assert pool.futures[1].result().values is None
    assert len(log.read_text().splitlines()) == before
    assert not worker._evaluations
    with ThreadPoolExecutor(1) as pool:
        assert torch.equal(J.dense(executor=pool), J.dense())  # the same again is another read


def test_a_worker_frees_functions_after_an_idle_time(monkeypatch):
    monkeypatch.setattr(worker, "IDLE_SECONDS", 0.1)
    J = eg.jacobian(lambda x: x**2, torch.arange(4.0))
    blocks = J.blocks()
    payload = driver._make_payload(J, blocks.plan, blocks.layout)
    for _ in range(2):
        worker.run_task(worker.BlockTask("digest", "flight", 0, 0, payload, None, None, ""))
        assert "digest" in worker._evaluations
        end = time.monotonic() + 60
        while worker._evaluations and time.monotonic() < end:
            time.sleep(0.02)
        assert not worker._evaluations


def test_many_are_in_flight_only_while_workers_write_themselves(tmp_path):
    J = eg.jacobian(torch.tanh, torch.ones(100), budget=800)
    blocks = J.blocks()
    assert len(blocks) == 100
    payload = driver._make_payload(J, blocks.plan, blocks.layout)
    store = Store.at(tmp_path / "j.zarr", blocks.layout, np.dtype("float32"), "J", blocks._fingerprint())
    for seeing, late in ((100, False), (20, True)):
        with Counted(seeing) as pool:
            flight = driver._Flight(pool, payload, None, store, 2)
            given = {index: values is not None for index, values in flight.results(range(100))}
        assert given == {index: index >= seeing for index in range(100)}  # in whatever order workers are done
        assert max(pool.most.values()) > 20
        assert (pool.most[100] <= 2) == late


GUARDLESS = """
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import torch

import elementgrad as eg

eg.jacobian(torch.sin, torch.ones(4)).dense(executor=ProcessPoolExecutor(1, multiprocessing.get_context("spawn")))
"""


def test_a_script_without_a_main_guard_is_an_error_that_says_so(tmp_path):
    (tmp_path / "script.py").write_text(GUARDLESS)
    command = [sys.executable, str(tmp_path / "script.py")]
    ended = subprocess.run(command, env=os.environ | QUIET, capture_output=True, text=True, timeout=120, check=False)
    assert "OptionError: a worker cannot start a pool while it imports the script; in a script put" in ended.stderr
    last = ended.stderr.strip().splitlines()[-1]
    assert "WorkerError: a worker died after 0 blocks" in last
    assert 'put what starts workers below if __name__ == "__main__":' in last


def test_a_pool_that_lost_a_worker_says_so_and_a_new_call_goes_on(tmp_path):
    deadly, out = tmp_path / "deadly", tmp_path / "j.zarr"
    J = eg.jacobian(watched(dies=str(deadly)), *arguments(), wrt="x", budget=5_000)
    deadly.touch()
    lost = r"a worker died .* and the same call resumes from there"
    with ProcessPoolExecutor(1, SPAWN) as pool, pytest.raises(eg.WorkerError, match=lost):
        J.dense(executor=pool, out=out)
    np.testing.assert_array_equal(J.dense(out=out)[:], J.dense().numpy())


def kill_at(process: int, out: Path) -> None:
    """Kill a process once some of an array is there."""
    while sum(1 for _ in out.glob("c/*/0")) < 3:
        time.sleep(0.005)
    os.kill(process, signal.SIGKILL)


def test_dask_completes_though_a_worker_is_killed_in_the_middle(tmp_path):
    import dask
    from distributed import Client, LocalCluster

    options = {"distributed.scheduler.allowed-failures": 0, "distributed.worker.daemon": True}
    with (
        dask.config.set(options),
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        executor = client.get_executor()
        J = eg.jacobian(watched(pause=0.02), *arguments(), wrt="x", budget=5_000)
        assert torch.equal(J.dense(executor=executor), J.dense())
        model, x = net()
        K = eg.jacobian(model, x, of="output", wrt="0.weight", budget=30_000)
        assert torch.equal(K.dense(executor=executor), K.dense())
        victim, *_ = client.run(os.getpid).values()
        matrix = np.full(J.shape, np.nan)
        for number, block in enumerate(J.blocks(executor)):
            if number == 2:
                os.kill(victim, signal.SIGKILL)
            matrix[block.rows, block.columns] = block.values
        np.testing.assert_array_equal(matrix, J.dense().numpy())
        client.wait_for_workers(2)
        victim, *_ = client.run(os.getpid).values()
        threading.Thread(target=kill_at, args=(victim, tmp_path / "j.zarr"), daemon=True).start()
        np.testing.assert_array_equal(J.dense(executor=executor, out=tmp_path / "j.zarr")[:], J.dense().numpy())
        assert not Path(f"/proc/{victim}").exists() or sys.platform != "linux"


@pytest.mark.skipif(shutil.which("mpiexec") is None, reason="needs MPI: apt-get install openmpi-bin")
def test_mpi_gives_the_same(tmp_path):
    command = ["mpiexec", "--allow-run-as-root", "--oversubscribe", "-n", "3", sys.executable, "-m", "mpi4py.futures"]
    command += ["-m", "tests.support.distributed_run", "mpi", str(tmp_path / "j.zarr")]
    ended = subprocess.run(
        command, cwd=ROOT, env=os.environ | QUIET, capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found == {"function": True, "model": True, "stored": True, "processes": 3}
