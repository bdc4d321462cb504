"""Derivatives read inside what changes how code runs, and of functions that a framework has only some rules for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf
import torch
from torch import nn

import elementgrad as eg
from tests.support.frameworks import JAX, TENSORFLOW, TORCH
from tests.support.operations import OPS

X = np.array([0.5, -1.0, 2.0, 0.25])
READS = {
    "entry": (lambda J: J[1, 2], lambda full: full[1, 2]),
    "row": (lambda J: J[1, :], lambda full: full[1]),
    "rows": (lambda J: J[:2, :], lambda full: full[:2]),
    "column": (lambda J: J[:, 2], lambda full: full[:, 2]),
    "columns": (lambda J: J[:, [2, 0, 2]], lambda full: full[:, [2, 0, 2]]),
    "whole": (lambda J: J.dense(), lambda full: full),
    "diagonal": (lambda J: J.diagonal(), lambda full: full.diagonal()),
    "entries": (lambda J: J.entries([0, 1, 3], 2), lambda full: full[[0, 1, 3], 2]),
    "product": (lambda J: J @ X, lambda full: full @ like(full, X)),
    "products": (lambda J: J @ np.stack([X, X**2], 1), lambda full: full @ like(full, np.stack([X, X**2], 1))),
    "row product": (lambda J: X @ J, lambda full: like(full, X) @ full),
}


def like(full, array):
    return torch.tensor(array, dtype=full.dtype) if isinstance(full, torch.Tensor) else array


def curved(fw, x):
    o = OPS[fw.name]
    return o.sin(x) * fw.sum(x**3)


WHOLE = np.diag(np.cos(X) * (X**3).sum()) + np.outer(np.sin(X), 3 * X**2)


def check(fw, J, full, reads=READS):
    for name in reads:
        read, expected = READS[name]
        np.testing.assert_allclose(fw.numpy(read(J)), expected(full), rtol=1e-9, atol=1e-12, err_msg=name)


def own(f, x, **options):
    return torch.autograd.functional.jacobian(f, x, **options)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_every_read_works_in_every_gradient_mode_of_pytorch(mode):
    with mode():
        x = torch.tensor(X)
        J = eg.jacobian(lambda x: curved(TORCH, x), x)
        check(TORCH, J, WHOLE)
        np.testing.assert_allclose(eg.grad(lambda x: x.sum() ** 3, x), np.full(4, 3 * 1.75**2))
        H = eg.hessian(lambda x: (x**3).sum(), x)
        np.testing.assert_allclose(H.diagonal(), 6 * X)
    check(TORCH, J, WHOLE)
    with torch.inference_mode():
        check(TORCH, J, WHOLE)
    np.testing.assert_allclose(H[:, 1], [0, 6 * X[1], 0, 0])


def test_reads_inside_autocast_are_those_outside():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    x = torch.tensor(X, dtype=torch.float32)
    exact = own(model, x).numpy()
    J = eg.jacobian(model, x)
    with torch.autocast("cpu", torch.bfloat16):
        precise = {name: read(J) for name, (read, _) in READS.items()}
        coarse = eg.jacobian(model, x)
        inside = {name: read(coarse) for name, (read, _) in READS.items()}
    outside = {name: read(coarse) for name, (read, _) in READS.items()}
    for name in READS:
        torch.testing.assert_close(inside[name], outside[name], rtol=0.01, atol=0.002, msg=name)
        np.testing.assert_allclose(TORCH.numpy(outside[name]), READS[name][1](exact), rtol=0.05, atol=0.02)
        np.testing.assert_allclose(TORCH.numpy(precise[name]), READS[name][1](exact), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("read", READS)
def test_reads_of_pytorch_can_be_differentiated_again(read):
    take, expected = READS[read]
    x = torch.tensor(X, requires_grad=True)
    w = torch.tensor(X[::-1].copy(), requires_grad=True)
    f = lambda x: (x * w).sin() * (x**3).sum()  # noqa: E731
    got = take(eg.jacobian(f, x, create_graph=True))
    want = expected(own(f, x, create_graph=True))
    torch.testing.assert_close(got, want)
    seed = torch.linspace(1, 2, got.numel(), dtype=torch.float64).reshape(got.shape)
    for one, other in zip(torch.autograd.grad(got, (x, w), seed), torch.autograd.grad(want, (x, w), seed), strict=True):
        torch.testing.assert_close(one, other)
    assert not take(eg.jacobian(f, x)).requires_grad
    assert eg.jacobian(f, x, create_graph=True).value.requires_grad
    assert not eg.jacobian(f, x).value.requires_grad


def test_third_derivatives_through_a_hessian_of_pytorch():
    x = torch.tensor(X, requires_grad=True)
    for read in (lambda H: H[2, :].sum(), lambda H: H[:, 2].sum(), lambda H: H.diagonal()[2]):
        H = eg.hessian(lambda x: (x**4).sum(), x, create_graph=True)
        np.testing.assert_allclose(torch.autograd.grad(read(H), x)[0], [0, 0, 24 * X[2], 0])


@pytest.mark.parametrize("read", ["entry", "row", "rows", "column", "columns", "diagonal", "product"])
def test_reads_inside_a_users_tape_differentiate_if_asked(read):
    x = TENSORFLOW.tensor(X)
    take, expected = READS[read]
    for create_graph in (True, False):
        with tf.GradientTape() as tape:
            tape.watch(x)
            got = tf.reduce_sum(take(eg.jacobian(lambda x: x**3, x, create_graph=create_graph)))
        gradient = tape.gradient(got, x)
        if create_graph:
            small = np.sum(expected(np.diag(3 * X**2)))
            np.testing.assert_allclose(got, small)
            step = [np.sum(expected(np.diag(3 * (X + 1e-6 * unit) ** 2))) - small for unit in np.eye(4)]
            np.testing.assert_allclose(gradient, np.array(step) / 1e-6, atol=1e-4)
        else:
            assert gradient is None


def branching(fw, x):
    if fw.sum(x) > 0:
        return curved(fw, x)
    return x * 0


@pytest.mark.parametrize("how", ["plain", "compiled by XLA", "without AutoGraph"])
def test_reads_inside_a_function_of_tensorflow(how):
    options = {"compiled by XLA": {"jit_compile": True}, "without AutoGraph": {"autograph": False}}.get(how, {})

    def f(x):
        return curved(TENSORFLOW, x) if how == "without AutoGraph" else branching(TENSORFLOW, x)

    @tf.function(**options)
    def outer(x):
        J = eg.jacobian(f, x)
        H = eg.hessian(lambda x: tf.reduce_sum(x**3), x)
        return [read(J) for read, _ in READS.values()], eg.grad(f, x, of="output[1]"), H[1, :], H.diagonal()

    reads, gradient, row, diagonal = outer(TENSORFLOW.tensor(X))
    for got, (name, (_, expected)) in zip(reads, READS.items(), strict=True):
        np.testing.assert_allclose(got, expected(WHOLE), rtol=1e-9, atol=1e-12, err_msg=name)
    np.testing.assert_allclose(gradient, WHOLE[1])
    np.testing.assert_allclose(row, [0, 6 * X[1], 0, 0])
    np.testing.assert_allclose(diagonal, 6 * X)


def test_reads_inside_transformations_of_jax():
    def reads(x):
        J = eg.jacobian(lambda x: curved(JAX, x), x)
        H = eg.hessian(lambda x: jnp.sum(x**3), x)
        return [read(J) for read, _ in READS.values()], H.diagonal()

    for transform in (jax.jit, lambda f: lambda x: jax.tree.map(lambda y: y[1], jax.vmap(f)(jnp.stack([x + 1, x])))):
        got, diagonal = transform(reads)(JAX.tensor(X))
        for read, (name, (_, expected)) in zip(got, READS.items(), strict=True):
            np.testing.assert_allclose(read, expected(WHOLE), rtol=1e-9, atol=1e-12, err_msg=name)
        np.testing.assert_allclose(diagonal, 6 * X)
    for wrap in (lambda f: f, jax.jit):
        gradient = jax.grad(wrap(lambda x: eg.grad(lambda x: jnp.sum(x**3), x, wrt="x[2]")))(JAX.tensor(X))
        np.testing.assert_allclose(gradient, [0, 0, 6 * X[2], 0])


def test_reads_inside_a_function_compiled_by_pytorch():
    torch.compiler.reset()

    def outer(x):
        J = eg.jacobian(lambda x: curved(TORCH, x * 1.0), x * 1.0)
        one = eg.grad(lambda x: (x**3).sum(), x, wrt="x[2]")
        return J[1, :] * 2, J[:, 2] + 1, J.diagonal(), J @ x, one

    row, column, diagonal, product, one = torch.compile(outer, backend="aot_eager")(torch.tensor(X))
    np.testing.assert_allclose(row, WHOLE[1] * 2)
    np.testing.assert_allclose(column, WHOLE[:, 2] + 1)
    np.testing.assert_allclose(diagonal, WHOLE.diagonal())
    np.testing.assert_allclose(product, WHOLE @ X)
    assert one.item() == 3 * X[2] ** 2


def test_a_function_that_is_itself_compiled(fw):
    f = fw.jit(lambda x: curved(fw, x))
    check(fw, eg.jacobian(f, fw.tensor(X)), WHOLE)
    H = eg.hessian(fw.jit(lambda x: fw.sum(x**3)), fw.tensor(X))
    np.testing.assert_allclose(fw.numpy(H.diagonal()), 6 * X)
    np.testing.assert_allclose(fw.numpy(f(fw.tensor(X))), np.sin(X) * (X**3).sum())


def test_gradients_inside_the_function(fw):
    def f(x):
        return eg.grad(lambda x: fw.sum(x**4), x, create_graph=True) * x[0]

    expected = np.diag(12 * X**2 * X[0]) + np.outer(4 * X**3, [1, 0, 0, 0])
    check(fw, eg.jacobian(f, fw.tensor(X)), expected)
