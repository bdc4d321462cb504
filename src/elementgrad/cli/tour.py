"""The tour: every question with its code, and the numbers that the code has just given."""

import ast
import inspect
import textwrap
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

from elementgrad import backends
from elementgrad.errors import FrameworkError

NEEDS = {
    "torch": {"torch": "torch"},
    "tensorflow": {"tf": "tensorflow", "keras": "keras"},
    "jax": {"jax": "jax", "jnp": "jax.numpy", "optax": "optax"},
}
"""For each framework the modules that its stops use, by the names that they have there."""


def run(framework: str = "torch") -> None:
    """Print every stop: its question, its code, and the numbers that the code has just given."""
    stops = on(framework)
    _need("rich", "'elementgrad[show]'")
    from rich.console import Console
    from rich.markup import escape
    from rich.syntax import Syntax
    from rich.table import Table

    console = Console()
    console.print("[bold]elementgrad[/]: gradients, one element at a time\n")
    table = Table(show_lines=True, expand=True)
    table.add_column("question", ratio=3)
    table.add_column("code", ratio=7)
    table.add_column("answer", ratio=4)
    for stop in stops.STOPS:
        code = Syntax(source(stop), "python", theme="ansi_light", background_color="default", word_wrap=True)
        answer = "\n".join(f"{name}\n  [bold cyan]{show(value)}[/]" for name, value in stop().items())
        table.add_row(escape(inspect.getdoc(stop) or ""), code, answer)
    console.print(table)


def on(framework: str) -> ModuleType:
    """The stops on a framework, with the modules that they use."""
    stops = import_module(f"elementgrad.cli.stops.on_{framework}")
    for name, module in NEEDS[framework].items():
        setattr(stops, name, _need(module, f"'elementgrad[{framework}]'" if module in NEEDS else module))
    return stops


def source(stop: Callable[..., Any]) -> str:
    """The body of a stop as it runs, without its docstring and return."""
    text = inspect.getsource(stop)
    (function,) = ast.parse(text).body
    body = function.body[1:-1]  # type: ignore[attr-defined]
    return textwrap.dedent("\n".join(text.splitlines()[body[0].lineno - 1 : body[-1].end_lineno]))


def show(value: Any) -> str:
    """A tensor as plain numbers, or a text as it is."""
    if isinstance(value, str):
        return value
    numbers: Any = backends.find(value).floats(value)
    return _written(numbers.tolist()).replace("[", "\\[")


def _written(numbers: Any) -> str:
    if not isinstance(numbers, list):
        return f"{numbers:.4g}"
    between = ",\n   " if numbers and isinstance(numbers[0], list) else ", "
    return f"[{between.join(map(_written, numbers))}]"


def _need(module: str, install: str) -> Any:
    try:
        return import_module(module)
    except ImportError:
        raise FrameworkError(f"the tour needs {module}; pip install {install}") from None
