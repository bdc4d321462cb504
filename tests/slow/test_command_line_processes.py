"""The command line as real processes: exit codes, streams, what is imported, signals and pipes, tab completion."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import elementgrad as eg
from elementgrad._backends import source_location as lines
from elementgrad._backends.source_location import is_user_code
from elementgrad._train.bits import BitArray
from elementgrad._train.entries import Entry
from tests.support.user_files import FILES, WEIGHT

ROOT = Path(eg.__file__).parent.parent
HEAVY = {"torch", "tensorflow", "keras", "jax", "numpy", "rich", "matplotlib", "shtab"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("user")
    for name, text in FILES.items():
        (folder / f"of_{name}.py").write_text(text)
    np.save(folder / "x.npy", np.array([[1.0, 2.0, 3.0]], np.float32))
    return folder


def run(folder, *arguments, python=(), stdout=subprocess.PIPE):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_ENABLE_X64": "0"}
    command = [sys.executable, *python, "-m", "elementgrad", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, stdout=stdout, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("framework", FILES)
def test_a_gradient_on_each_framework(framework, folder):
    options = ["--of", "output[0, 1]", "--wrt", WEIGHT[framework], "--json", "--out", f"{framework}.npy"]
    done = run(folder, "grad", f"of_{framework}.py:Net", "x.npy", *options)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["gradients"] == [
        {"wrt": WEIGHT[framework], "shape": [], "dtype": "float32", "values": 3.0}
    ]
    assert np.load(folder / f"{framework}.npy") == 3.0


def test_results_are_plain_when_piped_and_messages_go_elsewhere(folder):
    done = run(folder, "grad", "of_jax.py:loss", "[1.0, 2.0]")
    assert (done.returncode, done.stdout) == (0, "[4., 8.]\n")
    assert "a line of the user's" in done.stderr
    assert "\x1b" not in done.stderr


def test_exit_codes_of_findings_and_of_the_users_errors(folder):
    done = run(folder, "explain", "of_jax.py:cut", "[1.0]")
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.startswith("output has no gradient with respect to x")
    done = run(folder, "grad", "of_jax.py:bad", "[1.0]")
    assert (done.returncode, done.stdout) == (3, "")
    assert "RuntimeError: mine" in done.stderr
    assert "elementgrad" not in done.stderr


def test_invalid_calls_are_refused_before_a_framework_is_imported(folder):
    (folder / "slow.py").write_text("raise AssertionError('loaded')\n")
    for arguments in (["--wrt", "x["], ["--budget", "much"], ["--out", "g.csv"], ["--unconnected", "perhaps"]):
        done = run(folder, "grad", "slow.py:f", "[1.0]", *arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert "elementgrad" in done.stderr
        assert "loaded" not in done.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["grad", "--help"], ["patch", "apply", "--help"]])
def test_help_imports_nothing_heavy_and_has_examples(arguments, folder):
    done = run(folder, *arguments, python=("-X", "importtime"))
    imported = {line.split("|")[-1].strip().split(".")[0] for line in done.stderr.splitlines()}
    assert done.returncode == 0
    assert not imported & HEAVY
    assert "examples:" in done.stdout or len(arguments) == 1


def test_patches_of_weights_in_files_need_no_framework(folder):
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    model = torch.nn.Linear(4, 3).bfloat16()
    save_file(model.state_dict(), folder / "w.safetensors", metadata={"format": "pt"})
    for number, place in enumerate(["weight[1, 2:]", "bias"]):
        elements = eg.trainable(model, place)
        with torch.no_grad():
            elements[place].add_(0.3)
        elements.save(folder / f"p{number}.safetensors")
        elements.release(keep=False)
    patches = ["p0.safetensors", "p1.safetensors"]
    done = run(
        folder, "patch", "apply", "w.safetensors", *patches, "--out", "v.safetensors", python=("-X", "importtime")
    )
    imported = {line.split("|")[-1].strip().split(".")[0] for line in done.stderr.splitlines()}
    assert (done.returncode, done.stdout) == (0, "weight[1, 2:]\nbias\n")
    assert not imported & {"torch", "tensorflow", "jax"}
    for patch in patches:
        eg.apply(model, folder / patch)
    from safetensors.torch import load_file

    held = load_file(folder / "v.safetensors")
    assert all(torch.equal(held[name], tensor) for name, tensor in model.state_dict().items())
    done = run(folder, "patch", "undo", "v.safetensors", *patches, "--out", "u.safetensors", "--json")
    assert json.loads(done.stdout) == {
        "format": 1,
        "command": "patch undo",
        "places": ["weight[1, 2:]", "bias"],
        "out": "u.safetensors",
    }
    assert (folder / "u.safetensors").read_bytes() == (folder / "w.safetensors").read_bytes()
    done = run(folder, "patch", "undo", "w.safetensors", "p0.safetensors", "--out", "t.safetensors")
    assert (done.returncode, done.stdout) == (2, "")
    assert "does not hold the values of the patch; there is nothing to undo" in done.stderr
    assert not (folder / "t.safetensors").exists()


def test_interrupts_and_closed_pipes_end_quietly(folder):
    heard = "signal.signal(signal.SIGINT, signal.default_int_handler)"  # which a shell in the background takes away
    (folder / "interrupted.py").write_text(f"import os, signal\n\n{heard}\nos.kill(os.getpid(), signal.SIGINT)\n")
    done = run(folder, "names", "interrupted.py:f")
    assert (done.returncode, done.stderr) == (130, "")
    eg.Patch(()).write(folder / "empty.safetensors")
    command = f'"{sys.executable}" -m elementgrad patch inspect empty.safetensors; echo $? >&2'
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    left, right = os.pipe()
    os.close(left)
    done = subprocess.run(command, shell=True, cwd=folder, env=environment, stdout=right, stderr=subprocess.PIPE)
    os.close(right)
    assert done.stderr == b"141\n"


def test_streams_that_are_closed_or_full_are_said_and_never_a_traceback(folder):
    eg.Patch(()).write(folder / "empty.safetensors")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    for redirected, code, says in (
        (">&-", 2, "elementgrad: standard output is closed, so that no result can be printed; send it to a file"),
        ("2>&-", 0, ""),
        (">&- 2>&-", 2, ""),
        ("> /dev/full", 2, "elementgrad: No space left on device"),
    ):
        command = f'"{sys.executable}" -m elementgrad patch inspect empty.safetensors {redirected}'
        done = subprocess.run(command, shell=True, cwd=folder, env=environment, capture_output=True, text=True)
        assert (done.returncode, done.stderr.count("\n")) == (code, 1 if says else 0)
        assert says in done.stderr
        assert done.stdout == ("" if code else "place  elements  shape  dtype  largest change\n")


def test_help_into_a_closed_pipe_ends_quietly(folder):
    left, right = os.pipe()
    os.close(left)
    for option in ("--version", "--help"):
        done = run(folder, option, stdout=right)
        assert (done.returncode, done.stderr) == (141, "")
    os.close(right)


@pytest.mark.parametrize(("encoding", "name"), [("cp1252", "schön->"), ("ascii", "sch\\xf6n->")])
def test_names_that_an_output_does_not_know_are_printed_by_others(folder, encoding, name):
    numbers = BitArray.of(np.float32([1.0]))
    entry = Entry("schön→[0]", "schön→", (1,), "float32", np.array([0]), numbers, numbers, "full:" + 64 * "0")
    eg.Patch((entry,)).write(folder / "ü→.safetensors")
    for options in ((), ("--json",)):
        environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": encoding}
        command = [sys.executable, "-m", "elementgrad", "patch", "inspect", "ü→.safetensors", *options]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=True)
        printed = done.stdout.decode(encoding)
        if options:
            assert json.loads(printed)["entries"][0]["name"] == "schön→"
        else:
            assert f"{name}[0]" in printed


def test_the_script_that_starts_it_is_no_line_of_the_users():
    assert not is_user_code("/usr/local/bin/elementgrad", ())
    assert is_user_code("/home/somebody/elementgrad.py", ())


def test_paths_are_compared_as_the_system_does(monkeypatch):
    """On Windows two spellings of a path are one, and a framework may give either."""
    ours = os.path.join(os.path.dirname(eg.__file__), "read.py").upper()
    assert is_user_code(ours, ())
    monkeypatch.setattr(os.path, "normcase", str.lower)
    monkeypatch.setattr(lines, "OURS", lines.OURS.lower())
    assert not is_user_code(ours, ())


def test_tab_completion_knows_commands_and_options(folder):
    pytest.importorskip("shtab")
    scripts = {shell: run(folder, "completion", shell).stdout for shell in ("bash", "zsh", "fish")}
    for script in scripts.values():
        assert "--unconnected" in script
        assert "undo" in script
    (folder / "completion.bash").write_text(scripts["bash"])
    for typed, offers in (
        ("elementgrad e", "explain"),
        ("elementgrad patch u", "undo"),
        ("elementgrad grad --bu", "--budget"),
    ):
        words = typed.split()
        asked = f"""source completion.bash
COMP_WORDS=({typed}); COMP_CWORD={len(words) - 1}; COMP_LINE='{typed}'; COMP_POINT={len(typed)}
$(complete -p elementgrad | sed 's/.*-F \\([^ ]*\\) .*/\\1/'); echo "${{COMPREPLY[@]}}" """
        done = subprocess.run(["bash", "-c", asked], cwd=folder, capture_output=True, text=True)
        assert offers in done.stdout.split(), done.stderr
