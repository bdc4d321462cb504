"""Values where two may write them: the elements, and whoever writes to the parameter."""

import copy
from typing import NamedTuple

import torch
from torch import distributed, nn

import elementgrad as eg


def test_elements_step_from_what_was_written_to_the_parameter_after_the_forward():
    model = nn.Linear(2, 1, bias=False)
    elements = eg.trainable(model, "weight[0, 0]")
    optimizer = torch.optim.SGD(elements.parameters(), lr=0.5)
    model(torch.ones(1, 2)).sum().backward()
    with torch.no_grad():
        model.weight.fill_(5.0)
    optimizer.step()
    assert model.weight.tolist() == [[4.5, 5.0]]


def test_elements_step_from_what_was_written_before_the_model_moved():
    model = nn.Linear(2, 2, bias=False)
    elements = eg.trainable(model, "weight[0]")
    with torch.no_grad():
        model.weight[0] = 7.0
    model.double()
    assert model.weight[0].tolist() == [7.0, 7.0]
    model(torch.ones(1, 2).double()).sum().backward()
    torch.optim.SGD(elements.parameters(), lr=1.0).step()
    assert model.weight[0].tolist() == [6.0, 6.0]


def test_elements_step_from_what_was_written_before_the_model_was_wrapped():
    model = nn.Sequential(nn.Linear(2, 2, bias=False))
    elements = eg.trainable(model, "0.weight[0]")
    with torch.no_grad():
        model[0].weight[0] = 7.0
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        nn.parallel.DistributedDataParallel(model)(torch.ones(1, 2)).sum().backward()
    finally:
        distributed.destroy_process_group()
    torch.optim.SGD(elements.parameters(), lr=1.0).step()
    assert model[0].weight[0].tolist() == [6.0, 6.0]


def test_half_precision_normalises_in_float32_as_the_layer_does():
    for dtype in (torch.float16, torch.bfloat16):
        for size in (500.0, 1e-3):  # the square of the one is infinite in float16, the other is near the epsilon
            torch.manual_seed(0)
            x = (size * torch.randn(4, 8)).to(dtype)
            plain = nn.RMSNorm(8).to(dtype)
            plain(x).float().square().sum().backward()
            expected = plain.weight.grad.float()
            elements = eg.trainable(plain, "weight")
            plain(x).float().square().sum().backward()
            torch.testing.assert_close(elements["weight"].grad, expected, rtol=2e-2, atol=1e-2)


def test_one_row_without_a_batch():
    for layer, x in ((nn.Linear(3, 2), torch.ones(3)), (nn.LayerNorm(3), torch.randn(3))):
        layer(x).square().sum().backward()
        weight, bias = layer.weight.grad.reshape(-1), layer.bias.grad
        elements = eg.trainable(layer, ["weight", "bias"])
        layer(x).square().sum().backward()
        torch.testing.assert_close(elements["weight"].grad, weight)
        torch.testing.assert_close(elements["bias"].grad, bias)


def test_autocast_leaves_float64_alone():
    model = nn.Linear(3, 2).double()
    eg.trainable(model, "weight[0]")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(torch.ones(1, 3).double()).dtype is torch.float64


def test_a_model_that_became_half_saves_a_patch_for_half(tmp_path):
    model = nn.Linear(3, 2)
    plain = copy.deepcopy(model).half()
    elements = eg.trainable(model, "weight[0]")
    model.half()
    with torch.no_grad():
        elements["weight[0]"].add_(1)
    elements.save(tmp_path / "p.safetensors")
    eg.apply(plain, tmp_path / "p.safetensors")
    assert torch.equal(plain.weight, model.weight)


def test_a_patch_in_a_model_that_became_half_is_taken_back(tmp_path):
    plain = nn.Linear(3, 2)
    elements = eg.trainable(copy.deepcopy(plain), "weight[0]")
    with torch.no_grad():
        elements["weight[0]"].add_(1)
    elements.save(tmp_path / "p.safetensors")
    expected = plain.weight.detach().half()
    applied = eg.apply(plain, tmp_path / "p.safetensors")
    plain.half()
    applied.undo()
    assert torch.equal(plain.weight, expected)


class Pair(NamedTuple):
    weight: torch.Tensor
    factor: float


class Holding(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.pair = Pair(self.weight, 2.0)

    def forward(self, x):
        return x * self.pair.weight * self.pair.factor


def test_a_parameter_in_a_named_tuple_trains():
    model = Holding()
    elements = eg.trainable(model, "weight[0]")
    model(torch.ones(3)).sum().backward()
    assert elements["weight[0]"].grad.tolist() == [2.0]
