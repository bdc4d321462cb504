"""What interrupts of verbs on PyTorch are tried with, and everything of PyTorch's that they might leave changed."""

import copy
import sys
import warnings

import torch
import torch._dynamo
import torch.utils.checkpoint
from torch import nn
from torch.nn.modules import module as modules
from torch.optim import Optimizer

import elementgrad as eg
from elementgrad._backends.torch.isolate import ambient_state

NAME = "torch"
X = torch.tensor([[0.1, 0.2, 0.3], [0.7, -0.4, 0.9]])
PLACES = ["0.weight[0, 1]", "5.bias"]


class Recomputed(nn.Module):
    """A layer whose activations are computed again on the way back."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)


def model():
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), Recomputed(), nn.Tanh(), nn.Linear(4, 3))
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
            torch.Tensor._make_subclass,
        ],
        "random": torch.get_rng_state().numpy().tobytes(),
        "kernels": [getattr(torch.backends.cuda, f"{kind}_sdp_enabled")() for kind in ("flash", "math")],
        "stance": torch._dynamo.eval_frame._stance.stance,
        "warnings": list(warnings.filters),
    }


def same(left, right):
    return torch.equal(left, right) if isinstance(left, torch.Tensor) else str(left) == str(right)


def recorded(model):
    x = X.clone()
    with eg.record(x) as rec:
        x[0] = 2 * x[1]
        y = model[5](torch.tanh(model[0](x)))
    return rec.grad(eg.at(y)[0, 0], eg.at(x)[1])


def step(model):
    model = copy.deepcopy(model).eval()
    return eg.explain(lambda: model(X).sum().backward(), wrt=model[5].weight).verdict


READS = {
    "grad": lambda model: eg.grad(model, X, of="output[0, 0]"),
    "parameter": lambda model: eg.grad(model, X, of="output[0, 0]", wrt="0.weight[1]"),
    "activation": lambda model: eg.grad(model, X, of="4[0, 0]", wrt="1"),
    "columns": lambda model: eg.jacobian(model, X)[:, (0, ...)],
    "column": lambda model: eg.jacobian(model, X)[:, (0, 1)],
    "hessian": lambda model: eg.hessian(model, X, of="output[0, 0]")[(0, 0), (1, 1)],
    "sparse": lambda model: eg.jacobian(lambda x: model[5](torch.tanh(model[0](x))), X).sparse().to_dense(),
    "contributions": lambda model: eg.contributions(model, X, of="output[0, 0]", wrt="0.weight[0, 1]").total,
    "names": lambda model: eg.names(model, X),
    "top": lambda model: eg.top(model, lambda model: model(X).sum(), 3),
    "record": recorded,
    "explain": lambda model: eg.explain(model, X, of="output[0, 0]", wrt="0.weight[1, 1]").verdict,
    "explain-cut": lambda model: eg.explain(lambda x: model(x.detach()), X, of="output[0, 0]").verdict,
    "explain-step": step,
    "check": lambda model: eg.check(model, X, of="output[0, 0]", wrt="5.weight[0, 0:2]").verdict,
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
