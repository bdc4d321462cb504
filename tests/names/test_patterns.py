"""Names that one can search: listings without a run, patterns, repeated calls, and what modules are given."""

import keras
import numpy as np
import pytest
import torch
from torch import nn

import elementgrad as eg
from elementgrad._names.names import match_names
from tests.support.frameworks import JAX


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.attn = nn.MultiheadAttention(3, 1, batch_first=True)

    def forward(self, x):
        return x + self.attn(self.fc(x), x, x)[0]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.h = nn.ModuleList([Block() for _ in range(12)])
        self.cell = nn.Linear(3, 3)

    def forward(self, x):
        for block in self.h:
            x = block(x)
        for _ in range(40):
            x = torch.tanh(self.cell(x))
        return x


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net().double()


X = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0)).double()


def test_names_without_arguments_need_no_run(net):
    rows = eg.names(net)
    assert {row.kind for row in rows} == {"parameter"}
    assert [row.name for row in rows] == [name for name, _ in net.named_parameters()]
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="d"), keras.layers.BatchNormalization()])
    assert [row.name for row in eg.names(model, kind="parameter", match="d/*")] == ["d/kernel", "d/bias"]
    assert {row.kind for row in eg.names(model)} == {"parameter", "buffer"}
    assert [row.name for row in eg.names(JaxPair(JAX.tensor([1.0]), JAX.tensor([2.0])))] == ["first", "second"]


class JaxPair(tuple):
    def __new__(cls, first, second):
        return super().__new__(cls, (first, second))

    _fields = ("first", "second")

    def __call__(self, x):
        return self[0] * x + self[1]


def test_names_are_filtered_by_kind_and_pattern(net):
    assert len(eg.names(net, match="h.*.fc.weight")) == 12
    assert len(eg.names(net, match="**.weight")) == 12 * 2 + 1
    assert [row.name for row in eg.names(net, X, kind="input")] == ["x"]
    assert [row.name for row in eg.names(net, X, match="h.1*")] == ["h.1", "h.10", "h.11"]
    with pytest.raises(eg.PlaceError, match=r"no name matches 'h.\*.fcc.weight'; nearest: h\.\d+\.fc\.weight"):
        eg.names(net, match="h.*.fcc.weight")
    with pytest.raises(eg.OptionError, match="kind='weight' is none of input, output"):
        eg.names(net, kind="weight")
    with pytest.raises(eg.OptionError, match="is not a pattern of names"):
        eg.names(net, match="fc[0]")


def test_forty_calls_are_one_line_of_the_table(net):
    rows = eg.names(net, X)
    assert len([row for row in rows if row.name.startswith("cell#")]) == 40
    lines = [line for line in str(rows).splitlines() if line.startswith("cell#")]
    assert len(lines) == 1
    assert lines[0].split() == ["cell#*", "activation", "2x4x3", "float64", "40"]


def test_a_pattern_reads_all_that_it_matches(net):
    read = eg.grad(net, X, of="output[0, 0, 0]", wrt="h.*.fc.weight[0]")
    assert list(read) == [f"h.{i}.fc.weight[0]" for i in range(12)]
    for place, gradient in read.items():
        assert torch.equal(gradient, eg.grad(net, X, of="output[0, 0, 0]", wrt=place))
    nested = eg.grad(net, X, of=["h.0[0, 0, 0]"], wrt={"x": "x", "cells": "cell#3*[0, 0]"}, unconnected="zero")
    assert list(nested[0]["cells"]) == [f"cell#{i}[0, 0]" for i in (3, *range(30, 40))]
    J = eg.jacobian(net, X, of="cell#3*[0, 0]", wrt="x")
    assert J["cell#39[0, 0]"].shape == (3, 2, 4, 3)
    H = eg.hessian(net, X, of="output[0, 0, 0]", wrt="h.1*.fc.bias[0]")
    assert list(H["h.1.fc.bias[0]"]) == [f"h.{i}.fc.bias[0]" for i in (1, 10, 11)]


PATTERN_CASES = {
    "torch": lambda: (
        torch.nn.Sequential(*[torch.nn.Linear(2, 2).double() for _ in range(3)]),
        X[0, 0, :2],
        "*.bias[0]",
        [f"{i}.bias[0]" for i in range(3)],
        "output[0]",
    ),
    "tensorflow": lambda: (
        keras.Sequential([keras.Input((2,)), *[keras.layers.Dense(2, name=f"d{i}") for i in range(3)]]),
        np.ones((1, 2), "float32"),
        "d*/bias[0]",
        [f"d{i}/bias[0]" for i in range(3)],
        "output[0, 0]",
    ),
    "jax": lambda: (
        lambda h: h[0] * h[1] + h[2],
        [JAX.tensor([1.0, 2.0]) for _ in range(3)],
        "h.*[0]",
        [f"h.{i}[0]" for i in range(3)],
        "output[0]",
    ),
}


@pytest.mark.parametrize("framework", PATTERN_CASES)
def test_a_pattern_explains_checks_and_splits_all_that_it_matches(framework):
    f, x, pattern, places, of = PATTERN_CASES[framework]()
    gradients = eg.grad(f, x, of=of, wrt=pattern)
    diagnoses = eg.explain(f, x, of=of, wrt=pattern)
    checks = eg.check(f, x, of=of, wrt=pattern)
    shares = eg.contributions(f, x, of=of, wrt=pattern)
    for answers in (gradients, diagnoses, checks, shares):
        assert list(answers) == places
    for place in places:
        assert diagnoses[place].verdict == "flows"
        assert diagnoses[place].wrt == place
        assert checks[place].verdict == "agrees"
        assert checks[place].entries[0].wrt == place
        np.testing.assert_allclose(np.asarray(shares[place].total), np.asarray(gradients[place]))
        np.testing.assert_allclose(np.asarray(diagnoses[place].value), np.asarray(gradients[place]))


def test_patterns_of_both_sides_nest(net):
    diagnoses = eg.explain(net, X, of="h.1*[0, 0, 0]", wrt={"first": "h.0.fc.bias[0]", "x": "x"})
    assert list(diagnoses) == ["h.1[0, 0, 0]", "h.10[0, 0, 0]", "h.11[0, 0, 0]"]
    assert diagnoses["h.10[0, 0, 0]"]["x"].verdict == "flows"
    checks = eg.check(net, X, of="h.1*[0, 0, 0]", wrt="h.0.fc.bi*[0]")
    assert list(checks["h.11[0, 0, 0]"]) == ["h.0.fc.bias[0]"]


def test_paths_avoid_all_that_a_pattern_matches(net):
    listed = [f"h.{i}.fc" for i in range(12)]
    question = {"of": "output[0, 0, 0]", "wrt": "x[0, 0, 0]", "unconnected": "zero"}
    by_pattern = eg.contributions(net, X, without="h.*.fc", **question)
    assert torch.equal(by_pattern.total, eg.contributions(net, X, without=listed, **question).total)


def test_a_pattern_without_a_match_is_refused(net):
    with pytest.raises(eg.PlaceError, match=r"no name matches 'layers.\*'"):
        eg.grad(net, X, of="output[0, 0, 0]", wrt="layers.*")
    with pytest.raises(eg.PlaceError, match=r"no name matches 'layers.\*'"):
        eg.explain(net, X, of="output[0, 0, 0]", wrt="layers.*")
    with pytest.raises(eg.PlaceError, match=r"no name matches 'layers.\*'"):
        eg.field(net, X, of="output[0, 0, 0]", wrt="layers.*")
    with pytest.raises(eg.PlaceError, match=r"'cell' is 40 tensors here; name one: cell#0, cell#1"):
        eg.grad(net, X, of="output[0, 0, 0]", wrt="cell")


def test_patterns_choose_what_trains(net):
    elements = eg.trainable(net, "h.*.fc.weight[0]")
    assert [str(place) for place in elements.places] == [f"h.{i}.fc.weight[0]" for i in range(12)]
    elements.release()
    with pytest.raises(eg.PlaceError, match="no name matches"):
        eg.trainable(net, "h.*.fcc.weight[0]")
    params = {"h": [{"w": JAX.tensor([1.0, 2.0])} for _ in range(3)]}
    assert [str(place) for place in eg.trainable(params, "h.*.w[0]").places] == ["h.0.w[0]", "h.1.w[0]", "h.2.w[0]"]
    model = keras.Sequential([keras.Input((3,)), *[keras.layers.Dense(3, name=f"d{i}") for i in range(3)]])
    places = [str(place) for place in eg.trainable(model, "d*/kernel[0]").places]
    assert places == ["d0/kernel[0]", "d1/kernel[0]", "d2/kernel[0]"]


def test_inputs_of_modules_are_places(net):
    # The block adds its input to what attention makes of it, so that the two derivatives differ.
    given = eg.grad(net, X, of="h.1[0, 0, 0]", wrt="h.1.fc.input")
    read = torch.func.grad(lambda x: (X + net.h[1].attn(net.h[1].fc(x), X1, X1)[0])[0, 0, 0])(X1 := net.h[0](X))
    torch.testing.assert_close(given, read)
    same = eg.grad(net, X, of="h.1.fc.input[0, 0, 0]", wrt="h.0")
    assert same[0, 0, 0] == same.sum() == 1
    parts = [eg.grad(net, X, of="h.1[0, 0, 0]", wrt=f"h.1.attn.input:{i}") for i in range(3)]
    assert all(part.abs().sum() > 0 for part in parts)
    names = [row.name for row in eg.names(net, X, kind="given", match="h.1.**")]
    assert names == ["h.1.input", "h.1.fc.input", "h.1.attn.input:0", "h.1.attn.input:1", "h.1.attn.input:2"]
    assert "given" not in {row.kind for row in eg.names(net, X)}
    assert eg.explain(net, X, of="output[0, 0, 0]", wrt="h.1.fc.input[0, 0, 0]").verdict == "flows"
    assert eg.check(net, X, of="h.1[0, 0, 0]", wrt="h.1.fc.input[0, 0, 0]")
    assert not net.h[1].fc._forward_pre_hooks
    assert not net.h[1].fc._forward_pre_hooks_with_kwargs


def test_a_child_named_input_is_found_before_the_modules_input():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = nn.Sequential()
            self.part.add_module("input", nn.Linear(2, 2, bias=False))

        def forward(self, x):
            return self.part(2 * x).sum()

    net, x = Odd(), torch.ones(1, 2)
    assert torch.equal(eg.grad(net, x, wrt="part.input"), torch.ones(1, 2))
    given = eg.grad(net, x, wrt=eg.at("part.input", kind="given"))
    assert torch.equal(given, net.part[0].weight.sum(0)[None])
    assert torch.equal(eg.grad(net, x, wrt="part.input (given)"), given)


def test_a_parameter_that_is_called_input_has_the_name_in_patterns():
    class Gate(nn.Module):
        def __init__(self):
            super().__init__()
            self.input = nn.Parameter(torch.tensor([2.0, 3.0]))

        def forward(self, x):
            return x * self.input

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = Gate()

        def forward(self, x):
            return self.gate(3 * x).sum()

    net, x = Net(), torch.ones(1, 2)
    assert eg.grad(net, x, wrt="*.input")["gate.input"].tolist() == [3, 3]
    assert list(eg.grad(net, x, wrt="*.input")) == ["gate.input"]
    given = eg.grad(net, x, wrt=eg.at("*.input", kind="given"))
    assert [(name, gradient.tolist()) for name, gradient in given.items()] == [("gate.input (given)", [[2, 3]])]


def test_arguments_by_name_are_given_by_name():
    class Scale(nn.Module):
        def forward(self, x, *, scale):
            return x * scale

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Scale()

        def forward(self, x):
            return self.inner(x, scale=x**2).sum()

    x = torch.tensor([2.0, 3.0])
    assert torch.equal(eg.grad(Outer(), x, wrt="inner.input:scale"), x)
    assert torch.equal(eg.grad(Outer(), x, wrt="inner.input:0"), x**2)
    with pytest.raises(eg.PlaceError, match=r"'inner.input' is 2 tensors here; name one: inner.input:0"):
        eg.grad(Outer(), x, wrt="inner.input")


def test_inputs_of_keras_layers_are_places():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="a"), keras.layers.Dense(1, name="b")])
    x = np.ones((1, 3), "float32")
    given = eg.grad(model, x, of="output[0, 0]", wrt="b.input")
    np.testing.assert_allclose(given[0], model.layers[1].kernel[:, 0], rtol=1e-6)
    assert [row.name for row in eg.names(model, x, kind="given")] == ["a.input", "b.input"]
    np.testing.assert_allclose(eg.grad(model, x, of="a.input[0, 1]", wrt="inputs"), [[0, 1, 0]])


def test_the_input_of_one_call_may_be_numbered_behind_the_module(net):
    x = torch.ones(1, 2, 3, dtype=torch.float64)
    numbered = eg.grad(net, x, of="output[0, 0, 0]", wrt="cell#38.input")
    assert torch.equal(numbered, eg.grad(net, x, of="output[0, 0, 0]", wrt="cell.input#38"))
    assert torch.equal(eg.grad(net, x, of="output[0, 0, 0]", wrt="cell#38.input:0"), numbered)


class KerasBlocks(keras.Model):
    def __init__(self):
        super().__init__()
        self.blocks = [keras.layers.Dense(3) for _ in range(3)]

    def call(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def test_patterns_match_attribute_paths_of_keras():
    model, x = KerasBlocks(), np.ones((1, 3), "float32")
    model(x)
    automatic = [str(row.name) for row in eg.names(model, match="*/kernel")]
    assert [row.name for row in eg.names(model, match="blocks.*.kernel")] == automatic
    assert [row.name for row in eg.names(model, x, match="blocks.*", kind="activation")] == [
        name.removesuffix("/kernel") for name in automatic
    ]
    gradients = eg.grad(model, x, of="output[0, 1]", wrt="blocks.*.kernel[0]")
    assert list(gradients) == [f"blocks.{index}.kernel[0]" for index in range(3)]  # the same in every process
    for index, gradient in enumerate(gradients.values()):
        np.testing.assert_array_equal(gradient, eg.grad(model, x, of="output[0, 1]", wrt=f"blocks.{index}.kernel[0]"))
    elements = eg.trainable(model, "blocks.*.bias[1]")
    assert [variable.shape for variable in elements.variables] == [(1,)] * 3
    elements.release()


def test_inputs_of_calls_are_counted_by_call_and_matched_by_patterns():
    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.LSTMCell(2, 2)

        def forward(self, x):
            state = None
            for step in range(4):
                state = self.cell(x * step, state)
            return state[0]

    net, x = Loop(), torch.ones(1, 2)
    places = [f"cell#{call}.input:1.0" for call in (1, 2, 3)]  # call 0 is given no state
    for pattern in ("cell#*.input:1.0", "cell.input#*:1.0"):
        assert list(eg.grad(net, x, of="output[0, 0]", wrt=pattern)) == places
    for call in (1, 2, 3):
        assert torch.equal(eg.value(net, x, of=f"cell#{call}.input:0"), x * call)
        state = eg.value(net, x, of=f"cell#{call - 1}:0")
        assert torch.equal(eg.value(net, x, of=f"cell#{call}.input:1.0"), state)
    assert "cell#*.input:1.0  given  1x2    float32  3" in str(eg.names(net, x, kind="given"))


def test_patterns_choose_among_parameters_and_fields():
    net = nn.Sequential(nn.Conv1d(1, 1, 3), nn.Conv1d(1, 1, 3))
    chosen = eg.top(net, None, 2, by="magnitude", among="*.bias")
    assert sorted(place.name for place in chosen) == ["0.bias", "1.bias"]
    with pytest.raises(eg.PlaceError, match="no name matches"):
        eg.top(net, None, 2, by="magnitude", among="*.bia")
    fields = eg.field(net, torch.ones(1, 1, 9), of=eg.at("*", kind="activation")[0, 0, 2], wrt="input")
    assert {name: str(place) for name, place in fields.items()} == {
        "0[0, 0, 2] (activation)": "input[0:1, 0:1, 2:5] (input)",
        "1[0, 0, 2] (activation)": "input[0:1, 0:1, 2:7] (input)",
    }


def test_a_name_with_two_other_spellings_matches_by_either():
    aliases = {"b.w": "a.w", "c.w": "a.w"}
    assert match_names("b.*", ["a.w"], aliases) == {"a.w": "b.w"}
    assert match_names("c.*", ["a.w"], aliases) == {"a.w": "c.w"}


def test_a_function_without_keywords_has_no_prefix_for_them():
    with pytest.raises(eg.PlaceError):
        eg.grad(lambda x: (x * x).sum(), torch.ones(2), wrt="None.x")


class Pair(nn.Module):
    def forward(self, x, scale):
        return x * scale, None


class Pairs(nn.Module):
    def __init__(self):
        super().__init__()
        self.h = nn.ModuleList([nn.ModuleDict({"attn": Pair()}) for _ in range(2)])

    def forward(self, x):
        for block in self.h:
            x = block["attn"](x, scale=2 * x)[0]
        return x


def test_patterns_match_every_spelling_of_a_name():
    x = torch.tensor([1.0, 2.0])
    gradients = eg.grad(Pairs(), x, of="output[0]", wrt="h.*.attn[0]")  # the name of each is `h.0.attn` as well
    assert {place: gradient.item() for place, gradient in gradients.items()} == {
        "h.0.attn:0[0]": 8.0,
        "h.1.attn:0[0]": 1.0,
    }
    assert [row.name for row in eg.names(Pairs(), x, match="h.*.attn")] == ["h.0.attn:0", "h.1.attn:0"]
    given = eg.grad(Pairs(), x, of="output[0]", wrt="h.*.attn.input:1[0]")  # the argument `scale` by its position
    assert {place: gradient.item() for place, gradient in given.items()} == {
        "h.0.attn.input:scale[0]": 8.0,
        "h.1.attn.input:scale[0]": 2.0,
    }


def test_the_nearest_names_of_a_pattern_differ_in_more_than_its_wildcards(net):
    with pytest.raises(eg.PlaceError, match=r"no name matches 'cel\.\*'; nearest: cell\.weight, cell\.bias"):
        eg.names(net, match="cel.*")
    keras.utils.clear_session()

    class Blocks(keras.Model):
        def __init__(self):
            super().__init__()
            self.blocks = [keras.layers.Dense(2) for _ in range(2)]

        def call(self, x):
            return self.blocks[1](self.blocks[0](x))

    model = Blocks()
    model(np.ones((1, 2), "float32"))
    with pytest.raises(eg.PlaceError, match=r"nearest: blocks\.0\.kernel, blocks\.1\.kernel"):
        eg.names(model, match="blocks.*.kernl")


def test_errors_repeat_the_name_and_kind_that_were_given(net):
    x = torch.ones(1, 2, 3, dtype=torch.float64)
    for place, text in (
        ("cell#40.input", r"'cell#40\.input' is none of these: cell#0\.input"),
        (eg.at("h.0.fc", kind="given"), r"no input of a module is named 'h\.0\.fc'; nearest: h\.0\.fc\.input"),
        (eg.at("h.0.fc", kind="output"), r"no output is named 'h\.0\.fc'; there are: output"),
    ):
        with pytest.raises(eg.PlaceError, match=text):
            eg.grad(net, x, of="output[0, 0, 0]", wrt=place)
