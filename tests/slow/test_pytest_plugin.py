"""The pytest plugin in runs of pytest of its own."""

import json
from importlib.metadata import entry_points

pytest_plugins = ["pytester"]
INSTALLED = any(each.value == "elementgrad._pytest" for each in entry_points(group="pytest11"))
PLUGIN = () if INSTALLED else ("-p", "elementgrad._pytest")
MODEL = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.pooler, self.head = (torch.nn.Linear(3, 3) for _ in range(3))

    def forward(self, x):
        return self.head(self.trunk(x)).sum()

X = torch.ones(2, 3)
"""


def test_flow_fails_with_the_table_and_passes_what_is_excepted(pytester):
    pytester.makepyfile(
        MODEL
        + """
def test_all(gradients):
    gradients.flow(Net(), lambda model: model(X))

def test_most(gradients):
    audit = gradients.flow(Net(), lambda model: model(X), except_=["pooler"])
    assert audit.excepted == ("pooler.weight", "pooler.bias")
"""
    )
    result = pytester.runpytest_subprocess(*PLUGIN, "-q")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*pooler.weight*no gradient*unused*", "*pooler.bias*no gradient*unused*"])
    assert "_pytest.py" not in result.stdout.str()


def test_a_snapshot_is_written_compared_and_written_anew(pytester):
    pytester.makepyfile(
        """
import torch

def test_snapshot(gradients):
    scale = float(open("scale").read())
    x = torch.tensor([1.0, 2.0, 3.0])
    f = lambda x: scale * (x**2).sum()
    assert gradients.snapshot("squares", f, x).shape == (3,)
"""
    )
    scale, run = pytester.path / "scale", lambda *more: pytester.runpytest_subprocess(*PLUGIN, "-q", *more)
    scale.write_text("1.0")
    missing = run()
    missing.assert_outcomes(failed=1)
    missing.stdout.fnmatch_lines(["*there is no gradients/*squares.json yet; run pytest --update-gradients*"])
    run("--update-gradients").assert_outcomes(passed=1)
    (path,) = (pytester.path / "gradients").iterdir()
    kept = json.loads(path.read_text())["derivatives"]["d"]
    assert kept["dtype"] == "float32"
    assert kept["shape"] == [3]
    assert [float.fromhex(text) for text in kept["hex"]] == kept["decimal"] == [2.0, 4.0, 6.0]
    run().assert_outcomes(passed=1)
    scale.write_text("1.001")
    changed = run()
    changed.assert_outcomes(failed=1)
    changed.stdout.fnmatch_lines(["*has changed*", "*3 of 3 numbers differ*", "*d[[]0[]]: was 2.0, is 2.00*"])
    run("--update-gradients").assert_outcomes(passed=1)
    run().assert_outcomes(passed=1)
