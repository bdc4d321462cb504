"""Patterns on PyTorch: random programs, rules of every kind, and operations without a pattern."""

import ctypes

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

import elementgrad as eg
from tests.support.made import counts
from tests.support.sparse_programs import MASK, SIZE, STEPS, Through, programs, run

POINT = torch.linspace(-1.3, 1.7, SIZE, dtype=torch.float64)
IMAGE = torch.randn(1, 4, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def matrix(f, x):
    """The dense Jacobian by reverse mode, one row after another."""
    J = eg.jacobian(f, x, unconnected="zero")
    return J.dense().numpy().reshape(J.value.numel(), -1)


def assert_holds(pattern, f, points):
    for x in points:
        assert not ((matrix(f, x) != 0) & ~pattern.dense()).any()


@settings(max_examples=counts(100))
@given(programs, st.integers(0, 10**6))
def test_no_entry_of_a_made_program_is_missed(program, seed):
    def f(x):
        return run(program, x)

    random = torch.Generator().manual_seed(seed)
    points = [torch.randn(SIZE, dtype=torch.float64, generator=random) for _ in range(2)]
    J = eg.jacobian(f, POINT, unconnected="zero")
    assert_holds(J.pattern(), f, [POINT, *points])
    own = matrix(f, points[0])
    near = {"rtol": 1e-9, "atol": 1e-11 * max(1, np.abs(own).max())}
    np.testing.assert_allclose(J.prepare("scipy")(points[0]).toarray(), own, **near)
    J = eg.jacobian(f, points[1], unconnected="zero")
    J.pattern(local=True)
    np.testing.assert_allclose(J.sparse("scipy").toarray(), matrix(f, points[1]), **near)


@pytest.mark.parametrize("name", STEPS)
def test_each_step_alone_is_followed(name):
    def f(x):
        return STEPS[name](x, 2)

    assert_holds(eg.jacobian(f, POINT).pattern(), f, [POINT, POINT.flip(0), POINT * 0.3])


WEIGHTS = torch.randn(4, 2, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
ZEROED = torch.where(torch.eye(4)[:, :, None, None].bool(), 1.0, 0.0).double().expand(4, 4, 2, 2).clone()
GRID = torch.rand(1, 3, 4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) * 2.4 - 1.2
TIGHT = {
    "slices": lambda x: x[:, 1:3, ::2] * 2,
    "grouped": lambda x: functional.conv2d(x, WEIGHTS, groups=2),
    "with steps and gaps": lambda x: functional.conv2d(x, WEIGHTS, stride=2, padding=2, dilation=2, groups=2),
    "zero weights": lambda x: functional.conv2d(x, ZEROED),
    "transposed": lambda x: functional.conv_transpose2d(
        x, WEIGHTS.transpose(0, 1).reshape(4, 2, 3, 3), stride=2, groups=2
    ),
    "average pool": lambda x: functional.avg_pool2d(x, 2, 1, 1),
    "padded around": lambda x: functional.pad(x, (1, 2, 1, 0), mode="circular"),
    "reflected": lambda x: functional.pad(x, (1, 2, 1, 1), mode="reflect"),
    "group norm": lambda x: functional.group_norm(x, 2),
    "batch of matrices": lambda x: x[0] @ x[0].transpose(1, 2),
    "einsum": lambda x: torch.einsum("bchw,cd->bdhw", x, torch.eye(4, dtype=x.dtype)),
    "triangle": lambda x: x[0, 0].tril(),
    "diagonals": lambda x: x[0, :, :4, :4].diagonal(dim1=1, dim2=2),
    "masked": lambda x: x[:, [0, 2]][..., MASK],
    "unfolded": lambda x: functional.unfold(x, 2),
    "lookup": lambda x: functional.embedding(torch.tensor([[1, 0, 3]]), x[0, 0]),
    "norms": lambda x: x.norm(dim=3),
    "stacked": lambda x: torch.stack([x[0, 0], x[0, 1] ** 2], 1),
    "outer": lambda x: torch.outer(x[0, 0, 0], x[0, 0, 1]),
    "enlarged": lambda x: functional.interpolate(x, scale_factor=2),
    "enlarged by pixels": lambda x: functional.interpolate(x, scale_factor=1.7, mode="nearest-exact"),
    "enlarged smoothly": lambda x: functional.interpolate(x, size=(7, 11), mode="bilinear"),
    "enlarged by corners": lambda x: functional.interpolate(x, size=(9, 11), mode="bicubic", align_corners=True),
    "enlarged vectors": lambda x: functional.interpolate(x[0], scale_factor=2, mode="linear"),
    "border repeated": lambda x: functional.pad(x, (1, 2, 0, 3), mode="replicate"),
    "adaptive average": lambda x: functional.adaptive_avg_pool2d(x, (2, 4)),
    "sampled": lambda x: functional.grid_sample(x, GRID, align_corners=False),
    "stacks of equations": lambda x: torch.linalg.solve(x[0, :, :5, :5] + 9 * torch.eye(5), WEIGHTS.new_ones(4, 5, 1)),
    "distances": lambda x: torch.cdist(x[0, 0], x[0, 1]),
    "bags": lambda x: functional.embedding_bag(
        torch.tensor([0, 3, 1, 0]), x[0, 0], torch.tensor([0, 1, 1]), mode="sum"
    ),
    "put where a mask is": lambda x: torch.zeros(5, 6).double().masked_scatter(torch.arange(6) % 3 > 0, x[0, 1]),
}


@pytest.mark.parametrize("name", TIGHT)
def test_a_known_operation_is_followed_exactly(name):
    f = TIGHT[name]
    pattern = eg.jacobian(f, IMAGE).pattern()
    seen = (matrix(f, IMAGE) != 0) | (matrix(f, IMAGE.flip(3) * 1.1) != 0)
    np.testing.assert_array_equal(pattern.dense(), seen)


@pytest.mark.parametrize("f", [functional.hardshrink, functional.softshrink], ids=["hard", "soft"])
def test_a_shrunk_element_depends_on_itself(f):
    np.testing.assert_array_equal(eg.jacobian(f, POINT).pattern().dense(), np.eye(SIZE, dtype=bool))


def test_any_element_of_an_adaptive_window_may_be_the_largest():
    def average(x):
        return functional.adaptive_avg_pool2d(x, (2, 4))

    pattern = eg.jacobian(lambda x: functional.adaptive_max_pool2d(x, (2, 4)), IMAGE).pattern()
    np.testing.assert_array_equal(pattern.dense(), matrix(average, IMAGE) != 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_samples_on_the_edge_between_pixels_miss_nothing(dtype):
    x = torch.randn(1, 1, 7, 7, dtype=dtype)
    steps = torch.linspace(-1, 1, 15, dtype=dtype)
    grid = torch.stack(torch.meshgrid(steps, steps, indexing="xy"), -1)[None]
    for f in (
        lambda x: functional.grid_sample(x, grid, align_corners=False),
        lambda x: functional.grid_sample(x, grid, align_corners=True, padding_mode="reflection"),
        lambda x: functional.interpolate(x, size=(21, 5), mode="bilinear"),
        lambda x: functional.interpolate(x, scale_factor=1 / 3, mode="bicubic"),
    ):
        assert_holds(eg.jacobian(f, x).pattern(), f, [x])


def test_a_mean_over_nothing_has_a_pattern():
    """Parts of it divide by how many numbers there are."""

    def f(x):
        return x**2 + functional.mse_loss(x[:0], x[:0] ** 2).nan_to_num()

    for local in (False, True):
        pattern = eg.jacobian(f, POINT).pattern(local=local)
        np.testing.assert_array_equal(pattern.dense(), np.eye(SIZE, dtype=bool))


def test_an_unknown_operation_takes_everything_it_is_given():
    def f(x):
        return torch.cat([torch.linalg.inv(x[:4].view(2, 2) + 3 * torch.eye(2)).reshape(-1), x[4:]])

    wanted = np.zeros((6, 6), dtype=bool)
    wanted[:4, :4], wanted[4, 4], wanted[5, 5] = True, True, True
    np.testing.assert_array_equal(eg.jacobian(f, POINT).pattern().dense(), wanted)


def test_zeros_count_only_where_they_do_not_depend_on_the_input():
    gate = torch.tensor([0.0, 1.0, 0.0, 1.0, 1.0, 0.0], dtype=torch.float64)
    assert eg.jacobian(lambda x: x * gate, POINT).pattern().columns.tolist() == [1, 3, 4]
    J = eg.jacobian(lambda x: x * (x > 0), POINT)
    assert J.pattern().size == 6
    assert J.pattern(local=True).columns.tolist() == np.flatnonzero(POINT > 0).tolist()


def test_random_numbers_are_never_taken_for_known():
    J = eg.jacobian(lambda x: functional.dropout(x, 0.5), POINT)
    assert J.pattern().size == 6
    assert_holds(J.pattern(), lambda x: functional.dropout(x, 0.5), [POINT])


class NumpyAhead(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.from_numpy(np.sin(x.detach().numpy()))

    @staticmethod
    def backward(ctx, gradient):
        return gradient * torch.cos(ctx.saved_tensors[0])


class NumpyBack(NumpyAhead):
    @staticmethod
    def backward(ctx, gradient):
        return torch.from_numpy(gradient.numpy() * np.cos(ctx.saved_tensors[0].numpy()))


def pointed(x):
    """Return what a kernel outside of PyTorch reads."""
    return torch.tensor((ctypes.c_double * SIZE).from_address(x.detach().data_ptr()), dtype=x.dtype)


@pytest.mark.parametrize(
    ("f", "why", "here"),
    [
        (lambda x: x * 2 if x[0] > 0 else x, "goes by its values", True),
        (lambda x: x * x[0].item(), "goes by its values", True),
        (lambda x: x[x > 0], "goes by its values", True),
        (lambda x: x * torch.tensor(x.tolist()), r"goes by its values \(tolist\)", True),
        (lambda x: x * pointed(x), r"goes by its values \(data_ptr\)", True),
        (lambda x: NumpyAhead.apply(x), r"goes by its values \(numpy\)", True),
        (lambda x: NumpyBack.apply(x), r"goes by its values \(numpy\)|reads the gradient", False),
    ],
)
def test_functions_that_branch_on_values_have_only_a_local_pattern(f, why, here):
    J = eg.jacobian(f, POINT, wrt=POINT)
    with pytest.raises(eg.PatternError, match=why):
        J.pattern()
    if here:
        assert_holds(J.pattern(local=True), f, [POINT])
        np.testing.assert_allclose(J.sparse("scipy").toarray(), matrix(f, POINT))
    else:
        with pytest.raises(eg.PatternError, match=r"no pattern can be found: .*; give one"):
            J.pattern(local=True)


def test_a_rule_for_forward_sweeps_alone_is_followed_forward():
    class Ahead(torch.autograd.Function):
        @staticmethod
        def forward(x):
            return x * x

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_forward(*inputs)

        @staticmethod
        def jvp(ctx, tangent):
            return 2 * ctx.saved_tensors[0] * tangent

    J = eg.jacobian(lambda x: Ahead.apply(x)[1:], POINT)
    np.testing.assert_array_equal(J.pattern().dense(), np.eye(SIZE)[1:])
    np.testing.assert_allclose(J.sparse("scipy").toarray(), np.diag(2 * POINT)[1:])


def test_straight_through_is_no_zero():
    assert eg.jacobian(Through.apply, POINT, wrt=POINT).pattern() == eg.Pattern.from_dense(np.eye(SIZE))


def test_activations_and_parameters_have_patterns():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv1d(1, 2, 3), torch.nn.ReLU(), torch.nn.Conv1d(2, 1, 2)).double()
    x = POINT.view(1, 1, -1)
    J = eg.jacobian(model, x, wrt="0")
    np.testing.assert_allclose(J.sparse("scipy").toarray(), eg.jacobian(model, x, wrt="0").dense().reshape(3, 8))
    with pytest.raises(eg.OptionError, match="is computed by the function"):
        J.prepare()(torch.ones(1, 2, 4, dtype=torch.float64))
    J = eg.jacobian(model, x, of="0", wrt="0.weight")
    assert J.pattern().size == 8 * 3
    np.testing.assert_allclose(
        J.sparse("scipy").toarray(), eg.jacobian(model, x, of="0", wrt="0.weight").dense().reshape(8, 6)
    )


def test_derivatives_go_through_a_sparse_jacobian():
    x = POINT.clone().requires_grad_()
    J = eg.jacobian(lambda x: x**3, x, create_graph=True)
    (gradient,) = torch.autograd.grad(J.sparse("coo").coalesce().values().sum(), x)
    torch.testing.assert_close(gradient, 6 * x.detach())


def test_many_elements_have_a_pattern_in_linear_memory():
    x = torch.linspace(0, 1, 10**5)
    J = eg.jacobian(lambda x: torch.sin(x[2:]) * x[1:-1] - x[:-2] / x.norm().detach(), x)
    S = J.prepare()
    assert S.pattern.size == 3 * (10**5 - 2)
    assert S.plan.sweeps == 3
    assert S(x * 2).values().shape == (S.pattern.size,)


def test_a_pattern_of_one_point_is_not_used_at_another():
    J = eg.jacobian(lambda x: x * 2 if x[0] > 0 else x * x, POINT)
    J.pattern(local=True)
    np.testing.assert_allclose(J.sparse("scipy").toarray(), np.diag(2 * POINT))
    with pytest.raises(eg.PatternError, match="found at one point only"):
        J.prepare()(POINT)
    with pytest.raises(eg.PatternError, match="no pattern that holds for every x"):
        J.pattern()


def test_a_function_that_writes_to_an_argument_is_not_run_again():
    kept = torch.zeros(SIZE)

    def f(x, kept):
        kept.add_(1)
        return x * 2

    J = eg.jacobian(f, POINT, kept, wrt="x")
    for local in (False, True):
        with pytest.raises(eg.PatternError, match="writes to an argument in place, so it is not run again"):
            J.pattern(local=local)
    assert kept.tolist() == [1.0] * SIZE


def test_an_input_that_was_changed_has_no_pattern_of_its_own_any_more():
    x = POINT.clone()
    J = eg.jacobian(lambda x: torch.relu(x) * 1, x)
    x.add_(1)
    with pytest.raises(eg.PatternError, match="changed in place after the function was evaluated"):
        J.pattern(local=True)
    assert J.pattern().size == SIZE


def test_a_recording_without_a_pattern_is_an_error():
    x = torch.ones(3)
    with eg.record(x) as rec:
        y = x * 2
    with pytest.raises(eg.FrameworkError, match="what was recorded is not run again"):
        rec.jacobian(eg.at(y), eg.at(x)).pattern()


def test_complex_jacobians_are_read_and_verified_by_colours():
    z = torch.complex(POINT, POINT.flip(0))
    J = eg.jacobian(lambda z: z[1:] * z[:-1], z)
    own = eg.jacobian(lambda z: z[1:] * z[:-1], z).dense()
    assert J.pattern().size == 10
    np.testing.assert_allclose(J.sparse("scipy").toarray(), own)
    assert J.verify() is True
    with pytest.raises(eg.PatternError, match="outside the pattern"):
        eg.jacobian(lambda z: z[1:] * z[:-1], z, pattern=eg.Pattern.from_dense(np.eye(5, 6))).verify()


def test_long_loops_forget_the_sets_that_nothing_depends_on_any_more(monkeypatch):
    def f(x):
        for _ in range(12):
            x = x + 0.1 * (x.roll(1) + x.roll(-1) - 2 * x)
        return x

    x = torch.linspace(0, 1, 60, dtype=torch.float64)
    whole = eg.jacobian(f, x).pattern()
    monkeypatch.setattr("elementgrad._sparsity.index_sets.COMPACT_ABOVE", 500)
    assert eg.jacobian(f, x).pattern() == whole
    assert whole.size == 60 * 25


@pytest.mark.parametrize("budget", [None, "1KB"])
def test_seeds_may_be_made_as_they_are_needed(monkeypatch, budget):
    monkeypatch.setattr("elementgrad._read.sparse.READY", 0)
    x = torch.linspace(-1, 1, 20, dtype=torch.float64)

    def f(x):
        return x[1:] ** 2 * x[:-1]

    J = eg.jacobian(f, x, budget=budget)
    np.testing.assert_allclose(J.sparse("scipy").toarray(), matrix(f, x))
    H = eg.hessian(lambda x: f(x).sum(), x, budget=budget)
    S = H.prepare("scipy")
    assert S.plan.chunks == (1 if budget is None else 3)
    np.testing.assert_allclose(S.sparse().toarray(), eg.hessian(lambda x: f(x).sum(), x).dense())
    assert "3 reverse sweeps by symmetry" in repr(S)


def test_a_rule_that_is_wrong_for_a_stack_of_seeds_gets_them_one_by_one():
    def distances(x):
        return torch.cdist(x.view(3, 2), x.view(3, 2) + 9)

    expected = torch.autograd.functional.jacobian(distances, POINT)
    J = eg.jacobian(distances, POINT)
    torch.testing.assert_close(J.dense(), expected)
    torch.testing.assert_close(J.sparse().to_dense(), expected.reshape(9, 6))
    assert J.verify()
