"""PyTorch programs with nothing wrong, some of which look as if there were."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.support.programs_broken import Table

HEALTHY = Table()
X = torch.tensor([[0.5, -1.0, 2.0], [1.5, 0.3, -0.7]])
Y = torch.tensor([0, 1])
healthy = HEALTHY.says("flows")


@healthy
def a_square():
    return lambda x: (x**2).sum(), X


@HEALTHY.says("flows", of="output[0, 1]", wrt="0.weight[1, 2]")
def a_network():
    return nn.Sequential(nn.Linear(3, 8), nn.GELU(), nn.Linear(8, 2)), X


@HEALTHY.says("flows", wrt="x[0, 0]")
def a_live_unit_of_a_relu():
    return lambda x: torch.relu(x).sum(), X


@HEALTHY.says("flows", wrt="x[0]")
def an_element_by_index():
    return lambda x: x[0] * 3, torch.ones(3)


@HEALTHY.says("flows", wrt="x[0]")
def an_element_by_gather():
    return lambda x: x.gather(0, torch.tensor([0])).sum(), torch.ones(3)


@HEALTHY.says("flows", wrt="x[0]")
def an_element_by_a_mask():
    return lambda x: x[torch.tensor([True, False, False])].sum(), torch.ones(3)


@HEALTHY.says("flows", wrt="x")
def a_detach_beside_a_path():
    return lambda x: (x * x.detach()).sum(), X


@HEALTHY.says("flows", wrt="x")
def straight_through():
    return lambda x: (x + (x.round() - x).detach()).pow(2).sum(), X


@HEALTHY.says("flows", wrt="x")
def metrics_that_leave():
    def f(x):
        h = torch.tanh(x)
        assert h.mean().item() < 2
        h.detach().numpy()
        (h > 0).float().mean().tolist()
        return h.sum()

    return f, X


@HEALTHY.says("flows", wrt="x")
def a_branch_by_value():
    return lambda x: (x * 2 if x.sum() > 0 else x * 3).sum(), X


@HEALTHY.says("flows", wrt="x")
def writes_in_place():
    def f(x):
        out = torch.zeros(4, 3)
        out[:2] = x * 2
        out[2:] += x
        out.mul_(3)
        return out.sum()

    return f, X


@HEALTHY.says("flows", wrt="x")
def a_loop_with_state():
    def f(x):
        h = torch.zeros(3)
        for row in x:
            h = torch.tanh(h + row)
        return h.sum()

    return f, X


@HEALTHY.says("flows", wrt="x")
def a_checkpoint():
    layer = nn.Linear(3, 3)
    return lambda x: checkpoint(layer, x, use_reentrant=False).sum(), X


@HEALTHY.says("flows", wrt="lin.weight")
def a_reentrant_checkpoint():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(3, 1)

        def forward(self, x):
            return checkpoint(self.lin, x.clone().requires_grad_(), use_reentrant=True).sum()

    return Net(), X


@HEALTHY.says("flows", wrt="x")
def a_rule_that_is_right():
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**2

        @staticmethod
        def backward(ctx, g):
            return 2 * ctx.saved_tensors[0] * g

    return lambda x: Square.apply(torch.sin(x)).sum(), X


@HEALTHY.says("flows", wrt="x")
def a_hook_that_looks():
    def f(x):
        h = torch.exp(x)
        h.register_hook(lambda g: None)
        return h.sum()

    return f, X


@HEALTHY.says("flows", wrt="weight[3, 1]")
def a_row_that_is_looked_up():
    return lambda weight: F.embedding(torch.tensor([3, 1]), weight).sum(), torch.ones(5, 2)


@HEALTHY.says("flows", of="output[0, 0]", wrt="0.weight[0, 0]")
def batch_norm():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)), torch.randn(8, 3)


@HEALTHY.says("flows", of="output[0, 1, 2]", wrt="self_attn.in_proj_weight[0, 0]")
def a_transformer_layer():
    return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), torch.randn(2, 4, 8)


@HEALTHY.says("flows", of="output:0[0, 1, 0]", wrt="input[0, 0, 0]")
def a_recurrent_network():
    return nn.LSTM(3, 4, batch_first=True), torch.randn(1, 3, 3)


@HEALTHY.says("flows", wrt="logits")
def cross_entropy():
    return lambda logits: F.cross_entropy(logits, Y), X


@HEALTHY.says("flows", wrt="x")
def a_tiny_gradient():
    return lambda x: 1 + 1e-12 * x.sum(), X


@HEALTHY.says("flows", wrt="scores[1, 1]")
def a_masked_softmax():
    keep = torch.ones(2, 3).tril().bool()
    values = torch.arange(6.0).reshape(3, 2)
    return lambda scores: (scores.masked_fill(~keep, float("-inf")).softmax(-1) @ values).pow(2).sum(), X


@HEALTHY.says("flows", wrt="x")
def a_safe_square_root():
    def f(x):
        ok = x > 0
        return torch.where(ok, torch.sqrt(torch.where(ok, x, 1.0)), x * 0.5).sum()

    return f, torch.tensor([0.0, 4.0])


@HEALTHY.says("flows", wrt="x")
def a_gradient_penalty():
    def f(x):
        (g,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
        return g.norm()

    return f, X


@healthy
def a_step():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())

    def step():
        optimizer.zero_grad()
        F.cross_entropy(model(X), Y).backward()
        optimizer.step()

    return step


@healthy
def live_tensors():
    x = torch.ones(3, requires_grad=True)
    return {"of": (x**2).sum(), "wrt": x}


@healthy
def a_live_tensor_after_one_backward():
    x = torch.ones(3, requires_grad=True)
    loss = (x**2).sum()
    loss.backward()
    return {"of": loss, "wrt": x}


@healthy
def half_precision():
    return lambda x: (x.half() ** 2).sum().float(), X


@HEALTHY.says("flows", wrt="x")
def mixed_precision():
    layer = nn.Linear(3, 2)

    def f(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return layer(x).float().sum()

    return f, X


@HEALTHY.says("flows", wrt="student.weight[0, 0]")
def a_teacher_that_follows():
    class Taught(nn.Module):
        def __init__(self):
            super().__init__()
            self.student, self.teacher = nn.Linear(3, 2), nn.Linear(3, 2)

        def forward(self, x):
            with torch.no_grad():
                for old, new in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                    old.mul_(0.9).add_(0.1 * new)
                aim = self.teacher(x)
            return F.mse_loss(self.student(x), aim)

    return Taught(), X


@HEALTHY.says("flows", wrt="x[0, 0]")
def writes_in_place_that_are_seen():
    def f(x):
        h = x * 2
        h[0].mul_(3)
        h[1:].add_(x[1:])
        with torch.no_grad():
            scale = h.clone().abs_().max()
        return (h.relu_() / scale).sum()

    return f, X


@healthy
def leaves_made_in_a_step():
    def step():
        w = torch.tensor([1.0, 2.0], requires_grad=True)
        optimizer = torch.optim.SGD([w], lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            (w**2).sum().backward()
            optimizer.step()

    return step


@HEALTHY.says("flows", wrt="x[1]")
def numpy_that_only_reads():
    def f(x):
        h = x * 2
        numbers = h.detach().numpy()
        h.add_(1)
        return (h * h / float(numbers[0])).sum()

    return f, torch.tensor([1.0, 2.0])
