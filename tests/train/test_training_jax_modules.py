"""Parameters in every form that people keep them in: each trains, is merged, saved and applied."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import elementgrad as eg
from elementgrad._backends.jax.names import JaxModel
from tests.support.jax_losses import IDS, X, arrays, assert_same, moved, numbers

ROW = jnp.asarray(X[0], "float32")


def dicts():
    """Dicts, lists and tuples."""
    params = {"layers": [{"weight": numbers(4, 6), "bias": numbers(4)}], "head": (numbers(1, 4), numbers(1))}

    def loss(params):
        h = jnp.tanh(params["layers"][0]["weight"] @ ROW + params["layers"][0]["bias"])
        return ((params["head"][0] @ h + params["head"][1]) ** 2).sum()

    return arrays(params, jnp.float32), loss, ["layers.0.weight[1]", "head.1", "head.0[0, 2]"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Linear:
    """A module as Equinox makes them: a frozen dataclass that is a pytree, with fields that are no arrays."""

    weight: jax.Array
    bias: jax.Array
    scale: float = dataclasses.field(default=2.0, metadata={"static": True})

    def __call__(self, x):
        return self.weight @ x * self.scale + self.bias


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Perceptron:
    layers: tuple[Linear, ...]

    def __call__(self, x):
        return self.layers[1](jnp.tanh(self.layers[0](x)))


def linear(*shape):
    return Linear(jnp.array(numbers(*shape), "float32"), jnp.zeros(shape[0], "float32"))


def dataclass():
    """A module that is a dataclass, of others."""
    model = Perceptron((linear(4, 6), linear(1, 4)))
    return model, lambda model: model(ROW)[0] ** 2, ["layers.0.weight[1]", "layers.1.bias", "layers.0.bias[2]"]


def nnx_module():
    """A module of flax NNX, with statistics, a list of layers and a tied table."""
    nnx = pytest.importorskip("flax.nnx", reason="the oldest packages come without flax")

    class Model(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.embed, self.norm = nnx.Embed(20, 6, rngs=rngs), nnx.BatchNorm(6, rngs=rngs)
            self.layers = nnx.List([nnx.Linear(6, 6, rngs=rngs)])

        def __call__(self, ids):
            return self.embed.attend(jnp.tanh(self.layers[0](self.norm(self.embed(ids)))))

    places = ["embed.embedding[5]", "layers.0.kernel[2, 3]", "norm.scale[1]"]
    return Model(), lambda model: (model(IDS) ** 2).mean(), places


MODELS = {"dicts": dicts, "a dataclass": dataclass, "flax NNX": nnx_module}


def held(model):
    """All arrays by their names, statistics included."""
    return {name: np.array(array) for name, _, array in JaxModel(model).named_tensors()}


def whole(model, loss):
    """The dense gradient by name, as the makers of each form would have it."""
    if type(model).__module__ == __name__ or isinstance(model, dict):
        return held(jax.jit(jax.grad(loss))(model))
    from flax import nnx

    graph, parameters, rest = nnx.split(model, nnx.Param, ...)
    found = jax.jit(jax.grad(lambda p: loss(nnx.merge(graph, p, rest, copy=True))))(parameters)
    return held(nnx.merge(graph, found, rest, copy=True))


@pytest.mark.parametrize("form", MODELS)
def test_a_model_of_this_form_trains_and_is_merged_saved_and_applied(form, tmp_path):
    path = tmp_path / "patch.safetensors"
    model, loss, places = MODELS[form]()
    before, structure = held(model), jax.tree.structure(model)
    elements = eg.trainable(model, places)
    gradient = jax.jit(lambda values: elements.grad(loss, values))(elements.values)
    dense = whole(model, loss)
    for place in elements.places:
        x = dense[place.name]
        expected = x.reshape(-1)[place.select(x.shape).flat().reshape(-1)]
        np.testing.assert_allclose(gradient[str(place)], expected, rtol=1e-4, atol=1e-6)
    assert_same(held(model), before)  # statistics too
    elements.values = moved(elements.values)
    merged = elements.merge()
    assert type(merged) is type(model)
    assert jax.tree.structure(merged) == structure
    now = held(merged)
    changed = sum(int((now[name] != before[name]).sum()) for name in before)
    assert changed == elements.size
    for place in elements.places:
        at = place.select(before[place.name].shape).flat().reshape(-1)
        np.testing.assert_allclose(now[place.name].reshape(-1)[at], before[place.name].reshape(-1)[at] + 0.3, rtol=1e-5)
    elements.save(path)
    applied = eg.apply(model, path)
    assert_same(held(applied.merge()), now)
    applied.undo()
    assert_same(held(applied.merge()), before)
    assert_same(eg.trainable(model, path).values, elements.values)
    assert np.isfinite(jax.jit(loss)(merged) if form != "flax NNX" else loss(merged))


@pytest.mark.parametrize("name", ["b", "c.inner"])
def test_objects_shared_by_nnx_train_by_any_path(name, tmp_path):
    nnx = pytest.importorskip("flax.nnx", reason="the oldest packages come without flax")

    class Outer(nnx.Module):
        def __init__(self, inner):
            self.inner = inner

    class Net(nnx.Module):
        def __init__(self):
            self.a = nnx.Linear(6, 6, rngs=nnx.Rngs(0))
            self.b, self.c = self.a, Outer(self.a)

        def __call__(self, x):
            return self.c.inner(jnp.tanh(self.b(jnp.tanh(self.a(x)))))

    def loss(model):
        return (model(ROW) ** 2).sum()

    net, place, path = Net(), f"{name}.kernel[0]", tmp_path / "p.safetensors"
    elements = eg.trainable(net, place)
    expected = nnx.grad(loss)(net)["a"]["kernel"][...][0]
    np.testing.assert_allclose(elements.grad(loss)[place], expected, rtol=1e-5)
    elements.values = {place: elements.values[place] + 1}
    merged = elements.merge()
    assert merged.a is merged.b is merged.c.inner
    assert np.array_equal(merged.a.kernel[...], net.a.kernel[...].at[0].add(1))
    elements.save(path)
    assert [str(entry.place) for entry in eg.inspect(path).entries] == ["a.kernel[0]"]
    assert np.array_equal(eg.apply(net, path).merge().a.kernel[...], merged.a.kernel[...])
    assert [str(place) for place in eg.trainable(net, f"{name}.*[1]").places] == ["a.bias[1]", "a.kernel[1]"]
    with pytest.raises(eg.DuplicateError, match=r"named by a\.kernel\[0\] and by"):
        eg.trainable(net, ["a.kernel[0]", f"{name}.kernel[0, 1]"])
    with pytest.raises(eg.PlaceError, match=f"'{name}' is no array; it has {name}.bias, {name}.kernel"):
        eg.trainable(net, name)


def test_only_parameters_of_nnx_train():
    model, _, _ = nnx_module()
    with pytest.raises(eg.PlaceError, match=r"'norm\.mean' is a buffer and only parameters train"):
        eg.trainable(model, "norm.mean")
