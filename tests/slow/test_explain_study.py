"""Faults at random depths of models of the usual sizes: `eg.explain` names the cause and the line."""

import pytest

pytest.importorskip("transformers", reason="transformers comes with the newer sets of packages")
from tests.support.mutated_large import FAULTS, MODELS, explained


@pytest.mark.parametrize("kind", MODELS)
def test_the_cause_and_the_line_of_a_fault_are_found(kind):
    outcomes = [explained(kind, fault, seed=0) for fault in FAULTS]
    missed = [text for right, text in outcomes if not right]
    assert len(FAULTS) == 23
    assert len(missed) <= 1, "\n\n".join(missed)
