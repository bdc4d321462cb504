"""No optimizer of PyTorch, whatever its options, changes a bit outside of the elements that train."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import elementgrad as eg
from tests.support.optimizers import FUSED, MUON, OPTIONS, PAGE, REFUSING, cases, made, parted, table, written
from tests.support.training_models import MORE, PLACES, Watched, differing, every

TARGETS = torch.tensor([1, 2, 3, 4, 5, 6])


def loss_of(model, tokens):
    return functional.cross_entropy(model(tokens).flatten(0, 1), TARGETS)


def assert_only_the_places_move(optimizer_of, steps=200, gradients=5, places=PLACES):
    """Steps of an optimizer, most of them with the last gradient again: what a step does depends on it no more."""
    model, tokens = every()
    watched = Watched(model, places)
    elements = eg.trainable(model, places)
    leaves = list(elements.parameters())
    optimizer = optimizer_of(model, elements)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, tokens)
        loss.backward()
        return loss

    iterates = isinstance(optimizer, torch.optim.LBFGS)
    for step in range(steps):
        if iterates:
            optimizer.step(closure)
        else:
            if step % (steps // gradients) == 0:
                closure()
            optimizer.step()
        watched.assert_holds(leaves)
    watched.assert_frozen()
    watched.assert_moved()


@pytest.mark.parametrize(("name", "options"), cases(), ids=[written(*case) for case in cases()])
def test_an_optimizer_changes_no_bit_outside_of_the_places(name, options):
    steps = 20 if name == "LBFGS" else 200
    assert_only_the_places_move(lambda model, elements: made(name, elements.parameters(), options), steps)


def test_a_run_with_a_new_gradient_in_every_step_changes_no_bit_outside_of_the_places():
    options = {"weight_decay": 0.1, "amsgrad": True}
    assert_only_the_places_move(
        lambda model, elements: made("AdamW", elements.parameters(), options), gradients=200, places=PLACES + MORE
    )


@pytest.mark.parametrize(("name", "options"), [(name, some[-1]) for name, some in OPTIONS.items()], ids=list(OPTIONS))
def test_an_optimizer_given_the_whole_model_by_mistake_moves_the_places_alone(name, options):
    assert_only_the_places_move(lambda model, elements: made(name, model.parameters(), options), steps=20)


def test_every_optimizer_of_the_framework_is_in_the_table():
    found = {
        name
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    }
    assert found == OPTIONS.keys() | REFUSING


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_which_optimizers_have_a_fused_step_here(name):
    leaf = nn.Parameter(torch.ones(3))
    leaf.grad = torch.ones(3)
    try:
        made(name, [leaf], {"fused": True}).step()
    except (TypeError, RuntimeError):
        assert name not in FUSED
    else:
        assert name in FUSED


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        *[(name, {}, "Muon only supports 2D parameters") for name in MUON],
        ("SparseAdam", {}, "SparseAdam takes sparse gradients, and those of elements are dense; use torch.optim.Adam"),
        ("Adam", {"capturable": True}, "If capturable=True, params and state_steps must be on supported devices"),
        ("Adam", {"differentiable": True}, "a leaf Variable that requires grad is being used in an in-place operation"),
    ],
)
def test_what_no_vector_on_the_cpu_can_be_given_to_refuses_and_leaves_the_model_alone(name, options, says):
    model, tokens = every()
    watched = Watched(model, PLACES)
    elements = eg.trainable(model, PLACES)
    loss_of(model, tokens).backward()
    with pytest.raises((ValueError, RuntimeError, AssertionError, eg.OptionError), match=says):
        made(name, elements.parameters(), options).step()
    for tensor, before in zip(watched.tensors.values(), watched.before.values(), strict=True):
        assert not differing(tensor, before).any()
    loss_of(model, tokens).backward()


class WritesToData(torch.optim.Optimizer):
    """A write to `.data`, as optimizers of other packages do it, bumps no version counter."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data.mul_(1 - 0.1 * group["lr"])
                    p.data.add_(p.grad.data.sign(), alpha=-group["lr"])


class PutsNewData(WritesToData):
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = p.data - group["lr"] * p.grad


@pytest.mark.parametrize("kind", [WritesToData, PutsNewData])
@pytest.mark.parametrize("whole", [False, True], ids=["elements", "whole model"])
def test_an_optimizer_that_writes_past_autograd_moves_the_places_alone(kind, whole):
    assert_only_the_places_move(
        lambda model, elements: kind((model if whole else elements).parameters(), lr=0.01), steps=40
    )


def test_a_wrapped_optimizer_and_a_scheduler_move_the_places_alone():
    averaged = torch.optim.swa_utils.AveragedModel
    model, tokens = every()
    watched = Watched(model, PLACES)
    elements = eg.trainable(model, PLACES)
    optimizer = torch.optim.SGD([{"params": [leaf], "weight_decay": 0.1} for leaf in elements.parameters()], lr=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 40)
    mean = averaged(nn.ParameterList(elements.parameters()))
    scaler = torch.amp.GradScaler("cpu", enabled=True, init_scale=8.0)
    for _ in range(40):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, tokens)).backward()
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        watched.assert_holds(elements.parameters())
        mean.update_parameters(nn.ParameterList(elements.parameters()))
    watched.assert_frozen()
    watched.assert_moved()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", ["weight[2, 3]", "weight[2:, 3:]", "weight[2, :]"])
def test_a_gradient_that_is_no_number_elsewhere_does_not_reach_the_places(bad, place):
    """By a mask it would: zero times infinity is no number."""
    torch.manual_seed(0)
    model, x = nn.Linear(4, 4), torch.randn(3, 4)
    watched = Watched(model, [place])
    elements = eg.trainable(model, place)
    optimizer = torch.optim.AdamW(elements.parameters(), lr=0.1, weight_decay=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        y = model(x)
        dense = torch.zeros_like(y)
        dense[:, 2:], dense[:, :2] = 1.0, bad
        y.backward(dense)
        assert elements[place].grad.isfinite().all()
        optimizer.step()
        watched.assert_holds(elements.parameters())
    watched.assert_frozen()
    watched.assert_moved()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -0.0])
def test_frozen_entries_that_are_no_numbers_keep_their_bits(bad):
    torch.manual_seed(0)
    model = nn.Embedding(5, 3)
    with torch.no_grad():
        model.weight[1] = bad
        model.weight[2, 0] = bad
    watched = Watched(model, ["weight[2, 1]"])
    elements = eg.trainable(model, "weight[2, 1]")
    optimizer = torch.optim.AdamW(elements.parameters(), lr=0.1, weight_decay=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.tensor([2, 1, 2]))[:, 1:].nan_to_num().square().sum().backward()
        optimizer.step()
        watched.assert_holds(elements.parameters())
    watched.assert_frozen()
    assert differing(model.weight, watched.before["weight"]).nonzero().tolist() == [[2, 1]]


def test_statistics_of_a_batch_norm_move_as_in_a_frozen_model():
    model, tokens = every()
    elements = eg.trainable(model, "batch.weight[0]")
    frozen = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.Adam(elements.parameters(), lr=0.1)
    before = model.batch.running_mean.clone()
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(model, tokens).backward()
        optimizer.step()
        frozen(tokens)
    for name, buffer in frozen.named_buffers():
        assert torch.equal(buffer, model.get_buffer(name))
    assert not torch.equal(before, model.batch.running_mean)


@pytest.mark.parametrize("name", ["SGD", "AdamW", "Adagrad", "LBFGS"])
def test_an_optimizer_goes_where_it_goes_with_the_elements_put_into_the_weights_by_hand(name):
    """Nothing is one step late: not the forward that follows a step, nor those within a step."""
    options = OPTIONS[name][-1]
    model, tokens = every()
    model = model.double()
    places = ("embedding.weight[3, 1]", "conv.weight[1, 2, 0]", "gru.weight_ih_l0[2, 3]", "mixing[1, 3]")
    plain = copy.deepcopy(model).requires_grad_(False)
    elements = eg.trainable(model, places)
    held = dict(plain.named_parameters())
    own = {eg.Place.parse(place): elements[place].detach().clone().requires_grad_() for place in places}

    def by_hand():
        weights = {}
        for place, leaf in own.items():
            at = torch.from_numpy(place.select(held[place.name].shape).flat().reshape(-1))
            weights[place.name] = held[place.name].reshape(-1).index_put((at,), leaf).view_as(held[place.name])
        return functional.cross_entropy(torch.func.functional_call(plain, weights, tokens).flatten(0, 1), TARGETS)

    runs = [(elements.parameters(), lambda: loss_of(model, tokens)), (own.values(), by_hand)]
    losses = []
    for parameters, forward in runs:
        optimizer = made(name, list(parameters), options | {"lr": 0.05})

        def closure(optimizer=optimizer, forward=forward):
            optimizer.zero_grad()
            loss = forward()
            loss.backward()
            return loss

        losses.append([float(optimizer.step(closure).detach()) for _ in range(10)])
    torch.testing.assert_close(*[torch.tensor(some, dtype=torch.float64) for some in losses], rtol=1e-9, atol=0)
    for place, leaf in own.items():
        torch.testing.assert_close(elements[str(place)], leaf, rtol=1e-9, atol=1e-12)


def test_what_the_page_says_about_masked_gradients_is_true():
    lines = parted(PAGE.read_text())[1].splitlines(keepends=True)
    assert "".join(line for line in lines if MUON or "Muon" not in line) == table(), (
        "run python -m tests.support.optimizers"
    )
