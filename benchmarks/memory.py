"""Memory of many calls: after 5 000 calls of a verb the process is as large as after the first hundred.

The verbs are those of the isolation tests, which have them all for each framework. These suites run only if they are
named: one takes up to an hour.
"""

import importlib
from collections.abc import Iterator
from functools import partial
from typing import Any

from benchmarks.harness import Row, resident_growth

CALLS, WARM = 5_000, 100
SECONDS = 60.0
"""Processor time after which the calls of one verb end, of however many there were."""
MOST_MB = 5.0
"""One kilobyte for each call, about what a small tensor and its Python object take."""


def rows(framework: str) -> Iterator[Row]:
    """Yield a row for each verb: how far memory grows from the first calls to the last."""
    module: Any = importlib.import_module(f"tests.support.user_{framework}")
    user = module.User()
    for verb, make in module.VERBS.items():

        def ours(make: Any = make) -> None:
            make(user)()

        memory = partial(resident_growth, calls=CALLS, warm=WARM, seconds=SECONDS)
        name = f"{framework} memory of {CALLS} calls: {verb}"
        yield Row(name, ours, lambda: None, "nothing", most_mb=MOST_MB, memory=memory, repeats=1)


SUITES = {
    "memory-torch": lambda: rows("torch"),
    "memory-keras": lambda: rows("keras"),
    "memory-jax": lambda: rows("jax"),
}
