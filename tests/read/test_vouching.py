"""Columns and products are never other numbers than rows, whatever a reverse rule, a hook or a state may do."""

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tensorflow as tf
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import elementgrad as eg


def hooked(x):
    h = x * 1.0
    if h.requires_grad:
        h.register_hook(lambda g: 2 * g)
    return h


HOOKED = {
    "second differences": (lambda x: hooked(x)[:-2] - 2 * hooked(x)[1:-1] + hooked(x)[2:], torch.float64),
    "beside large rows": (lambda x: torch.cat([1e5 * x, hooked(x)]), torch.float32),
    "in half precision": (lambda x: torch.cat([hooked(x) * 3e4, -hooked(x) * 3e4]), torch.float16),
}


@pytest.mark.parametrize("name", HOOKED)
def test_columns_of_hooked_functions_are_those_of_rows(name):
    f, dtype = HOOKED[name]
    J = eg.jacobian(f, torch.linspace(0.1, 0.8, 5, dtype=dtype))
    rows = torch.stack([J[i, :] for i in range(J.shape[0])])
    assert torch.equal(J[:, 2], rows[:, 2])
    assert torch.equal(J[:, [0, 3]], rows[:, [0, 3]])
    if dtype is not torch.float16:  # these hooks are linear, so that forward sweeps are transposed reverse ones
        assert J.plan(..., 2).mode == "forward"


HOOKS = {
    "guided": lambda g: g * (g > 0),
    "clipped": lambda g: g.clamp(-0.1, 0.1),
    "clipped by norm": lambda g: g / (g.norm() + 0.1),
    "shifted": lambda g: g + 1,
    "absolute": torch.abs,
}


@pytest.mark.parametrize("hook", HOOKS)
def test_stacks_of_columns_past_hooks_that_are_not_linear_are_those_of_rows(hook):
    weight = torch.linspace(-1, 1, 30, dtype=torch.float64).reshape(6, 5).cos() - 0.8

    def f(x):
        h = x.tanh()
        if h.requires_grad:
            h.register_hook(HOOKS[hook])
        return weight @ h

    J = eg.jacobian(f, torch.linspace(0.1, 0.8, 5, dtype=torch.float64))
    columns = J[:, [0, 3]]
    assert torch.equal(columns, torch.stack([J[i, :] for i in range(6)])[:, [0, 3]])
    assert "they give other numbers than reverse sweeps" in str(J.plan(..., [0, 3]))


class HalfDetached(torch.autograd.Function):
    """Half of its reverse rule is cut off from the seed, so that a transposed sweep finds the other half alone."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g + g.detach()


@pytest.mark.parametrize("columns", [2, [0, 3]])
def test_columns_past_a_rule_that_is_not_transposed_in_full_are_those_of_rows(columns):
    J = eg.jacobian(lambda x: torch.cat([1e5 * x, HalfDetached.apply(x)]), torch.linspace(0.1, 0.8, 5))
    found = J[:, columns]
    assert torch.equal(found, torch.stack([J[i, :] for i in range(10)])[:, columns])
    assert found[5:].max() == 2


def test_a_stack_of_columns_does_not_run_the_function_again():
    runs = []

    def f(x):
        runs.append(1)
        return torch.cat([x, x**2]) * x.prod() * len(runs)

    J = eg.jacobian(f, torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64))
    columns = J[:, [0, 2]]
    assert len(runs) == 1
    assert J.plan(..., [0, 2]).mode == "forward"
    torch.testing.assert_close(columns, torch.stack([J[i, :] for i in range(6)])[:, [0, 2]])


def test_a_stack_of_columns_can_be_differentiated_again():
    x = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64, requires_grad=True)
    f = lambda x: torch.cat([x.sin(), x**3]) * x.sum()  # noqa: E731
    columns = eg.jacobian(f, x, create_graph=True)[:, [0, 2]]
    (slope,) = torch.autograd.grad(columns.square().sum(), x)
    (own,) = torch.autograd.grad(torch.func.jacrev(f)(x)[:, [0, 2]].square().sum(), x)
    torch.testing.assert_close(slope, own)


class OnceOnly(torch.autograd.Function):
    """Its rules have no derivatives of their own, and there is one for each direction."""

    @staticmethod
    def forward(ctx, x):
        ctx.slope = 2 * x
        return x**2

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        return g * ctx.slope

    @staticmethod
    def jvp(ctx, tangent):
        return tangent * ctx.slope


def test_columns_through_a_rule_without_derivatives_run_the_function_again():
    x = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)
    J = eg.jacobian(lambda x: torch.cat([OnceOnly.apply(x), x]), x)
    expected = torch.cat([torch.diag(2 * x), torch.eye(3, dtype=torch.float64)])
    torch.testing.assert_close(J[:, [0, 2]], expected[:, [0, 2]])
    assert J.plan(..., [0, 2]).mode == "forward"


RULES = {
    "only positive": lambda dy, x: tf.nn.relu(dy),
    "guided": lambda dy, x: dy * tf.cast(dy > 0, dy.dtype) * tf.cast(x > 0, dy.dtype),
    "clipped": lambda dy, x: tf.clip_by_value(dy, -0.1, 0.1),
    "clipped by norm": lambda dy, x: tf.clip_by_norm(10 * dy, 1.0),
    "shifted": lambda dy, x: dy + 1,
}


@pytest.mark.parametrize("rule", RULES)
def test_columns_through_rules_that_are_not_linear_are_those_of_rows(rule):
    @tf.custom_gradient
    def f(x):
        return tf.nn.relu(x), lambda dy: RULES[rule](dy, x)

    J = eg.jacobian(lambda x: f(x) * 2, tf.constant([1.0, 2.0, 3.0]))
    rows = np.stack([J[i, :].numpy() for i in range(3)])
    np.testing.assert_array_equal(J[:, 0].numpy(), rows[:, 0])
    np.testing.assert_array_equal(J[:, [0, 1]].numpy(), rows[:, :2])
    np.testing.assert_allclose((J @ tf.constant([1.0, 2.0, 3.0])).numpy(), rows @ [1, 2, 3], rtol=1e-6)


def test_columns_that_are_not_finite_are_those_of_rows():
    J = eg.jacobian(lambda x: tf.where(x > 0, tf.math.log(x), 0.0), tf.constant([0.0, 1.0]))
    assert np.isnan(J[0, :].numpy()[0])
    assert np.isnan(J[:, 0].numpy()[0])


def test_attention_over_a_changed_input_is_an_error():
    x = torch.rand(1, 1, 4, 8)
    H = eg.hessian(lambda x: (scaled_dot_product_attention(x, x, x) ** 2).sum(), x)
    x.mul_(3)
    with pytest.raises(eg.FrameworkError, match="make a new Jacobian"):
        H[(0, 0, 0, 0), :]


def test_a_batch_whose_examples_mix_has_no_hessians_either(fw):
    x = fw.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    total = lambda x: fw.sum(x**2) + (x**2)[:, 0]  # noqa: E731
    with pytest.raises(eg.BatchError, match="the examples mix"):
        eg.hessian(total, x, batch=True)
    H = eg.hessian(lambda x: x[:, 0] ** 2 * x[:, 1], x, batch=True)
    assert fw.numpy(H.dense())[2].tolist() == [[12, 10], [10, 0]]


def test_each_input_of_a_batch_is_looked_at(fw):
    x = fw.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    f = lambda x, y: x**2 + fw.sum(y**2)  # noqa: E731
    apart, mixed = eg.jacobian(f, x, x, wrt=["x", "y"], batch=True)
    apart.dense()
    with pytest.raises(eg.BatchError, match="the examples mix"):
        mixed.dense()
    with pytest.raises(eg.BatchError, match="the examples mix"):
        eg.hessian(lambda x, y: f(x, y)[:, 0], x, x, wrt=["x", "y"], batch=True)


def test_examples_that_mix_with_opposite_signs_are_an_error(fw):
    signs = fw.tensor([[0.0], [1.0], [1.0], [-1.0]])
    J = eg.jacobian(lambda x: x + signs * x[:1], fw.tensor(np.ones((4, 2))), batch=True)
    with pytest.raises(eg.BatchError, match="the examples mix"):
        J.dense()


def test_products_keep_to_the_budget():
    model = torch.nn.Sequential(torch.nn.Linear(200, 200), torch.nn.Tanh())
    J = eg.jacobian(model, torch.rand(200), budget="10KB")
    loose = eg.jacobian(model, J._wrt.tensor)
    assert J.plan().chunk == 2  # the weights, which hang on the graph, are not on the way
    torch.testing.assert_close(J @ torch.eye(200), loose.dense())
    torch.testing.assert_close(torch.eye(200) @ J, loose.dense())


def test_buffers_stay_when_a_sweep_computes_them_again():
    norm = torch.nn.BatchNorm1d(2)
    J = eg.jacobian(lambda x: checkpoint(norm, x, use_reentrant=False) ** 2, torch.rand(3, 2))
    J[(0, 0), :]
    J.dense()
    eg.hessian(lambda x: (checkpoint(norm, x, use_reentrant=False) ** 3).sum(), torch.rand(3, 2))[(0, 0), :]
    assert norm.num_batches_tracked == 0
    assert norm.running_mean.tolist() == [0, 0]


def test_buffers_stay_of_modules_that_only_a_hook_calls():
    norm = torch.nn.BatchNorm1d(2)

    def f(x):
        h = x**2
        if h.requires_grad:
            h.register_hook(norm)
        return h * 3

    J = eg.jacobian(f, torch.rand(3, 2))
    J[(0, 0), :], J[:, (0, 0)], J[:, (0, ...)], J.dense()
    assert norm.num_batches_tracked == 0
    assert norm.running_mean.tolist() == [0, 0]


def test_buffers_given_for_one_call_go_with_it():
    norm = torch.nn.BatchNorm1d(2)
    own, given = norm.running_mean, {name: buffer.clone() + 5 for name, buffer in norm.named_buffers()}
    eg.grad(lambda x: torch.func.functional_call(norm, given, (x,)).sum(), torch.rand(3, 2))
    assert norm.running_mean is own
    assert given["running_mean"].tolist() == [5, 5]


class Growing(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.size, self.calls = 2, 0
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        if len(x) > self.size:
            self.size = len(x)
            self.register_buffer("scale", torch.ones(self.size))
        self.calls += 1
        self.count += 1
        return x * self.scale * float(self.count)


def test_buffers_and_what_goes_with_them_stay_together():
    module = Growing()
    gradient = eg.grad(lambda x: (module(x) + 10 * module(x)).sum(), torch.rand(4))
    assert gradient.tolist() == [21] * 4  # the second call finds what the first has counted
    assert (module.size, module.calls, module.count, len(module.scale)) == (2, 0, 0, 2)
    assert module(torch.ones(4)).tolist() == [1] * 4


def test_a_variable_stays_when_a_sweep_computes_it_again():
    v = tf.Variable(0.0)

    def f(x):
        v.assign_add(1.0)
        return x**2

    J = eg.jacobian(lambda x: tf.recompute_grad(f)(x), tf.constant([1.0, 2.0]))
    J[0, :], J.dense()
    assert v.numpy() == 0


def test_the_value_shares_no_memory():
    y = torch.ones(2)
    eg.jacobian(lambda x: y, torch.ones(2)).value.add_(1)
    assert y.tolist() == [1, 1]


def test_a_stack_that_draws_another_mask_runs_one_by_one():
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True).train()
    J = eg.jacobian(layer, torch.randn(2, 4, 8))
    columns = J[:, (0, 0, [0, 1, 2])]
    torch.testing.assert_close(columns, J.dense()[..., 0, 0, :3])
    assert J.plan(..., (0, 0, 0)).sweeps == 1


def test_a_graph_that_is_gone_is_told_in_a_sentence():
    w = torch.ones(2, requires_grad=True)
    J = eg.jacobian(lambda x: (x * w) ** 2, torch.ones(2))
    with torch.no_grad():
        w.add_(1)
    with pytest.raises(eg.FrameworkError, match="was changed in place since it was used"):
        J[0, :]
    x = torch.ones(2, requires_grad=True)
    J = eg.jacobian(lambda x: x**3 * x[0], x, create_graph=True)
    J[1, 1].backward()
    with pytest.raises(eg.FrameworkError, match="retain_graph=True"):
        J[0, :]


class DualOnly(OnceOnly):
    """Its forward rule takes a while, so that reads in several threads meet in it."""

    @staticmethod
    def jvp(ctx, tangent):
        time.sleep(0.005)
        return tangent * ctx.slope


@pytest.mark.parametrize("rule", [torch.sin, DualOnly.apply], ids=["transposed", "dual numbers"])
def test_threads_read_single_columns_of_one_jacobian(rule):
    x = torch.linspace(0.1, 0.8, 8, dtype=torch.float64)
    J = eg.jacobian(lambda x: torch.cat([rule(x), x]), x)
    expected = torch.func.jacrev(lambda x: torch.cat([x.sin() if rule is torch.sin else x**2, x]))(x)
    with ThreadPoolExecutor(4) as pool:
        columns = list(pool.map(lambda j: J[:, j], list(range(8)) * 2))
    torch.testing.assert_close(torch.stack(columns[:8], 1), expected)
    torch.testing.assert_close(torch.stack(columns[8:], 1), expected)
    assert J.plan(..., 0).mode == "forward"
