"""All that prints itself does so in a terminal that knows few characters, as on many a Windows."""

import copy
import io
import sys

import pytest
import torch
from torch import nn

import elementgrad as eg

X = torch.ones(1, 3)
VECTOR = torch.ones(30)


def stencil(x):
    return x[1:] ** 2 * x[:-1]


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2))


def trained():
    return eg.trainable(net(), ["0.weight[0]", "2.bias[1]"])


def patch():
    before = net()
    after = copy.deepcopy(before)
    with torch.no_grad():
        after[0].weight[0, 0] += 1
    return eg.diff(before, after)


def saved(path):
    trained().save(path)
    return eg.inspect(path)


def recording():
    with eg.record(VECTOR) as rec:
        y = VECTOR * 2
    return rec, rec.contributions(eg.at(y)[0], eg.at(VECTOR)[0])


PRINTED = {
    "jacobian": lambda path: eg.jacobian(stencil, VECTOR),
    "pattern": lambda path: eg.jacobian(stencil, VECTOR).pattern(),
    "plan": lambda path: eg.jacobian(stencil, VECTOR).plan(),
    "prepared": lambda path: eg.jacobian(stencil, VECTOR).prepare("scipy"),
    "names": lambda path: eg.names(net(), X),
    "diagnosis": lambda path: eg.explain(lambda x: torch.relu(-x).sum(), VECTOR, wrt="x[3]"),
    "check": lambda path: eg.check(stencil, VECTOR, of="output[0]", wrt="x[0]"),
    "contributions": lambda path: eg.contributions(net(), X, of="output[0, 0]", wrt="0"),
    "recording": lambda path: recording(),
    "elements": lambda path: trained(),
    "inspected patch": saved,
    "patch": lambda path: patch(),
    "conflicts": lambda path: patch().conflicts(patch().inverse()),
    "audit": lambda path: eg.audit(net(), lambda model: torch.relu(-(model(X) ** 2)).sum()),
    "field": lambda path: eg.field(net(), X, of="2[0, 0]", wrt="input"),
    "top": lambda path: eg.top(net(), lambda model: model(X).sum(), 2),
}


@pytest.mark.parametrize("encoding", ["cp1252", "ascii"])
@pytest.mark.parametrize("name", PRINTED)
def test_a_terminal_that_knows_few_characters_shows_it(name, encoding, tmp_path, monkeypatch):
    value = PRINTED[name](tmp_path / "patch.safetensors")
    terminal = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", terminal)
    print(value, repr(value))
    terminal.flush()
    assert len(terminal.buffer.getvalue()) > 10


def test_a_pattern_is_drawn_in_plain_characters_there(monkeypatch):
    pattern = eg.jacobian(stencil, torch.ones(4)).pattern()
    assert str(pattern).splitlines()[1:] == ["⠙⠦"]
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="cp1252"))
    assert str(pattern).splitlines()[1:] == ["**..", ".**.", "..**"]
