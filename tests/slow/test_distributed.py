"""A whole Jacobian by blocks: here and on workers it is the same, for every framework and kind of function."""

import os
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor

import numpy as np
import pytest
import torch

import elementgrad as eg
from tests.support.distributed_functions import arguments, import_torch, net, watched
from tests.support.distributed_pools import QUIET, SPAWN
from tests.support.frameworks import JAX, TENSORFLOW, TORCH, Framework


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
    shape = J.shape[: 0 if J._options.batch is None else 1]
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
    compiled = tf.function(lambda x: tf.sin(x) * x, input_signature=[tf.TensorSpec([None, 4])])
    for function in (compiled, lambda x: compiled(x) + 1):
        C = eg.jacobian(function, x, of="output")
        np.testing.assert_allclose(C.dense(executor=pool), C.dense(), rtol=1e-6)
    with pytest.raises(eg.FrameworkError, match="the function is random in a way that cannot be carried over"):
        eg.jacobian(lambda x: model(x, training=True), x).dense(executor=pool)  # Keras pickles no state of a dropout


def test_a_function_with_another_value_on_a_worker_is_refused(pool):
    random = np.random.default_rng()
    J = eg.jacobian(lambda x: x * random.uniform(), torch.ones(3))
    with pytest.raises(eg.FrameworkError, match="output has another value in a worker than where the Jacobian was"):
        J.dense(executor=pool)
    x = torch.ones(3)
    J = eg.jacobian(lambda x: 2 * x, x)
    x[0] = 5.0
    with pytest.raises(eg.FrameworkError, match="make a new Jacobian"):
        J.dense(executor=pool)


def test_jax_keeps_the_width_of_its_numbers_on_workers(pool):
    import jax
    import jax.numpy as jnp

    J = eg.jacobian(lambda x, key: jnp.sin(x) * jax.random.normal(key, x.shape), jnp.ones(5), jax.random.key(1))
    found = J.dense(executor=pool)
    assert found.dtype == jnp.float64
    np.testing.assert_array_equal(found, J.dense())


def test_an_exception_of_the_function_is_raised_at_once(pool, tmp_path):
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


def test_a_direction_without_a_rule_is_found_before_blocks_are_laid_out(threads):
    import jax
    import jax.numpy as jnp

    def f(x):
        cube = jax.custom_vjp(lambda x: x**3)
        cube.defvjp(lambda x: (x**3, x), lambda x, t: (3 * x**2 * t,))
        return jnp.concatenate([cube(x)] * 4)

    J = eg.jacobian(f, jnp.arange(3.0), budget=200)
    assert J.blocks().plan.mode == "reverse"
    np.testing.assert_array_equal(assembled(J, threads), J.dense())


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
