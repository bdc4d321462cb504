import gc
import os

import pytest
from hypothesis import HealthCheck, settings

from tests.support import imports
from tests.support.frameworks import FRAMEWORKS, Framework

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")

settings.register_profile(
    "elementgrad", deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None
)
settings.load_profile("elementgrad")


def pytest_configure(config: pytest.Config) -> None:
    imports.install(config.args)


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # what frameworks and test modules hold stays, and need not be looked at again and again


@pytest.fixture(autouse=True, scope="module")
def _earlier_modules_are_frozen() -> None:
    """Keep the collector from what earlier test modules left, which frameworks cache: gigabytes, towards the end.

    Tests that look at all objects, and JAX's check for leaks of tracers, do not look through it either.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(params=FRAMEWORKS, ids=repr)
def fw(request: pytest.FixtureRequest) -> Framework:
    return request.param


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("contract") is None)  # an upgrade fails by the name of a change
