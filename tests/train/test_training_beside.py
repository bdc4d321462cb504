"""Parameters that train beside elements: those that `keep` names, a warning about others, hooks."""

import copy
import warnings

import keras
import numpy as np
import pytest
import torch
from torch import nn

import elementgrad as eg
from tests.support.tagger import state


class Lora(nn.Module):
    """A linear layer with an adapter, built and named as PEFT does it: the layer is frozen and the adapter trains."""

    def __init__(self, base):
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, base.out_features, bias=False)})

    def forward(self, x):
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, 4).requires_grad_(False)
        self.attn = Lora(nn.Linear(4, 4))
        self.norm = nn.LayerNorm(4).requires_grad_(False)

    def forward(self, tokens):
        return self.norm(self.attn(self.table(tokens)))


PLACE, OTHER = "table.weight[3]", "table.weight[5, 1]"
ADAPTERS = ["attn.lora_A.default.weight", "attn.lora_B.default.weight"]
TOKENS = torch.tensor([[3, 5, 1]])


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Adapted()


def flags(model):
    return {name: one.requires_grad for name, one in model.named_parameters() if "_elements_" not in name}


def steps(model, count=2):
    """Steps of an optimizer that has all that trains, as trainers of others make it."""
    before = state(model)
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=0.1, weight_decay=0.1)
    for _ in range(count):
        optimizer.zero_grad()
        model(TOKENS).square().mul(torch.arange(1.0, 5.0)).sum().backward()
        optimizer.step()
    return {name: (now != before[name]).nonzero() for name, now in state(model).items() if (now != before[name]).any()}


@pytest.fixture
def silent():
    with warnings.catch_warnings():
        warnings.simplefilter("error", eg.ElementgradWarning)
        yield


@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize(
    "keep", ["lora_*", ["lora_A", "lora_B"], ADAPTERS, "*.default.*", "attn.lora_?", ("*lora_A*", "lora_B.default")]
)
def test_kept_parameters_train_beside_the_elements(model, keep):
    before = flags(model)
    elements = eg.trainable(model, PLACE, keep=keep)
    assert flags(model) == before
    assert [name for name, flag in before.items() if flag] == ADAPTERS
    assert len(list(elements.parameters())) == 1
    moved = steps(model)
    assert sorted(moved) == [*ADAPTERS, "table.weight"]
    assert set(moved["table.weight"][:, 0].tolist()) == {3}
    elements.release()
    assert flags(model) == before


def test_without_keep_a_model_in_which_some_train_is_warned_of(model):
    before = flags(model)
    with pytest.warns(eg.ElementgradWarning) as caught:
        elements = eg.trainable(model, PLACE)
    (one,) = caught
    assert one.filename == __file__
    assert str(one.message) == (
        "attn.lora_A.default.weight, attn.lora_B.default.weight trained before, while others of the model did not, and "
        "eg.trainable freezes them; name what should stay trainable by keep='attn.lora_A.default.weight', a wildcard "
        "or a list"
    )
    assert issubclass(eg.ElementgradWarning, UserWarning)
    assert sorted(steps(model)) == ["table.weight"]
    elements.release()
    assert flags(model) == before


@pytest.mark.usefixtures("silent")
def test_an_empty_keep_freezes_all_without_a_warning(model):
    eg.trainable(model, PLACE, keep=[])
    assert not any(flags(model).values())


def test_the_warning_as_an_error_leaves_the_model_alone(model):
    before = flags(model), {name: type(module) for name, module in model.named_modules()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(eg.ElementgradWarning, match="trained before"):
            eg.trainable(model, PLACE)
    assert (flags(model), {name: type(module) for name, module in model.named_modules()}) == before


@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize("frozen", ["none", "all", "all but its own", "numbers that never train"])
def test_a_model_without_a_choice_of_what_trains_is_no_reason_to_warn(frozen):
    model = Adapted().requires_grad_(frozen in ("none", "numbers that never train"))
    model.table.weight.requires_grad_(frozen != "all")
    if frozen == "numbers that never train":
        model.count = nn.Parameter(torch.arange(3), requires_grad=False)
    eg.trainable(model, PLACE).release()


@pytest.mark.usefixtures("silent")
def test_a_second_call_does_not_warn_and_keeps_the_first(model):
    before = flags(model)
    first = eg.trainable(model, PLACE, keep="lora_A")
    second = eg.trainable(model, OTHER)
    assert flags(model) == before | {"attn.lora_B.default.weight": False}
    third = eg.trainable(model, "norm.bias[1]", keep="lora_B")  # which the first call had frozen
    assert flags(model) == before
    assert sorted(steps(model)) == [*ADAPTERS, "norm.bias", "table.weight"]
    for elements in (first, third):
        elements.release()
        assert flags(model) == before
    second.release()
    assert flags(model) == before
    assert sorted(steps(model)) == ADAPTERS


@pytest.mark.usefixtures("silent")
def test_elements_of_a_kept_parameter_train_after_release(model):
    first = eg.trainable(model, PLACE, keep="lora_A")
    eg.trainable(model, OTHER, keep="lora_B").release()
    with pytest.raises(eg.ElementgradError):
        eg.trainable(model, "attn.lora_A.default.weight[0, 0]")
    eg.trainable(model, "attn.lora_B.default.weight[0, 0]").release()
    first.release()


def test_the_warning_of_the_first_call_is_not_repeated(model):
    with pytest.warns(eg.ElementgradWarning):
        eg.trainable(model, PLACE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        eg.trainable(model, OTHER)


@pytest.mark.usefixtures("silent")
def test_a_patch_freezes_nothing(model, tmp_path):
    pristine, before = copy.deepcopy(model), flags(model)
    elements = eg.trainable(model, PLACE, keep="lora_*")
    steps(model)
    elements.save(tmp_path / "patch.safetensors")
    eg.apply(pristine, tmp_path / "patch.safetensors")
    assert flags(pristine) == before
    assert torch.equal(pristine.table.weight, model.table.weight)


@pytest.mark.usefixtures("silent")
def test_a_copied_model_releases_the_parameters_of_keep(model):
    before = flags(model)
    model, elements = copy.deepcopy((model, eg.trainable(model, PLACE, keep="lora_*")))
    with pytest.raises(eg.DuplicateError, match="as keep= of an earlier"):
        eg.trainable(model, "attn.lora_A.default.weight[0, 1]")
    elements.release()
    assert flags(model) == before


REFUSED = [
    (lambda model: eg.trainable(model, PLACE, keep="loar_*"), eg.PlaceError, "keep='loar_\\*' names no parameter; "),
    (
        lambda model: eg.trainable(model, PLACE, keep="attn.lora_A.defualt.weight"),
        eg.PlaceError,
        "nearest: attn.lora_A.default.weight",
    ),
    (lambda model: eg.trainable(model, PLACE, keep=3), eg.OptionError, "keep=3 names no parameters"),
    (lambda model: eg.trainable(model, PLACE, keep=["lora_A", 3]), eg.OptionError, "names no parameters"),
    (lambda model: eg.trainable(model, PLACE, keep=""), eg.OptionError, "keep='' names no parameters"),
    (lambda model: eg.trainable(model, PLACE, keep="norm"), eg.OptionError, "norm.weight, norm.bias, which did not"),
    (lambda model: eg.trainable(model, PLACE, keep="*"), eg.DuplicateError, "lets all of table.weight train"),
]


@pytest.mark.parametrize(("call", "error", "text"), REFUSED)
def test_invalid_values_of_keep_are_refused(model, call, error, text):
    before = flags(model)
    with pytest.raises(error, match=text):
        call(model)
    assert flags(model) == before


def test_a_parameter_trains_as_a_whole_or_by_elements(model):
    elements = eg.trainable(model, PLACE, keep="lora_*")
    with pytest.raises(eg.DuplicateError, match="as keep= of an earlier"):
        eg.trainable(model, "attn.lora_A.default.weight[0, 1]")
    elements.release()
    eg.trainable(model, "attn.lora_A.default.weight[0, 1]", keep="lora_B")
    with pytest.raises(eg.DuplicateError, match="and elements of it do; release them first"):
        eg.trainable(model, PLACE, keep="lora_A")


def test_names_of_a_tied_parameter_keep_it():
    model = nn.ModuleDict({"table": nn.Embedding(5, 3), "head": nn.Linear(3, 5), "last": nn.Linear(5, 1)})
    model["head"].weight = model["table"].weight
    eg.trainable(model, "last.weight[0, 1]", keep="head.weight")
    assert model["table"].weight.requires_grad
    assert not model["head"].bias.requires_grad


def keras_model():
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Embedding(7, 4, name="table"), keras.layers.Flatten(), keras.layers.Dense(3, name="head")]
    model = keras.Sequential([keras.Input((2,), dtype="int32"), *layers])
    model.get_layer("table").trainable = False
    return model


def keras_moved(model):
    """Which elements of which variables a fit moves."""
    named = {f"{layer.name}/{variable.name}": variable for layer in model.layers for variable in layer.weights}
    before = {name: variable.numpy() for name, variable in named.items() if "_elements_" not in name}
    model.compile(keras.optimizers.Adam(0.1), "mse")
    model.fit(np.array([[3, 5], [1, 3]]), np.eye(2, 3), epochs=2, verbose=0)
    return {name: named[name].numpy() != then for name, then in before.items()}


@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize("keep", ["head", "head/*", ["kernel", "head/bias"]])
def test_kept_variables_are_fitted_beside_the_elements(keep):
    model = keras_model()
    model.get_layer("table").trainable = True
    model.get_layer("head").bias.trainable = keep != "head"
    elements = eg.trainable(model, "table/embeddings[3]", keep=keep)
    names = ["head/kernel", "head/bias"][: 1 + (keep != "head")]
    kept = [variable.path for variable in model.trainable_variables if "_elements_" not in variable.path]
    assert sorted(path.split("/", 1)[-1] for path in kept) == sorted(names)
    moved = {name: found for name, found in keras_moved(model).items() if found.any()}
    assert sorted(moved) == sorted(["table/embeddings", *names])
    assert np.flatnonzero(moved["table/embeddings"].any(1)).tolist() == [3]
    elements.release()
    assert model.get_layer("head").kernel.trainable
    assert model.get_layer("head").bias.trainable == (keep != "head")


def test_a_keras_model_in_which_some_train_is_warned_of_once():
    model = keras_model()
    with pytest.warns(eg.ElementgradWarning, match="^head/kernel, head/bias trained before"):
        first = eg.trainable(model, "table/embeddings[3]")
    with warnings.catch_warnings():
        warnings.simplefilter("error", eg.ElementgradWarning)
        second = eg.trainable(model, "table/embeddings[5]", keep="head")
    assert model.get_layer("head").kernel.trainable
    with pytest.raises(eg.DuplicateError, match="as keep= of an earlier"):
        eg.trainable(model, "head/kernel[0, 0]")
    second.release()
    first.release()
    assert [variable.trainable for layer in model.layers for variable in layer.weights] == [False, True, True]


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_a_parameter_do_not_run_for_its_elements_which_is_said(register):
    model = nn.Linear(3, 2)
    heard = []
    getattr(model.weight, register)(lambda gradient: heard.append(gradient))
    with pytest.warns(eg.ElementgradWarning, match="^weight has gradient hooks, which do not run for elements of it"):
        elements = eg.trainable(model, ["weight[0, 1]", "weight[1]", "bias[0]"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.ones(1, 3)).sum().backward()
    assert heard == []
    getattr(elements["weight[0, 1]"], register)(lambda gradient: heard.append(gradient))  # as the warning says
    model(torch.ones(1, 3)).sum().backward()
    assert len(heard) == 1
