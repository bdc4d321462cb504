"""What naming elements costs: `get`, `set` and `only` in a tensor of ten million elements, and in a tiny one."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

import elementgrad as eg
from benchmarks.harness import Row

SIZE = 10_000_000
COUNTS = (1, 100, 10_000)
SET_BOUND, ONLY_BOUND, OVERHEAD_BOUND, IMPORT_BOUND = 1.15, 1.3, 5.0, 1.3


@dataclass
class Own:
    """The framework's own ways, and how they are called."""

    set: Callable[[Any, Any, Any], Any]
    set_name: str
    get: Callable[[Any, Any], Any]
    get_name: str
    wait: Callable[[Any], Any] = lambda tensor: tensor


def positions(count: int) -> np.ndarray:
    return np.random.default_rng(0).choice(SIZE, count, replace=False)


def big(framework: str, own: Own, x: Any, index: Any, value: Any) -> Iterator[Row]:
    name, wait = f"{framework} {{}} {len(value)}", own.wait
    yield Row(
        name.format("set"),
        lambda: wait(eg.at(x)[index].set(value)),
        lambda: wait(own.set(x, index, value)),
        own.set_name,
        SET_BOUND,
    )
    yield Row(name.format("get"), lambda: wait(eg.at(x)[index].get()), lambda: wait(own.get(x, index)), own.get_name)
    yield Row(name.format("only"), lambda: wait(eg.at(x)[index].only()), lambda: wait(x * 1), "x * 1", ONLY_BOUND)


def torch_rows() -> Iterator[Row]:
    import torch

    own = Own(lambda x, i, v: x.index_put((i,), v), "x.index_put", lambda x, i: x[i], "x[index]")
    x = torch.rand(SIZE)
    for count in COUNTS:
        yield from big("torch", own, x, torch.from_numpy(positions(count)), torch.rand(count))

    def assign(x: torch.Tensor, index: Any, value: torch.Tensor) -> torch.Tensor:
        edited = x.clone()
        edited[index] = value
        return edited

    x, number = torch.rand(10, 10), torch.tensor(3.0)
    few = torch.tensor([2, 5])
    calls: list[tuple[str, Callable[[], Any], Callable[[], Any], str, float | None]] = [
        ("get [5]", lambda: eg.at(x)[5].get(), lambda: x[5], "x[5]", OVERHEAD_BOUND),
        ("get [2:4, 1]", lambda: eg.at(x)[2:4, 1].get(), lambda: x[2:4, 1], "x[2:4, 1]", OVERHEAD_BOUND),
        ("set [5]", lambda: eg.at(x)[5].set(number), lambda: assign(x, 5, number), "clone, assign", OVERHEAD_BOUND),
        (
            "set [2:4, 1]",
            lambda: eg.at(x)[2:4, 1].set(number),
            lambda: assign(x, (slice(2, 4), 1), number),
            "clone, assign",
            OVERHEAD_BOUND,
        ),
        ("get [tensor]", lambda: eg.at(x)[few].get(), lambda: x[few], "x[tensor]", None),
        ("set [tensor]", lambda: eg.at(x)[few].set(number), lambda: assign(x, few, number), "clone, assign", None),
    ]
    for name, ours, baseline, baseline_name, bound in calls:
        yield Row(f"torch 10x10 {name}", ours, baseline, baseline_name, most_over=bound)


def tensorflow_rows() -> Iterator[Row]:
    import tensorflow as tf

    own = Own(
        lambda x, i, v: tf.tensor_scatter_nd_update(x, i[:, None], v),
        "tensor_scatter_nd_update",
        tf.gather,
        "tf.gather",
    )
    x = tf.random.uniform([SIZE])
    for count in COUNTS:
        yield from big("tensorflow", own, x, tf.constant(positions(count)), tf.random.uniform([count]))


def jax_rows() -> Iterator[Row]:
    import jax

    own = Own(lambda x, i, v: x.at[i].set(v), "x.at[index].set", lambda x, i: x[i], "x[index]", jax.block_until_ready)
    x = jax.random.uniform(jax.random.key(0), (SIZE,))
    for count in COUNTS:
        value = jax.random.uniform(jax.random.key(1), (count,))
        yield from big("jax", own, x, jax.numpy.asarray(positions(count)), value)


def import_rows() -> Iterator[Row]:
    def importing(module: str) -> Callable[[], object]:
        return lambda: subprocess.run([sys.executable, "-c", f"import {module}"], check=True)

    yield Row("import elementgrad", importing("elementgrad"), importing("numpy"), "import numpy", IMPORT_BOUND)
    yield Row(
        "import elementgrad._place.place",
        importing("elementgrad._place.place"),
        importing("numpy"),
        "import numpy",
        IMPORT_BOUND,
    )


SUITES = {"torch": torch_rows, "tensorflow": tensorflow_rows, "jax": jax_rows, "import": import_rows}
