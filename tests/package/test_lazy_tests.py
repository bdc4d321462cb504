"""A run of some tests imports the frameworks that these ask for, and no other."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.imports import ROOT, mentions_torch

TESTS = ROOT / "tests"
LOOK = """
import sys
from tests import conftest
from tests.support.imports import install
install(sys.argv[1:])
from tests.support.frameworks import FRAMEWORKS, JAX, difference
print(*[name for name in ("torch", "tensorflow", "jax") if name in sys.modules])
"""


def test_frameworks_are_not_imported_before_a_test_asks_for_them():
    found = subprocess.run([sys.executable, "-c", LOOK, "tests"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.split() == []


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("names/test_keras_runs.py", False),
        ("read/test_tensorflow_uses.py", False),
        ("train/test_trainable.py", True),
        ("edit/test_edit.py", True),
        ("place/test_selection.py", False),
    ],
)
def test_pytorch_is_imported_before_tensorflow_where_tests_may_use_it(path: str, expected: bool):
    assert (TESTS / path).exists()
    assert mentions_torch([TESTS / path]) == expected


def test_every_file_that_imports_pytorch_is_known_to():
    files = [path for path in TESTS.rglob("*.py") if "\nimport torch\n" in path.read_text()]
    assert len(files) > 50
    assert all(mentions_torch([Path(path)]) for path in files)
