"""Reading derivatives disturbs nothing of the user's, also when it fails half-way."""

import warnings

import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf
import torch
import torch._dynamo  # now: it adds a warnings filter
from torch import nn

import elementgrad as eg
from tests.support.frameworks import TENSORFLOW, TORCH

READS = {
    "row": lambda J: J[(0, 0), :],
    "rows": lambda J: J[(0, ...), :],
    "column": lambda J: J[:, (0, 0)],
    "columns": lambda J: J[:, (0, ...)],
    "entries": lambda J: J.entries(([0, 1], [0, 1]), ([0, 1], [0, 1])),
    "diagonal": lambda J: J.diagonal(),
    "product": lambda J: J @ np.ones((2, 3)),
    "products": lambda J: J @ np.ones((2, 3, 2)),
    "row product": lambda J: np.ones((2, 3)) @ J,
    "whole": lambda J: J.dense(),
}
X = np.array([[0.1, 0.2, 0.3], [0.7, -0.4, 0.9]])


class Interrupted(nn.Module):
    """Passes on what it is given, or raises: when called, or when differentiated."""

    def __init__(self):
        super().__init__()
        self.now = self.later = None

    def forward(self, x):
        if self.now is not None:
            raise self.now
        return Fragile.apply(x, self)


class Fragile(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, owner):
        ctx.owner = owner
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        if ctx.owner.later is not None:
            raise ctx.owner.later
        return gradient, None


def network():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Tanh(), Interrupted(), nn.Linear(4, 3)
    ).double()
    model[3].eval()
    model.register_buffer("shared", model[1].running_mean)
    model[0].weight.requires_grad_(False)
    model[5].weight.grad = torch.full((3, 4), 7.0, dtype=torch.float64)
    return model


class Seen:
    """Everything of a model and of PyTorch that a read might change."""

    def __init__(self, model, x):
        self.model, self.x = model, x
        self.fired = []
        x.register_hook(lambda g: self.fired.append("tensor"))
        model[5].weight.register_hook(lambda g: self.fired.append("parameter"))
        model[5].register_full_backward_hook(lambda *_: None)
        model[1].register_forward_hook(lambda *_: None)
        self.before = self.state()

    def state(self):
        model, x = self.model, self.x
        hooks = [len(hooks) for m in model.modules() for hooks in (m._forward_hooks, m._backward_hooks)]
        return {
            "buffers": {name: (id(b), b.tolist(), b._version) for name, b in model.named_buffers()},
            "every buffer": [id(b) for m in model.modules() for b in m._buffers.values()],
            "gradients": {name: None if p.grad is None else p.grad.tolist() for name, p in model.named_parameters()},
            "requires_grad": [p.requires_grad for p in [*model.parameters(), x]],
            "training": [m.training for m in model.modules()],
            "hooks": [*hooks, len(x._backward_hooks), len(nn.modules.module._global_forward_pre_hooks)],
            "random numbers": torch.get_rng_state().tolist(),
            "argument": (x.tolist(), x._version, x.grad, x.is_leaf),
            "modes": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")),
            "warnings": list(warnings.filters),
            "stance": torch._dynamo.eval_frame._stance.stance,
            "attention": torch.backends.cuda.flash_sdp_enabled(),
        }

    def check(self):
        for name, value in self.state().items():
            assert value == self.before[name], name
        assert not self.fired


@pytest.fixture
def seen():
    return Seen(network(), torch.tensor(X, requires_grad=True))


@pytest.mark.parametrize("read", READS)
def test_a_read_leaves_a_model_of_pytorch_as_it_was(seen, read):
    J = eg.jacobian(seen.model, seen.x)
    seen.check()
    READS[read](J)
    seen.check()
    del J
    seen.check()


def test_gradients_and_hessians_leave_a_model_of_pytorch_as_it_was(seen):
    eg.grad(seen.model, seen.x, of="output[0, 0]")
    H = eg.hessian(lambda x: seen.model(x).sum(), seen.x)
    H[(0, 0), :], H[:, (0, 1)], H.diagonal()
    seen.check()


def test_hooks_of_the_user_fire_once_in_their_own_backward(seen):
    eg.jacobian(seen.model, seen.x).dense()
    seen.model(seen.x).sum().backward()
    assert sorted(seen.fired) == ["parameter", "tensor"]


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_all_is_as_it_was_after_the_function_raised(seen, kind, mode):
    raised = seen.model[4].now = kind("mine")
    with mode():
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        with pytest.raises(kind) as caught:
            eg.jacobian(seen.model, seen.x)
        assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == modes
    assert caught.value is raised
    seen.check()


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("read", READS)
def test_all_is_as_it_was_after_a_backward_raised(seen, kind, read):
    J = eg.jacobian(seen.model, seen.x)
    seen.model[4].later = kind("mine")
    with pytest.raises(kind, match="mine"):
        READS[read](J)
    seen.check()
    seen.model[4].later = None
    assert READS[read](J).isfinite().all()


class Doubled(torch.autograd.Function):
    """Its reverse rule has no derivative, so that a column runs the function again."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        return 2 * g

    @staticmethod
    def jvp(ctx, tangent):
        return 2 * tangent


def test_a_second_run_that_is_interrupted_leaves_all_as_it_was(seen):
    J = eg.jacobian(lambda x: Doubled.apply(seen.model(x)), seen.x)
    seen.model[4].now = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        J[:, (0, 0)]
    seen.check()


@pytest.mark.parametrize("read", READS)
def test_what_the_function_writes_into_its_argument_stays_inside(read):
    x = torch.tensor(X)

    def f(x):
        x[0] *= 2
        return x.add_(1) * x

    J = eg.jacobian(f, x)
    READS[read](J)
    assert x.tolist() == X.tolist()
    assert x._version == 0


def test_a_function_that_writes_into_another_argument_is_not_run_again():
    total = torch.zeros(2, 3, dtype=torch.float64)
    J = eg.jacobian(lambda x, total: x * total.add_(x.detach()), torch.tensor(X), total, wrt="x")
    assert J[:, (0, 0)].tolist() == [[X[0, 0], 0, 0], [0, 0, 0]]
    assert total.tolist() == X.tolist()
    assert "writes to an argument in place" in str(J.plan(..., (0, 0)))


def test_buffers_stay_where_a_method_of_their_module_is_called():
    norm = nn.BatchNorm1d(3).double()
    eg.jacobian(norm.forward, torch.tensor(X))[(0, 0), :]
    assert norm.running_mean.tolist() == [0, 0, 0]
    assert norm.num_batches_tracked == 0


def test_a_dropout_mask_is_the_same_for_all_reads_of_one_jacobian():
    x = torch.rand(2, 3, dtype=torch.float64) + 1
    J = eg.jacobian(lambda x: nn.functional.dropout(x, 0.5), x)
    expected = torch.diag((J.value / x).flatten()).reshape(2, 3, 2, 3)
    assert 0 < (expected > 0).sum() < 6, "some are dropped and some are not"
    units = torch.eye(6, dtype=torch.float64).reshape(6, 2, 3)
    torch.rand(5)  # the user goes on drawing
    assert torch.equal(J.dense(), expected)
    assert torch.equal(torch.stack([J[:, (i // 3, i % 3)] for i in range(6)], -1).reshape(2, 3, 2, 3), expected)
    assert torch.equal(J @ units.movedim(0, -1), expected.reshape(2, 3, 6))
    assert torch.equal(J.diagonal(), J.value / x)
    assert torch.equal(J[:, ([0, 1], [0, 2])], expected[..., [0, 1], [0, 2]])


def test_the_user_draws_the_random_numbers_they_would_have_drawn(fw):
    def draw():
        if fw is TORCH:
            return torch.rand(3).tolist()
        return tf.random.uniform([3]).numpy().tolist() if fw is TENSORFLOW else []

    def f(x):
        noise = {"torch": torch.rand_like, "tensorflow": lambda x: tf.random.uniform(x.shape, dtype=x.dtype)}
        return x * noise.get(fw.name, jnp.ones_like)(x)

    def session(read):
        torch.manual_seed(3)
        tf.random.set_seed(3)
        return draw(), read(), draw(), draw()

    J = None

    def read():
        nonlocal J
        J = eg.jacobian(f, fw.tensor(X))
        J[:, (0, 0)], J[(0, 0), :]

    assert session(read)[2:] == session(lambda: None)[2:]
    np.testing.assert_allclose(fw.numpy(J.diagonal()), fw.numpy(J.value) / X, rtol=1e-12)


def called_in_a_hook(plain, norm):
    plain[0].register_forward_hook(lambda _, __, output: norm(output))
    return plain


def called_before(plain, norm):
    plain[0].register_forward_pre_hook(lambda _, args: norm(args[0]))
    return plain


def called_in_a_forward_of_the_users(plain, norm):
    forward = plain[0].forward
    plain[0].forward = lambda x: forward(norm(x))
    return plain


def called_by_a_bare_module_inside(plain, norm):
    return nn.Sequential(plain, nn.Sequential(norm))


@pytest.mark.parametrize(
    "around",
    [called_in_a_hook, called_before, called_in_a_forward_of_the_users, called_by_a_bare_module_inside],
)
def test_buffers_stay_whichever_way_a_module_comes_by_them(around):
    norm = nn.BatchNorm1d(3)
    model = around(nn.Sequential(nn.Linear(3, 3), nn.Tanh()), norm)
    before = {name: buffer.clone() for name, buffer in norm.named_buffers()}
    eg.jacobian(model, torch.arange(12.0).reshape(4, 3))[(0, 0), (0, 1)]
    for name, buffer in norm.named_buffers():
        assert torch.equal(buffer, before[name]), name


SWITCHES = {
    "grad mode": (torch.is_grad_enabled, torch.set_grad_enabled, False),
    "default device": (
        lambda: torch._GLOBAL_DEVICE_CONTEXT.__dict__.get("device_context"),
        torch.set_default_device,
        "meta",
    ),
    "autocast": (
        lambda: torch.is_autocast_enabled("cpu"),
        lambda on: torch.set_autocast_enabled("cpu", on),
        True,
    ),
}
"""What is set in a thread until it is set again."""


@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_that_the_function_turns_is_back_after_a_read(name):
    fw, (read, write, other) = TORCH, SWITCHES[name]
    before, raises = read(), False

    def f(x):
        y = fw.sum(x * x)
        write(other)
        if raises:
            raise ValueError("mine")
        return y

    try:
        assert before != other
        np.testing.assert_allclose(fw.numpy(eg.grad(f, fw.tensor(X[0]))), 2 * X[0])
        assert read() == before
        assert eg.check(f, fw.tensor(X[0], "float32"))
        assert eg.explain(f, fw.tensor(X[0])).verdict == "flows"
        raises = True
        with pytest.raises(ValueError, match="mine"):
            eg.jacobian(f, fw.tensor(X[0]))
        assert read() == before
    finally:
        write(before)


@pytest.mark.parametrize("sow", [tf.random.set_seed, tf.keras.utils.set_random_seed])
def test_a_seed_that_the_function_sets_is_not_the_users(sow):
    def session(read):
        tf.random.set_seed(3)
        tf.random.uniform([3])
        read()
        return tf.random.uniform([3]).numpy().tolist(), tf.random.uniform([3]).numpy().tolist()

    def f(x):
        sow(7)
        return x * tf.random.uniform([3], dtype=x.dtype)

    assert session(lambda: eg.jacobian(f, TENSORFLOW.tensor(X[0])).dense()) == session(lambda: None)
