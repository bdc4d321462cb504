"""The figures of docs/costs.md can be held against those that `make bench` measures."""

from dataclasses import replace

from benchmarks.harness import Result
from benchmarks.stated import COSTS, contradictions, stated_ratios

PAGE = """Words.

| row | against | at most |
|---|---|---|
| a read | by hand | 1.2 |

| | |
|---|---|
| another | table |
"""
RESULT = Result("a read", "by hand", 1.1, 1.0, 1.1, 1.0, 100.0, None, None, None, None, None, None)


def test_a_page_states_the_rows_of_its_tables():
    assert stated_ratios(PAGE) == {("a read", "by hand"): 1.2}


def test_only_steady_rows_above_their_figure_contradict_it():
    assert contradictions([RESULT, replace_ratio(9.0, name="unknown")], PAGE) == []
    (line,) = contradictions([replace_ratio(1.3)], PAGE)
    assert line == "a read: docs/costs.md says at most 1.2 of by hand, measured 1.3"
    assert contradictions([replace_ratio(1.3, again=1.2)], PAGE) == []


def replace_ratio(ratio, **changes):
    return replace(RESULT, ratio=ratio, **changes)


def test_the_page_of_costs_states_some():
    assert ("torch one weight of a dense layer", "autograd.grad") in stated_ratios(COSTS.read_text())
