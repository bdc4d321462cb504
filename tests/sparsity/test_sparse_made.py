"""Patterns on JAX and TensorFlow: random programs, compared with PyTorch."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import elementgrad as eg
from tests.support.frameworks import JAX, TENSORFLOW
from tests.support.made import LONG
from tests.support.operations import OPS
from tests.support.sparse_steps import SIZE, STEPS, programs, run

POINT = np.linspace(-1.3, 1.7, SIZE)


def assert_holds(pattern, program, points):
    """No number that PyTorch gives, beyond rounding, is outside the pattern."""
    for point in points:
        own = torch.autograd.functional.jacobian(lambda x: run(program, OPS["torch"], x), torch.tensor(point)).numpy()
        assert not ((np.abs(own) > 1e-12 * np.abs(own).max()) & ~pattern.dense()).any()


@pytest.mark.parametrize("fw", [JAX, TENSORFLOW], ids=lambda fw: fw.name)
@settings(max_examples=500 if LONG else 25)
@given(program=programs, seed=st.integers(0, 10**6))
def test_no_entry_of_a_made_program_is_missed(fw, program, seed):
    J = eg.jacobian(lambda x: run(program, OPS[fw.name], x), fw.tensor(POINT), unconnected="zero")
    random = np.random.default_rng(seed)
    assert_holds(J.pattern(), program, [POINT, *random.standard_normal((2, SIZE))])
    local = eg.jacobian(lambda x: run(program, OPS[fw.name], x), fw.tensor(POINT), unconnected="zero")
    assert_holds(local.pattern(local=True), program, [POINT])


@pytest.mark.parametrize("fw", [JAX, TENSORFLOW], ids=lambda fw: fw.name)
@pytest.mark.parametrize("name", STEPS)
def test_each_step_alone_is_followed(fw, name):
    program = [(name, 2)]
    J = eg.jacobian(lambda x: run(program, OPS[fw.name], x), fw.tensor(POINT))
    assert_holds(J.pattern(), program, [POINT, POINT[::-1].copy(), POINT * 0.3])
