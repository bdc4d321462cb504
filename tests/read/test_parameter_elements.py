"""Elements of a large parameter are read by the kernels of training, and are those of the dense derivative."""

import gc

import numpy as np
import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import elementgrad as eg
from elementgrad._backends.torch import uses
from elementgrad.errors import FrameworkError, UnconnectedError

IDS = torch.tensor([[3, 1, 2, 3], [0, 5, 3, 9]])


class Seen(TorchDispatchMode):
    """Notes the names of all operations."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.name().partition("::")[2].partition(".")[0])
        return func(*args, **(kwargs or {}))


class Calls(torch.nn.Module):
    """A model of one weight and any code."""

    def __init__(self, code, *shape):
        super().__init__()
        torch.manual_seed(0)
        self.weight = torch.nn.Parameter(torch.randn(*shape, dtype=torch.float64) / 4)
        self.code = code

    def forward(self, x):
        return self.code(self, x)


def vectors(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def convolve(function, **options):
    return lambda model, x: function(x, model.weight, **options).tanh()


def positional(model, x):
    return functional.conv2d(x, model.weight, None, (2, 1), (1, 2), 1, 2).tanh()


def twice(model, x):
    return functional.linear(functional.linear(x, model.weight).tanh(), model.weight)


def tied(model, ids):
    return functional.linear(functional.embedding(ids, model.weight).tanh(), model.weight)


def in_place(model, x):
    y = functional.linear(x, model.weight)
    y.mul_(2)
    return torch.relu_(y)


def through_views(model, x):
    y = functional.linear(x, model.weight)
    y[0].mul_(3)
    return y.tanh()


KNOWN = {
    "linear": (Calls(lambda m, x: functional.linear(x, m.weight).tanh(), 40, 30), vectors(5, 30)),
    "linear of a vector": (Calls(lambda m, x: functional.linear(x, m.weight).tanh(), 40, 30), vectors(30)),
    "linear of three axes": (Calls(lambda m, x: functional.linear(x, m.weight).tanh(), 40, 30), vectors(2, 3, 30)),
    "matmul": (Calls(lambda m, x: (x @ m.weight).tanh(), 30, 40), vectors(2, 3, 30)),
    "addmm": (Calls(lambda m, x: torch.addmm(x[0, 0], x, m.weight).tanh(), 30, 40), vectors(3, 30)),
    "twice": (Calls(twice, 30, 30), vectors(2, 30)),
    "embedding": (Calls(lambda m, ids: functional.embedding(ids, m.weight).tanh(), 40, 30), IDS),
    "padding": (Calls(lambda m, ids: functional.embedding(ids, m.weight, 3).tanh(), 40, 30), IDS),
    "padding from the end": (Calls(lambda m, ids: functional.embedding(ids, m.weight, -37).tanh(), 40, 30), IDS),
    "tied": (Calls(tied, 40, 30), IDS),
    "conv1d": (Calls(convolve(functional.conv1d), 10, 8, 9), vectors(2, 8, 12)),
    "conv2d": (Calls(convolve(functional.conv2d, stride=2, padding=1, dilation=2), 8, 8, 4, 4), vectors(2, 8, 12, 9)),
    "conv2d by position": (Calls(positional, 8, 8, 4, 4), vectors(2, 16, 9, 9)),
    "conv3d": (Calls(convolve(functional.conv3d, padding=(1, 0, 1)), 6, 4, 3, 3, 3), vectors(1, 4, 4, 5, 4)),
    "in place": (Calls(in_place, 40, 30), vectors(5, 30)),
}
OTHER = {
    "norm of the weight": (
        Calls(lambda m, x: functional.linear(x, m.weight) * m.weight.norm(), 40, 30),
        vectors(5, 30),
    ),
    "a transposed weight": (Calls(lambda m, x: x @ m.weight.T, 40, 30), vectors(5, 30)),
    "through views": (Calls(through_views, 40, 30), vectors(5, 30)),
    "renormed": (Calls(lambda m, ids: functional.embedding(ids, m.weight, max_norm=0.5).tanh(), 40, 30), IDS),
    "by frequency": (
        Calls(lambda m, ids: functional.embedding(ids, m.weight, scale_grad_by_freq=True).tanh(), 40, 30),
        IDS,
    ),
    "text padding": (Calls(convolve(functional.conv2d, padding="same"), 8, 8, 3, 3), vectors(2, 8, 9, 9)),
    "no batch": (Calls(convolve(functional.conv2d), 8, 8, 4, 4), vectors(8, 9, 9)),
    "vmap": (Calls(lambda m, x: torch.func.vmap(lambda x: functional.linear(x, m.weight))(x), 40, 30), vectors(5, 30)),
    "a slice": (Calls(lambda m, x: functional.linear(x, m.weight[:20]), 40, 30), vectors(5, 30)),
}
CASES = KNOWN | OTHER


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(uses, "MIN_SIZE", 1)


def derivatives(model, x, count):
    """Return the dense derivatives of the first elements of the output."""
    copy = torch.nn.Parameter(model.weight.detach().clone())
    y = torch.func.functional_call(model, {"weight": copy}, (x,)).reshape(-1)
    return torch.stack([torch.autograd.grad(y[i], copy, retain_graph=True)[0] for i in range(count)])


@pytest.mark.parametrize("case", CASES)
def test_elements_are_those_of_the_dense_derivative(case):
    model, x = CASES[case]
    before = model.weight.detach().clone()
    dense = derivatives(model, x, 4).numpy()
    shape = model.weight.shape
    last = ", ".join(str(size // 3) for size in shape)
    row = 3 if x.dtype == torch.int64 else 1
    out = ", ".join("0" for _ in model(x).shape)
    with torch.no_grad():
        model.weight.copy_(before)  # as some calls write to it
    cases = {f"weight[{last}]": tuple(size // 3 for size in shape), f"weight[{row}]": (row,), "weight": ()}
    for text, index in cases.items():
        result = eg.grad(model, x, of=f"output[{out}]", wrt=text).numpy()
        assert np.allclose(result, dense[(0, *index)], rtol=1e-9, atol=1e-12), text
    assert torch.equal(model.weight, before)
    assert model.weight.grad is None
    J = eg.jacobian(lambda model: model(x).reshape(-1)[:4], model, wrt="model.weight")
    places = [np.arange(4) * size // 5 for size in shape]
    rows = dense.reshape(4, *shape)
    block = J[[2, 0], tuple(places)].numpy()
    assert np.allclose(block, rows[[2, 0]][(slice(None), *places)], rtol=1e-9, atol=1e-12)
    pairs = J.entries([0, 1, 2, 1], tuple(places)).numpy()
    assert np.allclose(pairs, rows[([0, 1, 2, 1], *places)], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("case", KNOWN)
def test_no_dense_derivative_is_computed(case):
    model, x = KNOWN[case]
    last = ", ".join(str(size // 3) for size in model.weight.shape)
    shape, mine = tuple(model.weight.shape), model.weight.untyped_storage().data_ptr()

    class Dense(TorchDispatchMode):
        made = False

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            results = result if isinstance(result, (tuple, list)) else [result]
            for y in results:
                if isinstance(y, torch.Tensor) and sorted(y.shape) == sorted(shape) and x.shape != y.shape:
                    self.made |= y.untyped_storage().data_ptr() != mine
            return result

    out = ", ".join("0" for _ in model(x).shape)
    with Dense() as dense:
        eg.grad(model, x, of=f"output[{out}]", wrt=f"weight[{last}]")
    assert not dense.made


def test_layers_of_pytorch_use_the_kernels():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(500, 40), torch.nn.Linear(40, 60), torch.nn.Tanh())
    model = torch.nn.Sequential(model, torch.nn.Linear(60, 3))
    x, (y,) = IDS, [model(IDS)[0, 0, 1]]
    for name, place in {"0.0.weight": (3, 7), "0.1.weight": (5, 6)}.items():
        (dense,) = torch.autograd.grad(y, model.get_parameter(name), retain_graph=True)
        with Seen() as seen:
            result = eg.grad(model, x, of="output[0, 0, 1]", wrt=f"{name}[{place[0]}, {place[1]}]")
        assert torch.allclose(result, dense[place], rtol=1e-5)
        assert "embedding_dense_backward" not in seen.names


def test_a_row_that_was_not_looked_up_is_zero_and_a_weight_without_a_path_is_unconnected():
    model, ids = KNOWN["embedding"]
    assert eg.grad(model, ids, of="output[0, 0, 0]", wrt="weight[20, 0]") == 0
    unused = Calls(lambda m, x: x * 2, 40, 30)
    with pytest.raises(UnconnectedError):
        eg.grad(unused, vectors(5), of="output[0]", wrt="weight[20, 0]")
    stopped = Calls(lambda m, x: functional.linear(x, m.weight).detach() + x.sum(), 40, 30)
    with pytest.raises(UnconnectedError):
        eg.grad(stopped, vectors(5, 30), of="output[0, 0]", wrt="weight[20, 0]")


def test_a_use_without_gradients_is_none():
    def half(model, x):
        with torch.no_grad():
            first = functional.linear(x, model.weight)
        return first * functional.linear(x, model.weight)

    model, x = Calls(half, 40, 30), vectors(5, 30)
    dense = derivatives(model, x, 1)
    assert torch.allclose(eg.grad(model, x, of="output[0, 0]", wrt="weight[0, 3]"), dense[0, 0, 3])


def test_code_that_writes_to_the_weight_writes_to_a_copy():
    def writes(model, x):
        first = functional.linear(x, model.weight)
        with torch.no_grad():
            model.weight.mul_(2)
        return first + functional.linear(x, model.weight)

    model, x = Calls(writes, 40, 30), vectors(5, 30)
    before = model.weight.detach().clone()
    assert torch.allclose(eg.grad(model, x, of="output[0, 2]", wrt="weight[2, 3]"), 2 * x[0, 3])
    assert torch.equal(model.weight, before)


def test_a_write_to_a_layers_input_after_its_use_is_an_error():
    def writes(model, x):
        hidden = x * 1.0
        y = functional.linear(hidden, model.weight)
        hidden.add_(1)
        return y

    model, x = Calls(writes, 40, 30), vectors(5, 30)
    for place in ("weight", "weight[2, 3]"):
        with pytest.raises(FrameworkError, match="changed in place"):
            eg.grad(model, x, of="output[0, 2]", wrt=place)


def test_autocast_columns_hessians_and_graphs_are_unchanged():
    model, x = KNOWN["linear"][0], vectors(5, 30)
    dense = derivatives(model, x, 40)
    J = eg.jacobian(lambda model: model(x)[0], model, wrt="model.weight")
    assert torch.allclose(J[:, (1, 2)], dense[:, 1, 2])
    assert torch.allclose(J @ torch.ones(40, 30, dtype=torch.float64), dense.sum((1, 2)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = Calls(model.code, 40, 30).float()
        result = eg.grad(low, x.float(), of="output[0, 1]", wrt="weight[1, 2]")
    assert abs(result - dense[1, 1, 2]) < 0.05
    H = eg.hessian(lambda model: model(x).sum(), model, wrt="model.weight[1, 0:3]")
    assert H[..., ...].shape == (3, 3)
    again = eg.grad(model, x, of="output[0, 1]", wrt="weight[1, 2]", create_graph=True)
    assert again.requires_grad


def test_the_same_with_several_parameters_and_inputs():
    torch.manual_seed(0)
    model, x = (
        torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.Tanh(), torch.nn.Linear(40, 30)).double(),
        vectors(2, 30),
    )
    x = x.requires_grad_()
    wanted = [model[0].weight, model[2].weight, x]
    dense = torch.autograd.grad(model(x)[0, 1], wanted)
    result = eg.grad(model, x.detach(), of="output[0, 1]", wrt=["0.weight[3, 4]", "2.weight[1]", "input"])
    expected = [dense[0][3, 4], dense[1][1], dense[2]]
    assert all(torch.allclose(left, right) for left, right in zip(result, expected, strict=True))


def test_reads_leave_no_proxy_behind():
    model, x = KNOWN["tied"]
    jacobian = eg.jacobian(lambda model: model(x).reshape(-1)[:4], model, wrt="model.weight")
    for _ in range(20):
        eg.grad(model, x, of="output[0, 0, 0]", wrt="weight[3, 4]")
        assert type(model.weight) is torch.nn.Parameter
        jacobian[1, (3, 4)]
    del jacobian
    gc.collect()
    kinds = (uses.TrackedParameter, uses.TrackedUses, uses.LayerUse)
    assert not [kept for kept in gc.get_objects() if type(kept) in kinds]
