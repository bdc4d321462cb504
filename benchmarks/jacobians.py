"""What reading derivatives costs: entries, rows and whole Jacobians against each framework's own way, and memory."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

import elementgrad as eg
from benchmarks.harness import Row, by_speed

WIDTH, HIDDEN = 1024, 512
ENTRY_BOUND, ENTRY_GAIN = 1.25, 15
DENSE_BOUND, DENSE_GAIN = 1.2, 5
UNITS, UNITS_GAIN = 384, 30
DIAGONAL_BOUND = 1.2
LONG, LONG_MB = 100_000, 300
GRID, SWEEPS, BUDGET_MB = 1024, 64, 200
ANEW, SMALL_BOUND = 256, 1.7
ROWS, ROWS_BOUND, FIRST_GAIN, REPEAT_GAIN = 256, 1.2, 5, 50


def weights(*widths: int) -> list[np.ndarray]:
    """Matrices from one width to the next, such that what they are applied to neither grows nor fades."""
    random = np.random.default_rng(0)
    return [(random.standard_normal((n, m)) / n**0.5).astype(np.float32) for n, m in pairwise(widths)]


def values(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).standard_normal(shape).astype(np.float32)


def agree(row: Row) -> Row:
    """The row, after a look at whether both ways give the same numbers."""
    ours, baseline = np.asarray(row.ours()), np.asarray(row.baseline())
    np.testing.assert_allclose(ours.reshape(baseline.shape), baseline, rtol=1e-3, atol=1e-5, err_msg=row.name)
    return row


def dense(f: Callable[[Any], Any], x: Any) -> Callable[[], Any]:
    return lambda: eg.jacobian(f, x).dense()


def block(f: Callable[[Any], Any], x: Any, index: Any, budget: str | None = None) -> Callable[[], Any]:
    return lambda: eg.jacobian(f, x, budget=budget)[index]


def torch_rows() -> Iterator[Row]:
    yield from torch_entries()
    yield from torch_dense()
    yield from torch_units()
    yield from torch_diagonal()
    yield from torch_long()
    yield from torch_budget()


def torch_mlp(*widths: int) -> Any:
    import torch

    layers: list[torch.nn.Module] = []
    for weight in weights(*widths):
        linear = torch.nn.Linear(*weight.shape)
        linear.weight.data = torch.from_numpy(weight.T.copy())
        layers += [linear, torch.nn.Tanh()]
    return torch.nn.Sequential(*layers).requires_grad_(False)


def torch_entries() -> Iterator[Row]:
    for hidden in (WIDTH, 4 * WIDTH):
        yield from torch_entry(torch_mlp(WIDTH, hidden, hidden, WIDTH), f", {hidden} hidden")


def torch_entry(f: Any, kind: str) -> Iterator[Row]:
    import torch

    x, i, j = torch.from_numpy(values(WIDTH)), 3, 7

    def ours() -> Any:
        return eg.jacobian(f, x)[i, j]

    def by_hand() -> Any:
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad(f(leaf)[i], leaf)[0][j]

    def whole() -> Any:
        return torch.func.jacrev(f)(x)[i, j]

    name = f"torch J[{i}, {j}] of {WIDTH} x {WIDTH}{kind}"
    yield agree(Row(name, ours, by_hand, "autograd.grad", ENTRY_BOUND))
    yield agree(Row(name, ours, whole, "func.jacrev", 1 / ENTRY_GAIN))


def torch_dense() -> Iterator[Row]:
    import torch

    for n, m, hidden in ((32, 2048, [WIDTH]), (2048, 32, [WIDTH]), (32, 2048, []), (2048, 32, [])):
        f, x = torch_mlp(n, *hidden, m), torch.from_numpy(values(n))
        kind = f"torch dense {m} x {n}, {len(hidden) + 1} layers"
        calls: dict[str, Callable[[], Any]] = {
            "func.jacfwd": partial(torch.func.jacfwd(f), x),
            "func.jacrev": partial(torch.func.jacrev(f), x),
        }
        ours = dense(f, x)
        better, worse = by_speed(calls)
        yield agree(Row(kind, ours, calls[better], better, DENSE_BOUND if hidden else None))
        yield agree(Row(kind, ours, calls[worse], worse, 1 / DENSE_GAIN if hidden else None))


def torch_units() -> Iterator[Row]:
    import torch
    from captum.attr import NeuronGradient  # type: ignore[import-not-found, import-untyped]

    model, x = torch_mlp(784, UNITS, UNITS, 10), torch.from_numpy(values(1, 784)).requires_grad_()
    hidden = model[:4]
    attribution = NeuronGradient(model, model[3])

    def loop() -> Any:
        return torch.stack([attribution.attribute(x, neuron_selector=i) for i in range(UNITS)]).detach()

    yield agree(
        Row(f"torch {UNITS} hidden units", dense(hidden, x), loop, "captum NeuronGradient", 1 / UNITS_GAIN, repeats=3)
    )


def torch_diagonal() -> Iterator[Row]:
    import torch
    from torch.func import grad, hessian, jvp, vjp, vmap

    (weight,) = map(torch.from_numpy, weights(1000, 1000))
    x = torch.from_numpy(values(1000))
    numbers = torch.arange(1000)

    def f(x: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(weight @ x) ** 2).sum()

    def forward_over_reverse(i: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
        return jvp(grad(f), (x,), (unit,))[1].gather(0, i[None])[0]

    def reverse_over_reverse() -> Any:
        pull = vjp(grad(f), x)[1]
        return vmap(lambda i, unit: pull(unit)[0].gather(0, i[None])[0])(numbers, torch.eye(1000))

    def forward_over_forward(unit: torch.Tensor) -> torch.Tensor:
        return jvp(lambda x: jvp(f, (x,), (unit,))[1], (x,), (unit,))[1]

    candidates: dict[str, Callable[[], Any]] = {
        "func.hessian": lambda: hessian(f)(x).diagonal(),
        "vmap of jvp of grad": lambda: vmap(forward_over_reverse)(numbers, torch.eye(1000)),
        "vmap of vjp of grad": reverse_over_reverse,
        "vmap of jvp of jvp": lambda: vmap(forward_over_forward)(torch.eye(1000)),
    }
    best = by_speed(candidates)[0]
    ours: Callable[[], Any] = lambda: eg.hessian(f, x).diagonal()  # noqa: E731
    yield agree(Row("torch Hessian diagonal 1000", ours, candidates[best], best, DIAGONAL_BOUND, repeats=9))


def torch_long() -> Iterator[Row]:
    import torch
    from torch.func import jvp, vjp, vmap

    x = torch.from_numpy(values(LONG))

    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) * torch.roll(x, 1) + x.mean()

    def row() -> Any:
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad(f(leaf)[5], leaf)[0]

    def unit(*places: int) -> torch.Tensor:
        seeds = torch.zeros(len(places), LONG)
        seeds[range(len(places)), places] = 1
        return seeds

    def column() -> Any:
        return jvp(f, (x,), (unit(5)[0],))[1]

    def corner() -> Any:
        return vmap(vjp(f, x)[1])(unit(*range(10)))[0][:, :10]

    name = f"torch {{}} of {LONG} x {LONG}, 40 GB"
    whole = slice(None)
    calls: list[tuple[str, Any, Callable[[], Any], str]] = [
        ("J[5, :]", (5, whole), row, "autograd.grad"),
        ("J[:, 5]", (whole, 5), column, "func.jvp"),
        ("J[:10, :10]", (slice(10), slice(10)), corner, "vmap of vjp"),
    ]
    for read, index, baseline, baseline_name in calls:
        yield agree(Row(name.format(read), block(f, x, index), baseline, baseline_name, most_mb=LONG_MB))


def torch_budget() -> Iterator[Row]:
    import torch
    from torch.func import jvp, vjp, vmap

    x, w = torch.from_numpy(values(GRID)), torch.from_numpy(values(2, GRID)[1])

    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(torch.outer(w, x)).cos().mean(1)

    def forward() -> Any:
        return vmap(lambda unit: jvp(f, (x,), (unit,))[1])(torch.eye(GRID)[:SWEEPS]).T

    def reverse() -> Any:
        return vmap(vjp(f, x)[1])(torch.eye(GRID)[:SWEEPS])[0]

    some, whole = slice(SWEEPS), slice(None)
    calls: list[tuple[str, Any, Callable[[], Any], str]] = [
        (f"J[:, :{SWEEPS}]", (whole, some), forward, "vmap of jvp"),
        (f"J[:{SWEEPS}, :]", (some, whole), reverse, "vmap of vjp"),
    ]
    result_mb = GRID * SWEEPS * 4 / 1e6
    for read, index, baseline, baseline_name in calls:
        for budget in (f"{BUDGET_MB}MB", None):
            most = BUDGET_MB + result_mb if budget else None
            name = f"torch {read}, budget={budget}"
            yield agree(Row(name, block(f, x, index, budget), baseline, baseline_name, most_mb=most, repeats=3))


def tensorflow_rows() -> Iterator[Row]:
    import tensorflow as tf

    layers = [tf.constant(weight) for weight in weights(WIDTH, HIDDEN, HIDDEN, ROWS)]
    x = tf.constant(values(1, WIDTH))

    def f(x: Any) -> Any:
        for weight in layers:
            x = tf.tanh(x @ weight)
        return x

    def loop(sliced: bool) -> Any:
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = f(x)
            parts = [y[0, i] for i in range(ROWS)] if sliced else []
        if sliced:
            return tf.stack([tape.gradient(part, x) for part in parts]).numpy()
        seeds = tf.unstack(tf.eye(ROWS)[:, None])
        return tf.stack([tape.gradient(y, x, output_gradients=seed) for seed in seeds]).numpy()

    loops: dict[str, Callable[[], Any]] = {
        "loop of tape.gradient of y[0, i]": lambda: loop(sliced=True),
        "loop of tape.gradient with seeds": lambda: loop(sliced=False),
    }
    usual, faster = loops

    def first() -> Any:
        return eg.jacobian(f, x).dense().numpy()

    jacobian = eg.jacobian(f, x)
    name = f"tensorflow dense {ROWS} x {WIDTH}"
    yield agree(Row(f"{name}, first", first, loops[usual], usual, 1 / FIRST_GAIN, repeats=7))
    yield agree(Row(f"{name}, first", first, loops[faster], faster, repeats=7))
    repeat: Callable[[], Any] = lambda: jacobian.dense().numpy()  # noqa: E731
    yield agree(Row(f"{name}, repeated", repeat, loops[usual], usual, 1 / REPEAT_GAIN, repeats=7))
    yield agree(Row(f"{name}, repeated", repeat, loops[faster], faster, repeats=7))


def jax_rows() -> Iterator[Row]:
    import jax
    import jax.numpy as jnp

    layers = [jnp.asarray(weight) for weight in weights(WIDTH, WIDTH, WIDTH, WIDTH)]
    x = jnp.asarray(values(WIDTH))

    def f(x: Any) -> Any:
        for weight in layers:
            x = jnp.tanh(x @ weight)
        return x

    jacobian, seeds = eg.jacobian(f, x), jnp.eye(WIDTH)[:ROWS]
    pull = jax.jit(lambda x, seeds: jax.vmap(jax.vjp(f, x)[1])(seeds)[0])
    yield agree(
        Row(
            f"jax J[:{ROWS}, :] of {WIDTH} x {WIDTH}, repeated",
            lambda: jax.block_until_ready(jacobian[:ROWS, :]),
            lambda: jax.block_until_ready(pull(x, seeds)),
            "jit of vmap of vjp",
            ROWS_BOUND,
        )
    )
    yield from jax_anew()
    yield from jax_small()


def jax_anew() -> Iterator[Row]:
    """A Jacobian that is made for one read, again and again; the function is traced each time."""
    import jax
    import jax.numpy as jnp

    for layers in (1, 4):
        kernels, x = [jnp.asarray(each) for each in weights(*[ANEW] * (layers + 1))], jnp.asarray(values(ANEW))

        def f(x: Any, kernels: Any = kernels) -> Any:
            for kernel in kernels:
                x = jnp.tanh(x @ kernel)
            return x

        whole = jax.jit(jax.jacrev(f))

        def twice_and_a_trace(f: Any = f, x: Any = x, whole: Any = whole) -> Any:
            jax.make_jaxpr(lambda x: f(x))(x)  # another function each time, or JAX would not trace it anew
            jax.block_until_ready(whole(x))
            return jax.block_until_ready(whole(x))

        yield agree(
            Row(
                f"jax dense {ANEW} x {ANEW}, {layers} layers, made anew",
                lambda f=f, x=x: jax.block_until_ready(eg.jacobian(f, x).dense()),  # type: ignore[misc]
                twice_and_a_trace,
                "two jacrev in jax.jit, one trace",
                1.0,
            )
        )


def jax_small() -> Iterator[Row]:
    import jax
    import jax.numpy as jnp

    x, (kernel,) = jnp.asarray(values(64)), map(jnp.asarray, weights(64, 64))
    functions = {"sum of squares": lambda x: (x * x).sum(), "small layer": lambda x: jnp.tanh(x @ kernel).sum()}
    for name, f in functions.items():
        yield agree(
            Row(
                f"jax eager grad, {name}",
                lambda f=f: jax.block_until_ready(eg.grad(f, x)),  # type: ignore[misc]
                lambda f=f: jax.block_until_ready(jax.grad(f)(x)),  # type: ignore[misc]
                "jax.grad",
                SMALL_BOUND,
            )
        )


SUITES = {"jacobian-torch": torch_rows, "jacobian-tensorflow": tensorflow_rows, "jacobian-jax": jax_rows}
