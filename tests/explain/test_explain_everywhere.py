"""What explain says of the same program on every framework, and what it must not say: a cause that is not the one."""

import numpy as np
import pytest
import torch

import elementgrad as eg
from tests.support.operations import OPS

POINT = [0.25, 0.75]
HALF = [0.001, 0.001]


CASES = {
    "every element of a softmax": (lambda o, x: o.sum(o.softmax(x, 0)), POINT, "float64", "x", "zero", "cancelled"),
    "a product with zeros": (lambda o, x: o.prod(x), [0.0, 0.0, 1.0], "float64", "x[2]", "zero", "masked"),
    "a matrix with a column of zeros": (
        lambda o, x: o.sum(o.matmul(o.array([[1.0, 0.0], [2.0, 0.0]]), x[:, None])),
        POINT,
        "float64",
        "x[1]",
        "zero",
        "masked",
    ),
    "a batch of none": (
        lambda o, x: o.sum(o.matmul(o.array(np.zeros((0, 2))), x[:, None]) + x[0]),
        POINT,
        "float64",
        "x[1]",
        "zero",
        "unused",
    ),
    "a matrix in which it cancels": (
        lambda o, x: o.sum(o.matmul(o.array([[1.0, -1.0]]), o.stack([x, x]))),
        POINT,
        "float64",
        "x[1]",
        "zero",
        "cancelled",
    ),
    "a maximum as a rectifier": (
        lambda o, x: o.sum(o.maximum(-x, o.array([0.0, 0.0]))),
        POINT,
        "float64",
        "x[1]",
        "zero",
        "dead-relu",
    ),
    "a minimum as a bound": (
        lambda o, x: o.sum(o.minimum(x, o.array([0.5, 0.5]))),
        POINT,
        "float64",
        "x[1]",
        "zero",
        "clamped",
    ),
    "a maximum of two": (
        lambda o, x: o.sum(o.maximum(x, o.array([0.0, 3.0]))),
        POINT,
        "float64",
        "x[1]",
        "zero",
        "not-selected",
    ),
    "cut off where it is used": (lambda o, x: x[0] + o.stop(x)[1], POINT, "float64", "x[1]", "zero", "detached"),
    "not used where it is cut off": (lambda o, x: x[0] + o.stop(x)[0], POINT, "float64", "x[1]", "zero", "unused"),
    "a slope too large for its precision": (
        lambda o, x: o.sum(1 / x),
        HALF,
        "float16",
        "x[1]",
        "nonfinite",
        "overflow",
    ),
    "a value too large for its precision": (
        lambda o, x: o.sum(1 / (x * 0.01)),
        HALF,
        "float16",
        "x[1]",
        "nonfinite",
        "overflow",
    ),
    "no slope in any precision": (lambda o, x: o.sum(1 / (x - x)), HALF, "float16", "x[1]", "nonfinite", "singular"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_cause_is_the_one(fw, name):
    f, point, dtype, wrt, verdict, cause = CASES[name]
    found = eg.explain(lambda x: f(OPS[fw.name], x), fw.tensor(point, dtype), wrt=wrt)
    assert (found.verdict, found.cause) == (verdict, cause), found


def test_what_only_a_trial_tells_is_open_without_one(fw):
    o = OPS[fw.name]
    found = eg.explain(lambda x: x[0] + o.stop(x)[1], fw.tensor(POINT), wrt="x[1]", probe=False)
    assert (found.verdict, found.cause) == ("zero", "detached")
    found = eg.explain(
        lambda x: (x * o.array([1.0, 0.0]) + o.stop(x))[1] + x[0], fw.tensor(POINT), wrt="x[1]", probe=False
    )
    assert (found.verdict, found.cause) == ("zero", None)
    assert len(found.evidence) == 2, found.evidence


def test_without_trials_the_function_never_sees_other_numbers(fw):
    o, seen = OPS[fw.name], []

    def f(x):
        seen.append(np.asarray(fw.numpy(x)) if fw.name != "jax" else POINT)
        return o.array([1.0, 2.0]) * 2

    found = eg.explain(f, fw.tensor(POINT), of="output[0]", probe=False)
    assert (found.verdict, found.cause) != ("flows", None)
    assert all(np.array_equal(x, POINT) for x in seen)


def test_a_function_that_refuses_other_numbers_is_explained_all_the_same(fw):
    o = OPS[fw.name]
    twice = o.custom(lambda x: 2 * x, lambda x, g: 3 * g)

    def refusing(f):
        def inner(x):
            if bool(o.sum(x) != 1.0):
                raise ValueError("they do not sum to one")
            return f(x)

        return inner

    found = eg.explain(refusing(lambda x: o.array([3.0])), fw.tensor(POINT), of="output[0]")
    assert (found.verdict, found.cause) == ("unconnected", None)
    assert "it only decides which branch the code takes" in found.evidence[0]
    found = eg.explain(refusing(lambda x: o.sum(twice(x))), fw.tensor(POINT))
    assert (found.verdict, found.cause) == ("mismatch", "custom-rule")  # the recorded operations take other numbers


def test_a_guard_is_no_use(fw):
    o = OPS[fw.name]

    def f(x):
        assert bool(o.sum(x) > -9.0)
        return o.array([3.0])

    found = eg.explain(f, fw.tensor(POINT), of="output[0]")
    assert (found.verdict, found.cause) == ("unconnected", "unused"), found


def test_a_multiple_of_the_gradient_is_no_sum_of_several():
    w = torch.tensor([1.0, 2.0], requires_grad=True)
    loss = (w**2).sum()
    (1024 * loss).backward(retain_graph=True)
    assert eg.explain(of=loss, wrt=w).verdict == "flows"
    w.grad = None
    for _ in range(3):
        loss.backward(retain_graph=True)
    assert eg.explain(of=loss, wrt=w).cause == "accumulated"
