"""The same model in PyTorch and in Keras, with the same weights: derivatives agree at every name that both have."""

import keras
import numpy as np
import pytest
import torch
from torch import nn

import elementgrad as eg
from tests.support import keras_models


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1, self.relu1 = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3, 1e-3), nn.ReLU(inplace=True)
        self.conv2, self.bn2 = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3, 1e-3)

    def forward(self, x):
        return x + self.bn2(self.conv2(self.relu1(self.bn1(self.conv1(x)))))


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1, self.act1 = nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3, 1e-3), nn.Tanh()
        self.block1, self.block2, self.head = Block(), Block(), nn.Linear(3, 3)

    def forward(self, image):
        return self.head(self.block2(self.block1(self.act1(self.bn1(self.conv1(image))))).mean((2, 3)))


class Attention(nn.Module):
    """Two heads of width two, with the projections that Keras names."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value, self.output = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        heads = [part(x).unflatten(-1, (2, 2)).transpose(1, 2) for part in (self.query, self.key, self.value)]
        return self.output(nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn, self.norm1, self.norm2 = Attention(), nn.LayerNorm(4, 1e-3), nn.LayerNorm(4, 1e-3)
        self.ff1, self.ff2 = nn.Sequential(nn.Linear(4, 5), nn.GELU()), nn.Linear(5, 4)

    def forward(self, x):
        x = self.norm1(x + self.attn(x))
        return self.norm2(x + self.ff2(self.ff1(x)))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.block1, self.head = nn.Linear(4, 4), Layer(), nn.Linear(12, 2)

    def forward(self, sequence):
        return self.head(self.block1(self.embed(sequence)).flatten(1))


class Recurrent(nn.Module):
    """Return the tensors that Keras calls `both` and `lstm2`."""

    def __init__(self):
        super().__init__()
        self.both = nn.LSTM(4, 2, batch_first=True, bidirectional=True)
        self.lstm2, self.head = nn.LSTM(4, 3, batch_first=True), nn.Linear(3, 2)

    def forward(self, sequence):
        return self.head(self.lstm2(self.both(sequence)[0])[0][:, -1])


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru, self.dense, self.head = nn.GRU(4, 3, batch_first=True), nn.Linear(3, 2), nn.Linear(9, 2)

    def forward(self, sequence):
        states, last = self.gru(sequence)
        return self.head(torch.cat([self.dense(states).flatten(1), last[0]], 1))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down1 = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.Softplus())
        self.pool1, self.down2 = nn.AvgPool2d(2), nn.Conv2d(2, 3, 3, padding=1)
        self.up1, self.head = nn.ConvTranspose2d(3, 2, 2, stride=2), nn.Conv2d(4, 1, 1)

    def forward(self, image):
        skip = self.down1(image)
        return self.head(torch.cat([skip, self.up1(self.down2(self.pool1(skip)))], 1))


def copied(layer, module):
    """Give a PyTorch module the weights of a Keras layer."""
    if isinstance(module, nn.Sequential):
        module = module[0]
    weights = [weight.numpy() for weight in layer.weights]
    if isinstance(layer, keras.layers.Conv2DTranspose):
        return given(module, weight=weights[0].transpose(3, 2, 0, 1), bias=weights[1])
    if isinstance(layer, keras.layers.Conv2D):
        return given(module, weight=weights[0].transpose(3, 2, 0, 1), bias=weights[1])
    if isinstance(layer, keras.layers.BatchNormalization):
        return given(module, weight=weights[0], bias=weights[1], running_mean=weights[2], running_var=weights[3])
    if isinstance(layer, keras.layers.LayerNormalization):
        return given(module, weight=weights[0], bias=weights[1])
    if isinstance(layer, keras.layers.EinsumDense):  # a projection to heads, or from them
        matrix = weights[0].reshape(4, 4)
        return given(module, weight=matrix.T, bias=weights[1].reshape(-1))
    if isinstance(layer, keras.layers.Dense):
        return given(module, weight=weights[0].T, bias=weights[1])
    raise TypeError(type(layer).__name__)


def copied_recurrence(weights, module, suffix="", gates=None):
    """The gates of a GRU stand in another order in PyTorch, and there are two biases in both."""
    kernel, recurrent, bias = (weight.numpy() for weight in weights)
    size = recurrent.shape[0]
    order = np.concatenate([np.arange(size) + gate * size for gate in (gates or range(kernel.shape[1] // size))])
    first, second = bias if bias.ndim == 2 else (bias, np.zeros_like(bias))
    given(
        module,
        **{
            f"weight_ih_l0{suffix}": kernel.T[order],
            f"weight_hh_l0{suffix}": recurrent.T[order],
            f"bias_ih_l0{suffix}": first[order],
            f"bias_hh_l0{suffix}": second[order],
        },
    )


def given(module, **tensors):
    with torch.no_grad():
        for name, value in tensors.items():
            getattr(module, name).copy_(torch.from_numpy(value.copy()))


def residual():
    model, twin = keras_models.residual(), Residual()
    for name in ("conv1", "bn1", "head"):
        copied(model.get_layer(name), getattr(twin, name))
    for block in ("block1", "block2"):
        for name in ("conv1", "bn1", "conv2", "bn2"):
            copied(model.get_layer(block).get_layer(name), getattr(getattr(twin, block), name))
    inner = [f"{block}/{name}" for block in ("block1", "block2") for name in ("conv1", "bn1", "relu1", "conv2", "bn2")]
    return model, twin, {name: name.replace("/", ".") for name in ("conv1", "bn1", "act1", "block1", "head", *inner)}


def transformer():
    model, twin = keras_models.transformer_subclassed(), Transformer()
    block = model.blocks["first"]
    copied(model.embed, twin.embed)
    copied(model.head, twin.head)
    for name in ("norm1", "norm2", "ff1", "ff2"):
        copied(getattr(block, name), getattr(twin.block1, name))
    for name in ("query", "key", "value", "output"):
        copied(getattr(block.attn, f"_{name}_dense"), getattr(twin.block1.attn, name))
    inner = [f"block1/{name}" for name in ("attn", "norm1", "ff1", "ff2", "norm2")]
    return model, twin, {name: name.replace("/", ".") for name in ("embed", "block1", "head", *inner)}


def lstm():
    model, twin = keras_models.lstm(), Recurrent()
    both = model.get_layer("both")
    copied_recurrence(both.forward_layer.weights, twin.both)
    copied_recurrence(both.backward_layer.weights, twin.both, "_reverse")
    copied_recurrence(model.get_layer("lstm2").weights, twin.lstm2)
    copied(model.get_layer("head"), twin.head)
    return model, twin, {"both": "both:0", "head": "head"}


def gru():
    model, twin = keras_models.gru(), Gated()
    copied_recurrence(model.get_layer("gru").weights, twin.gru, gates=(1, 0, 2))
    copied(model.get_layer("steps").layer, twin.dense)
    copied(model.get_layer("head"), twin.head)
    return model, twin, {"gru:0": "gru:0", "steps": "dense", "head": "head"}


def unet():
    model, twin = keras_models.unet(), UNet()
    for name in ("down1", "down2", "up1", "head"):
        copied(model.get_layer(name), getattr(twin, name))
    return model, twin, {name: name for name in ("down1", "pool1", "down2", "up1", "head")}


def channels_first(x):
    return np.moveaxis(x, -1, 1) if x.ndim == 4 else x


def assert_agree(given, expected):
    scale = max(1.0, float(np.abs(expected).max()))
    np.testing.assert_allclose(given, expected, rtol=0, atol=1e-6 * scale)


@pytest.mark.parametrize("build", [residual, transformer, lstm, gru, unet], ids=lambda build: build.__name__)
def test_twins_agree_at_every_name_that_both_have(build):
    model, twin, names = build()
    twin.eval()
    for variable in model.weights:  # smaller, so that float32 is good for six digits
        if "variance" not in variable.path:
            variable.assign(variable * 0.5)
    for parameter in twin.parameters():
        parameter.data.mul_(0.5)
    for name, buffer in twin.named_buffers():
        if name.endswith("running_mean"):
            buffer.mul_(0.5)
    x = keras_models.input_of(model)
    image = torch.from_numpy(channels_first(x.numpy()).copy())
    assert_agree(twin(image).detach().numpy(), channels_first(model(x).numpy()))
    for theirs, ours in names.items():
        to, back = (eg.jacobian(f, a, of=name) for f, a, name in ((twin, image, ours), (model, x, theirs)))
        assert_agree(to.value.numpy(), channels_first(back.value.numpy()))
        first = (0,) * (len(to.shape) - image.dim())
        assert_agree(to[first, :].numpy(), channels_first(back[first, :].numpy()))
        onward, expected = (
            eg.jacobian(f, a, of="output", wrt=n) for f, a, n in ((twin, image, ours), (model, x, theirs))
        )
        row = (0,) * (len(onward.shape) - len(first))
        assert_agree(onward[row, :].numpy(), channels_first(expected[row, :].numpy()))
        assert_agree(onward[:, first].numpy(), channels_first(expected[:, first].numpy()))
