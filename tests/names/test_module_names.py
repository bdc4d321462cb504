"""The names of a PyTorch module: parameters, buffers, wrappers, calls and parts; what is refused, what stays."""

import pytest
import torch
from torch import nn

import elementgrad as eg
from tests.names.test_modules import assert_close
from tests.support.torch_models import Residual, made


def hooks(model):
    return {name: (len(m._forward_hooks), len(m._forward_pre_hooks)) for name, m in model.named_modules()}


def state(model):
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    kept = [(name, x, x.detach().clone(), x._version, x.requires_grad, x.grad) for name, x in tensors]
    return kept, hooks(model), {name: set(m.__dict__) for name, m in model.named_modules()}


def assert_as_before(model, before):
    kept, hooked, attributes = before
    for (name, x, value, version, requires, grad), now in zip(kept, state(model)[0], strict=True):
        assert now[0] == name
        assert now[1] is x
        assert torch.equal(x, value)
        assert (x._version, x.requires_grad, x.grad) == (version, requires, grad)
    assert hooks(model) == hooked
    assert {name: set(m.__dict__) for name, m in model.named_modules()} == attributes


@pytest.mark.parametrize("which", ["resnet", "encoder", "lstm", "gru", "unet", "shared"])
@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen"])
def test_every_parameter_is_a_source(which, frozen):
    model, x = made(which)
    of = "last" if which in ("lstm", "gru") else None

    def output(model):
        return model(x)[of] if of else model(x)

    first = output(model)
    named = dict(model.named_parameters())
    expected = torch.autograd.grad(first.flatten()[1], list(named.values()))
    model.requires_grad_(not frozen)
    before = state(model)
    element = tuple(int(i) for i in torch.unravel_index(torch.tensor(1), first.shape))
    given = eg.grad(model, x, of=eg.at(f"output.{of}" if of else "output")[element], wrt=list(named))
    for derivative, gradient in zip(given, expected, strict=True):
        assert_close(derivative, gradient)
    name = next(iter(named))
    J = eg.jacobian(model, x, of=f"output.{of}" if of else "output", wrt=name)
    position = (0,) * named[name].dim()
    assert_close(J[element, position], expected[0][position])
    assert_close(J[:, position][element], expected[0][position])
    assert_as_before(model, before)


def test_a_parameter_may_be_given_itself():
    model, x = made("shared")
    weight = model.block[0].weight
    given = eg.grad(model, x, of="output[0, 0]", wrt=weight)
    assert_close(given, torch.autograd.grad(model(x)[0, 0], weight)[0])
    assert_close(given, eg.grad(model, x, of="output[0, 0]", wrt="decoder.weight"))
    assert_close(given, eg.grad(model, x, of="output[0, 0]", wrt="alias.0.weight"))


def test_an_activation_with_respect_to_another_and_to_a_parameter():
    model, x = made("resnet")
    between = eg.jacobian(model, x, of="block2.conv1", wrt="block1.relu#0")
    to = eg.jacobian(model, x, of="block2.conv1", wrt="image")
    through = eg.jacobian(model, x, of="block1.relu#0", wrt="image")
    rows, middle, columns = to.shape[:4], through.shape[:4], to.shape[4:]
    size = lambda shape: int(torch.tensor(shape).prod())  # noqa: E731
    skip = to.dense().reshape(size(rows), -1) - between.dense().reshape(size(rows), -1) @ through.dense().reshape(
        size(middle), -1
    )
    assert skip.abs().max() > 1e-3  # the residual connection goes past the first block's inner layers
    assert columns == x.shape
    weight = eg.jacobian(model, x, of="block2.conv1[0, 1, 2, 2]", wrt="block1.conv1.weight[:, 0]").dense()
    inner = {}
    with model.block2.conv1.register_forward_hook(lambda m, a, y: inner.update(y=y)):
        model(x)
    (expected,) = torch.autograd.grad(inner["y"][0, 1, 2, 2], model.block1.conv1.weight)
    assert_close(weight, expected[:, 0])


def test_a_buffer_is_a_source():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.tensor([2.0, 3.0]))

        def forward(self, x):
            self.scale.mul_(2)
            return (x * self.scale).sum()

    model = Scaled()
    assert eg.grad(model, torch.tensor([5.0, 7.0]), wrt="scale").tolist() == [10.0, 14.0]
    assert eg.jacobian(model, torch.tensor([5.0, 7.0]), wrt="scale")[..., 1] == 14.0
    assert model.scale.tolist() == [2.0, 3.0]


def test_wrappers_are_left_out_of_names():
    model, x = made("resnet")
    plain = eg.names(model, x)
    assert eg.names(nn.DataParallel(model), x)[1:] == plain[1:]
    compiled = torch.compile(model)
    assert eg.names(compiled, x) == plain
    inside = nn.Sequential(torch.compile(model.stem), model.block1)
    assert [row.name for row in eg.names(inside, x)][1:3] == ["0", "1.conv1"]
    expected = eg.grad(model, x, of="output[0, 0]", wrt="block1")
    assert_close(eg.grad(compiled, x, of="output[0, 0]", wrt="block1"), expected)


def test_a_method_of_a_module_has_its_names():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(2, 2)

        def encode(self, x):
            return self.fc(x) * 2

    model = Two()
    assert_close(eg.grad(model.encode, torch.ones(2), of="output[0]", wrt="fc"), torch.tensor([2.0, 0.0]))
    assert_close(eg.grad(model.encode, torch.ones(2), of="output[1]", wrt="fc.bias"), torch.tensor([0.0, 2.0]))


@pytest.mark.parametrize(
    ("of", "wrt", "message"),
    [
        ("output[0, 0]", "block1.conv9", "no tensor is named 'block1.conv9'; nearest: .*block1.conv1"),
        ("output[0, 0]", "block1.relu", "'block1.relu' is 2 tensors here; name one: block1.relu#0, block1.relu#1"),
        ("output[0, 0]", "block1.relu#2", "'block1.relu#2' is none of these: block1.relu#0"),
        ("stem", "unused", "'unused' is not computed with these arguments; name a layer that is called"),
        ("stem[0, 0, 0, 9]", "image", r"stem\[0, 0, 0, 9\]: index 9 is out of range"),
        ("stem", "image[0, 0, 0, 9]", r"image\[0, 0, 0, 9\]: index 9 is out of range"),
        ("stem", eg.at("image", kind="parameter"), "no parameter is named 'image'"),
    ],
)
def test_invalid_names_are_refused(of, wrt, message):
    model, x = made("resnet")
    model.unused = nn.Linear(2, 2)
    before = state(model)
    with pytest.raises(eg.ElementgradError, match=message):
        eg.jacobian(model, x, of=of, wrt=wrt)
    assert_as_before(model, before)


def test_the_wrong_way_round_is_explained():
    model, x = made("unet")
    with pytest.raises(eg.UnconnectedError, match=r'computed after down1, .* of="up" and wrt="down1"'):
        eg.grad(model, x, of="down1[0, 0, 0, 0]", wrt="up")
    assert eg.grad(model, x, of="up[0, 0, 0, 0]", wrt="down1").shape == (1, 2, 4, 4)


def test_several_parts_are_named_one_by_one():
    model, x = made("lstm")
    with pytest.raises(eg.PlaceError, match=r"'rnn' is 3 tensors here; name one: rnn:0, rnn:1.0, rnn:1.1"):
        eg.jacobian(model, x, of="rnn")
    given = eg.jacobian(model, x, of="rnn:1.1")
    assert_close(given.dense(), eg.jacobian(model, x, of="rnn:1:1").dense())


def test_kind_decides_between_two_tensors_of_one_name():
    class Twofold(nn.Module):
        def __init__(self):
            super().__init__()
            self.x = nn.Linear(2, 2, bias=False)

        def forward(self, x):
            return self.x(x)

    model, x = Twofold(), torch.ones(2)
    with pytest.raises(eg.PlaceError, match=r'activation and input are both named .x.; .* kind="input"'):
        eg.jacobian(model, x, wrt="x")
    assert_close(eg.jacobian(model, x, wrt=eg.at("x", kind="activation")).dense(), torch.eye(2))
    assert_close(eg.jacobian(model, x, wrt="x (input)").dense(), model.x.weight.detach())


def test_values_are_those_of_the_name_though_they_are_written_to_later():
    model, x = made("resnet")
    seen = {}
    with model.block1.bn1.register_forward_hook(lambda m, a, y: seen.update(y=y.clone())):
        model(x)
    value = eg.jacobian(model, x, of="block1.bn1").value
    assert_close(value, seen["y"].detach())
    assert (value < 0).any()  # the ReLU behind it works in place


def test_reads_under_autocast_see_what_the_model_computes():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(3, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        J = eg.jacobian(model, x, of="output[0, 0]", wrt="1")
        to = eg.jacobian(model, x, of="0[0, 0]", wrt="input")
    assert J.value.dtype == to.value.dtype == torch.bfloat16
    assert torch.equal(J.dense()[0], model[2].weight[0].detach().bfloat16())
    assert torch.equal(to.dense()[0], model[0].weight[0].detach().bfloat16().float())


def test_hessians_at_activations_and_parameters():
    model, x = made("shared")
    for wrt in ("block#1", "decoder.weight"):
        H = eg.hessian(model, x, of="output[0, 1]", wrt=wrt)
        dense = H.dense()
        first = (0,) * (dense.dim() // 2)
        assert dense.abs().sum() > 0
        assert_close(H[first, :], dense[first])
        assert_close(dense.reshape(H.shape), dense.movedim(tuple(range(len(first))), tuple(range(-len(first), 0))))


def test_repeated_calls_are_numbered():
    torch.manual_seed(1)
    block, x = Residual(1).double().eval(), torch.randn(1, 1, 3, 3, dtype=torch.float64)
    named = [row.name for row in eg.names(block, x) if row.kind == "activation"]
    assert named == ["conv1", "bn1", "relu#0", "conv2", "relu#1"]
