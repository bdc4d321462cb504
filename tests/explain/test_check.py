"""Entries of a derivative against differences of values, on every framework."""

import jax
import numpy as np
import pytest
import tensorflow as tf
import torch
from torch import nn

import elementgrad as eg
from tests.support.frameworks import TORCH
from tests.support.operations import OPS

POINT = [0.5, -1.25, 2.0]
RIGHT = {
    "smooth": lambda o, x: o.tanh(x) * o.sum(x**2),
    "at a kink": lambda o, x: o.abs(x - 0.5),
    "matrices": lambda o, x: o.exp(x[:, None] * x[None, :]),
}


@pytest.mark.parametrize("name", RIGHT)
def test_entries_that_are_right_agree(fw, name):
    o = OPS[fw.name]
    found = eg.check(lambda x: RIGHT[name](o, x), fw.tensor(POINT))
    assert found, found
    assert (found.mismatches, found.dtype) == ([], "float64")
    assert found.diagnosis is None
    assert found.operation is None
    assert all(abs(entry.gradient - entry.difference) <= 1e-6 or name == "at a kink" for entry in found.entries)
    assert "agree with differences in float64, which are off by at most" in str(found)


def test_single_precision_is_checked_in_double_where_the_function_accepts_it(fw):
    found = eg.check(lambda x: fw.sum(x**3), fw.tensor(POINT, "float32"), wrt="x[1]")
    (entry,) = found.entries
    assert found
    assert found.dtype == "float64"
    assert entry.bound < 1e-6
    np.testing.assert_allclose(entry.difference, 3 * 1.25**2, rtol=1e-6)


def test_a_function_of_its_own_precision_is_checked_in_that():
    found = eg.check(lambda x: (x.float() * 3).sin(), torch.tensor(POINT))
    assert found
    assert found.dtype == "float32"
    assert 1e-6 < max(entry.bound for entry in found.entries) < 1e-2
    assert eg.check(lambda x: x.half() ** 2, torch.tensor(POINT))


def wrong(fw):
    if fw is TORCH:

        class Wrong(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.sin()

            @staticmethod
            def backward(ctx, g):
                return 2 * g

        return Wrong.apply
    if fw.name == "tensorflow":

        @tf.custom_gradient
        def wrong(x):
            return tf.sin(x), lambda g: 2 * g

        return wrong

    @jax.custom_vjp
    def wrong(x):
        return jax.numpy.sin(x)

    wrong.defvjp(lambda x: (wrong(x), None), lambda _, g: (2 * g,))
    return wrong


def test_a_wrong_rule_is_told(fw):
    f = wrong(fw)
    found = eg.check(lambda x: f(x), fw.tensor(POINT), of="output[1]", wrt="x[:2]")
    assert not found
    assert len(found.entries) == 2
    (entry,) = found.mismatches
    assert (entry.of, entry.wrt, entry.gradient) == ("output[1]", "x[1]", 2.0)
    np.testing.assert_allclose(entry.difference, np.cos(-1.25), rtol=1e-8)
    assert str(found).startswith("1 of 2 entries differ from differences in float64.\noutput[1] by x[1]: gradient 2, ")
    assert (found.operation.lower(), found.diagnosis.cause) == ("wrong", "custom-rule")


def test_a_rule_that_passes_straight_through_is_told_by_its_cut(fw):
    o = OPS[fw.name]
    found = eg.check(lambda x: x + o.stop(o.round(x) - x), fw.tensor([0.2, 1.7]))
    assert not found
    assert found.operation in ("detach", "stop_gradient")
    assert (found.diagnosis.verdict, found.diagnosis.cause) == ("mismatch", "detached")


PARTING = {
    "register_hook": (lambda x: hooked(x.exp()), "hook"),
    "mul_": (lambda x: through_data(x * 1), "modified-through-data"),
}


def hooked(h):
    h.register_hook(lambda g: 3 * g)
    return h


def through_data(h):
    y = h**2
    h.data.mul_(3)
    return y


@pytest.mark.parametrize("operation", PARTING)
def test_a_mismatch_names_the_operation(operation):
    f, cause = PARTING[operation]
    found = eg.check(f, torch.tensor([0.3, 1.7]))
    assert (found.operation, found.diagnosis.cause) == (operation, cause), found
    assert found.diagnosis.verdict == "mismatch"
    assert f"at {operation}" in str(found)


def test_parameters_and_activations_of_a_model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for wrt in ("0.weight[1]", "0", "1[2]", "input", "2.bias"):
        assert eg.check(model, torch.tensor(POINT), of="output[1]", wrt=wrt), wrt
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
