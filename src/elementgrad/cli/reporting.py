"""`elementgrad report`."""

from typing import Any

import elementgrad as eg
from elementgrad.cli.failures import say
from elementgrad.cli.loading import workplace
from elementgrad.cli.results import destination, show
from elementgrad.cli.subject import Subject


def report(*, of: str | None, wrt: str | None, out: str, title: str | None, json: bool, **given: Any) -> None:
    """Write the page."""
    for text in (of, wrt):
        if text is not None:
            eg.Place.parse(text)
    destination(out, (".html", ".htm"))
    with workplace():
        subject = Subject(**given)
        with subject.precision():
            path = eg.report(out, subject.function, *subject.args, kwargs=subject.kwargs, of=of, wrt=wrt, title=title)
    show(str(path), {"command": "report", "out": str(path)}, json)
    say(f"{path} is written")
