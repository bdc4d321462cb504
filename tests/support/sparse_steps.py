"""Made programs on six numbers, each written once for the three frameworks: steps that a pattern has to follow."""

from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import strategies as st

Step = Callable[[Any, Any, int], Any]
SIZE = 6
MASK = np.array([1.0, 0.0, 1.0, 1.0, 0.0, 1.0])
BAND = np.diag(np.full(SIZE, 0.5)) + np.diag(np.full(SIZE - 1, -0.5), 1)
KERNEL = np.array([[[0.5, 0.0, -0.5]]])


def rows(o: Any, x: Any) -> Any:
    return o.reshape(x, (2, 3))


def flat(o: Any, x: Any) -> Any:
    return o.reshape(x, (SIZE,))


def image(o: Any, x: Any) -> Any:
    """With a frame around, so that windows of three give as many numbers as there are."""
    return o.reshape(o.pad(x, (1, 1)), (1, 1, SIZE + 2))


def turned(o: Any, x: Any, k: int) -> Any:
    """A rule that is no derivative: what element i hears comes from its neighbour."""
    return o.custom(o.sin, lambda x, gradient: o.roll(gradient, 1, 0) * x)(x)


def mixed(o: Any, x: Any, k: int) -> Any:
    columns = o.fft(rows(o, x))
    return flat(o, o.imag(columns)) + x


STEPS: dict[str, Step] = {
    "sine": lambda o, x, k: o.sin(x + k),
    "square": lambda o, x, k: x * x / 2,
    "by another": lambda o, x, k: x * x[k],
    "neighbours": lambda o, x, k: x * o.roll(x, k, 0),
    "flip": lambda o, x, k: x - o.flip(x, [0]),
    "shift": lambda o, x, k: o.pad(x[1:], (0, 1)),
    "relu": lambda o, x, k: o.relu(x),
    "clip": lambda o, x, k: o.clip(x, -0.5, 0.5) + 0.1 * x,
    "where": lambda o, x, k: o.where(x > 0, x, o.flip(x, [0])),
    "fixed mask": lambda o, x, k: o.where(o.array(MASK) > 0, x * x, o.roll(x, k, 0)),
    "masked": lambda o, x, k: x * o.array(MASK),
    "sum of rows": lambda o, x, k: flat(o, rows(o, x) - o.sum(rows(o, x), axis=1, keepdims=True) / 3),
    "softmax": lambda o, x, k: flat(o, o.softmax(rows(o, x), axis=0)),
    "cumulated": lambda o, x, k: o.cumsum(x, axis=0) / 3,
    "product of rows": lambda o, x, k: x + o.prod(x[:3], axis=0),
    "largest": lambda o, x, k: x - 0.5 * o.amax(x),
    "sorted": lambda o, x, k: o.sort(x),
    "band": lambda o, x, k: flat(o, o.array(BAND) @ o.reshape(x, (SIZE, 1))),
    "rows by band": lambda o, x, k: flat(o, rows(o, x) @ o.array(BAND[:3, :3])),
    "outer": lambda o, x, k: flat(o, o.einsum("i,j->ij", x[:2], x[k % 3 : k % 3 + 3])),
    "squared matrix": lambda o, x, k: flat(o, o.tile(o.reshape(x, (2, 3)) @ o.reshape(x, (3, 2)), (2, 1))[:3]) / 2,
    "convolved": lambda o, x, k: flat(o, o.conv(image(o, x), o.array(KERNEL))),
    "pooled": lambda o, x, k: flat(o, o.max_pool(image(o, x), 3)),
    "averaged": lambda o, x, k: flat(o, o.avg_pool(image(o, x), 3)),
    "taken": lambda o, x, k: o.take(x, [k, 0, k, 5, 1, 2], 0),
    "taken of rows": lambda o, x, k: flat(o, o.take(rows(o, x), [k % 3, 0, 1], 1)),
    "added at": lambda o, x, k: o.add_at(x, [k, k, 0], x[:3]),
    "written": lambda o, x, k: o.put(x, (k, x[k - 1] * x[k - 2]), (0, x[5])),
    "joined": lambda o, x, k: o.concat([x[k:], x[:k] ** 2], axis=0),
    "transposed": lambda o, x, k: flat(o, o.transpose(rows(o, x), (1, 0))),
    "transform": mixed,
    "half stopped": lambda o, x, k: x * o.roll(o.stop(x), k, 0),
    "stopped": lambda o, x, k: o.concat([x[:k], o.stop(x[k:])], axis=0),
    "through": lambda o, x, k: o.custom(o.round, lambda x, gradient: gradient)(x) * 0.5,
    "turned rule": turned,
    "looped": lambda o, x, k: o.loop(3, lambda x: x + 0.1 * o.sin(o.roll(x, k, 0)), x),
    "gradient": lambda o, x, k: o.grad(lambda y: o.sum(y[1:] * y[:-1] ** 2))(x) / 2,
    "mapped": lambda o, x, k: flat(o, o.vmap(lambda row: row * o.sum(row))(o.reshape(x, (3, 2)))),
    # In a graph TensorFlow refuses the sparse gradient of what is taken from it, so that a factor comes between.
    "recomputed": lambda o, x, k: 0.9 * o.recomputed(lambda x: o.tanh(x) * o.roll(x, 1, 0))(x),
}
programs = st.lists(st.tuples(st.sampled_from(list(STEPS)), st.integers(0, SIZE - 1)), min_size=1, max_size=6)


def run(program: list[tuple[str, int]], o: Any, x: Any) -> Any:
    for name, k in program:
        x = STEPS[name](o, x, k)
    return x
