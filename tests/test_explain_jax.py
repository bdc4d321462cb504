"""Why a gradient of JAX's is missing, zero, not finite or wrong: every broken program by its cause and line."""

import importlib.util

import jax
import pytest

from tests import broken_jax, broken_jax_numbers, healthy_jax

BROKEN = [*broken_jax.BROKEN, *broken_jax_numbers.BROKEN]
HEALTHY = [*healthy_jax.HEALTHY]
if importlib.util.find_spec("flax") is not None:  # it is not among the oldest supported versions
    from tests import broken_jax_modules

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


@pytest.mark.parametrize("program", BROKEN, ids=lambda program: program.name)
def test_a_broken_program_is_explained(program):
    found = program.explained()
    assert (found.verdict, found.cause) == (program.verdict, program.cause), found
    if program.where is not None:
        assert found.where == program.where, found


@pytest.mark.parametrize("program", HEALTHY, ids=lambda program: program.name)
def test_a_healthy_program_raises_no_alarm(program):
    found = program.explained()
    assert (found.verdict, found.cause) == ("flows", None), found
    assert found.path, "no step was seen"
