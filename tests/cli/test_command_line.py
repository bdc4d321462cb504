"""The command line on a user's own file, with every framework: numbers, findings, files, and what is left behind."""

import json
import sys

import numpy as np
import pytest

import elementgrad as eg
from elementgrad._cli import main
from tests.support.user_files import FILES, OUT, WEIGHT


@pytest.fixture
def user(fw, tmp_path, monkeypatch):
    """The name of a user's file in the folder that we are in, and of its framework."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / f"of_{fw.name}.py").write_text(FILES[fw.name])
    np.save("x.npy", np.array([[1.0, 2.0, 3.0]]))
    np.save("x32.npy", np.array([[1.0, 2.0, 3.0]], np.float32))
    return f"of_{fw.name}.py"


def told(capsys, *arguments):
    """The object that a command prints, and its exit code."""
    capsys.readouterr()
    code = main([*arguments, "--json"])
    out = capsys.readouterr().out
    return json.loads(out, parse_constant=pytest.fail), code


def test_gradients_of_functions_and_models_are_printed(user, fw, capsys):
    before = sys.path.copy(), set(sys.modules)
    assert main(["grad", f"{user}:loss", "[1.0, 2.0, 3.0]"]) == 0
    printed = capsys.readouterr()
    assert printed.out.split() == ["[", "4.,", "8.,", "12.]"]
    assert printed.err.count("a line of the user's") >= 1
    assert main(["grad", f"{user}:loss", "--wrt", "x[2]", "[1.0, 2.0, 3.0]", "--input", "scale=3.0"]) == 0
    assert capsys.readouterr().out == "18.0\n"
    for budget in ("1", "200MB"):
        assert main(["grad", f"{user}:loss", "--wrt", "x[2]", "[1.0, 2.0, 3.0]", "--budget", budget]) == 0
        assert capsys.readouterr().out == "12.0\n"
    assert main(["grad", f"{user}:Net", "x32.npy", "--of", "output[0, 1]", "--wrt", WEIGHT[fw.name]]) == 0
    assert capsys.readouterr() == ("3.0\n", "")
    assert sys.path == before[0]
    assert not {name for name in set(sys.modules) - before[1] if name.startswith("of_")}


def test_several_gradients_go_into_files(user, fw, capsys):
    named = ["--of", "output[0, 1]", "--wrt", into(fw), "--wrt", WEIGHT[fw.name]]
    assert main(["grad", f"{user}:defaulted()", "x32.npy", *named, "--out", "g.npz"]) == 0
    assert [line.rstrip(":") for line in capsys.readouterr().out.splitlines()[::2]] == [named[3], named[5]]
    held = np.load("g.npz")
    assert held[named[3]].tolist() == [[1.0, 3.0, 5.0]]
    assert held[WEIGHT[fw.name]] == 3.0
    assert main(["grad", f"{user}:loss", f"{user}:array", "--out", "g.npy"]) == 0
    assert np.load("g.npy").tolist() == [4.0, 8.0, 12.0]
    assert main(["grad", f"{user}:loss", "g.npy", "--out", "g.safetensors"]) == 0
    assert main(["grad", f"{user}:loss", "--input", "x=g.safetensors:x", "--out", "g.json"]) == 0
    with open("g.json") as file:
        assert json.load(file)["gradients"][0]["values"] == [64.0, 128.0, 192.0]


def test_a_pattern_prints_each_place_that_it_matches(user, fw, capsys):
    pattern = {"torch": "fc.*[0]", "tensorflow": "fc/*[0]", "jax": "*[0]"}[fw.name]
    found, code = told(capsys, "grad", f"{user}:Net", "x32.npy", "--of", "output[0, 1]", "--wrt", pattern)
    places = [gradient["wrt"] for gradient in found["gradients"]]
    assert len(places) > 1
    for place, gradient in zip(places, found["gradients"], strict=True):
        alone, _ = told(capsys, "grad", f"{user}:Net", "x32.npy", "--of", "output[0, 1]", "--wrt", place)
        assert alone["gradients"] == [gradient]
    assert code in (0, 1)


def test_findings_are_in_the_text_the_result_and_the_exit_code(user, fw, capsys):
    assert main(["grad", f"{user}:cut", "[1.0]"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "output does not depend on x" in printed.err
    assert "--unconnected 'zero'" in printed.err
    found, code = told(capsys, "grad", f"{user}:cut", "[1.0, 2.0]")
    assert (code, found["finding"], found["gradients"]) == (1, "unconnected", [])
    found, code = told(capsys, "grad", f"{user}:cut", "[1.0, 2.0]", "--unconnected", "zero")
    assert (code, found["finding"], found["gradients"][0]["values"]) == (0, None, [0.0, 0.0])
    found, code = told(capsys, "grad", f"{user}:root", "[4.0, 0.0]")
    assert (code, found["finding"]) == (1, "nonfinite")
    assert found["gradients"] == [{"wrt": "x", "shape": [2], "dtype": "float32", "values": [0.25, "Infinity"]}]
    found, code = told(capsys, "grad", f"{user}:loss", "[0.0, 0.0]")
    assert (code, found["finding"], found["framework"]) == (1, "zero", fw.name)


def test_explanations_and_checks(user, fw, capsys):
    assert main(["explain", f"{user}:cut", "[1.0]"]) == 1
    assert capsys.readouterr().out.startswith("output has no gradient with respect to x")
    found, code = told(capsys, "explain", f"{user}:cut", "[1.0]")
    assert (code, found["verdict"], found["where"]) == (1, "unconnected", f"{user}:{line_of(user, 'def cut') + 1}")
    found, code = told(capsys, "explain", f"{user}:loss", "[1.0]", "--no-probe")
    assert (code, found["verdict"], found["value"]) == (0, "flows", [4.0])
    found, code = told(capsys, "check", f"{user}:loss", "[1.0, 2.0]")
    assert (code, found["verdict"], [entry["gradient"] for entry in found["entries"]]) == (0, "agrees", [4.0, 8.0])
    assert main(["check", f"{user}:straight", "[0.2]"]) == 1
    assert "1 of 1 entries differ" in capsys.readouterr().out


def line_of(user, text):
    with open(user) as file:
        return next(number for number, line in enumerate(file, 1) if line.startswith(text))


def test_names_are_listed(user, fw, capsys):
    assert main(["names", f"{user}:Net", "x32.npy"]) == 0
    assert capsys.readouterr().out.splitlines()[0].split() == ["name", "kind", "shape", "dtype"]
    found, _ = told(capsys, "names", f"{user}:Net", "x32.npy", "--kind", "parameter")
    assert WEIGHT[fw.name].split("[")[0] in [one["name"] for one in found["names"]]
    assert {one["kind"] for one in found["names"]} == {"parameter"}
    if fw.name == "torch":
        found, _ = told(capsys, "names", f"{user}:Net", "--match", "**weight")
        assert [one["kind"] for one in found["names"]] == ["parameter"] * len(found["names"])


def test_pictures_and_reports(user, fw, capsys, tmp_path):
    pytest.importorskip("matplotlib")
    assert main(["grad", f"{user}:loss", f"{user}:array", "--plot", "g.png"]) == 0
    assert (tmp_path / "g.png").read_bytes()[:4] == b"\x89PNG"
    capsys.readouterr()
    assert main(["report", f"{user}:loss", "[1.0, 2.0]", "--title", "Mine", "--out", "r.html"]) == 0
    assert capsys.readouterr().out == "r.html\n"
    assert "<title>Mine</title>" in (tmp_path / "r.html").read_text()
    eg.Patch(()).write("p.safetensors")
    assert main(["report", "p.safetensors", "--out", "p.html"]) == 0


def test_a_patch_goes_into_a_model_of_the_user_and_out_again(user, fw, capsys, tmp_path):
    namespace: dict = {"__name__": "elsewhere"}
    exec(compile(FILES[fw.name], user, "exec"), namespace)
    trained(namespace["Net"](), WEIGHT[fw.name], tmp_path / "p.safetensors")
    assert main(["patch", "inspect", "p.safetensors"]) == 0
    assert WEIGHT[fw.name] in capsys.readouterr().out
    assert main(["patch", "apply", f"{user}:Net", "p.safetensors", "--out", OUT[fw.name]]) == 0
    assert capsys.readouterr().out == f"{WEIGHT[fw.name]}\n"
    found, _ = told(capsys, "grad", f"{user}:patched", "x32.npy", "--of", "output[0, 1]", "--wrt", into(fw))
    assert found["gradients"][0]["values"] == [[1.0, 3.0, 7.5]]
    assert main(["patch", "undo", f"{user}:patched", "p.safetensors", "--out", OUT[fw.name]]) == 0
    found, _ = told(capsys, "grad", f"{user}:patched", "x32.npy", "--of", "output[0, 1]", "--wrt", into(fw))
    assert found["gradients"][0]["values"] == [[1.0, 3.0, 5.0]]
    assert main(["patch", "undo", f"{user}:patched", "p.safetensors", "--out", OUT[fw.name]]) == 2
    assert "there is nothing to undo" in capsys.readouterr().err


def into(fw):
    return "inputs" if fw.name == "tensorflow" else "x"


def trained(model, place, path):
    """Save a patch that makes the element 7.5."""
    elements = eg.trainable(model, place)
    if hasattr(model, "parameters"):
        next(elements.parameters()).data.fill_(7.5)
    elif hasattr(model, "layers"):
        elements.variables[0].assign([7.5])
    else:
        elements.values = {place: elements.values[place] * 0 + 7.5}
    elements.save(path)


def test_arrays_become_tensors_of_the_model_and_integers_stay_integers(user, fw, capsys):
    assert main(["names", f"{user}:Net", "x.npy", "--kind", "input"]) == 0
    printed = capsys.readouterr()
    assert "float32" in printed.out
    assert (
        printed.err == "elementgrad: x.npy is float64 and used as float32, as the model is; --dtype decides otherwise\n"
    )
    np.savez("several.npz", x=np.float64([1.0, 2.0]), ids=np.int32([3]))
    found, _ = told(capsys, "names", f"{user}:first", "several.npz", "--dtype", "float16")
    dtypes = {one["name"]: one["dtype"] for one in found["names"] if one["kind"] == "input"}
    assert dtypes == {"x": "float16", "ids": "int32"}
    found, _ = told(capsys, "grad", f"{user}:loss", "[0.1]", "--dtype", "float64")
    assert found["gradients"] == [{"wrt": "x", "shape": [1], "dtype": "float64", "values": [0.4]}]


OWN = """
import inspect
import pickle
from dataclasses import dataclass

import torch

from helpers_of_mine import double

@dataclass
class Point:
    x: float

assert pickle.loads(pickle.dumps(Point(1.0))) == Point(1.0)
assert "class Point" in inspect.getsource(Point)
loads = getattr(torch, "_loads_of_mine", 0) + 1
torch._loads_of_mine = loads

class Model(torch.nn.Module):
    def forward(self, point, ids, mode):
        assert mode == "sum" and ids.dtype == torch.int64
        return double(point["x"])[ids].sum()

model = Model()
"""


def test_a_users_file_is_a_module_like_any_other(tmp_path, monkeypatch, capsys):
    """Loaded once though it is named twice, beside its neighbours, also from another folder and as a module."""
    import torch

    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "own-model.py").write_text(OWN)
    (folder / "helpers_of_mine.py").write_text("def double(x):\n    return 2 * x\n")
    (tmp_path / "arguments.json").write_text('{"point": {"x": [1.0, 2.0]}, "ids": [1, 1], "mode": "sum"}')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch, "_loads_of_mine", 0, raising=False)
    assert main(["grad", "project/own-model.py:Model", "arguments.json", "--wrt", "point.x"]) == 0
    assert capsys.readouterr().out == "[0., 4.]\n"
    assert torch._loads_of_mine == 1
    twice = ["--input", "point=arguments.json:point", "--input", "ids=[0]", "--input", 'mode="sum"']
    assert main(["grad", "project/own-model.py:model.forward", *twice]) == 0
    assert capsys.readouterr().out == "[2., 0.]\n"
    (folder / "__init__.py").write_text("")
    (folder / "neighbour.py").write_text(
        "import torch\n\ndef f(x):\n    return x.prod()\n\nx = torch.tensor([2.0, 3.0])\n"
    )
    assert main(["grad", "project.neighbour:f", "project.neighbour:x"]) == 0
    assert capsys.readouterr().out == "[3., 2.]\n"


def test_audits_end_with_a_table_and_an_exit_code(user, fw, capsys):
    call = ["audit", f"{user}:Net", "x32.npy", "--loss"]
    assert main([*call, f"{user}:loss"]) == 0
    assert capsys.readouterr().out == "all 2 parameters learn.\n"
    assert main([*call, f"{user}:cut"]) == 1
    printed = capsys.readouterr().out
    assert "detached" in printed
    assert f"{user}:" in printed
    weight = WEIGHT[fw.name].partition("[")[0]
    found, code = told(capsys, *call, f"{user}:cut", "--except", weight)
    assert (code, found["command"], found["ok"], found["excepted"]) == (1, "audit", False, [weight])
    (finding,) = found["findings"]
    assert finding["cause"] == "detached"
    assert len(finding["parameters"]) == 1
    assert main([*call, f"{user}:cut", "--except", "nothing.*"]) == 2
    assert "no name matches 'nothing.*'" in capsys.readouterr().err


def test_losses_of_the_model_steps_and_models_with_a_loss_are_audited(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(
        """
import torch
net = torch.nn.Linear(3, 1)
x = torch.ones(2, 3)
class Output:
    def __init__(self, loss):
        self.loss = loss
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(3, 1)
    def forward(self, x):
        return Output(self.fc(x).sum())
def of_model(model, x):
    return model(x).sum()
def of_net(net):
    return net(x).sum()
def step():
    net(x).sum().backward()
def idle():
    net(x).sum()
params = {"w": torch.ones(2)}
"""
    )
    for arguments in (
        ["own.py:net", "own.py:x", "--loss", "own.py:of_model"],
        ["own.py:net", "--loss", "own.py:of_net"],
        ["own.py:net", "--loss", "own.py:step"],
        ["own.py:Model", "own.py:x"],
    ):
        assert main(["audit", *arguments]) == 0, arguments
        assert capsys.readouterr().out == "all 2 parameters learn.\n"
    assert main(["audit", "own.py:net", "--loss", "own.py:idle"]) == 2
    assert "asked for no gradient" in capsys.readouterr().err
    assert main(["audit", "own.py:params", "--loss", "own.py:of_net"]) == 2
