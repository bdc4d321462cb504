"""Places: how they are named, written as text, and read back."""

import copy
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import elementgrad as eg
from tests.support.made import counts, fits_numpy, shapes_and_indices

NAMES = [
    "x",
    "encoder.layer.3.attn",
    "0.weight",
    "dense/kernel",
    "block#0",
    "lstm:0",
    "output.logits",
    "a b",
    "été",
    "int",
]


@settings(max_examples=counts(300, 5000))
@given(st.sampled_from(NAMES), shapes_and_indices(), st.sampled_from([None, "parameter", "activation", "input"]))
def test_made_places_round_trip_through_their_text(name, made, kind):
    place = eg.at(name, kind=kind)[made[1]]
    again = eg.at(str(place))
    assert again == place
    assert hash(again) == hash(place)
    assert str(again) == str(place)
    if fits_numpy(*made):
        assert np.array_equal(again.select(made[0]).flat(), place.select(made[0]).flat())


@pytest.mark.parametrize(
    ("place", "text"),
    [
        (eg.at("conv1")[0, 12, 5:9], "conv1[0, 12, 5:9]"),
        (eg.at("conv1"), "conv1"),
        (eg.at("conv1")[()], "conv1"),
        (eg.at("w")[..., ::-2, -1], "w[..., ::-2, -1]"),
        (eg.at("w")[[0, 1], :], "w[[0, 1], :]"),
        (eg.at("w")[[True, False]], "w[[true, false]]"),
        (eg.at("w")[[[0], [1]], 2:], "w[[[0], [1]], 2:]"),
        (eg.at("w").coords([[0, 5], [1, 12]]), "w[[0, 1], [5, 12]]"),
        (eg.at("w", kind="parameter")[3], "w[3] (parameter)"),
        (eg.at("w", kind="parameter"), "w (parameter)"),
        (eg.at[0, 5], "[0, 5]"),
        (eg.at[...], "[...]"),
        (eg.at("w")[np.zeros((0, 3), int)], "w[int(0, 3)]"),
        (eg.at("w")[[]], "w[[]]"),
    ],
)
def test_a_place_reads_as_it_is_written(place, text):
    assert str(place) == text
    assert eg.at(text) == place
    assert eg.Place.parse(text) == place


@pytest.mark.parametrize(
    ("text", "same"),
    [
        (" conv1 [ 0 , 12 , 5 : 9 ] ", "conv1[0, 12, 5:9]"),
        ("conv1[0,12,5:9,]", "conv1[0, 12, 5:9]"),
        ("x[:]", "x[:]"),
        ("x[::]", "x[:]"),
        ("x[+1]", "x[1]"),
        ("x[]", "x"),
        ("x[[1, 2,], 0](parameter)", "x[[1, 2], 0] (parameter)"),
        ("x[true, 0]", "x[true, 0]"),
    ],
)
def test_text_may_be_written_in_several_ways(text, same):
    assert str(eg.at(text)) == same


@pytest.mark.parametrize(
    ("text", "character"),
    [
        ("", 1),
        ("conv1[0, 1x]", 11),
        ("conv1[0", 8),
        ("conv1[0]]", 9),
        ("conv1[0] more", 10),
        ("conv1[,]", 7),
        ("conv1[0,,1]", 9),
        ("conv1[1.5]", 8),
        ("conv1[....]", 10),
        ("conv1[[1, [2]]]", 7),
        ("conv1[[1, 2], [3]", 18),
        ("conv1[__import__('os')]", 7),
        ("conv1[0:1:2:3]", 12),
        ("conv1(weight)", 7),
        ("conv1[0](", 10),
        ("conv1[int(3)]", 7),
        ("conv1[99999999999999999999, [99999999999999999999]]", 29),
        ("]", 1),
        ("x[" + "1" * 5000 + "]", 3),
        ("x[int(0, " + "9" * 30 + ")]", 3),
        ("x[int(" + "0, " * 70 + "0)]", 3),
        ("a\nb[0]", 3),
    ],
)
def test_text_that_does_not_parse_marks_the_character(text, character):
    with pytest.raises(eg.ParseError, match=f"at character {character},") as caught:
        eg.at(text)
    assert str(caught.value).splitlines()[-1] == "  " + " " * (character - 1) + "^"


def test_a_long_text_that_does_not_parse_is_shown_around_the_character():
    with pytest.raises(eg.ParseError, match="at character 500003, found 'q'") as caught:
        eg.at("x[" + "0," * 250_000 + "q" + " " * 100_000)
    _, text, mark = str(caught.value).splitlines()
    assert text[mark.index("^")] == "q"
    assert len(text) < 300


def nested(depth):
    """Lists inside one another; without a depth, a list that is inside of itself."""
    lists = [1.0]
    for _ in range(depth or 1):
        lists = [lists]
    if not depth:
        lists.append(lists)
    return lists


@pytest.mark.parametrize("depth", [None, 100, 3000])
def test_lists_that_are_nested_too_deep_are_refused(fw, depth):
    x, lists = fw.tensor([1.0, 2.0]), nested(depth)
    for use in (
        lambda: eg.at(x)[lists],
        lambda: eg.at(x).coords(lists),
        lambda: eg.at(x)[0].set(lists),
        lambda: eg.jacobian(lambda x: x**2, x, budget=lists),
        lambda: eg.jacobian(lambda x: x**2, x, kwargs=lists),
        lambda: eg.jacobian(lambda x: x**2, x, wrt=lists),
    ):
        with pytest.raises(eg.ElementgradError) as caught:
            use()
        assert len(str(caught.value)) < 1200


def test_long_texts_are_quoted_by_their_ends(fw):
    x, long = fw.tensor([1.0, 2.0]), "w" * 10**6
    for use in (
        lambda: eg.jacobian(lambda x: x**2, x, wrt=long),
        lambda: eg.jacobian(lambda x: x**2, x, wrt=f"x[{'0, ' * 10_000}0]"),
        lambda: eg.at(x)[long],
        lambda: eg.jacobian(lambda x: x**2, x, budget=long),
    ):
        with pytest.raises(eg.ElementgradError, match=r"\(\d+ left out\)") as caught:
            use()
        assert len(str(caught.value)) < 1200


def test_places_are_equal_by_name_and_index_and_by_tensor_identity(fw):
    x = fw.tensor([1.0, 2.0])
    y = fw.tensor([1.0, 2.0])
    assert eg.at(x)[0] == eg.at(x)[0]
    assert eg.at(x)[0] != eg.at(y)[0]
    assert eg.at(x)[0] != eg.at(x)[1]
    assert eg.at("x")[0] != eg.at("y")[0]
    assert eg.at("x")[0] != eg.at("x", kind="input")[0]
    assert eg.at("x")[[0, 1]] != eg.at("x")[[False, True]]
    assert eg.at(eg.at(x)[0]) == eg.at(x)[0]
    assert eg.at("x")[0] != "x[0]"


def test_named_places_copy_and_pickle():
    place = eg.at("w", kind="parameter")[[0, 1], 2:]
    assert copy.deepcopy(place) == place
    again = pickle.loads(pickle.dumps(place))
    assert again == place
    assert not again.index[0].values.flags.writeable


def test_live_places_copy_with_their_framework(fw):
    place = copy.deepcopy(eg.at(fw.tensor([1.0, 2.0]))[1:])
    assert fw.numpy(place.set(fw.tensor(5.0))).tolist() == [1, 5]


def test_a_place_is_not_a_sequence():
    for iterable in (eg.at("x"), eg.at):
        with pytest.raises(TypeError, match="is not iterable"):
            iter(iterable)


def test_a_place_cannot_be_changed():
    place = eg.at("x")[0]
    with pytest.raises(AttributeError):
        place.index = (1,)


def test_a_later_write_to_the_index_array_changes_nothing(fw):
    rows = np.array([0, 2])
    place = eg.at(fw.tensor([1.0, 2.0, 3.0]))[rows]
    rows[0] = 1
    assert fw.numpy(place.get()).tolist() == [1.0, 3.0]


def test_coords_name_one_element_per_row(fw):
    x = fw.tensor(np.arange(12).reshape(3, 4))
    assert fw.numpy(eg.at(x).coords([[0, 1], [2, -1]]).get()).tolist() == [1, 11]
    assert fw.numpy(eg.at(x).coords(fw.tensor([[0, 1], [2, 3]], "int64")).get()).tolist() == [1, 11]
    assert fw.numpy(eg.at(x).coords(np.zeros((0, 2), int)).get()).tolist() == []
    with pytest.raises(eg.SelectionError, match="coordinates in 1 columns for a tensor of 2 axes"):
        eg.at(x).coords([[0], [1]]).get()
    for wrong in ([0, 1], [[0, 1], [2]], [[]], [[True, False]]):
        with pytest.raises(eg.SelectionError, match="one row per element and one column per axis"):
            eg.at(x).coords(wrong)
    with pytest.raises(eg.SelectionError, match="cannot name elements"):
        eg.at(x).coords([[0.5, 1.0]])
    with pytest.raises(eg.PlaceError, match="indexed already"):
        eg.at(x)[0].coords([[0, 1]])


def test_a_kind_is_one_of_a_few_words():
    with pytest.raises(
        eg.PlaceError, match="kind 'weight' is none of input, output, activation, given, parameter, buffer"
    ):
        eg.at("x", kind="weight")
    assert eg.at(eg.at("x")[0], kind="input") == eg.at("x", kind="input")[0]
    assert eg.at("x (input)", kind="input") == eg.at("x (input)")
    with pytest.raises(eg.PlaceError, match=r"x \(input\) is a place of kind 'input' and not 'output'; give one kind"):
        eg.at("x (input)", kind="output")
    with pytest.raises(eg.PlaceError, match="kind 'input' tells two tensors of one name apart"):
        eg.at(torch.ones(2), kind="input")


def test_a_place_shows_what_it_is_of(fw):
    assert repr(eg.at("x")[0]) == "Place.parse('x[0]')"
    assert fw.name in repr(eg.at(fw.tensor([1.0]))[0])
    assert "float64" in repr(eg.at(fw.tensor([1.0]))[0])
