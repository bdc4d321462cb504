"""Elements of parameters on meshes of host devices, whose number is fixed when JAX starts: run by itself.

`python -m tests.support.sharded_jax directory` prints what each check found wrong, or null.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import elementgrad as eg
from tests.support.meshes import UNCHECKED, shard_map
from tests.support.sharded_jax_model import (
    APART,
    PLACES,
    assert_close,
    assert_on_all,
    assert_only_places,
    batch,
    collectives,
    expected,
    loss,
    numbers,
    parameters,
    print_outcomes,
    single,
    spread,
    stepper,
    to,
    trained,
)
from tests.support.sharded_jax_reads import reads

BEFORE = numbers()


def gradients(layout: str) -> None:
    plain, alone = single()
    expected = jax.jit(lambda values: alone.grad(lambda params: loss(params, batch()), values))(alone.values)
    params, sharding = spread(plain, layout)
    elements, tokens = eg.trainable(params, PLACES), to(batch(), sharding)
    assert_on_all(elements.values, sharding.num_devices)
    found, gradient = elements.value_and_grad(lambda params: loss(params, tokens))
    assert_close({"loss": found}, {"loss": loss(plain, batch())})
    one = {"table[3]": lambda params: loss(params, tokens)}
    compiled = jax.jit(lambda values: (elements.grad(lambda params: loss(params, tokens), values), elements.grad(one)))
    closed, routed = compiled(elements.values)
    for each in (gradient, closed):
        assert_close(each, expected)
        assert_on_all(each, sharding.num_devices)
    zeros = {place: np.zeros_like(row) for place, row in expected.items()}
    assert_close(routed, {**zeros, "table[3]": expected["table[3]"]})
    assert_on_all(routed, sharding.num_devices)
    assert str(elements.plan(lambda params: loss(params, tokens))) == str(
        alone.plan(lambda params: loss(params, batch()))
    )


def training(layout: str) -> None:
    params, sharding = spread(numbers(), layout)
    elements = eg.trainable(params, PLACES)
    elements.values = found = trained(elements, params, sharding)
    assert_close(found, expected())
    assert_on_all(found, sharding.num_devices)
    for merged in (
        elements.merge(),
        jax.jit(lambda values, params: elements.merge(values, params=params))(found, params),
        jax.jit(lambda values: elements.merge(values))(found),
    ):
        assert_only_places(elements, merged, params, BEFORE)


def patches(layout: str, directory: Path) -> None:
    """The file is that of one device to the byte, and every number of devices goes on from it."""
    plain, alone = single()
    alone.values = expected()
    alone.save(directory / "alone.safetensors")
    params, _ = spread(plain, layout)
    elements = eg.trainable(params, PLACES)
    elements.values = {place: np.asarray(row) for place, row in alone.values.items()}
    assert_on_all(elements.values, len(params["w"].sharding.device_set))
    path = directory / "sharded.safetensors"
    elements.save(path)
    assert path.read_bytes() == (directory / "alone.safetensors").read_bytes()
    elements.save(directory / "full.safetensors", full=True)
    alone.save(directory / "alone full.safetensors", full=True)
    assert (directory / "full.safetensors").read_bytes() == (directory / "alone full.safetensors").read_bytes()
    for array in params.values():
        assert array._npy_value is None, "a parameter was gathered"
    applied = eg.apply(params, path)
    merged = applied.merge()
    assert_only_places(elements, merged, params, BEFORE)
    over = eg.trainable(merged, "w[0, 0]")
    over.save(directory / "over.safetensors")
    applied.undo()
    assert_bits(applied.merge(), BEFORE)
    elements.undo()
    assert_bits(elements.merge(), BEFORE)
    further = trained(eg.trainable(plain, path), plain, None, 1)
    for other in ("batch over 2", "parameters over 4"):
        params, sharding = spread(plain, other)
        again = eg.trainable(params, path)
        assert_on_all(again.values, sharding.num_devices)
        assert_bits(again.values, {place: np.asarray(row) for place, row in alone.values.items()})
        assert_close(trained(again, params, sharding, 1), further)


def wire(layout: str) -> dict[str, int]:
    """Bytes that a device gets in a step of elements and in one of the frozen model, however large the table is."""
    sizes = set()
    for rows in (32, 32 * 64):
        params, sharding = spread(numbers(rows), layout)
        elements, tokens = eg.trainable(params, APART), to(batch(), sharding)
        values, shift = elements.values, to(np.zeros((len(batch()), 8), np.float32), sharding)
        frozen = jax.jit(jax.value_and_grad(loss, 2)).lower(params, tokens, shift)
        step = stepper(elements).lower(values, values, params, tokens)
        sizes.add(tuple([sum(size for _, size in collectives(each.compile())) for each in (step, frozen)]))
        merge = jax.jit(lambda values, params, elements=elements: elements.merge(values, params=params))
        assert collectives(merge.lower(values, params).compile()) == []
    assert len(sizes) == 1, sizes
    ((step, frozen),) = sizes
    return {"elements": elements.size, "step": step, "frozen": frozen}


def largest(layout: str) -> None:
    plain = parameters()
    params, sharding = spread(plain, layout)
    tokens = to(batch(), sharding)
    for among in (None, "w[:, 3:]"):
        found = eg.top(params, lambda params: loss(params, tokens), 9, among=among)
        assert list(map(str, found)) == list(
            map(str, eg.top(plain, lambda params: loss(params, batch()), 9, among=among))
        )


def by_hand() -> list[int]:
    """Inside of a `shard_map` each device has its own batch, and values get the gradient of `jax.grad`."""
    params, sharding = spread(numbers(), "batch over 4")
    elements, tokens = eg.trainable(params, APART), to(batch(), sharding)

    def step(values: Any, params: Any, tokens: Any) -> Any:
        gradient = elements.grad(lambda params: loss(params, tokens), values, params=params)
        return jax.tree.map(lambda row: jax.lax.pmean(row, "data"), gradient)

    specs = {"in_specs": (P(), P(), P("data")), "out_specs": P()}
    compiled = jax.jit(shard_map(step, mesh=sharding.mesh, **specs, **UNCHECKED)).lower(elements.values, params, tokens)
    program = compiled.compile()
    _, alone = single(APART)
    expected = jax.jit(lambda values: alone.grad(lambda params: loss(params, batch()), values))(alone.values)
    assert_close(program(elements.values, params, tokens), expected)
    checked = jax.jit(shard_map(step, mesh=sharding.mesh, **specs)).lower(elements.values, params, tokens).compile()
    return [sum(size for _, size in collectives(each)) for each in (program, checked)]


def explicit() -> None:
    """A mesh whose axes are explicit, as `jax.make_mesh` gives it: every result has a sharding in its type."""

    def typed(params: Any, tokens: Any) -> jax.Array:
        rows = params["table"].at[tokens].get(out_sharding=P("data", None))
        hidden = jnp.tanh(rows @ params["w"] + params["b"])
        logits = jnp.einsum("bh,ho->bo", hidden, params["head"], out_sharding=P("data", None))
        return -jax.nn.log_softmax(logits)[:, 0].mean()

    layout = "batch over 2, parameters over 2"
    params, sharding = spread(numbers(), layout, axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    with jax.set_mesh(sharding.mesh):
        elements, tokens = eg.trainable(params, PLACES), to(batch(), sharding)
        plan = elements.plan(lambda params: typed(params, tokens))
        assert {use.operation for use in plan.uses if not use.dense} == {"gather", "dot_general"}
        elements.values = found = trained(elements, params, sharding, function=typed)
        assert_close(found, expected())
        assert_on_all(found, 4)
        assert_only_places(elements, elements.merge(), params, BEFORE)
        merge = jax.jit(lambda values, params: elements.merge(values, params=params))
        assert_only_places(elements, merge(found, params), params, BEFORE)
        assert collectives(merge.lower(found, params).compile()) == []


def assert_bits(found: Any, expected: Any) -> None:
    for name in expected:
        assert np.asarray(found[name]).tobytes() == np.asarray(expected[name]).tobytes(), name


def checks(directory: Path) -> dict[str, Callable[[], Any]]:
    found: dict[str, Callable[[], Any]] = {}
    for layout in ("batch over 2", "parameters over 4", "parameters over 2 by 2"):
        found[f"training, {layout}"] = lambda layout=layout: training(layout)
    for layout in ("batch over 4", "parameters over 4", "batch over 2, parameters over 2"):
        found[f"wire, {layout}"] = lambda layout=layout: wire(layout)
    layout = "parameters over 2 by 2"
    found["gradients"] = lambda: gradients(layout)
    found["patches"] = lambda: patches(layout, directory)
    found["by hand"] = by_hand
    found["reads inside"] = lambda: reads(shard_map, UNCHECKED)
    found["largest"] = lambda: largest(layout)
    if hasattr(jax.sharding, "AxisType") and hasattr(jax, "set_mesh"):  # older versions have no such axes
        found["explicit axes"] = explicit
    return found


def main(directory: str, *wanted: str) -> None:
    jax.config.update("jax_disable_most_optimizations", True)  # of the compiler: most programs run once
    wanted_checks = {name: check for name, check in checks(Path(directory)).items() if not wanted or name in wanted}
    print_outcomes(wanted_checks)


if __name__ == "__main__":
    main(*sys.argv[1:])
