import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")

import pytest
import torch  # before TensorFlow: the other order is known to crash
from hypothesis import HealthCheck, settings

from tests.frameworks import FRAMEWORKS, Framework

torch.set_num_threads(1)

settings.register_profile(
    "elementgrad", deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None
)
settings.load_profile("elementgrad")


@pytest.fixture(params=FRAMEWORKS, ids=lambda framework: framework.name)
def fw(request: pytest.FixtureRequest) -> Framework:
    return request.param
