"""Gradients are judged at numbers of every size: none of them is an error, and none makes a right gradient differ."""

import math

import jax
import numpy as np
import pytest
import tensorflow as tf
import torch

import elementgrad as eg
from tests.support.frameworks import JAX, TENSORFLOW, TORCH
from tests.support.operations import OPS

INF, NAN = math.inf, math.nan
MODULES = {"torch": torch, "tensorflow": tf.math, "jax": jax.numpy}
FLOOR = {"torch": torch.floor, "tensorflow": tf.floor, "jax": jax.numpy.floor}
NOT_FINITE = "the value is not finite, and cannot be varied"
NO_VALUES = "the function has no finite values nearby"
STEPS = "the function changes in steps there, so differences say nothing"
STEEPER = "the slope grows without bound as the step size gets smaller"
LOST = "the slope is lost in the rounding of the value, which is so much larger"
UNSETTLED = "differences with neighbouring step sizes do not agree"


def part(share, y, o):
    """y with its gradient multiplied by a number."""
    return o.stop(y) + share * (y - o.stop(y))


def weighed(o, x):
    e = o.exp(x)
    return e / o.sum(e)


@pytest.mark.parametrize("share", [1, 5])
@pytest.mark.parametrize("large", [1e16, 1e30])
def test_a_slope_that_is_lost_in_the_value_is_undecided(fw, large, share):
    o = OPS[fw.name]
    found = eg.check(lambda x: o.sum(part(share, x, o)), fw.tensor([large, 1.0]), wrt="x[1]")
    assert (found.verdict, found.undecided[0].why) == ("undecided", LOST)


@pytest.mark.parametrize("odd", [-INF, INF, NAN])
def test_an_element_that_is_not_finite_is_undecided_and_the_others_are_checked(fw, odd):
    o = OPS[fw.name]
    f = (lambda x: weighed(o, x)) if odd == -INF else (lambda x: x * x)
    found = eg.check(f, fw.tensor([0.5, -1.25, odd]), of="output[:2]")
    assert {entry.wrt for entry in found.undecided} == {"x[2]"}
    assert {entry.why for entry in found.undecided} == {NOT_FINITE}
    assert (found.verdict, len(found.entries)) == ("undecided", 6)
    assert eg.check(f, fw.tensor([0.5, -1.25, odd]), of="output[:2]", wrt="x[:2]")


RIGHT = {
    "float max": (lambda m, o, x: 0.25 * x, 1.7e308),
    "huge": (lambda m, o, x: x * x, 1e150),
    "denormal": (lambda m, o, x: 3 * x + 1, 5e-324),
    "tiny square": (lambda m, o, x: x * x, 1e-30),
    "tiny root": (lambda m, o, x: m.sqrt(x), 1e-30),
    "tiny kink": (lambda m, o, x: o.abs(x), -1e-30),
    "tiny beside one": (lambda m, o, x: m.exp(-o.abs(x)), 1e-30),
    "tiny values": (lambda m, o, x: 1e-30 * m.sin(x), 0.5),
    "huge values": (lambda m, o, x: 1e30 * m.sin(x), 0.5),
    "exact zero": (lambda m, o, x: o.stop(-1e-17 * x) + 1e-17 * x, 0.5),
    "sum of shares": (lambda m, o, x: (o.exp(x) + o.exp(2 * x)) / (o.exp(2 * x) + o.exp(x)), 0.5),
}


UNSEEN = {"exact zero", "sum of shares", "tiny beside one"}
"""Of these, differences see too little to tell a wrong gradient."""


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_gradient_agrees_at_numbers_of_every_size(fw, name):
    f, at = RIGHT[name]
    o, m = OPS[fw.name], MODULES[fw.name]
    found = eg.check(lambda x: f(m, o, x), fw.tensor(at))
    assert found.verdict == "agrees", found
    assert all(0 < entry.bound < INF for entry in found.entries)


@pytest.mark.parametrize(
    "name", [name for name in RIGHT if name not in ("denormal", "exact zero", "sum of shares", "tiny beside one")]
)
@pytest.mark.parametrize("share", [1.01, -1.0, 0.0])
def test_a_wrong_gradient_never_agrees_there(name, share):
    f, at = RIGHT[name]
    found = eg.check(lambda x: part(share, f(torch, OPS["torch"], x), OPS["torch"]), TORCH.tensor(at))
    assert found.verdict == "differs", found


def test_a_transposed_gradient_differs(fw):
    o = OPS[fw.name]
    transposed = {"torch": torch.t, "tensorflow": tf.transpose, "jax": jax.numpy.transpose}[fw.name]
    found = eg.check(lambda x: o.stop(x - transposed(x)) + transposed(x), fw.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert {entry.wrt for entry in found.mismatches} == {"x[0, 1]", "x[1, 0]"}


def test_single_precision_tells_a_hundredth():
    single = lambda x: (x.float() * 3).sin()  # noqa: E731
    x = torch.tensor([0.5, -1.25, 2.0])
    assert eg.check(single, x)
    found = eg.check(lambda x: part(1.01, single(x), OPS["torch"]), x, wrt="x[1:]", of="output[1:]")
    assert (found.dtype, {entry.wrt for entry in found.mismatches}) == ("float32", {"x[1]", "x[2]"})


@pytest.mark.parametrize("steps", [1e2, 1e3, 1e5, 1e8, 1e11])
def test_a_flat_gradient_on_a_staircase_is_no_mismatch(fw, steps):
    edges = np.array([0.5, 1 + 1e-5, 3 - 1e-6, 3.3]) / steps + 0.7
    floor = FLOOR[fw.name]
    found = eg.check(lambda x: fw.sum(floor(x * steps) / steps), fw.tensor(edges))
    assert not found.mismatches
    assert {entry.why for entry in found.undecided} <= {STEPS, UNSETTLED}
    assert found.undecided or steps < 1e5


def masked(m, o, x):
    chosen = m.where if m is not tf.math else tf.where
    return chosen(x > 1, m.log(x - 1), 0 * o.stop(x))


UNDECIDED = {
    "no number": (lambda m, o, x: m.sqrt(x), -1.0, NO_VALUES),
    "infinite": (lambda m, o, x: 1 / (x * 0), 1.0, NO_VALUES),
    "root at zero": (lambda m, o, x: m.sqrt(x), 0.0, STEEPER),
    "logarithm of a slope": (lambda m, o, x: 1 + x * m.log(x), 1e-30, STEEPER),
    "fast waves": (lambda m, o, x: m.sin(1e14 * x), 0.3, UNSETTLED),
}


@pytest.mark.parametrize("name", UNDECIDED)
def test_what_differences_cannot_see_is_undecided(fw, name):
    f, at, why = UNDECIDED[name]
    found = eg.check(lambda x: f(MODULES[fw.name], OPS[fw.name], x), fw.tensor(at))
    assert (found.verdict, found.entries[0].why) == ("undecided", why), found


def test_a_gradient_that_is_no_number_differs_where_the_values_are(fw):
    found = eg.check(lambda x: masked(MODULES[fw.name], OPS[fw.name], x), fw.tensor(0.5))
    (entry,) = found.entries
    if math.isnan(entry.gradient):
        assert (found.verdict, entry.difference) == ("differs", 0.0), found
    else:
        assert found


@pytest.mark.parametrize("size", [1e10, 1e-30])
def test_an_activation_is_moved_by_its_own_size(fw, size):
    root = MODULES[fw.name].sqrt
    x = fw.tensor([1.0, 2.0])
    o = OPS[fw.name]
    assert eg.check(lambda x: root(eg.tag(x * size, "h")), x, of="output[0]", wrt="h[0]")
    found = eg.check(lambda x: part(1.01, root(eg.tag(x * size, "h")), o), x, of="output[0]", wrt="h[0]")
    assert found.verdict == "differs", found


def test_numbers_that_the_function_refuses_are_left_out(fw):
    def f(x):
        if fw is not JAX and float(fw.numpy(x)[0]) > 1:
            raise ValueError("no probability")
        return x**2 if fw is not JAX else jax.numpy.where(x > 1, NAN, x**2)

    found = eg.check(f, fw.tensor([1.0, 0.5]), of="output[0]")
    assert found.verdict == "agrees", found


def test_real_eigenvalues_agree():
    x = torch.randn(3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = eg.check(torch.linalg.eigvals, x + x.T)
    assert (found.verdict, min(entry.bound for entry in found.entries) > 0) == ("agrees", True), found


def test_forward_rules_are_checked_where_there_is_no_reverse_one():
    step = lambda carry: (carry[0] + 1, jax.numpy.sin(carry[1]) * 2)  # noqa: E731
    f = lambda x: jax.lax.while_loop(lambda carry: carry[0] < 3, step, (0, x))[1]  # noqa: E731
    assert eg.check(f, JAX.tensor([0.3, 0.7]))


@pytest.mark.parametrize("fw", [TENSORFLOW, JAX], ids=lambda fw: fw.name)
def test_numbers_that_are_traced_cannot_be_checked(fw):
    def f(x):
        eg.check(lambda x: x * x, x)
        return x

    with pytest.raises(eg.TracedError, match="numbers of what is checked cannot be read"):
        fw.jit(f)(fw.tensor([1.0]))


def test_sparse_values_cannot_be_checked_and_half_complex_ones_can():
    with pytest.raises(eg.TracedError, match="give dense tensors"):
        eg.check(lambda x: x.to_sparse(), TORCH.tensor([1.0]))
    assert eg.check(lambda x: x.chalf(), torch.tensor([0.5])).verdict == "agrees"
