"""What training elements of JAX parameters costs, against `at[].set` and the dense gradient, all under jit."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import elementgrad as eg
from benchmarks.harness import Row

FASTER, SMALLER = 1 / 50, 1 / 100
"""What rows of a large table must be, in time and in temporary memory."""
LAYERS, TRACE_BOUND, COMPILE_BOUND = (10, 80), 3, 1.5


def rows() -> Iterator[Row]:
    """Rows of an embedding, and elements of a dense layer."""
    import jax
    import jax.numpy as jnp

    def compiled(function: Callable[..., Any], *args: Any) -> tuple[Callable[[], Any], int]:
        made = jax.jit(function).lower(*args).compile()
        memory: Any = made.memory_analysis()
        return lambda: jax.block_until_ready(made(*args)), memory.temp_size_in_bytes

    table = {"w": jax.random.normal(jax.random.key(0), (100_000, 512), "float32")}
    ids = np.random.default_rng(0).integers(0, 100_000, 256)
    ids[:10] = np.arange(10)

    def looked_up(params: Any) -> Any:
        return jnp.tanh(params["w"][ids]).sum()

    elements = eg.trainable(table, "w[:10]")
    values = elements.values

    def by_merging(params: Any, values: Any) -> Any:
        return jax.grad(lambda values: looked_up(elements.merge(values, params=params)))(values)

    ours, small = compiled(lambda params, values: elements.grad(looked_up, values, params=params), table, values)
    dense, large = compiled(by_merging, table, values)
    if small > large * SMALLER:
        raise SystemExit(f"jax table rows: {small} temporary bytes of ours, {large} by at[].set and grad")
    name = f"jax table, 10 rows ({small / 1e6:.2g} of {large / 1e6:.3g} MB)"
    yield Row(name, ours, dense, "at[].set, grad", FASTER, repeats=7)

    kernel = {"w": jax.random.normal(jax.random.key(0), (768, 3072), "float32")}
    x = jax.random.normal(jax.random.key(1), (1024, 768), "float32")

    def layer(params: Any) -> Any:
        return jnp.tanh(x @ params["w"]).sum()

    whole, _ = compiled(jax.grad(layer), kernel)
    for count in (1, 100, 1000):
        chosen = np.random.default_rng(0).choice(768 * 3072, count, replace=False)
        some = eg.trainable(kernel, eg.at("w").coords(np.stack(np.unravel_index(chosen, (768, 3072)), 1)))

        def sparse(params: Any, values: Any, some: eg.Elements = some) -> Any:
            return some.grad(layer, values, params=params)

        ours, _ = compiled(sparse, kernel, some.values)
        yield Row(f"jax dense 768x3072, k={count}", ours, whole, "dense gradient", 1.0)

    yield from many_layers()


def many_layers() -> Iterator[Row]:
    """Small layers with a place in each: the time to trace a step, and to compile it."""
    import jax
    import jax.numpy as jnp

    x = jax.random.normal(jax.random.key(0), (8, 16), "float32")
    for count in LAYERS:
        keys = jax.random.split(jax.random.key(1), count)
        params = {f"w{n}": jax.random.normal(key, (16, 16), "float32") / 4 for n, key in enumerate(keys)}
        elements = eg.trainable(params, [f"w{n}[{n % 16}, 3]" for n in range(count)])

        def loss(params: Any, count: int = count) -> Any:
            h = x
            for n in range(count):
                h = jnp.tanh(h @ params[f"w{n}"])
            return (h * h).sum()

        # Another function each time, or JAX would trace nothing anew.
        def ours(params: Any = params, elements: Any = elements, loss: Any = loss) -> Any:
            return jax.jit(lambda params, values: elements.grad(loss, values, params=params)).trace(
                params, elements.values
            )

        def theirs(params: Any = params, loss: Any = loss) -> Any:
            return jax.jit(lambda params: jax.grad(loss)(params)).trace(params)

        yield Row(f"jax {count} layers, trace", ours, theirs, "jax.grad", TRACE_BOUND, repeats=7)
        yield Row(
            f"jax {count} layers, trace and compile",
            lambda ours=ours: ours().lower().compile(),  # type: ignore[misc]
            lambda theirs=theirs: theirs().lower().compile(),  # type: ignore[misc]
            "jax.grad",
            COMPILE_BOUND,
            repeats=3,
        )


SUITES = {"training-jax": rows}
