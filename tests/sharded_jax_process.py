"""One of two processes that train elements of parameters on a mesh of the devices of both.

`python -m tests.sharded_jax_process number port directory` prints what each check found wrong, or null, and the bits
of what was trained.
"""

import json
import sys
import traceback
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import elementgrad as eg
from tests.sharded_jax_model import (
    PLACES,
    assert_close,
    assert_on_all,
    assert_only_places,
    batch,
    loss,
    parameters,
    single,
    spread,
    to,
    trained,
)

BEFORE = {name: np.asarray(array) for name, array in parameters().items()}
ORDERS = {
    "batch over 4": [0, 1, 2, 3],
    "parameters over 4": [0, 1, 2, 3],
    "batch over 2, parameters over 2": [0, 1, 2, 3],
    "parameters over 2 by 2": [0, 2, 1, 3],
}
"""Of the devices in a mesh: the last has each axis across processes."""


def on(layout: str) -> tuple[Any, Any]:
    return spread(parameters(), layout, [jax.devices()[number] for number in ORDERS[layout]])


def training(layout: str) -> list[str]:
    plain, alone = single()
    params, sharding = on(layout)
    elements, tokens = eg.trainable(params, PLACES), to(batch(), sharding)
    assert_on_all(elements.values, 4)
    gradient = elements.grad(lambda params: loss(params, tokens))
    assert_close(gradient, alone.grad(lambda params: loss(params, batch())))
    assert_on_all(gradient, 4)
    routed = elements.grad({"b[7]": lambda params: loss(params, tokens)})
    assert_close({"b[7]": routed["b[7]"]}, {"b[7]": gradient["b[7]"]})
    elements.values = found = trained(elements, params, sharding)
    assert_close(found, trained(alone, plain, None))
    assert_only_places(elements, elements.merge(), params, BEFORE)
    merged = jax.jit(lambda values, params: elements.merge(values, params=params))(found, params)
    assert_only_places(elements, merged, params, BEFORE)
    return [np.asarray(row).tobytes().hex() for row in found.values()]


def patches(layout: str, directory: Path) -> None:
    plain, alone = single()
    alone.values = trained(alone, plain, None)
    mine = directory / f"alone {jax.process_index()}.safetensors"
    alone.save(mine)  # on a device of its own: every process writes
    params, sharding = on(layout)
    elements = eg.trainable(params, PLACES)
    elements.values = {place: np.asarray(row) for place, row in alone.values.items()}
    path = directory / f"{layout}.safetensors"
    elements.save(path)
    assert path.read_bytes() == mine.read_bytes()
    made = path.stat().st_mtime_ns
    elements.save(directory / "full.safetensors", full=True)
    assert path.stat().st_mtime_ns == made
    with pytest.raises(OSError if not jax.process_index() else eg.PatchError):
        elements.save(directory / "nowhere" / "patch.safetensors")
    again = eg.trainable(params, path)
    assert_close(trained(again, params, sharding, 2), trained(eg.trainable(plain, path), plain, None, 2))
    applied = eg.apply(params, directory / "full.safetensors")
    assert_only_places(elements, applied.merge(), params, BEFORE)
    applied.undo()
    elements.undo()
    assert_only_places(elements, applied.merge(), params, BEFORE)


def largest(layout: str) -> None:
    params, sharding = on(layout)
    tokens = to(batch(), sharding)
    for by in ("gradient", "magnitude"):
        expected = eg.top(parameters(), lambda params: loss(params, batch()), 9, by)
        assert list(map(str, eg.top(params, lambda params: loss(params, tokens), 9, by))) == list(map(str, expected))


def main(number: str, port: str, directory: str) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", 2, int(number))
    checks: dict[str, Any] = {}
    for layout in ORDERS:
        checks[f"training, {layout}"] = lambda layout=layout: training(layout)
        checks[f"patches, {layout}"] = lambda layout=layout: patches(layout, Path(directory))
    checks["largest"] = lambda: largest("parameters over 2 by 2")
    told = {}
    for name, check in checks.items():
        try:
            told[name] = {"found": check(), "wrong": None}
        except Exception:
            told[name] = {"found": None, "wrong": traceback.format_exc()}
    print(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
