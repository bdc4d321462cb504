"""Where differences decide whether a gradient is right, and where they do not and say so."""

import warnings

import jax
import numpy as np
import pytest
import tensorflow as tf
import torch
from torch import nn

import elementgrad as eg
from elementgrad._explain import probe
from tests.explain.test_check import wrong
from tests.support.frameworks import JAX, TORCH
from tests.support.operations import OPS

HARD = {
    "log": (lambda o, x: o.log(x), 1e-6),
    "sqrt": (lambda o, x: o.sqrt(x), 1e-6),
    "reciprocal": (lambda o, x: 1 / x, 1e-6),
    "x log x": (lambda o, x: x * o.log(x), 1e-9),
    "fast": (lambda o, x: o.sin(1e6 * x), 0.3),
    "edge": (lambda o, x: o.sqrt(1 - x), 1 - 1e-7),
    "large": (lambda o, x: x**2, 1e6),
}
METHODS = {"torch": "to", "jax": "astype"}
MODULES = {"torch": torch, "tensorflow": tf.math, "jax": jax.numpy}


def ops(fw):
    return MODULES[fw.name]


@pytest.mark.parametrize("name", HARD)
def test_a_right_gradient_agrees_where_the_usual_width_is_too_wide(fw, name):
    f, at = HARD[name]
    found = eg.check(lambda x: f(ops(fw), x), fw.tensor([at]))
    assert found.verdict == "agrees", found
    (entry,) = found.entries
    assert entry.bound <= 0.1 * abs(entry.gradient)
    np.testing.assert_allclose(entry.difference, entry.gradient, rtol=1e-3)


@pytest.mark.parametrize("name", ["log", "reciprocal", "fast"])
def test_a_wrong_gradient_differs_there_as_well(name):
    f, at = HARD[name]
    found = eg.check(lambda x: f(torch, x).detach() + 1.3 * (f(torch, x) - f(torch, x).detach()), TORCH.tensor([at]))
    assert found.verdict == "differs", found


def test_other_numbers_each_time_decide_nothing(fw):
    generator = np.random.default_rng(0)
    rule = wrong(fw)
    found = eg.check(lambda x: fw.sum(rule(x)) + float(generator.normal()), fw.tensor([1.0, 2.0]))
    assert (found.verdict, bool(found), found.mismatches) == ("undecided", False, [])
    assert {entry.why for entry in found.undecided} == {"the function returns different values each time"}
    assert str(found).startswith("2 of 2 entries are undecided by differences in float64.\noutput by x[0]: gradient 2,")


def test_a_state_that_the_function_moves_on_decides_nothing():
    weight = nn.Parameter(torch.ones(3), requires_grad=False)

    def f(x):
        weight.add_(1.0)
        return (x * weight).sum()

    assert eg.check(f, torch.ones(3)).verdict == "undecided"


def halved(x):
    return x.detach() + 0.5 * (x - x.detach())


def test_steps_of_a_coarse_dtype_inside_are_no_mismatch():
    verdicts, others = set(), []
    for seed in range(12):
        x = torch.randn(3, 3, generator=torch.Generator().manual_seed(seed))
        verdicts.add(eg.check(lambda x: (x.bfloat16() @ x.bfloat16().T).float().tanh().sum(), x).verdict)
        f = lambda x: (halved(x).bfloat16() @ halved(x).bfloat16().T).float().tanh().sum()  # noqa: E731
        others.append(eg.check(f, x).verdict)
    assert verdicts <= {"agrees", "undecided"}
    assert others.count("differs") > 6


@pytest.mark.parametrize("at", [0.3, 0.7, 1.3])
@pytest.mark.parametrize("factor", [1, 100])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_part_of_lower_precision_does_not_refute_a_right_gradient(fw, at, factor, dtype):
    def cast(x, dtype):
        return tf.cast(x, dtype) if fw.name == "tensorflow" else getattr(x, METHODS[fw.name])(getattr(ops(fw), dtype))

    def f(x):
        return 3 * cast(x, "float64") + factor * cast(ops(fw).tanh(cast(2 * x, dtype)), "float64")

    found = eg.check(f, fw.tensor([at]))
    assert found.verdict in ({"agrees"} if dtype == "float32" else {"agrees", "undecided"}), found


def test_a_wrong_gradient_with_a_part_of_lower_precision_differs():
    found = eg.check(lambda x: 3 * halved(x) + (2 * x).float().tanh().to(x.dtype), torch.tensor([0.3]))
    assert found.verdict == "differs"


def test_a_gradient_straight_through_differs_between_steps():
    x = torch.tensor([0.2, -0.3, 1.7, 5.1])
    found = eg.check(lambda x: (x + (x.round() - x).detach()).sum(), x)
    assert len(found.mismatches) == 4


def parts(fw, z):
    return (ops(fw).real(z), ops(fw).imag(z)) if fw is not TORCH else (z.real, z.imag)


COMPLEX = {
    "imaginary part": lambda fw, z: parts(fw, z)[1] ** 2,
    "holomorphic": lambda fw, z: ops(fw).exp(z),
    "not holomorphic": lambda fw, z: ops(fw).conj(z) * z * z,
}


@pytest.mark.parametrize("name", COMPLEX)
def test_both_parts_of_complex_numbers_are_compared(fw, name):
    z = fw.tensor([1 + 2j, 0.5 - 1j], "complex64")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = eg.check(lambda z: COMPLEX[name](fw, z), z, wrt="z[0]")
    assert (found.verdict, found.dtype) == ("agrees", "float64"), found
    assert {entry.wrt for entry in found.entries} == {"z[0].real", "z[0].imag"}
    assert any(entry.gradient for entry in found.entries if entry.wrt == "z[0].imag")


def test_a_wrong_gradient_of_complex_numbers_differs(fw):
    z = fw.tensor([1 + 2j, 0.5 - 1j], "complex64")
    found = eg.check(lambda z: parts(fw, OPS[fw.name].stop(z) * z)[1], z)
    assert found.verdict == "differs"


def test_complex_numbers_are_not_explained(fw):
    z = fw.tensor([1 + 2j], "complex64")
    with pytest.raises(eg.DtypeError, match="z is complex, and gradients are explained between real tensors only"):
        eg.explain(lambda z: fw.sum(parts(fw, z)[1] ** 2), z)


class Freezes(nn.Module):
    def __init__(self, assign):
        super().__init__()
        self.inner = nn.Linear(3, 2)
        self.assign = assign

    def forward(self, x):
        if self.assign:
            self.inner.weight.requires_grad = False
        else:
            self.inner.weight.requires_grad_(False)
        return self.inner(x).sum()


@pytest.mark.parametrize("assign", [True, False])
def test_a_layer_that_freezes_itself(assign):
    model = Freezes(assign)
    found = eg.check(model, torch.ones(3), wrt="inner.weight[0, 0]")
    assert (found.verdict, found.entries[0].gradient, found.diagnosis.cause) == ("differs", None, "not-tracked")
    diagnosis = eg.explain(model, torch.ones(3), wrt="inner.weight")
    assert (diagnosis.verdict, diagnosis.cause) == ("unconnected", "not-tracked")


def test_a_transform_inside_is_checked():
    cube = torch.func.grad(lambda y: (y**3).sum())
    assert eg.check(lambda x: cube(x).pow(2).sum(), torch.tensor([1.0, 2.0]))


def test_many_slow_runs_are_compiled_where_that_can_be(monkeypatch):
    monkeypatch.setattr(probe, "COMPILE_AFTER", 0.0)
    calls = []

    def f(x, branch):
        calls.append(1)
        return (x**3).sum() if not branch or x[0] > 0 else x.sum()

    counts = []
    for branch in (False, True):
        assert eg.check(f, JAX.tensor([0.5, 1.5, 2.0, 3.0]), branch)
        counts.append(len(calls))
        calls.clear()
    assert counts[0] < 8 < 24 < counts[1]


def test_a_gradient_of_nan_differs_from_a_slope_and_not_from_a_jump():
    found = eg.check(lambda A: torch.linalg.eigh(A)[1], torch.eye(2), of="output[0, 0]")
    # `eigh` reads the lower triangle alone, and the vectors change at once with any element of it.
    assert [entry.wrt for entry in found.mismatches] == ["A[0, 1]"]
    assert {entry.wrt for entry in found.undecided} == {"A[0, 0]", "A[1, 0]", "A[1, 1]"}
    assert found.diagnosis.cause == "singular"
    assert "eigenvalues" in found.diagnosis.fix
