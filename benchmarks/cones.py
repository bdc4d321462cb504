"""What one element costs by its cone, against the best plain way: forward to the layer, backward to the input."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import cycle
from typing import Any

import elementgrad as eg
from benchmarks.harness import Row
from benchmarks.jacobians import agree

SIDE, LARGE = 512, 1024
FIRST, OTHER = 1 / 40, 1 / 200
"""Bounds for six convolutions: a recording and one element, and one more element of the same recording."""
JAX_OTHER = 1 / 50
"""The bound on JAX, for another element than the one that was compiled for, traced anew."""
FIRST_OF_GRAPH, OTHER_OF_GRAPH = 1, 1 / 50
"""The same for TensorFlow, where the first element waits for the graph to be traced."""
MIXING = 1.25
"""The bound where a cone does not pay, and the recording is dropped."""
UNRECORDED = 1.05
"""The bound for small inputs, of which nothing is recorded."""
GROWTH = 2.0
"""The bound on the cost of a block of pixels of a picture of 1024 pixels beside that of 224."""


def _torch_pair(
    name: str,
    model: Any,
    x: Any,
    places: Sequence[tuple[int, ...]],
    first: float | None,
    other: float,
    most_mb: float | None = None,
) -> Iterator[Row]:
    """Yield a row for the first element, and one for other elements of one recording, each time another one."""
    import torch

    def whole(place: tuple[int, ...]) -> Any:
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad(model(leaf)[place], leaf)[0]

    jacobian = eg.jacobian(model, x, cone=True)
    ours, plain, peer = cycle(places), cycle(places), "forward and backward"
    if first is not None:
        of = eg.at("output")[places[0]]
        alone = Row(
            f"{name}, first element",
            lambda: eg.grad(model, x, of=of),
            lambda: whole(places[0]),
            peer,
            first,
            most_mb=most_mb,
            repeats=5,
        )
        yield agree(alone)
    another = Row(
        f"{name}, another element", lambda: jacobian[next(ours), :], lambda: whole(next(plain)), peer, other, repeats=5
    )
    yield agree(another)


def _six_convolutions() -> Any:
    from torch import nn

    layers = [nn.Conv2d(3 if i == 0 else 16, 16, 3, padding=1) for i in range(6)]
    return nn.Sequential(*[module for layer in layers for module in (layer, nn.ELU())])


def torch_rows() -> Iterator[Row]:
    import torch
    from torch import nn

    torch.manual_seed(0)
    for size in (SIDE, LARGE):
        x = torch.randn(1, 3, size, size)
        places = [(0, 3, size // 2, size // 2), (0, 5, size // 3, size // 4)]
        limit = 20 if size == LARGE else None
        name = f"torch six convolutions, {size} pixels"
        yield from _torch_pair(name, _six_convolutions(), x, places, FIRST, OTHER, limit)

    mixer = nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Softmax(0), nn.Linear(512, 512))
    x = torch.randn(512, 512)

    def mixed() -> Any:
        return eg.grad(mixer, x, of="output[3, 4]", wrt="input")

    def by_hand() -> Any:
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad(mixer(leaf)[3, 4], leaf)[0]

    yield agree(Row("torch an element that depends on all", mixed, by_hand, "forward and backward", MIXING))
    yield from _blocks_of_pixels()
    yield from _small_inputs()
    yield from _mixing_models()


def _blocks_of_pixels() -> Iterator[Row]:
    """Yield rows for a block that has the same numbers in a small picture and in a large one that contains it."""
    import torch

    model, large = _six_convolutions(), torch.randn(1, 3, LARGE, LARGE)
    small, of = large[..., :224, :224].contiguous(), eg.at("output")[0, 3, 112, 112]
    wrt = eg.at("input")[0, :, 100:124, 100:124]
    peer = "the same, 224 pixels"
    name = f"torch a block of pixels, {LARGE} pixels"

    def gradient(x: Any) -> Any:
        return eg.grad(model, x, of=of, wrt=wrt)

    yield agree(Row(name, lambda: gradient(large), lambda: gradient(small), peer, GROWTH))
    jacobians = [eg.jacobian(model, x, wrt="input", cone=True) for x in (large, small)]
    ours, plain = (
        lambda jacobian=jacobian: jacobian[of.index, (0, slice(None), slice(100, 124), slice(100, 124))]
        for jacobian in jacobians
    )
    yield agree(Row(f"{name}, another element", ours, plain, peer, GROWTH))


def _small_inputs() -> Iterator[Row]:
    """Yield rows for inputs that are too small to be recorded, against reads that never record."""
    import torch
    from torch import nn

    perceptron = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    models = {
        "a digit, 64 numbers": (perceptron, torch.randn(1, 64), "output[0, 3]"),
        "six convolutions, 64 pixels": (_six_convolutions(), torch.randn(1, 3, 64, 64), "output[0, 3, 32, 32]"),
    }
    for name, (model, x, of) in models.items():

        def read(cone: bool | None, model: Any = model, x: Any = x, of: str = of) -> Any:
            return eg.grad(model, x, of=of, cone=cone)

        yield agree(Row(f"torch {name}", partial(read, None), partial(read, False), "cone=False", UNRECORDED))


def _mixing_models() -> Iterator[Row]:
    """Yield rows for models whose every element depends on all pixels, so that cones do not pay."""
    import torch
    from torch import nn

    class ViT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches = nn.Conv2d(3, 192, 16, stride=16)
            self.position = nn.Parameter(torch.randn(1, 196, 192) * 0.02)
            layers = [nn.TransformerEncoderLayer(192, 3, 768, 0.0, "gelu", batch_first=True) for _ in range(6)]
            self.layers = nn.Sequential(*layers)

        def forward(self, x: Any) -> Any:
            return self.layers(self.patches(x).flatten(2).mT + self.position)

    class SqueezeExcite(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(4, width)
            self.gate = nn.Sequential(nn.Linear(width, width // 4), nn.ReLU(), nn.Linear(width // 4, width))

        def forward(self, x: Any) -> Any:
            y = torch.relu(self.norm(self.conv(x)))
            return x + y * torch.sigmoid(self.gate(y.mean((2, 3))))[..., None, None]

    blocks = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *[SqueezeExcite(16) for _ in range(4)])
    image = torch.randn(1, 3, 224, 224)
    models = {
        "ViT of 6 layers, 224 pixels": (ViT().eval(), (0, 70, 5)),
        "GroupNorm and squeeze-and-excite, 224 pixels": (blocks, (0, 3, 112, 112)),
    }
    for name, (model, place) in models.items():

        def ours(model: Any = model, place: Any = place) -> Any:
            return eg.grad(model, image, of=eg.at("output")[place])

        def whole(model: Any = model, place: Any = place) -> Any:
            leaf = image.detach().requires_grad_()
            return torch.autograd.grad(model(leaf)[place], leaf)[0]

        yield agree(Row(f"torch {name}", ours, whole, "forward and backward", MIXING))


def torch_model_rows() -> Iterator[Row]:
    """Elements of well-known models with random weights, at the size of a photograph, a second of sound and a page."""
    import torch
    from torch import nn
    from torch.nn.functional import relu

    torch.manual_seed(0)

    def conv(before: int, after: int, size: int = 3, **options: Any) -> Any:
        return nn.Conv2d(before, after, size, padding=size // 2, **options)

    widths = [(3, 64), (64, 64), None, (64, 128), (128, 128), None, (128, 256), (256, 256), (256, 256), None]
    vgg = nn.Sequential(
        *[m for pair in widths for m in ([nn.MaxPool2d(2)] if pair is None else [conv(*pair), nn.ReLU()])]
    )

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = (nn.Sequential(conv(64, 64, bias=False), nn.BatchNorm2d(64)) for _ in range(2))

        def forward(self, x: Any) -> Any:
            return relu(self.b(relu(self.a(x))) + x)

    stem = [conv(3, 64, 7, stride=2, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    resnet = nn.Sequential(*stem, Residual(), Residual()).eval()

    class UNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down = nn.ModuleList([conv(3, 16), conv(16, 32), conv(32, 64)])
            self.up = nn.ModuleList([nn.ConvTranspose2d(64, 32, 2, 2), nn.ConvTranspose2d(32, 16, 2, 2)])
            self.join = nn.ModuleList([conv(64, 32), conv(32, 16)])

        def forward(self, x: Any) -> Any:
            skips: list[Any] = []
            for layer in self.down:
                x = relu(layer(nn.functional.max_pool2d(x, 2) if skips else x))
                skips.append(x)
            for up, join, skip in zip(self.up, self.join, skips[-2::-1], strict=True):
                x = relu(join(torch.cat([skip, up(x)], 1)))
            return x

    class WaveNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Conv1d(16, 32, 2, dilation=2**i) for i in range(8)])

        def forward(self, x: Any) -> Any:
            for i, layer in enumerate(self.layers):
                a, b = layer(nn.functional.pad(x, (2**i, 0))).chunk(2, 1)
                x = x + torch.tanh(a) * torch.sigmoid(b)
            return x

    image = torch.randn(1, 3, SIDE, SIDE)
    yield from _torch_pair("torch VGG16 features.16", vgg, image, [(0, 3, 32, 32), (0, 7, 20, 40)], None, 1 / 60)
    yield from _torch_pair("torch ResNet18 layer1", resnet, image, [(0, 3, 64, 64), (0, 7, 40, 90)], 1 / 6, 1 / 20)
    yield from _torch_pair("torch U-Net", UNet(), image, [(0, 3, 256, 256), (0, 7, 100, 300)], 1 / 6, 1 / 15)
    sound = torch.randn(1, 16, 65_536)
    places = [(0, 3, 32_768), (0, 5, 60_000)]
    yield from _torch_pair("torch WaveNet, 65536 steps", WaveNet(), sound, places, None, 1 / 20)
    from transformers import GPT2Config, GPT2Model

    config: Any = GPT2Config()
    config._attn_implementation = "sdpa"  # which mypy does not know as an argument
    gpt = GPT2Model(config).eval()
    page = torch.randn(1, 512, 768)
    run = lambda x: gpt(inputs_embeds=x, use_cache=False).last_hidden_state  # noqa: E731
    places = [(0, 8, 5), (0, 8, 600)]
    yield from _torch_pair("torch GPT-2, 512 tokens, position 8", run, page, places, None, 1 / 5)


def jax_rows() -> Iterator[Row]:
    import jax
    import jax.numpy as jnp

    keys = jax.random.split(jax.random.key(0), 7)
    weights = [jax.random.normal(keys[i], (16, 16 if i else 3, 3, 3)) * 0.1 for i in range(6)]
    x = jax.random.normal(keys[6], (1, 3, SIDE, SIDE))

    def model(x: Any) -> Any:
        for weight in weights:
            x = jax.nn.elu(jax.lax.conv_general_dilated(x, weight, (1, 1), "SAME"))
        return x

    sweep = jax.jit(lambda x, i: jax.vjp(lambda x: model(x)[0, 3, i, i], x)[1](jnp.ones(()))[0])

    ours, plain = cycle([SIDE // 2, SIDE // 3]), cycle([SIDE // 2, SIDE // 3])

    def other() -> Any:
        at = next(ours)
        return eg.grad(model, x, of=eg.at("output")[0, 3, at, at]).block_until_ready()

    def whole() -> Any:
        return sweep(x, next(plain)).block_until_ready()

    eg.grad(model, x, of="output[0, 3, 7, 9]")  # compiled for another element
    name = f"jax six convolutions, {SIDE} pixels, another element"
    yield agree(Row(name, other, whole, "jitted jax.vjp", JAX_OTHER, repeats=5))


def tensorflow_rows() -> Iterator[Row]:
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(0)
    layers = [keras.layers.Conv2D(16, 3, padding="same", activation="elu") for _ in range(6)]
    model = keras.Sequential([keras.layers.Input((SIDE, SIDE, 3)), *layers])
    x, place = tf.random.normal((1, SIDE, SIDE, 3)), (0, SIDE // 2, SIDE // 2, 3)
    jacobian = eg.jacobian(model, x, cone=True)

    @tf.function
    def compiled(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = model(x)[place]
        return tape.gradient(y, x)

    elsewhere = cycle([place, (0, SIDE // 3, SIDE // 4, 5)])

    def other() -> Any:
        return jacobian[next(elsewhere), :]

    def first() -> Any:
        return eg.grad(model, x, of=eg.at("output")[place])

    def whole() -> Any:
        return compiled(x)

    name, peer = f"tensorflow six convolutions, {SIDE} pixels", "tf.function of forward and backward"
    yield agree(Row(f"{name}, first element", first, whole, peer, FIRST_OF_GRAPH, repeats=5))
    yield agree(Row(f"{name}, another element", other, whole, peer, OTHER_OF_GRAPH, repeats=5))


SUITES = {
    "cone-torch": torch_rows,
    "cone-models": torch_model_rows,
    "cone-tensorflow": tensorflow_rows,
    "cone-jax": jax_rows,
}
