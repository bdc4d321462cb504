"""Causes injected into models: the audit names the parameters, the cause and the line."""

from importlib import import_module

import pytest

from tests.support.mutated import score, study

FEW = {"keras": {"detach", "dead rectifier", "rule of zeros", "unused"}, "jax": {"detach", "NaN by log"}}
"""Of the mutations of these frameworks, all run in tests/slow."""


@pytest.mark.parametrize("framework", ["torch", "keras", "jax"])
def test_every_cause_is_found_in_one_model(framework, monkeypatch):
    module = import_module(f"tests.support.mutated_{framework}")
    few = [each for each in module.MUTATIONS if each.name in FEW.get(framework, {each.name})]
    monkeypatch.setattr(module, "MUTATIONS", few)
    sets, causes, missed = score(study(module, [0], thin=True))
    assert (sets, causes) == (1.0, 1.0), [(each.label, each.text) for each in missed]


@pytest.mark.parametrize(
    ("framework", "kind"),
    [("torch", kind) for kind in ("gpt2", "bert", "resnet", "unet", "gru")]
    + [("keras", "dense"), ("jax", "attention")],
)
def test_healthy_models_have_no_findings(framework, kind):
    module = import_module(f"tests.support.mutated_{framework}")
    for seed in range(4 if framework == "torch" else 2):
        audit = module.audit_healthy(kind, seed)
        assert audit.ok, str(audit)
