"""Elements inside one tensor: derivatives through writes in place, each element as it stood after its own write."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import elementgrad as eg
from elementgrad._backends.torch.record import history as versions
from tests.support import made
from tests.support.frameworks import difference
from tests.support.programs import SIZE, differenced, programs, run, source_step, written

START = np.array([0.7, -0.4, 0.9, 0.3, -0.8, 0.5])
HOLDERS = ["plain", "view", "requires grad", "made inside", "recorded inside", "recorded around"]


def recorded(program, holder):
    """The program on a recorded tensor that came about in one of several ways; the recording, tensor and result."""
    if holder == "view":
        t = torch.tensor(np.concatenate([[9.0], np.repeat(START, 2), [9.0]]))[1:-1:2]
    elif holder == "requires grad":
        t = torch.tensor(START, requires_grad=True) * 1
    else:
        t = torch.tensor(START)
    with eg.record(t) as rec, eg.record(t) if holder.startswith("recorded") else nullcontext() as inner:
        t = t * 1 if holder == "made inside" else t
        y = run(program, t)
    return inner if holder == "recorded around" else rec, t, y


@pytest.mark.parametrize("holder", HOLDERS)
def test_made_recurrences_agree_with_finite_differences(holder):
    @settings(max_examples=made.counts(60))
    @given(programs(), st.integers(0, SIZE - 1), st.none() | st.integers(0, SIZE - 1))
    def check(program, source, target):
        writes = written(program, START)
        step = source_step(writes, source, target)
        # Between the two writes of one step there is no room to move the source.
        assume(step is None or target is None or not any(target in e for e in writes[step][1:]))
        rec, t, y = recorded(program, holder)
        of = y if target is None else eg.at(t)[target]
        gradient = rec.grad(of, eg.at(t)[source])
        np.testing.assert_allclose(
            gradient.item(), differenced(program, START, source, target, step), rtol=1e-5, atol=1e-7
        )
        shares = rec.contributions(of, eg.at(t)[source])
        np.testing.assert_allclose(shares.total.item(), gradient.item(), rtol=1e-12, atol=1e-14)

    check()


def chain(t):
    t[1] = 2 * t[0]
    t[3] = t[1] ** 2 + t[0]
    t[4] = t[3] * t[1]


def first(kind="plain"):
    t = torch.tensor([3.0, 0.0, 0.0, 0.0, 0.0])
    return t.requires_grad_() * 1 if kind == "requires grad" else t


@pytest.mark.parametrize("kind", ["plain", "requires grad"])
def test_an_element_computed_from_another_of_the_same_tensor(kind):
    t = first(kind)
    with eg.record(t) as rec:
        chain(t)
        assert rec.grad(eg.at(t)[4], eg.at(t)[1]).item() == 111
    assert [rec.grad(eg.at(t)[4], eg.at(t)[1]).item() for _ in range(2)] == [111, 111]
    assert rec.grad(t[4], t[1]).item() == 111
    assert rec.grad(eg.at(t)[4], eg.at(t)[0]).item() == 228
    assert rec.grad(eg.at(t)[4], eg.at(t)[[0, 1, 3]]).tolist() == [228, 111, 6]
    assert rec.grad(eg.at(t)[3:], eg.at(t)[0]).tolist() == [25, 228]
    assert t.tolist() == [3, 6, 0, 39, 234]
    assert t.requires_grad == (kind == "requires grad")


def test_each_element_of_a_jacobian_has_its_own_last_write():
    t = first()
    with eg.record(t) as rec:
        chain(t)
    J = rec.jacobian(t, t)
    expected = [[1, 0, 0, 0, 0], [2, 0, 0, 0, 0], [0, 0, 1, 0, 0], [25, 12, 0, 0, 0], [228, 111, 0, 6, 0]]
    assert J.dense().tolist() == expected
    assert J[4, 1].item() == 111
    assert (torch.ones(5) @ J).tolist() == np.sum(expected, 0).tolist()
    assert (J @ torch.arange(5.0)).tolist() == (np.array(expected) @ np.arange(5.0)).tolist()
    assert J.value.tolist() == [3, 6, 0, 39, 234]
    assert "no forward sweeps: a recording has no function to run again" in str(J.plan())


def test_the_users_own_backward_goes_through_the_same_writes():
    w = torch.tensor([3.0, 0.0, 0.0, 0.0, 0.0], requires_grad=True)
    t = w * 1
    with eg.record(t) as rec:
        chain(t)
    t[4].backward(retain_graph=True)
    assert w.grad.tolist() == [228, 0, 0, 0, 0]
    assert rec.grad(eg.at(t)[4], eg.at(t)[1]).item() == 111
    assert w.grad.tolist() == [228, 0, 0, 0, 0]


def test_a_write_is_chosen_by_its_number():
    t = torch.tensor([3.0, 0.0])
    with eg.record(t) as rec:
        t[0] = t[0] * 2
        t[1] = t[0] ** 2
        t[0] = t[0] * 5
        y = t[0] + t[1]
    assert rec.grad(y, eg.at(t)[0]).item() == 1
    assert [rec.grad(y, eg.at(t, write=k)[0]).item() for k in (0, 1, -1, -2)] == [17, 1, 1, 17]
    assert rec.grad(eg.at(t, write=0)[0], eg.at(t)[0]).item() == 2
    assert rec.grad(eg.at(t, write=1)[0], eg.at(t, write=0)[0]).item() == 5
    with pytest.raises(eg.PlaceError, match=r"write=2 of an element that was written 2 times .* one of -2 to 1"):
        rec.grad(y, eg.at(t, write=2)[0])
    with pytest.raises(eg.PlaceError, match=r"write=0 of an element that was written 0 times .*; leave it out"):
        rec.grad(y, eg.at(y, write=0))
    with pytest.raises(eg.PlaceError, match=r"whose value is no longer there; leave write out, or use rec\.grad"):
        rec.jacobian(eg.at(t, write=0), t)


def test_a_place_with_a_write_is_another_place_and_no_place_to_edit():
    t = torch.ones(2)
    assert eg.at(t, write=0)[1] != eg.at(t)[1]
    assert eg.at(t, write=0)[1] == eg.at(t, write=0)[1]
    assert len({eg.at(t)[1], eg.at(t, write=0)[1], eg.at(t, write=0)[1]}) == 2
    assert repr(eg.at(t, write=-1)[1]) == "<Place tensor[1] at write -1 of torch torch.float32 (2,)>"
    with pytest.raises(eg.PlaceError, match="is about a write in a recording, which has no values to get"):
        eg.at(t, write=0)[1].get()
    with pytest.raises(eg.PlaceError, match="is about a live tensor in a recording; give the tensor itself"):
        eg.at("x", write=0)
    with pytest.raises(eg.PlaceError, match=r"write=1.5 is not an int"):
        eg.at(t, write=1.5)
    with pytest.raises(eg.PlaceError, match="is about a write in a recording, and this is a function"):
        eg.grad(lambda x: x.sum(), t, wrt=eg.at(t, write=0))


def by_view(t):
    v = t[1:3]
    v.mul_(2)


def by_rows(t):
    t.view(2, 3)[1] = t.view(2, 3)[0] * t[5].clone()


def by_foreach(t):
    torch._foreach_mul_([t[1:3], t[2:4]], 2.0)


ALL = range(6)
WRITES = {
    "a view": (by_view, [1, 2]),
    "a row": (by_rows, [3, 4, 5]),
    "several views at once": (by_foreach, [1, 2, 3]),
    "a mask and a number": (lambda t: t.masked_fill_(t.detach() > 2, 7.0), [1, 2, 3, 4, 5]),
    "a mask and values": (lambda t: t.__setitem__(t.detach() > 3, t[:4].clone() * 3), [2, 3, 4, 5]),
    "an index, added": (lambda t: t.__setitem__([0, 2], t[[0, 2]] + t[1]), [0, 2]),
    "put, accumulated": (lambda t: t.index_put_((torch.tensor([1, 1]),), t[0:2] * 2, accumulate=True), [1]),
    "index_add_": (lambda t: t.index_add_(0, torch.tensor([3, 3]), t[:2].clone()), [3]),
    "index_copy_": (lambda t: t.index_copy_(0, torch.tensor([3, 1]), t[:2] * 5), [1, 3]),
    "index_fill_": (lambda t: t.index_fill_(0, torch.tensor([3, 1]), 2.0), [1, 3]),
    "scatter_": (lambda t: t.scatter_(0, torch.tensor([4, 2]), t[:2] * 5), [2, 4]),
    "scatter_add_": (lambda t: t.scatter_add_(0, torch.tensor([4, 2]), t[:2] * 5), [2, 4]),
    "masked_scatter_": (lambda t: t.masked_scatter_(t.detach() > 5, t[:2] * 5), [4, 5]),
    "put_": (lambda t: t.put_(torch.tensor([0, 5]), t[2:4] * 2), [0, 5]),
    "fill_diagonal_": (lambda t: t.view(2, 3).fill_diagonal_(4.0), [0, 4]),
    "clamp_": (lambda t: t.clamp_(2.5, 4.5), ALL),
    "out": (lambda t: torch.add(t[0].clone(), t[1].clone(), out=t[2]), [2]),
    "two outs": (lambda t: torch.max(t.view(2, 3) * 2, 1, out=(t[4:], torch.empty(2, dtype=torch.long))), [4, 5]),
    "an operator": (lambda t: t.__imul__(t[1].clone()), ALL),
    "zero_": (lambda t: t[:2].zero_(), [0, 1]),
    "data": (lambda t: t.data[2:4].copy_(torch.tensor([1.0, 2.0])), [2, 3]),
}


@pytest.mark.parametrize("name", WRITES)
def test_every_way_to_write_is_seen(name):
    """Each element is used before and after: as source it is what it was after the write, if it was written at all."""
    write, written = WRITES[name]
    start = np.array([1.5, 2.25, 3.75, 4.0, 5.5, 6.25])
    before, after = torch.arange(1.0, 7.0), torch.tensor([3.0, 1.0, 4.0, 1.0, 5.0, 9.0])

    def program(t):
        kept = (t**2 * before).sum()
        write(t)
        return kept + (t**3 * after).sum()

    plain, t = torch.tensor(start), torch.tensor(start)
    y = program(plain)
    with eg.record(t) as rec:
        z = program(t)
    torch.testing.assert_close(z.detach(), y)
    torch.testing.assert_close(t, plain)
    assert not t.requires_grad
    whole = difference(lambda start: program(torch.tensor(start)).item(), start)
    expected = np.where(np.isin(ALL, written), (3 * plain**2 * after).numpy(), whole)
    np.testing.assert_allclose(rec.grad(z, t).numpy(), expected, rtol=1e-6)
    np.testing.assert_allclose(rec.contributions(z, t).total.numpy(), expected, rtol=1e-6)


def test_a_slice_from_before_the_block_writes_to_its_base():
    t = torch.tensor([1.0, 2.0, 3.0])
    v, w = t[1:], t.view(3, 1)
    with eg.record(t) as rec:
        v.mul_(t[0].clone())
        y = (w * w).sum()
    assert t.tolist() == [1, 2, 3]
    assert rec.grad(y, t).tolist() == [2 + 2 * 4 + 2 * 9, 4, 6]
    assert rec.grad(y, v).tolist() == [4, 6]


def test_writes_hidden_from_autograd_cut_the_path():
    t = torch.tensor([3.0, 1.0, 0.0])
    with eg.record(t) as rec:
        t[1] = t[0] * 2
        y = t[1] ** 2
        with torch.no_grad():
            t[1] = t[1] - 1
        t[2] = y + t[1] * t[0]
    assert rec.grad(eg.at(t)[2], eg.at(t)[1]).item() == 3
    assert rec.grad(eg.at(t)[2], eg.at(t, write=0)[1]).item() == 12
    assert rec.grad(eg.at(t)[2], eg.at(t)[0]).item() == 24 + 5
    assert rec.contributions(eg.at(t)[2], eg.at(t)[0]).total.item() == 29


def test_a_wider_tensor_in_the_same_memory_takes_part():
    base = torch.arange(6.0)
    t = base[2:5]
    with eg.record(t) as rec:
        t[0] = t[1] * 2
        y = (base * base).sum()
        base.mul_(2)
        z = t.sum() + base[0]
    assert rec.grad(y, t).tolist() == [12, 30, 8]
    assert rec.grad(y, base).tolist() == [0, 2, 12, 30, 8, 10]
    assert rec.grad(z, base).tolist() == [1, 0, 1, 1, 1, 0]
    assert base.tolist() == [0, 2, 12, 6, 8, 10]


def test_a_long_recurrence_copies_each_saved_tensor_once_at_most():
    counts = {}
    for steps in (100, 200, 1000):
        t = torch.zeros(steps + 1, dtype=torch.float64)
        t[0] = 0.5
        with eg.record(t) as rec:
            for i in range(steps):
                t[i + 1] = torch.cos(t[i]) * t[i] + 0.2
        counts[steps] = rec._recorder.saved.copies
        assert rec._recorder.saved.copies <= 4 * steps
    assert counts[1000] == 10 * counts[100] == 5 * counts[200]
    slope = np.prod([np.cos(x) - x * np.sin(x) for x in t[900:1000].numpy()])
    np.testing.assert_allclose(rec.grad(eg.at(t)[1000], eg.at(t)[900]).item(), slope, rtol=1e-10)


def test_tensors_that_are_never_written_are_never_copied():
    x = torch.ones(10)
    with eg.record(x) as rec:
        for _ in range(10):
            y = (x * x).exp().sum()
    assert rec._recorder.saved.copies == 0
    assert rec.grad(y, eg.at(x)[0]).item() == pytest.approx(2 * np.e)


def test_a_change_of_shape_in_place_is_refused_in_a_sentence():
    t = torch.ones(3)
    with (
        eg.record(t) as rec,
        pytest.raises(eg.FrameworkError, match="unsqueeze_ gives a recorded tensor another shape"),
    ):
        t.unsqueeze_(0)
    with pytest.raises(eg.PlaceError):
        rec.grad(torch.ones(()), t)


def test_a_change_after_the_block_is_refused_where_it_matters():
    x = torch.ones(3)
    with eg.record(x) as rec:
        y, z = (x * x).sum(), (2 * x).sum()
    x.zero_()
    assert rec.grad(z, x).tolist() == [2, 2, 2]
    with pytest.raises(eg.FrameworkError, match="was changed in place after the recording ended"):
        rec.grad(y, x)


class Held:
    """A container in which PyTorch does not look for tensors."""

    def __init__(self, tensor):
        self.tensor = tensor


HOOKS = {
    "as it is": (lambda x: x, lambda x: x),
    "in a tuple": (lambda x: (x.device, x), lambda held: held[1]),
    "out of sight": (Held, lambda held: held.tensor),
    "elsewhere": (lambda x: x.numpy().copy(), torch.from_numpy),
    "shifted": (lambda x: x + 1, lambda x: x - 1),
}


@pytest.mark.parametrize("hooks", HOOKS.values(), ids=HOOKS)
@pytest.mark.parametrize("where", ["inside", "outside"])
def test_saved_tensor_hooks_of_the_user(hooks, where):
    t = torch.tensor([3.0, 0.0, 0.0])
    saved, nothing = torch.autograd.graph.saved_tensors_hooks(*hooks), nullcontext()
    outside, inside = (saved, nothing) if where == "outside" else (nothing, saved)
    with outside, eg.record(t) as rec, inside:
        t[1] = t[0] ** 2
        t[2] = t[1] * 2
        t[0] = 5
    assert rec.grad(eg.at(t)[2], eg.at(t)[0]).item() == 12
    assert rec.grad(eg.at(t)[2], eg.at(t, write=0)[1]).item() == 2
    assert rec.grad(eg.at(t, write=0)[1], eg.at(t)[0]).item() == 6
    with eg.record(t) as rec, torch.autograd.graph.saved_tensors_hooks(*hooks):
        y = (t * t).sum()
    assert rec.grad(y, t).tolist() == (2 * t).tolist()
    t.zero_()
    if hooks in (HOOKS["elsewhere"], HOOKS["shifted"]):
        assert rec.grad(y, t).tolist() == [10, 18, 36]
    else:
        with pytest.raises(eg.FrameworkError, match="was changed in place after the recording ended"):
            rec.grad(y, t)


def test_an_overwritten_value_is_refused_where_it_cannot_be_saved():
    t = torch.tensor([3.0, 0.0])
    with eg.record(t) as rec, torch.autograd.graph.disable_saved_tensors_hooks("none here"):
        t[1] = t[0] ** 2
        y = t.sum()
        t[0] = 5
    with pytest.raises(eg.FrameworkError, match="changed in place"):
        rec.grad(y, t)


def test_a_read_of_many_elements_visits_each_write_once(monkeypatch):
    asked = []
    after = versions.TensorVersion.follows
    monkeypatch.setattr(
        versions.TensorVersion, "follows", lambda self, *writes: asked.append(self) or after(self, *writes)
    )
    x = torch.arange(5000.0)
    with eg.record(x) as rec:
        x[:10] *= 2
        x.add_(1)
        y = x * 3
    assert rec.jacobian(y, x)[7, 5:9].tolist() == [0, 0, 3, 0]
    assert rec.jacobian(x, x)[7, 5:9].tolist() == [0, 0, 1, 0]
    assert len(asked) == 2
