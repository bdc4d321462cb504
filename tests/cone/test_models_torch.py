"""Cones of whole models at corners, borders and centres, against the plain way, in float64."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import elementgrad as eg
from tests.support.positions import typical_positions

Tensor = torch.Tensor


class Residual(nn.Module):
    def __init__(self, channels: int, stride: int = 1):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, stride, 1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        self.skip = nn.Conv2d(channels, channels, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.elu(self.conv2(F.elu(self.norm(self.conv1(x)), inplace=True)) + self.skip(x))


class UNet(nn.Module):
    def __init__(self, up: nn.Module):
        super().__init__()
        self.first = nn.Conv2d(3, 6, 3, padding=1)
        self.second = nn.Conv2d(6, 8, 3, padding=1)
        self.up = up
        self.last = nn.Conv2d(14, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        skip = F.gelu(self.first(x))
        return self.last(torch.cat([skip, self.up(F.silu(self.second(F.max_pool2d(skip, 2))))], 1))


class SqueezeExcite(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.gate = nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.conv(x))
        return h * torch.sigmoid(self.gate(h.mean((2, 3))))[:, :, None, None]


class WaveNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.ModuleList(nn.Conv1d(4, 8, 2, dilation=2**i) for i in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for i, gate in enumerate(self.gates):
            a, b = gate(F.pad(x, (2**i, 0))).chunk(2, 1)
            x = x + torch.tanh(a) * torch.sigmoid(b)
        return x


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.tokens, self.channels = nn.LayerNorm(8), nn.Linear(16, 16), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norm(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(F.gelu(x))


class Square(torch.autograd.Function):
    """A rule of its own that is no derivative."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0] * 7


class SquareAndNone(torch.autograd.Function):
    """A rule of its own that returns something beside its tensor."""

    @staticmethod
    def forward(ctx, x):
        return Square.forward(ctx, x), None

    @staticmethod
    def backward(ctx, gradient, _):
        return Square.backward(ctx, gradient)


def stencil(x: Tensor) -> Tensor:
    for _ in range(8):
        p = F.pad(x[None, None], (1, 1, 1, 1), mode="replicate")[0, 0]
        x = x + 0.1 * (p[2:, 1:-1] + p[:-2, 1:-1] + p[1:-1, 2:] + p[1:-1, :-2] - 4 * x)
    return x


def stencil_in_place(x: Tensor) -> Tensor:
    y = x.clone()
    for _ in range(5):
        y[1:-1, 1:-1] = y[1:-1, 1:-1] + 0.2 * (y[2:, 1:-1] + y[:-2, 1:-1] - 2 * y[1:-1, 1:-1])
    return y


def branches(x: Tensor) -> Tensor:
    return x * 2 if x.mean() > 100 else F.avg_pool2d(x, 3)[:, :, ::2] * x[0, 0, 0, 0]


def without_gradients(x: Tensor) -> Tensor:
    y = x * 2
    with torch.no_grad():
        z = y * 3
    return y * z + x.detach()


def written_without_gradients(x: Tensor) -> Tensor:
    y = x * 2
    with torch.no_grad():
        y.clamp_(-1, 1)
    return y * x


def seeded_inside(x: Tensor) -> Tensor:
    y = F.dropout(x, 0.5)
    torch.manual_seed(3)
    z = F.dropout(x, 0.5)
    torch.manual_seed(3)
    return y + z * F.dropout(x, 0.5)


def recurrent(cell: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: cell(x)[0]


def gpt2(implementation: str) -> Callable[[Tensor], Tensor]:
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 50, "n_positions": 64}
    ends = {"bos_token_id": 0, "eos_token_id": 1}
    config = transformers.GPT2Config(**sizes, **ends, attn_implementation=implementation)
    model = transformers.GPT2LMHeadModel(config).eval()
    return lambda embedded: model(inputs_embeds=embedded, use_cache=False).logits


MODELS: dict[str, tuple[Callable[[], Callable[[Tensor], Tensor]], tuple[int, ...]]] = {
    "convolutional": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ELU(), nn.Conv2d(8, 4, 3)),
        (1, 3, 16, 16),
    ),
    "vgg": (
        lambda: nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.GELU(), nn.MaxPool2d(2), nn.Conv2d(6, 6, 3, padding=1)),
        (2, 3, 20, 20),
    ),
    "resnet": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 7, 2, 3), nn.MaxPool2d(3, 2, 1), Residual(8), Residual(8, 2)).eval(),
        (1, 3, 65, 65),
    ),
    "batch norm in training": (lambda: nn.Sequential(Residual(3), Residual(3)), (2, 3, 9, 9)),
    "u-net, transposed": (lambda: UNet(nn.ConvTranspose2d(8, 8, 2, 2)), (1, 3, 20, 20)),
    "u-net, nearest": (lambda: UNet(nn.Upsample(scale_factor=2)), (1, 3, 20, 20)),
    "u-net, bilinear": (lambda: UNet(nn.Upsample(scale_factor=2, mode="bilinear")), (1, 3, 20, 20)),
    "mobilenet": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1),
            nn.Hardswish(),
            nn.Conv2d(8, 8, 3, 1, 1, groups=8),
            nn.ReLU6(),
            nn.Conv2d(8, 12, 1),
        ),
        (1, 3, 20, 20),
    ),
    "grouped, dilated": (
        lambda: nn.Sequential(
            nn.Conv2d(4, 8, 3, 2, 2, 2, groups=2), nn.ELU(), nn.ConvTranspose2d(8, 4, 4, 2, 1, groups=4)
        ),
        (1, 4, 14, 14),
    ),
    "three dimensions": (
        lambda: nn.Sequential(nn.Conv3d(2, 3, 3, padding=1), nn.ELU(), nn.AvgPool3d(2), nn.Conv3d(3, 2, 2)),
        (1, 2, 8, 8, 8),
    ),
    "squeeze and excite": (SqueezeExcite, (1, 3, 12, 12)),
    "wavenet": (WaveNet, (1, 4, 120)),
    "mixer": (Mixer, (2, 16, 8)),
    "encoder": (
        lambda: nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)),
        (2, 10, 8),
    ),
    "gpt-2": (lambda: gpt2("sdpa"), (1, 20, 16)),
    "gpt-2, eager": (lambda: gpt2("eager"), (1, 20, 16)),
    "lstm": (lambda: recurrent(nn.LSTM(5, 6, batch_first=True)), (1, 12, 5)),
    "gru": (lambda: recurrent(nn.GRU(5, 6, 2, batch_first=True)), (1, 10, 5)),
    "stencil": (lambda: stencil, (24, 24)),
    "stencil in place": (lambda: stencil_in_place, (20, 20)),
    "dropout": (
        lambda: nn.Sequential(nn.Conv2d(3, 6, 3), nn.Dropout(0.3), nn.Dropout2d(0.3), nn.Conv2d(6, 6, 3)),
        (1, 3, 12, 12),
    ),
    "random numbers from a seed inside": (lambda: seeded_inside, (5, 6)),
    "a rule of its own": (lambda: lambda x: F.conv2d(Square.apply(x), torch.ones(1, 1, 3, 3)), (1, 1, 9, 9)),
    "a rule of its own with two results": (lambda: lambda x: SquareAndNone.apply(x)[0] * 2, (6, 5)),
    "branches on values": (lambda: branches, (1, 1, 15, 15)),
    "without gradients": (lambda: without_gradients, (4, 5)),
    "written without gradients": (lambda: written_without_gradients, (4, 5)),
}


@pytest.fixture(autouse=True)
def _float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_by_cones_are_those_of_the_plain_way(name):
    torch.manual_seed(0)
    make, shape = MODELS[name]
    model, x = make(), torch.randn(shape)
    live = 0
    for place in typical_positions(tuple(model(x).shape)):
        of = eg.at("output")[place]
        plain = eg.grad(model, x, of=of, cone=False)
        by_cone = eg.grad(model, x, of=of, cone=True)
        largest = float(plain.abs().max())
        live += largest > 0
        torch.testing.assert_close(by_cone, plain, rtol=1e-10, atol=1e-12 * largest)
        torch.testing.assert_close(eg.value(model, x, of=of, cone=True), eg.value(model, x, of=of, cone=False))
    assert live >= 2


def test_autocast_is_followed():
    torch.set_default_dtype(torch.float32)
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ELU(), nn.Conv2d(4, 4, 3)), torch.randn(1, 3, 14, 14)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        by_cone, plain = (eg.grad(model, x, of="output[0, 1, 3, 3]", cone=cone) for cone in (True, False))
        assert model(x).dtype == torch.bfloat16  # the cache of casts holds nothing of the recording
    torch.testing.assert_close(by_cone, plain, rtol=0.02, atol=1e-4)


@pytest.mark.parametrize("written", ["input", "weight"])
def test_tensors_that_were_changed_after_the_recording_are_refused(written):
    tensors = {"input": torch.ones(3), "weight": torch.ones(3, 3)}
    J = eg.jacobian(lambda x: (tensors["weight"] @ x) ** 2, tensors["input"], cone=True)
    assert J[0, 0] == 6
    tensors[written].mul_(2)
    for read in (lambda: J[0, 0], lambda: J.value):
        with pytest.raises(eg.FrameworkError, match="changed in place since the function was recorded"):
            read()


@pytest.mark.parametrize("options", [(3, 1, 1, 1), (3, 2, 1, 2), (4, 1, 2, 3)])
def test_windows_that_are_infinite_all_over_have_their_maximum_inside(options):
    x = torch.randn(1, 1, 7, 6)
    x[:, :, :3, :4] = -torch.inf
    f = lambda x: nn.functional.max_pool2d(x, *options)  # noqa: E731
    y = f(x)
    for at in ((0, 0), (y.shape[2] - 1, y.shape[3] - 1)):
        of = eg.at("output")[0, 0, at[0], at[1]]
        assert eg.value(f, x, of=of, cone=True) == y[0, 0, at[0], at[1]]
        by_cone, plain = (eg.grad(f, x, of=of, cone=cone) for cone in (True, False))
        torch.testing.assert_close(by_cone, plain, rtol=0, atol=0)
        assert plain.any()
