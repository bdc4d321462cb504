"""The mutation study on PyTorch: five kinds of models with random weights, and causes at outputs of modules."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import nn

import elementgrad as eg
from tests.support.mutated import Mutation, Outcome, draw, judge

Tensor = torch.Tensor
Made = tuple[nn.Module, Callable[[nn.Module], Tensor]]
"""A model, and its loss."""


def gpt2() -> Made:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=40, n_positions=16, n_embd=16, n_layer=3, n_head=2)
    ids = torch.randint(40, (3, 9))
    return GPT2LMHeadModel(config), lambda model: model(ids, labels=ids).loss


def bert() -> Made:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=40,
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=16,
    )
    ids, labels = torch.randint(1, 40, (4, 7)), torch.randint(2, (4,))
    return BertForSequenceClassification(config), lambda model: model(ids, labels=labels).loss


class ResidualBlock(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        self.relu = nn.ReLU()
        self.down = nn.Conv2d(inside, outside, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(y)) + self.down(x))


class SmallResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.layer1, self.layer2 = ResidualBlock(8, 8, 1), ResidualBlock(8, 16, 2)
        self.layer3 = ResidualBlock(16, 32, 2)
        self.pool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.pool(self.layer3(self.layer2(self.layer1(self.stem(x))))).flatten(1))


def resnet() -> Made:
    x, y = torch.randn(4, 3, 12, 12), torch.randint(5, (4,))
    return SmallResNet(), lambda model: nn.functional.cross_entropy(model(x), y)


class DoubleConv(nn.Sequential):
    def __init__(self, inside: int, outside: int):
        pair = [nn.Conv2d(inside, outside, 3, padding=1), nn.BatchNorm2d(outside), nn.ReLU()]
        super().__init__(*pair, nn.Conv2d(outside, outside, 3, padding=1), nn.BatchNorm2d(outside), nn.ReLU())


class SmallUNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.bottom = DoubleConv(1, 8), DoubleConv(8, 16), DoubleConv(16, 16)
        self.up2, self.up1 = nn.ConvTranspose2d(16, 16, 2, 2), nn.ConvTranspose2d(16, 8, 2, 2)
        self.join2, self.join1 = DoubleConv(32, 16), DoubleConv(16, 8)
        self.head = nn.Conv2d(8, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        pool = nn.functional.max_pool2d
        a = self.down1(x)
        b = self.down2(pool(a, 2))
        c = self.join2(torch.cat([b, self.up2(self.bottom(pool(b, 2)))], 1))
        return self.head(self.join1(torch.cat([a, self.up1(c)], 1)))


def unet() -> Made:
    x, y = torch.randn(2, 1, 16, 16), torch.rand(2, 1, 16, 16).round()
    return SmallUNet(), lambda model: nn.functional.binary_cross_entropy_with_logits(model(x), y)


class GruTagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 8)
        self.gru = nn.GRU(8, 12, num_layers=2, batch_first=True)
        self.norm, self.head = nn.LayerNorm(12), nn.Linear(12, 4)

    def forward(self, ids: Tensor) -> Tensor:
        states, _ = self.gru(self.embedding(ids))
        return self.head(self.norm(states))


def gru() -> Made:
    ids, y = torch.randint(30, (4, 6)), torch.randint(4, (4, 6))
    return GruTagger(), lambda model: nn.functional.cross_entropy(model(ids).flatten(0, 1), y.flatten())


MODELS = {"gpt2": gpt2, "bert": bert, "resnet": resnet, "unet": unet, "gru": gru}


class ZeroRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return torch.zeros_like(g)


class NoRule(ZeroRule):
    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return None


class WrongRule(ZeroRule):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 1.5 * x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return -0.5 * g


def detach(x: Tensor) -> Tensor:
    return x.detach()


def no_grad(x: Tensor) -> Tensor:
    with torch.no_grad():
        return x * 1.0


def write_data(x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y.data.copy_(x)
    return y


def assign_data(x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y.data = x.data
    return y


def through_numpy(x: Tensor) -> Tensor:
    return torch.from_numpy(x.detach().numpy().copy())


def through_list(x: Tensor) -> Tensor:
    return torch.tensor(x.tolist())


def argmax(x: Tensor) -> Tensor:
    return x.argmax(-1, keepdim=True).expand(x.shape).float()


def compare(x: Tensor) -> Tensor:
    return (x > 0).float()


def cast(x: Tensor) -> Tensor:
    return (10 * x).int().float()


def rounded(x: Tensor) -> Tensor:
    return torch.round(10 * x)


def dead_rectifier(x: Tensor) -> Tensor:
    return torch.relu(x - 1e4)


def dead_bound(x: Tensor) -> Tensor:
    return torch.clamp(x, 1e4, 2e4) * 1e-4


def saturated(x: Tensor) -> Tensor:
    return torch.sigmoid(x + 1e4)


def saturated_tanh(x: Tensor) -> Tensor:
    return torch.tanh(x - 1e4)


def zero_factor(x: Tensor) -> Tensor:
    return x * torch.zeros(x.shape[-1])


def root(x: Tensor) -> Tensor:
    return torch.sqrt(x * 0)


def logarithm(x: Tensor) -> Tensor:
    return torch.log(x - x)


def division(x: Tensor) -> Tensor:
    return x / (x - x.detach())


def masked_division(x: Tensor) -> Tensor:
    return torch.where(x == x, x, x / 0.0 * 0.0)


def unused(x: Tensor) -> Tensor:
    return torch.ones_like(x)


def overwritten(x: Tensor) -> Tensor:
    y = x.clone()
    y[...] = 0.5
    return y


def modified(x: Tensor) -> Tensor:
    y = torch.sigmoid(x)
    z = y * 2
    y.add_(1)
    return z + y


def zero_rule(x: Tensor) -> Tensor:
    return ZeroRule.apply(x)


def no_rule(x: Tensor) -> Tensor:
    return NoRule.apply(x)


def wrong_rule(x: Tensor) -> Tensor:
    return WrongRule.apply(x)


def hooked(x: Tensor) -> Tensor:
    if x.requires_grad:
        x.register_hook(torch.zeros_like)
    return x


def sampled(x: Tensor) -> Tensor:
    return torch.bernoulli(torch.sigmoid(x))


MUTATIONS = [
    Mutation("detach", detach, ["detached"]),
    Mutation("no_grad", no_grad, ["no-grad"]),
    Mutation("write through data", write_data, ["assigned-state", "detached", "modified-through-data"]),
    Mutation("assigned data", assign_data, ["assigned-state", "detached", "modified-through-data"]),
    Mutation("numpy", through_numpy, ["left-framework", "detached"]),
    Mutation("list", through_list, ["left-framework"]),
    Mutation("argmax", argmax, ["discrete"]),
    Mutation("comparison", compare, ["discrete"]),
    Mutation("integer cast", cast, ["discrete"]),
    Mutation("round", rounded, ["step-function"]),
    Mutation("dead rectifier", dead_rectifier, ["dead-relu"]),
    Mutation("dead bound", dead_bound, ["clamped"]),
    Mutation("saturated sigmoid", saturated, ["saturated"]),
    Mutation("saturated tanh", saturated_tanh, ["saturated"]),
    Mutation("zero factor", zero_factor, ["masked"]),
    Mutation("NaN by sqrt", root, ["singular", "masked-branch"]),
    Mutation("NaN by log", logarithm, ["singular", "masked-branch"]),
    Mutation("NaN by division", division, ["singular", "masked-branch"]),
    Mutation("unused", unused, ["unused"], has_line=False),
    Mutation("overwritten", overwritten, ["overwritten"]),
    Mutation("modified in place", modified, ["modified-in-place"]),
    Mutation("rule of zeros", zero_rule, ["custom-rule"]),
    Mutation("rule of None", no_rule, ["custom-rule"]),
    Mutation("wrong rule", wrong_rule, ["custom-rule"], right=lambda x: 1.5 * x),
    Mutation("hook", hooked, ["hook"]),
    Mutation("draw", sampled, ["discrete"]),
]


def gradients_of(model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> dict[str, Tensor | None]:
    trained = {name: x for name, x in model.named_parameters() if x.requires_grad}
    value = loss(model)
    gradients: Any = [None] * len(trained)
    if value.requires_grad:
        with suppress(RuntimeError):  # a write in place to what the gradient needs
            gradients = torch.autograd.grad(value, list(trained.values()), allow_unused=True)
    return dict(zip(trained, gradients, strict=True))


def broken_names(gradients: dict[str, Tensor | None], right: dict[str, Tensor | None]) -> set[str]:
    """Return the parameters that a backward leaves without a usable gradient, or with another than the right one."""
    broken = {name for name, g in gradients.items() if g is None or not g.any() or not g.isfinite().all()}
    return broken | {name for name, g in right.items() if g is not None and not torch.equal(g, gradients[name])}


def floating_modules(model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> list[str]:
    """Return the names of modules that return a tensor that depends on parameters, or have one first."""
    names: list[str] = []

    def note(name: str, _: Any, __: Any, output: Any) -> None:
        x = output[0] if isinstance(output, tuple) else output
        if isinstance(x, Tensor) and x.requires_grad and name not in names:
            names.append(name)

    handles = [module.register_forward_hook(partial(note, name)) for name, module in model.named_modules() if name]
    loss(model)
    for handle in handles:
        handle.remove()
    return names


def mutate(model: nn.Module, name: str, function: Callable[[Tensor], Tensor]) -> Any:
    def change(_: Any, __: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (function(output[0]), *output[1:])
        return function(output)

    return model.get_submodule(name).register_forward_hook(change)


def audited(kind: str, mutation: Mutation, seed: int) -> Outcome:
    """Audit a model with a mutation at a module that the seed draws."""
    torch.manual_seed(seed)
    model, loss = MODELS[kind]()
    model.eval()
    name = draw(f"{seed} {kind} {mutation.name}", floating_modules(model, loss))
    right: dict[str, Tensor | None] = {}
    if mutation.right is not None:
        handle = mutate(model, name, mutation.right)
        right = gradients_of(model, loss)
        handle.remove()
    mutate(model, name, mutation.apply)
    torch.manual_seed(seed)
    truth = broken_names(gradients_of(model, loss), right)
    torch.manual_seed(seed)
    return judge(f"{kind}, {mutation.name} after {name}", mutation, eg.audit(model, loss), truth)


def audit_healthy(kind: str, seed: int) -> eg.Audit:
    torch.manual_seed(seed)
    model, loss = MODELS[kind]()
    model.train(seed % 2 == 0)
    return eg.audit(model, loss)
