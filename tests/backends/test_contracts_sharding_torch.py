"""Contracts with PyTorch's `fully_shard`, which a new version could change."""

import pytest
import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from elementgrad._backends.torch._compat import fsdp_state

pytestmark = pytest.mark.contract


@pytest.fixture(autouse=True)
def alone():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


class Seen(nn.Linear):
    """Notes what it holds as its weight, and what it is given for it."""

    def forward(self, x):
        self.during = self._parameters["weight"]
        return super().forward(x)

    def __setattr__(self, name, value):
        if name == "weight":
            self.__dict__.setdefault("given", []).append(value)
        super().__setattr__(name, value)


def test_pytorch_gives_modules_the_whole_parameter_by_setattr_and_takes_it_back():
    layer = fully_shard(Seen(3, 2).requires_grad_(False))
    _, (group,) = fsdp_state(layer)
    parameter = group.fsdp_params[0]
    assert parameter.sharded_param is layer.weight
    assert isinstance(layer.weight, DTensor)
    assert parameter.sharded_state.name == "SHARDED"
    layer(torch.ones(1, 3))
    assert parameter.sharded_state.name == "UNSHARDED"
    assert layer.during is parameter.unsharded_param
    layer.reshard()
    assert layer.weight is parameter.sharded_param
    assert any(value is layer.during for value in layer.given)
    assert layer.given[-1] is parameter.sharded_param


def test_pytorch_says_whether_a_sharded_model_synchronises_gradients():
    layer = fully_shard(nn.Linear(3, 2))
    _, (group,) = fsdp_state(layer)
    assert group.reduce_grads
    layer.set_requires_gradient_sync(False)
    assert not group.reduce_grads


def test_pytorch_counts_the_writes_to_a_spread_tensor_and_not_those_to_what_is_here():
    layer = fully_shard(nn.Linear(3, 2))
    before = layer.weight._version
    layer.weight.to_local().detach().zero_()
    assert layer.weight._version == before
    with torch.no_grad():
        layer.weight.add_(1.0)
    assert layer.weight._version > before
    assert layer.weight.full_tensor().eq(1).all()


def test_pytorch_accumulates_into_a_leaf_and_runs_its_hooks_once():
    leaf, heard = nn.Parameter(torch.zeros(2)), []
    leaf.register_hook(lambda gradient: heard.append("hook") or 2 * gradient)
    leaf.register_post_accumulate_grad_hook(
        lambda leaf: torch.autograd.Variable._execution_engine.queue_callback(lambda: heard.append("after"))
    )
    hooks = leaf._backward_hooks
    kept = dict(hooks)
    hooks.clear()
    assert torch.autograd.grad((3 * leaf).sum(), [leaf])[0].tolist() == [3, 3]
    hooks.update(kept)
    torch.autograd.backward([leaf], [torch.ones(2)])
    assert heard == ["hook", "after"]
    assert leaf.grad.tolist() == [2, 2]
