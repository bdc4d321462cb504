"""Losses of JAX parameters, one for each way in which elements of these are used."""

import jax
import jax.numpy as jnp
import numpy as np

IDS = np.array([3, 5, 5, 0, 11])


def numbers(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


X = numbers(5, 6)


def embedding(p):
    return jnp.tanh(p["table"][IDS] * X).sum()


def lookups(p):
    table = p["table"]
    rows = jnp.take(table, jnp.array([5, 40, -1, 3]), axis=0, mode="fill", fill_value=2.0)
    clipped = jnp.take(table, jnp.array([5, 40, 12]), axis=0, mode="clip")
    columns = jnp.take(table, jnp.array([1, 1, 4]), axis=1)
    single = table[jnp.array([3, 5]), jnp.array([1, -4])]
    along = jnp.take_along_axis(table, jnp.array([[1, 2]] * 12), axis=1)
    one = jax.lax.fori_loop(0, 4, lambda i, c: c + jnp.sin(table[i + 2]).sum(), jnp.zeros((), table.dtype))
    parts = [rows, clipped, columns, single, along, table[5], table[::-1][2:9:2, 1:], table[None, 5, :, None]]
    return sum(jnp.sin(part).sum() for part in parts) + one


def dense(p):
    return jnp.tanh(X @ p["w"] + p["b"]).sum()


def transposed(p):
    left = jnp.einsum("hdk,nd->hnk", p["w"].reshape(6, 2, 4).transpose(1, 0, 2), X)
    right = p["w"].T @ X.T
    return jnp.tanh(left).sum() + (jnp.einsum("dk,nd->kn", p["w"][:, ::-1], X) * right).sum() + (p["w"].T @ X[0]).sum()


def tied(p):
    hidden = p["table"][IDS]
    return jax.nn.log_softmax(hidden @ p["table"].T)[np.arange(5), IDS].sum() + p["table"].sum()


def mlp(p):
    h = X
    for layer in p["layers"]:
        h = jax.nn.gelu(h @ layer["kernel"] + layer["bias"])
    return (h**2).mean()


def lstm(p):
    def cell(carry, x):
        h, c = carry
        i, f, g, o = jnp.split(x @ p["wx"] + h @ p["wh"] + p["b"], 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h @ p["wh"][:, :3]

    start = jnp.zeros((3,), p["wx"].dtype)
    (h, _), every = jax.lax.scan(jax.checkpoint(cell), (start, start), jnp.asarray(X, p["wx"].dtype))
    return h.sum() + (every**2).sum()


def conv(p):
    y = jax.lax.conv_general_dilated(numbers(2, 4, 7, 7).astype(p["kernel"].dtype), p["kernel"], (2, 1), "SAME")
    last = p["kernel"].transpose(2, 3, 1, 0)
    z = jax.lax.conv_general_dilated(
        numbers(2, 7, 7, 4).astype(last.dtype), last, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return jnp.tanh(y).sum() + (z**2).mean()


def layer_norm(p):
    h = X - X.mean(-1, keepdims=True)
    return jnp.tanh(h / jnp.sqrt((h**2).mean(-1, keepdims=True) + 1e-5) * p["scale"] + p["bias"]).sum()


def attention(p):
    q, k, v = (jnp.einsum("nd,dhk->hnk", X, p[name]) for name in ("q", "k", "v"))
    weights = jax.nn.softmax(q @ k.transpose(0, 2, 1))
    return (jnp.einsum("hnk,hkd->nd", weights @ v, p["out"]) ** 2).sum()


@jax.jit
def branches(p):
    def one(w, table):
        return (X.astype(w.dtype) @ w).sum() * table[3].sum()

    def other(w, table):
        return jnp.sin(w).sum() + table[5].sum()

    flag = X[0, 0] > p["table"][3, 1]
    return jax.lax.cond(flag, one, other, p["w"], p["table"]) + jax.lax.cond(~flag, one, other, p["w"], p["table"])


TABLE = {"table": numbers(12, 6)}
KERNEL = {"w": numbers(6, 8), "b": numbers(8)}
LAYERS = {"layers": [{"kernel": numbers(6, 7), "bias": numbers(7)}, {"kernel": numbers(7, 3), "bias": numbers(3)}]}
LSTM = {"wx": numbers(6, 12), "wh": numbers(3, 12), "b": numbers(12)}
HEADS = {**{name: numbers(6, 2, 4, seed=ord(name)) for name in "qkv"}, "out": numbers(2, 4, 6)}
SOME = ["table[5, 1:4]", "table[[0, 3, 7], [2, 1, 3]]"]

CASES = {
    "embedding, elements": (embedding, TABLE, SOME),
    "embedding, rows": (embedding, TABLE, ["table[5]", "table[1]"]),
    "embedding, a column": (embedding, TABLE, ["table[:, 2]"]),
    "embedding, all": (embedding, TABLE, ["table"]),
    "lookups": (lookups, TABLE, SOME),
    "dense, one": (dense, KERNEL, ["w[2, 3]"]),
    "dense, many": (dense, KERNEL, ["w[::2, ::3]", "b[1:3]"]),
    "dense, a row": (dense, KERNEL, ["w[2]"]),
    "dense, a column": (dense, KERNEL, ["w[:, 5]"]),
    "dense, all": (dense, KERNEL, ["w", "b"]),
    "transposed": (transposed, KERNEL, ["w[2, 3]", "w[1, 4:]", "w[5, 0]"]),
    "tied": (tied, TABLE, SOME),
    "mlp": (mlp, LAYERS, ["layers.0.kernel[1, 2:4]", "layers.1.kernel[[3, 6], [0, 2]]", "layers.1.bias[1]"]),
    "lstm": (lstm, LSTM, ["wx[2, [1, 9]]", "wh[1, 4]", "b[7]"]),
    "conv": (conv, {"kernel": numbers(5, 4, 3, 3)}, ["kernel[1, 2]", "kernel[1, 0, 1, 1]", "kernel[3, 2, 0, 2]"]),
    "layer norm": (layer_norm, {"scale": numbers(6), "bias": numbers(6, seed=1)}, ["scale[1]", "bias[2:4]"]),
    "attention": (attention, HEADS, ["q[1, 0, 2]", "k[:, 1, 3]", "v[2, 1]", "out[0, 1, 3]"]),
    "branches": (branches, {**TABLE, "w": KERNEL["w"]}, [*SOME, "w[1, 2]"]),
}


def arrays(params, dtype):
    """The same structure of JAX arrays, each its own."""
    return jax.tree.map(lambda x: jnp.array(x, dtype), params)


def small(dtype=jnp.float32):
    return arrays({"table": numbers(10, 4), "head": {"kernel": numbers(4, 3), "bias": numbers(3)}}, dtype)


def small_loss(p, target=1):
    logits = p["table"][np.array([0, 3, 0])] @ p["head"]["kernel"] + p["head"]["bias"]
    return -jax.nn.log_softmax(logits)[:, target].sum()


SMALL = ["table[0, 2]", "table[3]", "head.kernel[1, :2]", "head.bias[2]"]


def moved(values, by=0.3):
    return {place: value + jnp.asarray(by, value.dtype) for place, value in values.items()}


def leaf(tree, name):
    for key in name.split("."):
        tree = tree[int(key)] if isinstance(tree, list | tuple) else tree[key]
    return tree


def bits(x):
    return np.asarray(x).tobytes()


def assert_same(one, other):
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert bits(x) == bits(y)


def assert_only(elements, merged, params):
    """Outside of the places every bit is as it was."""
    before = {name: np.array(x) for name, x in flat(params).items()}
    for place in elements.places:
        x, y = before[place.name].reshape(-1), np.asarray(flat(merged)[place.name]).reshape(-1)
        positions = place.select(before[place.name].shape).flat().reshape(-1)
        x[positions] = y[positions]
    assert_same(before, flat(merged))


def flat(tree):
    return {".".join(str(k.key if hasattr(k, "key") else k.idx) for k in path): x for path, x in _paths(tree)}


def _paths(tree):
    return jax.tree_util.tree_flatten_with_path(tree)[0]


def assert_dense_entries(elements, loss, values, gradient, tolerance, whole=None):
    """The gradient is what the dense one has at the places."""
    whole = jax.jit(jax.grad(loss))(elements.merge(values)) if whole is None else whole
    largest = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(whole))
    for place in elements.places:
        x = np.asarray(leaf(whole, place.name))
        expected = x.reshape(-1)[place.select(x.shape).flat().reshape(-1)]
        np.testing.assert_allclose(gradient[str(place)], expected, rtol=0, atol=tolerance * largest)
