"""Runs of 200 steps with a fault at a random step, block and element: how many reports are right in all they say."""

import pytest

from tests.support.faulty_runs import FAULTS, draw, judge, run

SEEDS = {"torch": 3, "tensorflow": 1, "jax": 3}
SHARE = 0.95


@pytest.mark.parametrize("framework", SEEDS)
def test_nearly_all_faults_are_found_where_they_are(framework, tmp_path):
    wrong, count = {}, 0
    for fault in FAULTS:
        if (framework, fault) == ("tensorflow", "exploding"):
            continue  # tests/watch/test_watch_keras.py
        for seed in range(1, 1 + SEEDS[framework]):
            case = draw(fault, seed, 200)
            count += 1
            problems = judge(case, run(framework, case, str(tmp_path / "nan.capture")))
            if problems:
                wrong[case] = problems
    print(f"{framework}: {count - len(wrong)} of {count} right")
    assert len(wrong) <= (1 - SHARE) * count, wrong
