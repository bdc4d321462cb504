"""Run the contract tests and the founding cases on several versions of PyTorch: `make matrix TORCH="2.8.0 2.9.1"`.

Each version gets an environment of its own, which is deleted before the next one is made: PyPI's builds of PyTorch
bring CUDA along and take several gigabytes. All other packages are those of locks/test.txt.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
TORCH = ["2.8.0", "2.9.1", "2.10.0", "2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0"]
FOUNDING = ["tests/read/test_founding_cases.py", "tests/read/test_founding_reads.py"]
FOUNDING += ["tests/train/test_founding_training.py", "tests/train/test_founding_frameworks.py"]


def packages(torch: str) -> list[str]:
    """Return the pins of the test environment with another PyTorch, which chooses its setuptools itself."""
    lines = [line for lock in ("tour", "test") for line in (ROOT / "locks" / f"{lock}.txt").read_text().split("\n")]
    pins = [line for line in lines if "==" in line and not line.startswith(("torch==", "setuptools=="))]
    return [*pins, f"torch=={torch}"]


def run(torch: str) -> bool:
    """Run the tests on one version, say what came of it, and return whether all passed."""
    with tempfile.TemporaryDirectory(prefix=f"torch-{torch}-") as folder:
        start, python = time.monotonic(), Path(folder, "bin" if os.name != "nt" else "Scripts", "python")
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-cache-dir"]
        pip += ["--no-compile"]  # of thousands of files that are never imported
        installation = subprocess.run([*pip, *packages(torch)], capture_output=True, text=True, check=False)
        if installation.returncode:
            errors = [line for line in installation.stderr.split("\n") if line.startswith("ERROR")]
            causes = "\n".join(errors) or installation.stderr[-2000:]
            print(f"torch {torch}: pip could not install it\n{causes}", flush=True)
            return False
        installed = time.monotonic()
        options = {"cwd": ROOT, "env": {**os.environ, "PYTHONPATH": str(ROOT / "src")}}
        tests = ["-m", "pytest", "-p", "no:cacheprovider", "--disable-warnings"]
        results = [
            subprocess.run([python, *tests, *chosen], capture_output=True, text=True, check=False, **options)
            for chosen in (["-m", "contract", "tests/backends"], FOUNDING)
        ]
        times = f"{installed - start:.0f} s to install, {time.monotonic() - installed:.0f} s to run"
    for result, what in zip(results, ("contracts", "founding cases"), strict=True):
        *lines, summary = result.stdout.strip().split("\n") or [""]
        print(f"torch {torch}: {what}: {summary}", flush=True)
        if result.returncode:
            print(
                "\n".join(line for line in lines if line.startswith(("FAILED", "ERROR"))) or result.stderr, flush=True
            )
    print(f"torch {torch}: {times}", flush=True)
    return not any(result.returncode for result in results)


if __name__ == "__main__":
    passed = [run(torch) for torch in sys.argv[1:] or TORCH]
    sys.exit(not all(passed))
