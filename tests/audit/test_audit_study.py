"""Causes injected into models: the audit names the parameters, the cause and the line."""

from importlib import import_module

import pytest

from tests.support.mutated import score, study

FEW = {"keras": {"detach", "dead rectifier", "rule of zeros", "unused"}, "jax": {"detach", "NaN by log"}}
"""Of the mutations of these frameworks, all run in tests/slow."""


LIBRARIES = {"gpt2": "transformers", "bert": "transformers", "attention": "flax"}
"""Libraries of models, which the oldest set of packages does not have."""


def import_models(framework, *kinds):
    for library in {LIBRARIES[kind] for kind in kinds if kind in LIBRARIES}:
        pytest.importorskip(library, reason=f"{library} comes with the newer sets of packages")
    return import_module(f"tests.support.mutated_{framework}")


@pytest.mark.parametrize(("framework", "kinds"), [("torch", ["gpt2"]), ("keras", []), ("jax", ["attention"])])
def test_every_cause_is_found_in_one_model(framework, kinds, monkeypatch):
    module = import_models(framework, *kinds)
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
    module = import_models(framework, kind)
    for seed in range(4 if framework == "torch" else 2):
        audit = module.audit_healthy(kind, seed)
        assert audit.ok, str(audit)
