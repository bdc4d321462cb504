"""The planner is pure: numbers in, sweeps, direction and chunks out."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import elementgrad as eg
from elementgrad._read import plan as bytes_of
from elementgrad._read.plan import LIVE_DERIVATIVES, Task, choose_direction, fit_to_budget

counts = st.integers(1, 10**6)


@st.composite
def tasks(draw):
    of_size, wrt_size = draw(counts), draw(counts)
    rows, columns = draw(st.integers(1, of_size)), draw(st.integers(1, wrt_size))
    return Task(rows, columns, of_size, wrt_size, rows * columns, draw(st.sampled_from([2, 4, 8])))


@given(tasks())
def test_sweeps_are_the_fewer_of_rows_and_columns(task):
    plan = fit_to_budget(task, choose_direction(task, {}))
    assert plan.sweeps == min(task.rows, task.columns)
    assert plan.mode == ("reverse" if task.rows <= task.columns else "forward")


@given(tasks(), st.sampled_from(["reverse", "forward"]))
def test_a_direction_without_a_rule_is_not_taken(task, missing):
    assert choose_direction(task, {missing: "because"}) != missing


@given(tasks(), st.integers(1, 10**9), st.integers(1, 10**7))
def test_chunks_fit_the_budget_and_cover_all_sweeps(task, budget, work):
    plan = fit_to_budget(task, choose_direction(task, {}), work, budget)
    each = (task.of_size + task.wrt_size) * task.itemsize + LIVE_DERIVATIVES * work
    assert plan.chunk * plan.chunks >= plan.sweeps
    assert plan.chunk * (plan.chunks - 1) < plan.sweeps
    if plan.sweeps > 1:
        assert plan.chunk * each <= budget or plan.chunk == 1
        fewer = -(-plan.sweeps // max(1, min(plan.sweeps, budget // each)))
        assert plan.chunks <= fewer, "no more chunks than the budget asks for"


@given(tasks(), st.integers(1, 10**9))
def test_a_plan_prints_what_is_asked_and_what_it_saves(task, budget):
    plan = fit_to_budget(task, choose_direction(task, {}), 100, budget)
    printed = str(plan)
    assert f"{plan.sweeps} {plan.mode} sweep" in printed
    assert [line.split()[0] for line in printed.splitlines()][:4] == ["asked", "naive", "planned", "speed-up"]


@pytest.mark.parametrize(
    ("text", "count"), [("200MB", 200 * 10**6), ("1.5 GiB", 3 * 2**29), ("10 kb", 10**4), (1024, 1024), (None, None)]
)
def test_budgets_are_read(text, count):
    assert bytes_of.parse_budget(text) == count


@pytest.mark.parametrize("given_budget", ["much", "20", "MB", "-3MB", 0, -1, 1.5, True, [], "1e9B"])
def test_an_invalid_budget_is_refused_before_any_work(given_budget):
    calls = []
    with pytest.raises(eg.OptionError, match=r"budget[ =].* is not an amount of memory; give bytes"):
        eg.jacobian(lambda x: calls.append(x) or x, torch.ones(2), budget=given_budget)
    assert not calls


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 KB"), (123_456, "123 KB"), (4e10, "40 GB"), (1e15, "1e+03 TB")],
)
def test_bytes_are_printed_for_people(count, text):
    assert bytes_of.format_bytes(count) == text


def test_sweeps_are_no_more_than_the_distinct_rows_or_columns_touched():
    J = eg.jacobian(lambda x: x.tanh() * x.sum(), torch.ones(100))
    mask = torch.zeros(100, dtype=torch.bool)
    mask[[3, 5]] = True
    assert J.plan([1, 1, 2, -98], ...).sweeps == 2
    assert J.plan(..., [0, 0, 0]).sweeps == 1
    assert J.plan(mask, slice(None, None, 2)).sweeps == 2
    assert J.plan(slice(0, 90), slice(0, 4)).mode == "forward"
    assert J.plan([], 3).sweeps == 0


def test_a_tight_budget_gives_the_same_numbers_in_more_chunks(fw):
    x = fw.tensor([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7])

    def f(x):
        return x * fw.sum(x**3)

    loose, tight = eg.jacobian(f, x), eg.jacobian(f, x, budget="600B")
    assert tight.plan().chunks > 1
    for index in [(..., ...), ([5, 0, 5, 2], ...), (..., [3, 1]), (slice(1, 6), slice(0, 4))]:
        np.testing.assert_allclose(fw.numpy(loose[index]), fw.numpy(tight[index]), rtol=1e-14)
    np.testing.assert_allclose(fw.numpy(loose.diagonal()), fw.numpy(tight.diagonal()), rtol=1e-14)
