"""Arguments as people give them: by keyword, from a tokenizer, as NumPy arrays; and keywords that are refused."""

from collections import UserDict

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
import tensorflow as tf
import torch
from torch import nn

import elementgrad as eg

VERBS = [eg.grad, eg.jacobian, eg.hessian, eg.explain, eg.check, eg.contributions, eg.names]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 1)

    def forward(self, x, batch=None, mask=None, **others):
        y = self.fc(x)
        y = y if mask is None else y * mask
        return (y if batch is None else y * batch).sum()


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.__name__)
def test_keywords_that_are_no_options_are_arguments(verb):
    net, x, mask = Net(), torch.ones(2, 3), torch.ones(2, 1)
    sides = {} if verb is eg.names else {"wrt": "x"}
    assert str(verb(net, x=x, mask=mask, **sides)) == str(verb(net, x, kwargs={"mask": mask}, **sides))
    assert "mask" in [row.name for row in eg.names(net, x=x, mask=mask)]


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.__name__)
def test_a_misspelt_option_is_refused_though_the_model_takes_any_keyword(verb):
    option = "names_from" if verb is eg.names else "wrt" if verb in (eg.explain, eg.check) else "unconnected"
    option = "kind" if verb is eg.names else option
    misspelt = {"kind": "kinds", "wrt": "wrtt", "unconnected": "unconected"}[option]
    with pytest.raises(
        eg.OptionError, match=rf"{misspelt}= is not an option of eg.{verb.__name__}; did you mean {option}="
    ):
        verb(Net(), torch.ones(2, 3), **{misspelt: "x"})


def test_a_keyword_that_the_function_does_not_take_is_read_as_an_option():
    with pytest.raises(eg.OptionError, match=r"wtr= is not an option of eg.grad; did you mean wrt="):
        eg.grad(lambda x: x.sum(), torch.ones(3), wtr="x")
    with pytest.raises(TypeError, match="unexpected keyword argument 'temperature'"):
        eg.grad(lambda x: x.sum(), torch.ones(3), temperature=2.0)


def test_an_argument_that_is_called_like_an_option_goes_into_kwargs():
    net, x = Net(), torch.ones(2, 3)
    with pytest.raises(eg.OptionError, match=r"batch= of type Tensor is neither True nor False.*kwargs={'batch': ...}"):
        eg.grad(net, x, batch=torch.ones(2, 1), wrt="x")
    assert eg.grad(net, x, kwargs={"batch": torch.ones(2, 1)}, wrt="batch").shape == (2, 1)
    with pytest.raises(eg.OptionError, match="mask is given both directly and in kwargs="):
        eg.grad(net, x, kwargs={"mask": x}, mask=x)
    with pytest.raises(TypeError, match="nonsense"):
        eg.grad(lambda x: x.sum(), torch.ones(2), nonsense=3)


@pytest.mark.parametrize("kind", [dict, UserDict])
def test_the_dict_of_a_tokenizer_is_arguments_by_name(kind):
    net, given = Net(), {"x": torch.ones(2, 3), "mask": torch.full((2, 1), 2.0)}
    assert torch.equal(eg.grad(net, kind(given), wrt="x"), eg.grad(net, **given, wrt="x"))
    assert eg.grad(lambda batch: net(**batch), kind(given), wrt="batch.mask").shape == (2, 1)


def make_keras(kind):
    keras.utils.set_random_seed(0)
    if kind == "sequential":
        return keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    if kind == "functional":
        inputs = keras.Input((3,), name="features")
        return keras.Model(inputs, keras.layers.Dense(2)(inputs))

    class Subclass(keras.Model):
        def __init__(self):
            super().__init__()
            self.d = keras.layers.Dense(2)

        def call(self, x):
            return self.d(x)

    return Subclass()


@pytest.mark.parametrize("kind", ["sequential", "functional", "subclass"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_numpy_arrays_are_inputs_of_keras_models_by_one_name(kind, dtype):
    model, x = make_keras(kind), np.ones((1, 3), dtype)
    read = eg.grad(model, x, of="output[0, 1]", wrt="inputs")
    assert read.dtype == tf.float32
    np.testing.assert_allclose(read[0], model.layers[-1].kernel[:, 1], rtol=1e-6)
    np.testing.assert_array_equal(read, eg.grad(model, x, of="output[0, 1]"))
    np.testing.assert_array_equal(read, eg.grad(model, tf.constant(x, "float32"), of="output[0, 1]", wrt="inputs"))
    assert eg.explain(model, x, of="output[0, 1]", wrt="inputs[0, 0]").verdict == "flows"
    assert eg.check(model, x, of="output[0, 1]", wrt="inputs[0, 0]")
    assert eg.names(model, x, kind="input")[0].dtype == "float32"


def test_numpy_arrays_are_inputs_of_jax_functions():
    def f(x):
        return jnp.sum(x**2)

    x = np.array([1.0, 2.0])
    for function in (f, jax.jit(f)):
        assert eg.grad(function, x).tolist() == [2.0, 4.0]
        assert eg.grad(function, x, wrt="x[1]") == 4.0
    assert eg.check(f, x)

    def g(params, x):
        assert isinstance(x, np.ndarray | jax.Array)
        return jnp.sum(params["w"] * x)

    params = {"w": jnp.ones(2)}
    assert eg.grad(g, params, x, wrt="x").tolist() == [1.0, 1.0]
    assert eg.grad(g, params, x).tolist() == [1.0, 2.0]  # tensors come before arrays
    assert [row.name for row in eg.names(g, params, x)] == ["params.w", "x", "output"]


def test_numpy_arrays_that_are_no_numbers_are_left_alone():
    def f(x, words):
        assert words.dtype.kind == "U"
        return jnp.sum(x)

    assert eg.grad(f, jnp.ones(2), np.array(["a", "b"])).tolist() == [1.0, 1.0]


def test_numpy_arrays_have_no_gradients_on_pytorch():
    with pytest.raises(eg.FrameworkError, match="a NumPy array carries no gradients"):
        eg.grad(lambda x: torch.as_tensor(x).sum(), np.ones(3))


class Wrapper(nn.Module):
    """Passes everything on, as the wrappers of PEFT do."""

    main_input_name = "x"

    def __init__(self):
        super().__init__()
        self.inner = Net()

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


def test_an_argument_of_any_name_has_its_own_name():
    net, x = Wrapper(), torch.ones(2, 3)
    expected = eg.grad(net.inner, x, wrt="x")
    for wrt in ("x", "kwargs.x", None):
        assert torch.equal(eg.grad(net, x=x, wrt=wrt), expected)
    assert [row.name for row in eg.names(net, x=x, kind="input")] == ["x"]

    def both(x, /, **others):
        return (x * others["x"] ** 2).sum()

    three = torch.tensor([3.0])
    assert eg.grad(both, torch.ones(1), x=three, wrt="others.x") == 6.0
    assert eg.grad(both, torch.ones(1), x=three, wrt="x") == 9.0


@pytest.mark.parametrize("kind", [dict, UserDict])
def test_a_wrapper_passes_the_dict_of_a_tokenizer_on(kind):
    net, x = Wrapper(), torch.ones(2, 3)
    tokens = kind({"x": x, "mask": torch.ones(2, 1)})
    assert torch.equal(eg.grad(net, tokens, wrt="x"), eg.grad(net, x=x, wrt="x"))


@pytest.mark.parametrize("option", ["batch", "create_graph", "cone", "budget", "unconnected", "of"])
def test_a_tensor_in_an_option_is_refused_with_the_way(option):
    with pytest.raises(eg.ElementgradError, match=rf"kwargs={{'{option}': ...}}"):
        eg.grad(Net(), torch.ones(2, 3), wrt="x", **{option: torch.ones(2, 1)})
    with pytest.raises(eg.PlaceError, match=r"kwargs={'via': ...}"):
        eg.contributions(Net(), torch.ones(2, 3), wrt="x[0, 0]", via=torch.ones(1))


def test_numpy_arrays_in_containers_are_inputs_of_keras_models():
    left, right = keras.Input((3,), name="left"), keras.Input((3,), name="right")
    added = keras.layers.Add()([left, keras.ops.square(right)])
    rows = np.arange(6.0, dtype="float32").reshape(2, 3)
    by_name = keras.Model({"left": left, "right": right}, added)
    for wrt in ("inputs.right", "right"):
        found = eg.grad(by_name, {"left": rows, "right": rows}, of="output[1, 2]", wrt=wrt)
        np.testing.assert_array_equal(found, [[0, 0, 0], [0, 0, 10]])
    found = eg.grad(keras.Model([left, right], added), [rows, rows], of="output[1, 2]", wrt="inputs.1")
    np.testing.assert_array_equal(found, [[0, 0, 0], [0, 0, 10]])


def test_any_keras_model_can_be_called_with_training():
    class Double(keras.Model):
        def call(self, inputs):
            return 2 * inputs

    for training in (True, False):
        assert eg.grad(Double(), tf.ones(1), training=training) == 2.0


def test_compiled_jax_functions_take_numpy_arrays():
    @jax.jit
    def square_sum(x):
        return (x**2).sum()

    np.testing.assert_array_equal(eg.grad(square_sum, np.array([1.0, 2.0])), [2.0, 4.0])
