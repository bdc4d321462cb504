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
    audit = eg.audit(Net(rule(torch.clone, lambda g, x: 2 * g)), loss)
    (finding,) = audit.findings
    assert (finding.problem, finding.cause, finding.operation) == ("wrong", "custom-rule", "Rule")
    assert finding.parameters == ("trunk.weight", "trunk.bias")
    assert finding.where.startswith("test_audit_rules.py:")
    assert finding.evidence == ("its rule gives 2 for an element whose slope is 1",)
    assert "except_=['Rule']" in str(audit)


def test_a_rule_that_is_wrong_for_one_operand_is_about_that_one():
    change = rule(torch.matmul, lambda g, x, w: (g @ w.T, x.T @ g / 2))
    (finding,) = eg.audit(Net(change, several=True), loss).findings
    assert finding.parameters == ("factor",)


@pytest.mark.parametrize(
    "change",
    [
        rule(torch.tanh, lambda g, x: g * (1 - torch.tanh(x) ** 2)),
        rule(torch.relu, lambda g, x: g * (x > 0)),
        rule(torch.round, lambda g, x: g),
        rule(torch.sign, lambda g, x: g),
    ],
    ids=["right", "kink", "straight through", "binary"],
)
def test_right_rules_and_those_that_stand_in_for_steps_are_fine(change):
    audit = eg.audit(Net(change), loss)
    assert audit.ok, str(audit)


def test_a_rule_that_is_meant_to_differ_is_excepted_by_its_name():
    model = Net(rule(torch.clone, lambda g, x: -g))
    assert eg.audit(model, loss, except_=["Rule"]).ok
    assert not eg.audit(model, lambda: loss(model).backward()).ok
    with pytest.raises(eg.PlaceError, match="except_ names 'Ruler'"):
        eg.audit(model, loss, except_=["Ruler"])


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
