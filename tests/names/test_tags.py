"""Tags in any function, compiled or not: captured when they are named, and otherwise without effect."""

import jax
import numpy as np
import pytest
import tensorflow as tf
import torch

import elementgrad as eg
from tests.support.frameworks import JAX, TENSORFLOW, TORCH

X = np.array([1.0, 2.0, 3.0])
COMPILERS = {
    TORCH: lambda f: torch.compile(f, backend="eager", fullgraph=True),
    TENSORFLOW: tf.function,
    JAX: jax.jit,
}


def tagged(fw):
    def f(x):
        hidden = eg.tag(x**2, "hidden")
        return fw.sum(hidden * x)

    return f


@pytest.mark.parametrize("called_before", [False, True])
def test_compiled_functions_are_read_at_their_tags(fw, called_before):
    f, x = COMPILERS[fw](tagged(fw)), fw.tensor(X)
    if called_before:
        assert float(f(x)) == 36.0
    np.testing.assert_allclose(fw.numpy(eg.grad(f, x, wrt="hidden")), X)
    np.testing.assert_allclose(fw.numpy(eg.jacobian(f, x, of="hidden").dense()), np.diag(2 * X))
    np.testing.assert_allclose(fw.numpy(eg.jacobian(f, x, of="hidden")[:, 1]), [0.0, 4.0, 0.0])
    np.testing.assert_allclose(fw.numpy(eg.grad(f, x)), 3 * X**2)
    assert float(f(x)) == 36.0


def test_a_tag_returns_its_value(fw):
    x = fw.tensor(X)
    assert eg.tag(x, "x") is x
    pair = {"a": x, "b": [x, x]}
    assert eg.tag(pair, "pair") is pair


def test_the_same_name_again_counts_up(fw):
    def f(x):
        for _ in range(3):
            x = eg.tag(x * 2, "t")
        return fw.sum(x)

    x = fw.tensor(X)
    np.testing.assert_allclose(fw.numpy(eg.grad(f, x, wrt="t#0")), [4.0, 4.0, 4.0])
    np.testing.assert_allclose(fw.numpy(eg.grad(f, x, of="t#2[0]", wrt="t#1")), [2.0, 0.0, 0.0])
    with pytest.raises(eg.PlaceError, match=r"'t' is 3 tensors here; name one: t#0, t#1, t#2$"):
        eg.grad(f, x, wrt="t")
    with pytest.raises(eg.PlaceError, match=r"'t#3' is none of these: t#0, t#1, t#2$"):
        eg.grad(f, x, wrt="t#3")


def test_parts_of_a_structure_have_names(fw):
    def f(x):
        both = eg.tag({"a": x * 2, "b": (x * 3,)}, "both")
        return fw.sum(both["a"] * both["b"][0])

    x = fw.tensor(X)
    np.testing.assert_allclose(fw.numpy(eg.grad(f, x, wrt="both:a")), 3 * X)
    np.testing.assert_allclose(fw.numpy(eg.grad(f, x, wrt="both:b.0")), 2 * X)


@pytest.mark.parametrize("compiled", [False, True])
def test_all_parts_of_one_value_have_one_number(fw, compiled):
    def f(x):
        first = eg.tag({"p": x, "q": 2 * x}, "h")
        second = eg.tag({"q": first["q"] * first["p"]}, "h")
        third = eg.tag((second["q"], first["p"] + 1), "h")
        return fw.sum(eg.tag(third[0] * third[1], "h"))

    x = fw.tensor(X)
    read = COMPILERS[fw](f) if compiled else f
    expected = {
        "h:p": 4 * X**2 + 2 * X,
        "h#0:q": X**2 + X,
        "h#1:q": X + 1,
        "h#2:0": X + 1,
        "h#2:1": 2 * X**2,
        "h#3": np.ones(3),
    }
    assert [row.name for row in eg.names(read, x, kind="activation")] == list(expected)
    for name, gradient in expected.items():
        np.testing.assert_allclose(eg.grad(read, x, wrt=name), gradient)


def test_elements_of_one_tensor_through_functional_writes(fw):
    def f(t):
        t = eg.tag(eg.at(t)[1].set(2 * t[0]), "t")
        t = eg.tag(eg.at(t)[3].set(t[1] ** 2 + t[0]), "t")
        return eg.tag(eg.at(t)[4].set(t[3] * t[1]), "t")

    start = fw.tensor(np.array([3.0, 0.0, 0.0, 0.0, 0.0]))
    assert float(eg.grad(f, start, of="t#2[4]", wrt="t#0[1]")) == 111.0
    assert float(eg.grad(f, start, of="output[4]", wrt="t#1[3]")) == 6.0
    assert float(eg.grad(f, start, of="t#2[4]", wrt=eg.at("t", kind="input")[0])) == 228.0


def test_tags_inside_of_pytorchs_own_transforms_are_passed_on():
    f = tagged(TORCH)
    x = TORCH.tensor(X)
    np.testing.assert_allclose(torch.func.grad(f)(x), 3 * X**2)
    np.testing.assert_allclose(torch.func.vmap(f)(x[:, None]), X**3)


def test_a_constant_that_was_tagged_before_is_captured(fw):
    constant = fw.tensor(X)

    def f(x):
        return fw.sum(eg.tag(constant, "constant") * x)

    assert float(f(fw.tensor(X))) == 14.0
    np.testing.assert_allclose(fw.numpy(eg.grad(f, fw.tensor(X), wrt="constant")), X)
