"""Fallbacks of reads: without rules for batches, for a direction, for attention."""

import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf
import torch
from torch import nn
from torch.nn import functional

import elementgrad as eg
from tests.read.test_contexts import READS, X, check, own
from tests.support.frameworks import JAX, TENSORFLOW, TORCH
from tests.support.operations import OPS


def function(backward, forward=lambda x: x**2, **more):
    """An autograd Function with a backward that is a function of what was saved, and of the gradient."""

    def saving(ctx, x):
        ctx.save_for_backward(x)
        return forward(x)

    methods = {
        "forward": staticmethod(saving),
        "backward": staticmethod(lambda ctx, g: backward(*ctx.saved_tensors, g)),
    }
    return type("Function", (torch.autograd.Function,), {**methods, **more}).apply


BACKWARDS = {
    "plain": lambda x, g: 2 * x * g,
    "item": lambda x, g: 2 * x * g if g.abs().sum().item() >= 0 else None,
    "numpy": lambda x, g: torch.from_numpy(2 * x.numpy() * g.numpy()),
    "branch": lambda x, g: 2 * x * g if g.sum() != 0 else torch.zeros_like(x),
    "in place": lambda x, g: g.clone().mul_(2 * x),
}


@pytest.mark.parametrize("backward", BACKWARDS)
def test_rules_of_pytorch_that_cannot_be_stacked_or_run_forward(backward):
    f = function(BACKWARDS[backward])
    J = eg.jacobian(lambda x: f(x) * x.sum(), torch.tensor(X))
    check(TORCH, J, np.diag(2 * X * X.sum()) + np.outer(X**2, np.ones(4)))
    transposed = backward in ("plain", "item", "in place")  # the other rules have no derivatives
    assert ("no forward sweeps: " in str(J.plan(slice(None), 0))) is not transposed
    assert J.plan(slice(None), 0).mode == ("forward" if transposed else "reverse")
    if backward in ("item", "numpy"):
        assert "one sweep after another: " in str(J.plan())


@pytest.mark.parametrize("register", ["always", "if gradients are on"])
def test_gradient_hooks_inside_the_function_hold_for_every_read(register):
    def f(x):
        h = x.sin()
        if register == "always" or h.requires_grad:
            h.register_hook(lambda g: g * 10)
        return h * x.sum()

    x = torch.tensor(X, requires_grad=True)
    check(TORCH, eg.jacobian(f, x), own(f, x).numpy())


def test_a_function_with_a_state_is_read_where_it_was_evaluated():
    runs = []

    def f(x):
        runs.append(1)
        return x**2 * len(runs)

    J = eg.jacobian(f, torch.tensor(X))
    np.testing.assert_allclose(J.value, X**2)
    check(TORCH, J, np.diag(2 * X))


def test_fused_attention_has_second_derivatives_and_columns():
    x = torch.randn(1, 1, 3, 4, generator=torch.Generator().manual_seed(0))
    attend = lambda x: functional.scaled_dot_product_attention(x, x, x)  # noqa: E731
    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
        full = own(attend, x).numpy()
        second = torch.autograd.functional.hessian(lambda x: (attend(x) ** 2).sum(), x).numpy()
    close = {"rtol": 1e-4, "atol": 1e-5}
    np.testing.assert_allclose(eg.jacobian(attend, x)[:, (0, 0, 1, 2)], full[..., 0, 0, 1, 2], **close)
    np.testing.assert_allclose(eg.jacobian(attend, x).dense(), full, **close)
    H = eg.hessian(lambda x: (attend(x) ** 2).sum(), x)
    np.testing.assert_allclose(H[(0, 0, 1, 2), :], second[0, 0, 1, 2], **close)
    np.testing.assert_allclose(H[:, (0, 0, 1, 2)], second[..., 0, 0, 1, 2], **close)
    np.testing.assert_allclose(H.dense(), second, **close)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_a_recurrent_network_has_columns(kind):
    torch.manual_seed(0)
    cell = kind(2, 3).double()
    x = torch.randn(4, 2, dtype=torch.float64)
    J = eg.jacobian(lambda x: cell(x)[0], x)
    full = own(lambda x: cell(x)[0], x)
    torch.testing.assert_close(J[:, (1, 1)], full[..., 1, 1])
    torch.testing.assert_close(J.dense(), full)


def by_numpy(x):
    return tf.custom_gradient(lambda x: (x**2, lambda g: tf.constant(2 * x.numpy() * g.numpy())))(x)


def looped(x):
    return tf.while_loop(lambda i, _: i < 2, lambda i, y: (i + 1, y * x), (0, x))[1]


def mapped(x):
    return tf.map_fn(lambda one: one**2, x)


def squared_if_positive(x):
    if tf.reduce_sum(x) > 0:
        return x**2
    return x


TENSORFLOW_FUNCTIONS = {
    "a rule that calls .numpy()": (by_numpy, lambda x: x**2),
    "tf.while_loop": (looped, lambda x: x**3),
    "tf.while_loop in a graph": (tf.function(looped), lambda x: x**3),
    "tf.map_fn": (mapped, lambda x: x**2),
    "tf.map_fn in a graph": (tf.function(mapped), lambda x: x**2),
    "a Python branch": (squared_if_positive, lambda x: x**2),
    "an AutoGraph branch": (tf.function(squared_if_positive), lambda x: x**2),
}


@pytest.mark.parametrize("name", TENSORFLOW_FUNCTIONS)
def test_functions_of_tensorflow_that_are_hard_to_stack(name):
    f, scalar = TENSORFLOW_FUNCTIONS[name]
    slope = [(scalar(x + 1e-6) - scalar(x - 1e-6)) / 2e-6 for x in X]
    J = eg.jacobian(lambda x: tf.ensure_shape(f(x), [4]), TENSORFLOW.tensor(X))
    for name in READS:
        read, expected = READS[name]
        np.testing.assert_allclose(read(J), expected(np.diag(slope)), rtol=1e-6, atol=1e-9, err_msg=name)


def reverse_only(x):
    f = jax.custom_vjp(lambda x: x**2)
    f.defvjp(lambda x: (x**2, x), lambda x, g: (2 * x * g,))
    return f(x)


def forward_only(x):
    return jax.lax.while_loop(lambda state: state[0] < 2, lambda state: (state[0] + 1, state[1] * x), (0, jnp.ones(4)))[
        1
    ]


def called_back(x):
    """Neither the function nor its rule can be stacked."""

    def back(f, *xs):
        return jax.pure_callback(f, jax.ShapeDtypeStruct((4,), jnp.float64), *xs, vmap_method=None)

    f = jax.custom_vjp(lambda x: back(lambda x: np.asarray(x) ** 2, x))
    f.defvjp(lambda x: (f(x), x), lambda x, g: (back(lambda x, g: 2 * np.asarray(x) * np.asarray(g), x, g),))
    return f(x)


@pytest.mark.parametrize("f", [reverse_only, forward_only, called_back], ids=lambda f: f.__name__)
def test_functions_of_jax_with_rules_for_one_direction(f):
    J = eg.jacobian(f, JAX.tensor(X))
    check(JAX, J, np.diag(2 * X))
    if f is not reverse_only:
        assert ("no reverse sweeps: " if f is forward_only else "no forward sweeps: ") in str(J.plan())


class Ruleless(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1


RULELESS = {
    "torch": Ruleless.apply,
    "tensorflow": lambda x: tf.raw_ops.Bincount(arr=[0], size=4, weights=x[:1]),
    "jax": lambda x: jax.pure_callback(np.sin, jax.ShapeDtypeStruct((4,), jnp.float64), x, vmap_method="sequential"),
}


@pytest.mark.parametrize("read", ["row", "column", "whole", "product", "row product"])
def test_a_function_without_rules_in_both_directions_is_an_error(fw, read):
    with pytest.raises(eg.FrameworkError, match=f"{fw.name} can differentiate this in no direction: "):
        READS[read][0](eg.jacobian(RULELESS[fw.name], fw.tensor(X)))


def test_a_jacobian_of_40_gb_answers_a_row_a_column_and_a_block(fw):
    count = 100_000
    x = np.arange(count) % 17 + 1.0
    J = eg.jacobian(lambda x: x * OPS[fw.name].flip(x, [0]), fw.tensor(x, "float32"))
    assert "40 GB if dense" in repr(J)
    row, column = np.zeros(count), np.zeros(count)
    row[[7, -8]] = x[-8], x[7]
    column[[7, -8]] = x[-8], x[-8]
    np.testing.assert_array_equal(fw.numpy(J[7, :]), row)
    np.testing.assert_array_equal(fw.numpy(J[:, 7]), column)
    block = np.diag(x[::-1][:10])
    np.testing.assert_array_equal(fw.numpy(J[:10, :10]), block)
    np.testing.assert_array_equal(fw.numpy(J[:10, count - 10 :]), np.diag(x[:10])[:, ::-1])


@pytest.mark.parametrize(
    ("module", "slope"),
    [
        (nn.Identity(), [1, 1, 1]),
        (nn.Sequential(), [1, 1, 1]),
        (nn.Dropout(0.5).eval(), [1, 1, 1]),
        (nn.ReLU(inplace=True), [0, 1, 1]),
        (
            nn.Sequential(nn.Identity(), nn.ReLU(inplace=True), nn.Unflatten(0, (3, 1))),
            [0, 1, 1],
        ),
    ],
    ids=str,
)
def test_modules_of_pytorch_that_hand_their_input_on_or_write_to_it(module, slope):
    x = torch.tensor([-1.0, 2.0, 3.0])
    J = eg.jacobian(module, x)
    assert J.dense().reshape(3, 3).tolist() == np.diag(slope).tolist()
    assert J.sparse().to_dense().tolist() == np.diag(slope).tolist()
    assert x.tolist() == [-1, 2, 3]
    if slope[0]:
        assert J.value.data_ptr() != x.data_ptr()


def test_threads_take_turns_in_forward_sweeps_of_pytorch():
    """PyTorch has one level of dual numbers for all threads."""

    class ForwardOnly(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            time.sleep(0.001)  # so that other threads come by
            ctx.save_for_forward(x)
            return x**2

        @staticmethod
        def jvp(ctx, tangent):
            return 2 * ctx.saved_tensors[0] * tangent

    x = torch.arange(1.0, 9)
    J = eg.jacobian(lambda x: torch.sin(ForwardOnly.apply(x)), x)

    def read(number):
        if number % 3 == 2:
            return eg.grad(lambda x: (x**2).sum(), x)[number % 8]
        return J[:, number % 8][number % 8] if number % 3 else eg.jacobian(torch.tanh, x)[:, :2][1, 1]

    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(read, range(96)))
    slopes = (1 - torch.tanh(x[1]) ** 2).expand(8), 2 * x * torch.cos(x**2), 2 * x
    expected = [slopes[number % 3][number % 8] for number in range(96)]
    torch.testing.assert_close(torch.stack(found), torch.stack(expected))


def test_a_gradient_of_one_element_frees_the_graph_of_its_own_evaluation():
    kept = []

    def f(x):
        kept.append(x.exp())
        return kept[-1] * 2

    eg.grad(f, torch.ones(3), of="output[1]")
    with pytest.raises(RuntimeError, match="freed"):
        kept[-1].grad_fn._saved_result  # noqa: B018


def test_graphs_around_a_function_outlive_the_read_of_an_element():
    w = torch.tensor([0.5, 1.0, 2.0], requires_grad=True)
    doubled = (2 * w).exp()
    x = torch.ones(3)
    first = eg.grad(lambda x: (doubled * x.exp()).tanh().cumsum(0), x, of="output[1]")
    second = eg.grad(lambda w: doubled * w.exp(), w, of="output[1]")
    torch.testing.assert_close(second, (doubled * w.exp() * torch.tensor([0, 1.0, 0])).detach())
    z = torch.ones(3, requires_grad=True)
    output = (doubled.detach() * z.exp()).tanh().cumsum(0)[1]
    torch.testing.assert_close(first, torch.autograd.grad(output, z)[0])
    doubled.sum().backward()
    torch.testing.assert_close(w.grad, 2 * doubled.detach())


def test_several_elements_share_an_evaluation():
    x = torch.tensor([0.5, 1.0, 2.0])
    both = eg.grad(lambda x: x.exp().tanh(), x, of={"a": "output[0]", "b": "output[2]"})
    slope = x.exp() / x.exp().cosh() ** 2
    torch.testing.assert_close(both["a"], slope * torch.tensor([1.0, 0, 0]))
    torch.testing.assert_close(both["b"], slope * torch.tensor([0, 0, 1.0]))
