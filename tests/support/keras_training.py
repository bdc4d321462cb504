"""A Keras model with layers of many kinds, places in it, and what has moved since."""

import keras
import numpy as np
from keras import layers


def variable_of(model, name):
    return next(variable for variable in model.variables if variable.path.endswith(name))


def tagger(dtype=None, walk=True):
    """Tokens to scores, by layers of many kinds."""
    keras.utils.set_random_seed(0)
    x = keras.Input((4,), dtype="int32", name="tokens")
    y = layers.Embedding(20, 6, name="table", dtype=dtype)(x)
    full = "float32" if dtype and "bfloat16" in dtype else dtype  # some CPUs have no products in bfloat16
    y = layers.Conv1D(6, 3, padding="same", activation="relu", name="mix", dtype=full)(y)
    y = layers.LayerNormalization(name="norm", dtype=dtype)(y)
    y = layers.GRU(5, name="walk", dtype=dtype)(y) if walk else y[:, 0, :5]
    return keras.Model(x, layers.Dense(3, name="head", dtype=full)(y))


PLACES = [
    "table/embeddings[0, 5]",
    "table/embeddings[2]",
    "mix/kernel[1, 2]",
    "mix/bias[3]",
    "norm/gamma[::2]",
    "walk/gru_cell/kernel[3, 4]",
    "head/kernel[:, 1]",
]
MOVED = {"embeddings": 7, "mix/kernel": 6, "mix/bias": 1, "gamma": 3, "gru_cell/kernel": 1, "head/kernel": 5}
TOKENS = np.random.default_rng(1).integers(0, 5, (24, 4))
TARGETS = np.random.default_rng(2).normal(size=(24, 3)).astype(np.float32)


def state(model):
    return {variable.path: variable.numpy() for variable in model.weights}


def bits(array):
    return np.ascontiguousarray(array).view(np.uint8).reshape(*array.shape, array.dtype.itemsize)


def moved(model, before):
    now = state(model)
    return {name: int((bits(now[name]) != bits(old)).any(-1).sum()) for name, old in before.items()}


def assert_only_places_moved(model, before, places=MOVED):
    counts = moved(model, before)
    for name, count in counts.items():
        allowed = next((most for end, most in places.items() if name.endswith(end)), 0)
        assert count == allowed if not allowed else 0 < count <= allowed, (name, count)
