import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")

import gc
from contextlib import suppress
from pathlib import Path

import jax
import pytest
import torch  # before TensorFlow: the other order is known to crash

with suppress(ImportError):
    import triton  # noqa: F401  # the compiler of PyTorch imports it later, which aborts after TensorFlow (triton 3.9)
from hypothesis import HealthCheck, settings

from tests.support.frameworks import FRAMEWORKS, Framework

torch.set_num_threads(1)
if (0, 10) <= jax.__version_info__ < (0, 12):  # others do not know the flag, and end the process for it
    emitters = "--xla_cpu_use_fusion_emitters=false"  # these take twice as long to compile a small program
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {emitters}".strip()
jax.config.update("jax_compilation_cache_dir", str(Path(__file__).parent.parent / ".pytest_cache" / "jax"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # so no program is compiled by two workers
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
jax.config.update("jax_disable_most_optimizations", True)  # of the compiler: thousands of programs run once each
gc.collect()
gc.freeze()  # what frameworks hold stays, and need not be looked at again and again

settings.register_profile(
    "elementgrad", deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None
)
settings.load_profile("elementgrad")


@pytest.fixture(params=FRAMEWORKS, ids=lambda framework: framework.name)
def fw(request: pytest.FixtureRequest) -> Framework:
    return request.param


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("contract") is None)  # an upgrade fails by the name of a change
