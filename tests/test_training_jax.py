"""Training elements of JAX parameters: gradients against dense ones, exact freezing, patches, refusals."""

import dataclasses
import inspect
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import elementgrad as eg
from tests.jax_losses import CASES, IDS, KERNEL, SOME, TABLE, X, arrays, embedding, numbers, tied


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


SINGLE = {"embedding, elements", "dense, many"}


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_entries_of_the_dense_one(case):
    loss, params, places = CASES[case]
    for dtype, tolerance in ((jnp.float64, 1e-12), (jnp.float32, 1e-6))[: 1 + (case in SINGLE)]:
        given = arrays(params, dtype)
        elements = eg.trainable(given, places)

        def both(values, elements=elements):
            return elements.value_and_grad(loss, values), jax.value_and_grad(loss)(elements.merge(values))

        compiled = jax.jit(both)
        for values in (elements.values, moved(elements.values)):
            (value, gradient), (expected, whole) = compiled(values)
            np.testing.assert_allclose(value, expected, rtol=10 * tolerance)
            assert_dense_entries(elements, loss, values, gradient, tolerance, whole)
        assert_same(given, arrays(params, dtype))


def test_values_as_they_were_change_no_bit():
    given = arrays({**TABLE, **KERNEL}, jnp.float32)
    elements = eg.trainable(given, ["table[5]", "w[3]"])
    x = X.astype(np.float32)

    def results(p):
        return p["table"][IDS], x @ p["w"]

    def loss(p):
        return p["table"][0, 0] + p["w"][0, 0], results(p)

    (_, found), _ = elements.value_and_grad(loss, has_aux=True)  # as it stands: jit may multiply in another order
    assert_same(found, results(given))


PLANS = {
    "embedding, elements": [("table", "gather", False)],
    "embedding, all": [("table", "gather", True)],
    "dense, many": [("w", "dot_general", False), ("b", "add", True)],
    "tied": [("table", "gather", False), ("table", "dot_general", False), ("table", "reduce_sum", True)],
    "conv": [("kernel", "conv_general_dilated", False)],
}


@pytest.mark.parametrize("case", PLANS)
def test_a_plan_says_what_is_dense(case):
    loss, params, places = CASES[case]
    plan = eg.trainable(arrays(params, jnp.float32), places).plan(loss)
    if case == "dense, many":  # how a bias is broadcast differs between versions
        assert plan.uses[0] == PLANS[case][0]
        assert plan.uses[1].dense
    else:
        assert list(plan.uses) == PLANS[case]
    assert plan.dense == any(use.dense for use in plan.uses)


@settings(max_examples=4)
@given(st.data())
def test_made_networks(data):
    size = st.integers(1, 5)
    rows, inner, outer = data.draw(size) + 2, data.draw(size), data.draw(size)
    params = {"e": jnp.array(numbers(rows, inner)), "w": jnp.array(numbers(inner, outer)), "v": jnp.ones((outer, 2))}
    ids = np.array(data.draw(st.lists(st.integers(-rows, rows - 1), min_size=1, max_size=4)))
    flip, fun = data.draw(st.booleans()), data.draw(st.sampled_from([jnp.tanh, jnp.sin, jax.nn.relu]))
    places = []
    for name, array in params.items():
        chosen = data.draw(st.lists(st.integers(0, array.size - 1), max_size=4, unique=True))
        if chosen:
            places.append(eg.at(name).coords(np.stack(np.unravel_index(chosen, array.shape), 1)))

    def loss(p):
        h = fun(p["e"][ids] @ p["w"])
        h = (p["v"].T @ h.T).T if flip else h @ p["v"]
        return (h**2).sum() + (h[:, :1] * p["e"][ids]).sum()

    if places:
        elements = eg.trainable(params, places)
        values = moved(elements.values, data.draw(st.sampled_from([0.0, 0.5])))
        gradient, whole = jax.jit(lambda v: (elements.grad(loss, v), jax.grad(loss)(elements.merge(v))))(values)
        assert_dense_entries(elements, loss, values, gradient, 1e-12, whole)


def test_under_jit_vmap_and_donation():
    params = arrays({**TABLE, **KERNEL}, jnp.float32)
    elements = eg.trainable(params, ["table[5, 1:4]", "w[0]"])

    def loss(p, x):
        return jnp.tanh((p["table"][IDS] * x) @ p["w"] + p["b"]).sum()

    batches = jnp.array(numbers(3, 5, 6), jnp.float32)
    alone = jax.jit(lambda x: elements.grad(lambda p: loss(p, x)))
    expected = [alone(x) for x in batches]

    @partial(jax.jit, donate_argnums=0)
    def step(values, params, batch):
        gradient = elements.grad(lambda p: loss(p, batch), values, params=params)
        return jax.tree.map(lambda v, g: v - 0.1 * g, values, gradient), gradient

    values = elements.values
    for batch in batches[:1]:
        values, gradient = step(values, params, batch)
    for place in gradient:
        np.testing.assert_allclose(gradient[place], expected[0][place], rtol=1e-5, atol=1e-5)
    assert_same(elements.merge(), params)  # neither the elements nor the parameters were donated
    each = jax.jit(jax.vmap(lambda x: elements.grad(lambda p: loss(p, x))))(batches)
    for number, one in enumerate(expected):
        for place in one:
            np.testing.assert_allclose(each[place][number], one[place], rtol=1e-5, atol=1e-5)
    elements.values = values
    assert_only(elements, elements.merge(), params)
    assert_same(jax.jit(lambda v: elements.merge(v))(values), elements.merge())


def test_no_dense_copy_nor_gradient_under_jit():
    params = {"table": jnp.zeros((20_000, 64), jnp.float32), "w": jnp.array(numbers(64, 512), jnp.float32)}
    elements = eg.trainable(params, ["table[3]", "table[17, 5]", "w[3, 4]"])

    def loss(p):
        return jnp.tanh(p["table"][IDS] @ p["w"]).sum()

    compiled = jax.jit(lambda p, v: elements.grad(loss, v, params=p)).lower(params, elements.values).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < params["w"].nbytes


def test_aux_and_values_of_losses():
    elements = eg.trainable(arrays(TABLE, jnp.float64), SOME)

    def loss(p):
        return (p["table"][IDS] * X).sum(), {"rows": p["table"][IDS]}

    gradient, aux = jax.jit(lambda values: elements.grad(loss, values, has_aux=True))(elements.values)
    assert aux["rows"].shape == (5, 6)
    np.testing.assert_allclose(gradient["table[5, 1:4]"], X[1:3, 1:4].sum(0))


def test_functions_that_branch_on_values_are_run_as_they_stand():
    elements = eg.trainable(arrays(TABLE, jnp.float64), SOME)

    def loss(p):
        return tied(p) if p["table"][0, 0] > 100 else embedding(p)

    assert_dense_entries(elements, embedding, None, elements.grad(loss), 1e-12)
    assert "branches on values" in str(elements.plan(loss))


def test_custom_rules_are_kept():
    @jax.custom_vjp
    def doubled(x, w):
        return x @ w

    doubled.defvjp(lambda x, w: (x @ w, (x, w)), lambda kept, g: (g @ kept[1].T, 2 * kept[0].T @ g))
    params = arrays(KERNEL, jnp.float64)
    elements = eg.trainable(params, "w[2, 3]")
    gradient = elements.grad(lambda p: doubled(X, p["w"]).sum())
    np.testing.assert_allclose(gradient["w[2, 3]"], [2 * X[:, 2].sum()])


@pytest.mark.parametrize("odd", [np.nan, np.inf, 1e30])
def test_elements_that_stand_out_leave_nothing_behind(odd):
    kernel = numbers(6, 8)
    kernel[2, 3] = odd
    elements = eg.trainable({"w": jnp.array(kernel, jnp.float32)}, "w[2, 3]")
    values = {"w[2, 3]": jnp.array([0.5], jnp.float32)}
    kernel[2, 3] = 0.5
    found, _ = elements.value_and_grad(lambda p: (X.astype(np.float32) @ p["w"]).sum(), values)
    np.testing.assert_allclose(found, (X @ kernel).sum(), rtol=1e-4)


def test_zeros_and_infinities_keep_their_bits():
    x = jnp.array([[-0.0, np.inf], [-0.0, 1.0]])
    params = {"w": jnp.array([[1.0, 2.0, 3.0], [0.0, 1.0, 1.0]])}
    elements = eg.trainable(params, ["w[0, 1]", "w[1, 2]"])
    (_, aux), _ = elements.value_and_grad(lambda p: ((x[1] @ p["w"]).sum(), x @ p["w"]), has_aux=True)
    assert_same(aux, x @ params["w"])


def test_second_derivatives():
    elements = eg.trainable(arrays({**TABLE, **KERNEL}, jnp.float64), ["table[5, 1:4]", "w[2]"])

    def loss(p):
        return jnp.tanh(p["table"][IDS] @ p["w"]).sum()

    def total(gradient):
        return sum((x**2).sum() for x in gradient.values())

    values = elements.values
    found = jax.jit(jax.grad(lambda v: total(elements.grad(loss, v))))(values)
    expected = jax.jit(jax.grad(lambda v: total(jax.grad(lambda v: loss(elements.merge(v)))(v))))(values)
    for place in values:
        np.testing.assert_allclose(found[place], expected[place], rtol=1e-9)


def test_half_precision_has_masters():
    for dtype in (jnp.bfloat16, jnp.float16):
        params = arrays(TABLE, dtype)
        elements = eg.trainable(params, SOME)
        assert {str(v.dtype) for v in elements.values.values()} == {"float32"}
        assert_same(elements.merge(), params)
        values = {place: value + jnp.float32(1e-6) for place, value in elements.values.items()}
        gradient = jax.jit(lambda v, elements=elements: elements.grad(embedding, v))(values)
        assert {str(v.dtype) for v in gradient.values()} == {"float32"}
        assert elements.merge(values)["table"].dtype == dtype
    assert eg.trainable(params, SOME, dtype="float64").values[SOME[0]].dtype == jnp.float64


def test_two_names_of_one_array_are_two_parameters():
    zeros = jnp.zeros(3)
    elements = eg.trainable({"a": zeros, "b": zeros}, ["a[0]", "b[0]"])
    gradient = elements.grad(lambda p: (p["a"] * 2 + p["b"] * 5).sum())
    assert [x.tolist() for x in gradient.values()] == [[2.0], [5.0]]
    assert elements.merge({"a[0]": jnp.ones(1), "b[0]": jnp.zeros(1)})["b"].tolist() == [0, 0, 0]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Linear:
    """As Equinox makes them."""

    weight: jax.Array
    bias: jax.Array

    def __call__(self, x):
        return self.weight @ x + self.bias


def test_modules_that_are_dataclasses():
    model = (Linear(jnp.array(numbers(4, 6)), jnp.zeros(4)), Linear(jnp.array(numbers(1, 4)), jnp.zeros(1)))
    elements = eg.trainable(model, ["0.weight[1]", "1.bias"])

    def loss(model):
        return model[1](jnp.tanh(model[0](X[0])))[0] ** 2

    whole = jax.jit(jax.grad(loss))(model)
    gradient = jax.jit(lambda v: elements.grad(loss, v))(elements.values)
    np.testing.assert_allclose(gradient["0.weight[1]"], whole[0].weight[1], rtol=1e-12)
    np.testing.assert_allclose(gradient["1.bias"], whole[1].bias, rtol=1e-12)
    assert isinstance(elements.merge()[0], Linear)


def test_modules_of_nnx():
    nnx = pytest.importorskip("flax.nnx")

    class Model(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.embed, self.norm = nnx.Embed(20, 6, rngs=rngs), nnx.BatchNorm(6, rngs=rngs)
            self.layers = nnx.List([nnx.Linear(6, 6, rngs=rngs)]) if hasattr(nnx, "List") else [nnx.Linear(6, 6)]

        def __call__(self, ids):
            return self.embed.attend(jnp.tanh(self.layers[0](self.norm(self.embed(ids)))))

    model = Model()
    places = ["embed.embedding[5]", "layers.0.kernel[2, 3]", "norm.scale[1]"]
    elements = eg.trainable(model, places)

    def loss(model):
        return (model(IDS) ** 2).mean()

    graph, parameters, rest = nnx.split(model, nnx.Param, ...)
    before = jax.tree.map(jnp.array, rest)
    whole = jax.jit(jax.grad(lambda p: loss(nnx.merge(graph, p, rest, copy=True))))(parameters)
    gradient = jax.jit(lambda v: elements.grad(loss, v))(elements.values)
    np.testing.assert_allclose(gradient[places[0]], whole["embed"]["embedding"][...][5], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(gradient[places[1]], whole["layers"][0]["kernel"][...][2, 3], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(gradient[places[2]], whole["norm"]["scale"][...][1], rtol=1e-4, atol=1e-6)
    assert_same(nnx.state(model, nnx.BatchStat), nnx.filter_state(before, nnx.BatchStat))
    merged = elements.merge(moved(elements.values))
    assert merged is not model
    assert isinstance(merged, Model)
    assert (merged.embed.embedding[...] != model.embed.embedding[...]).sum() == 6
    with pytest.raises(eg.PlaceError, match=r"'norm\.mean' is a buffer and only parameters train"):
        eg.trainable(model, "norm.mean")


def small(dtype=jnp.float32):
    return arrays({"table": numbers(10, 4), "head": {"kernel": numbers(4, 3), "bias": numbers(3)}}, dtype)


def small_loss(p, target=1):
    logits = p["table"][np.array([0, 3, 0])] @ p["head"]["kernel"] + p["head"]["bias"]
    return -jax.nn.log_softmax(logits)[:, target].sum()


SMALL = ["table[0, 2]", "table[3]", "head.kernel[1, :2]", "head.bias[2]"]


def aliases():
    optax = pytest.importorskip("optax")
    made = {}
    for name in dir(optax):
        maker = getattr(optax, name)
        if callable(maker) and getattr(maker, "__module__", "") == "optax._src.alias" and not isinstance(maker, type):
            made[name] = maker
    return optax, made


@pytest.mark.filterwarnings("ignore:.*optimistic_adam:DeprecationWarning")
def test_every_optimizer_of_optax_moves_the_places_alone():
    optax, makers = aliases()
    assert {"adam", "adamw", "sgd", "lion", "rmsprop", "adafactor"} <= makers.keys()
    params = small()
    elements = eg.trainable(params, SMALL[1:3])
    gradient = jax.jit(lambda values: elements.value_and_grad(small_loss, values))
    optimizers = {}
    for name, maker in makers.items():
        if name == "lbfgs":  # its line search takes half a minute to compile
            continue
        known = inspect.signature(maker).parameters
        options = {"learning_rate": 0.01, "key": 0}
        made = maker(**{option: value for option, value in options.items() if option in known})
        clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.add_decayed_weights(0.1), made)
        optimizers[name] = optax.with_extra_args_support(clipped)

    @jax.jit  # one for all, which compiles faster
    def update(values, states, losses):
        for name, optimizer in optimizers.items():
            value, slope = losses[name]
            extra = {"value": value, "grad": slope, "value_fn": lambda values: gradient(values)[0]}
            updates, states[name] = optimizer.update(slope, states[name], values[name], **extra)
            values[name] = optax.apply_updates(values[name], updates)
        return values, states

    values = dict.fromkeys(optimizers, elements.values)
    states = jax.jit(lambda values: {name: one.init(values[name]) for name, one in optimizers.items()})(values)
    for _ in range(20):
        values, states = update(values, states, {name: gradient(each) for name, each in values.items()})
    for name, each in values.items():
        merged = elements.merge(each)
        assert_only(elements, merged, params)
        assert any(bits(x) != bits(y) for x, y in zip(each.values(), elements.values.values(), strict=True)), name


def test_one_entry_of_an_embedding_under_sgd():
    """The founding case: entry [0, 5] of a 100 x 10 embedding, in a model with a linear head."""
    params = arrays({"table": numbers(100, 10), "head": numbers(10, 2)}, jnp.float32)
    elements = eg.trainable(params, "table[0, 5]")
    gradient = elements.grad(lambda p: (p["table"][np.array([0, 3])] @ p["head"]).sum())
    np.testing.assert_allclose(gradient["table[0, 5]"], params["head"][5].sum()[None], rtol=1e-5)
    elements.values = {place: v - 0.1 * gradient[place] for place, v in elements.values.items()}
    merged = elements.merge()
    assert_only(elements, merged, params)
    assert np.argwhere(np.asarray(merged["table"] != params["table"])).tolist() == [[0, 5]]
    unseen = elements.grad(lambda p: (p["table"][np.array([1, 3])] @ p["head"]).sum())
    assert unseen["table[0, 5]"].tolist() == [0.0]


def test_each_place_hears_its_own_loss_alone():
    elements = eg.trainable(small(jnp.float64), SMALL)
    one, other = (lambda p: small_loss(p, 2)), (lambda p: small_loss(p, 0))
    routes = {("table[0, 2]", "head.bias[2]"): one, "table[3, 1:3]": other}
    first, second, found = jax.jit(lambda: [elements.grad(loss) for loss in (one, other, routes)])()
    assert found.keys() == set(SMALL)
    np.testing.assert_allclose(found["table[0, 2]"], first["table[0, 2]"], rtol=1e-12)
    np.testing.assert_allclose(found["head.bias[2]"], first["head.bias[2]"], rtol=1e-12)
    expected = np.array(second["table[3]"])
    expected[[0, 3]] = 0
    np.testing.assert_allclose(found["table[3]"], expected, rtol=1e-12)
    assert found["head.kernel[1, :2]"].tolist() == [0, 0]


def test_patches_go_to_and_come_from_pytorch(tmp_path):
    ours, theirs = tmp_path / "jax.safetensors", tmp_path / "torch.safetensors"
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(10, 4), torch.nn.Linear(4, 3)).bfloat16()
    state = {name: x.detach().clone() for name, x in model.state_dict().items()}

    def to_jax(x):
        return jnp.array(x.float().numpy()).astype(jnp.bfloat16)

    params = [
        {"weight": to_jax(state["0.weight"])},
        {"weight": to_jax(state["1.weight"]), "bias": to_jax(state["1.bias"])},
    ]
    places = ["0.weight[3]", "1.weight[2, [0, 3]]", "1.bias"]
    elements = eg.trainable(params, places)
    elements.values = moved(elements.values, 0.1)
    elements.save(ours, full=True)
    applied = eg.apply(model, ours)
    for name, x in model.state_dict().items():
        assert_same(to_jax(x), leaf(elements.merge(), name))
    applied.undo()
    trained = eg.trainable(model, places)
    with torch.no_grad():
        for one in trained.parameters():
            one.add_(0.1)
    trained.save(theirs)
    assert [entry.values for entry in eg.inspect(ours).entries] == [
        entry.values for entry in eg.inspect(theirs).entries
    ]
    assert_same(eg.apply(params, theirs).merge(), elements.merge())
    on = eg.trainable(params, theirs)
    assert_same(on.values, elements.values)
    on.undo()
    assert_same(on.merge(), params)


def test_patches_compose_and_are_taken_back(tmp_path):
    first, second = tmp_path / "first.safetensors", tmp_path / "second.safetensors"
    params = small()
    for path, place in ((first, "table[:5]"), (second, "table[7]")):
        elements = eg.trainable(params, place)
        elements.values = moved(elements.values)
        elements.save(path, full=True)
    ways = []
    for one, other in ((first, second), (second, first)):
        merged = eg.apply(params, one).merge()
        ways.append(eg.apply(merged, other).merge())
        with pytest.raises(eg.PatchError, match="which was changed before"):
            eg.apply(ways[-1], one)
        beside = eg.trainable(merged, "head.bias")
        beside.save(tmp_path / "beside.safetensors")
        eg.apply(params, tmp_path / "beside.safetensors")
    assert_same(*ways)
    applied = eg.apply(params, first)
    assert not applied.training
    applied.undo()
    assert_same(applied.merge(), params)
    with pytest.raises(eg.PatchError, match="held other values there"):
        eg.apply(small() | {"table": small()["table"] + 1}, first)


BAD = {
    "an unknown name": (
        lambda p: eg.trainable(p, "tabel[0]"),
        eg.PlaceError,
        "no parameter named 'tabel'; nearest: table",
    ),
    "a branch": (lambda p: eg.trainable(p, "head[0]"), eg.PlaceError, "'head' is no array; it has"),
    "out of range": (lambda p: eg.trainable(p, "table[10]"), IndexError, "out of range"),
    "twice": (lambda p: eg.trainable(p, ["table[0]", "table[:, 1]"]), eg.DuplicateError, "is named by"),
    "integers": (lambda p: eg.trainable({"n": jnp.arange(3)}, "n[0]"), eg.DtypeError, "n is int.*only floats train"),
    "an array": (lambda p: eg.trainable(p["table"], eg.at[0]), eg.FrameworkError, "give a dict"),
    "a dtype": (lambda p: eg.trainable(p, SMALL, dtype=int), eg.OptionError, "no floating dtype"),
    "two of a name": (
        lambda p: eg.trainable({"a.b": p["table"], "a": {"b": p["table"]}}, "a.b"),
        eg.PlaceError,
        "2 arrays",
    ),
    "tracers": (
        lambda p: jax.jit(lambda p: eg.trainable(p, SMALL).merge())(p),
        eg.FrameworkError,
        "is being traced; call this outside of jax.jit",
    ),
    "parameters": (
        lambda p: eg.trainable(p, SMALL).parameters(),
        eg.FrameworkError,
        r"no parameters; use elements\.values",
    ),
    "backward": (
        lambda p: eg.trainable(p, SMALL).backward({}),
        eg.FrameworkError,
        r"no backward; use elements\.grad, which takes",
    ),
    "release": (lambda p: eg.trainable(p, SMALL).release(), eg.FrameworkError, "elements.merge"),
    "other values": (lambda p: eg.trainable(p, SMALL).merge({"table[1]": 0}), eg.PlaceError, "not one of these places"),
    "few values": (lambda p: eg.trainable(p, SMALL).merge({}), eg.PlaceError, "nothing for"),
    "a wrong shape": (
        lambda p: eg.trainable(p, "table[3]").merge({"table[3]": jnp.ones(3, jnp.float32)}),
        eg.OptionError,
        r"give float32 of shape \(4,\)",
    ),
    "a number": (lambda p: eg.trainable(p, SMALL).grad(3.0), eg.FrameworkError, "float is no loss"),
    "a vector": (lambda p: eg.trainable(p, SMALL).grad(lambda p: p["table"][0]), eg.OptionError, "return one number"),
    "unconnected": (
        lambda p: eg.trainable(p, SMALL).grad(lambda p: p["table"].sum()),
        eg.UnconnectedError,
        "does not depend on head.kernel",
    ),
    "not in training": (
        lambda p: eg.trainable(p, SMALL).grad({"table[1]": small_loss}),
        eg.PlaceError,
        "has elements that do not train here",
    ),
    "other params": (
        lambda p: eg.trainable(p, SMALL).merge(params=small(jnp.float64)),
        eg.OptionError,
        "give the same parameters",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_refusals(case):
    run, error, says = BAD[case]
    with pytest.raises(error, match=says):
        run(small())


def test_modules_of_pytorch_have_no_values():
    elements = eg.trainable(torch.nn.Linear(3, 2), "bias")
    for ask in (lambda: elements.values, elements.merge, lambda: elements.grad(abs), lambda: elements.plan(abs)):
        with pytest.raises(eg.FrameworkError, match="for parameters that are never written to"):
            ask()
