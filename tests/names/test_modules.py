"""Any tensor of a PyTorch module by its name: every activation as source and as target, parameters, what is refused."""

import pytest
import torch

import elementgrad as eg
from tests.support.torch_models import MODELS, made

Tensor = torch.Tensor


def activations(model, x):
    return [row.name for row in eg.names(model, x) if row.kind == "activation" and row.dtype == "float64"]


def run_by_hand(model, name, x, replacement=None):
    """Run a model by hand: its output, and its value at one name, which may be replaced on its way."""
    path, _, key = name.partition(":")
    path, _, number = path.partition("#")
    calls, seen = [], []

    def swapped(result, keys):
        if keys:
            return tuple(swapped(part, keys[1:]) if i == int(keys[0]) else part for i, part in enumerate(result))
        seen.append(result.clone())
        return result if replacement is None else replacement.clone()

    def hook(module, args, result):
        calls.append(1)
        return swapped(result, key.split(".") if key else []) if len(calls) - 1 == int(number or 0) else None

    with model.get_submodule(path).register_forward_hook(hook):
        returned = model(x)
    return returned["last"] if isinstance(returned, dict) else returned, seen[0]


def by_hand(model, name, x):
    """The Jacobians of a named value with respect to the input, and of the output with respect to the named value."""
    jacobian = torch.autograd.functional.jacobian
    before = jacobian(lambda x: run_by_hand(model, name, x)[1], x)
    value = run_by_hand(model, name, x)[1].detach()
    return before, jacobian(lambda value: run_by_hand(model, name, x, value)[0], value)


OF = {"lstm": "output.last", "gru": "output.last"}
NAMES = [
    pytest.param(model, name, training, id=f"{model} {name}{' in training' if training else ''}")
    for training in (False, True)
    for model in MODELS
    for name in activations(*made(model))
]


def assert_close(given, expected):
    torch.testing.assert_close(given, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("which", "name", "training"), NAMES)
def test_every_activation_is_source_and_target(which, name, training):
    # PyTorch itself differentiates nothing inside a reentrant checkpoint
    hand, x = made("shared" if which == "shared and reentrant" else which, training)
    before, after = by_hand(hand, name, x)
    model, x = made(which, training)
    to = eg.jacobian(model, x, of=name)
    onward = eg.jacobian(model, x, of=OF.get(which, "output"), wrt=name, unconnected="zero")
    assert_close(to.dense(), before)
    assert_close(onward.dense(), after)
    inner = (0,) * (before.dim() - x.dim())
    assert_close(to[:, (0,) * x.dim()], before[(..., *(0,) * x.dim())])
    assert_close(onward[:, inner], after[(..., *inner)])
    outer = (0,) * (after.dim() - len(inner))
    assert_close(onward[outer, inner], after[outer + inner])
