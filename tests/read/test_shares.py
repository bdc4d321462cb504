"""A derivative split over the uses of its source: the shares add up, and each is what that use alone gives."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import elementgrad as eg
from tests.support import made


def values(shares):
    return [(share.operation, share.value.item()) for share in shares]


def test_the_direct_use_and_the_use_through_a_sum():
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    with eg.record(x) as rec:
        y = 2 * x[2] + x.sum()
        inside = rec.contributions(eg.at(y), eg.at(x)[2])
    shares = rec.contributions(eg.at(y), eg.at(x)[2])
    assert values(shares) == values(inside) == [("select", 2), ("sum", 1)]
    assert shares.total.item() == shares.value.item() == 3
    line = shares[0].where.split(":")
    assert line[0] == "test_shares.py"
    assert Path(__file__).read_text().splitlines()[int(line[1]) - 1].strip() == "y = 2 * x[2] + x.sum()"


@pytest.mark.parametrize("home", ["vision", "_geometric"])
def test_other_packages_whose_names_begin_with_pytorchs_are_the_users_code(home):
    package = Path(torch.__file__).parent
    space = {}
    exec(compile("def total(x):\n    return x.sum()", f"{package}{home}/nn.py", "exec"), space)
    shares = eg.contributions(space["total"], torch.ones(2))
    assert [share.where for share in shares] == ["nn.py:2"]


def test_shares_print_as_a_table():
    x = torch.tensor([1.0, 2.0])
    with eg.record(x) as rec:
        y = (x * x).sum()
    lines = [line.split() for line in repr(rec.contributions(y, eg.at(x)[1])).splitlines()]
    assert [(line[0], line[-1]) for line in lines] == [("mul", "2"), ("mul", "2"), ("total", "4")]
    assert lines[0][1].startswith("test_shares.py:")
    assert "values of shape (2,)" in repr(rec.contributions(y, x))


def test_each_slot_of_an_operation_is_a_use():
    x, w = torch.tensor([2.0, 3.0]), torch.tensor([5.0, 7.0])
    with eg.record(x, w) as rec:
        y = torch.addcmul(x, x, w).sum() + torch.stack([x, x * w]).sum()
    assert values(rec.contributions(y, eg.at(x)[0])) == [
        ("addcmul", 1),
        ("addcmul", 5),
        ("mul", 5),
        ("stack", 1),
    ]
    assert values(rec.contributions(y, eg.at(w)[1])) == [("addcmul", 3), ("mul", 3)]


def test_broadcast_uses_are_summed_to_the_source():
    x = torch.tensor([[2.0], [3.0]], dtype=torch.float64)
    with eg.record(x) as rec:
        y = (x * torch.ones(2, 4) + x.float()).sum()
    assert [share.value.tolist() for share in rec.contributions(y, x)] == [[[4], [4]], [[4], [4]]]
    assert all(share.value.dtype == torch.float64 for share in rec.contributions(y, x))


def test_several_targets_and_sources_have_shares_of_their_shape():
    x = torch.tensor([1.0, 2.0, 3.0])
    with eg.record(x) as rec:
        y = x**2 + x.flip(0)
    shares = rec.contributions(y, eg.at(x)[:2])
    assert [share.operation for share in shares] == ["pow", "flip"]
    assert shares[0].value.tolist() == [[2, 0], [0, 4], [0, 0]]
    assert shares[1].value.tolist() == [[0, 0], [0, 1], [1, 0]]
    torch.testing.assert_close(shares.total, rec.grad(eg.at(y)[...], eg.at(x)[:2]))


def test_uses_of_an_element_are_followed_through_writes_of_others():
    t = torch.tensor([3.0, 0.0, 0.0, 0.0, 0.0])
    with eg.record(t) as rec:
        t[1] = 2 * t[0]
        t[3] = t[1] ** 2 + t[0]
        t[4] = t[3] * t[1]
    shares = rec.contributions(eg.at(t)[4], eg.at(t)[1])
    assert values(shares) == [("select", 72), ("select", 39)]
    assert shares.total.item() == 111
    assert values(rec.contributions(eg.at(t)[4], eg.at(t)[0])) == [("select", 222), ("select", 6)]
    assert values(rec.contributions(eg.at(t)[2], eg.at(t)[2])) == [("return", 1)]


def test_a_write_that_computes_from_the_old_values_is_a_use_of_them():
    t = torch.tensor([1.0, 2.0, 3.0])
    with eg.record(t) as rec:
        t[1:].mul_(10)
        t[0] = 5.0
        y = t.sum()
    assert values(rec.contributions(y, eg.at(t, write=-1)[1])) == [("sum", 1)]
    assert values(rec.contributions(eg.at(t)[1], eg.at(t)[1])) == [("mul_", 10)]
    with pytest.raises(eg.PlaceError):
        rec.contributions(y, eg.at(t, write=3)[0])


def test_an_intermediate_is_a_source_too():
    x = torch.tensor([1.0, 2.0])
    with eg.record(x) as rec:
        h = x * 3
        y = (h.exp() + h).sum()
    operations = [share.operation for share in rec.contributions(y, h)]
    assert operations == ["exp", "add"]
    assert values(rec.contributions(y, eg.at(x)[0]))[0][0] == "mul"


def test_unconnected_sources_have_no_shares():
    x, w = torch.ones(2), torch.ones(2)
    with eg.record(x, w) as rec:
        y = (x * 2).sum()
    with pytest.raises(eg.UnconnectedError):
        rec.contributions(y, w)
    nothing = rec.contributions(y, w, unconnected="zero")
    assert (len(nothing), nothing.total.tolist()) == (0, [0, 0])
    with pytest.raises(eg.PlaceError, match="contributions are from one tensor to another"):
        rec.contributions([y], x)


def test_no_hooks_stay_behind():
    x = torch.ones(2, requires_grad=True)
    with eg.record(x) as rec:
        y = (x * x).sum()
    before = rec.contributions(y, x).total
    y.backward(retain_graph=True)
    assert x.grad.tolist() == [2, 2]
    assert torch.equal(rec.contributions(y, x).total, before)
    assert x.grad.tolist() == [2, 2]


def squares(x):
    h = eg.tag(x * 2, "h")
    return (h * h).sum()


@pytest.mark.parametrize(
    ("function", "names", "expected"),
    [
        (lambda x: x, {"of": eg.at[0]}, [1, 0]),
        (lambda x: x, {"of": "output[0]"}, [1, 0]),
        (lambda x: x, {"of": "x[0]", "wrt": "x"}, [1, 0]),
        (squares, {"of": "h[0]", "wrt": "h"}, [1, 0]),
        (squares, {"via": "h", "wrt": "h"}, [4, 8]),
        (squares, {"of": "output", "wrt": "output"}, 1),
        (lambda x: eg.tag(x, "h").sum(), {"of": "h[0]", "wrt": "x"}, [1, 0]),
    ],
)
def test_a_target_that_is_the_source_is_one_use(function, names, expected):
    (share,) = eg.contributions(function, torch.tensor([1.0, 2.0]), **names)
    assert (share.operation, share.where, share.value.tolist()) == ("return", None, expected)


def test_a_copy_of_the_users_is_a_use_and_ours_is_none():
    x = torch.tensor([1.0, 2.0])
    for name in (eg.at[0], "output[0]"):
        assert [share.operation for share in eg.contributions(lambda x: x.clone(), x, of=name)] == ["clone"]
        assert [share.operation for share in eg.contributions(lambda x: x + x, x, of=name)] == ["add", "add"]
    with eg.record(x) as rec:
        y = x.clone()
    assert values(rec.contributions(eg.at(y)[0], eg.at(x)[0])) == [("clone", 1)]


def test_inference_tensors_have_shares():
    with torch.inference_mode():
        x = torch.tensor([1.0, 2.0])
        inside = eg.contributions(squares, x)
    for shares in (inside, eg.contributions(squares, x), eg.contributions(squares, x, wrt="h")):
        assert shares.total.tolist() in ([8, 16], [4, 8])
    assert eg.contributions(squares, x, of="h[1]").total.tolist() == [0, 2]


def test_a_hook_that_changes_the_derivative_of_the_source_leaves_it_without_shares():
    def hooked(x):
        x.register_hook(lambda gradient: gradient * 10)
        return (x * x).sum()

    x = torch.tensor([1.0, 2.0])
    assert eg.grad(hooked, x).tolist() == [20, 40]
    with pytest.raises(eg.FrameworkError, match="a hook on the tensor changes its derivative"):
        eg.contributions(hooked, x)
    leaf = torch.tensor([1.0, 0.0], requires_grad=True)
    leaf.register_hook(lambda gradient: gradient.nan_to_num(posinf=1.0))
    with eg.record(leaf) as rec:
        y = leaf.sqrt().sum()
    with pytest.raises(eg.FrameworkError, match="a hook on the tensor changes its derivative"):
        rec.contributions(y, leaf)


def test_sparse_gradients_have_shares():
    weight = torch.ones(3, 2)
    index = torch.tensor([0, 2, 2])
    with eg.record(weight) as rec:
        y = torch.nn.functional.embedding(index, weight, sparse=True).sum()
    assert rec.contributions(y, weight).total.tolist() == [[1, 1], [0, 0], [2, 2]]
    shares = eg.contributions(lambda w: torch.nn.functional.embedding(index, w, sparse=True).sum() + w[0, 0], weight)
    assert [share.operation for share in shares] == ["embedding", "select"]
    assert shares.total.tolist() == [[2, 1], [0, 0], [2, 2]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.complex64])
def test_rounding_and_what_is_not_finite_are_no_hook(dtype):
    x = torch.tensor([0.0, 0.3, 7.0], dtype=dtype)
    with eg.record(x) as rec:
        y = sum([(x * (0.1 + i / 7)).sum() for i in range(50)]).abs() + (x**0.5).sum().abs() + (x / 0).sum().abs()
    assert len(rec.contributions(y, x)) == 52


UNARY = [torch.sin, torch.tanh, lambda v: v * 0.5, lambda v: v[1:].sum() * v, lambda v: v.flip(0), torch.square]
BINARY = [torch.mul, torch.add, torch.sub, torch.atan2, torch.maximum]


@st.composite
def graphs(draw):
    """Operations, each on one or two of the tensors made so far; the first of these is the source."""
    steps = []
    for number in range(draw(st.integers(2, 7))):
        arguments = draw(st.lists(st.integers(0, number), min_size=1, max_size=2))
        steps.append((draw(st.integers(0, 5 if len(arguments) == 1 else 4)), arguments))
    return steps


def evaluate(steps, x, pick=lambda use, tensor: tensor):
    """The sum of all that the steps make. `pick` sees every use of the source, by its number."""
    tensors, uses = [x], 0
    for operation, arguments in steps:
        given = []
        for argument in arguments:
            tensor = tensors[argument]
            if argument == 0:
                tensor = pick(uses, tensor)
                uses += 1
            given.append(tensor)
        function = UNARY[operation] if len(given) == 1 else BINARY[operation]
        tensors.append(function(*given))
    return torch.stack([tensor.sum() for tensor in tensors[1:]]).sum(), uses


def test_made_graphs_have_shares_that_add_up_and_are_those_of_each_use_alone():
    # Older versions of PyTorch have no derivative of atan2 at (0, 0): what is NaN must be NaN in all of them.
    assert_close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12, equal_nan=True)

    @settings(max_examples=made.counts(200))
    @given(graphs(), st.integers(0, 2**31))
    def assert_shares(steps, seed):
        start = torch.tensor(np.random.default_rng(seed).normal(size=4))
        x = start.clone()
        with eg.record(x) as rec:
            y, uses = evaluate(steps, x)
        assume(uses)
        shares = rec.contributions(y, x)
        assert_close(shares.total, rec.grad(y, x))
        alone = []
        for use in range(uses):
            leaf = start.clone().requires_grad_()
            z, _ = evaluate(steps, leaf, lambda n, tensor, use=use: tensor if n == use else tensor.detach())
            alone.append(torch.autograd.grad(z, leaf)[0])
        if not any(len(arguments) == 1 and operation == 3 and arguments[0] == 0 for operation, arguments in steps):
            assert len(shares) == uses  # that one operation uses its argument twice
            for share, expected in zip(shares, alone, strict=True):
                assert_close(share.value, expected)
        assert_close(sum(alone), shares.total)

    assert_shares()


def test_gradients_that_a_user_wrote_have_shares_on_tensorflow():
    tf = pytest.importorskip("tensorflow")

    @tf.custom_gradient
    def exp(x):
        y = tf.exp(x)
        return y, lambda upstream: upstream * y  # a value of the forward run

    def f(x):
        return tf.reduce_sum(exp(2 * x) * x)

    x = tf.constant([0.5, 1.0])
    shares = eg.contributions(f, x)
    assert len(shares) == 2
    np.testing.assert_allclose(shares.total, eg.grad(f, x), rtol=1e-6)
