"""What sparse Jacobians cost: as many sweeps as colours, against the framework's own whole Jacobian."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

import elementgrad as eg
from benchmarks.harness import Row, by_speed

SMALL, LARGE = 32, 64
GAINS = {"float32": 25, "float64": 60}
LARGE_GAIN = 500
PEER_BOUND, TENSORFLOW_GAIN = 1.3, 15
FINDING_BOUND = 1.5
SECOND_POINT = 2
"""Dense Jacobians: a pattern has paid for itself when it is used at a second point."""
LONG, LONG_MB = 10**6, 2000
RATE_A, RATE_B, SPREAD = 1.0, 3.4, 10.0


def brusselator(n: int, roll: Callable[..., Any], stack: Callable[..., Any]) -> Callable[[Any], Any]:
    """Two substances on an n x n grid that react and spread, with neighbours around the edges."""
    rate = SPREAD * (n - 1) ** 2

    def spreading(w: Any) -> Any:
        return rate * (roll(w, 1, 0) + roll(w, -1, 0) + roll(w, 1, 1) + roll(w, -1, 1) - 4 * w)

    def f(x: Any) -> Any:
        u, v = x[0], x[1]
        reaction = u * u * v
        first = RATE_B + reaction - (RATE_A + 1) * u + spreading(u)
        return stack([first, RATE_A * u - reaction + spreading(v)])

    return f


def torch_sparse() -> Iterator[Row]:
    import torch

    f = brusselator(SMALL, torch.roll, torch.stack)
    for dtype, gain in GAINS.items():
        x = torch.rand(2, SMALL, SMALL, dtype=getattr(torch, dtype))
        ours = partial(eg.jacobian(f, x).prepare(), x)
        calls: dict[str, Callable[[], Any]] = {
            "func.jacfwd": partial(torch.func.jacfwd(f), x),
            "func.jacrev": partial(torch.func.jacrev(f), x),
        }
        better = by_speed(calls)[0]
        own = calls[better]().reshape(2 * SMALL**2, -1)
        torch.testing.assert_close(ours().to_dense(), own, rtol=1e-4, atol=1e-2 if dtype == "float32" else 1e-9)
        name = f"torch Brusselator {SMALL} x {SMALL}, {dtype}, prepared"
        yield Row(name, ours, calls[better], better, 1 / gain, repeats=5)
    yield from torch_large()
    yield from torch_finding()


def torch_large() -> Iterator[Row]:
    """The whole is read in parts of 256 rows: at once it would take more memory than there is."""
    import torch

    f = brusselator(LARGE, torch.roll, torch.stack)
    x = torch.rand(2, LARGE, LARGE, dtype=torch.float64)
    ours = partial(eg.jacobian(f, x).prepare(), x)
    whole = partial(torch.func.jacrev(f, chunk_size=256), x)
    yield Row(f"torch Brusselator {LARGE} x {LARGE}, prepared", ours, whole, "func.jacrev", 1 / LARGE_GAIN, repeats=1)


def torch_finding() -> Iterator[Row]:
    """Finding and colouring takes the same for each element, and little memory."""
    import torch

    def prepared(n: int) -> Callable[[], Any]:
        x = torch.rand(n)
        return lambda: eg.jacobian(lambda x: torch.sin(x[2:]) * x[1:-1] - x[:-2] ** 2, x).prepare()

    f = brusselator(SMALL, torch.roll, torch.stack)
    x = torch.rand(2, SMALL, SMALL, dtype=torch.float64)
    dense = partial(torch.func.jacrev(f), x)
    finding: Callable[[], Any] = lambda: eg.jacobian(f, x).prepare()  # noqa: E731
    name = f"torch Brusselator {SMALL} x {SMALL}, found and coloured"
    yield Row(name, finding, dense, "func.jacrev", SECOND_POINT, repeats=5)
    tenth = prepared(LONG // 10)

    def ten_times() -> None:
        for _ in range(10):
            tenth()

    name = f"torch tridiagonal {LONG}, found and coloured"
    yield Row(name, prepared(LONG), ten_times, "a tenth, ten times", FINDING_BOUND, most_mb=LONG_MB, repeats=2)


def jax_sparse() -> Iterator[Row]:
    import asdex
    import jax
    import jax.numpy as jnp

    f = brusselator(SMALL, jnp.roll, jnp.stack)
    x = jax.random.uniform(jax.random.key(0), (2, SMALL, SMALL))
    prepared = eg.jacobian(f, x).prepare()
    peer, inside = jax.jit(asdex.jacobian(f, x)), jax.jit(prepared)
    np.testing.assert_allclose(prepared(x).todense(), peer(x).todense().reshape(prepared.pattern.shape), rtol=1e-3)
    for ours, how in ((prepared, "prepared"), (inside, "prepared, in jax.jit")):
        yield Row(
            f"jax Brusselator {SMALL} x {SMALL}, {how}",
            lambda ours=ours: jax.block_until_ready(ours(x)),  # type: ignore[misc]
            lambda: jax.block_until_ready(peer(x)),
            "asdex in jax.jit",
            PEER_BOUND,
        )
    dense = jax.jit(jax.jacfwd(f))
    finding: Callable[[], Any] = lambda: eg.jacobian(f, x).prepare()  # noqa: E731
    yield Row(
        f"jax Brusselator {SMALL} x {SMALL}, found and coloured",
        finding,
        lambda: asdex.jacobian_coloring(f, x),
        "asdex",
        repeats=5,
    )
    yield Row(
        f"jax Brusselator {SMALL} x {SMALL}, prepared, against all columns",
        lambda: jax.block_until_ready(prepared(x)),
        lambda: jax.block_until_ready(dense(x)),
        "jacfwd in jax.jit",
        repeats=5,
    )


def tensorflow_sparse() -> Iterator[Row]:
    import tensorflow as tf

    f = brusselator(SMALL, tf.roll, tf.stack)
    x = tf.random.uniform((2, SMALL, SMALL), seed=0)
    prepared = eg.jacobian(f, x).prepare()

    @tf.function
    def dense(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = f(x)
        return tape.jacobian(y, x)

    own = tf.reshape(dense(x), prepared.pattern.shape)
    np.testing.assert_allclose(tf.sparse.to_dense(prepared(x)), own, rtol=1e-3, atol=1e-2)
    name = f"tensorflow Brusselator {SMALL} x {SMALL}, prepared"
    yield Row(name, lambda: prepared(x), lambda: dense(x), "jacobian in tf.function", 1 / TENSORFLOW_GAIN, repeats=5)


SUITES = {"sparse-torch": torch_sparse, "sparse-jax": jax_sparse, "sparse-tensorflow": tensorflow_sparse}
