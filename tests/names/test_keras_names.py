"""Every layer and variable of Keras models by name, against cuts made by hand with the user's own tapes."""

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import elementgrad as eg
from tests.support.keras_models import MODELS, computing_in, input_of

Layer = keras.layers.Layer


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    with computing_in("float64"):
        yield


def layers_of(layer: Any, path: str = "") -> Iterator[tuple[str, Layer]]:
    """All layers inside of one by their paths, as Keras's own walk over layers has them."""
    for inner in layer._flatten_layers(recursive=False, include_self=False):
        name = f"{path}/{inner.name}" if path else inner.name
        yield name, inner
        yield from layers_of(inner, name)


class ByHand:
    """A model run on a tape of the user's own: its layers note what they give, each tensor as one of its own."""

    def __init__(self, model: Any, x: tf.Tensor):
        self.notes: dict[str, list[Any]] = {"inputs": [x]}
        layers = {id(layer): (path, layer) for path, layer in reversed(list(layers_of(model)))}  # by its first path
        with tf.GradientTape(persistent=True) as self.tape:
            self.tape.watch([x, *(variable.value for variable in model.weights)])
            for path, layer in layers.values():
                self._note(path, layer)
            try:
                self.notes["output"] = [model(x)]
            finally:
                for _, layer in layers.values():
                    del layer.call
        for path, layer in layers.values():
            if isinstance(layer, (keras.layers.LSTM, keras.layers.GRU)) and not layer.unroll:
                steps = self.notes[f"{path}/{layer.cell.name}"]
                del steps[: len(steps) // (1 + x.shape[1])]  # the first step ran once before, for its shape

    def _note(self, path: str, layer: Layer) -> None:
        original = layer.call

        def call(*args: Any, **kwargs: Any) -> Any:
            result = tf.nest.map_structure(tf.identity, original(*args, **kwargs))
            self.notes.setdefault(path, []).extend(tf.nest.flatten(result))
            return result

        layer.call = call

    def tensors(self, model: Any) -> dict[str, tf.Tensor]:
        """Return every activation by its name, in the order of the run."""
        rows = activations(model, self.notes["inputs"][0])
        bases = [base(name) for name in rows]
        return {name: self.notes[bases[at]][bases[:at].count(bases[at])] for at, name in enumerate(rows)}


def activations(model: Any, x: tf.Tensor) -> list[str]:
    """The names of all activations, in the order in which they are met."""
    return [row.name for row in eg.names(model, x) if row.kind == "activation"]


def base(name: str) -> str:
    """The name of a layer, without which of its calls and parts it is."""
    return name.partition(":")[0].partition("#")[0]


def seeds_of(tensor: tf.Tensor, seed: int) -> tf.Tensor:
    return tf.constant(np.random.default_rng(seed).normal(size=tensor.shape))


def assert_same(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-10)


def assert_as_by_hand(J: Any, tape: Any, target: tf.Tensor, source: tf.Tensor, seed: int) -> None:
    """One of the four forms of reading, which take turns, is as the tape has it: a row, a column, either product."""
    assert_same(J.value, target)
    row, column = seed * 5 % int(tf.size(target)), seed * 7 % int(tf.size(source))
    at_row, at_column = np.unravel_index(row, target.shape), np.unravel_index(column, source.shape)
    u, v = seeds_of(target, seed), seeds_of(source, seed + 1)
    unit_u = tf.reshape(tf.one_hot(row, tf.size(target), dtype=u.dtype), target.shape)
    unit_v = tf.reshape(tf.one_hot(column, tf.size(source), dtype=v.dtype), source.shape)
    with tf.GradientTape() as outer:
        outer.watch(unit_u)
        pulled = tape.gradient(target, source, unit_u)
    form = seed % 4
    if pulled is None:
        with pytest.raises(eg.UnconnectedError):
            J[at_row, ...]
    elif form == 0:
        assert_same(J[at_row, ...], pulled)
    elif form == 1:
        assert_same(J @ v, outer.gradient(pulled, unit_u, v))
    elif form == 2:
        assert_same(u @ J, tape.gradient(target, source, u))
    else:
        assert_same(J[..., at_column], outer.gradient(pulled, unit_u, unit_v))


@pytest.mark.parametrize("name", MODELS)
def test_every_layer_that_is_called_has_a_name(name):
    model = MODELS[name]()
    hand = ByHand(model, x := input_of(model))
    assert {base(name) for name in activations(model, x)} == set(hand.notes) - {"inputs", "output"}


@pytest.mark.parametrize("name", MODELS)
def test_activations_from_the_input_and_to_the_output(name):
    model = MODELS[name]()
    hand = ByHand(model, x := input_of(model))
    tensors, output = hand.tensors(model), hand.notes["output"][0]
    to_output = eg.jacobian(model, x, wrt={name: name for name in tensors})
    from_input = eg.jacobian(model, x, of={name: name for name in tensors})
    for seed, (activation, tensor) in enumerate(tensors.items()):
        assert_as_by_hand(to_output[activation], hand.tape, output, tensor, seed)
        assert_as_by_hand(from_input[activation], hand.tape, tensor, x, seed + 2)


@pytest.mark.parametrize("name", MODELS)
def test_activations_to_activations(name):
    model = MODELS[name]()
    hand = ByHand(model, x := input_of(model))
    tensors = hand.tensors(model)
    names = list(tensors)
    for step in (2, len(names) // 2):
        for seed, (early, late) in enumerate(zip(names[:-step:step], names[step::step], strict=False)):
            J = eg.jacobian(model, x, of=late, wrt=early)
            assert_as_by_hand(J, hand.tape, tensors[late], tensors[early], seed + step)


@pytest.mark.parametrize("name", MODELS)
def test_variables(name):
    model = MODELS[name]()
    hand = ByHand(model, x := input_of(model))
    held = [row for row in eg.names(model, x) if row.kind in ("parameter", "buffer")]
    layers = dict(layers_of(model))
    assert len(held) == len([variable for variable in model.weights if "seed" not in variable.path])
    to_output = eg.jacobian(model, x, wrt={row.name: row.name for row in held})
    for seed, row in enumerate(held):
        path, _, own = row.name.rpartition("/")
        (variable,) = [variable for variable in layers[path].weights if variable.name == own]
        trained = any(other is variable for other in layers[path].trainable_variables)
        assert (row.kind, row.shape) == ("parameter" if trained else "buffer", tuple(variable.shape))
        assert_as_by_hand(to_output[row.name], hand.tape, hand.notes["output"][0], variable.value, seed)
