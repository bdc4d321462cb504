# ruff: noqa: B008 (the weights of a model are drawn once, as its defaults)
"""Cones of whole JAX models at corners, borders and centres, against the plain way, and how they are read."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import elementgrad as eg
from elementgrad._backends.jax.cone import program as cone_program
from elementgrad._backends.jax.tensor import WIDE
from tests.support.positions import typical_positions

NUMBERS = np.random.default_rng(0)


def weights(*shape):
    return NUMBERS.normal(size=shape) / np.sqrt(np.prod(shape[1:]))


def conv(x, w, stride=1, padding="SAME", **options):
    space = x.ndim - 2
    return lax.conv_general_dilated(x, jnp.asarray(w, x.dtype), (stride,) * space, padding, **options)


def convolutional(ws=tuple(weights(4, 3 if i == 0 else 4, 3, 3) for i in range(6))):
    def run(x):
        for w in ws:
            x = jax.nn.elu(conv(x, w))
        return x

    return run


def pool(x):
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 1, 3, 3), (1, 1, 2, 2), ((0, 0), (0, 0), (1, 1), (1, 1)))


def resnet(a=weights(6, 3, 7, 7), b=weights(6, 6, 3, 3), c=weights(6, 6, 3, 3), d=weights(6, 6, 1, 1)):
    def run(x):
        x = pool(jax.nn.gelu(conv(x, a, 2)))
        return jax.nn.elu(conv(jax.nn.relu(conv(x, b, 2) * 1.1 + 0.1), c) + conv(x, d, 2))

    return run


def unet(up, a=weights(4, 3, 3, 3), b=weights(4, 4, 3, 3), c=weights(2, 8, 3, 3)):
    def run(x):
        skip = jax.nn.silu(conv(x, a))
        return conv(jnp.concatenate([skip, up(jax.nn.elu(conv(skip, b, 2)))], 1), c)

    return run


def mobilenet(a=weights(6, 3, 3, 3), b=weights(6, 1, 3, 3), c=weights(5, 6, 1, 1)):
    return lambda x: conv(jax.nn.relu6(conv(jax.nn.hard_swish(conv(x, a, 2)), b, feature_group_count=6)), c)


def squeeze(a=weights(6, 3, 3, 3), b=weights(6, 6)):
    def run(x):
        h = conv(x, a)
        groups = h.reshape(h.shape[0], 2, -1)
        h = jax.nn.standardize(groups, -1).reshape(h.shape)
        return h * jax.nn.sigmoid(h.mean((2, 3)) @ b)[:, :, None, None]

    return run


def attention(q=weights(8, 8), k=weights(8, 8), v=weights(8, 8), w=weights(8, 8)):
    def run(x):
        for _ in range(2):
            n = x.shape[1]
            h = jax.nn.standardize(x, -1)
            heads = [(h @ m).reshape(*x.shape[:2], 2, 4) for m in (q, k, v)]
            scores = jnp.einsum("bqhd,bkhd->bhqk", heads[0], heads[1])
            scores = jnp.where(jnp.tril(jnp.ones((n, n), bool)), scores, -jnp.inf)
            mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, -1), heads[2]).reshape(x.shape)
            x = x + jax.nn.gelu(mixed @ w)
        return x

    return run


def mixer(a=weights(12, 12), b=weights(8, 8)):
    return lambda x: x + jax.nn.gelu(jnp.einsum("btc,ts->bsc", x, a)) @ b


def wavenet(ws=tuple(weights(8, 4, 2) for _ in range(5))):
    def run(x):
        for i, w in enumerate(ws):
            h = conv(x, w, padding=[(2**i, 0)], rhs_dilation=(2**i,))
            a, b = jnp.split(h, 2, 1)
            x = x + jnp.tanh(a) * jax.nn.sigmoid(b)
        return x

    return run


def three_dimensions(a=weights(3, 2, 3, 3, 3), b=weights(2, 3, 2, 2, 2)):
    return lambda x: conv(jax.nn.elu(conv(x, a, 2)), b)


def transposed(a=weights(8, 2, 3, 3), b=weights(4, 4, 4, 4)):
    def run(x):
        x = jax.nn.elu(conv(x, a, 2, [(2, 2)] * 2, rhs_dilation=(2, 2), feature_group_count=2))
        return conv(x, b, 1, [(2, 2)] * 2, lhs_dilation=(2, 2), feature_group_count=2)

    return run


def stencil(x):
    def turn(_, x):
        p = jnp.pad(x, 1, mode="edge")
        return x + 0.1 * (p[2:, 1:-1] + p[:-2, 1:-1] + p[1:-1, 2:] + p[1:-1, :-2] - 4 * x)

    return lax.fori_loop(0, 5, turn, x)


def upsampled(method):
    return lambda x: jax.image.resize(x, (*x.shape[:2], x.shape[2] * 2, x.shape[3] * 2), method)


def repeated(x):
    return jnp.repeat(jnp.repeat(x, 2, 2), 2, 3)


MODELS = {
    "convolutional": (convolutional(), (1, 3, 24, 24)),
    "resnet": (resnet(), (1, 3, 49, 49)),
    "u-net, repeat": (unet(repeated), (1, 3, 16, 16)),
    "u-net, nearest": (unet(upsampled("nearest")), (1, 3, 16, 16)),
    "u-net, bilinear": (unet(upsampled("bilinear")), (1, 3, 16, 16)),
    "mobilenet": (mobilenet(), (1, 3, 16, 16)),
    "squeeze and excite": (squeeze(), (1, 3, 8, 8)),
    "causal attention": (attention(), (1, 10, 8)),
    "mixer": (mixer(), (2, 12, 8)),
    "wavenet": (wavenet(), (1, 4, 80)),
    "three dimensions": (three_dimensions(), (1, 2, 9, 9, 9)),
    "transposed, grouped, dilated": (transposed(), (1, 4, 12, 12)),
    "stencil": (stencil, (16, 16)),
}


@pytest.mark.parametrize("name", MODELS)
def test_gradients_by_cones_are_those_of_the_plain_way(name):
    model, shape = MODELS[name]
    with WIDE(True):
        x = jnp.asarray(np.random.default_rng(1).normal(size=shape))
        y, sweep = jax.vjp(model, x)
        live = 0
        for place in typical_positions(y.shape):
            of = eg.at("output")[place]
            (plain,) = sweep(jnp.zeros_like(y).at[place].set(1))
            by_cone = eg.grad(model, x, of=of, cone=True)
            largest = float(abs(plain).max())
            live += largest > 0
            np.testing.assert_allclose(by_cone, plain, rtol=1e-10, atol=1e-12 * largest)
            np.testing.assert_allclose(eg.value(model, x, of=of, cone=True), y[place], rtol=1e-12)
        assert live >= 2


def test_another_element_is_not_compiled(monkeypatch):
    model, x = convolutional(), jnp.ones((1, 3, 40, 40))
    eg.grad(model, x, of="output[0, 1, 20, 20]", cone=True)
    monkeypatch.setattr(cone_program.CompiledParts, "find", lambda self, key, make: self._parts[key])
    for i, j in itertools.product((0, 1, 17, 39), repeat=2):
        eg.grad(model, x, of=eg.at("output")[0, 3, i, j], cone=True)


def test_the_weights_are_those_of_the_call():
    x = jnp.ones((1, 1, 9, 9))
    for scale in (1.0, 2.0):
        w = jnp.full((1, 1, 3, 3), scale)
        assert eg.grad(lambda x, w=w: conv(x, w), x, of="output[0, 0, 4, 4]", cone=True).sum() == 9 * scale


def test_small_functions_are_traced_once():
    calls = []

    def f(x):
        calls.append(1)
        return x * 2

    eg.grad(f, jnp.ones(30), of="output[3]")
    assert len(calls) == 1


def test_a_cone_is_used_where_it_pays(monkeypatch):
    used = []
    right = cone_program.JaxProgram.gradients
    monkeypatch.setattr(cone_program.JaxProgram, "gradients", lambda *a: used.append(1) or right(*a))
    w = jnp.ones((32, 3, 15, 15))
    x = jnp.ones((1, 3, 300, 300))
    f = lambda x: conv(conv(x, w), jnp.ones((1, 32, 9, 9)))  # noqa: E731
    assert eg.grad(f, x, of="output[0, 0, 150, 150]").shape == x.shape
    assert used
    del used[:]
    eg.grad(lambda x: x.mean() * x, x, of="output[0, 0, 3, 3]")
    eg.grad(f, x, of="output[0, 0, 3, 3]", wrt="x[0, 0, 0]", cone=False)
    assert not used


def test_tags_blocks_and_several_rows():
    w = weights(4, 3, 3, 3)

    def f(x):
        h = eg.tag(jnp.tanh(conv(x, w)), "hidden")
        return conv(h, weights_behind) ** 2

    weights_behind = weights(2, 4, 3, 3)
    with WIDE(True):
        x = jnp.asarray(NUMBERS.normal(size=(1, 3, 14, 14)))
        for of, wrt in (
            ("output[0, 1, 5, 6]", "hidden"),
            ("hidden[0, 2, 0, 3]", "x"),
            ("output[0, :, 5:7, 13]", "x[0, 1, 3:9, 10:]"),
            ("output[0, 1, 0, 0]", "x[0, 1, 9:, 10:]"),
            ("output[0, :, 2:6, 2:6]", "x"),
        ):
            by_cone, plain = (eg.grad(f, x, of=of, wrt=wrt, cone=cone) for cone in (True, False))
            np.testing.assert_allclose(by_cone, plain, rtol=1e-10, atol=1e-14)
        jacobian = eg.jacobian(f, x, wrt="x", cone=True)
        np.testing.assert_allclose(jacobian[(0, 1, 5, 6), :], eg.grad(f, x, of="output[0, 1, 5, 6]", wrt="x"))


def test_fields_are_found_without_a_sweep():
    model, x = convolutional(), jnp.ones((1, 3, 24, 24))
    assert str(eg.field(model, x, of="output[0, 3, 12, 12]", wrt="x")) == "x[0:1, 0:3, 6:19, 6:19] (input)"
    assert str(eg.field(model, x, of="output", wrt="x[0, 0, 0, 9]")) == "output[0:1, 0:4, 0:7, 3:16] (output)"


def test_the_plan_has_a_line():
    plan = str(eg.jacobian(convolutional(), jnp.ones((1, 3, 24, 24)), cone=True).plan((0, 3, 12, 12), ...))
    assert re.search(r"cone +13 x 13 of 24 x 24 of x, 1/\d+ of the work", plan)


def test_what_cannot_be_recorded_says_why():
    def branches(x):
        return x * 2 if x.sum() > 0 else x

    with pytest.raises(eg.FrameworkError, match="a cone cannot be used here"):
        eg.grad(branches, jnp.ones(3), of="output[0]", cone=True)
    with pytest.raises(eg.FrameworkError, match="inside of a transformation"):
        jax.jit(lambda x: eg.grad(lambda x: x * 2, x, of="output[0]", cone=True))(jnp.ones(3))


def test_unconnected_is_an_error():
    with pytest.raises(eg.UnconnectedError):
        eg.grad(lambda x: lax.stop_gradient(x) * 2, jnp.ones(3), of="output[0]", cone=True)


def test_constants_that_change_between_calls_are_those_of_the_call():
    """A compiled part serves all programs with equal equations, and a rule may have looked at their constants."""
    x = jnp.arange(1.0, 7.0)
    for start in (0, 2):
        first = jnp.array([start])
        f = lambda x, first=first: lax.dynamic_slice(x, (first[0],), (3,)) * 2 + x[3:]  # noqa: E731
        np.testing.assert_array_equal(eg.grad(f, x, of="output[0]", cone=True), jax.jacobian(f)(x)[0])
    for rows in ([0, 5], [0, 9]):  # the second is outside, and filled with NaN
        rows = jnp.array(rows)
        f = lambda x, rows=rows: jnp.take(x, rows)  # noqa: E731
        np.testing.assert_array_equal(eg.value(f, x, of="output[0:2]", cone=True), f(x))
    for matrix in (jnp.eye(6), jnp.eye(6)[::-1], jnp.ones((6, 6))):
        f = lambda x, matrix=matrix: x @ matrix  # noqa: E731
        for place in (0, 2):
            of = eg.at("output")[place]
            np.testing.assert_array_equal(eg.grad(f, x, of=of, cone=True), jax.jacobian(f)(x)[place])


@jax.custom_jvp
def swapped(x):
    """Two rows in the middle change places, and the derivative is no derivative."""
    row = jnp.arange(6)
    return x[jnp.where(row == 2, 3, jnp.where(row == 3, 2, row))]


swapped.defjvp(lambda primals, tangents: (swapped(*primals), 3 * swapped(*tangents)))


def test_rules_of_their_own_that_move_positions():
    x = jnp.arange(1.0, 7.0)
    for place in range(6):
        of = eg.at("output")[place]
        expected = jax.grad(lambda x, place=place: (swapped(x) * x)[place])(x)
        np.testing.assert_array_equal(eg.grad(lambda x: swapped(x) * x, x, of=of, cone=True), expected)
