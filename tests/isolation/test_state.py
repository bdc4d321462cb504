"""Arguments, buffers, random numbers and switches that the function changes are the user's again after a read."""

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf
import torch
from torch import nn

import elementgrad as eg
from tests.support.frameworks import TENSORFLOW, TORCH
from tests.support.user import JACOBIAN_READS

X = np.array([[0.1, 0.2, 0.3], [0.7, -0.4, 0.9]])


@pytest.mark.parametrize("read", JACOBIAN_READS)
def test_writes_into_an_argument_do_not_reach_the_user(read):
    x = torch.tensor(X)

    def f(x):
        x[0] *= 2
        return x.add_(1) * x

    J = eg.jacobian(f, x)
    JACOBIAN_READS[read](J)
    assert x.tolist() == X.tolist()
    assert x._version == 0


def test_a_function_that_writes_into_another_argument_is_not_run_again():
    total = torch.zeros(2, 3, dtype=torch.float64)
    J = eg.jacobian(lambda x, total: x * total.add_(x.detach()), torch.tensor(X), total, wrt="x")
    assert J[:, (0, 0)].tolist() == [[X[0, 0], 0, 0], [0, 0, 0]]
    assert total.tolist() == X.tolist()
    assert "writes to an argument in place" in str(J.plan(..., (0, 0)))


def test_buffers_stay_where_a_method_of_their_module_is_called():
    norm = nn.BatchNorm1d(3).double()
    eg.jacobian(norm.forward, torch.tensor(X))[(0, 0), :]
    assert norm.running_mean.tolist() == [0, 0, 0]
    assert norm.num_batches_tracked == 0


def test_a_dropout_mask_is_the_same_for_all_reads_of_one_jacobian():
    x = torch.rand(2, 3, dtype=torch.float64) + 1
    J = eg.jacobian(lambda x: nn.functional.dropout(x, 0.5), x)
    expected = torch.diag((J.value / x).flatten()).reshape(2, 3, 2, 3)
    assert 0 < (expected > 0).sum() < 6, "some are dropped and some are not"
    units = torch.eye(6, dtype=torch.float64).reshape(6, 2, 3)
    torch.rand(5)  # the user goes on drawing
    assert torch.equal(J.dense(), expected)
    assert torch.equal(torch.stack([J[:, (i // 3, i % 3)] for i in range(6)], -1).reshape(2, 3, 2, 3), expected)
    assert torch.equal(J @ units.movedim(0, -1), expected.reshape(2, 3, 6))
    assert torch.equal(J.diagonal(), J.value / x)
    assert torch.equal(J[:, ([0, 1], [0, 2])], expected[..., [0, 1], [0, 2]])


def test_the_user_draws_the_random_numbers_they_would_have_drawn(fw):
    def draw():
        if fw is TORCH:
            return torch.rand(3).tolist()
        return tf.random.uniform([3]).numpy().tolist() if fw is TENSORFLOW else []

    def f(x):
        noise = {"torch": torch.rand_like, "tensorflow": lambda x: tf.random.uniform(x.shape, dtype=x.dtype)}
        return x * noise.get(fw.name, jnp.ones_like)(x)

    def session(read):
        torch.manual_seed(3)
        tf.random.set_seed(3)
        return draw(), read(), draw(), draw()

    J = None

    def read():
        nonlocal J
        J = eg.jacobian(f, fw.tensor(X))
        J[:, (0, 0)], J[(0, 0), :]

    assert session(read)[2:] == session(lambda: None)[2:]
    np.testing.assert_allclose(fw.numpy(J.diagonal()), fw.numpy(J.value) / X, rtol=1e-12)


def called_in_a_hook(plain, norm):
    plain[0].register_forward_hook(lambda _, __, output: norm(output))
    return plain


def called_before(plain, norm):
    plain[0].register_forward_pre_hook(lambda _, args: norm(args[0]))
    return plain


def called_in_a_forward_of_the_users(plain, norm):
    forward = plain[0].forward
    plain[0].forward = lambda x: forward(norm(x))
    return plain


def called_by_a_bare_module_inside(plain, norm):
    return nn.Sequential(plain, nn.Sequential(norm))


@pytest.mark.parametrize(
    "around",
    [called_in_a_hook, called_before, called_in_a_forward_of_the_users, called_by_a_bare_module_inside],
)
def test_buffers_stay_whichever_way_a_module_comes_by_them(around):
    norm = nn.BatchNorm1d(3)
    model = around(nn.Sequential(nn.Linear(3, 3), nn.Tanh()), norm)
    before = {name: buffer.clone() for name, buffer in norm.named_buffers()}
    eg.jacobian(model, torch.arange(12.0).reshape(4, 3))[(0, 0), (0, 1)]
    for name, buffer in norm.named_buffers():
        assert torch.equal(buffer, before[name]), name


SWITCHES = {
    "grad mode": (torch.is_grad_enabled, torch.set_grad_enabled, False),
    "default device": (
        lambda: torch._GLOBAL_DEVICE_CONTEXT.__dict__.get("device_context"),
        torch.set_default_device,
        "meta",
    ),
    "autocast": (
        lambda: torch.is_autocast_enabled("cpu"),
        lambda on: torch.set_autocast_enabled("cpu", on),
        True,
    ),
}
"""What is set in a thread until it is set again."""


@pytest.mark.parametrize("name", SWITCHES)
def test_modes_set_by_the_function_are_restored_after_a_read(name):
    fw, (read, write, other) = TORCH, SWITCHES[name]
    before, raises = read(), False

    def f(x):
        y = fw.sum(x * x)
        write(other)
        if raises:
            raise ValueError("mine")
        return y

    try:
        assert before != other
        np.testing.assert_allclose(fw.numpy(eg.grad(f, fw.tensor(X[0]))), 2 * X[0])
        assert read() == before
        assert eg.check(f, fw.tensor(X[0], "float32"))
        assert eg.explain(f, fw.tensor(X[0])).verdict == "flows"
        raises = True
        with pytest.raises(ValueError, match="mine"):
            eg.jacobian(f, fw.tensor(X[0]))
        assert read() == before
    finally:
        write(before)


@pytest.mark.parametrize("sow", [tf.random.set_seed, tf.keras.utils.set_random_seed])
def test_a_seed_that_the_function_sets_is_not_the_users(sow):
    def session(read):
        tf.random.set_seed(3)
        tf.random.uniform([3])
        read()
        return tf.random.uniform([3]).numpy().tolist(), tf.random.uniform([3]).numpy().tolist()

    def f(x):
        sow(7)
        return x * tf.random.uniform([3], dtype=x.dtype)

    assert session(lambda: eg.jacobian(f, TENSORFLOW.tensor(X[0])).dense()) == session(lambda: None)


def test_elements_of_an_output_are_read_where_the_function_leaves_gradients_disabled():
    def f(x):
        y = x**2
        torch.set_grad_enabled(False)
        return y

    x = torch.tensor([1.0, 2.0, 3.0])
    assert eg.grad(f, x, of="output[1]").tolist() == [0.0, 4.0, 0.0]
    assert eg.check(f, x, of="output[1]")
    assert eg.explain(f, x, of="output[1]", wrt="x[1]").verdict == "flows"
    assert torch.is_grad_enabled()


def test_a_check_for_nan_that_is_turned_on_after_a_verb_is_heeded():
    divide = jax.jit(lambda x: x / x)

    def use():
        eg.explain(lambda x: jnp.sqrt(x).sum(), jnp.zeros(2))
        jax.config.update("jax_debug_nans", True)
        try:
            assert divide(jnp.ones(1)) == divide(jnp.full(1, 2.0)) == 1
            with pytest.raises(FloatingPointError):
                divide(jnp.zeros(1))
        finally:
            jax.config.update("jax_debug_nans", False)

    with ThreadPoolExecutor(1) as thread:  # a thread in which JAX has not turned the check off yet
        thread.submit(use).result()
