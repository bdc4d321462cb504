"""A fault of each kind is found at its step, element and line, with its cause, and replays to the same bits."""

import pytest

from tests.support.faulty_runs import FAULTS, draw, judge, run

ELSEWHERE = {"tensorflow": ["exploding"]}
"""Faults that are tested by themselves."""


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("framework", ["torch", "tensorflow", "jax"])
def test_a_fault_is_found_where_it_is(framework, fault, tmp_path):
    if fault in ELSEWHERE.get(framework, ()):
        return
    case = draw(fault, 0, 4)
    outcome = run(framework, case, str(tmp_path / "nan.capture"))
    assert judge(case, outcome) == [], str(outcome.error)
    assert outcome.replay.place == outcome.error.place
