"""A whole Jacobian by blocks: here, on three engines, to disk; workers and drivers that are killed in the middle."""

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import elementgrad as eg
from elementgrad.distributed import driver
from tests.distributed_functions import arguments, import_torch, net, watched
from tests.frameworks import JAX, TENSORFLOW, TORCH, Framework

ROOT = Path(__file__).parent.parent
QUIET = {
    "OMP_NUM_THREADS": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".pytest_cache" / "jax"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}
"""As it is here: one thread, and JAX's programs from the same cache."""
SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture(scope="module")
def pool():
    with pytest.MonkeyPatch.context() as environment:
        for name, value in QUIET.items():
            environment.setenv(name, value)
        with ProcessPoolExecutor(2, SPAWN, initializer=import_torch) as pool:
            yield pool


@pytest.fixture(scope="module")
def threads():
    with ThreadPoolExecutor(2) as pool:
        yield pool


def assembled(J: eg.Jacobian, executor: Executor | None = None) -> np.ndarray:
    """The matrix of a Jacobian from its blocks, each of which must be its own."""
    blocks = J.blocks(executor)
    shape = J.shape[: 0 if J._batch is None else 1]
    matrix = np.full((*shape, np.prod(J._of.shape, dtype=int), np.prod(J._wrt.shape, dtype=int)), np.nan)
    count = 0
    for block in blocks:
        assert np.isnan(matrix[..., block.rows, block.columns]).all()
        matrix[..., block.rows, block.columns] = block.values
        count += 1
    assert count == len(blocks)
    return matrix.reshape(J.shape)


def jacobians(fw: Framework) -> dict[str, eg.Jacobian]:
    """Small ones of every shape, each with a budget that makes several blocks."""
    x = fw.tensor(np.linspace(-1, 1, 12).reshape(3, 4))
    w = fw.tensor(np.linspace(0.3, 2, 20).reshape(4, 5))
    few = {"budget": 2000}
    return {
        "rows": eg.jacobian(lambda x: (x * x)[0] * x[1], x, **few),
        "columns": eg.jacobian(lambda x: x[:, 0][:, None, None] * x[:, :, None] * x[:1, None] ** 2, x, **few),
        "two inputs": eg.jacobian(lambda x, w: x @ w, x, w, wrt="w", **few),
        "by tensor": eg.jacobian(lambda x, w: x @ w, x, w, wrt=x, **few),
        "in a dict": eg.jacobian(lambda p: p["x"] @ p["w"], {"x": x, "w": w}, wrt="p.w", **few),
        "elements": eg.jacobian(lambda x, w: x @ w, x, w, of="output[1:, 2]", wrt=eg.at("x")[[0, 1, 1], 2], **few),
        "tagged": eg.jacobian(lambda x, w: eg.tag(x * x, "h") @ w, x, w, of="output", wrt="h", **few),
        "one number": eg.jacobian(lambda x: (x * x)[1, 2], x, of="output", wrt="x[0, 0]"),
        "batch": eg.jacobian(lambda x: x[:, :1] * x[:, 1:], x, batch=True, **few),
        "hessian": eg.hessian(lambda x: fw.sum(x**3) * x[0, 0], x, **few),
        "two hessians": eg.hessian(lambda x, w: fw.sum((x @ w) ** 2), x, w, wrt=["x", "w"], **few)[0][1],
        "without a budget": eg.jacobian(lambda x: x[0] * x[1], x),
        "zeros": eg.jacobian(lambda x, w: x * 2, x, w, wrt="w", unconnected="zero"),
    }


@pytest.mark.parametrize("fw", [TORCH, TENSORFLOW, JAX], ids=lambda fw: fw.name)
def test_blocks_are_the_whole_on_every_framework(fw, pool):
    for name, J in jacobians(fw).items():
        whole = J.dense()
        np.testing.assert_array_equal(assembled(J), fw.numpy(whole), err_msg=name)
        workers = J.dense(executor=pool)
        assert (type(workers), workers.dtype) == (type(whole), whole.dtype), name
        np.testing.assert_array_equal(fw.numpy(workers), fw.numpy(whole), err_msg=name)


def test_threads_give_the_same(threads):
    for name, J in jacobians(TORCH).items():
        np.testing.assert_array_equal(assembled(J, threads), TORCH.numpy(J.dense()), err_msg=name)


def test_blocks_without_an_executor_are_read_as_they_are_asked_for(tmp_path):
    log = tmp_path / "log"
    J = eg.jacobian(watched(str(log)), *arguments(), wrt="x", budget=5_000)
    blocks = iter(J.blocks())
    assert len(log.read_text().splitlines()) == 1  # to find out what can be done
    first, _ = next(blocks), next(blocks)
    assert len(log.read_text().splitlines()) == 1 + 2
    assert (first.rows, first.columns) == (slice(0, len(first.values)), slice(0, 60))


def test_the_plan_says_what_the_blocks_are():
    x = torch.ones(1000, dtype=torch.float64)
    blocks = eg.jacobian(lambda x: torch.tanh(x)[:300], x, budget="200KB").blocks()
    assert (blocks.plan.chunks, blocks.plan.chunk, len(blocks)) == (60, 5, 60)
    assert blocks.plan == eg.jacobian(lambda x: torch.tanh(x)[:300], x, budget="200KB").plan()
    assert repr(blocks) == "<Blocks of the Jacobian of shape (300, 1000): 60 blocks of 5 rows, 40 KB each>"
    free = eg.jacobian(lambda x: torch.tanh(x)[:300], x).blocks()
    assert (len(free), free.plan.chunks, free.plan.chunk) == (60, 60, 5)


def test_narrow_numbers_come_as_float32():
    x = torch.linspace(-1, 1, 6, dtype=torch.bfloat16)
    J = eg.jacobian(lambda x: x * x.sum(), x)
    assert {block.values.dtype for block in J.blocks()} == {np.dtype(np.float32)}
    np.testing.assert_array_equal(assembled(J), J.dense().float().numpy())


def test_a_known_pattern_is_used(threads):
    x = torch.arange(50.0)
    J = eg.jacobian(lambda x: x[1:] * x[:-1], x)
    whole = J.dense().numpy()
    J.pattern()
    np.testing.assert_array_equal(assembled(J), whole)
    np.testing.assert_array_equal(assembled(J, threads), whole)


def test_models_by_name_and_their_dropout_are_the_same_on_workers(pool):
    model, x = net()
    assert (eg.jacobian(model, x, of="1", wrt="0").value == 0).any()
    for of, wrt in {"output": "0.weight", "2": "input", "1[3:9]": "0"}.items():
        J = eg.jacobian(model, x, of=of, wrt=wrt, budget=30_000)
        np.testing.assert_array_equal(J.dense(executor=pool).numpy(), J.dense().numpy(), err_msg=of)
    assert model[0].weight.grad is None
    J = eg.jacobian(model, x, of="output", wrt=model[0].weight, budget=30_000)
    np.testing.assert_array_equal(J.dense(executor=pool).numpy(), J.dense().numpy())


def test_keras_models_and_seeded_operations_are_the_same_on_workers(pool):
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(6, name="d"), keras.layers.Dropout(0.5)])
    x = tf.ones((2, 4))
    K = eg.jacobian(model, x, of="output", wrt="d/kernel")
    np.testing.assert_array_equal(K.dense(executor=pool), K.dense())
    D = eg.jacobian(lambda x: tf.nn.dropout(x, 0.5) * x, x)
    np.testing.assert_array_equal(D.dense(executor=pool), D.dense())
    with pytest.raises(eg.FrameworkError, match="the function is random in a way that cannot be carried over"):
        eg.jacobian(lambda x: model(x, training=True), x).dense(executor=pool)  # Keras pickles no state of a dropout


def test_a_function_whose_value_is_another_on_a_worker_is_refused(pool):
    random = np.random.default_rng()
    J = eg.jacobian(lambda x: x * random.uniform(), torch.ones(3))
    with pytest.raises(eg.FrameworkError, match="output has another value in a worker than where the Jacobian was"):
        J.dense(executor=pool)
    x = torch.ones(3)
    J = eg.jacobian(lambda x: 2 * x, x)
    x[0] = 5.0
    with pytest.raises(eg.FrameworkError, match="make the Jacobian anew"):
        J.dense(executor=pool)


def test_jax_keeps_the_width_of_its_numbers_on_workers(pool):
    import jax
    import jax.numpy as jnp

    J = eg.jacobian(lambda x, key: jnp.sin(x) * jax.random.normal(key, x.shape), jnp.ones(5), jax.random.key(1))
    found = J.dense(executor=pool)
    assert found.dtype == jnp.float64
    np.testing.assert_array_equal(found, J.dense())


def test_an_exception_of_the_function_comes_through_at_once(pool, tmp_path):
    here = os.getpid()
    log = tmp_path / "log"

    class OddError(Exception):
        pass

    def f(x):
        if os.getpid() != here:
            with open(log, "a") as file:
                file.write("run\n")
            raise OddError("not on a worker")
        return x * 2

    with pytest.raises(Exception, match="not on a worker") as caught:
        eg.jacobian(f, torch.ones(3)).dense(executor=pool)
    assert type(caught.value).__name__ == "OddError"
    assert "in f" in caught.value.__notes__[0]
    assert len(log.read_text().splitlines()) <= 3  # once for each block that was on its way, and none again


def test_out_is_a_zarr_array_of_the_whole(tmp_path, pool):
    import zarr

    J = eg.jacobian(lambda x: x[:, None] * x.sum(1)[:, None, None], torch.randn(4, 5), budget=500)
    here, there = J.dense(out=tmp_path / "here.zarr"), J.dense(executor=pool, out=str(tmp_path / "there.zarr"))
    for array in (here, there):
        assert isinstance(array, zarr.Array)
        assert (array.shape, array.dtype, array.metadata.zarr_format) == (J.shape, np.float32, 3)
        assert array.attrs["elementgrad"]["complete"]
        np.testing.assert_array_equal(array[:], J.dense().numpy())
    assert here.chunks == J.blocks().layout.chunks
    single = eg.jacobian(lambda x: x.sum(), torch.ones(()))
    assert single.dense(out=tmp_path / "single.zarr")[()] == 1


def test_what_is_there_is_not_read_again_and_another_jacobian_is_refused(tmp_path):
    log, out = tmp_path / "log", tmp_path / "j.zarr"
    x, weight = arguments()

    def ask(x=x, weight=weight, budget=5_000, more=1.0):
        inner = watched(str(log))
        return eg.jacobian(lambda x, weight: more * inner(x, weight), x, weight, wrt="x", budget=budget)

    whole = ask().dense(out=out)[:]
    chunks = sorted(out.glob("c/*/0"))
    assert len(chunks) == len(ask().blocks()) > 5
    for chunk in chunks[2:4]:
        chunk.unlink()
    Path(f"{chunks[2]}.0123.partial").write_bytes(b"half of it")
    metadata = json.loads((out / "zarr.json").read_text())
    metadata["attributes"]["elementgrad"]["complete"] = False
    (out / "zarr.json").write_text(json.dumps(metadata))
    log.unlink()
    np.testing.assert_array_equal(ask().dense(out=out)[:], whole)
    assert len(log.read_text().splitlines()) == 1 + 2  # one to find out what can be done, one for each block
    assert sorted(out.glob("c/*/*")) == chunks
    nudged = weight.clone()
    nudged[3, 7] += 1e-15
    for other in (ask(x=x + 1), ask(weight=nudged), ask(budget=40_000), ask(more=1 + 1e-9)):
        with pytest.raises(eg.OptionError, match="of another function, point, plan or budget; give another name"):
            other.dense(out=out)


@pytest.mark.parametrize("reach", ["closure", "function", "model", "list"])
def test_what_a_function_reads_without_being_given_it_is_known_to_the_bit(tmp_path, reach):
    x, weight = torch.linspace(-1, 1, 40), torch.linspace(-1, 1, 80 * 40).reshape(80, 40)

    def ask(weight):
        layer = torch.nn.Linear(40, 80, bias=False)
        layer.weight.data.copy_(weight)
        several = [{"weight": weight}]

        def inner(x):
            return weight @ x

        found = {
            "closure": lambda x: torch.tanh(weight @ x),
            "function": lambda x: torch.tanh(inner(x)),
            "model": lambda x: torch.tanh(layer(x)),
            "list": lambda x: torch.tanh(several[0]["weight"] @ x),
        }
        return eg.jacobian(found[reach], x, budget=5_000)

    ask(weight).dense(out=tmp_path / "j.zarr")
    ask(weight.clone()).dense(out=tmp_path / "j.zarr")
    weight[3, 7] += 1e-6  # which no sum over all of it tells
    with pytest.raises(eg.OptionError, match="of another function, point, plan or budget"):
        ask(weight).dense(out=tmp_path / "j.zarr")


def test_what_is_not_written_yet_is_no_number(tmp_path):
    import zarr

    J = eg.jacobian(lambda x: x**2, torch.ones(8), budget=100)
    J.dense(out=tmp_path / "j.zarr")
    next((tmp_path / "j.zarr").glob("c/0/0")).unlink()
    assert np.isnan(zarr.open_array(tmp_path / "j.zarr")[0]).all()


def test_options_that_cannot_be_are_refused_before_any_work(tmp_path, threads):
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
        ({"out": 3}, "out=3 is no path"),
        ({"out": "s3://bucket/j.zarr"}, "is no path"),
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


def test_a_direction_without_a_rule_is_found_out_before_the_blocks_are_cut(threads):
    import jax
    import jax.numpy as jnp

    def f(x):
        cube = jax.custom_vjp(lambda x: x**3)
        cube.defvjp(lambda x: (x**3, x), lambda x, t: (3 * x**2 * t,))
        return jnp.concatenate([cube(x)] * 4)

    J = eg.jacobian(f, jnp.arange(3.0), budget=200)
    assert J.blocks().plan.mode == "reverse"
    np.testing.assert_array_equal(assembled(J, threads), J.dense())


class Unreadable:
    """Something that can be pickled, and not be read again."""

    def __reduce__(self):
        return unreadable, ()


def unreadable():
    raise ValueError("not in this process")


def test_what_cannot_be_read_by_a_worker_is_told(threads):
    there = Unreadable()
    with pytest.raises(eg.OptionError, match=r"cannot be read in another process: not in .* make what does not"):
        eg.jacobian(lambda x: x**2 if there else x, torch.arange(3.0)).dense(executor=threads)


class Elsewhere(ThreadPoolExecutor):
    """An engine whose workers see no file of the driver's."""

    def submit(self, function, ticket):
        return super().submit(function, replace(ticket, file=ticket.file and "/elsewhere", out="/elsewhere"))


class Losing(ThreadPoolExecutor):
    """An engine that loses every task so often."""

    def __init__(self, times: int):
        super().__init__(1)
        self.times = times

    def submit(self, function, ticket):
        if ticket.attempt < self.times:
            future: Future = Future()
            future.set_exception(OSError("the connection was closed"))
            return future
        return super().submit(function, ticket)


def test_workers_that_share_no_disk_get_what_they_need_and_give_back_what_they_read(tmp_path):
    x, weight = arguments(rows=30, columns=2000)
    assert weight.nbytes > driver.INLINE
    J = eg.jacobian(watched(), x, weight, wrt="x", budget=200_000)
    with Elsewhere(2) as pool:
        np.testing.assert_array_equal(J.dense(executor=pool, out=tmp_path / "j.zarr")[:], J.dense().numpy())


def test_what_is_lost_is_tried_again_and_not_for_ever():
    J = eg.jacobian(lambda x: x**2, torch.arange(4.0))
    with Losing(driver.TRIES) as pool:
        assert torch.equal(J.dense(executor=pool), J.dense())
    with Losing(driver.TRIES + 1) as pool, pytest.raises(eg.WorkerError, match="lost with its worker 4 times"):
        J.dense(executor=pool)


def test_leaving_early_cancels_what_is_on_its_way(threads):
    J = eg.jacobian(watched(pause=0.01), *arguments(), wrt="x", budget=5_000)
    for _ in J.blocks(threads):
        break
    assert threads.submit(int).result() == 0


def test_a_pool_that_lost_a_worker_says_so_and_a_new_call_goes_on(tmp_path):
    deadly, out = tmp_path / "deadly", tmp_path / "j.zarr"
    J = eg.jacobian(watched(dies=str(deadly)), *arguments(), wrt="x", budget=5_000)
    deadly.touch()
    lost = r"a worker died .* and the same call goes on from there"
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


def test_a_driver_that_is_killed_leaves_what_is_done_and_the_next_goes_on(tmp_path):
    log, out = tmp_path / "log", tmp_path / "j.zarr"
    command = [sys.executable, "-m", "tests.distributed_run", "killed", str(out), str(log)]
    driven = subprocess.Popen(command, cwd=ROOT, env=os.environ | QUIET, start_new_session=True)
    try:
        assert driven.wait(timeout=120) == -signal.SIGKILL
    finally:
        os.killpg(driven.pid, signal.SIGKILL)  # its workers, who wait for tasks that nobody sends
    done = {chunk: chunk.stat().st_ino for chunk in out.glob("c/*/0")}
    J = eg.jacobian(watched(str(log)), *arguments(), wrt="x", budget=5_000)
    blocks = J.blocks()
    assert 5 <= len(done) < len(blocks)
    log.unlink()
    array = J.dense(out=out)
    left = sum(1 for number in range(len(blocks)) if out / f"c/{number}/0" not in done)
    assert len(log.read_text().splitlines()) == 1 + left
    assert {chunk: chunk.stat().st_ino for chunk in done} == done
    np.testing.assert_array_equal(array[:], J.dense().numpy())


@pytest.mark.skipif(shutil.which("mpiexec") is None, reason="needs MPI: apt-get install openmpi-bin")
def test_mpi_gives_the_same(tmp_path):
    command = ["mpiexec", "--allow-run-as-root", "--oversubscribe", "-n", "3", sys.executable, "-m", "mpi4py.futures"]
    command += ["-m", "tests.distributed_run", "mpi", str(tmp_path / "j.zarr")]
    ended = subprocess.run(
        command, cwd=ROOT, env=os.environ | QUIET, capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found == {"function": True, "model": True, "stored": True, "processes": 3}
