"""How each verb grows: its cost at twice the size against that at the size, which is 2 for what is linear.

Every row has a size that a user may make larger: layers of a model, steps of a recording, places, elements, entries of
a check, the size of a sparse problem. The ratio of a row is the factor from one size to the next.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np

import elementgrad as eg
from benchmarks.harness import Row
from benchmarks.jacobians import values

LINEAR = 2.4
"""The largest factor of what is linear, with room for caches that a larger size leaves."""
Make = Callable[[int], Callable[[], object]]
"""From a size to a call of that size."""


def grow(name: str, what: str, size: int, make: Make, most: float = LINEAR) -> Iterator[Row]:
    """Compare a call at a size, at twice that and at four times."""
    for smaller, larger in pairwise((size, 2 * size, 4 * size)):
        row = f"{name}: {larger} {what}"
        yield Row(row, make(larger), make(smaller), f"{smaller} {what}", most, repeats=6)


def torch_layers(count: int) -> Any:
    import torch

    torch.manual_seed(0)
    layers = [layer for _ in range(count) for layer in (torch.nn.Linear(64, 64), torch.nn.Tanh())]
    return torch.nn.Sequential(*layers), torch.from_numpy(values(4, 64))


def torch_rows() -> Iterator[Row]:
    import torch

    def grad(count: int) -> Callable[[], object]:
        model, x = torch_layers(count)
        return lambda: eg.grad(model, x, of="output[0, 0]", wrt="0.weight[3, 4]")

    def rows(count: int) -> Callable[[], object]:
        model, x = torch_layers(4)
        jacobian = eg.jacobian(model, x.repeat(64, 1))
        return lambda: jacobian[([*range(count)], 0), (0, slice(None))]

    def columns(count: int) -> Callable[[], object]:
        x = torch.from_numpy(values(8192))
        jacobian = eg.jacobian(lambda x: torch.tanh(x) * x.roll(1), x)
        return lambda: jacobian[:, :count]

    def value(count: int) -> Callable[[], object]:
        model, x = torch_layers(count)
        return lambda: eg.value(model, x, of="output[0, 0]")

    def places(count: int) -> Callable[[], object]:
        model, x = torch_layers(2)
        model = torch.nn.Sequential(model, torch.nn.Linear(64, 4096))
        names = [f"0.0.weight[{i // 64 % 64}, {i % 64}]" for i in range(count)]
        return lambda: eg.grad(model, x, of="output[0, 0]", wrt=names)

    def names(count: int) -> Callable[[], object]:
        model, x = torch_layers(count)
        return lambda: eg.names(model, x)

    def shares(count: int) -> Callable[[], object]:
        x = torch.from_numpy(values(64))

        def f(x: Any) -> Any:
            return sum(torch.sin(x * step) for step in range(1, count + 1))

        return lambda: eg.contributions(f, x, of="output[0]", wrt="x[0]")

    def record(count: int) -> Callable[[], object]:
        x = torch.from_numpy(values(64))

        def run() -> object:
            with eg.record(x) as recording:
                y = x
                for _ in range(count):
                    y = torch.sin(y) * x
            return recording.grad(eg.at(y)[0], eg.at(x)[0])

        return run

    def explain(count: int) -> Callable[[], object]:
        model, x = torch_layers(count)
        return lambda: eg.explain(model, x, of="output[0, 0]", wrt="0.weight[3, 4]")

    def check(count: int) -> Callable[[], object]:
        model, x = torch_layers(8)
        model, x = model.double(), x.double()
        return lambda: eg.check(model, x, of="output[0, 0]", wrt=f"input[0, :{count}]")

    def sparse(count: int) -> Callable[[], object]:
        x = torch.from_numpy(values(count))
        return lambda: eg.jacobian(lambda x: x[1:] * x[:-1], x).sparse()

    def top(count: int) -> Callable[[], object]:
        model, x = torch_layers(count)
        return lambda: eg.top(model, lambda model: model(x).sum(), 10)

    def edit(count: int) -> Callable[[], object]:
        x = torch.from_numpy(values(1_000_000))
        index = np.arange(count) * 7
        return lambda: eg.at(x)[index].set(1.0)

    yield from grow("torch grad", "layers", 50, grad)
    yield from grow("torch J[rows, :]", "rows", 32, rows)
    yield from grow("torch J[:, columns]", "columns", 64, columns)
    yield from grow("torch value", "layers", 50, value)
    yield from grow("torch grad", "places", 50, places)
    yield from grow("torch names", "layers", 50, names)
    yield from grow("torch contributions", "uses", 25, shares)
    yield from grow("torch record", "steps", 100, record)
    yield from grow("torch explain", "layers", 25, explain)
    yield from grow("torch check", "entries", 16, check)
    yield from grow("torch sparse", "rows", 10_000, sparse)
    yield from grow("torch top", "layers", 25, top)
    yield from grow("torch set", "elements", 10_000, edit)


def tensorflow_rows() -> Iterator[Row]:
    import tensorflow as tf

    def layered(count: int) -> Any:
        weights = [tf.constant(values(64, 64) / 8) for _ in range(count)]

        def f(x: Any) -> Any:
            for weight in weights:
                x = tf.tanh(tf.linalg.matvec(weight, x))
            return x

        return f, tf.constant(values(64))

    yield from common_rows("tensorflow", layered, tf.constant, 20)


def jax_rows() -> Iterator[Row]:
    import jax.numpy as jnp

    def layered(count: int) -> Any:
        weights = [jnp.asarray(values(64, 64) / 8) for _ in range(count)]

        def f(x: Any) -> Any:
            for weight in weights:
                x = jnp.tanh(weight @ x)
            return x

        return f, jnp.asarray(values(64))

    yield from common_rows("jax", layered, jnp.asarray, 10)


def common_rows(name: str, layered: Callable[[int], Any], tensor: Callable[[Any], Any], size: int) -> Iterator[Row]:
    def grad(count: int) -> Callable[[], object]:
        f, x = layered(count)
        return lambda: eg.grad(f, x, of="output[0]")

    def rows(count: int) -> Callable[[], object]:
        f, x = layered(4)
        return lambda: [eg.jacobian(f, x)[row, :] for row in range(count)]

    def explain(count: int) -> Callable[[], object]:
        f, x = layered(count)
        return lambda: eg.explain(f, x, of="output[0]", wrt="x[1]", probe=False)

    def check(count: int) -> Callable[[], object]:
        f, x = layered(4)
        return lambda: eg.check(f, x, of="output[0]", wrt=f"x[:{count}]")

    def sparse(count: int) -> Callable[[], object]:
        x = tensor(values(count))
        return lambda: eg.jacobian(lambda x: x[1:] * x[:-1], x).sparse()

    def edit(count: int) -> Callable[[], object]:
        x, index = tensor(values(1_000_000)), np.arange(count) * 7
        return lambda: eg.at(x)[index].set(1.0)

    yield from grow(f"{name} grad", "layers", size, grad)
    yield from grow(f"{name} grad", "calls", 4, rows)
    yield from grow(f"{name} explain", "layers", size, explain)
    yield from grow(f"{name} check", "entries", 8, check)
    yield from grow(f"{name} sparse", "rows", 10_000, sparse)
    yield from grow(f"{name} set", "elements", 10_000, edit)


SUITES = {"growth": torch_rows, "growth-tensorflow": tensorflow_rows, "growth-jax": jax_rows}
