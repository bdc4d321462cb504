"""Gradients of elements of Keras models are entries of the dense gradients, for every kind of layer and model."""

from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import layers

import elementgrad as eg
from elementgrad._backends.tensorflow.train import kernels
from tests.support import keras_models
from tests.support.keras_training import bits, variable_of
from tests.support.made import counts

RNG = np.random.default_rng(0)


class Scaled(layers.Layer):
    """A layer of a user's own, which uses its variable twice and looks up rows of it."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1], shape[-1]), name="scale")

    def call(self, x):
        return x @ self.scale + tf.reduce_sum(self.scale * self.scale, 0) + tf.gather(self.scale, [1])


class Doubled(layers.Dense):
    """A layer of Keras's whose kernel a user has made another one of."""

    @property
    def kernel(self):
        return 2 * self._kernel


class DoubledRows(layers.Embedding):
    """Likewise."""

    @property
    def embeddings(self):
        return 2 * self._embeddings


def dense(**options):
    return layers.Dense(4, "tanh", name="layer", **options), RNG.normal(size=(6, 5)), "kernel"


def convolution(rank, **options):
    kind = {1: layers.Conv1D, 2: layers.Conv2D, 3: layers.Conv3D}[rank]
    shape = (2, *(7, 6, 5)[:rank], 3)
    return kind(4, (3, 2, 2)[:rank], activation="tanh", name="layer", **options), RNG.normal(size=shape), "kernel"


def tokens():
    return RNG.integers(-3, 12, (4, 5))


LAYERS = {
    "dense": lambda: dense(),
    "dense of sequences": lambda: (layers.Dense(4, name="layer"), RNG.normal(size=(2, 3, 5)), "kernel"),
    "dense of integers": lambda: (layers.Dense(4, name="layer"), RNG.integers(0, 9, (6, 5)), "kernel"),
    "doubled kernel": lambda: (Doubled(4, name="layer"), RNG.normal(size=(6, 5)), "kernel"),
    "doubled rows": lambda: (DoubledRows(12, 6, name="layer"), tokens(), "embeddings"),
    "bias": lambda: (*dense()[:2], "bias"),
    "embedding": lambda: (layers.Embedding(12, 6, name="layer"), tokens(), "embeddings"),
    "conv1d": lambda: convolution(1),
    "conv1d causal": lambda: convolution(1, padding="causal", dilation_rate=2),
    "conv2d": lambda: convolution(2),
    "conv2d same": lambda: convolution(2, padding="same", strides=2),
    "conv2d dilated": lambda: convolution(2, padding="same", dilation_rate=2),
    "conv2d no bias": lambda: convolution(2, use_bias=False, strides=(2, 1)),
    "conv3d": lambda: convolution(3, padding="same"),
    "conv2d of groups": lambda: (layers.Conv2D(4, 3, groups=2, name="layer"), RNG.normal(size=(2, 5, 5, 4)), "kernel"),
    "depthwise": lambda: (layers.DepthwiseConv2D(3, name="layer"), RNG.normal(size=(2, 5, 5, 4)), "kernel"),
    "transposed": lambda: (layers.Conv2DTranspose(3, 3, name="layer"), RNG.normal(size=(2, 5, 5, 4)), "kernel"),
    "lstm": lambda: (layers.LSTM(4, name="layer"), RNG.normal(size=(2, 3, 5)), "lstm_cell/recurrent_kernel"),
    "gru": lambda: (layers.GRU(4, name="layer"), RNG.normal(size=(2, 3, 5)), "gru_cell/kernel"),
    "layer norm": lambda: (layers.LayerNormalization(name="layer"), RNG.normal(size=(6, 5)), "gamma"),
    "batch norm": lambda: (layers.BatchNormalization(name="layer"), RNG.normal(size=(6, 5)), "beta"),
    "einsum": lambda: (layers.EinsumDense("abc,cd->abd", (2, 4), name="layer"), RNG.normal(size=(3, 2, 5)), "kernel"),
    "user's": lambda: (Scaled(name="layer"), RNG.normal(size=(6, 5)), "scale"),
}
DTYPES = {"float32": 1e-6, "float64": 1e-12}


def built(case, dtype):
    layer, x, name = LAYERS[case]()
    config = layer.get_config() | {"dtype": dtype}
    layer = type(layer).from_config(config)
    x = tf.constant(x, tf.int32 if x.dtype.kind == "i" else dtype)
    inputs = keras.Input(x.shape[1:], dtype=x.dtype.name)
    model = keras_models.drawn(keras.Model(inputs, layer(inputs)))
    return model, x, f"layer/{name}"


def loss_of(model, x):
    y = model(x, training=True)
    ramp = tf.reshape(tf.range(tf.size(y), delta=1), tf.shape(y))
    return tf.reduce_mean((y - tf.cast(ramp, y.dtype) / 20) ** 2)


def chosen(shape, size):
    """Elements here and there, in no order, and a whole slice, apart."""
    flat = RNG.permutation(np.arange(np.prod(shape))[: -shape[-1]])[:size]
    return np.stack(np.unravel_index(flat, shape), -1)


# Costs under which a kernel takes another way than they would choose for layers as small as these.
WAYS = {
    "usual": {},
    "gathered": {(kernels, "GATHERED"): 0.0, (kernels, "CONVOLVED"): 1e9},
    "multiplied": {(kernels, "GATHERED"): 1e9, (kernels, "CONVOLVED"): 1e9},
}
OWN = [case for case in LAYERS if case.startswith(("dense", "conv"))]
"""Layers with kernels of their own."""


def assert_entries(found, expected, place, tolerance):
    """Relative to the largest entry of the dense gradient."""
    wanted = expected.reshape(-1)[place.select(expected.shape).flat().reshape(-1)]
    assert np.abs(found - wanted).max() <= tolerance * np.abs(expected).max()


def gradients(model, x, variables):
    with tf.GradientTape() as tape:
        loss = loss_of(model, x)
    return loss, [tf.convert_to_tensor(gradient) for gradient in tape.gradient(loss, variables)]


@pytest.mark.parametrize(
    ("case", "way"),
    [(case, "usual") for case in LAYERS] + [(case, way) for case in OWN for way in WAYS if way != "usual"],
)
def test_gradients_are_entries_of_the_dense_gradient(case, way, monkeypatch):
    for (module, name), cost in WAYS[way].items():
        monkeypatch.setattr(module, name, cost)
    for dtype, tolerance in DTYPES.items():
        model, x, name = built(case, dtype)
        loss, (expected,) = gradients(model, x, [variable_of(model, name)])
        expected = expected.numpy()
        last = (-1,) * (expected.ndim - 1)
        some = eg.at(name).coords(chosen(expected.shape, 5)) if expected.ndim > 1 else eg.at(name)[[2, 0]]
        places = [some, eg.at(name)[last]] if expected.ndim > 1 else [some]
        elements = eg.trainable(model, places)
        plain = partial(gradients, model, x, elements.variables)
        for run in (plain, tf.function(plain, autograph=False)) if way == "usual" else [plain]:
            again, found = run()
            np.testing.assert_allclose(again, loss, rtol=tolerance)
            for place, gradient in zip(elements, found, strict=True):
                assert_entries(gradient, expected, place, tolerance)


@pytest.mark.parametrize("case", ["dense", "conv2d same", "embedding"])
def test_losses_that_are_made_of_gradients(case, monkeypatch):
    """A penalty on the gradient: the gradient of the input depends on the elements too."""
    for (module, name), cost in WAYS["gathered"].items():
        monkeypatch.setattr(module, name, cost)
    model, x, name = built(case, "float64")
    layer = model.get_layer("layer")
    scale = tf.Variable(1.5, dtype="float64")
    inner = x if x.dtype.is_integer else tf.Variable(x)

    def slopes(variables):
        with tf.GradientTape() as outer:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.sin(scale * layer(inner)) ** 2)
            slopes = tape.gradient(loss, [scale] if x.dtype.is_integer else [scale, inner])
            penalty = tf.add_n([tf.reduce_sum(slope**3) for slope in slopes])
        return [tf.convert_to_tensor(gradient) for gradient in outer.gradient(penalty, variables)]

    expected = slopes([variable_of(model, name)])[0].numpy()
    elements = eg.trainable(model, eg.at(name).coords(chosen(expected.shape, 5)))
    plain = partial(slopes, elements.variables)
    for run in (plain, tf.function(plain, autograph=False)):
        (found,) = run()
        assert_entries(found, expected, elements.places[0], 1e-12)


@settings(max_examples=counts(30))
@given(st.data())
def test_made_layers_and_places(data):
    """Of any width, at any places, several of them apart."""
    draw, rng = data.draw, np.random.default_rng(data.draw(st.integers(0, 99)))
    small = st.integers(1, 4)
    wide, out = draw(small), draw(small)
    dtype = draw(st.sampled_from(list(DTYPES)))
    kind = draw(st.sampled_from(["dense", "embedding", "conv"]))
    options = {"name": "layer", "dtype": dtype}
    if kind == "embedding":
        layer, x = layers.Embedding(wide, out, **options), rng.integers(0, wide, (draw(small), 3)).astype("int32")
    elif kind == "dense":
        layer, x = layers.Dense(out, "tanh", **options), rng.normal(size=(draw(small), 2, wide)).astype(dtype)
    else:
        options |= {"padding": draw(st.sampled_from(["same", "valid"])), "strides": draw(st.integers(1, 2))}
        options |= {"dilation_rate": draw(st.integers(1, 2)) if options["strides"] == 1 else 1}
        layer = layers.Conv2D(out, draw(st.sampled_from([1, 2, (1, 3)])), **options)
        x = rng.normal(size=(2, 5, 6, wide)).astype(dtype)
    model = keras_models.drawn(keras.Sequential([keras.Input(x.shape[1:], dtype=x.dtype.name), layer]))
    variable = layer.weights[0]
    _, (expected,) = gradients(model, x, [variable])
    size = int(np.prod(variable.shape))
    order = rng.permutation(size)[: draw(st.integers(1, size))]
    parts = np.array_split(order, draw(st.integers(1, min(3, len(order)))))
    whole = eg.at(f"layer/{variable.name}")
    ways = [cost for costs in WAYS.values() for cost in costs.items()]
    with pytest.MonkeyPatch.context() as patch:
        for (module, name), cost in draw(st.sets(st.sampled_from(ways))):
            patch.setattr(module, name, cost)
        places = [whole.coords(np.stack(np.unravel_index(part, variable.shape), -1)) for part in parts]
        elements = eg.trainable(model, places)
    _, found = gradients(model, x, elements.variables)
    for place, gradient in zip(elements, found, strict=True):
        assert_entries(gradient, expected.numpy(), place, DTYPES[dtype])


@pytest.fixture(params=DTYPES)
def dtype(request):
    """Layers that random models consist of."""
    with keras_models.computing_in(request.param):
        yield request.param


@pytest.mark.parametrize("name", keras_models.MODELS)
def test_models_of_every_form(name, dtype):
    """Functional, Sequential and subclassed, with nested and shared layers, recurrent ones and attention."""
    model = keras_models.MODELS[name]()
    x = keras_models.input_of(model)
    names = [name for name, variable in zip(_paths(model), model.weights, strict=True) if variable.trainable]
    places = [eg.at(name)[(0,) * len(variable_at(model, name).shape)] for name in names]
    _, wanted = gradients(model, x, [variable_at(model, name) for name in names])
    elements = eg.trainable(model, places)
    assert {variable.dtype for variable in elements.variables} == {dtype}
    _, found = gradients(model, x, elements.variables)
    for place, gradient, dense in zip(elements, found, wanted, strict=True):
        assert_entries(gradient, dense.numpy(), place, DTYPES[dtype])
    before = model.get_weights()
    optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.1)
    optimizer.apply(found, elements.variables)
    for old, new in zip(before, model.get_weights(), strict=True):
        assert not (bits(old) != bits(new)).any(-1).reshape(-1)[1:].any()


def _paths(model):
    by_id = {id(tensor): name for name, kind, tensor in _held(model)}
    return [by_id[id(variable._value)] for variable in model.weights]


def variable_at(model, name):
    found = {other: tensor for other, _, tensor in _held(model)}[name]
    return next(variable for variable in model.weights if variable._value is found)


def _held(model):
    from elementgrad._backends.tensorflow.names import KerasModel

    return list(KerasModel(model).named_tensors())
