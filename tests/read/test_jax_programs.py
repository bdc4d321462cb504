"""Programs of JAX are compiled once, and found again by what they compute: whatever changes between calls is seen."""

import gc
import weakref
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import elementgrad as eg
from elementgrad._backends.jax import compile_cache

X = jnp.array([0.1, -0.2, 0.3])
SCALE = 2.0
HOLDER = SimpleNamespace(scale=2.0, weight=jnp.eye(3))
READS = {
    "dense": lambda f: eg.jacobian(f, X).dense(),
    "column": lambda f: eg.jacobian(f, X)[:, 1],
    "entry": lambda f: eg.grad(f, X, of="output[2]", wrt="x[1]"),
    "hessian": lambda f: eg.hessian(lambda x: (f(x) ** 2).sum(), X).dense(),
}
OWN = {
    "dense": lambda f: jax.jacrev(f)(X),
    "column": lambda f: jax.jacrev(f)(X)[:, 1],
    "entry": lambda f: jax.jacrev(f)(X)[2, 1],
    "hessian": lambda f: jax.jacrev(jax.grad(lambda x: (f(x) ** 2).sum()))(X),
}


@pytest.fixture(autouse=True)
def nothing_compiled():
    compile_cache._make.cache_clear()


@pytest.fixture
def compiled(caplog):
    """Return a function that tells how many programs a call compiles."""

    def count(call):
        caplog.clear()
        with jax.log_compiles():
            call()
        return sum("Finished XLA compilation" in record.message for record in caplog.records)

    return count


def jit_with_arrays():
    weight = jnp.arange(9.0).reshape(3, 3) * SCALE
    inner = jax.jit(lambda x: jax.nn.relu(weight @ x))
    return lambda x: jnp.sin(inner(x)) + x


def loop_with_rule():
    weight = jnp.ones((3, 3)) * SCALE
    return lambda x: jax.lax.scan(lambda c, t: (jax.nn.relu(weight @ c) * t + c, None), x, jnp.arange(3.0))[0]


def own_rule():
    @jax.custom_jvp
    def f(x):
        return jnp.sin(x)

    f.defjvp(lambda primals, tangents: (f(*primals), SCALE * tangents[0]))
    return lambda x: f(x) * x


def own_reverse_rule():
    @jax.custom_vjp
    def f(x):
        return jnp.sin(x)

    f.defvjp(lambda x: (f(x), x), lambda x, g: (SCALE * x * g,))
    return lambda x: f(x) * 2.0


def branching(x):
    return x * SCALE if x[0] > 0 else x


FUNCTIONS = {
    "global": lambda: lambda x: jnp.tanh(x * SCALE),
    "attribute": lambda: lambda x: jnp.tanh(HOLDER.weight @ x) * HOLDER.scale,
    "closure": lambda: (lambda scale: lambda x: jnp.cumsum(jnp.sin(x)) * scale)(jnp.float32(SCALE)),
    "jit with arrays": jit_with_arrays,
    "loop with a rule": loop_with_rule,
    "own rule": own_rule,
    "own reverse rule": own_reverse_rule,
    "branching": lambda: branching,
    "conditional": lambda: lambda x: jax.lax.cond(x[0] > 0, lambda x: x * SCALE, jnp.cos, x),
    "random": lambda: lambda x: x * x * jax.random.normal(jax.random.key(int(SCALE)), (3,)),
    "printing": lambda: lambda x: (jax.debug.callback(lambda _: None, x), x * x * SCALE)[1],
}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_changes_between_calls_are_seen(kind, read, monkeypatch):
    for scale in (2.0, 3.0, 3.0, 2.0):
        monkeypatch.setitem(globals(), "SCALE", scale)
        monkeypatch.setattr(HOLDER, "scale", scale)
        monkeypatch.setattr(HOLDER, "weight", jnp.eye(3) * scale + 1)
        f = FUNCTIONS[kind]()
        np.testing.assert_allclose(READS[read](f), OWN[read](f), rtol=1e-5, atol=1e-6)


def test_a_function_that_is_the_same_changes_by_what_it_refers_to(monkeypatch):
    def f(x):
        return jnp.tanh(HOLDER.weight @ x) * SCALE

    for scale in (2.0, 3.0, 3.0, 2.0):
        monkeypatch.setitem(globals(), "SCALE", scale)
        monkeypatch.setattr(HOLDER, "weight", jnp.eye(3) * scale + 1)
        np.testing.assert_allclose(eg.jacobian(f, X).dense(), jax.jacrev(f)(X), rtol=1e-5)


def test_signs_of_zero_and_nan_are_other_programs():
    for zero in (0.0, -0.0, 0.0, float("nan"), -0.0):
        values = eg.jacobian(lambda x, zero=zero: x * zero, X).dense()
        np.testing.assert_array_equal(np.signbit(values.diagonal()), np.signbit(jnp.full(3, zero)))
        assert np.isnan(values).any() == np.isnan(zero)


def test_an_equal_program_is_compiled_once(compiled):
    def anew(weight):
        return lambda: eg.jacobian(lambda x: jax.nn.softmax(weight @ x), X).dense()

    assert compiled(anew(jnp.ones((3, 3)))) > 0
    assert compiled(anew(2 * jnp.ones((3, 3)))) == 0
    assert compiled(anew(jnp.ones((5, 3)))) > 0


def test_compiled_programs_hold_no_arrays_or_functions_of_the_user():
    class Holder:
        def __init__(self, scale):
            self.weight = scale * jnp.ones((3, 3))
            inner = jax.jit(lambda x: x @ self.weight)
            own = jax.custom_jvp(jnp.sin)
            own.defjvp(lambda primals, tangents: (jnp.sin(*primals), self.scaled(*tangents)))
            self.f = lambda x: own(jnp.tanh(self.weight @ x)) + inner(x)

        def scaled(self, x):
            return 3 * x

    arrays = []
    for scale in range(1, 4):
        holder = Holder(scale)
        x = jnp.arange(3.0) * scale
        arrays += [weakref.ref(each) for each in (holder, holder.weight, x)]
        np.testing.assert_allclose(eg.jacobian(holder.f, x).dense(), jax.jacrev(holder.f)(x), rtol=1e-5, atol=1e-6)
        eg.grad(lambda x, f=holder.f: f(x).sum(), x)
    del holder, x
    gc.collect()
    assert [each() for each in arrays] == [None] * 9


def test_the_number_of_programs_is_bounded():
    for number in range(compile_cache.SIZE + 20):
        eg.grad(lambda x, number=number: (x * number).sum(), X)
    assert compile_cache._make.cache_info().currsize == compile_cache.SIZE


@pytest.mark.parametrize("times", range(4))
def test_a_function_runs_once(times):
    runs = []

    def f(x):
        runs.append(1)
        return jnp.sin(x)

    for _ in range(times):
        eg.jacobian(f, X).dense()
        eg.grad(lambda x: f(x).sum(), X)
    assert len(runs) == 2 * times


def test_a_jacobian_is_that_of_the_call_in_which_it_was_made():
    holder = SimpleNamespace(scale=2.0)
    J = eg.jacobian(lambda x: x * holder.scale, X)
    holder.scale = 3.0
    np.testing.assert_array_equal(J.dense(), 2 * np.eye(3))
    np.testing.assert_array_equal(J.value, 2 * X)


def test_compiled_code_is_not_used_inside_of_other_transformations():
    def f(x):
        return jnp.sin(x) * SCALE

    for _ in range(4):
        expected = eg.jacobian(f, X).dense()
    np.testing.assert_allclose(jax.jit(lambda x: eg.jacobian(f, x).dense())(X), expected, rtol=1e-6)
    stacked = jax.vmap(lambda x: eg.jacobian(f, x).dense())(jnp.stack([X, X]))
    np.testing.assert_allclose(stacked, jnp.stack([expected, expected]), rtol=1e-6)
    with jax.disable_jit():
        np.testing.assert_allclose(eg.jacobian(f, X).dense(), expected, rtol=1e-6)
