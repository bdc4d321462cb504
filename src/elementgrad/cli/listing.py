"""`elementgrad names`."""

from dataclasses import asdict
from typing import Any

import elementgrad as eg
from elementgrad.cli.loading import workplace
from elementgrad.cli.results import show
from elementgrad.cli.subject import Subject


def names(*, kind: str | None, json: bool, **given: Any) -> None:
    """Print the table of names."""
    with workplace():
        subject = Subject(**given)
        with subject.precision():
            found = eg.names(subject.function, *subject.args, kwargs=subject.kwargs)
    chosen = type(found)([name for name in found if kind in (None, name.kind)])
    show(repr(chosen), {"command": "names", "names": [asdict(name) for name in chosen]}, json)
