"""A recording ends at the layer that was named: no layer behind it is traced, by an automatic cone or a required one."""

import numpy as np
import pytest
import torch

import elementgrad as eg

SIDE = 192
"""An image of this side and three channels is large enough to be recorded by itself."""


def torch_model():
    class Late(torch.nn.Module):
        calls = 0

        def forward(self, x):
            Late.calls += 1
            return x * 2

    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(3, 2, 3, padding=1), torch.nn.ELU(), torch.nn.Conv2d(2, 2, 3, padding=1), Late(), Late()]
    return torch.nn.Sequential(*layers), torch.rand(1, 3, SIDE, SIDE), "2", (0, 1, 7, 8), Late


def keras_model():
    import keras
    import tensorflow as tf

    class Late(keras.layers.Layer):
        calls = 0

        def call(self, x):
            Late.calls += 1
            return x * 2

    keras.utils.set_random_seed(0)
    inputs = keras.Input((SIDE, SIDE, 3), batch_size=1)
    x = keras.layers.Conv2D(2, 3, padding="same", activation="elu")(inputs)
    x = keras.layers.Conv2D(2, 3, padding="same", name="second")(x)
    model = keras.Model(inputs, Late()(Late()(x)))
    return model, tf.random.uniform((1, SIDE, SIDE, 3)), "second", (0, 7, 8, 1), Late


@pytest.fixture(params=[torch_model, keras_model], ids=["torch", "keras"])
def case(request):
    return request.param()


def count_late(late, read):
    """Run a read and return its numbers, and how many layers behind the named one ran."""
    before = late.calls
    numbers = np.asarray(read())
    return numbers, late.calls - before


@pytest.mark.parametrize("cone", [None, True])
def test_a_numbered_call_is_recorded_without_the_layers_behind_it(case, cone):
    model, x, name, index, late = case
    of = eg.at(f"{name}#0")[index]
    plain, late_in_plain = count_late(late, lambda: eg.grad(model, x, of=of, cone=False))
    numbers, late_in_cone = count_late(late, lambda: eg.grad(model, x, of=of, cone=cone))
    assert (late_in_plain, late_in_cone) == (0, 0)
    np.testing.assert_allclose(numbers, plain, atol=1e-6)
    value, late_in_value = count_late(late, lambda: eg.value(model, x, of=of, cone=cone))
    assert late_in_value == 0
    assert np.isfinite(value)


@pytest.mark.parametrize("cone", [None, True])
def test_a_bare_name_is_recorded_so_once_a_run_has_shown_one_call(case, cone):
    model, x, name, index, late = case
    eg.names(model, x)
    numbers, late_in_cone = count_late(late, lambda: eg.grad(model, x, of=eg.at(name)[index], cone=cone))
    assert late_in_cone == 0
    np.testing.assert_allclose(numbers, eg.grad(model, x, of=eg.at(name)[index], cone=False), atol=1e-6)
