"""How broken programs are written down: what each is asked, what must be said, and in which line it breaks."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import elementgrad as eg

MARK = "# <- here"


@dataclass(frozen=True)
class Program:
    """A program and what explain must say of it. Its maker gives a function and its arguments, a step, or tensors."""

    name: str
    make: Callable[[], Any]
    verdict: str
    cause: str | None
    options: dict[str, Any] = field(default_factory=dict)
    fix: str = ""
    """A part of what must be said to help."""

    def __str__(self) -> str:
        return f"{self.make.__module__.split('_')[1]}-{self.name}"

    @property
    def where(self) -> str | None:
        """The line that is marked."""
        lines, first = inspect.getsourcelines(self.make)
        marked = [first + number for number, line in enumerate(lines) if MARK in line]
        file = inspect.getsourcefile(self.make).rpartition("/")[2]
        return f"{file}:{marked[0]}" if marked else None

    def explained(self) -> eg.Diagnosis:
        """What explain says."""
        made = self.make()
        if isinstance(made, dict):
            return eg.explain(**made, **self.options)
        return eg.explain(*made if isinstance(made, tuple) else (made,), **self.options)


class Table(list):
    """Programs, collected by a decorator."""

    def says(self, verdict: str, cause: str | None = None, fix: str = "", **options: Any) -> Callable[[Any], Any]:
        """What must be said of the program whose maker follows."""

        def keep(make: Callable[[], Any]) -> Callable[[], Any]:
            self.append(Program(make.__name__, make, verdict, cause, options, fix))
            return make

        return keep
