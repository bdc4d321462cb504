"""Why a gradient of PyTorch's is missing, zero, not finite or wrong: every broken program by its cause and line."""

import pytest
import torch

from tests import broken_torch, broken_torch_numbers, broken_torch_steps
from tests.healthy_torch import HEALTHY

BROKEN = [*broken_torch.BROKEN, *broken_torch_numbers.BROKEN, *broken_torch_steps.BROKEN]


@pytest.mark.parametrize("program", BROKEN, ids=lambda program: program.name)
def test_a_broken_program_is_explained(program):
    torch.manual_seed(0)
    found = program.explained()
    assert (found.verdict, found.cause) == (program.verdict, program.cause), found
    if program.where is not None:
        assert found.where == program.where, found


@pytest.mark.parametrize("program", HEALTHY, ids=lambda program: program.name)
def test_a_healthy_program_raises_no_alarm(program):
    torch.manual_seed(0)
    found = program.explained()
    assert (found.verdict, found.cause) == ("flows", None), found
