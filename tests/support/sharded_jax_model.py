"""A small model on one device and on meshes, its training by elements, and what goes over the wire for it."""

import json
import re
import traceback
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import elementgrad as eg

PLACES = ["table[3]", "table[30, 5]", "w[2, 3:9]", "head[:, 1]", "b[7]"]
APART = PLACES[:4]
"""Those for which no parameter is made whole."""
WHOLE: dict[str, P] = {}
ALONG = {"table": P("model"), "w": P(None, "model"), "b": P("model"), "head": P("model")}
ACROSS = {"table": P("model", "data"), "w": P("data", "model"), "b": P("data"), "head": P("model")}
LAYOUTS: dict[str, Any] = {
    "batch over 2": ((2,), ("data",), WHOLE, P("data")),
    "batch over 4": ((4,), ("data",), WHOLE, P("data")),
    "parameters over 4": ((4,), ("model",), ALONG, P()),
    "batch over 2, parameters over 2": ((2, 2), ("data", "model"), ALONG, P("data")),
    "parameters over 2 by 2": ((2, 2), ("data", "model"), ACROSS, P("data")),
}
"""The shape of a mesh and the names of its axes, how parameters lie on it, and how the batch does."""


def numbers(rows: int = 32) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    shapes = {"table": (rows, 8), "w": (8, 16), "b": (16,), "head": (16, 4)}
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def parameters() -> dict[str, jax.Array]:
    """On one device."""
    return {name: jnp.asarray(array) for name, array in numbers().items()}


def batch(step: int = 0) -> np.ndarray:
    return np.random.default_rng(step).permutation(np.r_[3, 3, 30, np.arange(5)])


def loss(params: Any, tokens: Any, shift: Any = 0.0) -> jax.Array:
    hidden = jnp.tanh((params["table"][tokens] + shift) @ params["w"] + params["b"])
    return -jax.nn.log_softmax(hidden @ params["head"])[:, 0].mean()


def spread(params: Mapping[str, Any], layout: str, devices: Any = None, **axes: Any) -> tuple[Any, NamedSharding]:
    """Parameters on a mesh, and the sharding of a batch there."""
    shape, names, specs, tokens = LAYOUTS[layout]
    devices = np.array(jax.devices() if devices is None else devices)[: int(np.prod(shape))]
    mesh = Mesh(devices.reshape(shape), names, **axes)
    placed = {name: to(array, NamedSharding(mesh, specs.get(name, P()))) for name, array in params.items()}
    return placed, NamedSharding(mesh, tokens)


def to(array: Any, sharding: NamedSharding) -> jax.Array:
    """On a mesh, of which each process gives its own devices their shards."""
    held = np.asarray(array)
    return jax.make_array_from_callback(held.shape, sharding, lambda index: held[index])


def stepper(elements: Any, function: Any = loss) -> Any:
    @jax.jit
    def step(values: Any, speed: Any, params: Any, tokens: Any) -> Any:
        found, slope = elements.value_and_grad(lambda params: function(params, tokens), values, params=params)
        speed = jax.tree.map(lambda speed, slope: 0.9 * speed + slope, speed, slope)
        return jax.tree.map(lambda value, speed: value - 0.1 * speed, values, speed), speed, found

    return step


def trained(elements: Any, params: Any, tokens: NamedSharding | None, steps: int = 4, function: Any = loss) -> Any:
    step, values = stepper(elements, function), elements.values
    speed = jax.tree.map(jnp.zeros_like, values)
    for number in range(steps):
        given = jnp.asarray(batch(number)) if tokens is None else to(batch(number), tokens)
        values, speed, _ = step(values, speed, params, given)
    return values


def collectives(compiled: Any) -> list[tuple[str, int]]:
    """Each operation of a program that devices do together, and how many bytes it gives to one of them."""
    found = []
    kinds = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast"
    for shapes, kind in re.findall(rf"= (.*?) ({kinds})(?:-start)?\(", compiled.as_text()):
        sizes = [
            int(re.sub(r"\D", "", dtype.replace("pred", "8")))
            // 8
            * int(np.prod([int(n) for n in shape.split(",") if n]))
            for dtype, shape in re.findall(r"(pred|[a-z]+\d+)\[([\d,]*)\]", shapes)
        ]
        found.append((kind, sum(sizes)))
    return found


def assert_close(found: Any, expected: Any) -> None:
    for place in expected:
        np.testing.assert_allclose(whole(found[place]), whole(expected[place]), rtol=2e-5, atol=1e-6, err_msg=place)


def assert_on_all(values: Any, devices: int) -> None:
    for place, row in values.items():
        assert row.is_fully_replicated, place
        assert len(row.sharding.device_set) == devices, place


def assert_only_places(elements: Any, merged: Any, params: Any, before: dict[str, np.ndarray]) -> None:
    """Each shard is where it was, and differs from what it was at the places alone; all replicas are the same."""
    for name, array in merged.items():
        assert array.sharding.is_equivalent_to(params[name].sharding, array.ndim), (name, array.sharding)
        places = [place for place in elements.places if place.name == name]
        for shard in array.addressable_shards:
            assert shard.data.devices() == {shard.device}
            expected = before[name].copy()
            for place in places:
                expected.reshape(-1)[place.select(array.shape).flat().reshape(-1)] = np.asarray(elements[place])
            assert np.asarray(shard.data).tobytes() == expected[shard.index].tobytes(), (name, shard.device)


def whole(array: Any) -> np.ndarray:
    return np.asarray(array)


def single(places: list[str] = PLACES) -> tuple[Any, Any]:
    """Parameters on one device, and elements of them."""
    params = parameters()
    return params, eg.trainable(params, places)


@cache
def expected() -> Any:
    """Return the result on one device."""
    params, elements = single()
    return trained(elements, params, None)


def print_outcomes(checks: Mapping[str, Callable[[], Any]]) -> None:
    """Run all checks, and print as JSON what each of them found, or the traceback of its error."""
    outcomes = {}
    for name, check in checks.items():
        try:
            outcomes[name] = {"found": check(), "wrong": None}
        except Exception:
            outcomes[name] = {"found": None, "wrong": traceback.format_exc()}
    print(json.dumps(outcomes))
