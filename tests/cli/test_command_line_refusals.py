"""Refusals of the command line, in one line before any work, and errors of the user's own code."""

import sys

import numpy as np
import pytest

from elementgrad._cli import main
from tests.support.user_files import FILES

LONG = "w" * 100_000
USAGE = {
    "no such file": ("grad nothing.py:f [1.0]", "nothing.py is not a file; give file.py:name or package.module:name"),
    "no such module": ("grad nothing.at.all:f [1.0]", "'nothing.at.all:f': there is no module 'nothing'; give"),
    "a module that is a file": ("grad of_jax:loss2 [1.0]", "of_jax has no 'loss2'; nearest: loss"),
    "no such name": ("grad of_jax.py:lose [1.0]", "of_jax.py has no 'lose'; nearest: loss"),
    "no name": ("grad of_jax.py [1.0]", "'of_jax.py' names no object; give file.py:name"),
    "no function": ("grad of_jax.py:array [1.0]", "which cannot be called; name a model, a function"),
    "a class with arguments": ("grad of_jax.py:Model [1.0]", "of_jax.py:Model takes kernel, bias and cannot be called"),
    "no place": ("grad of_jax.py:loss [1.0] --wrt x[", "at character 3, found the end"),
    "no such tensor": ("grad of_jax.py:loss [1.0] --wrt y", "no tensor is named 'y'"),
    "out of range": ("grad of_jax.py:loss [1.0] --wrt x[1]", "index 1 is out of range for axis 0 of size 1"),
    "no single number": ("grad of_jax.py:straight [1.0,2.0]", "is not a single number; say which element, as in --of "),
    "no budget": ("grad of_jax.py:loss [1.0] --budget much", "budget 'much' is not an amount of memory"),
    "an empty budget": ("grad of_jax.py:loss [1.0] --budget 0", "budget 0 is not an amount of memory; give bytes as"),
    "no input": ("grad of_jax.py:loss", "the inputs do not fit of_jax.py:loss(x, scale=2.0): missing a required"),
    "an unknown input": ("grad of_jax.py:loss [1.0] --input y=[1.0]", "got an unexpected keyword argument 'y'"),
    "an input twice": ("grad of_jax.py:loss --input x=[1.0] --input x=[2.0]", "x is given twice"),
    "a name without its option": ("grad of_jax.py:loss x=[1.0]", "give it by its name, as in --input x=[1.0]"),
    "a missing file": ("grad of_jax.py:loss nothing.npy", "nothing.npy: No such file or directory"),
    "a damaged file": ("grad of_jax.py:loss damaged.npy", "damaged.npy cannot be read: "),
    "a pickle": ("grad of_jax.py:loss objects.npy", "objects.npy cannot be read: Object arrays cannot be loaded"),
    "a pickle among others": ("grad of_jax.py:loss objects.npz", "objects.npz cannot be read: 'x': Object arrays"),
    "a picture on a folder": ("grad of_jax.py:loss [1.0] --plot taken.png", "taken.png is a directory"),
    "texts": ("grad of_jax.py:loss texts.npy", "texts.npy is an array of <U1, and a tensor holds numbers"),
    "another kind of file": ("grad of_jax.py:loss notes.csv", "notes.csv is a file of another kind; give a .npy"),
    "no such array": ("grad of_jax.py:loss two.npz:z", "two.npz has no 'z'; it holds x, y.z"),
    "a name that is none": ("grad of_jax.py:loss two.npz", "two.npz holds 'y.z', which is not the name of an argument"),
    "rows of different lengths": ("grad of_jax.py:loss [[1.0],[2.0,3.0]]", "the rows of a list have different lengths"),
    "bad JSON": ("grad of_jax.py:loss bad.json", "bad.json is not valid JSON: "),
    "bad safetensors": ("grad of_jax.py:loss bad.safetensors", "bad.safetensors is not a safetensors file: "),
    "a damaged archive": ("grad of_jax.py:loss damaged.npz", "damaged.npz cannot be read: file is not a zip file"),
    "a damaged array in it": ("grad of_jax.py:loss flipped.npz", "flipped.npz cannot be read: bad CRC-32 for file"),
    "deep JSON": (f"grad of_jax.py:loss {'[' * 5000}", "has too many brackets inside one another"),
    "a deep file": ("grad of_jax.py:loss deep.json", "deep.json has too many brackets inside one another"),
    "a long input": (f"grad of_jax.py:loss {LONG}", "wwww' is not an input; give a .npy, .npz,"),
    "a long name": (f"grad of_jax.py:{LONG} [1.0]", "of_jax.py has no 'wwww"),
    "a long place": (f"grad of_jax.py:loss [1.0] --wrt {LONG}[0]", "no tensor is named 'www"),
    "a deep place": (f"grad of_jax.py:loss [1.0] --wrt x{'[' * 5000}", "expected fewer brackets inside one another"),
    "a place that breaks far behind": (f"grad of_jax.py:loss [1.0] --wrt x[{'0,' * 5000}q]", "at character 10003,"),
    "a long path": (f"patch inspect {LONG}", "File name too long"),
    "an ending": (
        "grad of_jax.py:loss [1.0] --out g.csv",
        "g.csv has no known ending; give one of .npy",
    ),
    "no folder": ("grad of_jax.py:loss [1.0] --out no/g.npy", "no/g.npy: there is no directory no; make it first"),
    "two in one": ("grad of_jax.py:loss [1.0] --wrt x --wrt x --out g.npy", "a .npy file and a picture hold one"),
    "nothing tells": ("grad plain.py:f [1.0]", "the framework of its inputs is not known; give --framework"),
    "too many tell": (
        "grad both.py:f [1.0]",
        "both.py:f uses torch and jax, so the framework of its inputs is not known",
    ),
    "a pattern to explain": (
        "explain of_jax.py:loss [1.0] --wrt x*",
        "x* is a pattern of several names, and one place",
    ),
    "a pattern to draw": ("grad of_jax.py:loss [1.0] --wrt x* --plot g.png", "hold one gradient; give --wrt once"),
    "a step with inputs": ("explain of_jax.py:loss [1.0] --step", "--step runs a function as it is; leave inputs"),
    "a broken model": ("names broken.py:net x.npy", "mat1 and mat2 shapes cannot be multiplied (1x3 and 5x2) (--debug"),
    "whole numbers": ("names broken.py:net [[1,2,3,4,5]]", "must have the same dtype, but got Long and Float (--debug"),
    "no patch": ("patch inspect x.npy", "x.npy is a NumPy array, and no safetensors file"),
    "no weights": ("patch apply x.npy x.npy --out w.npz", "x.npy is a NumPy array, and no safetensors file"),
    "a patch and more": ("report p.safetensors [1.0]", "p.safetensors is a patch, and a page about one needs nothing"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("user")
    (folder / "of_jax.py").write_text(FILES["jax"])
    (folder / "plain.py").write_text("def f(x):\n    return (x * x).sum()\n")
    (folder / "both.py").write_text(
        "import jax\nimport torch\n\ndef f(x):\n    return (torch.sin or jax.numpy.sin)(x)\n"
    )
    (folder / "broken.py").write_text("import torch\n\nnet = torch.nn.Linear(5, 2)\n")
    (folder / "notes.csv").write_text("1, 2\n")
    (folder / "bad.json").write_text("[1, ")
    (folder / "damaged.npy").write_bytes(b"\x93NUMPY\x01")
    (folder / "bad.safetensors").write_bytes(b"12345678{")
    np.save(folder / "x.npy", np.ones((1, 3)))
    np.save(folder / "objects.npy", np.array([{}]))
    np.savez(folder / "objects.npz", x=np.array([{}]))
    (folder / "taken.png").mkdir()
    np.save(folder / "texts.npy", np.array(["a"]))
    (folder / "damaged.npz").write_bytes(b"PK\x03\x04")
    np.savez(folder / "flipped.npz", x=np.ones(3))
    flipped = bytearray((folder / "flipped.npz").read_bytes())
    flipped[200] ^= 1
    (folder / "flipped.npz").write_bytes(flipped)
    (folder / "deep.json").write_text("[" * 990 + "1.0" + "]" * 990)
    np.savez(folder / "two.npz", **{"x": np.ones(1), "y.z": np.ones(1)})
    return folder


PARSING = {
    "no command": ("", "the following arguments are required: command; 'elementgrad --help' has the options"),
    "no model": ("grad", "the following arguments are required: MODEL"),
    "an unknown command": ("fly", "invalid choice: 'fly'"),
    "a long command": (LONG, "invalid choice: 'www"),
    "an unknown option": ("grad a.py:f --fly", "unrecognized arguments: --fly"),
    "an unknown choice": ("grad a.py:f --unconnected perhaps", "'elementgrad grad --help' has the options"),
    "two answers to one question": ("report a.py:f [1.0] --of y[0] --of y[1]", "--of is given twice; give it once"),
    "no file to write": ("patch diff a.npz b.npz", "the following arguments are required: --out"),
}


@pytest.mark.parametrize(("typed", "says"), PARSING.values(), ids=PARSING)
def test_unparsable_arguments_end_with_one_line(typed, says, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(typed.split())
    assert stopped.value.code == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert says in printed.err
    assert len(printed.err) < 1200


@pytest.mark.parametrize(("typed", "says"), USAGE.values(), ids=USAGE)
def test_impossible_calls_end_with_one_line(typed, says, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    assert main(typed.split()) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = [line for line in printed.err.splitlines() if line.startswith("elementgrad: ") and "used as" not in line]
    assert says in printed.err
    assert "Traceback" not in printed.err
    assert "\\n" not in line
    assert len(line) < 1200
    assert not list(folder.glob("g.*"))


def test_framework_is_taken_from_the_option_where_nothing_tells(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    for framework in ("torch", "jax"):
        assert main(["grad", "plain.py:f", "[3.0]", "--framework", framework]) == 0
        assert capsys.readouterr().out == "[6.]\n"
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["grad", "plain.py:f", "[3.0]", "--framework", "torch"]) == 2


def test_errors_of_the_users_code_have_a_traceback(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    assert main(["grad", "of_jax.py:bad", "[1.0]"]) == 3
    error = capsys.readouterr().err
    assert error.startswith("Traceback")
    assert "\nRuntimeError: mine\n" in error
    assert [line.split()[-1] for line in error.splitlines() if "of_jax.py" in line] == ["bad", "helper"]
    assert "elementgrad" not in error
    assert main(["grad", "of_jax.py:bad", "[1.0]", "--debug"]) == 3
    assert "commands.py" in capsys.readouterr().err
    for name, text, says in (
        ("syntax", "def f(:\n", "SyntaxError"),
        ("imports", "import of_nothing\n", "ModuleNotFoundError: No module named 'of_nothing'"),
        ("leaves", "import sys\n\nsys.exit(0)\n", "SystemExit"),
        ("factory", "def make():\n    raise ValueError('no weights')\n", "ValueError: no weights"),
    ):
        (folder / f"{name}.py").write_text(text)
        assert main(["names", f"{name}.py:make", "[1.0]"]) == 3
        error = capsys.readouterr().err
        assert says in error
        assert f"{name}.py" in error
        assert "loading.py" not in error
        assert "importlib" not in error


def test_jax_has_float64_only_with_x64_enabled(folder, monkeypatch, capsys):
    from elementgrad._backends.jax.tensor import WIDE

    monkeypatch.chdir(folder)
    with WIDE(False):
        assert main(["names", "of_jax.py:loss", "x.npy"]) == 0
        printed = capsys.readouterr()
        assert "float64" not in printed.out
        assert printed.err.startswith(
            "elementgrad: x.npy is float64 and used as float32, as jax is set to; --dtype decides otherwise\n"
        )
        assert main(["grad", "of_jax.py:loss", "x.npy", "--dtype", "float64", "--json"]) == 0
        assert '"dtype": "float64"' in capsys.readouterr().out


def test_an_error_of_ours_in_code_of_theirs_shows_their_line(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    (folder / "edits.py").write_text(
        "import jax\nimport elementgrad as eg\n\ndef f(x):\n    return eg.at(x)[7].set(0.0).sum()\n"
    )
    assert main(["grad", "edits.py:f", "[1.0]"]) == 3
    error = capsys.readouterr().err
    assert "return eg.at(x)[7].set(0.0).sum()" in error
    assert "index 7 is out of range" in error
