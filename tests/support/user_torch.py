"""A user of PyTorch: a model, an argument, the verbs, and everything that these might leave changed."""

import copy
import sys
import warnings
from contextlib import contextmanager
from functools import partial
from operator import getitem

import pytest
import torch
import torch._dynamo
import torch.utils.checkpoint
from torch import nn
from torch.nn.modules import module as modules
from torch.optim import Optimizer

import elementgrad as eg
from elementgrad._backends.torch.isolate import ambient_state
from elementgrad._explore.messages import parse_message
from elementgrad._explore.session import Session
from tests.support.ranked import HOW
from tests.support.user import JACOBIAN_READS, Failing, at_once, of_jacobian

NAME = "torch"
X = torch.tensor([[0.1, 0.2, 0.3], [0.7, -0.4, 0.9]])
PLACES = ["0.weight[0, 1]", "0.weight[2]", "5.bias"]


class Recomputed(nn.Module):
    """A layer whose activations are computed again on the way back."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)


class Fragile(nn.Module):
    """Passes on what it is given; its derivative raises what the user has put there."""

    def __init__(self, user):
        super().__init__()
        self.user = [user]

    def forward(self, x):
        return FragileFunction.apply(x, self.user[0])


class FragileFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, user):
        ctx.user = user
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        ctx.user.reach("on the way back")
        return gradient, None


def model(third=None):
    torch.manual_seed(0)
    made = nn.Sequential(
        nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), third or Recomputed(), nn.Tanh(), nn.Linear(4, 3)
    )
    made[0].weight.requires_grad_(False)
    made[5].weight.grad = torch.full((3, 4), 7.0)
    return made


def bits(x):
    return None if x is None else (x.dtype, x.detach().clone().numpy().tobytes())


def described(model):
    """Everything of a model that a verb might change."""
    found = []
    for name, module in model.named_modules():
        held = module.__dict__
        found.append((name, type(module), sorted(held), module.training))
        for kind in ("_parameters", "_buffers"):
            found += [(kind, key, id(x), type(x), bits(x)) for key, x in held[kind].items()]
        found += [(key, x.requires_grad, bits(x.grad)) for key, x in held["_parameters"].items() if x is not None]
        found += [(key, len(held[key] or ())) for key in sorted(held) if key.endswith("hooks")]
    return found


def surroundings():
    """Everything of PyTorch and Python that a verb might change."""
    checkpoint = torch.utils.checkpoint
    return {
        "modes": ambient_state(),
        "hooks": [(name, len(value)) for name, value in sorted(vars(modules).items()) if name.endswith("_hooks")],
        "steps": len(sys.modules[Optimizer.__module__]._global_optimizer_post_hooks),
        "replaced": [
            checkpoint.CheckpointFunction,
            checkpoint._checkpoint_without_reentrant_generator,
            torch._functorch.vmap._add_batch_dim,
            torch._functorch.eager_transforms._wrap_for_grad,
            vars(torch.autograd.function._SingleLevelFunction).get("apply"),
            torch.Tensor.numpy,
            nn.utils.clip_grad._get_total_norm,
            torch.amp.GradScaler.step,
            torch.Tensor._make_subclass,
        ],
        "random": torch.get_rng_state().numpy().tobytes(),
        "threads": torch._C._is_multithreading_enabled(),
        "defaults": (torch.get_default_dtype(), torch.empty(0).device),
        "ways out of a tensor": [vars(torch.Tensor).get(key) for key in ("tolist", "__array__", "__dlpack__")],
        "kernels": [getattr(torch.backends.cuda, f"{kind}_sdp_enabled")() for kind in ("flash", "math")],
        "stance": torch._dynamo.eval_frame._stance.stance,
        "warnings": list(warnings.filters),
    }


def same(left, right):
    return torch.equal(left, right) if isinstance(left, torch.Tensor) else str(left) == str(right)


def recorded(model, x=X):
    x = x.detach().clone()
    with eg.record(x) as rec:
        x[0] = 2 * x[1]
        y = model[5](torch.tanh(model[0](x)))
    return rec.grad(eg.at(y)[0, 0], eg.at(x)[1])


def step(model, x=X):
    model, x = copy.deepcopy(model).eval(), x.detach()
    return eg.explain(lambda: model(x).sum().backward(), wrt=model[5].weight).verdict


def plain(model):
    return lambda x: model[5](torch.tanh(model[0](x)))


def explored(model, x=X):
    session = Session(model, [x])
    of = {"tensor": [row.kind for row in session.names].index("output"), "index": [0, 0]}
    return session.view(parse_message({"ask": "view", "tensor": 0, "of": of}))["gradient"]


@contextmanager
def taken_back(model):
    """Give back what a training step changes by itself: buffers, gradients and random numbers."""
    buffers, random = [(b, b.clone()) for b in model.buffers()], torch.get_rng_state()
    gradients = [(p, p.grad) for p in model.parameters()]
    try:
        for p, _ in gradients:
            p.grad = None
        yield
    finally:
        torch.set_rng_state(random)
        for buffer, old in buffers:
            buffer.copy_(old)
        for p, old in gradients:
            p.grad = old


def watched(model, x=X, factor=1.0):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    rules = {"5.weight": lambda g: False, "4": lambda g: False}
    with taken_back(model):
        try:
            with eg.watch(model, optimizer, capture=None, when=rules):
                (model(x) * factor).sum().backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
        except eg.WatchError as error:
            return str(error)


READS = {
    "grad": lambda model, x=X: eg.grad(model, x, of="output[0, 0]"),
    "parameter": lambda model, x=X: eg.grad(model, x, of="output[0, 0]", wrt="0.weight[1]"),
    "activation": lambda model, x=X: eg.grad(model, x, of="4[0, 0]", wrt="1"),
    "cone": lambda model, x=X: eg.grad(model, x, of="output[0, 0]", cone=True),
    "value": lambda model, x=X: eg.value(model, x, of="output[0, 0]"),
    "field": lambda model, x=X: eg.field(model, x, of="output[0, 0]"),
    "columns": lambda model, x=X: eg.jacobian(model, x)[:, (0, ...)],
    "column": lambda model, x=X: eg.jacobian(model, x)[:, (0, 1)],
    "hessian": lambda model, x=X: eg.hessian(model, x, of="output[0, 0]")[(0, 0), (1, 1)],
    "sparse": lambda model, x=X: eg.jacobian(plain(model), x).sparse().to_dense(),
    "contributions": lambda model, x=X: eg.contributions(model, x, of="output[0, 0]", wrt="0.weight[0, 1]").total,
    "names": lambda model, x=X: eg.names(model, x),
    "top": lambda model, x=X: eg.top(model, lambda model: model(x).sum(), 3),
    "audit": lambda model, x=X: eg.audit(model, lambda model: model(x).square().sum()),
    "audit-cut": lambda model, x=X: eg.audit(model, lambda model: model[3:](model[:3](x).detach()).square().sum()),
    "audit-step": lambda model, x=X: eg.audit(model, lambda: model(x).square().sum().backward()),
    "record": recorded,
    "explain": lambda model, x=X: eg.explain(model, x, of="output[0, 0]", wrt="0.weight[1, 1]").verdict,
    "explain-cut": lambda model, x=X: eg.explain(lambda x: model(x.detach()), x, of="output[0, 0]").verdict,
    "explain-step": step,
    "check": lambda model, x=X: eg.check(model, x, of="output[0, 0]", wrt="5.weight[0, 0:2]").verdict,
    "watch": watched,
    "watch-fault": partial(watched, factor=float("inf")),
    "explore": explored,
}
"""Calls that the tests of interrupts make as well."""


ONLY_INTERRUPTED = ("columns", "column", "cone", "field", "watch", "watch-fault")


class User(Failing):
    """A model and an argument with a sign on every side, that shows whether a verb has touched it."""

    def __init__(self, fragile=False):
        super().__init__()
        self.model, self.x, self.fired = model(Fragile(self) if fragile else None), X.clone().requires_grad_(), []
        self.model[4].eval()
        self.model.register_buffer("shared", self.model[1].running_mean)
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, 7.0)
        self.x.register_hook(lambda g: self.fired.append("argument"))
        self.model[5].weight.register_hook(lambda g: self.fired.append("parameter"))
        self.model[5].weight.register_post_accumulate_grad_hook(lambda p: self.fired.append("accumulated"))
        self.model[5].register_full_backward_hook(lambda *_: None)
        self.model[1].register_forward_hook(lambda *_: None)
        self.model[4].register_forward_pre_hook(lambda *_: self.reach("at once"))

    def state(self):
        x, model = self.x, self.model
        return {
            "model": described(model),
            "versions": [t._version for t in [*model.parameters(), *model.buffers()]],
            "argument": (x.tolist(), x._version, x.grad, x.is_leaf, x.requires_grad, len(x._backward_hooks)),
            "fired hooks": list(self.fired),
            **surroundings(),
        }

    def losses(self, kind):
        """Return a function of a model with one or more losses, which turns what it can turn on the way."""

        def several(vector):
            yield vector.sum()
            self.reach("half-way")

        def losses(model):
            vector = model(self.x.detach()).square().sum(1)
            model.eval()
            model.zero_grad()
            torch.rand(3)
            if kind == "generator":
                return several(vector)
            self.reach("half-way")
            return vector.sum() if kind == "number" else vector

        return losses

    def drawing(self, through=torch.tanh):
        def f(x):
            return (self.model(through(x)) * torch.rand(3)).sum()

        return f

    def block(self, recording):
        with recording as rec:
            y = (self.x**3).sum() * self.model[5].weight.sum()
            rec.grad(y, self.x)
            self.reach("at once")
        return rec.grad(y, self.x), rec.jacobian(y, self.x).dense(), rec.contributions(y, self.x).total


def unpatterned(user):
    with pytest.raises(eg.PatternError):
        eg.jacobian(lambda x: user.model(x) * x.sum().item(), user.x).pattern()


VERBS = {
    **{f"jacobian: {name}": of_jacobian(read) for name, read in JACOBIAN_READS.items()},
    # There is no cone of a model that has backward hooks, as this one has, and a watched step trains it.
    **{name: at_once(read) for name, read in READS.items() if name not in ONLY_INTERRUPTED},
    **{
        f"top: {by} of a {kind}": lambda user, by=by, kind=kind: lambda: eg.top(user.model, user.losses(kind), 5, by)
        for by in HOW
        for kind in ("number", "vector", "generator")
    },
    "hessian: row": lambda user: partial(getitem, eg.hessian(user.drawing(), user.x), ((0, 0), ...)),
    "hessian: column": lambda user: partial(getitem, eg.hessian(user.drawing(), user.x), (..., (0, 1))),
    "hessian: diagonal": lambda user: eg.hessian(user.drawing(), user.x).diagonal,
    "activation and parameter": lambda user: (
        lambda: eg.jacobian(user.model, user.x, of="output", wrt=["1", "0.weight", "input"])[0].dense()
    ),
    "pattern": lambda user: lambda: eg.jacobian(user.model, user.x).pattern(),
    "prepare": lambda user: lambda: eg.jacobian(user.model, user.x).prepare()(user.x),
    "record a block": lambda user: lambda: user.block(eg.record(user.x, user.model[5].weight)),
    "no pattern": lambda user: lambda: unpatterned(user),
    **{
        f"explain: {fault.__name__}": lambda user, fault=fault: lambda: eg.explain(user.drawing(fault), user.x).verdict
        for fault in (torch.relu, torch.detach, torch.sqrt, torch.tanh)
    },
}


def loss(model):
    return model(X).sum()


def trains(elements, model):
    """Hear losses, one for each place."""
    total = loss(model)
    elements.backward(dict.fromkeys(elements, total))
    return [None if leaf.grad is None else leaf.grad.clone() for leaf in elements.parameters()]


def change(elements):
    with torch.no_grad():
        for leaf in elements.parameters():
            leaf += 1
