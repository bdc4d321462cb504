"""A recording ends at the layer that was named, and one that does not pay is not made again."""

import numpy as np
import pytest
import torch

import elementgrad as eg
from elementgrad._backends.torch.cone.program import TorchCone

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


def light_function(runs):
    """Return a function that computes little with its argument, and notes that it runs."""

    def f(x):
        runs.append(1)
        return x * x * 0.5 + 1

    return f


def test_a_recording_in_vain_is_not_made_again(fw):
    x, runs = fw.tensor(np.linspace(-1, 1, 120_000, dtype=np.float32)), []
    f = light_function(runs)

    def count(read):
        before = len(runs)
        read()
        return len(runs) - before

    plain = count(lambda: eg.grad(f, x, of="output[7]", cone=False))
    first, *later = [count(lambda at=at: eg.grad(f, x, of=eg.at("output")[at])) for at in range(3)]
    assert first > plain
    assert later == [plain, plain]
    value = count(lambda: eg.value(f, x, of="output[7]", cone=False))
    assert [count(lambda: eg.value(f, x, of="output[7]")) for _ in range(2)][1] == value
    # A lambda that is made anew for each read is the same function.
    assert [count(lambda: eg.grad(lambda x: f(x), x, of="output[7]")) > plain for _ in range(3)] == [True, False, False]


def test_another_model_around_the_same_code_is_recorded(monkeypatch):
    noted = []
    record = TorchCone.record
    monkeypatch.setattr(TorchCone, "record", lambda self, *args: noted.append(1) or record(self, *args))
    x = torch.randn(1, 3, SIDE, SIDE)

    def read(model):
        return eg.grad(lambda x: model(x), x, of="output[0, 0, 5, 5]")

    light, heavy = torch.nn.Tanh(), torch.nn.Conv2d(3, 64, 9)
    for model in (light, light, heavy, heavy):
        read(model)
    assert len(noted) == 3


class Stubborn:
    """A TensorFlow function of many operations that catches all exceptions and begins again."""

    def __init__(self):
        self.steps = 0

    def __call__(self, x):
        for _ in range(2):
            try:
                y = x
                for _ in range(400):
                    y = y * 0.99
                    self.steps += 1
                return y
            except BaseException:
                continue
        return None


def test_a_trace_of_too_many_operations_is_left_early():
    import tensorflow as tf

    x = tf.ones((1, 120_000))
    steps = []

    def long(x):
        for _ in range(400):
            x = x * 0.99
            steps.append(1)
        return x

    expected = eg.grad(long, x, of="output[0, 5]", cone=False)
    steps.clear()
    np.testing.assert_array_equal(eg.grad(long, x, of="output[0, 5]"), expected)
    assert 400 < len(steps) < 600
    stubborn = Stubborn()
    np.testing.assert_array_equal(eg.grad(stubborn, x, of="output[0, 5]"), expected)
    again = stubborn.steps
    np.testing.assert_array_equal(eg.grad(stubborn, x, of="output[0, 5]"), expected)
    assert stubborn.steps - again == 400
