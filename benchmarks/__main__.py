"""`python -m benchmarks [suite ...]`: run the suites (all of them by default) and print one table."""

import argparse
import sys
from pathlib import Path

import torch  # noqa: F401  (before TensorFlow: the other order is known to crash)

from benchmarks import (
    command_line,
    cones,
    distributed,
    edits,
    explaining,
    jacobians,
    names,
    sparse,
    training,
    training_jax,
    training_keras,
    training_sharded,
    watching,
)
from benchmarks.harness import report, run

SUITES = {
    **edits.SUITES,
    **jacobians.SUITES,
    **names.SUITES,
    **cones.SUITES,
    **explaining.SUITES,
    **watching.SUITES,
    **sparse.SUITES,
    **distributed.SUITES,
    **training.SUITES,
    **training_keras.SUITES,
    **training_jax.SUITES,
    **training_sharded.SUITES,
    **command_line.SUITES,
}


def main() -> bool:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("suites", nargs="*", choices=[*SUITES, []], help=", ".join(SUITES))
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path, default=Path(__file__).with_name("results.json"))
    parsed = parser.parse_args()
    results = [result for name in parsed.suites or SUITES for result in run(SUITES[name](), parsed.repeats)]
    report(results, parsed.json)
    return any(result.steady and result.holds is False for result in results)


sys.exit(main())
