"""Code that stands in sentences and tables of the documentation: it names what there is, and tables of calls run."""

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import torch

import elementgrad as eg
from tests.package.test_docs import PAGES, ROOT
from tests.support.frameworks import JAX, TENSORFLOW, TORCH

FENCED = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`\n]*\beg\.\w+\([^`\n]*)`")
REGISTRIES = ("pypi.org", "anaconda.org", "pythonhosted.org")
MARKED = {"grad": 2, "jacobian": 2, "hessian": 2, "explain": 2, "check": 2, "trainable": 2, "apply": 2}
"""How many arguments a call has at least that is written out."""


ARGUMENTS = {"input_ids", "attention_mask"}
"""Keywords of the pages that are passed on to a model."""


def spans(page: Path) -> Iterator[str]:
    return (match[1] for match in SPAN.finditer(FENCED.sub("", page.read_text())))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_calls_in_sentences_have_the_arguments_that_there_are(page):
    for span in spans(page):
        try:
            tree = ast.parse(span + (" pass" if span.endswith(":") else ""))
        except SyntaxError:  # a signature
            continue
        for call in [node for node in ast.walk(tree) if isinstance(node, ast.Call)]:
            name = ast.unparse(call.func).partition("eg.")[2]
            if not name.isidentifier() or ast.unparse(call.args[:1] or [ast.Constant(0)]) == "...":
                continue
            function = getattr(eg, name)
            known = inspect.signature(function if inspect.isfunction(function) else type(function).__call__).parameters
            arguments = ARGUMENTS if "arguments" in known else set()
            assert {keyword.arg for keyword in call.keywords if keyword.arg} <= {*known, *arguments}, span
            given = len(call.args) + len([keyword for keyword in call.keywords if keyword.arg in arguments])
            assert any(ast.unparse(one) == "..." for one in call.args) or given >= MARKED.get(name, 1), span


def test_links_go_to_projects_and_not_to_registries():
    for page in PAGES:
        assert not [host for host in REGISTRIES if host in page.read_text()], page


class Small(torch.nn.Module):
    """A model with the names that the page uses."""

    def __init__(self):
        super().__init__()
        self.conv1 = torch.nn.Conv2d(1, 2, 3, padding=1)
        self.fc = torch.nn.Linear(2 * 64, 4)

    def forward(self, x):
        return self.fc(torch.relu(self.conv1(x)).flatten(1))


def functions(fw, span: str) -> dict[str, Any]:
    """Return `f` and its arguments for a call: a function of two, one with a single number, or any."""
    matrix = fw.tensor([[1.0, 2.0], [3.0, 4.0]])
    found = {"X": matrix, "i": 1, "j": 2, "v": fw.tensor([1.0, 0.0, 2.0]), "u": fw.tensor([1.0, 0.0, 2.0])}
    found |= {"x": fw.tensor([1.0, 2.0, 3.0]), "y": fw.tensor([2.0, 2.0, 2.0]), "f": lambda x: x**2}
    if "0, 0" in span or "x, batch" in span:
        found["x"] = matrix
    if "x, y" in span:
        found["f"] = lambda x, y: fw.sum(x * y)
    elif span.startswith(("eg.grad(f, x)", "eg.hessian")):
        found["f"] = lambda x: fw.sum(x**3)
    return found


def keras_model() -> Any:
    inputs = keras.Input((8, 8, 1))
    return keras.Model(inputs, keras.layers.Conv2D(2, 3, name="conv1")(inputs))


def names_of(section: str, span: str) -> dict[str, Any]:
    """Return the values of the names in a call, by its section."""
    table = {"table": JAX.tensor(np.ones((2, 6))), "head": JAX.tensor([1.0])}
    if section == "torch.func" and "model" not in span:
        return functions(TORCH, span)
    if section in ("torch.func", "Captum"):
        return {"model": Small(), "x": torch.ones(1, 1, 8, 8)}
    if section.startswith("jax"):
        return functions(JAX, span) | {"params": table} | ({"v": 3.0} if "set(v)" in span else {})
    if section == "tape.jacobian" and "model" not in span:
        return functions(TENSORFLOW, span)
    if section == "tape.jacobian":
        return {"model": keras_model(), "x": TENSORFLOW.tensor(np.ones((1, 8, 8, 1)), "float32")}
    if section == "optax":
        return {"params": table}
    assert section == "PEFT"
    model = torch.nn.ModuleDict({"transformer": torch.nn.ModuleDict({"wte": torch.nn.Embedding(50258, 1)})})
    model["score"], model["lora_A"] = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    if "base_model" in span:
        model = torch.nn.ModuleDict({"base_model": torch.nn.ModuleDict({"model": model})})
    if "apply" in span:
        elements = eg.trainable(model, "transformer.wte.weight[0]")
        elements.save("patch.safetensors")
        elements.release(keep=False)
    return {"model": model, "places": "transformer.wte.weight[50257]"}


def calls() -> Iterator[Any]:
    """The calls of ours in the tables of the page, by their sections."""
    page = (ROOT / "docs" / "coming-from.md").read_text()
    for section in re.split(r"^## ", page, flags=re.MULTILINE)[1:]:
        title, _, text = section.partition("\n")
        rows = [row.split(" | ") for row in FENCED.sub("", text).splitlines() if row.startswith("| ")]
        for span in [span for row in rows for span in SPAN.findall(f"{row[1]} ")]:
            if not span.endswith(":"):  # the beginning of a block
                yield pytest.param(title, span, id=f"{title}: {span}")


@pytest.mark.parametrize(("section", "span"), list(calls()))
def test_the_calls_beside_those_of_other_libraries_run(section, span, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert eval(span, {"eg": eg, **names_of(section, span)}) is not None


def test_sentences_are_wrapped():
    for page in [*PAGES, *[ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")]]:
        lines = FENCED.sub("", page.read_text()).splitlines()
        assert [line for line in lines if len(line) > 100 and line[:1] != "|"] == [], page
