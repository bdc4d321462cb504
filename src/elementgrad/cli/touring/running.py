"""Running the code of the tour: the text that is shown is the text that runs."""

import ast
import inspect
import linecache
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from elementgrad.cli.touring.written import told

RAISED = 180
"""Characters of the message of an error."""
BRIEF = 44
"""Characters of a brief answer."""


@dataclass(frozen=True)
class Answer:
    """Code, and what came of it."""

    text: str
    """What the code does, in a sentence or two."""
    code: str
    values: dict[str, Any] = field(default_factory=dict)
    """What is to be seen, by the expression that gave it."""
    error: str | None = None
    """What it raised instead."""
    names: dict[str, Any] = field(default_factory=dict, repr=False)
    """Every name that the code can see or has made."""

    @property
    def brief(self) -> str:
        """What came of it, in a few words."""
        if self.error is not None:
            return self.error.partition(":")[0]
        return textwrap.shorten(", ".join(map(told, self.values.values())), BRIEF, placeholder=" ...")


def run(stop: Callable[..., Any], names: dict[str, Any], catch: bool = False) -> Answer:
    """Run the body of a function as a file of its own, in which the given names are known.

    The function itself is never called: its body is the code, what it returns is what is to be seen, and its docstring
    says what it does. Lines in error messages are therefore those of the code as it is shown. What the code raises
    comes through, or is told with `catch`.

    >>> from elementgrad.cli.touring.running import run
    >>> from elementgrad.cli.touring.example import squares
    >>> answer = run(squares, {"numbers": [1, 2, 3]})
    >>> answer.text, answer.code, answer.values
    ('Square some numbers.', 'squared = [number**2 for number in numbers]', {'squared': [1, 4, 9], 'sum(squared)': 14})
    """
    text, code, shown = parts(stop)
    file = f"{stop.__name__}.py"
    linecache.cache[file] = len(code), None, code.splitlines(keepends=True), file
    module = ModuleType(f"tour.{stop.__name__}")
    vars(module).update(names | {"__name__": module.__name__})
    sys.modules[module.__name__] = module  # where frameworks look up the file of a function
    names = vars(module)
    try:
        exec(compile(code, file, "exec"), names)
        values = {expression: eval(expression, names) for expression in shown}
    except Exception as error:
        if not catch:
            raise
        return Answer(text, code, error=raised(error), names=names)
    return Answer(text, code, values, names=names)


def parts(stop: Callable[..., Any]) -> tuple[str, str, list[str]]:
    """The docstring of a function, its body as a text, and the expressions that it returns."""
    whole = textwrap.dedent(inspect.getsource(stop))
    (function,) = ast.parse(whole).body
    *body, last = function.body[1:]  # type: ignore[attr-defined]
    first = min(node.lineno for node in [body[0], *getattr(body[0], "decorator_list", [])])
    lines = whole.splitlines()[first - 1 : body[-1].end_lineno]
    shown = last.value.elts if isinstance(last.value, ast.Tuple) else [last.value]
    code = textwrap.dedent("\n".join(lines))
    return (
        " ".join((inspect.getdoc(stop) or "").split()),
        code,
        [ast.get_source_segment(whole, value) or "" for value in shown],
    )


def statement(code: str, name: str) -> str:
    """The statement of some code that gives a name its value."""
    tree = ast.parse(code)
    nodes = [node for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name]
    return ast.get_source_segment(code, nodes[0]) or ""


def raised(error: Exception) -> str:
    """An error in a line: its type, and the first sentence or so of its message."""
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {textwrap.shorten(message, RAISED, placeholder=' ...')}"
