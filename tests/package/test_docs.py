"""Every code block of the documentation runs, and every docstring's example gives what it says."""

import ast
import doctest
import inspect
import re
import textwrap
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import elementgrad

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(
    r'^=== "(?P<tab>[^"\n]+)"$|^(?P<indent> *)```python\n(?P<code>.*?)^(?P=indent)```$', re.MULTILINE | re.DOTALL
)
ERROR = re.compile(r"print\(error\)  # (.+)")
MODULES = sorted(
    ".".join(path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__")
    for path in Path(elementgrad.__file__).parent.rglob("*.py")
    if path.name != "__main__.py" and path.parent.name != "cells"  # the scripts of the tour
)
FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


class Finder(doctest.DocTestFinder):
    """Finds the examples of public types as well, whose `__module__` is the package."""

    def _from_module(self, module: Any, object: Any) -> bool:
        if inspect.isclass(object) and object.__module__ == "elementgrad":
            return f"\nclass {object.__name__}" in inspect.getsource(module)
        return super()._from_module(module, object)  # type: ignore[misc]


def run_examples(module: Any) -> int:
    """Run the examples in the docstrings of a module, and return how many failed."""
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    for test in Finder().find(module, module.__name__):
        runner.run(test)
    return runner.failures


def blocks(page: Path) -> list[tuple[str | None, str]]:
    """The code of a page in order, each block with the tab that it stands in, if any."""
    found, tab = [], None
    for match in BLOCK.finditer(page.read_text()):
        if match["tab"]:
            tab = match["tab"]
        else:
            found.append((tab if match["indent"] else None, textwrap.dedent(match["code"])))
    return found


def readers() -> Iterator[Any]:
    """A page with tabs is read once for each: what a reader of that tab sees, from top to bottom."""
    for page in PAGES:
        name = str(page.relative_to(ROOT).with_suffix("")).removeprefix("docs/")
        for tab in dict.fromkeys(tab for tab, _ in blocks(page) if tab) or [None]:
            yield pytest.param(page, tab, id=f"{name}-{tab}" if tab else name)


@pytest.mark.parametrize(("page", "tab"), list(readers()))
def test_the_code_of_a_page_runs_in_order(page, tab, capsys):
    """Check that the `# -> value` after an expression is its repr; after `print(error)`, a part of the text."""
    names: dict[str, object] = {}
    checked = 0
    read = [code for own, code in blocks(page) if own in (None, tab)]
    for package in ("optax", "transformers", "accelerate"):  # which are not among the oldest supported versions
        if re.search(rf"^(import|from) {package}\b", "\n".join(read), re.MULTILINE):
            pytest.importorskip(package)
    for block in read:
        lines = block.splitlines()
        for statement in ast.parse(block).body:
            comment = awaited(lines, statement.end_lineno)
            if comment:
                assert isinstance(statement, ast.Expr), f"{comment} stands behind no expression"
                value = eval(compile(ast.Expression(statement.value), str(page), "eval"), names)
                assert printed(value) == comment, lines[statement.lineno - 1]
                assert comment in page.read_text().splitlines() or not comment.startswith("| "), "not in the table"
                checked += 1
            else:
                exec(compile(ast.Module([statement], []), str(page), "exec"), names)
    told = capsys.readouterr().out
    assert [said for code in read for said in ERROR.findall(code) if said not in told] == []
    assert checked or not read


def awaited(lines: list[str], end: int) -> str:
    """Return the stated value of a statement: after it, or alone on the next line."""
    beside, below = [*lines, ""][end - 1 : end + 1]
    return beside.partition("# -> ")[2].strip() or (below[5:].strip() if below.startswith("# -> ") else "")


def printed(value: object) -> str:
    if hasattr(value, "numpy"):
        value = value.detach().numpy() if hasattr(value, "detach") else value.numpy()
    if hasattr(value, "tolist"):
        value = value.tolist()
    return str(value)


@pytest.mark.parametrize("module", MODULES)
def test_the_examples_of_docstrings_are_true(module):
    failed = run_examples(import_module(module))
    assert failed == 0
