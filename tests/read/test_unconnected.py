"""Missing gradients and special cases: batches of examples, complex numbers, dtypes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import elementgrad as eg
from tests.read.test_read import assert_same
from tests.support import made
from tests.support.frameworks import JAX, TORCH
from tests.support.operations import OPS, point

UNCONNECTED = {
    "cut": lambda o, x: o.stop(x) * 2,
    "unused": lambda o, x: o.numbers(3),
    "cut inside a compiled function": lambda o, x: o.framework.jit(lambda x: o.stop(x) * 2)(x),
    "compared": lambda o, x: o.where(x > 0, o.numbers(3), o.numbers(3) * 2),
}


@pytest.mark.parametrize("cut", UNCONNECTED)
def test_unconnected_is_an_error_unless_zeros_are_accepted(fw, cut):
    f, x = functools.partial(UNCONNECTED[cut], OPS[fw.name]), fw.tensor([1.0, 2.0, 3.0])
    reads = {
        "row": lambda J: J[0, :],
        "column": lambda J: J[:, 0],
        "entries": lambda J: J.entries([0, 1], [1, 2]),
        "diagonal": lambda J: J.diagonal(),
        "whole": lambda J: J.dense(),
        "product": lambda J: J @ fw.tensor([1.0, 1.0, 1.0]),
        "products": lambda J: J @ fw.tensor(np.ones((3, 2))),
        "row product": lambda J: np.ones(3) @ J,
    }
    J, zeros = eg.jacobian(f, x), eg.jacobian(f, x, unconnected="zero")
    for name, read in reads.items():
        with pytest.raises(eg.UnconnectedError, match=rf"output does not depend on x in {fw.name}'s graph"):
            read(J)
        assert not fw.numpy(read(zeros)).any(), name
    with pytest.raises(eg.UnconnectedError, match='pass unconnected="zero" to get zeros instead'):
        eg.grad(f, x, of="output[0]")
    assert_same(fw, eg.grad(f, x, of="output[:2]", unconnected="zero"), np.zeros((2, 3)))


def test_one_of_several_inputs_may_be_unconnected(fw):
    f = lambda x, y: fw.sum(x**2)  # noqa: E731
    x = fw.tensor([1.0, 2.0])
    with pytest.raises(eg.UnconnectedError, match="output does not depend on y"):
        eg.grad(f, x, x, wrt=["x", "y"])
    first, second = eg.grad(f, x, x, wrt=["x", "y"], unconnected="zero")
    assert_same(fw, first, [2, 4])
    assert_same(fw, second, [0, 0])


def test_unconnected_inside_a_scan_of_jax():
    def f(x):
        return jax.lax.scan(lambda c, a: (c + jax.lax.stop_gradient(a), c * 2.0), jnp.zeros(()), x)[1]

    x = JAX.tensor([1.0, 2.0, 3.0])
    with pytest.raises(eg.UnconnectedError, match="output does not depend on x"):
        eg.jacobian(f, x)[1, :]
    with pytest.raises(eg.UnconnectedError, match="output does not depend on x"):
        eg.jacobian(jax.jit(f), x)[:, 1]


def test_a_linear_function_has_no_second_derivative(fw):
    H = eg.hessian(lambda x: fw.sum(3 * x), fw.tensor([1.0, 2.0]))
    for read in (lambda: H[0, 1], lambda: H[:, 0], lambda: H.diagonal(), lambda: H @ fw.tensor([1.0, 1.0])):
        with pytest.raises(eg.UnconnectedError, match="the gradient of output does not depend on x"):
            read()
    assert_same(
        fw, eg.hessian(lambda x: fw.sum(3 * x), fw.tensor([1.0, 2.0]), unconnected="zero").dense(), np.zeros((2, 2))
    )


def test_rounding_is_flat_on_pytorch_and_unconnected_elsewhere(fw):
    f = lambda x: OPS[fw.name].round(x)  # noqa: E731
    J = eg.jacobian(f, fw.tensor([1.2, 2.7]))
    for read in (lambda: J[0, :], lambda: J[:, 0], lambda: J.dense()):
        if fw is TORCH:
            assert not fw.numpy(read()).any()
        else:
            with pytest.raises(eg.UnconnectedError):
                read()


CROWD = point(5, 3)


def test_a_batch_has_one_jacobian_per_example(fw):
    o = OPS[fw.name]
    f = lambda x: o.tanh(x) @ o.numbers(3, 2) * o.sum(x**2, axis=1, keepdims=True)  # noqa: E731
    J = eg.jacobian(f, fw.tensor(CROWD), batch=True)
    each = np.stack([fw.numpy(eg.jacobian(f, fw.tensor(row[None])).dense())[0, :, 0] for row in CROWD])
    assert J.shape == (5, 2, 3)
    assert_same(fw, J.dense(), each)
    assert_same(fw, J[1, :], each[:, 1])
    assert_same(fw, J[:, 2], each[:, :, 2])
    assert_same(fw, J[1, 2], each[:, 1, 2])
    assert_same(fw, J[[1, 1, 0], [0, 2]], each[:, [1, 1, 0]][:, :, [0, 2]])
    assert_same(fw, J.entries([0, 1], [2, 0]), each[:, [0, 1], [2, 0]])
    assert_same(fw, J.value, fw.numpy(f(fw.tensor(CROWD))))
    assert_same(fw, J @ fw.tensor(CROWD), np.einsum("bij,bj->bi", each, CROWD))
    assert_same(fw, fw.tensor(CROWD[:, :2]) @ J, np.einsum("bi,bij->bj", CROWD[:, :2], each))
    assert_same(fw, J @ fw.tensor(np.ones((5, 3, 4))), np.einsum("bij,bjk->bik", each, np.ones((5, 3, 4))))
    assert J.plan(0, ...).sweeps == 1
    assert_same(fw, eg.jacobian(f, fw.tensor(CROWD), of="output[1]", wrt="x[1:]", batch=True).dense(), each[:, 1, 1:])
    assert_same(fw, eg.grad(f, fw.tensor(CROWD), of="output[1]", batch=True), each[:, 1])


def test_a_batch_has_one_hessian_per_example(fw):
    o = OPS[fw.name]
    f = lambda x: o.sum(o.exp(x) * x[:, :1], axis=1)  # noqa: E731
    H = eg.hessian(f, fw.tensor(CROWD), batch=True)
    one = lambda row: fw.numpy(eg.hessian(lambda x: fw.sum(f(x)), fw.tensor(row[None])).dense())[0, :, 0]  # noqa: E731
    each = np.stack([one(row) for row in CROWD])
    assert_same(fw, H.dense(), each)
    assert_same(fw, H[0, :], each[:, 0])
    assert_same(fw, H.diagonal(), np.einsum("bii->bi", each))


MIXED = "the examples mix: example .* depend on each other.*leave batch=True out"


@pytest.mark.parametrize(
    "mix",
    [lambda o, x: x - o.mean(x, axis=0, keepdims=True), lambda o, x: o.roll(x, 1, 0), lambda o, x: o.cumsum(x, 0)],
    ids=["normalised", "rolled", "summed up"],
)
def test_examples_that_mix_are_an_error(fw, mix):
    o = OPS[fw.name]
    J = eg.jacobian(lambda x: mix(o, x), fw.tensor(CROWD), batch=True)
    for read in (lambda: J[0, :], lambda: J[:, 0], lambda: J.diagonal(), lambda: J @ fw.tensor(CROWD)):
        with pytest.raises(eg.BatchError, match=MIXED):
            read()
    with pytest.raises(eg.BatchError, match=MIXED):
        eg.grad(lambda x: mix(o, x), fw.tensor(CROWD), of="output[0]", batch=True)
    with pytest.raises(eg.BatchError, match=MIXED):
        eg.hessian(lambda x: o.sum(mix(o, x) ** 2 * x, axis=1), fw.tensor(CROWD), batch=True)[0, 0]


@settings(max_examples=made.counts(30))
@given(st.integers(2, 9).flatmap(lambda n: st.tuples(st.just(n), st.permutations(range(n)))))
def test_any_two_examples_that_mix_are_found(case):
    count, (one, other, *_) = case
    x = torch.ones(count, 2, dtype=torch.float64)

    def f(x):
        y = x.clone()
        y[one] = x[one] * x[other]
        return y

    with pytest.raises(eg.BatchError, match=MIXED):
        eg.jacobian(f, x, batch=True)[0, :]


def test_a_batch_needs_as_many_examples_on_every_side(fw):
    x = fw.tensor(CROWD)
    with pytest.raises(eg.OptionError, match=r"needs as many examples on every side, and there are .*output.*4"):
        eg.jacobian(lambda x: x[:4], x, batch=True)
    with pytest.raises(eg.OptionError, match="output has no axes, so it holds no batch; leave batch=True out"):
        eg.jacobian(lambda x: fw.sum(x), x, batch=True)
    calls = []
    with pytest.raises(eg.OptionError, match="x has no axes, so it holds no batch"):
        eg.jacobian(lambda x: calls.append(1) or x, fw.tensor(1.0), batch=True)
    assert not calls
    assert_same(fw, eg.jacobian(lambda x: x**2, x[:1], batch=True).diagonal(), 2 * CROWD[:1])


def test_a_batch_of_no_examples_has_no_jacobians(fw):
    J = eg.jacobian(lambda x: x**2, fw.tensor(CROWD[:0]), batch=True)
    assert_same(fw, J.dense(), np.zeros((0, 3, 3)))
    assert_same(fw, J[0, :], np.zeros((0, 3)))
    assert_same(fw, J.diagonal(), np.zeros((0, 3)))


COMPLEX = {
    "holomorphic": lambda o, z: z * z,
    "real valued": lambda o, z: o.abs(z) ** 2,
    "conjugate": lambda o, z: o.conj(z) * z[0],
}


def own_pull(fw, f, z, seed):
    if fw is JAX:
        return jax.vjp(f, z)[1](seed)[0]
    if fw is TORCH:
        z = z.clone().requires_grad_()
        return torch.autograd.grad(f(z), z, seed)[0]
    with tf.GradientTape() as tape:
        tape.watch(z)
        y = f(z)
    return tape.gradient(y, z, output_gradients=seed)


@pytest.mark.parametrize("name", COMPLEX)
def test_complex_derivatives_follow_the_reverse_mode_of_the_framework(fw, name):
    f = functools.partial(COMPLEX[name], OPS[fw.name])
    z = fw.tensor([1 + 2j, 3 - 1j, -0.5 + 0.25j], "complex128")
    dtype = "float64" if name == "real valued" else "complex128"
    rows = [fw.numpy(own_pull(fw, f, z, fw.tensor(unit, dtype))) for unit in np.eye(3)]
    J = eg.jacobian(f, z)
    assert_same(fw, J.dense(), rows)
    assert_same(fw, J[1, :], rows[1])
    assert_same(fw, J[:, 1], np.stack(rows)[:, 1])
    assert_same(fw, J.diagonal(), np.diagonal(rows))
    u = np.array([1.0, 2.0, 3.0]) * (1 if dtype == "float64" else 1 + 1j)
    assert_same(fw, fw.tensor(u, dtype) @ J, fw.numpy(own_pull(fw, f, z, fw.tensor(u, dtype))))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_low_precision_stays_what_it_is(fw, dtype):
    x = fw.tensor([1.0, 2.0], dtype)
    J = eg.jacobian(lambda x: x * fw.sum(x * x), x)
    whole = np.array([[7.0, 4.0], [4.0, 13.0]])
    reads = [
        (J.dense(), whole),
        (J[0, :], whole[0]),
        (J[:, 1], whole[:, 1]),
        (J.diagonal(), [7, 13]),
        (J @ x, whole @ [1, 2]),
        (x @ J, whole @ [1, 2]),
        (J @ np.ones(2), whole.sum(1)),
        (J.value, [5, 10]),
        (J[[], :], np.zeros((0, 2))),
        (eg.hessian(lambda x: fw.sum(x * x * x), x)[1, :], [0, 12]),
        (eg.grad(lambda x: fw.sum(x * x), x), [2, 4]),
        (eg.jacobian(lambda x: fw.tensor([1.0], dtype), x, unconnected="zero").dense(), np.zeros((1, 2))),
    ]
    for read, expected in reads:
        assert dtype in str(read.dtype)
        assert_same(fw, read, expected)
