"""PyTorch models with losses to rank their elements by, and what plain autograd says of them."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from elementgrad._backends.torch import top as scores
from tests.support.ranked import Ranked


def mlp():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x, y = torch.randn(6, 5).double(), torch.tensor([0, 1, 2, 0, 1, 2])
    return model, lambda model: cross_entropy(model(x), y, reduction="none")


def conv():
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(12, 3)
    ).double()
    model[0].to(memory_format=torch.channels_last)  # positions count in the order of the axes all the same
    x, y = torch.randn(4, 2, 4, 4).double(), torch.tensor([0, 1, 2, 0])

    def loss_fn(model):
        torch.manual_seed(3)
        return cross_entropy(model(x), y, reduction="none")

    return model, loss_fn


def gru():
    torch.manual_seed(2)
    model = nn.ModuleDict({"rnn": nn.GRU(2, 3, num_layers=2, bidirectional=True), "head": nn.Linear(6, 2)}).double()
    x = torch.randn(4, 3, 2).double()
    return model, lambda model: model["head"](model["rnn"](x)[0][-1]).square().sum(1)


def gpt2():
    transformers = pytest.importorskip("transformers", reason="Hugging Face's models come with the newest packages")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2, n_embd=8, n_head=2, vocab_size=11, n_positions=8, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config).double().eval()
    ids = torch.tensor([[3, 1, 4, 1, 5], [2, 7, 1, 8, 2]])
    return model, lambda model: [model(row[None], labels=row[None]).loss for row in ids]


def frozen():
    model, loss_fn = mlp()
    model[0].requires_grad_(False)
    return model, loss_fn


def bf16():
    model, _ = mlp()
    x, y = torch.randn(6, 5).bfloat16(), torch.tensor([0, 1, 2, 0, 1, 2])
    return model.bfloat16(), lambda model: cross_entropy(model(x).float(), y)


class Sparse(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.table = nn.Embedding(9, 3, **options)
        self.scale = nn.Parameter(torch.tensor(3.0))
        self.steps = nn.Parameter(torch.tensor(3), requires_grad=False)
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.other = nn.Linear(3, 3)  # which nobody calls

    def forward(self, ids):
        return self.table(ids).sum(-1) * self.scale + self.empty.sum()


def sparse():
    torch.manual_seed(4)
    return Sparse(sparse=True).double(), lambda model: model(torch.tensor([1, 1, 4])).square()


def renormed():
    torch.manual_seed(4)
    return Sparse(max_norm=0.1).double(), lambda model: model(torch.tensor([1, 1, 4])).square()


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh())
        self.head = nn.Linear(4, 2)
        self.reentrant = reentrant

    def forward(self, x):
        return self.head(checkpoint(self.block, x, use_reentrant=self.reentrant))


def checkpointed(reentrant):
    torch.manual_seed(5)
    x = torch.randn(3, 4).double().requires_grad_()
    return Checkpointed(reentrant).double(), lambda model: model(x).square().sum(1)


MODELS = {
    "mlp": mlp,
    "conv": conv,
    "gru": gru,
    "gpt2": gpt2,
    "frozen": frozen,
    "bf16": bf16,
    "sparse": sparse,
    "renormed": renormed,
    "checkpoint": lambda: checkpointed(False),
}


class RankedTorch(Ranked):
    """PyTorch."""

    pieces = scores.TopBackend
    models = MODELS

    def parameters(self, model):
        return {name: p.detach().to(torch.float64).numpy() for name, p in model.named_parameters()}

    def tensors(self, model):
        return dict(model.named_parameters())

    def dense(self, model, loss_fn, by):
        model = copy.deepcopy(model)
        floating = [(name, p.requires_grad_()) for name, p in model.named_parameters() if p.is_floating_point()]
        names, parameters = zip(*floating, strict=True)
        returned = loss_fn(model)
        losses = [returned] if isinstance(returned, torch.Tensor) else list(returned)
        numbers = [number for loss in losses for number in loss.reshape(-1)]
        numbers = numbers if by == "fisher" else [sum(numbers)]
        scores: dict = {}
        for number in numbers:
            gradients = torch.autograd.grad(number, parameters, retain_graph=True, allow_unused=True)
            for name, gradient in zip(names, gradients, strict=True):
                if gradient is not None:
                    size = gradient.to_dense().double().abs().numpy()
                    scores[name] = scores.get(name, 0) + (size**2 if by == "fisher" else size)
        return {name: scores[name] for name in names if name in scores}

    def chain(self, kernels, biases, frozen, tied):
        layers = [nn.Linear(*kernel.shape, bias=b is not None) for kernel, b in zip(kernels, biases, strict=True)]
        model = nn.Sequential(*[part for layer in layers for part in (layer, nn.ReLU())]).double()
        for layer, kernel, bias in zip(layers, kernels, biases, strict=True):
            layer.weight.data = torch.tensor(kernel.T.copy())
            if bias is not None:
                layer.bias.data = torch.tensor(bias)
        if tied:
            layers[-1].weight = layers[0].weight
        layers[0].requires_grad_(not frozen)
        return model

    def tensor(self, array):
        return torch.tensor(array)

    def sums(self, y):
        return y.sum(-1)

    def copied(self, model):
        return copy.deepcopy(model)

    def assign(self, model, values):
        with torch.no_grad():
            for name, value in values.items():
                model.get_parameter(name).copy_(torch.tensor(value))
