"""`eg.top(..., by="random")` draws elements with equal chances, the same ones for a seed."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import elementgrad as eg


def positions(places, model):
    shapes = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
    return {place.name: place.select(shapes[place.name]).flat().reshape(-1) for place in places}


@pytest.fixture
def model():
    return torch.nn.Sequential(torch.nn.Linear(30, 20), torch.nn.Linear(20, 5))


def test_a_seed_gives_the_same_elements_and_another_one_others(model):
    chosen = [eg.top(model, None, 50, by="random", seed=seed) for seed in (0, 0, 1)]
    assert chosen[0] == chosen[1] != chosen[2]
    assert eg.top(model, None, 50, by="random") == chosen[0]
    found = positions(chosen[0], model)
    assert sum(map(len, found.values())) == 50
    assert all((np.diff(each) > 0).all() for each in found.values())
    assert eg.trainable(model, chosen[0]).size == 50


def test_all_elements_have_equal_chances(model):
    counted = {name: np.zeros(tensor.numel()) for name, tensor in model.named_parameters()}
    for seed in range(400):
        for name, drawn in positions(eg.top(model, None, 100, by="random", seed=seed), model).items():
            counted[name][drawn] += 1
    size = sum(len(each) for each in counted.values())
    expected = 400 * 100 / size
    assert all(abs(each.mean() - expected) < 0.12 * expected for name, each in counted.items() if "weight" in name)
    assert np.concatenate(list(counted.values())).max() < 2 * expected


def test_elements_are_drawn_among_those_that_are_named_and_without_a_loss(model):
    (place,) = eg.top(model, None, 3, by="random", among="1.weight[2]")
    assert set(place.select((5, 20)).flat()) <= set(range(40, 60))
    every = eg.top(model, None, 725, by="random")
    assert sum(place.select(tuple(dict(model.named_parameters())[place.name].shape)).size for place in every) == 725
    with pytest.raises(eg.OptionError, match="k=726 is more than the 725 elements"):
        eg.top(model, None, 726, by="random")


def test_parameters_of_jax_have_random_elements_too():
    params = {"b": jnp.zeros(4), "w": jnp.zeros((3, 5))}
    chosen = eg.top(params, None, 7, by="random", seed=3)
    assert chosen == eg.top(params, None, 7, by="random", seed=3)
    assert sum(place.select(params[place.name].shape).size for place in chosen) == 7


@pytest.mark.parametrize("seed", [-1, 1.5, None, "0"])
def test_an_invalid_seed_is_refused(model, seed):
    with pytest.raises(eg.OptionError, match="is not a seed; give an int of at least 0"):
        eg.top(model, None, 5, by="random", seed=seed)
