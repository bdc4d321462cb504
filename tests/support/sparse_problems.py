"""Functions with sparse Jacobians and Hessians, each written once for the three frameworks, and their sweeps."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.support.operations import point

BAND = np.where(np.abs(np.subtract.outer(np.arange(12), np.arange(12))) <= 2, 0.5, 0.0)
PICKS = np.random.default_rng(3).integers(0, 30, (3, 40))


@dataclass(frozen=True)
class Problem:
    name: str
    f: Callable[[Any, Any], Any]  # of the framework's operations and a float64 tensor
    point: np.ndarray
    sweeps: int
    exact: bool = True  # the pattern holds nothing that is zero everywhere
    second: bool = False  # of a number, of which the Hessian is meant

    def __str__(self) -> str:
        return self.name


def laplacian(o: Any, x: Any) -> Any:
    """Five points, with neighbours around the edges."""
    around = [o.roll(x, shift, axis) for axis in (0, 1) for shift in (1, -1)]
    return around[0] + around[1] + around[2] + around[3] - 4 * x


def brusselator(o: Any, x: Any) -> Any:
    u, v = x[0], x[1]
    reaction = u * u * v
    return o.stack([1 + reaction - 4.4 * u + 10 * laplacian(o, u), 3.4 * u - reaction + 10 * laplacian(o, v)], 0)


def heat(o: Any, x: Any) -> Any:
    """One explicit step on a line whose ends are held."""
    inside = x[1:-1] + 0.1 * (1 + x[1:-1] ** 2) * (x[2:] - 2 * x[1:-1] + x[:-2])
    return o.concat([x[:1], inside, x[-1:]], axis=0)


def plate(o: Any, x: Any) -> Any:
    """The same on a square with cold edges."""
    edged = o.pad(x, (1, 1), (1, 1))
    around = edged[2:, 1:-1] + edged[:-2, 1:-1] + edged[1:-1, 2:] + edged[1:-1, :-2]
    return x + 0.1 * o.sin(x) * (around - 4 * x)


def burgers(o: Any, x: Any) -> Any:
    edged = o.pad(x, (1, 1))
    slope = (edged[2:] - edged[:-2]) / 2
    return -x * slope + 0.05 * (edged[2:] - 2 * x + edged[:-2])


def arrowhead(o: Any, x: Any) -> Any:
    return o.concat([o.reshape(o.sum(x**3), (1,)), x[1:] * x[0] + o.sin(x[1:])], axis=0)


def first_and_each(o: Any, x: Any) -> Any:
    """A dense row and a diagonal."""
    return o.concat([o.reshape(o.sum(x * x), (1,)), o.exp(x[1:])], axis=0)


def banded(o: Any, x: Any) -> Any:
    return o.tanh(o.reshape(o.array(BAND) @ o.reshape(x, (12, 1)), (12,))) * x


def random(o: Any, x: Any) -> Any:
    one, two, three = (o.take(x, picks.tolist(), 0) for picks in PICKS)
    return o.sin(one * two) + three


def net(o: Any, x: Any) -> Any:
    """Two convolutions along a line: of 16 places each output sees five, in both channels."""
    hidden = o.tanh(o.conv(x, o.numbers(2, 2, 3)))
    return o.tanh(o.conv(hidden, o.numbers(1, 2, 3)))


def net_2d(o: Any, x: Any) -> Any:
    return o.tanh(o.conv(x, o.numbers(1, 1, 2, 2))) ** 2


def differences(o: Any, x: Any) -> Any:
    """Each is the difference of two that are each the difference of two, three times over."""
    for _ in range(3):
        x = x[1:] - x[:-1] ** 2
    return x


def rosenbrock(o: Any, x: Any) -> Any:
    return o.sum(100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2)


def arrow_sum(o: Any, x: Any) -> Any:
    return o.sum((x[:-1] ** 2 + x[-1:] ** 2) ** 2 - 4 * x[:-1])


def energy(o: Any, x: Any) -> Any:
    """Of a membrane: neighbours on a grid pull at each other."""
    return o.sum((x[1:] - x[:-1]) ** 4) + o.sum((x[:, 1:] - x[:, :-1]) ** 4) + o.sum(o.exp(x))


PROBLEMS = [
    Problem("brusselator", brusselator, point(2, 6, 6), 6),
    Problem("heat on a line", heat, point(40), 3),
    Problem("heat on a plate", plate, point(8, 8), 5),
    Problem("burgers", burgers, point(40), 3),
    Problem("arrowhead", arrowhead, point(30), 3),
    Problem("a dense row and a diagonal", first_and_each, point(30), 2),
    Problem("banded weights", banded, point(12), 5),
    Problem("random places", random, point(30), 5),
    Problem("convolutions on a line", net, point(1, 2, 16), 5),
    Problem("convolution on a plane", net_2d, point(1, 1, 6, 7), 4),
    Problem("differences of differences", differences, point(40), 4),
    Problem("rosenbrock", rosenbrock, point(40), 3, second=True),
    Problem("arrowhead, its sum", arrow_sum, point(30), 2, second=True),
    Problem("membrane", energy, point(8, 8), 5, second=True),
]
