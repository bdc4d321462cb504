"""Training runs on each framework with one fault at a chosen step, block and element, watched by `eg.watch`.

Each block computes the same few lines. Arrays of the batch, `a` to `e`, make one of them go wrong at an element.
"""

import inspect
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np

BLOCKS, WIDTH, BATCH = 3, 4, 5
FAULTS = {
    "inf in a parameter": "bad-parameter",
    "sqrt(0)": "singular",
    "0/0": "singular",
    "exp overflow": "overflow",
    "log of a negative": "singular",
    "exploding": "rule",
    "bad batch": "bad-input",
    "optimizer": "update",
}
"""The causes that each fault is to be reported with."""
LINES = {"sqrt(0)": "# sqrt", "0/0": "# divide", "exp overflow": "# exp", "log of a negative": "# log"}


class Case(NamedTuple):
    """A fault, and where it is put."""

    fault: str
    steps: int
    step: int
    block: int
    index: tuple[int, int]


class Outcome(NamedTuple):
    """The end of a watched run."""

    error: Any
    replay: Any
    line: str | None
    """The line that is to blame, if it is known."""


def draw(fault: str, seed: int, steps: int) -> Case:
    rng = np.random.default_rng([seed, list(FAULTS).index(fault)])
    index = int(rng.integers(WIDTH)), int(rng.integers(WIDTH))
    return Case(fault, steps, int(rng.integers(1, steps)), int(rng.integers(BLOCKS)), index)


def batch_at(case: Case, step: int) -> dict[str, np.ndarray]:
    """The batch of a step, with the fault in it if it is of a batch and this is its step."""
    rng = np.random.default_rng(step)
    shape = BATCH, BLOCKS, WIDTH
    batch = {"x": rng.normal(size=(BATCH, WIDTH)).astype("f")}
    batch |= {name: np.ones(shape, "f") for name in "abce"} | {"d": np.zeros(shape, "f")}
    if step == case.step:
        row, column = case.index
        at = row, case.block, column
        if case.fault == "sqrt(0)":
            batch["a"][at] = 0.0
        elif case.fault == "0/0":
            batch["b"][at] = batch["c"][at] = 0.0
        elif case.fault == "exp overflow":
            batch["d"][at] = 1e4
        elif case.fault == "log of a negative":
            batch["e"][at] = -5.0
        elif case.fault == "bad batch":
            batch["x"][row, column] = np.nan
    return batch


def weights() -> list[np.ndarray]:
    rng = np.random.default_rng(7)
    return [(0.3 * rng.normal(size=(WIDTH, WIDTH))).astype("f") for _ in range(BLOCKS)]


def run(framework: str, case: Case, capture: str, **options: Any) -> Outcome:
    """Run a case on a framework; the error is None if nothing stopped it."""
    module = import_module(f"tests.support.faulty_{framework}")
    error, replay = module.run(case, capture, **options)
    lines = inspect.getsource(module).splitlines()
    mark = LINES.get(case.fault)
    numbers = [number for number, line in enumerate(lines, 1) if mark is not None and line.endswith(mark)]
    return Outcome(error, replay, f"faulty_{framework}.py:{numbers[0]}" if numbers else None)


def judge(case: Case, outcome: Outcome) -> list[str]:
    """Return what is wrong with the report of a run."""
    error, replay, line = outcome
    if error is None:
        return ["it was not stopped"]
    wrong = [] if error.step == case.step else [f"step {error.step} instead of {case.step}"]
    wrong += [] if error.cause == FAULTS[case.fault] else [f"cause {error.cause}"]
    row, column = case.index
    wrong += [] if str(error.place).endswith(f"[{row}, {column}]") else [f"place {error.place} instead of {case.index}"]
    wrong += [] if line is None or error.where == line else [f"line {error.where} instead of {line}"]
    if case.fault in ("inf in a parameter", "exploding", "optimizer"):
        wrong += [] if str(case.block) in str(error.place).partition("[")[0] else [f"place {error.place}"]
    elif case.fault != "bad batch" and error.module:
        wrong += [] if str(case.block) in error.module else [f"module {error.module}"]
    wrong += [] if replay.same else [f"replay differs in {replay.differing}"]
    return wrong
