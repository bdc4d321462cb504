"""Functions that are one thing close by and another further off: a verdict holds for both, or there is none."""

import numpy as np
import pytest
import torch

import elementgrad as eg
from tests.support.frameworks import JAX
from tests.support.operations import OPS

TWO = "small step sizes agree with the gradient and large ones with another slope"


@pytest.mark.parametrize("f", [lambda x: x**3 / (x**2 + 1e-16), lambda x: x * abs(x) / (abs(x) + 1e-8)])
def test_what_is_another_slope_within_a_hair_is_no_mismatch(fw, f):
    found = eg.check(lambda x: f(x), fw.tensor([0.0]))
    assert (found.verdict, found.entries[0].gradient) == ("undecided", 0.0), found
    assert found.entries[0].why == TWO


def test_a_kink_near_by_does_not_matter(fw):
    relu = lambda x: OPS[fw.name].abs(x) + x  # noqa: E731
    assert eg.check(relu, fw.tensor([1e-6, -1e-6, 1e-9]))


def inner_gradient(x):
    w = torch.ones(3, requires_grad=True)
    (g,) = torch.autograd.grad((w * x).pow(2).sum(), w, create_graph=True, allow_unused=True)
    return x.sum() if g is None else (g * x).sum()


def test_an_inner_gradient_by_a_tensor_that_the_function_makes():
    found = eg.check(inner_gradient, torch.tensor([1.0, 2.0, 3.0]))
    assert (found.verdict, found.dtype) == ("agrees", "float64")
    np.testing.assert_allclose([entry.gradient for entry in found.entries], [6.0, 24.0, 54.0])


def trained_inside(x):
    w = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([w], lr=0.1)
    (w * x).pow(2).sum().backward(inputs=[w])
    optimizer.step()
    return (w.detach() * x).sum()


def written_into(x):
    out = torch.zeros(3)
    with torch.no_grad():
        torch.mul(torch.tensor([0.1, 0.2, 0.3]), x, out=out)
    return ((x - out) ** 2).sum()


@pytest.mark.parametrize("f", [trained_inside, written_into])
def test_what_stays_in_single_precision_inside_does_not_stand_still(f):
    """Its numbers do not move at narrow widths, at which a gradient that leaves them out seems right."""
    found = eg.check(f, torch.tensor([1.0, 2.0, 3.0]), wrt="x[0]")
    assert found.verdict != "agrees", found


def test_noise_that_is_nothing_at_the_point_itself_decides_nothing():
    generator = np.random.default_rng(0)
    wheel = lambda x: (x * float(generator.normal())).sum()  # noqa: E731
    for x in (torch.zeros(1), JAX.tensor([0.0])):
        found = eg.check(wheel, x)
        assert (found.verdict, found.entries[0].why) == ("undecided", "the function returns different values each time")
