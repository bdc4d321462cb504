"""`python -m benchmarks [suite ...]`: run suites (by default all but those of memory) and print one table."""

import argparse
import sys
from pathlib import Path

import torch  # noqa: F401  (before TensorFlow: the other order is known to crash)

from benchmarks import (
    auditing,
    command_line,
    cones,
    distributed,
    edits,
    explaining,
    exploring,
    growth,
    jacobians,
    memory,
    named,
    names,
    patches,
    sparse,
    training,
    training_jax,
    training_keras,
    training_sharded,
    watching,
)
from benchmarks.harness import report, run
from benchmarks.stated import COSTS, contradictions

SUITES = {
    **edits.SUITES,
    **jacobians.SUITES,
    **names.SUITES,
    **named.SUITES,
    **cones.SUITES,
    **explaining.SUITES,
    **exploring.SUITES,
    **auditing.SUITES,
    **watching.SUITES,
    **sparse.SUITES,
    **distributed.SUITES,
    **patches.SUITES,
    **training.SUITES,
    **training_keras.SUITES,
    **training_jax.SUITES,
    **training_sharded.SUITES,
    **command_line.SUITES,
    **growth.SUITES,
    **memory.SUITES,
}


def main() -> bool:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("suites", nargs="*", choices=[*SUITES, []], help=", ".join(SUITES))
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path, default=Path(__file__).with_name("results.json"))
    parsed = parser.parse_args()
    suites = parsed.suites or [name for name in SUITES if name not in memory.SUITES]
    results = [result for name in suites for result in run(SUITES[name](), parsed.repeats)]
    report(results, parsed.json)
    lines = contradictions(results, COSTS.read_text())
    print(*lines, sep="\n")
    return bool(lines) or any(result.steady and result.holds is False for result in results)


sys.exit(main())
