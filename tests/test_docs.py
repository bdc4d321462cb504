"""Every code block of the documentation runs, and every docstring's example gives what it says."""

import ast
import doctest
import re
from importlib import import_module
from pathlib import Path

import pytest

import elementgrad

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
MODULES = sorted(
    ".".join(path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__")
    for path in Path(elementgrad.__file__).parent.rglob("*.py")
    if path.name != "__main__.py"
)
FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


def blocks(page: Path) -> list[str]:
    return [match.group(1) for match in BLOCK.finditer(page.read_text())]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_code_of_a_page_runs_in_order(page):
    """What stands behind an expression as `# -> value` is checked too: it must be how the value prints."""
    names: dict[str, object] = {}
    checked = 0
    if "import optax" in page.read_text():
        pytest.importorskip("optax")
    for block in blocks(page):
        lines = block.splitlines()
        for statement in ast.parse(block).body:
            comment = lines[statement.end_lineno - 1].partition("# -> ")[2].strip()
            if comment:
                assert isinstance(statement, ast.Expr), f"{comment} stands behind no expression"
                value = eval(compile(ast.Expression(statement.value), str(page), "eval"), names)
                assert printed(value) == comment, lines[statement.lineno - 1]
                checked += 1
            else:
                exec(compile(ast.Module([statement], []), str(page), "exec"), names)
    assert checked or not blocks(page)


def printed(value: object) -> str:
    if hasattr(value, "numpy"):
        value = value.detach().numpy() if hasattr(value, "detach") else value.numpy()
    if hasattr(value, "tolist"):
        value = value.tolist()
    return str(value)


@pytest.mark.parametrize("module", MODULES)
def test_the_examples_of_docstrings_are_true(module):
    failed, _ = doctest.testmod(import_module(module), optionflags=FLAGS)
    assert failed == 0
