"""`elementgrad replay` runs a captured step again from a file of the user's."""

import json
from collections import OrderedDict, UserDict

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


class Numbered(OrderedDict):
    """A dict of a class of its own."""


class Held(UserDict):
    """A wrapper of a dict, as tokenizers have."""


def test_arguments_keep_their_classes_in_a_file(tmp_path):
    kinds = []

    class Net(torch.nn.Linear):
        def forward(self, first, second, third):
            kinds.append((type(first), type(second), type(third)))
            return torch.log(super().forward(first["x"] + second["x"] + third["x"]) * 0 - 1)

    model, x = Net(2, 2), torch.ones(1, 2)
    file = tmp_path / "nan.capture"
    with pytest.raises(eg.WatchError), eg.watch(model, capture=file) as watch:
        model(Numbered(x=x), Held(x=x), {"x": x})
    kinds.clear()
    assert watch.replay(file).same  # from the file, and not from what is in memory
    assert set(kinds) == {(Numbered, Held, dict)}


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=2.0, momentum=0.9, nesterov=True),
        lambda p: torch.optim.AdamW(p, lr=0.1, eps=0.0, weight_decay=0.1),
        lambda p: torch.optim.RMSprop([{"params": list(p), "lr": 0.2}], centered=True),
        lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
        lambda p: torch.optim.Adam(p, torch.tensor(0.1), (torch.tensor(0.9), torch.tensor(0.99)), foreach=False),
    ],
    ids=["sgd", "adamw", "rmsprop", "amsgrad", "options that are tensors"],
)
def test_an_update_is_taken_again_to_the_same_bits(make, tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    optimizer = make(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=1.5)
    x = torch.randn(5, 3)

    def loop():
        for step in range(5):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            if step == 3:  # a state that no finite update comes from
                for state in optimizer.state.values():
                    state.get("exp_avg_sq", state.get("square_avg", state.get("momentum_buffer")))[0] = -3e38
                    state.get("max_exp_avg_sq", torch.zeros(1))[0] = -3e38
            optimizer.step()
            schedule.step()

    watch = eg.watch(model, optimizer, capture=tmp_path / "nan.capture")
    with pytest.raises(eg.WatchError) as raised, watch:
        loop()
    assert raised.value.cause == "update"
    replay = watch.replay(tmp_path / "nan.capture")
    assert replay.same
    assert {"updated:0", "output:0"} <= set(replay.results)
    assert not replay.results["updated:0"].isfinite().all()


class OwnOptimizer(torch.optim.SGD):
    """An optimizer that no file can name."""


@pytest.mark.parametrize("size", [4, 1100])
def test_a_replay_says_where_an_update_is_not_taken_again(size, tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(3, size), torch.nn.Linear(size, size))
    optimizer = OwnOptimizer(model.parameters(), lr=float("inf"))
    watch = eg.watch(model, optimizer, capture=tmp_path / "nan.capture")
    with pytest.raises(eg.WatchError), watch:  # noqa: PT012
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    replay = watch.replay()
    if size == 4:
        assert replay.same  # the forward and the backward
        assert replay.omitted == ("the update, which optimizers of torch.optim alone can take again",)
    else:
        assert replay.same is None
        assert "it ran, with nothing to compare; the capture lacks the parameters from before the step" in str(replay)


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
