"""What it takes to start: `elementgrad grad` until the user's function is called, against importing its framework."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import mkdtemp

from benchmarks.harness import Row

BOUND = 1.2
FILES = {
    "torch": "import torch",
    "tensorflow": "import tensorflow",
    "jax": "import jax.numpy",
}


def rows() -> Iterator[Row]:
    """Real processes, with bytecode in place as after an installation."""
    folder = Path(mkdtemp())
    for framework, imports in FILES.items():
        file = folder / f"of_{framework}.py"
        file.write_text(f"import os\n{imports}\n\ndef f(x):\n    os._exit(0)  # this far it is the start\n")
        command = ["-m", "elementgrad", "grad", f"{file}:f", "[1.0, 2.0]", "--framework", framework]
        yield Row(
            f"{framework} elementgrad grad, start-up",
            _process(command),
            _process(["-c", f"import os\n{imports}\nos._exit(0)"]),
            "import",
            BOUND,
            memory=lambda _: None,
            repeats=6,
        )


def _process(arguments: list[str]) -> Callable[[], None]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment |= {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}

    def run() -> None:
        subprocess.run([sys.executable, *arguments], env=environment, check=True, stderr=subprocess.DEVNULL)

    return run


SUITES = {"command_line": rows}
