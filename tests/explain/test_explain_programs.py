"""Why a gradient is missing, zero, not finite or wrong: every broken program by its cause and line."""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import keras
import pytest
import torch

SUPPORT = Path(__file__).parent.parent / "support"
NEEDS = {"broken_jax_modules": "flax"}
"""Tables of what is not among the oldest supported versions."""
MODULES = [
    import_module(f"tests.support.{path.stem}")
    for framework in ("torch", "tensorflow", "jax")
    for path in sorted([*SUPPORT.glob(f"broken_{framework}*.py"), SUPPORT / f"healthy_{framework}.py"])
    if path.stem not in NEEDS or find_spec(NEEDS[path.stem])
]
BROKEN = [program for module in MODULES for program in getattr(module, "BROKEN", ())]
HEALTHY = [program for module in MODULES for program in getattr(module, "HEALTHY", ())]


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
    keras.utils.set_random_seed(0)


def test_there_are_many_of_them():
    assert len(BROKEN) >= 120
    assert len(HEALTHY) >= 60


@pytest.mark.parametrize("program", BROKEN, ids=str)
def test_a_broken_program_is_explained(program):
    found = program.explained()
    assert (found.verdict, found.cause) == (program.verdict, program.cause), found
    if program.where is not None:
        assert found.where == program.where, found
    assert program.fix in found.fix, found


@pytest.mark.parametrize("program", HEALTHY, ids=str)
def test_a_healthy_program_raises_no_alarm(program):
    found = program.explained()
    assert (found.verdict, found.cause) == ("flows", None), found
    assert found.path or found.of in ("the loss", "the result"), "no step was seen"
