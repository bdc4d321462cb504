"""Elements inside one tensor: derivatives through writes in place, each element as it stood after its own write."""

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import elementgrad as eg
from tests import made
from tests.programs import SIZE, differenced, programs, run, source_step, written

START = np.array([0.7, -0.4, 0.9, 0.3, -0.8, 0.5])
HOLDERS = ["plain", "view", "requires grad", "made inside"]


def recorded(program, holder):
    """The program on a recorded tensor that came about in one of several ways; the recording, tensor and result."""
    if holder == "view":
        t = torch.tensor(np.concatenate([[9.0], np.repeat(START, 2), [9.0]]))[1:-1:2]
    elif holder == "requires grad":
        t = torch.tensor(START, requires_grad=True) * 1
    else:
        t = torch.tensor(START)
    with eg.record(t) as rec:
        t = t * 1 if holder == "made inside" else t
        y = run(program, t)
    return rec, t, y


def mixed(program):
    """Whether a step writes the same element twice, so that nothing can be moved between the two."""
    return any(kind == "slice" for kind, _, _ in program)


@pytest.mark.parametrize("holder", HOLDERS)
def test_made_recurrences_agree_with_finite_differences(holder):
    @settings(max_examples=made.counts(60))
    @given(programs(), st.integers(0, SIZE - 1), st.none() | st.integers(0, SIZE - 1))
    def check(program, source, target):
        writes = written(program, START)
        step = source_step(writes, source, target)
        # Between the two writes of one step there is no room to move the source.
        assume(step is None or target is None or not any(target in e for e in writes[step][1:]))
        rec, t, y = recorded(program, holder)
        of = y if target is None else eg.at(t)[target]
        gradient = rec.grad(of, eg.at(t)[source])
        np.testing.assert_allclose(
            gradient.item(), differenced(program, START, source, target, step), rtol=1e-5, atol=1e-7
        )
        shares = rec.contributions(of, eg.at(t)[source])
        np.testing.assert_allclose(shares.total.item(), gradient.item(), rtol=1e-12, atol=1e-14)

    check()
