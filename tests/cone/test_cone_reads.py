"""Reads by cones as a user meets them: options, plans, values, fields, and nothing left behind."""

import numpy as np
import pytest
import torch
from torch import nn

import elementgrad as eg
from elementgrad._read.cone import ConeLinearization

Tensor = torch.Tensor


def convolutions(depth: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3 if i == 0 else 4, 4, 3, padding=1) for i in range(depth)]
    return nn.Sequential(*[module for layer in layers for module in (layer, nn.ELU())]).double()


def image(size: int = 20) -> Tensor:
    return torch.randn(1, 3, size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("of", "wrt"),
    [
        ("output[0, 1, 4, 5]", "input"),
        ("output[0, 1, 4:6, [0, 7, 7]]", "input[0, :, 3:9, 2]"),
        ("2[0, 1, 4, 5]", "0[0, :, 3:6]"),
        ("output[0, 1, 4, 5]", "2.weight[3, 1]"),
        ("output[0, 1, 4, 5]", ["input[0, 0]", "0.bias", "2"]),
        ({"a": "output[0, 0, 0, 0]", "b": "2[0, 3, 19, 19]"}, "input[0, 2, 15:, 15:]"),
    ],
)
def test_reads_are_those_of_the_plain_way(of, wrt):
    model, x = convolutions(), image()
    plain, by_cone = (eg.grad(model, x, of=of, wrt=wrt, cone=cone) for cone in (False, True))
    for one, other in zip(_leaves(plain), _leaves(by_cone), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-15)


def _leaves(tree: object) -> list[Tensor]:
    if isinstance(tree, dict):
        return [leaf for value in tree.values() for leaf in _leaves(value)]
    return [leaf for value in tree for leaf in _leaves(value)] if isinstance(tree, list) else [tree]


def test_a_jacobian_with_cones_reads_as_any_other():
    model, x = convolutions(), image(8)
    J, K = (eg.jacobian(model, x, cone=cone) for cone in (True, None))
    at, block = (0, 2, 3, 4), (0, slice(None), slice(1, 3), 5)
    torch.testing.assert_close(J[at, :], K[at, :])
    torch.testing.assert_close(J[block, (0, 0, 2, 2)], K[block, (0, 0, 2, 2)])
    torch.testing.assert_close(J.entries(block, (0, 0, 1, 5)), K.entries(block, (0, 0, 1, 5)))
    torch.testing.assert_close(J.value, K.value)
    u = torch.randn_like(K.value)
    torch.testing.assert_close(u @ J, u @ K)
    v = torch.randn_like(x)
    torch.testing.assert_close(J @ v, K @ v)


@pytest.mark.parametrize("cone", [True, None])
def test_a_function_that_fails_raises_its_own_error(fw, cone):
    x = fw.tensor(np.zeros((300, 400)))
    f = lambda x: x * unknown_factor  # noqa: E731, F821
    for read in (eg.grad, eg.value):
        with pytest.raises(NameError, match="unknown_factor"):
            read(f, x, of="output[3, 4]", cone=cone)


class Options:
    """Answers for every attribute, and for unknown ones with an error of its own."""

    def __init__(self, **options: float):
        self.__dict__["options"] = options

    def __getattr__(self, name: str) -> float:
        return self.options[name]


def test_no_code_of_objects_runs_that_a_function_holds():
    options, model = Options(scale=3.0), convolutions()
    gradient = eg.grad(lambda x: model(x) * options.scale, image(8), of="output[0, 1, 4, 5]", cone=True)
    torch.testing.assert_close(gradient, 3 * eg.grad(model, image(8), of="output[0, 1, 4, 5]", cone=False))


def test_the_plan_says_what_is_needed():
    J = eg.jacobian(convolutions(), image(64), cone=True)
    assert "cone       7 x 7 of 64 x 64 of input, 1/" in str(J.plan((0, 1, 30, 30), ...))
    assert "cone       4 x 4 of 64 x 64 of input, 1/" in str(J.plan((0, 1, 0, 0), ...))
    assert "cone" not in str(eg.jacobian(convolutions(), image(8)).plan((0, 1, 3, 3), ...))


def test_it_is_automatic_where_it_pays(monkeypatch):
    model, x = convolutions(), image(256)
    counts = []
    read = ConeLinearization.read_block
    monkeypatch.setattr(ConeLinearization, "read_block", lambda self, *args: counts.append(1) or read(self, *args))
    by_cone = eg.grad(model, x, of="output[0, 1, 100, 90]")
    assert counts == [1]
    torch.testing.assert_close(by_cone, eg.grad(model, x, of="output[0, 1, 100, 90]", cone=False))
    assert counts == [1]


def test_small_functions_run_once():
    runs = []

    def f(x: Tensor) -> Tensor:
        runs.append(1)
        return x**2

    eg.grad(f, torch.ones(50), of="output[3]")
    eg.value(f, torch.ones(50), of="output[3]")
    assert len(runs) == 2


def test_a_recording_that_does_not_pay_is_dropped():
    x = torch.randn(200_000)
    mixing = lambda x: torch.softmax(x, 0)  # noqa: E731
    torch.testing.assert_close(
        eg.grad(mixing, x, of="output[3]", wrt="x[:5]"), eg.grad(mixing, x, of="output[3]", wrt="x[:5]", cone=False)
    )


def test_values_of_some_elements(fw):
    x = fw.tensor(np.arange(12.0).reshape(3, 4))
    f = lambda x: {"square": eg.tag(x * x, "h") + 1, "row": x[0]}  # noqa: E731
    found = eg.value(f, x, of={"one": "output.square[1, 2]", "tag": "h[0, 1:3]", "row": "output.row"})
    np.testing.assert_allclose(fw.numpy(found["one"]), 37)
    np.testing.assert_allclose(fw.numpy(found["tag"]), [1, 4])
    np.testing.assert_allclose(fw.numpy(found["row"]), [0, 1, 2, 3])


def test_fields_are_places():
    model, x = convolutions(), image(32)
    receptive = eg.field(model, x, of="output[0, 1, 10, 0]", wrt="input")
    assert str(receptive) == "input[0:1, 0:3, 7:14, 0:4] (input)"
    projective = eg.field(model, x, of="2", wrt="input[0, 2, 10, 0]")
    assert str(projective) == "2[0:1, 0:4, 8:13, 0:3] (activation)"
    nothing = eg.field(model, x, of="0", wrt="2[0, 0, 0, 0]")
    assert nothing.select((1, 4, 32, 32)).size == 0


def test_a_field_holds_every_nonzero_gradient():
    model, x = convolutions(), image(12)
    for place in [(0, 0, 0, 0), (0, 3, 5, 11), (0, 1, 6, 6)]:
        gradient = eg.grad(model, x, of=eg.at("output")[place], cone=False)
        field = eg.field(model, x, of=eg.at("output")[place], wrt="input")
        outside = eg.at(gradient)[field.index].set(0.0)
        assert not outside.any()
        assert (gradient != 0).sum() == field.select(gradient.shape).size


def test_nothing_is_disturbed():
    class Keeping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
            self.seen: list[Tensor] = []

        def forward(self, x: Tensor) -> Tensor:
            self.last = self.norm(self.conv(x))
            self.seen.append(self.last)
            return nn.functional.dropout(self.last, 0.5, self.training)

    model, x = Keeping(), torch.randn(2, 3, 9, 9, requires_grad=True)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    identities = [id(parameter) for parameter in model.parameters()]
    eg.grad(model, x, of="output[0, 0, 1, 1]", wrt="x", cone=True)
    with pytest.raises(eg.FrameworkError):
        eg.grad(lambda x: model(x).detach().numpy(), x, of="output[0]", cone=True)
    assert not hasattr(model, "last")
    assert model.seen == []
    assert torch.equal(torch.get_rng_state(), random_state)
    assert identities == [id(parameter) for parameter in model.parameters()]
    assert x.grad is None
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.ones(2).add_(1).sum() == 4  # no mode is left on


@pytest.mark.parametrize("writes", [False, True])
def test_what_the_function_keeps_has_numbers_afterwards(writes):
    kept: dict[str, Tensor] = {}
    weight = torch.randn(2, 3, 3, 3)

    def f(x: Tensor) -> Tensor:
        y = nn.functional.conv2d(x, weight)
        if writes:
            y[..., 0] = y[..., 1] * 2  # a write to a view, which is recorded in another way
        if "mask" not in kept:
            kept["mask"] = torch.arange(y.shape[-1]) * torch.tensor(0.5)
        kept["last"] = y
        return y * kept["mask"]

    x, of = torch.randn(1, 3, 200, 200), "output[0, 1, 50, 60]"
    by_cone = eg.grad(f, x, of=of)
    mask = torch.arange(198) * 0.5
    torch.testing.assert_close(kept["mask"] + 0, mask)
    torch.testing.assert_close(f(x), kept["last"] * mask)
    torch.testing.assert_close(eg.grad(f, x, of=of, cone=True), by_cone)
    torch.testing.assert_close(eg.grad(f, x, of=of, cone=False), by_cone)
    if not writes:
        kept["mask"][3] = 7.0
        assert kept["mask"].numpy()[3] == 7
        assert f(x)[0, 0, 0, 3] == 7 * kept["last"][0, 0, 0, 3]


def test_forward_hooks_get_tensors_with_numbers():
    model, x, seen = convolutions(), image(256), []
    model[2].register_forward_hook(lambda module, args, output: seen.append(output))
    eg.grad(model, x, of="2[0, 1, 100, 90]", wrt="input")
    assert [float(y.detach().abs().sum()) > 0 for y in seen] == [True]


def test_the_same_dropout_mask_as_the_plain_way():
    model, x = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Dropout(0.5), nn.Conv2d(2, 2, 3)), torch.randn(1, 1, 9, 9)
    for _ in range(3):
        by_cone, plain = (eg.grad(model, x, of="output[0, 1, 2, 2]", wrt="input", cone=cone) for cone in (True, False))
        torch.testing.assert_close(by_cone, plain)
        torch.rand(3)


def _hooked(x: Tensor) -> Tensor:
    y = x * 2
    y.register_hook(lambda gradient: gradient * 3)
    return y


@pytest.mark.parametrize(
    ("f", "options", "text"),
    [
        (lambda x: torch.from_numpy(x.detach().numpy()) * x, {}, "values leave PyTorch"),
        (_hooked, {}, "gradient hook"),
        (torch.sin, {"create_graph": True}, "create_graph"),
        (torch.sin, {"batch": True}, "batch"),
        (torch.sin, {"cone": "yes"}, "None, True and False"),
    ],
    ids=["numpy", "hook", "create_graph", "batch", "option"],
)
def test_what_has_no_cone_says_why(f, options, text):
    x = torch.ones(3, 2)
    with pytest.raises((eg.FrameworkError, eg.OptionError), match=text):
        eg.grad(f, x, **{"of": "output[0, 0]" if "batch" not in options else "output[0]", "cone": True, **options})


def _doubled_by_data(x: Tensor) -> Tensor:
    h = x * 3
    h.data.mul_(2)
    return h * h


def _replaced_by_data(x: Tensor) -> Tensor:
    h = x * 3
    h.data = x.detach() * 5
    return h * h


@pytest.mark.parametrize("f", [_doubled_by_data, _replaced_by_data])
def test_writes_to_the_data_of_a_tensor_go_the_plain_way(f):
    x = torch.full((400, 300), 0.7)
    found, plain = (eg.grad(f, x, of="output[3, 4]", wrt="x[3, 4]", cone=cone) for cone in (None, False))
    torch.testing.assert_close(found, plain)
    with pytest.raises(eg.FrameworkError, match=r"the \.data of a tensor"):
        eg.grad(f, x, of="output[3, 4]", cone=True)


def test_hooks_and_numpy_go_the_plain_way_by_themselves():
    x = torch.ones(400, 300)
    torch.testing.assert_close(eg.grad(_hooked, x, of="output[3, 4]", wrt="x[3, 4]"), torch.tensor(6.0))


class Tripled(torch.autograd.Function):
    """A rule that is no derivative of what it computes."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3


BOUND_EARLIER = Tripled.apply


def test_a_rule_that_was_bound_before_the_function_runs_is_the_derivative():
    x = torch.ones(400, 300)
    for apply in (Tripled.apply, BOUND_EARLIER):
        found = eg.grad(lambda x, apply=apply: apply(x).sin(), x, of="output[3, 4]", wrt="x[3, 4]")
        torch.testing.assert_close(found, 3 * torch.cos(torch.tensor(2.0)))


def test_an_unconnected_tensor_is_an_error_with_its_reason():
    x = torch.ones(3)
    with pytest.raises(eg.UnconnectedError, match="detach"):
        eg.grad(lambda x: x.detach() * 2, x, of="output[0]", cone=True)


def test_a_field_is_asked_about_one_side():
    with pytest.raises(eg.OptionError, match="give an index to exactly one"):
        eg.field(torch.sin, torch.ones(3), of="output", wrt="input")
    with pytest.raises(eg.OptionError, match="give an index to exactly one"):
        eg.field(torch.sin, torch.ones(3), of="output[0]", wrt="args.0[1]")


def test_an_error_of_the_function_itself_is_raised_as_without_us():
    first, second = nn.Conv2d(3, 8, 3), nn.Conv2d(9, 8, 3)
    x = torch.randn(1, 3, 256, 256)

    def mismatched(x):
        return second(first(x))

    with pytest.raises(RuntimeError) as expected:
        mismatched(x)
    for read in (eg.grad, eg.value):
        with pytest.raises(RuntimeError) as raised:
            read(mismatched, x, of="output[0, 0, 1, 1]")
        assert str(raised.value) == str(expected.value)
        assert raised.value.__context__ is None
        with pytest.raises(eg.FrameworkError, match=r"a cone cannot be used here: .*leave cone=True out"):
            read(mismatched, x, of="output[0, 0, 1, 1]", cone=True)
