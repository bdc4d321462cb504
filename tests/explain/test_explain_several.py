"""Several places explained together: the same structure of answers, from one run of the function."""

import pytest

import elementgrad as eg
from tests.support.operations import OPS


@pytest.fixture
def counted(fw):
    o, calls = OPS[fw.name], []

    def f(x, y):
        calls.append(1)
        hidden = eg.tag(o.maximum(x, o.array([0.0, 0.0])), "hidden")
        return {"a": o.sum(hidden * o.stop(y)), "b": o.sum(hidden) + o.sum(y * 2.0)}

    return f, (fw.tensor([1.0, -2.0]), fw.tensor([1.0, 2.0])), calls


def said(found):
    return found.verdict, found.cause


def test_a_dict_of_places_gives_a_dict(counted):
    f, args, calls = counted
    found = eg.explain(f, *args, of="output.a", wrt={"first": "x[0]", "second": "x[1]", "y": "y", "h": "hidden"})
    assert {name: said(each) for name, each in found.items()} == {
        "first": ("flows", None),
        "second": ("zero", "dead-relu"),
        "y": ("unconnected", "detached"),
        "h": ("flows", None),
    }
    assert len(calls) == 1


def test_both_sides_may_be_structures(counted):
    f, args, calls = counted
    found = eg.explain(f, *args, of=["output.a", "output.b"], wrt=("x[1]", "y"))
    assert isinstance(found, list)
    assert all(isinstance(each, tuple) for each in found)
    assert [[said(each) for each in row] for row in found] == [
        [("zero", "dead-relu"), ("unconnected", "detached")],
        [("zero", "dead-relu"), ("flows", None)],
    ]
    assert len(calls) == 1


def test_together_and_alone_say_the_same(counted):
    f, args, _ = counted
    places = ["x[0]", "x[1]", "y", "hidden[1]"]
    together = eg.explain(f, *args, of="output.b", wrt=places)
    for place, found in zip(places, together, strict=True):
        alone = eg.explain(f, *args, of="output.b", wrt=place)
        assert (said(found), found.where, found.operation) == (said(alone), alone.where, alone.operation)
        assert found.wrt == alone.wrt


def test_an_integer_among_them_has_its_own_answer(fw):
    o = OPS[fw.name]
    found = eg.explain(lambda x, n: o.sum(x), fw.tensor([1.0, 2.0]), fw.tensor([1, 2], "int32"), wrt=["x", "n"])
    assert [said(each) for each in found] == [("flows", None), ("unconnected", "integer")]


def test_where_one_of_them_cannot_be_asked_the_error_says_so(counted):
    f, args, _ = counted
    with pytest.raises(eg.PlaceError, match="nothing"):
        eg.explain(f, *args, of="output.a", wrt=["x", "nothing"])
