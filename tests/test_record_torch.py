"""Recordings of PyTorch: slices are parts of their base, and plain tensors stay what they are."""

import copy
import gc
import weakref

import numpy as np
import pytest
import torch

import elementgrad as eg
from tests.functions import ThriceOnePlusSum


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


def test_what_the_user_detaches_stays_detached():
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
def test_what_gives_a_recorded_tensor_back_does_not_cut_it_off(mode, same):
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


def state(x):
    return x.requires_grad, x.is_leaf, x.grad_fn, x.grad, x._version, x._backward_hooks, x.data_ptr(), x.tolist()


@pytest.mark.parametrize("requires_grad", [False, True])
def test_nothing_about_the_tensors_changes(requires_grad):
    x = torch.tensor([1.0, 2.0], requires_grad=requires_grad)
    x.grad = torch.tensor([7.0, 7.0]) if requires_grad else None
    grad, before = x.grad, state(x)[:3] + state(x)[4:]
    with eg.record(x) as rec:
        inside = state(x)[:3] + state(x)[4:]
        y = (x**3).sum()
        rec.grad(y, x)
        assert x.grad is grad
        assert torch.is_grad_enabled()
    assert inside == before
    rec.grad(y, x), rec.jacobian(y, x).dense(), rec.contributions(y, x)
    assert state(x)[:3] + state(x)[4:] == before
    assert x.grad is grad
    assert not requires_grad or grad.tolist() == [7, 7]
    y.backward()
    assert (x.grad is not None) == requires_grad


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_gradients_are_on_inside_whatever_the_mode_outside(mode):
    x = torch.tensor([1.0, 2.0])
    with mode():
        enabled = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        with eg.record(x) as rec:
            y = (x**2).sum()
        assert rec.grad(y, x).tolist() == [2, 4]
        assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == enabled
    assert rec.grad(y, x).tolist() == [2, 4]


def test_inference_tensors_are_written_to_as_well():
    with torch.inference_mode():
        x, k = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.0, 2.0, 2.0])
        with eg.record(x) as rec:
            x[0] = x[1] * 3
            k += 1
            y = (x * k).sum()
        assert x.tolist() == [6, 2, 3]
        assert k.tolist() == [3, 3, 3]
        assert rec.grad(y, x).tolist() == [3, 12, 3]


def test_values_leave_pytorch_inside_the_block_as_ever():
    x = torch.tensor([1.0, 2.0])
    with eg.record(x):
        y = x * 2
        s = y.sum()
        assert y.numpy().tolist() == np.asarray(y).tolist() == y.tolist() == [2, 4]
        assert s.item() == float(s) == 6
        assert int(s) == 6
        assert bool(s > 3)
        assert np.from_dlpack(y).tolist() == [2, 4]
        assert {x: 1}[x] == 1
        assert repr(x) == "tensor([1., 2.])"
        assert copy.deepcopy(x).tolist() == [1, 2]
        assert x.mul_(3) is x
        x += 1
        assert torch.as_tensor(x) is x
    assert x.tolist() == [4, 7]


def test_a_compiled_function_in_the_block_runs_eagerly():
    torch.compiler.reset()
    f = torch.compile(lambda x: (x**2).sum(), backend="aot_eager")
    f(torch.ones(2))
    x = torch.tensor([1.0, 2.0])
    with eg.record(x) as rec:
        y = f(x)
    assert rec.grad(y, x).tolist() == [2, 4]


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


def test_models_are_recorded_with_their_parameters():
    torch.manual_seed(0)
    norm = torch.nn.BatchNorm1d(4)
    model = torch.nn.Sequential(
        torch.nn.Linear(3, 4), norm, torch.nn.ReLU(inplace=True), torch.nn.Linear(4, 2)
    ).double()
    reference = copy.deepcopy(model)
    x = torch.randn(5, 3, dtype=torch.float64)
    weight = model[0].weight
    with eg.record(x, weight) as rec:
        y = model(x)
    leaf = x.clone().requires_grad_()
    z = reference(leaf)
    of_x, of_weight = torch.autograd.grad(z[1, 0], [leaf, reference[0].weight])
    torch.testing.assert_close(rec.grad(eg.at(y)[1, 0], x), of_x)
    torch.testing.assert_close(rec.grad(eg.at(y)[1, 0], weight), of_weight)
    assert weight.grad is None
    torch.testing.assert_close(norm.running_mean, reference[1].running_mean)
    with pytest.raises(eg.PlaceError, match="from outside the recording"):
        rec.grad(eg.at(y)[1, 0], model[3].weight)


def test_gradients_may_be_switched_on_in_the_block():
    x = torch.tensor([1.0, 2.0])
    with eg.record(x) as rec:
        a = x * 2
        x.requires_grad_()
        y = (x**2).sum()
    y.backward(retain_graph=True)
    assert x.grad.tolist() == [2, 4]
    assert rec.grad(y, x).tolist() == [2, 4]
    assert rec.grad(eg.at(a)[0], x).tolist() == [2, 0]


def test_no_memory_is_kept_when_the_recording_is_gone():
    x = torch.ones(1000)
    kept = [weakref.ref(x)]
    with eg.record(x) as rec:
        x[3] = (x * x).exp().sum()
        y = x.sin().sum()
        kept.append(weakref.ref(x.cos()))
    rec.grad(y, x)
    recorder = weakref.ref(rec._recorder)
    gc.disable()
    try:
        del rec
        assert recorder() is None
        del x
        assert kept[0]() is None
    finally:
        gc.enable()
    assert y.requires_grad


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


def test_layouts_without_elements_are_refused():
    with pytest.raises(eg.FrameworkError, match=r"have no derivatives; give x\.to_dense"):
        eg.record(torch.eye(2).to_sparse())


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


def test_an_optimizer_may_step_in_the_block():
    torch.manual_seed(0)
    x, model = torch.randn(4, 3), torch.nn.Linear(3, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    with eg.record(x, model.weight) as rec:
        before = (model(x) ** 2).sum()
        before.backward(retain_graph=True)
        gradient = model.weight.grad.clone()
        optimizer.step()
        after = (model(x) ** 2).sum()
    torch.testing.assert_close(rec.grad(before, model.weight), gradient)
    torch.testing.assert_close(rec.grad(after, model.weight), 2 * model(x).detach().T @ x)


def test_transforms_of_functions_see_the_recorded_tensor():
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    with eg.record(x) as rec:
        rows = torch.func.vmap(lambda row: (row * row).sum() + x[0, 0])(x)
        cubes = torch.func.grad(lambda v: (v**3).sum())(x)
        y = rows.sum() + x.sum()
    assert rec.grad(y, x).tolist() == [[2 + 2 + 1, 5], [7, 9]]
    assert rec.grad(eg.at(cubes)[1, 0], x).tolist() == [[0, 0], [18, 0]]
    assert not torch.func.vmap(lambda row: row.sum())(x).requires_grad


def test_what_an_inner_recording_saved_may_be_overwritten_in_the_outer():
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


def test_code_that_cannot_be_watched_is_refused_or_seen_by_autograd():
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
