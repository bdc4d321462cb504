"""Arrays inside pytrees and modules of JAX: what they are called, and that reading leaves them as they are."""

from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import elementgrad as eg
from tests.support import frameworks  # noqa: F401  # float64

X = jnp.array([0.3, -1.2, 0.7])
W = jnp.array([[1.0, 2.0, -1.0], [0.5, -0.3, 0.8], [0.2, 0.9, 1.5]])


def assert_near(found, expected):
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=1e-10, atol=1e-10)


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True)
class Dense:
    """A module as Equinox makes them: a frozen dataclass that knows which of its fields are arrays."""

    weight: jax.Array
    bias: jax.Array | None
    power: int = 2

    def tree_flatten_with_keys(self):
        keys = [(jax.tree_util.GetAttrKey(name), getattr(self, name)) for name in ("weight", "bias")]
        return keys, self.power

    @classmethod
    def tree_unflatten(cls, power, arrays):
        made = object.__new__(cls)
        for name, value in zip(("weight", "bias", "power"), (*arrays, power), strict=True):
            object.__setattr__(made, name, value)
        return made

    def __call__(self, x):
        y = eg.tag(self.weight @ x, "product") ** self.power
        return y if self.bias is None else y + self.bias

    def total(self, x, scale=1.0):
        return jnp.sum(self(x)) * scale


@partial(jax.tree_util.register_dataclass, data_fields=["layers", "scale"], meta_fields=["name"])
@dataclass
class Net:
    layers: list[Dense]
    scale: jax.Array
    name: str = field(default="net")

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x * self.scale


class Plain:
    """A node without names."""

    def __init__(self, first, second):
        self.first, self.second = first, second


jax.tree_util.register_pytree_node(Plain, lambda p: ((p.first, p.second), None), lambda _, entries: Plain(*entries))

ZERO = jnp.zeros(3)


def net(first=W, scale=0.5):
    return Net([Dense(first, ZERO), Dense(W.T, ZERO)], jnp.asarray(scale))


def test_arrays_inside_pytrees_have_names():
    def loss(params, x):
        return jnp.sum(params["net"](x)) + jnp.sum(params["plain"].second)

    params = {"net": net(), "plain": Plain(X, X)}
    for name, expected in {
        "params.net.layers.0.weight": jax.grad(lambda w: jnp.sum(net(w)(X)))(W),
        "params.net.scale": jnp.sum(net()(X)) / 0.5,
        "params.plain.1": jnp.ones(3),
    }.items():
        assert_near(eg.grad(loss, params, X, wrt=name), expected)
    assert_near(eg.grad(loss, params, X, wrt=params["net"].layers[0].weight), jax.grad(lambda w: jnp.sum(net(w)(X)))(W))


def test_arrays_of_a_module_have_names():
    model = net()
    expected = jax.jacobian(lambda w: net(w)(X))(W)
    J = eg.jacobian(model, X, wrt="layers.0.weight")
    assert_near(J.dense(), expected)
    assert_near(J[1, (2, ...)], expected[1, 2])
    assert_near(eg.grad(model, X, of="output[1]", wrt="layers.0.weight[2, 0]"), expected[1, 2, 0])
    assert_near(
        eg.jacobian(model, X, wrt="layers.0.bias").dense(),
        eg.jacobian(model, X, wrt="layers.1.weight").dense().sum(-1) * 0
        + jax.jacobian(lambda b: Net([Dense(W, b), Dense(W.T, ZERO)], model.scale)(X))(ZERO),
    )
    assert_near(
        eg.grad(model, X, of="output[0]", wrt="product#1"), jnp.array([1.0, 0, 0]) * 2 * 0.5 * (W.T @ Dense(W, ZERO)(X))
    )
    assert_near(eg.jacobian(model, X, of="product#0", wrt="layers.0.weight")[0, (0, ...)], X)
    with pytest.raises(eg.PlaceError, match=r"no parameter is named 'layers.0.weights'; nearest: layers.0.weight"):
        eg.grad(model, X, wrt=eg.at("layers.0.weights", kind="parameter"))


def test_fields_that_are_no_arrays_stay_as_they_are():
    seen = []

    class Noting(Dense):
        def __call__(self, x):
            seen.append(self.power)
            return super().__call__(x)

    jax.tree_util.register_pytree_with_keys_class(Noting)
    for wrt in ("x", "weight", "product"):
        eg.jacobian(Noting(W, None), X, wrt=wrt).dense()
    assert seen
    assert all(type(power) is int and power == 2 for power in seen)


def test_methods_and_partials_of_modules_have_names():
    dense = Dense(W, None)
    expected = jax.grad(lambda w: Dense(w, None).total(X, 3.0))(W)
    assert_near(eg.grad(dense.total, X, 3.0, wrt="weight"), expected)
    assert_near(eg.grad(partial(dense.total, scale=3.0), X, wrt="weight"), expected)
    assert_near(eg.grad(partial(dense.total, X, scale=3.0), wrt="weight"), expected)
    assert_near(eg.grad(partial(dense.total, X, scale=3.0), wrt="x"), jax.grad(lambda x: dense.total(x, 3.0))(X))
    assert_near(eg.grad(partial(lambda params, x: params["w"] @ x, {"w": X}), X, wrt="params.w"), X)
    assert_near(eg.grad(jax.tree_util.Partial(lambda w, x: jnp.sum(w @ x), W), X, wrt="w"), jnp.tile(X, (3, 1)))


def test_a_run_writes_to_copies():
    @jax.tree_util.register_pytree_with_keys_class
    class Counting:
        def __init__(self, w, calls):
            self.w, self.calls = w, calls

        def tree_flatten_with_keys(self):
            return [(jax.tree_util.GetAttrKey(name), getattr(self, name)) for name in ("w", "calls")], None

        @classmethod
        def tree_unflatten(cls, _, arrays):
            return cls(*arrays)

        def __call__(self, x):
            self.calls = self.calls + jnp.sum(x)
            return eg.tag(self.w * x, "t") * self.calls

    model = Counting(W[0], jnp.array(1.0))
    calls = model.calls
    for wrt in ("x", "w", "t"):
        eg.jacobian(model, X, wrt=wrt).dense()
        eg.jacobian(lambda m, x: m(x), model, X, wrt="t" if wrt == "t" else "x" if wrt == "x" else "m.w").dense()
    assert model.calls is calls


def test_modules_of_nnx():
    nnx = pytest.importorskip("flax.nnx", reason="flax is not among the oldest supported versions")

    class Model(nnx.Module):
        def __init__(self, rngs):
            options = {"rngs": rngs, "param_dtype": jnp.float64}
            self.dense = nnx.Linear(3, 4, **options)
            self.norm = nnx.BatchNorm(4, **options)
            self.drop = nnx.Dropout(0.5, rngs=rngs)
            self.blocks = nnx.List([nnx.Linear(4, 4, **options)])

        def __call__(self, x):
            return self.drop(self.norm(self.blocks[0](eg.tag(jnp.tanh(self.dense(x)), "hidden"))))

        def loss(self, x):
            return jnp.sum(self(x) ** 3)

    model, xs = Model(nnx.Rngs(0)), jnp.stack([X, X**2, jnp.cos(X)])
    state = jax.tree.map(np.asarray, jax.tree.leaves(nnx.state(model, nnx.Not(nnx.RngKey))))
    kernel = model.dense.kernel[...]

    def replaced(kernel):
        copy = nnx.clone(model)
        copy.dense.kernel = nnx.Param(kernel)
        return copy.loss(xs)

    expected = jax.grad(replaced)(kernel)
    assert float(jnp.max(jnp.abs(expected))) > 1e-6
    assert_near(eg.grad(model.loss, xs, wrt="dense.kernel"), expected)
    assert_near(eg.grad(lambda model, x: model.loss(x), model, xs, wrt="model.dense.kernel"), expected)
    hidden = eg.grad(model.loss, xs, wrt="hidden")
    assert_near(jnp.einsum("bi,bo->io", xs, hidden * (1 - jnp.tanh(model.dense(xs)) ** 2)), expected)
    eg.jacobian(model, xs, wrt="x")[(0, 0), :]
    kinds = {row.name: row.kind for row in eg.names(model, xs)}
    assert kinds["blocks.0.bias"] == "parameter"
    assert kinds["norm.mean"] == kinds["drop.rngs.count"] == "buffer"
    assert kinds["hidden"] == "activation"
    now = jax.tree.map(np.asarray, jax.tree.leaves(nnx.state(model, nnx.Not(nnx.RngKey))))
    assert all(np.array_equal(a, b) for a, b in zip(state, now, strict=True))


def test_weights_that_nnx_shares_are_one():
    nnx = pytest.importorskip("flax.nnx", reason="flax is not among the oldest supported versions")

    class Tied(nnx.Module):
        def __init__(self):
            self.a = nnx.Param(X)
            self.b = self.a

        def __call__(self, x):
            return jnp.sum(self.a[...] * self.b[...] * x)

    assert_near(eg.grad(Tied(), X, wrt="a"), 2 * X * X)


def test_an_nnx_object_shared_inside_of_a_shared_one_has_every_name():
    nnx = pytest.importorskip("flax.nnx", reason="flax is not among the oldest supported versions")

    class Outer(nnx.Module):
        def __init__(self, inner):
            self.inner = inner

        def __call__(self, x):
            return jnp.tanh(self.inner(x))

    class Net(nnx.Module):
        def __init__(self):
            self.a = nnx.Linear(3, 3, param_dtype=X.dtype, rngs=nnx.Rngs(0))
            self.b = Outer(self.a)
            self.c = self.b
            self.d = Outer(self.c)

        def __call__(self, x):
            return self.d(self.c(self.b(self.a(x)))).sum()

    net = Net()
    expected = eg.grad(net, X, wrt="a.kernel")
    for path in ("b.inner", "c.inner", "d.inner.inner"):
        assert_near(eg.grad(net, X, wrt=f"{path}.kernel"), expected)
        assert_near(eg.grad(net, X, wrt=f"{path}.*")[f"{path}.kernel"], expected)
    with pytest.raises(eg.PlaceError, match=r"nearest: d\.inner\.inner\.kernel"):
        eg.grad(net, X, wrt="d.inner.inner.kernal")


def test_parameters_of_linen():
    linen = pytest.importorskip("flax.linen", reason="flax is not among the oldest supported versions")

    class Model(linen.Module):
        @linen.compact
        def __call__(self, x):
            kernel = linen.with_partitioning(linen.initializers.lecun_normal(), ("in", "out"))
            hidden = eg.tag(linen.Dense(4, kernel_init=kernel, param_dtype=jnp.float64)(x), "hidden")
            return linen.Dense(2, param_dtype=jnp.float64)(jnp.tanh(hidden))

    model = Model()
    variables = model.init(jax.random.key(0), X)
    expected = jax.jacobian(lambda v: model.apply(v, X))(variables)["params"]["Dense_0"]["kernel"].value
    assert_near(eg.jacobian(model.apply, variables, X, wrt="variables.params.Dense_0.kernel").dense(), expected)
    second = variables["params"]["Dense_1"]
    expected = jax.jacobian(lambda h: jnp.tanh(h) @ second["kernel"] + second["bias"])
    hidden = eg.jacobian(model.apply, variables, X, of="hidden", wrt="args.0").value
    assert_near(eg.jacobian(model.apply, variables, X, wrt="hidden").dense(), expected(hidden))


def test_objects_shared_by_nnx_are_one_among_arguments():
    nnx = pytest.importorskip("flax.nnx")

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.a = nnx.Linear(3, 3, param_dtype=X.dtype, rngs=rngs)
            self.b = self.a
            self.c = nnx.Linear(3, 3, param_dtype=X.dtype, rngs=rngs)
            self.c.bias = self.a.bias

        def __call__(self, x):
            return self.c(self.b(jnp.tanh(self.a(x))))

    def loss(model):
        return (model(X) ** 2).sum()

    net = Net(nnx.Rngs(0))
    expected = nnx.grad(loss)(net)
    kernel, bias = expected["a"]["kernel"][...], expected["a"]["bias"][...]
    for name in ("a", "b"):
        assert_near(eg.grad(loss, net, wrt=f"model.{name}.kernel"), kernel)
    for name in ("a", "b", "c"):
        assert_near(eg.grad(loss, net, wrt=f"model.{name}.bias"), bias)
    assert eg.check(loss, net, wrt="model.b.bias")
    listed = [row.name for row in eg.names(loss, net, kind="input")]
    assert listed == ["model.a.bias", "model.a.kernel", "model.c.kernel"]
    for wrt in ("left.a.kernel", "right.b.kernel"):  # one model, given twice
        assert_near(eg.grad(lambda left, right: (left(X) * right(X)).sum(), net, net, wrt=wrt), kernel)
    assert_near(eg.grad(net, X, of="output[0]", wrt="b.bias"), eg.grad(net, X, of="output[0]", wrt="a.bias"))
