"""A run ends at the last named value: nothing after it is computed, and all state is restored."""

import gc
import weakref

import numpy as np
import pytest
import torch

import elementgrad as eg
from elementgrad._names import stopping
from elementgrad.errors import PlaceError

STEPS = 40


class TorchSteps(torch.nn.Module):
    """Calls one cell forty times, in the way that `around` gives."""

    name = "torch"

    def __init__(self, around=None):
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(3, 3)
        self.cell = torch.nn.Linear(3, 3)
        self.calls, self.around = [], around

    def forward(self, x):
        if self.around is None:
            return self.run(x)
        return self.around(self, x)

    def run(self, x):
        x = self.first(x)
        for _ in range(STEPS if x.shape[0] == 2 else 1):
            x = torch.tanh(self.cell(x))
            self.calls.append(1)
        return x

    @staticmethod
    def input():
        return torch.arange(6.0).reshape(2, 3) / 6

    def expected(self, x, step):
        """Return the gradient of one element of the cell's result in some step."""
        x = x.detach().requires_grad_()
        y = self.first(x)
        for at in range(step + 1):
            y = self.cell(y) if at == 0 else self.cell(torch.tanh(y))
        return torch.autograd.grad(y[0, 1], x)[0].numpy()


def keras_steps(around=None):
    import keras
    import tensorflow as tf

    class KerasSteps(keras.Model):
        name_ = "keras"

        def __init__(self, around):
            super().__init__()
            keras.utils.set_random_seed(0)
            self.first = keras.layers.Dense(3, name="first")
            self.cell = keras.layers.Dense(3, name="cell")
            self.calls, self.around = [], around

        def call(self, x):
            return self.run(x) if self.around is None else self.around(self, x)

        def run(self, x):
            x = self.first(x)
            for _ in range(STEPS if x.shape[0] == 2 else 1):
                x = tf.tanh(self.cell(x))
                self.calls.append(1)
            return x

        @staticmethod
        def input():
            return tf.reshape(tf.range(6.0), (2, 3)) / 6

        def expected(self, x, step):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = self.first(x)
                for at in range(step + 1):
                    y = self.cell(y) if at == 0 else self.cell(tf.tanh(y))
                y = y[0, 1]
            return tape.gradient(y, x).numpy()

    model = KerasSteps(around)
    model(model.input())
    return model


MODELS = {"torch": TorchSteps, "keras": keras_steps}
pytestmark = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)


def count(model, call):
    """Run a read and return its numbers, and how many steps the model has run in full."""
    before = len(model.calls)
    numbers = np.asarray(call())
    return numbers, len(model.calls) - before


def read(model, of, x=None):
    x = model.input() if x is None else x
    return eg.grad(model, x, of=of, wrt="inputs" if "keras" in type(model).__mro__[1].__module__ else "x", cone=False)


@pytest.mark.parametrize("step", [0, 3, 39])
def test_a_numbered_call_runs_the_steps_before_it(make, step):
    model = make()
    numbers, steps = count(model, lambda: read(model, f"cell#{step}[0, 1]"))
    assert np.allclose(numbers, model.expected(model.input(), step), atol=1e-7)
    assert steps == step


def test_a_bare_name_of_many_calls_is_an_error(make):
    model = make()
    for _ in range(2):
        with pytest.raises(PlaceError, match="is 40 tensors here"):
            read(model, "cell[0, 1]")


def test_a_bare_name_stops_once_a_complete_run_has_shown_it_once(make):
    model = make()
    answers = [count(model, lambda: read(model, "first[0, 1]")) for _ in range(3)]
    assert [steps for _, steps in answers] == [STEPS, 0, 0]
    assert all(np.array_equal(numbers, answers[0][0]) for numbers, _ in answers)


def test_a_listing_of_names_is_a_complete_run(make):
    model = make()
    eg.names(model, model.input())
    assert count(model, lambda: read(model, "first[0, 1]"))[1] == 0


def test_arguments_of_other_shapes_need_a_complete_run_first(make):
    model = make()
    short = model.input()[:1]
    assert [count(model, lambda: read(model, "cell[0, 1]", short))[1] for _ in range(2)] == [1, 0]
    with pytest.raises(PlaceError, match="is 40 tensors here"):
        read(model, "cell[0, 1]")


def test_a_changed_model_runs_to_its_end_again(make):
    model = make()
    for _ in range(2):
        read(model, "first[0, 1]")
    model.around = lambda model, x: model.run(model.first(x))
    model.steps_before = 1  # a number among its attributes
    with pytest.raises(PlaceError, match="is 2 tensors here"):
        read(model, "first[0, 1]")


def test_values_and_derivatives_by_a_layer_stop_too(make):
    model = make()
    x = model.input()
    value, steps = count(model, lambda: eg.value(model, x, of="cell#2[0, 1]", cone=False))
    assert steps == 2
    between, steps = count(model, lambda: eg.grad(model, x, of="cell#2[0, 1]", wrt="cell#0", cone=False))
    assert steps == 2
    assert between.shape == (2, 3)
    assert np.isfinite(value)


def catches(model, x):
    try:
        return model.run(x)
    except:  # noqa: E722
        return model.run(x)


def retries(model, x):
    while True:
        try:
            return model.run(x)
        except BaseException:
            continue


def replaces(model, x):
    try:
        return model.run(x)
    except BaseException as error:
        raise ValueError("it failed") from error


@pytest.mark.parametrize("around", [catches, retries, replaces])
def test_a_model_that_catches_exceptions_gives_the_same(make, around):
    model = make(around)
    numbers, steps = count(model, lambda: read(model, "cell#3[0, 1]"))
    assert np.allclose(numbers, model.expected(model.input(), 3), atol=1e-7)
    again, steps = count(model, lambda: read(model, "cell#3[0, 1]"))
    assert steps == STEPS, "it is not stopped again"
    assert np.array_equal(numbers, again)


def test_errors_of_the_function_before_the_named_value_are_raised(make):
    def fails(model, x):
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        read(make(fails) if make is TorchSteps else failing_keras(make, fails), "cell#3[0, 1]")


def failing_keras(make, fails):
    model = make()
    model.around = fails
    return model


def test_nothing_is_remembered_of_a_model_that_is_gone(make):
    model = make()
    read(model, "first[0, 1]")
    key, gone = id(model), weakref.ref(model)
    assert key in stopping._models
    del model
    gc.collect()
    assert gone() is None
    assert key not in stopping._models
