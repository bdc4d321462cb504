"""The fixture `gradients`: snapshots are exact, readable and forgive rounding; runs of pytest are in tests/slow."""

import json
import subprocess
import sys

import pytest
import torch

from elementgrad._pytest import Gradients


def snapshots(folder, update=False):
    return Gradients(folder / "test_it.py", update, {})


def test_snapshots_forgive_rounding_and_nothing_more(tmp_path):
    x = torch.tensor([0.5, 1.5])
    for dtype, rounding, wrong in ((torch.float32, 1e-6, 1e-4), (torch.float64, 1e-15, 1e-12)):
        name, x = str(dtype), x.to(dtype)

        def f(x, by=0.0):
            return (x.sin() * (1 + by)).sum()

        snapshots(tmp_path, update=True).snapshot(name, f, x, wrt="x")
        snapshots(tmp_path).snapshot(name, f, x, wrt="x", kwargs={"by": rounding})
        with pytest.raises(pytest.fail.Exception, match="of 2 numbers differ"):
            snapshots(tmp_path).snapshot(name, f, x, wrt="x", kwargs={"by": wrong})


def test_parts_are_compared_as_the_whole_and_rounding_as_the_value(tmp_path):
    """Another processor rounds differences of large numbers in another way."""
    x = torch.tensor([1.0, 1e-4])

    def part(x, by=0.0, shift=0.0):
        return (x * torch.tensor([1.0, 1e-4 + by + 1e-6 * shift])).sum()

    def scores(bias, by=0.0, shift=0.0):  # as the bias of keys in attention
        ramp = torch.linspace(0, 1, 5)
        return (torch.softmax(ramp + shift + bias[0], 0) @ ramp) + by * bias[0]

    for name, f, at, wrt in (("part", part, x, "x[1]"), ("rounding", scores, torch.tensor([1.0]), "bias")):
        kept = snapshots(tmp_path, update=True).snapshot(name, f, at, wrt=wrt)
        now = snapshots(tmp_path).snapshot(name, f, at, wrt=wrt, kwargs={"shift": 0.1})
        assert abs(now - kept).max() > 1e-8
        with pytest.raises(pytest.fail.Exception, match="of 1 numbers differ"):
            snapshots(tmp_path).snapshot(name, f, at, wrt=wrt, kwargs={"by": 1e-3})


def test_snapshots_keep_several_derivatives_and_what_is_not_finite(tmp_path):
    def f(x, y):
        return torch.sqrt(x).sum() * y

    x, y = torch.tensor([0.0, 4.0]), torch.tensor(2.0)
    snapshots(tmp_path, update=True).snapshot("roots", f, x, y, wrt={"a": "x", "b": "y"})
    kept = snapshots(tmp_path).snapshot("roots", f, x, y, wrt={"a": "x", "b": "y"})
    assert kept["a"].tolist() == [float("inf"), 0.5]
    with pytest.raises(pytest.fail.Exception, match="now there are d"):
        snapshots(tmp_path).snapshot("roots", f, x, y, wrt="x")
    with pytest.raises(pytest.fail.Exception, match=r"had shape \(2,\), and has \(\)"):
        snapshots(tmp_path).snapshot("roots", f, x, y, wrt={"a": "y", "b": "y"})


def test_bad_snapshots_get_one_sentence(tmp_path):
    x = torch.tensor([1.0])
    with pytest.raises(pytest.fail.Exception, match="becomes a file name"):
        snapshots(tmp_path).snapshot("a/b", torch.sin, x)
    twice = snapshots(tmp_path, update=True)
    twice.snapshot("same", torch.sin, x)
    with pytest.raises(pytest.fail.Exception, match="differ in one run; give each a name of its own"):
        twice.snapshot("same", torch.cos, x)
    for damaged in (b"{}", b'{"format": 1, "derivatives": {"\xff": 1}}', b"[" * 100_000):
        (tmp_path / "gradients" / "test_it.same.json").write_bytes(damaged)
        with pytest.raises(pytest.fail.Exception, match="is no snapshot of this format"):
            snapshots(tmp_path).snapshot("same", torch.sin, x)


@pytest.mark.parametrize(
    "change",
    [
        lambda kept: kept.pop("dtype"),
        lambda kept: kept.update(dtype="int32"),
        lambda kept: kept.update(hex=[]),
        lambda kept: kept.update(hex=["one"]),
        lambda kept: kept.update(shape=[3]),
        lambda kept: kept.update(shape="wide"),
    ],
)
def test_a_damaged_snapshot_is_said_and_never_passes(change, tmp_path):
    x = torch.tensor([1.0])
    snapshots(tmp_path, update=True).snapshot("sin", torch.sin, x)
    file = tmp_path / "gradients" / "test_it.sin.json"
    content = json.loads(file.read_text())
    change(content["derivatives"]["d"])
    file.write_text(json.dumps(content))
    with pytest.raises(pytest.fail.Exception, match="is no snapshot of this format"):
        snapshots(tmp_path).snapshot("sin", torch.sin, x)


def test_complex_numbers_and_single_ones_are_kept(tmp_path):
    for name, x in (("complex", torch.tensor([1.0 + 2.0j, 0.5j])), ("single", torch.tensor(2.0))):
        snapshots(tmp_path, update=True).snapshot(name, lambda x: (x * x).sum(), x)
        snapshots(tmp_path).snapshot(name, lambda x: (x * x).sum(), x)
        with pytest.raises(pytest.fail.Exception, match=r"d(\[0\])?: was"):
            snapshots(tmp_path).snapshot(name, lambda x: (x * x * x).sum(), x)
    with pytest.raises(pytest.fail.Exception, match="d had shape"):
        snapshots(tmp_path).snapshot("complex", lambda x: (x * x).sum(), torch.ones(3))
    with pytest.raises(pytest.fail.Exception, match="d is real now"):
        snapshots(tmp_path).snapshot("complex", lambda x: (x * x).sum(), torch.ones(2))
    text = (tmp_path / "gradients" / "test_it.complex.json").read_text()
    assert "NaN" not in text


def test_the_plugin_imports_nothing_until_a_test_uses_it():
    code = """
import sys, elementgrad._pytest
print(sorted({"numpy", "torch", "tensorflow", "jax", "keras"} & set(sys.modules)))
print([name for name in sys.modules if name.startswith("elementgrad")])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["[]", "['elementgrad', 'elementgrad._pytest']"]
