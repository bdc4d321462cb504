"""Nothing of a framework's own appears in the terminal: every verb runs in a process in which nothing has run before.

A warning is given once, often by what the first use of a thing imports, so the process of the tests would not see it.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUN = """
import sys, warnings
from tests.support import imports
imports.install(["tests"])  # settings of frameworks
from tests.support import user_{name} as users
# PyTorch says this to whoever calls backward() on a model that has such a hook and an argument without gradients.
warnings.filterwarnings("ignore", message="Full backward hook is firing when gradients are computed")
print("begin", file=sys.stderr, flush=True)
for verb in users.VERBS.values():
    verb(users.User())()
print("end", file=sys.stderr, flush=True)
"""


@pytest.mark.parametrize("name", ["torch", "keras", "jax"])
def test_the_verbs_print_no_warning_of_a_framework(name):
    done = subprocess.run(
        [sys.executable, "-c", RUN.format(name=name)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.partition("begin\n")[2].partition("end\n")[0] == ""
    assert done.stdout == ""
