"""`elementgrad replay` runs a captured step again from a file of the user's."""

import json

import pytest
import torch

import elementgrad as eg
from elementgrad._cli import main

FILE = """import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(2, 2)

    def forward(self, x):
        return torch.log(self.inner(x) * 0 - 1)
"""


def test_a_capture_is_replayed_from_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(FILE)
    names = {}
    exec(compile(FILE, str(tmp_path / "mine.py"), "exec"), names)
    model = names["Net"]()
    with pytest.raises(eg.WatchError), eg.watch(model):
        model(torch.ones(1, 2))
    assert main(["replay", "nan.capture", "mine.py:Net", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["same"], found["cause"], found["place"]) == (True, "singular", "output[0, 0]")
    assert found["where"] == "mine.py:10"
    assert main(["replay", "mine.py", "mine.py:Net"]) == 2
    assert (
        capsys.readouterr().err
        == "elementgrad: mine.py is no capture, or is cut short; give a file that eg.watch wrote\n"
    )
