"""Rules of JAX's primitives at every place of small arrays: value and gradient are those of the whole, in float64."""

import itertools
import random
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from elementgrad._backends.jax import compile_cache
from elementgrad._backends.jax.cone import rules, windows
from elementgrad._backends.jax.cone.program import JaxProgram
from elementgrad._backends.jax.tensor import WIDE
from elementgrad._cone.boxes import Box, Interval, slices, whole
from elementgrad._cone.plan import plan_need

Function = Callable[..., jax.Array]
MOST_PLACES = 40
INDEX = np.array([[2, 0], [1, 1], [0, 3]])


def _conv(strides=(1,), padding="SAME", spacing=(1,), dilation=(1,), groups=1) -> Function:
    def run(x, w):
        return lax.conv_general_dilated(
            x, w, strides, padding, lhs_dilation=spacing, rhs_dilation=dilation, feature_group_count=groups
        )

    return run


def _pool(init, operation, width, stride, padding) -> Function:
    return lambda x: lax.reduce_window(x, init, operation, (1, *width), (1, *stride), ((0, 0), *padding))


def _loop(x):
    return lax.fori_loop(0, 3, lambda i, y: jnp.pad(y, 1)[2:] * 0.5 + y, x)


@jax.custom_vjp
def odd(x):
    return x**2


odd.defvjp(lambda x: (x**2, x), lambda x, g: (7 * g * x,))


CASES: dict[str, tuple[Function, list[tuple[int, ...]]]] = {
    "elementwise": (lambda x, y: jnp.sin(x) * y + jnp.where(x > 0, x, y[None]), [(3, 4), (4,)]),
    "scalars": (lambda x, s: x * s + 2, [(3, 4), ()]),
    "rules of their own": (lambda x: jax.nn.relu(x) + jax.nn.gelu(x) * jax.nn.silu(x) + jax.nn.softplus(x), [(3, 4)]),
    "relu of zeros": (lambda x: jax.nn.relu(x * 0) * x + jax.nn.relu6(x), [(3, 4)]),
    "a reverse rule of its own": (lambda x: odd(x)[1:], [(4, 3)]),
    "sum": (lambda x: x.sum((0, 2)), [(3, 4, 2)]),
    "mean of all": (lambda x: x.mean() * x, [(3, 4)]),
    "max": (lambda x: x.max(1, keepdims=True), [(3, 4)]),
    "softmax": (lambda x: jax.nn.softmax(x, 0), [(3, 4)]),
    "logsumexp": (lambda x: jax.nn.logsumexp(x, 1), [(3, 4)]),
    "layer norm": (lambda x: jax.nn.standardize(x, -1), [(3, 4)]),
    "sort": (lambda x: jnp.sort(x, 1), [(3, 4)]),
    "top k": (lambda x: lax.top_k(x, 2)[0], [(3, 4)]),
    "cumsum": (lambda x: jnp.cumsum(x, 1) * lax.cummax(x, 0, reverse=True), [(3, 4)]),
    "matmul": (lambda x, y: x @ y, [(3, 4), (4, 2)]),
    "einsum": (lambda x, y: jnp.einsum("bij,bkj->kbi", x, y), [(2, 3, 4), (2, 2, 4)]),
    "conv1d": (_conv(padding=[(1, 2)]), [(1, 2, 6), (3, 2, 3)]),
    "conv2d": (
        _conv((2, 2), [(2, 1), (1, 1)], (1, 1), (2, 1)),
        [(1, 2, 7, 6), (2, 2, 3, 2)],
    ),
    "grouped conv": (_conv(groups=2), [(1, 4, 5), (6, 2, 3)]),
    "depthwise conv": (_conv(groups=3), [(2, 3, 5), (6, 1, 2)]),
    "conv with padding alone": (_conv(padding=[(4, 5)]), [(1, 1, 3), (1, 1, 2)]),
    "negative padding": (_conv(padding=[(-1, 3)]), [(1, 1, 6), (1, 1, 2)]),
    "transposed conv": (_conv(padding=[(2, 3)], spacing=(2,)), [(1, 2, 4), (3, 2, 4)]),
    "transposed, dilated": (_conv((2,), [(3, 4)], (3,), (2,), 2), [(1, 4, 4), (4, 2, 2)]),
    "conv3d": (_conv((1, 1, 1), "SAME", (1,) * 3, (1,) * 3), [(1, 1, 3, 3, 3), (2, 1, 2, 2, 2)]),
    "channels last": (
        lambda x, w: lax.conv_general_dilated(x, w, (2,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")),
        [(1, 7, 2), (3, 2, 3)],
    ),
    "max pool": (_pool(-jnp.inf, lax.max, (3, 2), (2, 1), ((1, 1), (0, 1))), [(2, 6, 5)]),
    "average pool": (_pool(0.0, lax.add, (3,), (2,), ((1, 2),)), [(2, 8)]),
    "reshape": (lambda x: x.reshape(6, 4).T.reshape(3, 8), [(2, 3, 4)]),
    "reshape, many axes": (lambda x: x.reshape(4, 3, 2, 1).reshape(2, 12), [(2, 3, 4)]),
    "transpose": (lambda x: jnp.squeeze(x.transpose(2, 0, 1))[:, None], [(2, 1, 4)]),
    "broadcast": (lambda x: jnp.broadcast_to(x, (2, 3, 4)), [(3, 1)]),
    "slice": (lambda x: lax.slice(x, (1, 0), (3, 7), (1, 2))[:, -2:], [(3, 7)]),  # older versions gather `x[::2]`
    "select": (lambda x: x[1] + x[-1], [(3, 4)]),
    "dynamic slice": (lambda x: lax.dynamic_slice(x, (1, 2), (2, 2)), [(4, 5)]),
    "a start that is computed": (
        lambda x: lax.dynamic_slice(x, (jnp.argmax(x[0]), 0), (2, 4)),
        [(4, 4)],
    ),
    "split": (lambda x: jnp.concatenate(jnp.split(x, [1, 4], 1)[::-1], 1), [(2, 6)]),
    "concatenate": (lambda x, y: jnp.concatenate([x, y, x * 2], 0), [(2, 3), (1, 3)]),
    "stack": (lambda x, y: jnp.stack([x, y], -1), [(2, 3), (2, 3)]),
    "padding": (lambda x, v: lax.pad(x, v, ((1, 2, 2), (-1, 0, 0))), [(3, 4), ()]),
    "negative interior padding": (lambda x: lax.pad(x, 1.0, ((-2, 3, 1),)), [(5,)]),
    "edge padding": (lambda x: jnp.pad(x, ((2, 1), (0, 1)), mode="edge"), [(3, 3)]),
    "reflection": (lambda x: jnp.pad(x, (2, 1), mode="reflect"), [(5,)]),
    "roll": (lambda x: jnp.roll(x, (1, -2), (0, 1)), [(3, 4)]),
    "flip": (lambda x: x[:, ::-1], [(3, 4)]),
    "repeat": (lambda x: jnp.repeat(x, 2, axis=1), [(2, 3)]),
    "tile": (lambda x: jnp.tile(x, (2, 2)), [(2, 3)]),
    "nearest": (lambda x: jax.image.resize(x, (2, 8, 6), "nearest"), [(2, 4, 3)]),
    "bilinear": (lambda x: jax.image.resize(x, (2, 8, 7), "bilinear"), [(2, 4, 3)]),
    "triangle": (lambda x: jnp.tril(x, -1) + jnp.triu(x, 1), [(4, 4)]),
    "take": (lambda x: x[:, INDEX], [(2, 4)]),
    "embedding": (lambda w: w[INDEX], [(4, 3)]),
    "take along axis": (lambda x: jnp.take_along_axis(x, INDEX, 1), [(3, 4)]),
    "scatter": (lambda x, y: x.at[INDEX[:, 0]].add(y), [(4, 3), (3, 3)]),
    "written to": (lambda x: x.at[1:-1, 0].set(x[2:, 1] * 2), [(4, 3)]),
    "iota": (lambda x: x * jnp.arange(4.0) + jnp.eye(3, 4), [(3, 4)]),
    "a short loop": (_loop, [(6,)]),
    "a scan": (lambda x: lax.scan(lambda c, r: (c * 0.5 + r, c * r), x[0], x)[1], [(4, 3)]),
    "a while loop": (
        lambda x: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 2), (0, 0.5))[1] * x,
        [(4,)],
    ),
    "cond": (lambda x: lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x), [(3, 4)]),
    "jit and checkpoint": (lambda x: jax.jit(jax.checkpoint(lambda y: jnp.sin(y) * y))(x)[::2], [(5,)]),
    "inverse": (lambda x: jnp.linalg.inv(x + 3 * jnp.eye(3)), [(2, 3, 3)]),
}


def places(shape: tuple[int, ...], size: tuple[int, ...]) -> list[Box]:
    """Return boxes of one size at all places, or many of them."""
    axes = [[Interval(a, a + m) for a in range(n - m + 1)] for n, m in zip(shape, size, strict=True)]
    boxes = list(itertools.product(*axes))
    return boxes if len(boxes) <= MOST_PLACES else random.Random(0).sample(boxes, MOST_PLACES)


def check(f: Function, shapes: list[tuple[int, ...]]) -> None:
    numbers = np.random.default_rng(0)
    arrays = [jnp.asarray(numbers.normal(size=shape)) for shape in shapes]
    y, sweep = jax.vjp(f, *arrays)
    program = JaxProgram(lambda *xs: [f(*xs)], arrays)
    (of,) = program.outputs
    for size in {tuple([1] * y.ndim), tuple([-(-n // 2) for n in y.shape])}:
        for box in places(y.shape, size):
            cone = program.plan(of, box)
            expected = np.asarray(y[slices(box)])
            if prod_of(size) > 1:
                np.testing.assert_allclose(program.evaluate(cone, of), expected, rtol=1e-12, atol=1e-13)
            seed = numbers.normal(size=size)
            wanted = sweep(jnp.zeros(y.shape).at[slices(box)].set(seed))
            parts = program.gradients(cone, of, program.inputs, jnp.asarray(seed)[None])
            for value, part, right in zip(program.inputs, parts, wanted, strict=True):
                full = np.zeros(value.shape)
                if part is not None:
                    full[slices(cone.needed[value])] = part[0]
                np.testing.assert_allclose(full, right, rtol=1e-11, atol=1e-12)


def prod_of(size: tuple[int, ...]) -> int:
    return int(np.prod(size, dtype=int))


@pytest.fixture(autouse=True)
def _float64():
    with WIDE(True):
        yield


@pytest.fixture
def _nothing_compiled():
    compile_cache._make.cache_clear()
    yield
    compile_cache._make.cache_clear()


@pytest.mark.parametrize("name", CASES)
def test_parts_and_their_gradients_are_those_of_the_whole(name):
    check(*CASES[name])


@pytest.mark.usefixtures("_nothing_compiled")
@pytest.mark.parametrize("name", ["conv1d", "max pool", "padding", "transposed conv"])
def test_a_window_that_is_off_by_one_is_found(name, monkeypatch):
    right = windows._view
    monkeypatch.setattr(windows, "_view", lambda *a: right(*a)._replace(first=right(*a).first + 1))
    with pytest.raises(AssertionError, match="Not equal"):
        check(*CASES[name])


@pytest.mark.usefixtures("_nothing_compiled")
def test_a_cut_that_is_off_by_one_is_found(monkeypatch):
    right = rules.cut
    monkeypatch.setattr(rules, "cut", lambda region, starts, sizes: right(region, [s + 1 for s in starts], sizes))
    with pytest.raises(AssertionError, match="Not equal"):
        check(*CASES["cumsum"])


def test_most_operations_need_less_than_all_of_their_operands():
    mixing = {"mean of all", "scatter", "written to", "take along axis", "a start that is computed", "cond"}
    mixing |= {"a reverse rule of its own", "embedding", "tile", "a while loop", "inverse"}
    for name, (f, shapes) in CASES.items():
        if name in mixing:
            continue
        program = JaxProgram(lambda *xs, f=f: [f(*xs)], [jnp.ones(shape) for shape in shapes])
        (of,), x = program.outputs, program.inputs[0]
        boxes = [tuple([Interval(p, p + 1) for p in place]) for place in itertools.product(*map(range, of.shape))]
        parts = [plan_need(program.ops, of, box).needed.get(x) for box in boxes]
        assert any(part != whole(x.shape) for part in parts), name
