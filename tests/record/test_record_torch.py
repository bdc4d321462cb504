"""Recordings of PyTorch: slices are parts of their base, and what cannot be followed is refused."""

import pytest
import torch

import elementgrad as eg
from tests.support.functions import ThriceOnePlusSum


def test_slices_from_before_inside_and_after_are_parts_of_their_base():
    x = torch.arange(1.0, 7.0).reshape(2, 3)
    before = x[0]
    with eg.record(x) as rec:
        inside = x[0]
        z = (inside * x[1] * before).reshape(3, 1)
    expected = [[2 * 1 * 4, 0, 0], [1, 0, 0]]
    assert rec.grad(z[0, 0], x).tolist() == expected
    for row in (before, inside, x[0], eg.at(x)[0], x.T[:, 0], x.view(-1)[:3], x.detach()[0]):
        assert rec.grad(z[0, 0], row).tolist() == expected[0]
        assert rec.grad(eg.at(z)[0, 0], row).tolist() == expected[0]
    assert rec.grad(z[0, 0], x[:, ::2]).tolist() == [[8, 0], [1, 0]]
    assert rec.grad(z.squeeze()[0], x[1, 0]).item() == 1


@pytest.mark.parametrize(
    "made", [lambda b: b.T, lambda b: b[::2, 1:], lambda b: b.permute(1, 0)[1:], lambda b: b[0], lambda b: b[:, :1]]
)
def test_recorded_tensors_need_not_be_contiguous(made):
    base = torch.arange(12.0).reshape(3, 4)
    x = made(base)
    flat = x.reshape(-1)
    with eg.record(x) as rec:
        y = (x**2).sum() + (base * 3).sum()
        assert rec.grad(y, x).tolist() == (2 * x + 3).tolist()
    assert rec.grad(y, eg.at(x)[..., 0]).tolist() == (2 * x + 3)[..., 0].tolist()
    assert flat.tolist() == x.reshape(-1).tolist()
    part = torch.zeros_like(base)
    made(part).copy_(2 * x)
    assert rec.grad(y, base).tolist() == (3 + part).tolist()


def test_an_expanded_tensor_has_one_element_in_many_places():
    x = torch.tensor([2.0]).expand(3)
    with eg.record(x) as rec:
        y = (x * torch.tensor([1.0, 10.0, 100.0])).sum()
    assert rec.grad(y, x).tolist() == [111, 111, 111]


def test_a_copy_made_outside_is_refused_and_one_made_inside_is_an_intermediate():
    x = torch.tensor([1.0, 2.0, 3.0])
    with eg.record(x) as rec:
        c = x[[0, 2]]
        y = (c**2).sum()
    assert rec.grad(y, c).tolist() == [2, 6]
    for outside in (x[[0, 2]], x * 1, c[[0]]):
        with pytest.raises(eg.PlaceError, match=r"from outside the recording.*eg.at\(x\)\[...\]"):
            rec.grad(y, outside)


def test_tensors_that_share_memory_may_be_recorded_together():
    base = torch.arange(6.0)
    a, b = base[:4], base[2:]
    with eg.record(a, b) as rec:
        y = (a**2).sum() + (b * 5).sum()
    assert rec.grad(y, a).tolist() == [0, 2, 9, 11]
    assert rec.grad(y, b).tolist() == [9, 11, 5, 5]
    w = torch.ones(3, requires_grad=True)
    with (
        pytest.raises(eg.PlaceError, match="lie in one piece of memory but apart in the graph"),
        eg.record(w, w.detach()),
    ):
        pass


def test_detached_tensors_stay_detached():
    x = torch.tensor([1.0, 2.0])
    with eg.record(x) as rec:
        d = x.detach()
        with torch.no_grad():
            n = x * 3
        y = (d * x + n + x.data).sum()
        z = d * 2
    assert rec.grad(y, x).tolist() == [1, 2]
    assert not n.requires_grad
    with pytest.raises(eg.UnconnectedError):
        rec.grad(eg.at(z)[0], x)
    assert rec.grad(eg.at(n)[0], x, unconnected="zero").tolist() == [0, 0]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize(
    "same",
    [
        lambda x: x.requires_grad_(False),
        lambda x: x.contiguous(),
        lambda x: x.to(torch.float32),
        lambda x: torch.as_tensor(x),
        lambda x: x.detach_(),
        lambda x: x.view(1, 3)._base,
    ],
)
def test_functions_that_return_a_recorded_tensor_keep_its_path(mode, same):
    x = torch.tensor([1.0, 2.0, 3.0])
    with eg.record(x) as rec:
        a = x.sum()
        with mode():
            same(x)
        y = (x * x).sum() + a
    assert rec.grad(y, x).tolist() == [3, 5, 7]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.add_(1),
        lambda x: torch.mul(torch.ones(3), 2, out=x),
        torch.nn.init.zeros_,
        torch.nn.init.uniform_,
        lambda x: torch.nn.init.constant_(x, 3),
    ],
)
def test_a_recorded_tensor_is_a_source_again_after_a_write(mode, write):
    x = torch.tensor([1.0, 2.0, 3.0])
    with eg.record(x) as rec:
        a = x.sum()
        with mode():
            write(x)
        y = (x * x).sum() + a
    assert rec.grad(y, x).tolist() == (2 * x).tolist()
    assert rec.grad(a, x).tolist() == [1, 1, 1]


def test_a_recorded_gradient_is_recorded_by_that_name_too():
    x = torch.ones(2, requires_grad=True)
    x.grad = torch.tensor([1.0, 2.0])
    g = x.grad
    with eg.record(g) as rec:
        y = (x.grad**2).sum() + (g**2).sum()
    assert rec.grad(y, g).tolist() == [4, 8]


bound_before = ThriceOnePlusSum.apply


@pytest.mark.parametrize("apply", [bound_before, lambda x, i: ThriceOnePlusSum.apply(x, i)])
def test_a_users_own_function_with_an_index(apply):
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    with eg.record(x) as rec:
        y = apply(x, 2)
    assert rec.grad(y, eg.at(x)[2]).item() == 4
    assert rec.grad(y, x).tolist() == [1, 1, 4, 1]
    (share,) = rec.contributions(y, eg.at(x)[2])
    assert (share.operation, share.value.item()) == ("ThriceOnePlusSum", 4)
    assert not ThriceOnePlusSum.apply(x, 2).requires_grad


def test_complex_tensors_follow_reverse_mode():
    z = torch.tensor([1.0 + 2.0j])
    with eg.record(z) as rec:
        z[0] = z[0] * 2
        y = (z.abs() ** 2).sum()
    assert rec.grad(y, z).tolist() == [4 + 8j]


def test_a_graph_that_backward_freed_is_named():
    x = torch.ones(2)
    with eg.record(x) as rec:
        y = (x**2).sum()
    y.backward()
    with pytest.raises(eg.FrameworkError, match=r"backward\(\) freed the graph .* or record again"):
        rec.grad(y, x)


def test_views_that_come_several_at_once_may_be_written_to():
    def program(t):
        for row in t:
            row.mul_(2)
        for column in t.unbind(1):
            column.add_(t[0, 0].clone())
        first, _ = t.split(1)
        first.mul_(3)
        return (t**2).sum()

    start = torch.arange(1.0, 7.0).reshape(2, 3)
    plain, t = start.clone(), start.clone()
    y = program(plain)
    with eg.record(t) as rec:
        z = program(t)
    assert torch.equal(t, plain)
    assert z.item() == y.item()
    assert rec.grad(z, t).tolist() == (2 * t).tolist()
    assert rec.contributions(z, t).total.tolist() == (2 * t).tolist()


def test_transforms_of_functions_see_the_recorded_tensor():
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    with eg.record(x) as rec:
        rows = torch.func.vmap(lambda row: (row * row).sum() + x[0, 0])(x)
        cubes = torch.func.grad(lambda v: (v**3).sum())(x)
        y = rows.sum() + x.sum()
    assert rec.grad(y, x).tolist() == [[2 + 2 + 1, 5], [7, 9]]
    assert rec.grad(eg.at(cubes)[1, 0], x).tolist() == [[0, 0], [18, 0]]
    assert not torch.func.vmap(lambda row: row.sum())(x).requires_grad


def test_saved_tensors_of_an_inner_recording_may_be_overwritten():
    x, y = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
    with eg.record(x) as outer:
        with eg.record(y) as inner:
            z = (x * x * y).sum()
        x[0] = x[1] * 10
        w = (x * z).sum()
    assert inner.grad(z, y).tolist() == [1, 4]
    assert outer.grad(z, x).tolist() == [6, 16]
    assert outer.grad(w, eg.at(x)[0]).item() == z.item()


@torch.jit.script
def scripted(x: torch.Tensor) -> torch.Tensor:
    return (x * x).sum()


def test_unrecordable_code_is_refused_or_seen_by_autograd():
    x = torch.tensor([1.0, 2.0])
    with eg.record(x) as rec:
        y = scripted(x) + x.sum()
    with pytest.raises(
        eg.FrameworkError, match="TorchScript, computed with a recorded tensor, so that paths are missing"
    ):
        rec.grad(y, x)
    x.requires_grad_()
    with eg.record(x) as rec:
        y = scripted(x)
    assert rec.grad(y, x).tolist() == [2, 4]


def test_a_view_in_another_dtype_is_made_inside():
    z = torch.tensor([1.0 + 2.0j])
    parts = torch.view_as_real(z)
    with eg.record(z) as rec, pytest.raises(eg.PlaceError, match="was made outside the block; make it inside"):
        parts * 2
    with eg.record(z) as rec:
        inside = torch.view_as_real(z)
        inside[0, 0] = 5.0
        y = (inside**2).sum()
    assert rec.grad(y, z).tolist() == [10 + 4j]


def test_tensors_of_no_elements_or_no_axes():
    empty, number = torch.zeros(0), torch.tensor(2.0)
    with eg.record(empty, number) as rec:
        y = empty.sum() + number
        number.mul_(3)
        z = number**2
        number.zero_()
    assert rec.grad(y, empty).tolist() == []
    assert len(rec.contributions(y, empty)) == 0
    assert rec.grad(z, number).item() == 12
    assert rec.contributions(z, number).total.item() == 12
    assert rec.grad(z, eg.at(number, write=0)).item() == 12


@pytest.mark.parametrize(
    "cut", [lambda x: x.detach(), lambda x: x.data, lambda x: x.detach()[:2]], ids=["detach", "data", "slice"]
)
def test_a_detached_tensor_is_not_the_recorded_tensor(cut):
    x = torch.tensor([1.0, 2.0, 3.0])
    with eg.record(x) as rec:
        d = cut(x)
        z = (d.sum() * x * x).sum()
    for of, wrt in ((z, d), (eg.at(d)[0], x)):
        with pytest.raises(eg.PlaceError, match=r"was cut off in the block .* as by detach\(\)"):
            rec.grad(of, wrt)
    assert rec.grad(z, x).tolist() == (2 * x * d.sum()).tolist()
