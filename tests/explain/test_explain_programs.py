"""Why a gradient is missing, zero, not finite or wrong: every broken program by its cause and line."""

import dataclasses
import importlib.util

import jax
import keras
import pytest
import torch

from elementgrad._names.call import BoundCall
from tests.support import (
    broken_jax,
    broken_jax_causes,
    broken_jax_elements,
    broken_jax_numbers,
    broken_jax_verdicts,
    broken_tensorflow,
    broken_tensorflow_causes,
    broken_tensorflow_elements,
    broken_tensorflow_numbers,
    broken_tensorflow_singular,
    broken_tensorflow_state,
    broken_tensorflow_steps,
    broken_tensorflow_verdicts,
    broken_torch,
    broken_torch_causes,
    broken_torch_elements,
    broken_torch_numbers,
    broken_torch_refused,
    broken_torch_remedies,
    broken_torch_steps,
    broken_torch_verdicts,
    broken_torch_wrong,
    healthy_jax,
    healthy_tensorflow,
    healthy_torch,
)

TABLES = [
    broken_torch,
    broken_torch_causes,
    broken_torch_elements,
    broken_torch_numbers,
    broken_torch_refused,
    broken_torch_remedies,
    broken_torch_steps,
    broken_torch_verdicts,
    broken_torch_wrong,
    broken_tensorflow,
    broken_tensorflow_causes,
    broken_tensorflow_elements,
    broken_tensorflow_numbers,
    broken_tensorflow_singular,
    broken_tensorflow_state,
    broken_tensorflow_steps,
    broken_tensorflow_verdicts,
    broken_jax,
    broken_jax_causes,
    broken_jax_elements,
    broken_jax_numbers,
    broken_jax_verdicts,
]
BROKEN = [program for table in TABLES for program in table.BROKEN]
HEALTHY = [*healthy_torch.HEALTHY, *healthy_tensorflow.HEALTHY, *healthy_jax.HEALTHY]
if importlib.util.find_spec("flax") is not None:  # it is not among the oldest supported versions
    from tests.support import broken_jax_modules

    BROKEN += broken_jax_modules.BROKEN
    HEALTHY += broken_jax_modules.HEALTHY


@pytest.fixture(autouse=True, scope="module")
def compiled_fast():
    """Compile without optimisations: each program runs once."""
    name = "jax_disable_most_optimizations"
    before = jax.config.read(name)
    jax.config.update(name, True)
    yield
    jax.config.update(name, before)


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


@pytest.mark.parametrize("program", [p for p in [*BROKEN, *HEALTHY[::4]] if not str(p).startswith("jax")], ids=str)
def test_without_a_probe_the_function_runs_at_most_twice(program, runs):
    options = program.options | {"probe": False}
    verdict = dataclasses.replace(program, options=options).explained().verdict
    assert len(runs) <= 2
    wrong_numbers_are_not_tried = program.verdict == "mismatch" and verdict in ("flows", "zero")
    assert verdict == program.verdict or wrong_numbers_are_not_tried


@pytest.mark.parametrize("program", [p for p in BROKEN if str(p).startswith("jax")][::8], ids=str)
def test_without_a_probe_a_function_of_jax_runs_at_most_twice(program, runs):
    dataclasses.replace(program, options=program.options | {"probe": False}).explained()
    assert len(runs) <= 2
