"""Why a gradient is missing, zero, not finite or wrong: every broken program by its cause and line."""

import dataclasses
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import keras
import pytest
import torch

from elementgrad._names.call import BoundCall

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


@pytest.fixture
def runs(monkeypatch):
    """Count the calls of the user's function."""
    calls, run = [], BoundCall._run

    def counted(self, *args):
        calls.append(self)
        return run(self, *args)

    monkeypatch.setattr(BoundCall, "_run", counted)
    return calls


def test_there_are_many_of_them():
    assert len(BROKEN) >= 120
    assert len(HEALTHY) >= 60


@pytest.mark.parametrize("program", BROKEN, ids=str)
def test_a_broken_program_is_explained(program, runs):
    found = program.explained()
    assert len(runs) <= 4
    assert (found.verdict, found.cause) == (program.verdict, program.cause), found
    if program.where is not None:
        assert found.where == program.where, found
    assert program.fix in found.fix, found


@pytest.mark.parametrize("program", HEALTHY, ids=str)
def test_a_healthy_program_raises_no_alarm(program, runs):
    found = program.explained()
    assert len(runs) <= 4
    assert (found.verdict, found.cause) == ("flows", None), found
    assert found.path or found.of in ("the loss", "the result"), "no step was seen"


@pytest.mark.parametrize("program", [*BROKEN, *HEALTHY], ids=str)
def test_without_a_probe_the_function_runs_at_most_twice(program, runs):
    options = program.options | {"probe": False}
    verdict = dataclasses.replace(program, options=options).explained().verdict
    assert len(runs) <= 2
    expected = getattr(program, "verdict", "flows")
    wrong_numbers_are_not_tried = expected == "mismatch" and verdict in ("flows", "zero")
    assert verdict == expected or wrong_numbers_are_not_tried
