"""The whole mutation study: every model with every cause, and a hundred healthy runs."""

import os
from importlib import import_module

import pytest

from tests.support.mutated import score, study

LONG = os.environ.get("HYPOTHESIS_PROFILE") == "long"
FRAMEWORKS = ("torch", "keras", "jax")


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_right_parameters_in_all_and_cause_and_line_in_most(framework):
    module = import_module(f"tests.support.mutated_{framework}")
    seeds = range(1, 6) if LONG else [1]
    sets, causes, missed = score(study(module, seeds, thin=framework == "jax" and not LONG))
    print(f"{framework}: right parameters in {sets:.1%}, cause and line in {causes:.1%}")
    assert sets == 1.0, [each.label for each in missed if not each.right_set]
    assert causes >= 0.95, [(each.label, each.text) for each in missed]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_hundred_healthy_runs_have_no_findings(framework):
    module = import_module(f"tests.support.mutated_{framework}")
    runs = {"torch": 20, "keras": 34 if LONG else 8, "jax": 50 if LONG else 2}[framework]
    for kind in module.MODELS:
        for seed in range(100, 100 + runs):
            audit = module.audit_healthy(kind, seed)
            assert audit.ok, f"{kind}, seed {seed}: {audit}"
