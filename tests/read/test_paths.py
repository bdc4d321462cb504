"""Shares of a derivative: one per use of the source, along paths that pass a name or do not, on each framework."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import elementgrad as eg
from tests.support.frameworks import JAX
from tests.support.made import counts
from tests.support.operations import OPS

X = np.array([1.0, 2.0, 3.0])
UNARY = ("sin", "tanh", "exp", "sum")
BINARY = ("add", "mul", "sub")


@st.composite
def expressions(draw):
    """Operations on x (number 0) and on earlier results, each with the numbers of its arguments."""
    steps = []
    for number in range(1, draw(st.integers(2, 7))):
        name = draw(st.sampled_from(UNARY + BINARY))
        arguments = [
            draw(st.integers(0, number - 1) if draw(st.booleans()) else st.just(0)) for _ in range(1 + (name in BINARY))
        ]
        steps.append((name, arguments))
    return steps


def evaluated(fw, steps, x, use):
    """The sum of all results; `use(number, x)` stands in each place where x itself is used."""
    o, results, uses = OPS[fw.name], [x], iter(range(100))
    for name, arguments in steps:
        taken = [use(next(uses), x) if number == 0 else results[number] for number in arguments]
        if name in BINARY:
            one, other = taken
            results.append({"add": one + other, "mul": one * other, "sub": one - other}[name])
        else:
            results.append(fw.sum(taken[0]) * 0.5 if name == "sum" else getattr(o, name)(taken[0] * 0.5))
    total = fw.sum(results[1])
    for result in results[2:]:
        total = total + fw.sum(result) * 0.7
    return total


def number_of_uses(steps):
    return sum(arguments.count(0) for _, arguments in steps)


def test_made_expressions_are_split_by_their_uses(fw):
    o = OPS[fw.name]

    @settings(max_examples=counts(25 if fw is JAX else 50))
    @given(expressions())
    def assert_split(steps):
        shares = eg.contributions(lambda x: evaluated(fw, steps, x, lambda _, x: x), fw.tensor(X), wrt="x")
        total = fw.numpy(eg.grad(lambda x: evaluated(fw, steps, x, lambda _, x: x), fw.tensor(X)))
        np.testing.assert_allclose(fw.numpy(shares.total), total, rtol=1e-12, atol=1e-12)
        alone = [
            fw.numpy(
                eg.grad(
                    lambda x, kept=kept: evaluated(fw, steps, x, lambda n, x: x if n == kept else o.stop(x)),
                    fw.tensor(X),
                    unconnected="zero",
                )
            )
            for kept in range(number_of_uses(steps))
        ]
        assert len(shares) == len(alone)
        # The order of the two slots of one operation is its own.
        given, expected = (sorted(map(tuple, rows)) for rows in ([fw.numpy(s.value) for s in shares], alone))
        np.testing.assert_allclose(given, expected, rtol=1e-9, atol=1e-12)

    assert_split()


def residual(fw):
    def f(x):
        first = eg.tag(fw.sum(x) * x, "first")
        second = eg.tag(first * 3.0 + x, "second")
        return fw.sum(second * second * first)

    return f


def test_shares_that_pass_a_name_and_those_that_do_not_are_the_whole(fw):
    f, x = residual(fw), fw.tensor(X)
    total = fw.numpy(eg.grad(f, x))
    for name in ("first", "second", "second[1]", eg.at("first")[:2]):
        via = fw.numpy(eg.contributions(f, x, wrt="x", via=name).total)
        without = fw.numpy(eg.contributions(f, x, wrt="x", without=name).total)
        np.testing.assert_allclose(via + without, total, rtol=1e-12)
        assert np.abs(via).min() > 0
        assert np.abs(without).min() > 0 or name == "first"
    onward = fw.numpy(eg.jacobian(f, x, wrt="second")[..., :])
    inner = fw.numpy(eg.jacobian(f, x, of="second", wrt="first").dense())
    before = fw.numpy(eg.jacobian(f, x, of="first").dense())
    both = fw.numpy(eg.contributions(f, x, wrt="x", via=["first", "second"]).total)
    np.testing.assert_allclose(both, onward @ inner @ before, rtol=1e-12)
    past = fw.numpy(eg.contributions(f, x, wrt="x", via="second", without="first").total)
    np.testing.assert_allclose(past, onward, rtol=1e-12)  # the addition of x alone, which has slope one


def test_the_founding_case(fw):
    shares = eg.contributions(lambda x: 2 * x[2] + fw.sum(x), fw.tensor(X), wrt="x[2]")
    assert [float(share.value) for share in shares] == [2.0, 1.0]
    assert float(shares.total) == float(shares.value) == 3.0
    assert [share.where.partition(":")[0] for share in shares] == ["test_paths.py", f"framework_{fw.name}.py"]
    assert len({share.operation for share in shares}) == 2
    assert str(shares).splitlines()[-1].split() == ["total", "3"]


def test_shares_of_several_elements_have_both_shapes(fw):
    shares = eg.contributions(lambda x: x * x[0], fw.tensor(X), of="output[1:]", wrt="x")
    assert [tuple(share.value.shape) for share in shares] == [(2, 3)] * len(shares)
    np.testing.assert_allclose(fw.numpy(shares.total), [[2, 1, 0], [3, 0, 1]])


def test_shares_of_what_is_computed_on_the_way(fw):
    f = residual(fw)
    shares = eg.contributions(f, fw.tensor(X), wrt="first")
    np.testing.assert_allclose(fw.numpy(shares.total), fw.numpy(eg.grad(f, fw.tensor(X), wrt="first")), rtol=1e-12)
    assert len(shares) == 2
    shares = eg.contributions(f, fw.tensor(X), of="second[0]", wrt="x[0]")
    assert float(shares.total) == 3 * (6 + 1) + 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"via": "frist"}, "no tensor is named 'frist'; nearest: first"),
        ({"without": "third"}, "no tensor is named 'third'"),
        ({"via": "x"}, "x is of kind input and not computed; name an activation or tag"),
        ({"via": 3}, "3 names no activation or tag; give a name"),
        ({"wrt": ["x", "y"]}, "is not a single place; give one"),
        ({"unconnected": "maybe"}, "neither"),
        ({"wrt": "x[7]"}, r"x\[7\]: index 7 is out of range"),
    ],
)
def test_invalid_contributions_are_refused(fw, options, message):
    with pytest.raises(eg.ElementgradError, match=message):
        eg.contributions(residual(fw), fw.tensor(X), **{"wrt": "x", **options})


def test_a_missing_path_is_an_error_unless_zeros_are_accepted(fw):
    def f(x):
        eg.tag(x * 2, "aside")
        return fw.sum(x)

    with pytest.raises(eg.UnconnectedError, match="does not depend on x"):
        eg.contributions(f, fw.tensor(X), wrt="x", via="aside")
    zero = eg.contributions(f, fw.tensor(X), wrt="x", via="aside", unconnected="zero")
    assert len(zero) == 0
    np.testing.assert_array_equal(fw.numpy(zero.total), np.zeros(3))
