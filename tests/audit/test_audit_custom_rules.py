"""Derivatives that users write: wrong ones are findings, and those that are meant to differ are not."""

import numpy as np
import pytest
import torch
from torch import nn

import elementgrad as eg


def rule(values, derivative):
    """Return a function of PyTorch with a derivative of its own."""

    class Rule(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            ctx.save_for_backward(*inputs)
            return values(*inputs)

        @staticmethod
        def backward(ctx, g):
            return derivative(g, *ctx.saved_tensors)

    return Rule.apply


class Net(nn.Module):
    def __init__(self, change, several=False):
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        self.factor = nn.Parameter(torch.randn(8, 8)) if several else None
        self.change = change

    def forward(self, x):
        h = self.trunk(x)
        return self.head(self.change(h) if self.factor is None else self.change(h, self.factor))


X = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))


def loss(model):
    return model(X).square().mean()


def test_a_wrong_rule_is_a_finding_about_what_is_in_front_of_it():
    audit = eg.audit(Net(rule(lambda x: 3 * x, lambda g, x: 2 * g)), loss)
    (finding,) = audit.findings
    assert (finding.problem, finding.cause, finding.operation) == ("wrong", "custom-rule", "Rule")
    assert finding.parameters == ("trunk.weight", "trunk.bias")
    assert finding.where.startswith("test_audit_custom_rules.py:")
    assert finding.evidence == ("its rule gives 2 for an element whose slope is 3",)
    assert "except_=['Rule']" in str(audit)


def test_a_wrong_rule_is_not_excused_by_how_its_operand_lies_in_memory():
    change = rule(lambda x: 3 * x, lambda g, x: 2 * g)
    (finding,) = eg.audit(Net(lambda h: change(h.T).T), loss).findings
    assert finding.evidence == ("its rule gives 2 for an element whose slope is 3",)


def test_a_rule_that_is_wrong_for_one_operand_is_about_that_one():
    change = rule(torch.matmul, lambda g, x, w: (g @ w.T, x.T @ g / 2))
    (finding,) = eg.audit(Net(change, several=True), loss).findings
    assert finding.parameters == ("factor",)


class Both(torch.autograd.Function):
    """Returns its first operand as it is, and a product with another scale for the second."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x.clone(), x @ w

    @staticmethod
    def backward(ctx, g, h):
        x, w = ctx.saved_tensors
        return g + h @ w.T, 3 * x.T @ h


WRONG = {
    "a rectifier that all numbers pass": (torch.relu, lambda g, x: 5 * g, 4.0),
    "a rectifier": (torch.relu, lambda g, x: 5 * g, 0.0),
    "limits that all numbers are within": (lambda x: x.clamp(-1e6, 1e6), lambda g, x: g / 2, 0.0),
    "a pole": (lambda x: 1 / (x + 1e-3), lambda g, x: g / (x + 1e-3) ** 2, 0.0),
    "steep": (lambda x: (x.abs() + 1e-6).log(), lambda g, x: g / x.abs(), -4.0),
    "a kept share, without its factor": (lambda x: 2 * x * (torch.arange(8) % 2), lambda g, x: g, 0.0),
    "leaky": (lambda x: nn.functional.leaky_relu(x, 0.1), lambda g, x: g * (x > 0).float() + 0.3 * g * (x <= 0), 0.0),
}


@pytest.mark.parametrize(("values", "derivative", "bias"), WRONG.values(), ids=WRONG)
def test_a_wrong_rule_is_not_excused_where_numbers_pass_as_they_are(values, derivative, bias):
    model = Net(rule(values, derivative))
    nn.init.constant_(model.trunk.bias, bias)
    (finding,) = eg.audit(model, loss).findings
    assert (finding.problem, finding.operation) == ("wrong", "Rule")
    assert finding.parameters == ("trunk.weight", "trunk.bias")


def test_a_wrong_rule_is_not_excused_by_another_call_in_which_it_stands_still():
    change = rule(torch.relu, lambda g, x: 5 * g)
    audit = eg.audit(Net(lambda h: sum([change(h + by) for by in (0.0, -100.0)])), loss)
    assert [finding.problem for finding in audit.findings] == ["wrong"], str(audit)


def test_a_wrong_rule_is_not_excused_by_another_operand_that_is_returned():
    (finding,) = eg.audit(Net(lambda h, w: sum(Both.apply(h, w)), several=True), loss).findings
    assert (finding.problem, finding.parameters) == ("wrong", ("factor",))


def quantize(x):
    scale = x.abs().max() / 127
    return torch.round(x / scale) * scale


def quantize_by(x, scale):
    return (x / scale).round().clamp(-8, 7) * scale


def learn_scale(g, x, scale):
    steps = x / scale
    return g, (g * torch.where(steps.abs() < 7, steps.round() - steps, steps.sign() * 7)).sum(0, keepdim=True)


def binary(x):
    """Return signs, scaled by the mean size, as binary weights are: it moves between its jumps."""
    return x.sign() * x.abs().mean()


def ternary(x):
    scale = x.abs().mean(-1, keepdim=True)
    return (x / scale).round().clamp(-1, 1) * scale


def keep_largest(x):
    return x * (x.abs() >= x.abs().topk(3, -1).values[:, -1:])


def keep_largest_by_sum(x):
    kept = keep_largest(x)
    return kept * x.abs().sum(-1, keepdim=True) / kept.abs().sum(-1, keepdim=True)


def in_bfloat16(change):
    return lambda h: change(h.bfloat16()).float()


class Attention(torch.autograd.Function):
    """Attention that keeps a sum instead of the weights, and computes them again, as fused kernels do."""

    @staticmethod
    def forward(ctx, q, k, v):
        scores = q @ k.T / 3
        sums = scores.logsumexp(-1, keepdim=True)
        result = (scores - sums).exp() @ v
        ctx.save_for_backward(q, k, v, result, sums)
        ctx.mark_non_differentiable(sums)
        return result, sums

    @staticmethod
    def backward(ctx, g, _):
        q, k, v, result, sums = ctx.saved_tensors
        weights = (q @ k.T / 3 - sums).exp()
        scores = weights * (g @ v.T - (g * result).sum(-1, keepdim=True)) / 3
        return scores @ k, scores.T @ q, weights.T @ g


class Dropping(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mask = torch.rand_like(x) > 0.3
        return x * ctx.mask

    @staticmethod
    def backward(ctx, g):
        return g * ctx.mask


def attend(h):
    return Attention.apply(h, 2 * h, h + 1)[0]


def attend_roughly(h):
    h = h.bfloat16()
    return Attention.apply(h, 2 * h, h + 1)[0].float()


HEALTHY = {
    "tanh": rule(torch.tanh, lambda g, x: g * (1 - torch.tanh(x) ** 2)),
    "rectifier": rule(torch.relu, lambda g, x: g * (x > 0)),
    "attention": attend,
    "attention in bfloat16": attend_roughly,
    "dropout": Dropping.apply,
}


@pytest.mark.parametrize("change", HEALTHY.values(), ids=HEALTHY)
def test_right_rules_are_fine(change):
    audit = eg.audit(Net(change), loss)
    assert audit.ok, str(audit)
    assert not [note for note in audit.notes if note.problem == "surrogate"], str(audit)


MEANT = {
    "rounding": (rule(torch.round, lambda g, x: g), "goes in steps"),
    "binary": (rule(torch.sign, lambda g, x: g * (x.abs() <= 1)), "goes in steps"),
    "binary, scaled": (rule(binary, lambda g, x: g), "goes in steps"),
    "binary, scaled, in bfloat16": (in_bfloat16(rule(binary, lambda g, x: g)), "goes in steps"),
    "binary, scaled and clipped": (rule(binary, lambda g, x: g * (x.abs() <= 1)), "goes in steps"),
    "ternary": (rule(ternary, lambda g, x: g), "goes in steps"),
    "sparsity, scaled": (rule(keep_largest_by_sum, lambda g, x: g), "goes in steps"),
    "choice": (rule(lambda x: (x.sigmoid() > 0.5).float(), lambda g, x: g * x.sigmoid() * x.neg().sigmoid()), "steps"),
    "quantizer": (rule(quantize, lambda g, x: g), "goes in steps"),
    "clamp": (rule(lambda x: x.clamp(-0.3, 0.3), lambda g, x: g), "stands still"),
    "sparsity": (rule(keep_largest, lambda g, x: g), "stands still"),
    "reversal": (rule(torch.clone, lambda g, x: -g), "as it is"),
    "scaling": (rule(lambda x: x.view_as(x), lambda g, x: 0.1 * g), "as it is"),
    "clipping": (rule(torch.clone, lambda g, x: g.clamp(-0.01, 0.01)), "as it is"),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("change", "reason"), MEANT.values(), ids=MEANT)
def test_rules_that_differ_on_purpose_are_notes_at_most(change, reason, seed):
    x = torch.randn(16, 6, generator=torch.Generator().manual_seed(seed))
    audit = eg.audit(Net(change), lambda model: model(x).square().mean())
    assert audit.ok, str(audit)
    notes = [note for note in audit.notes if note.problem == "surrogate"]
    assert all(reason in note.reason and note.parameters == ("trunk.weight", "trunk.bias") for note in notes)
    assert notes or reason != "as it is"


def test_a_learned_scale_of_a_quantizer_is_a_surrogate_too():
    model = Net(rule(quantize_by, learn_scale))
    model.factor = nn.Parameter(torch.full((1, 8), 0.1))
    audit = eg.audit(model, loss)
    assert audit.ok, str(audit)
    assert "factor" in {name for note in audit.notes for name in note.parameters}, str(audit)


def test_units_that_a_right_rule_has_off_for_a_batch_are_notes():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 64), nn.Linear(64, 2))

    def loss(model):
        return model[1](HEALTHY["rectifier"](model[0](X[:4]))).square().mean()

    audit = eg.audit(model, loss)
    assert audit.ok, str(audit)
    assert [note.cause for note in audit.notes] == ["clamped"], str(audit)
    with torch.no_grad():
        model[0].bias[5] = -1e3
    (finding,) = eg.audit(model, loss).findings
    assert (finding.parameters, finding.cause) == (("0.weight[5]", "0.bias[5]"), "clamped")


def test_units_that_a_wrong_rule_stops_are_a_finding():
    (finding,) = eg.audit(Net(rule(torch.tanh, lambda g, x: g * (torch.arange(8) != 3))), loss).findings[:1]
    assert (finding.problem, finding.cause) == ("dead units", "custom-rule")


def test_another_rule_that_is_meant_to_differ_is_excepted_by_its_name():
    model = Net(rule(lambda x: 3 * x, lambda g, x: -g))
    assert eg.audit(model, loss, except_=["Rule"]).ok
    assert not eg.audit(model, lambda: loss(model).backward()).ok
    with pytest.raises(eg.PlaceError, match="except_ names 'Ruler'"):
        eg.audit(model, loss, except_=["Ruler"])


def cut(h, after):
    """Return what a rule makes of a tensor without a gradient, before or after the rule."""
    change = rule(lambda x: 3 * x, lambda g, x: -g)
    return change(h).detach() if after else change(h.detach())


def no_gradients(h):
    with torch.no_grad():
        return cut(h, False)


CUTS = {"before": lambda h: cut(h, False), "after": lambda h: cut(h, True), "a block": no_gradients}


@pytest.mark.parametrize("steps", [False, True])
@pytest.mark.parametrize("change", CUTS.values(), ids=CUTS)
def test_a_rule_is_excepted_by_its_name_where_the_path_is_cut_as_well(change, steps):
    model = Net(change)
    (finding,) = eg.audit(model, (lambda: loss(model).backward()) if steps else loss, except_=["Rule"]).findings
    assert (finding.problem, finding.parameters) == ("no gradient", ("trunk.weight", "trunk.bias"))


@pytest.mark.parametrize("steps", [False, True])
def test_a_rule_is_excepted_by_its_name_where_nothing_has_a_gradient(steps):
    model = Net(rule(lambda x: 3 * x, lambda g, x: -g))

    def loss(model):
        return model(X).detach().square().mean()

    (finding,) = eg.audit(model, (lambda: loss(model).backward()) if steps else loss, except_=["Rule"]).findings
    assert (finding.cause, len(finding.parameters)) == ("detached", 4)


def test_wrong_rules_of_keras():
    keras, tf = pytest.importorskip("keras"), pytest.importorskip("tensorflow")

    @tf.custom_gradient
    def scaled(x):
        return 3.0 * x, lambda g: 2.0 * g

    model = keras.Sequential([keras.layers.Dense(8), keras.layers.Lambda(scaled), keras.layers.Dense(2)])
    x = tf.constant(X.numpy())
    model(x)
    (finding,) = eg.audit(model, lambda model: tf.reduce_mean(model(x) ** 2)).findings
    assert (finding.problem, finding.operation, len(finding.parameters)) == ("wrong", "scaled", 2)
    first, last = model.layers[0], model.layers[-1]
    (finding,) = eg.audit(
        model, lambda model: tf.reduce_mean(last(scaled(tf.stop_gradient(first(x)))) ** 2), except_=["scaled"]
    ).findings
    assert (finding.cause, len(finding.parameters)) == ("detached", 2)

    @tf.custom_gradient
    def rectified(x):
        return tf.nn.relu(x), lambda g: 5.0 * g

    audit = eg.audit(model, lambda model: tf.reduce_mean(last(rectified(tf.abs(first(x)))) ** 2))
    assert [finding.operation for finding in audit.findings] == ["rectified"], str(audit)

    @tf.custom_gradient
    def reverse(x):
        return tf.identity(x), lambda g: -g

    @tf.custom_gradient
    def binary(x):
        return tf.sign(x) * tf.reduce_mean(tf.abs(x)), lambda g: g

    for change in (reverse, binary):
        model = keras.Sequential([keras.layers.Dense(8), keras.layers.Lambda(change), keras.layers.Dense(2)])
        model(x)
        audit = eg.audit(model, lambda model: tf.reduce_mean(model(x) ** 2))
        assert audit.ok, str(audit)
        assert [note.problem for note in audit.notes] == ["surrogate"], str(audit)


@pytest.mark.parametrize("compiled", [False, True])
def test_wrong_rules_of_jax(compiled):
    jax = pytest.importorskip("jax")
    jnp = jax.numpy

    @jax.custom_jvp
    def wave(x):
        return jnp.sin(x)

    wave.defjvp(lambda primals, tangents: (wave(*primals), jnp.sin(*primals) * tangents[0]))
    params = {"a": jnp.asarray(np.eye(6, 4), jnp.float32), "b": jnp.ones((4, 2))}
    function = jax.jit(wave) if compiled else wave
    x = jnp.asarray(X.numpy())
    (finding,) = eg.audit(params, lambda params: jnp.mean((function(x @ params["a"]) @ params["b"]) ** 2)).findings
    assert (finding.problem, finding.operation, finding.parameters) == ("wrong", "wave", ("a",))
    for stopped in (
        lambda params: jnp.mean((function(jax.lax.stop_gradient(x @ params["a"])) @ params["b"]) ** 2),
        lambda params: jax.lax.stop_gradient(jnp.mean((function(x @ params["a"]) @ params["b"]) ** 2)),
    ):
        (finding,) = eg.audit(params, stopped, except_=["wave"]).findings
        assert finding.cause == "detached"

    @jax.custom_vjp
    def rectify(x):
        return jax.nn.relu(x)

    rectify.defvjp(lambda x: (jax.nn.relu(x), None), lambda _, g: (5 * g,))
    function = jax.jit(rectify) if compiled else rectify
    audit = eg.audit(params, lambda params: jnp.mean((function(jnp.abs(x @ params["a"])) @ params["b"]) ** 2))
    assert [finding.operation for finding in audit.findings] == ["rectify"], str(audit)

    @jax.custom_vjp
    def reverse(x):
        return x

    reverse.defvjp(lambda x: (x, None), lambda _, g: (-g,))

    @jax.custom_vjp
    def scale_signs(x):
        return jnp.sign(x) * jnp.mean(jnp.abs(x))

    scale_signs.defvjp(lambda x: (scale_signs(x), None), lambda _, g: (g,))
    for change in (reverse, scale_signs):
        function = jax.jit(change) if compiled else change
        audit = eg.audit(params, lambda params, f=function: jnp.mean((f(x @ params["a"]) @ params["b"]) ** 2))
        assert audit.ok, str(audit)
        assert [note.problem for note in audit.notes] == ["surrogate"], str(audit)
