"""The same network in each framework has the same elements of the largest scores, however its losses are given."""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

import elementgrad as eg
from elementgrad._backends.jax import top as jax_scores
from elementgrad._backends.jax.autodiff import JaxLinearization
from elementgrad._train.top_backend import TopBackend

RNG = np.random.default_rng(0)
WEIGHTS = {"0.weight": (7, 5), "0.bias": (7,), "2.weight": (3, 7), "2.bias": (3,)}
STATE = {name: RNG.standard_normal(shape) for name, shape in WEIGHTS.items()}
X, Y = RNG.standard_normal((6, 5)), np.array([0, 1, 2, 0, 1, 2])


class Ranked(NamedTuple):
    """A network, and the function of it that gives one loss for each example."""

    model: Any
    losses: Callable[[Any], Any]
    moved: Callable[[Any, dict[str, np.ndarray]], Any]
    """The network with other weights."""


def of_torch():
    def moved(model, state):
        model = copy.deepcopy(model)
        model.load_state_dict({name: torch.tensor(values) for name, values in state.items()})
        return model

    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()

    def losses(model):
        return nn.functional.cross_entropy(model(torch.tensor(X)), torch.tensor(Y), reduction="none")

    return Ranked(moved(model, STATE), losses, moved)


def of_jax():
    def moved(params, state):
        return {
            layer: {kind: jnp.array(state[f"{layer}.{kind}"]) for kind in ("weight", "bias")} for layer in ("0", "2")
        }

    def losses(params):
        hidden = jnp.tanh(X @ params["0"]["weight"].T + params["0"]["bias"])
        logits = hidden @ params["2"]["weight"].T + params["2"]["bias"]
        return -jax.nn.log_softmax(logits)[np.arange(6), Y]

    return Ranked(moved(None, STATE), losses, moved)


MODELS = {"torch": of_torch, "jax": of_jax}


@pytest.fixture(params=MODELS)
def ranked(request):
    return MODELS[request.param]()


def scores(by):
    """By plain autograd, one example after another."""
    model, losses, _ = of_torch()
    numbers = losses(model) if by == "fisher" else [losses(model).sum()]
    every = [torch.autograd.grad(number, list(model.parameters()), retain_graph=True) for number in numbers]
    power = 2 if by == "fisher" else 1
    return {name: sum(each[i].abs() ** power for each in every).numpy() for i, name in enumerate(STATE)}


def best(scores, k):
    rows = [
        (-score, number, position, name)
        for number, (name, values) in enumerate(scores.items())
        for position, score in enumerate(values.reshape(-1))
    ]
    return sorted((name, position) for _, _, position, name in sorted(rows)[:k])


def elements(places):
    return sorted(
        (place.name, int(position))
        for place in places
        for position in place.select(STATE[place.name].shape).flat().reshape(-1)
    )


WAYS = {
    "a vector": lambda losses: losses,
    "a number": lambda losses: lambda model: losses(model).sum(),
    "a list": lambda losses: lambda model: [losses(model)[:2], losses(model)[2:]],
    "one by one": lambda losses: lambda model: (losses(model)[i] for i in range(6)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("by", ["gradient", "fisher"])
def test_the_largest_are_those_of_a_dense_computation(ranked, by, way):
    if (by, way) == ("fisher", "a number"):
        by, expected = "fisher", {name: values**2 for name, values in scores("gradient").items()}
    else:
        expected = scores(by)
    for k in (9,) if way != "a vector" else (1, 40):
        assert elements(eg.top(ranked.model, WAYS[way](ranked.losses), k, by)) == best(expected, k)


def test_size_and_how_far_elements_have_moved(ranked):
    assert elements(eg.top(ranked.model, None, 9, "magnitude")) == best({n: abs(x) for n, x in STATE.items()}, 9)
    rng = np.random.default_rng(1)
    other = {name: x + rng.standard_normal(x.shape) for name, x in STATE.items()}
    found = eg.top(ranked.moved(ranked.model, other), None, 9, "magnitude", since=ranked.model)
    assert elements(found) == best({name: abs(other[name] - x) for name, x in STATE.items()}, 9)


def test_top_among_some_parameters_can_be_trained(ranked):
    places = eg.top(ranked.model, ranked.losses, 4, among=["2.bias", "0.weight[1]"])
    allowed = {name: np.full(x.shape, -1.0) for name, x in STATE.items()}
    whole = scores("gradient")
    allowed["2.bias"], allowed["0.weight"][1] = whole["2.bias"], whole["0.weight"][1]
    assert elements(places) == best(allowed, 4)
    assert eg.trainable(ranked.model, places).size == 4


WRONG = {
    "nothing": (lambda losses: lambda model: None, eg.FrameworkError, "loss_fn gave NoneType and no loss"),
    "no losses": (lambda losses: lambda model: [], eg.OptionError, "loss_fn gave no loss at all"),
    "a matrix": (lambda losses: lambda model: losses(model)[None], eg.OptionError, r"the loss of shape \(1, 6\)"),
    "NaN": (lambda losses: lambda model: losses(model) * float("nan"), eg.PlaceError, "of nan, which cannot be ranked"),
}


@pytest.mark.parametrize("case", WRONG)
def test_losses_that_cannot_rank(ranked, case):
    made, error, message = WRONG[case]
    with pytest.raises(error, match=message):
        eg.top(ranked.model, made(ranked.losses), 5)


def test_parameters_that_the_loss_does_not_reach_on_jax():
    params, losses, _ = of_jax()
    only = lambda params: params["2"]["bias"].sum()  # noqa: E731
    assert elements(eg.top(params, only, 3)) == [("2.bias", i) for i in range(3)]
    with pytest.raises(eg.UnconnectedError, match="k=4 is more than the 3 elements that the loss depends on"):
        eg.top(params, only, 4)
    with pytest.raises(eg.UnconnectedError, match="depends on no parameter"):
        eg.top(params, lambda params: jnp.ones(2), 1)
    with pytest.raises(eg.FrameworkError, match=r"is being traced.*outside of jax\.jit"):
        jax.jit(lambda params: eg.top(params, losses, 1) and 0)(params)


def test_two_names_of_one_array_are_two_parameters_on_jax():
    zeros = jnp.zeros(2)
    params = {"a": zeros, "b": zeros}
    loss = lambda params: (params["a"] * 2 + params["b"] * jnp.array([1.0, 5.0])).sum()  # noqa: E731
    assert [str(place) for place in eg.top(params, loss, 1)] == ["b[[1]]"]
    assert [str(place) for place in eg.top(params, loss, 1, among="b[0]")] == ["b[[0]]"]


def test_squares_of_small_slopes_do_not_vanish_in_32_bits_on_jax():
    with jax_scores.enable_x64(False):
        params = {"w": jnp.ones(3, "float32"), "v": jnp.ones(2, "float32")}
        slopes = jnp.array([1e-25, 3e-25, 2e-25], "float32")
        places = eg.top(params, lambda p: jnp.stack([(p["w"] * slopes).sum(), 0 * p["v"].sum()]), 1, "fisher")
        assert [str(place) for place in places] == ["w[[1]]"]
        assert not jax.config.jax_enable_x64


@pytest.mark.parametrize("floor", [0.0, 2.0])
@pytest.mark.parametrize("count", [1, 5, 50])
def test_the_first_of_equal_ones_across_pieces_on_jax(monkeypatch, count, floor):
    monkeypatch.setattr(TopBackend, "PIECE", 4)
    values = np.random.default_rng(2).integers(-3, 4, 37)
    sizes, positions = jax_scores.implementation.topk_abs(jnp.array(values, jnp.bfloat16), count, floor, None)
    order = sorted((i for i in range(37) if abs(values[i]) >= floor), key=lambda i: (-abs(values[i]), i))[:count]
    assert positions.tolist() == sorted(order)
    assert sizes.tolist() == [abs(values[i]) for i in sorted(order)]


def test_a_jax_sweep_computes_no_other_parameter_gradients():
    params = [jnp.ones((500, 64)), jnp.ones((64, 8)), jnp.ones((8, 8))]
    linear = JaxLinearization(lambda table, w, v: [jnp.tanh(table[jnp.array([0, 3])] @ w @ v).sum(1)], params)
    sweep = linear.compile_vjp(0, [1, 2])
    assert [found.shape for found in sweep(jnp.ones(2))] == [(64, 8), (8, 8)]
    made = sweep.func.lower(*sweep.args, jnp.ones(2)).compile().memory_analysis()
    assert made.temp_size_in_bytes + made.output_size_in_bytes < params[0].nbytes / 10
