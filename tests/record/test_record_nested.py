"""Recordings inside of one another, and of one memory by several names: each sees all that is computed from it."""

import threading

import pytest
import torch

import elementgrad as eg
from tests.support.functions import ThriceOnePlusSum


def test_an_outer_recording_includes_the_inner():
    x = torch.tensor([1.0, 2.0, 3.0])
    with eg.record(x) as outer:
        a = x.sum()
        with eg.record(x) as inner:
            b = (x * x).sum()
        y = a + b
    assert outer.grad(y, x).tolist() == [3, 5, 7]
    assert inner.grad(b, x).tolist() == [2, 4, 6]
    with pytest.raises(eg.PlaceError, match="from outside the recording"):
        inner.grad(y, x)


def test_writes_in_both_count_from_where_each_begins():
    x = torch.tensor([3.0, 0.0, 0.0])
    with eg.record(x) as outer:
        x[1] = x[0] * 2
        with eg.record(x) as inner:
            x[2] = x[1] ** 2
            z = x.sum()
        w = x[2] * x[0]
    assert outer.grad(eg.at(x)[2], eg.at(x)[:2]).tolist() == [24, 12]
    assert outer.grad(w, eg.at(x)[0]).item() == 108
    assert outer.grad(z, eg.at(x, write=0)[1]).item() == 13
    assert outer.grad(z, x).tolist() == [27, 13, 1]
    assert inner.grad(eg.at(x)[2], eg.at(x)[:2]).tolist() == [0, 12]
    assert inner.grad(z, x).tolist() == [1, 13, 1]
    assert inner.contributions(z, eg.at(x)[1]).total.item() == 13
    with pytest.raises(eg.PlaceError, match="written 0 times"):
        inner.grad(z, eg.at(x, write=0)[1])


def test_writes_without_gradients_cut_both():
    x = torch.tensor([3.0, 4.0])
    with eg.record(x) as outer:
        a = x.sum()
        with eg.record(x) as inner:
            with torch.no_grad():
                x[0] = x[1] * 2
            y = (x * x).sum() + a
    assert x.tolist() == [8, 4]
    assert outer.grad(y, x).tolist() == [16, 9]
    assert inner.grad(y, x).tolist() == [16, 8]


@pytest.mark.parametrize("part", [slice(0, 2), slice(2, 5)])
def test_an_inner_recording_may_be_of_other_parts_of_the_memory(part):
    base = torch.arange(1.0, 6.0)
    x = base[1:4]
    with eg.record(x) as outer:
        h = x[:2]
        with eg.record(base[part]) as inner:
            base[2] = base[1] * 10
            y = (base**2).sum()
        z = (h * h).sum() + base.sum()
    assert inner.grad(y, base[part]).tolist() == outer.grad(y, base[part]).tolist()
    expected = (2 * base).tolist()
    expected[1] += 10 * expected[2]
    assert outer.grad(y, base).tolist() == expected
    assert outer.grad(z, x).tolist() == [2 * base[1] + 1 + 10 * (2 * base[2] + 1), 2 * base[2] + 1, 1]


def test_tensors_detached_outside_stay_detached_inside():
    x = torch.tensor([1.0, 2.0])
    with eg.record(x) as outer:
        d = x.detach()
        with eg.record(x) as inner:
            e = x.detach()
            y = (d * e * x).sum()
        z = (d * e * x).sum()
    for rec, of in ((outer, y), (outer, z), (inner, y)):
        assert rec.grad(of, x).tolist() == [1, 4]


def test_gradients_may_be_switched_on_in_the_inner_block():
    x = torch.tensor([1.0, 2.0])
    with eg.record(x) as outer:
        a = (x * 5).sum()
        with eg.record(x) as inner:
            b = (x * 3).sum()
            x.requires_grad_()
            y = (x**2).sum()
    for rec in (outer, inner):
        assert rec.grad(b, x).tolist() == [3, 3]
        assert rec.grad(y, x).tolist() == [2, 4]
    assert outer.grad(a, x).tolist() == [5, 5]


def test_a_users_own_function_is_seen_by_both():
    x, y = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
    with eg.record(x) as outer, eg.record(y) as inner:
        z = ThriceOnePlusSum.apply(x, 0) * ThriceOnePlusSum.apply(y, 1)
    assert outer.grad(z, x).tolist() == [4 * 19, 19]
    assert inner.grad(z, y).tolist() == [6, 4 * 6]


def test_an_inner_recording_may_be_asked_while_the_outer_runs():
    x = torch.tensor([1.0, 2.0])
    with eg.record(x) as outer, eg.record(x) as inner:
        y = (x**2).sum()
        g = inner.grad(y, x)
        h = outer.grad(y, x)
        z = (g * h * x).sum()
    assert outer.grad(z, x).tolist() == inner.grad(z, x).tolist() == [4, 16]


def test_a_view_knows_of_writes_through_a_wider_one():
    base = torch.arange(6.0)
    x = base[:3]
    with eg.record(x) as rec:
        h = x[:2]
        base.sum()
        x[0] = 7 * x[1]
        y = h.sum()
        h.mul_(2)
        z = x.sum()
    assert rec.grad(y, eg.at(x)[1]).item() == 8
    assert rec.grad(z, eg.at(x, write=0)[0]).item() == 2
    assert x.tolist() == [14, 2, 2]


def test_recorded_tensors_of_two_dtypes_in_one_memory_are_refused():
    z = torch.tensor([1.0 + 2.0j])
    with pytest.raises(eg.PlaceError, match=r"dtype torch.float32 of a recorded tensor of dtype torch.complex64"):
        eg.record(z, torch.view_as_real(z)).__enter__()
    with (
        eg.record(z),
        pytest.raises(eg.PlaceError, match=r"dtype torch.float32 of a recorded tensor of dtype torch.complex64"),
        torch.no_grad(),
        eg.record(torch.view_as_real(z)),
    ):
        pass


def test_an_inner_recording_has_no_paths_from_before_it():
    x = torch.tensor([1.0, 2.0])
    with eg.record(x) as outer:
        a, h = x.sum(), x[:1]
        with eg.record(x) as inner:
            y = (x * h * a).sum()
    assert outer.grad(y, x).tolist() == outer.contributions(y, x).total.tolist() == [15, 6]
    assert inner.grad(y, x).tolist() == inner.contributions(y, x).total.tolist() == [12, 3]


def test_the_block_is_recorded_while_another_thread_asks():
    x = torch.tensor([1.0, 2.0, 3.0])
    asking, done = threading.Event(), threading.Event()

    class Waiting(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, upstream):
            asking.set()
            assert done.wait(10)
            return upstream

    answers = []
    with eg.record(x) as rec:
        a = Waiting.apply(x).sum()
        other = threading.Thread(target=lambda: answers.append(rec.grad(a, x)))
        other.start()
        assert asking.wait(10)
        b = (x * 5).sum()
        x[0] = x[1] * 7
        done.set()
        other.join()
        c = x.sum()
    assert [answer.tolist() for answer in answers] == [[1, 1, 1]]
    assert rec.grad(b, x).tolist() == [5, 5, 5]
    assert rec.grad(c, x).tolist() == [1, 8, 1]


def test_a_recording_in_a_process_that_has_compiled_may_be_asked_while_it_runs():
    torch.compile(lambda x: x * 2, backend="eager")(torch.ones(2))
    x = torch.ones(3)
    with eg.record(x) as outer:
        y = x * 3
        with eg.record(y) as inner:
            z = (y * y).sum()
        assert inner.grad(z, y).tolist() == [6.0, 6.0, 6.0]
        assert outer.grad(z, x).tolist() == [18.0, 18.0, 18.0]
        w = (z * x).sum()
    assert outer.grad(w, x).tolist() == [81.0, 81.0, 81.0]
