"""HTML for notebooks: everything is escaped, and it never raises."""

from html.parser import HTMLParser

import numpy as np
import pytest
import torch

import elementgrad as eg


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.found, self.open = set(), []

    def handle_starttag(self, tag, attrs):
        self.found.add(tag)
        self.open.append(tag)
        assert not [name for name, _ in attrs if name != "style"]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def assert_plain(html):
    """Elements of text and tables with inline style, all of them closed."""
    tags = Tags()
    tags.feed(html)
    assert tags.found <= {"div", "table", "tr", "th", "td", "pre"}
    assert not tags.open


def linear():
    return torch.nn.Linear(3, 2)


RUNS = []


def counted(x):
    RUNS.append(1)
    return x**2


SHOWN = {
    "a plan": (lambda: eg.jacobian(counted, torch.ones(3)).plan(0, ...), ["1 row, 3 columns", "planned"]),
    "a Jacobian": (lambda: eg.jacobian(counted, torch.ones(3)), ["Jacobian of output (3,)", "torch float32"]),
    "a place": (lambda: eg.at("<b>conv</b>")[0, 1:], ["&lt;b&gt;conv&lt;/b&gt;[0, 1:]"]),
    "a live place": (lambda: eg.at(torch.ones(2, 3))[0, 1], ["tensor[0, 1]", "float32 (2, 3)"]),
    "elements": (lambda: eg.trainable(linear(), ["weight[0, 1]", "bias"]), ["weight[0, 1]", "float32"]),
    "names": (lambda: eg.names(linear(), torch.ones(3)), ["parameter", "weight"]),
    "contributions": (
        lambda: eg.contributions(lambda x: x * x[0], torch.ones(2), of="output[0]", wrt="x[0]"),
        ["total"],
    ),
    "a diagnosis": (lambda: eg.explain(lambda x: x.detach().sum(), torch.ones(2)), ["detach cuts the gradient"]),
    "a patch": (lambda: eg.Patch(()), ["largest change"]),
}


@pytest.mark.parametrize("what", SHOWN)
def test_objects_show_themselves_in_plain_html(what):
    make, words = SHOWN[what]
    made = make()
    runs = len(RUNS)
    html = made._repr_html_()
    assert len(RUNS) == runs
    assert_plain(html)
    for word in words:
        assert word in html


def test_long_tables_are_cut_and_say_so():
    places = [f"weight[{row}, {column}]" for row in range(10) for column in range(10)]
    html = eg.trainable(torch.nn.Linear(10, 10), places)._repr_html_()
    assert html.count("<tr>") == 61
    assert "40 more rows are left out" in html


def test_a_failed_repr_shows_the_plain_object(monkeypatch):
    monkeypatch.setattr(eg.Plan, "lines", property(lambda self: 1 / 0))
    html = eg.jacobian(torch.sin, torch.ones(3)).plan()._repr_html_()
    assert "Plan object" in html
    assert_plain(html)


def test_places_of_every_framework_show_their_tensor(fw):
    html = eg.at(fw.tensor(np.ones((2, 3))))[0]._repr_html_()
    assert fw.name in html
    assert "(2, 3)" in html
