"""Questions to models as they are: of Hugging Face from a config, of Keras applications, and of Keras subclasses."""

from dataclasses import replace

import keras
import numpy as np
import pytest
import tensorflow as tf
import torch

import elementgrad as eg
from elementgrad._train.patch import Patch


@pytest.fixture(scope="module")
def gpt():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=12, n_head=2, n_embd=8, vocab_size=30, n_positions=8)
    encoded = transformers.BatchEncoding(
        {"input_ids": torch.tensor([[3, 1, 4, 1, 5]]), "attention_mask": torch.ones(1, 5, dtype=torch.long)}
    )
    return transformers.GPT2LMHeadModel(config).double().eval(), encoded


def test_a_transformer_is_read_by_keywords_patterns_and_as_an_argument(gpt):
    model, encoded = gpt
    place = "transformer.h.*.mlp.c_fc.weight[0]"
    read = eg.grad(model, encoded, of="output.logits[0, -1, 3]", wrt=place)
    assert list(read) == [f"transformer.h.{i}.mlp.c_fc.weight[0]" for i in range(12)]
    loss = model(**encoded).logits[0, -1, 3]
    weights = [block.mlp.c_fc.weight for block in model.transformer.h]
    for gradient, expected in zip(read.values(), torch.autograd.grad(loss, weights), strict=True):
        torch.testing.assert_close(gradient, expected[0])
    by_keyword = eg.grad(model, input_ids=encoded["input_ids"], of="output.logits[0, -1, 3]", wrt="transformer.wte")
    assert by_keyword.shape == (1, 5, 8)
    one = eg.grad(
        lambda model: model(**encoded).logits[0, -1, 3], model, wrt="model.transformer.h.7.mlp.c_fc.weight[0]"
    )
    torch.testing.assert_close(one, read["transformer.h.7.mlp.c_fc.weight[0]"])
    given = eg.grad(model, encoded, of="output.logits[0, -1, 3]", wrt="transformer.h.7.mlp.input")
    assert given.shape == (1, 5, 8)
    elements = eg.trainable(model, place)
    assert len(elements.places) == 12
    elements.release()


def test_names_of_a_transformer_need_no_tokens(gpt):
    model, _ = gpt
    assert len(eg.names(model, match="transformer.h.*.attn.c_attn.weight")) == 12
    with pytest.raises(eg.PlaceError, match=r"nearest: transformer\.h\.\d+\.attn\.c_attn\.weight"):
        eg.names(model, match="transformer.h.*.attn.c_atn.weight")


def test_a_keras_application_is_read_like_any_model():
    keras.utils.set_random_seed(0)
    model = keras.applications.MobileNet(
        input_shape=(32, 32, 3), alpha=0.25, weights=None, classes=4, classifier_activation=None
    )
    image = np.random.default_rng(0).uniform(size=(1, 32, 32, 3)).astype("float32")
    assert len(eg.names(model, match="conv_pw_*/kernel")) == 13
    read = eg.grad(model, image, of="output[0, 2]", wrt=["inputs", "conv1/kernel[:, :, 0, 3]"])
    x = tf.constant(image)
    with tf.GradientTape() as tape:
        tape.watch(x)
        logit = model(x)[0, 2]
    expected = tape.gradient(logit, [x, model.get_layer("conv1").kernel])
    np.testing.assert_allclose(read[0], expected[0], rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose(read[1], expected[1][:, :, 0, 3], rtol=1e-3, atol=1e-6)
    mine = eg.grad(lambda model: model(image)[0, 2], model, wrt="model.conv1/kernel[:, :, 0, 3]")
    np.testing.assert_array_equal(mine, read[1])


class Block(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.d = keras.layers.Dense(3)
        self.scale = self.add_weight(shape=(3,))

    def call(self, x):
        return self.d(x) * self.scale


class Net(keras.Model):
    def __init__(self):
        super().__init__()
        self.blocks = [Block(), Block()]
        self.twice = keras.layers.Dense(3)
        self.head = keras.layers.Dense(2, name="head")

    def call(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(self.twice(self.twice(x)))


def make_net():
    keras.utils.set_random_seed(0)
    net = Net()
    net(np.ones((1, 3), "float32"))
    return net


ATTRIBUTES = ["blocks.1.d.kernel", "blocks.1.scale", "twice.bias", "head.kernel"]


def test_attributes_name_layers_and_variables_in_every_instance():
    x = np.ones((1, 3), "float32")
    first, second = make_net(), make_net()
    assert first.twice.name != second.twice.name
    for net in (first, second):
        variables = [net.blocks[1].d.kernel, net.blocks[1].scale, net.twice.bias, net.head.kernel]
        for name, variable in zip(ATTRIBUTES, variables, strict=True):
            np.testing.assert_array_equal(
                eg.grad(net, x, of="output[0, 0]", wrt=name), eg.grad(net, x, of="output[0, 0]", wrt=variable)
            )
            loss = eg.grad(lambda model: model(x)[0, 0], net, wrt=f"model.{name}")
            np.testing.assert_array_equal(loss, eg.grad(net, x, of="output[0, 0]", wrt=name))
        for layer in ("blocks.0", "blocks.1.d", "twice#1", "twice.input#0", "head.input"):
            assert eg.grad(net, x, of="output[0, 0]", wrt=layer).shape == (1, 3)
    with pytest.raises(eg.PlaceError, match=r"nearest: blocks\.1\.d\.kernel"):
        eg.grad(first, x, of="output[0, 0]", wrt="blocks.1.d.kernl")


def test_a_name_that_a_layer_has_is_not_taken_for_an_attribute():
    class Odd(keras.Model):
        def __init__(self):
            super().__init__()
            self.a = keras.layers.Dense(2, name="b")
            self.b = keras.layers.Dense(2, name="a")

        def call(self, x):
            return self.b(self.a(x))

    net, x = Odd(), np.ones((1, 2), "float32")
    net(x)
    np.testing.assert_array_equal(
        eg.grad(net, x, of="output[0, 0]", wrt="a/kernel"), eg.grad(net, x, of="output[0, 0]", wrt=net.b.kernel)
    )
    np.testing.assert_array_equal(eg.grad(net, x, of="output[0, 0]", wrt="a"), [[1.0, 0.0]])


def test_patches_are_written_with_attributes_and_read_with_either(tmp_path):
    trained, path = make_net(), tmp_path / "patch.safetensors"
    elements = eg.trainable(trained, [f"{trained.blocks[1].name}/{trained.blocks[1].d.name}/kernel[0]", "head/bias[1]"])
    for place in elements.places:
        elements[place].assign(elements[place] + 1.0)
    elements.save(path)
    patch = eg.inspect(path)
    assert [entry.place for entry in patch.entries] == ["blocks.1.d.kernel[0]", "head/bias[1]"]
    other = make_net()
    applied = eg.apply(other, path)
    np.testing.assert_array_equal(other.blocks[1].d.kernel, trained.blocks[1].d.kernel)
    applied.undo()
    old = f"{other.blocks[1].name}/{other.blocks[1].d.name}/kernel"
    entries = [replace(patch.entries[0], name=old, place=f"{old}[0]"), patch.entries[1]]
    eg.apply(other, Patch(tuple(entries)))
    np.testing.assert_array_equal(other.blocks[1].d.kernel, trained.blocks[1].d.kernel)
