"""The uses that a JAX function makes of a value: which there are, where, and that their shares are the derivative."""

import functools
import inspect
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import elementgrad as eg
from elementgrad._backends.jax.tensor import backend
from elementgrad._backends.source_location import is_user_code, location_text
from elementgrad._names.call import ONLY_OUTPUT, BoundCall, PartialCall
from elementgrad._place.place import Place
from tests.support import frameworks  # noqa: F401  # float64
from tests.support.made import counts

X = jnp.array([0.3, -1.2, 0.7])


def uses(f, *args, wrt="x", of=None):
    call = BoundCall(f, args, {})
    source = call.find_source(Place.parse(wrt))
    target = ONLY_OUTPUT if of is None else call.find_target(Place.parse(of))
    return backend.load("read").uses(PartialCall(call, [source], [target]), [source.tensor], 0)


def shares(f, *args, **names):
    """Check the share of each use in the sum of the output."""
    linear, found = uses(f, *args, **names)
    seeds = jnp.ones_like(linear.outputs[0])[None]
    return [
        (use.operation, np.asarray(linear.vjp(0, [number], seeds)[0][0])) for number, use in enumerate(found)
    ], linear


def assert_shares(f, expected, *args, **names):
    found, linear = shares(f, *args, **names)
    assert [operation for operation, _ in found] == [operation for operation, _ in expected]
    for (_, share), (_, value) in zip(found, expected, strict=True):
        np.testing.assert_allclose(share, np.broadcast_to(value, share.shape), rtol=1e-12, atol=1e-12)
    if "of" not in names:
        np.testing.assert_allclose(linear.outputs[0], f(*args), rtol=1e-12)
    assert all(not x.any() for x in linear.inputs)


def test_each_argument_slot_is_a_use():
    assert_shares(lambda x: x * x, [("mul", X), ("mul", X)], X)
    assert_shares(lambda x: 2 * jax.lax.slice(x, [2], [3]) + x.sum(), [("slice", [0, 0, 2]), ("reduce_sum", 1)], X)
    assert_shares(lambda x: x, [("return", 1)], X)
    assert_shares(lambda x, y: y * 2, [], X, X)


def test_calls_are_looked_into_where_they_mean_what_is_inside():
    inner = jax.jit(lambda a, b: jnp.sin(a) + a * b)
    inner(X, 2.0)
    assert_shares(lambda x: inner(x, 3.0) + inner(1.0, x), [("sin", jnp.cos(X)), ("mul", 3), ("mul", 1)], X)
    nested = jax.checkpoint(lambda x: jax.jit(lambda y: jnp.exp(y) + y)(x))
    assert_shares(nested, [("exp", jnp.exp(X)), ("add", 1)], X)


def test_loops_and_branches_are_one_use():
    def f(x):
        looped, _ = jax.lax.scan(lambda carry, _: (carry * carry, None), x, None, length=2)
        chosen = jax.lax.cond(x[0] > 0, lambda x: x * x, lambda x: x, x)
        return jax.nn.relu(x) + looped + chosen

    assert_shares(f, [("scan", 4 * X**3), ("cond", 2 * X), ("relu", X > 0)], X)


def test_uses_that_lead_nowhere_are_left_out():
    def f(x):
        jnp.exp(x)
        return jax.lax.stop_gradient(x) * jnp.sin(x) + jnp.round(x) + jnp.where(x > 0, 1.0, 2.0)

    assert_shares(f, [("sin", X * jnp.cos(X))], X)


def test_a_value_on_the_way_has_uses():
    def f(x):
        h = eg.tag(jnp.tanh(x), "h")
        return eg.tag(h * x + jnp.exp(h), "later").sum() ** 2

    h = jnp.tanh(X)
    outer = 2 * jnp.sum(h * X + jnp.exp(h))
    for g in (f, jax.jit(f)):
        assert_shares(g, [("mul", outer * X), ("exp", outer * jnp.exp(h))], X, wrt="h")
        assert_shares(g, [("mul", X), ("exp", jnp.exp(h))], X, wrt="h", of="later")
        assert_shares(g, [("tanh", 1 - h**2)], X, of="h")
        assert_shares(g, [], X, wrt="later", of="h")


def test_uses_tell_the_line_of_the_users_code():
    def f(x):
        y = jnp.sum(x)

        def norm(x):
            return jnp.linalg.norm(x)

        return jax.jit(norm)(x) + y

    _, found = uses(f, X)
    start = inspect.getsourcelines(f)[1]
    file = Path(__file__).name
    assert found[0].where == f"{file}:{start + 1}"
    assert {use.where for use in found[1:]} == {f"{file}:{start + 4}"}


def test_only_files_in_the_folders_of_libraries_are_not_the_users(tmp_path, monkeypatch):
    def imported(name, **attributes):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**attributes))

    imported("made", __file__=str(tmp_path / "made" / "__init__.py"))
    imported("spread", __file__=None, __path__=[str(tmp_path / "one"), str(tmp_path / "two")])
    monkeypatch.setitem(sys.modules, "broken", None)
    packages = ("made", "spread", "broken", "absent")
    own = Path(eg.__file__).parent
    theirs = [tmp_path / "made" / "a.py", tmp_path / "two" / "b" / "c.py", own / "read.py", functools.__file__]
    users = [tmp_path / "made_too" / "a.py", tmp_path / "made.py", f"{own}_app/a.py", tmp_path / "functools.py"]
    assert [is_user_code(str(file), packages) for file in theirs] == [False] * 4
    assert [is_user_code(str(file), packages) for file in users] == [True] * 4
    assert [is_user_code(file, packages) for file in ("<stdin>", "<string>", "<frozen runpy>", "<attrs>", "")] == [
        *(True, True, False, False, False)
    ]
    assert location_text(str(tmp_path / "model.py"), 12) == "model.py:12"


def test_arrays_of_a_module_have_uses():
    @jax.tree_util.register_pytree_with_keys_class
    class Model:
        def __init__(self, w):
            self.w = w

        def tree_flatten_with_keys(self):
            return [(jax.tree_util.GetAttrKey("w"), self.w)], None

        @classmethod
        def tree_unflatten(cls, _, arrays):
            return cls(*arrays)

        def __call__(self, x):
            return self.w * x + jnp.sin(self.w)

    assert_shares(Model(X), [("mul", 2), ("sin", jnp.cos(X))], jnp.full(3, 2.0), wrt="w")


UNARY = {
    "sin": jnp.sin,
    "tanh": jax.jit(jnp.tanh),
    "square": lambda a: a * a,
    "remat": jax.checkpoint(lambda a: jnp.cos(a) * a),
    "softplus": jax.nn.softplus,
    "mean": lambda a: a - jnp.mean(a),
    "stop": jax.lax.stop_gradient,
    "flip": lambda a: a[::-1],
}
BINARY = {
    "add": lambda a, b: a + b,
    "mul": lambda a, b: a * b,
    "sub": jax.jit(lambda a, b: a - b * a),
    "where": lambda a, b: jnp.where(a > b, a, b),
    "dot": lambda a, b: a * jnp.dot(a, b),
}


@st.composite
def graphs(draw):
    """Steps of a function: each an operation on values made before, of which the first is the input."""
    steps = []
    for made in range(1, draw(st.integers(2, 7))):
        before = st.integers(0, made - 1)
        if draw(st.booleans()):
            steps.append((UNARY[draw(st.sampled_from(sorted(UNARY)))], [draw(before)]))
        else:
            steps.append((BINARY[draw(st.sampled_from(sorted(BINARY)))], [draw(before), draw(before)]))
    return steps


def followed(steps):
    def f(x):
        values = [x]
        for operation, operands in steps:
            values.append(operation(*[values[operand] for operand in operands]))
        return values[-1] * 1.5 + sum(values[1:-1], 0.0)

    return f


@settings(max_examples=counts(40), deadline=None, derandomize=True)
@given(graphs(), st.integers(0, 2**31))
def test_shares_of_functions_made_at_random_add_up(steps, seed):
    x = jnp.asarray(np.random.default_rng(seed).uniform(-1, 1, 3))
    f = followed(steps)
    found, _ = shares(f, x)
    total = jax.grad(lambda x: jnp.sum(f(x)))(x)
    np.testing.assert_allclose(sum([share for _, share in found], np.zeros(3)), total, rtol=1e-12, atol=1e-12)


@settings(max_examples=counts(40), deadline=None, derandomize=True)
@given(st.lists(st.sampled_from(["sin", "exp", "tanh", "neg", "mul", "add"]), min_size=1, max_size=6))
def test_each_share_of_functions_made_at_random_is_the_derivative_with_the_other_uses_stopped(names):
    def f(x, cut=None):
        count, y = 0, jnp.ones(3)
        for name in names:
            operation = getattr(jax.lax, name)
            slots = 2 if name in ("mul", "add") else 1
            given = [x if cut in (None, count + slot) else jax.lax.stop_gradient(x) for slot in range(slots)]
            y, count = y * operation(*given) + y, count + slots
        return y

    found, _ = shares(lambda x: f(x), X)
    expected = [jax.grad(lambda x, cut=cut: jnp.sum(f(x, cut)))(X) for cut in range(len(found))]
    np.testing.assert_allclose([share for _, share in found], expected, rtol=1e-12, atol=1e-12)
