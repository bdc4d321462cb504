"""PyTorch programs without a gradient, as people post them. The line that breaks the path is marked."""

import warnings

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.support.programs_broken import Table

BROKEN = Table()
X = torch.tensor([[0.5, -1.0, 2.0], [1.5, 0.3, -0.7]])


@BROKEN.says("unconnected", "detached", wrt="x")
def features_that_are_detached():
    body, head = nn.Linear(3, 4), nn.Linear(4, 1)

    def f(x):
        features = torch.tanh(body(x))
        features = features.detach()  # <- here
        return head(features).sum()

    return f, X


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(3, 4)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h)


class Block(nn.Module):
    cut = False

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, h):
        if self.cut:
            h = h.data
        return torch.tanh(self.linear(h))


@BROKEN.says("unconnected", "detached", of="output[0, 0]", wrt="embed.weight")
def data_in_a_nested_module():
    class Cutting(Block):
        def forward(self, h):
            return torch.tanh(self.linear(h.data))  # <- here

    model = Encoder()
    model.blocks[1] = Cutting()
    return model, X


@BROKEN.says("unconnected", "detached", wrt="w[2]")
def a_parameter_wrapped_again():
    def f(w):
        layer = nn.Linear(3, 1)
        layer.weight = nn.Parameter(w[None])  # <- here
        return layer(X).sum()

    return f, torch.ones(3)


@BROKEN.says("unconnected", "detached", of="output", wrt="x")
def a_copy_by_deepcopy():
    def f(x):
        import copy

        kept = copy.deepcopy(x.detach())  # <- here
        return (kept**2).mean()

    return f, X


@BROKEN.says("unconnected", "no-grad", wrt="x")
def features_without_gradients():
    body, head = nn.Sequential(nn.Linear(3, 4), nn.ReLU()), nn.Linear(4, 1)

    def f(x):
        with torch.no_grad():
            features = torch.cat([x, x], 1)  # <- here
            features = body(features[:, :3])
        return head(features).sum()

    return f, X


@BROKEN.says("unconnected", "no-grad", of="output[0]", wrt="scale")
def a_decorated_helper():
    @torch.no_grad()
    def normalised(x, scale):
        return x / x.norm() * scale  # <- here

    return lambda x, scale: normalised(x, scale).sum(0), X, torch.tensor(2.0)


@BROKEN.says("unconnected", "no-grad", wrt="0.weight[0, 1]")
def an_inference_mode():
    class Net(nn.Sequential):
        def forward(self, x):
            with torch.inference_mode():
                h = self[0](x)  # <- here
            return self[1](h.clone()).sum()

    return Net(nn.Linear(3, 4), nn.Linear(4, 1)), X


@BROKEN.says("unconnected", "no-grad", wrt="lin.weight")
def a_reentrant_checkpoint_without_gradients_at_its_input():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(3, 1)

        def inner(self, x):
            return self.lin(x)  # <- here

        def forward(self, x):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return checkpoint(self.inner, x, use_reentrant=True).sum()

    return Net(), X


@BROKEN.says("unconnected", "left-framework", wrt="x[1, 2]")
def through_numpy():
    def f(x):
        import numpy as np

        y = np.tanh(x.numpy())  # <- here
        return torch.from_numpy(y).sum()

    return f, X


@BROKEN.says("unconnected", "left-framework", wrt="x")
def a_sum_of_items():
    def f(x):
        total = 0.0
        for row in x:
            total += (row**2).sum().item()  # <- here
        return torch.tensor(total, requires_grad=True)

    return f, X


@BROKEN.says("unconnected", "left-framework", wrt="x")
def a_tensor_of_tensors():
    def f(x):
        losses = [(row**2).sum() for row in x]
        return torch.tensor(losses).mean()  # <- here

    return f, X


@BROKEN.says("unconnected", "left-framework", of="output[1]", wrt="x")
def a_list_and_back():
    def f(x):
        rows = (2 * x).tolist()  # <- here
        return torch.tensor(rows)[0]

    return f, X


@BROKEN.says("unconnected", "left-framework", wrt="temperature")
def a_python_float():
    def f(x, temperature):
        t = float(temperature)  # <- here
        return F.softmax(x / t, -1)[0, 0]

    return f, X, torch.tensor(2.0)


@BROKEN.says("unconnected", "discrete", wrt="x")
def accuracy_as_a_loss():
    labels = torch.tensor([0, 1])

    def f(x):
        predicted = x.argmax(-1)  # <- here
        return (predicted == labels).float().mean()

    return f, X


@BROKEN.says("unconnected", "discrete", wrt="logits[0, 1]")
def a_row_chosen_by_argmax():
    table = torch.randn(3, 4)

    def f(logits):
        best = torch.argmax(logits, 1)  # <- here
        return table[best].sum()

    return f, X


@BROKEN.says("unconnected", "discrete", wrt="x")
def a_threshold():
    def f(x):
        mask = (x > 0.4).float()  # <- here
        return mask.mean()

    return f, X


@BROKEN.says("unconnected", "discrete", wrt="x")
def a_cast_to_integers():
    def f(x):
        pixels = (x * 255).long()  # <- here
        return pixels.float().sum() / 255

    return f, X


@BROKEN.says("unconnected", "discrete", wrt="x")
def a_sampled_token():
    def f(x):
        token = torch.multinomial(x.softmax(-1), 1)  # <- here
        return (torch.arange(3.0)[token] ** 2).sum()

    return f, X


@BROKEN.says("unconnected", "discrete", wrt="x")
def a_branch_of_python():
    def f(x):
        if x.sum() > 0:  # <- here
            return torch.ones(2).sum()
        return torch.zeros(2).sum()

    return f, X
