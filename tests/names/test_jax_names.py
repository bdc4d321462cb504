"""Names inside JAX functions: tags through every transformation, arrays inside pytrees and modules, and errors."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import elementgrad as eg
from tests.support import frameworks  # noqa: F401  # float64

X = jnp.array([0.3, -1.2, 0.7])
W = jnp.array([[1.0, 2.0, -1.0], [0.5, -0.3, 0.8], [0.2, 0.9, 1.5]])
NEAR = {"rtol": 1e-10, "atol": 1e-10}


def assert_near(found, expected):
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), **NEAR)


def before(x):
    return jnp.tanh(W @ x) + x**2


def after(h):
    return jnp.sin(h) * jnp.cumsum(h) + jnp.exp(W.T @ h)


def plainly(x):
    return after(eg.tag(before(x), "h"))


jitted = jax.jit(plainly)
inner = jax.jit(lambda x: eg.tag(before(x), "h"))


def nested(x):
    return jax.jit(lambda x: after(jax.jit(lambda x: inner(x))(x)))(x)


def rematerialised(x):
    return jax.checkpoint(plainly)(x)


def beside_a_gradient(x):
    return plainly(x) + 0 * jax.grad(lambda x: jnp.sum(x**3))(x)


def beside_a_loop(x):
    zero, _ = jax.lax.scan(lambda carry, _: (carry * 0, None), x, None, length=3)
    return plainly(x) + zero


def branching(x):
    h = eg.tag(before(x), "h")
    return after(h) if h[0] < 100 else h


def in_parts(x):
    return after(eg.tag({"h": before(x), "none": None}, "h")["h"])


def with_kwargs(x, *, scale=1):
    return plainly(x) * scale


CUTS = [plainly, jitted, nested, rematerialised, beside_a_gradient, beside_a_loop, branching, in_parts, with_kwargs]


@pytest.mark.parametrize("f", CUTS, ids=lambda f: getattr(f, "__name__", "jitted"))
@pytest.mark.parametrize("called", [False, True], ids=["new", "called before"])
def test_a_derivative_by_a_tag_is_that_of_the_rest_of_the_function(f, called):
    if called:
        f(X)
    first, second = jax.jacobian(before)(X), jax.jacobian(after)(before(X))
    assert_near(eg.jacobian(f, X, of="h", wrt="x").dense(), first)
    assert_near(eg.jacobian(f, X, wrt="h").dense(), second)
    assert_near(eg.jacobian(f, X, wrt="x").dense(), second @ first)
    J = eg.jacobian(f, X, wrt="h")
    assert_near(J[1, :], second[1])
    assert_near(J[:, 2], second[:, 2])
    assert_near(J[0, 1], second[0, 1])
    assert_near(J.value, f(X))
    assert_near(eg.grad(f, X, of="output[2]", wrt={"a": "h[0]", "b": "x"})["b"], (second @ first)[2])


@pytest.mark.parametrize("f", CUTS, ids=lambda f: getattr(f, "__name__", "jitted"))
def test_second_derivatives_at_a_tag(f):
    expected = jax.hessian(lambda h: after(h)[1])(before(X))
    H = eg.hessian(f, X, of="output[1]", wrt="h")
    assert_near(H.dense(), expected)
    assert_near(H[0, 2], expected[0, 2])
    mixed = eg.hessian(f, X, of="output[1]", wrt=("x", "h"))

    def apart(x, change):
        return after(before(x) + change)[1]

    whole = jax.hessian(apart, argnums=(0, 1))(X, jnp.zeros(3))
    for row in range(2):
        for column in range(2):
            assert_near(mixed[row][column].dense(), whole[row][column])


def test_from_one_tag_to_another():
    def f(x):
        a = eg.tag(jnp.sin(x), "a")
        b = jax.jit(lambda a: eg.tag(a**2 + jnp.sum(a), "b"))(a)
        return jnp.prod(b)

    expected = jax.jacobian(lambda a: a**2 + jnp.sum(a))(jnp.sin(X))
    assert_near(eg.jacobian(f, X, of="b", wrt="a").dense(), expected)
    assert_near(eg.grad(f, X, of="b[1]", wrt="a[1]"), expected[1, 1])
    assert_near(eg.jacobian(f, X, of="a", wrt="a").dense(), np.eye(3))
    with pytest.raises(eg.UnconnectedError, match=r'b is computed after a, so swap the two, of="b" and wrt='):
        eg.grad(f, X, of="a[0]", wrt="b")


def test_a_tag_inside_vmap_has_the_batch_axis():
    def f(xs):
        return jax.vmap(lambda x: jnp.sum(eg.tag(x**2, "squares") ** 2))(xs)

    xs = jnp.stack([X, 2 * X])
    J = eg.jacobian(f, xs, wrt="squares")
    assert J.shape == (2, 2, 3)
    expected = np.zeros((2, 2, 3))
    expected[[0, 1], [0, 1]] = 2 * xs**2
    assert_near(J.dense(), expected)
    assert_near(eg.jacobian(f, xs, wrt="squares", batch=True).dense(), 2 * xs**2)


def test_reads_of_tags_run_under_transformations():
    expected = jax.jacobian(after)(before(X))
    assert_near(jax.jit(lambda x: eg.jacobian(jitted, x, wrt="h").dense())(X), expected)
    assert_near(jax.vmap(lambda x: eg.grad(nested, x, of="output[0]", wrt="h"))(X[None])[0], expected[0])

    def slope(x):
        return eg.grad(plainly, x, of="output[0]", wrt="h[1]")

    assert_near(jax.grad(slope)(X), jax.grad(lambda x: jax.jacobian(after)(before(x))[0, 1])(X))


def test_reads_inside_of_a_function_that_is_read():
    def f(x):
        h = eg.tag(x**3, "outer")
        slope = eg.grad(lambda h: jnp.sum(eg.tag(h**2, "inner") ** 2), h, wrt="inner")
        return jnp.sum(slope * x)

    assert_near(eg.grad(f, X, wrt="x"), jax.grad(lambda x: jnp.sum(2 * x**6 * x))(X))
    assert_near(eg.grad(f, X, wrt="outer"), 4 * X**3 * X)

    def branches(x):
        h = eg.tag(x * 2, "outer")
        slope = eg.grad(lambda h: jnp.sum(eg.tag(h**2, "inner") ** 2), h, wrt="inner")
        return jnp.sum(slope * x) if x[0] > 0 else x[0]

    assert_near(eg.grad(branches, X, wrt="outer"), 4 * 2 * X * X)


def test_a_tag_inside_of_what_is_differentiated_in_the_function():
    def slope(x):
        return jax.grad(lambda x: jnp.sum(jnp.sin(eg.tag(x**2, "squares"))))(x)

    assert_near(eg.jacobian(slope, X, wrt="squares").diagonal(), -jnp.sin(X**2) * 2 * X)
    rematerialised = jax.grad(lambda x: jnp.sum(jax.checkpoint(lambda x: jnp.sin(eg.tag(x**2, "squares")))(x)))
    with pytest.raises(eg.PlaceError, match="'squares' is 2 tensors here; name one: squares#0, squares#1"):
        eg.jacobian(rematerialised, X, wrt="squares")  # once on the way there, and again on the way back


def test_repeated_tags_are_numbered():
    def recurrence(start):
        t = eg.tag(jnp.zeros(5).at[0].set(start), "t")
        t = eg.tag(t.at[1].set(2 * t[0]), "t")
        t = eg.tag(t.at[3].set(t[1] ** 2 + t[0]), "t")
        return eg.tag(t.at[4].set(t[3] * t[1]), "t")

    start = jnp.array(3.0)
    assert eg.grad(recurrence, start, of="t#3[4]", wrt="t#1[1]") == 111
    assert eg.grad(recurrence, start, of="output[4]", wrt="t#1[1]") == 111
    assert eg.grad(recurrence, start, of="t#2[3]", wrt="t#1[1]") == 12
    assert eg.grad(recurrence, start, of="t#3[4]", wrt="t#0[0]") == 111 * 2 + 6
    with pytest.raises(eg.PlaceError, match="'t' is 4 tensors here; name one: t#0, t#1, t#2, t#3"):
        eg.grad(recurrence, start, wrt="t")


def test_a_tag_on_a_closed_over_array_is_captured():
    assert_near(eg.grad(lambda x: jnp.sum((eg.tag(W, "w") @ x) ** 2), X, wrt="w"), jnp.outer(2 * (W @ X), X))


def test_parts_of_a_tag_have_names():
    def f(x):
        a, more = eg.tag((x * 2, {"b": x * 3, "text": "text"}), "t")
        return jnp.sum(a * more["b"])

    for g in (f, jax.jit(f)):
        g(X)
        assert_near(eg.grad(g, X, wrt="t:0"), 3 * X)
        assert_near(eg.grad(g, X, wrt="t:1.b"), 2 * X)
        with pytest.raises(eg.PlaceError, match=r"'t' is 2 tensors here; name one: t:0, t:1.b"):
            eg.grad(g, X, wrt="t")


def test_the_sign_of_a_zero_and_integers_pass_a_tag():
    f = jax.jit(lambda x: jnp.sum(1 / eg.tag(x * -1.0, "t")))
    assert eg.jacobian(f, jnp.zeros(1), wrt="t").value == -jnp.inf
    with pytest.raises(eg.DtypeError, match=r"n is of dtype int.*, which has no gradients"):
        eg.grad(lambda x: jnp.sum(x) * eg.tag(jnp.arange(3), "n")[1], X, wrt="n")


def test_unread_tags_change_nothing():
    def f(x, tag):
        h = tag(x * 2, "a")
        h = jax.lax.scan(lambda c, _: (tag(jnp.sin(c), "b"), None), h, None, length=2)[0]
        jax.lax.while_loop(lambda c: jnp.sum(c) > 1e3, lambda c: tag(c / 2, "c"), jax.lax.stop_gradient(h))
        h = jax.lax.cond(h[0] > 0, lambda h: tag(h * 2, "d"), lambda h: h, h)
        return jnp.sum(jax.checkpoint(lambda h: tag(jnp.exp(h), "e"))(h))

    tagged, bare = partial(f, tag=eg.tag), partial(f, tag=lambda x, name: x)
    for around in (jax.jit, jax.grad, jax.hessian, lambda f: jax.jit(jax.grad(f))):
        assert_near(around(tagged)(X), around(bare)(X))
    assert_near(jax.vmap(tagged)(W), jax.vmap(bare)(W))
    texts = [jax.jit(g).lower(X).compile().as_text() for g in (tagged, bare)]
    assert texts[0].count(" = ") == texts[1].count(" = ")
    assert eg.tag(X, "a") is X


def looped(x):
    return jax.lax.scan(lambda carry, _: (eg.tag(carry * 2, "t"), None), x, None, length=3)[0]


def waiting(x):
    return jax.lax.while_loop(lambda c: jnp.sum(c) < 10, lambda c: eg.tag(c * c + 1, "t"), x)


def choosing(x):
    return jax.lax.cond(x[0] > 0, lambda x: eg.tag(x * 2, "t"), lambda x: x, x)


@jax.custom_jvp
def ruled(x):
    return eg.tag(x * 2, "t")


ruled.defjvp(lambda primals, tangents: (ruled(*primals), tangents[0] * 2))


def untraceable(x):
    y = jax.vmap(lambda x: eg.tag(x * 2, "t"))(x)
    return y if y[0] > 0 else -y


@pytest.mark.parametrize(
    ("f", "message"),
    [
        (looped, "'t' is tagged inside a scan, where it has no single value; return it from the loop and tag it there"),
        (waiting, "'t' is tagged inside a while loop, where it has no single value; return it from the loop and tag"),
        (choosing, "'t' is tagged inside a branch of a cond, which may not run; return it from the branch and tag it"),
        (ruled, "'t' is tagged inside a custom_jvp_call, which has rules of its own and cannot be opened; tag what"),
        (untraceable, "'t' is tagged inside a jax.jit, jax.vmap or the like, and the function around it cannot be"),
        (plainly, "no tensor is named 't'; there are: x, h, output"),
        (lambda x: eg.tag(before(x), "to") + eg.tag(x, "tea"), "no tensor is named 't'; nearest: to"),
    ],
    ids=["scan", "while", "cond", "custom rule", "branches", "unknown", "near"],
)
def test_a_tag_without_a_single_value_is_refused_in_one_sentence(f, message):
    for side in ({"wrt": "t", "of": "output[0]"}, {"of": "t[0]", "wrt": "x"}):
        with pytest.raises(eg.PlaceError) as caught:
            eg.grad(f, X, **side)
        assert str(caught.value).startswith(message)
        assert not getattr(caught.value, "__notes__", None)
        assert caught.value.__suppress_context__ or caught.value.__context__ is None
    f(X)  # and the function works as ever


def test_errors_of_the_function_come_as_they_are():
    def f(x):
        raise KeyError("mine")

    for wrt in ("x", "t"):
        with pytest.raises(KeyError, match="mine"):
            eg.grad(f, X, wrt=wrt)
