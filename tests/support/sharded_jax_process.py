"""One of two processes that train elements of parameters on a mesh of the devices of both.

`python -m tests.support.sharded_jax_process number port directory` prints what each check found
wrong, or null, and the bits of what was trained.
"""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import elementgrad as eg
from tests.support.sharded_jax_model import (
    PLACES,
    assert_close,
    assert_on_all,
    assert_only_places,
    batch,
    expected,
    loss,
    numbers,
    parameters,
    print_outcomes,
    single,
    spread,
    to,
    trained,
)

BEFORE = numbers()
ORDERS = {
    "batch over 4": [0, 1, 2, 3],
    "batch over 2, parameters over 2": [0, 1, 2, 3],
    "parameters over 2 by 2": [0, 2, 1, 3],
}
"""Of the devices in a mesh: the last has each axis across processes."""


def on(layout: str) -> tuple[Any, Any]:
    return spread(numbers(), layout, [jax.devices()[number] for number in ORDERS[layout]])


def training(layout: str) -> list[str]:
    params, sharding = on(layout)
    elements, tokens = eg.trainable(params, PLACES), to(batch(), sharding)
    assert_on_all(elements.values, 4)
    elements.values = found = trained(elements, params, sharding)
    assert_close(found, expected())
    assert_on_all(found, 4)
    assert_only_places(elements, elements.merge(), params, BEFORE)
    merged = jax.jit(lambda values, params: elements.merge(values, params=params))(found, params)
    assert_only_places(elements, merged, params, BEFORE)
    with pytest.raises(RuntimeError, match="Please pass such arrays as arguments"):
        jax.jit(lambda values: elements.grad(lambda params: loss(params, tokens), values))(found)
    return [np.asarray(row).tobytes().hex() for row in found.values()]


def patches(layout: str, directory: Path) -> None:
    plain, alone = single()
    alone.values = expected()
    mine = directory / f"alone {jax.process_index()}.safetensors"
    alone.save(mine)  # on a device of its own: every process writes
    params, sharding = on(layout)
    elements = eg.trainable(params, PLACES)
    elements.values = {place: np.asarray(row) for place, row in alone.values.items()}
    path = directory / f"{layout}.safetensors"
    elements.save(path)
    assert path.read_bytes() == mine.read_bytes()
    elements.save(directory / "full.safetensors", full=True)
    with pytest.raises(eg.PatchError if jax.process_index() else OSError):
        elements.save(directory / "nowhere" / "patch.safetensors")
    again = eg.trainable(params, path)
    assert_close(trained(again, params, sharding, 1), trained(eg.trainable(plain, path), plain, None, 1))
    applied = eg.apply(params, directory / "full.safetensors")
    assert_only_places(elements, applied.merge(), params, BEFORE)
    applied.undo()
    elements.undo()
    assert_only_places(elements, applied.merge(), params, BEFORE)


def disagreeing(layout: str, directory: Path) -> None:
    """Elements and patches that are not the same in both processes are refused in both."""
    params, _ = on(layout)
    number = jax.process_index()
    name = eg.Place.parse(PLACES[0]).name
    for places in (PLACES[: 1 + number], [f"{name}[{number}]"]):
        with pytest.raises(eg.FrameworkError, match="name the same ones in each, in the same order"):
            eg.trainable(params, places)
    _, alone = single()
    alone.values = {place: row + number for place, row in alone.values.items()}
    mine = directory / f"other {number}.safetensors"
    alone.save(mine)
    for call in (eg.trainable, eg.apply):
        with pytest.raises(eg.FrameworkError, match="or other values for them"):
            call(params, mine)
    elements = eg.trainable(params, PLACES)
    before = {place: np.asarray(row) for place, row in elements.values.items()}
    with pytest.raises(eg.FrameworkError, match="or other values for them"):
        elements.values = {place: row + number for place, row in before.items()}
    assert all((np.asarray(row) == before[place]).all() for place, row in elements.values.items())


def largest(layout: str) -> None:
    params, _ = on(layout)
    found = eg.top(params, None, 9, "magnitude")
    assert list(map(str, found)) == list(map(str, eg.top(parameters(), None, 9, "magnitude")))


def main(number: str, port: str, directory: str) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", 2, int(number))
    jax.config.update("jax_disable_most_optimizations", True)  # of the compiler: most programs run once
    crossing = "parameters over 2 by 2"
    checks: dict[str, Any] = {f"training, {layout}": partial(training, layout) for layout in ORDERS}
    for layout in (crossing, "batch over 2, parameters over 2"):
        checks[f"patches, {layout}"] = partial(patches, layout, Path(directory))
    checks["disagreeing"] = partial(disagreeing, crossing, Path(directory))
    checks["largest"] = partial(largest, crossing)
    print_outcomes(checks)


if __name__ == "__main__":
    main(*sys.argv[1:])
