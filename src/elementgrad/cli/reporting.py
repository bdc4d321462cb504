"""`elementgrad report`."""

from typing import Any

import elementgrad as eg
from elementgrad.cli.failures import InputError
from elementgrad.cli.loading import workplace
from elementgrad.cli.results import require_writable, show
from elementgrad.cli.subject import Subject, require_places
from elementgrad.plan import budget as bytes_of


def report(
    *,
    model: str,
    of: str | None,
    wrt: list[str] | None,
    out: str,
    title: str | None,
    budget: str | None,
    json: bool,
    **given: Any,
) -> None:
    """Write the page, about a derivative or about a patch."""
    require_places(of, *(wrt or []))
    bytes_of.parse(budget)
    require_writable(out, (".html", ".htm"))
    if model.endswith(".safetensors"):
        if of is not None or wrt is not None or any(given.values()):
            raise InputError(f"{model} is a patch, and a page about one needs nothing else; leave the rest out")
        path = eg.report(out, eg.inspect(model), title=title)
    else:
        with workplace():
            subject = Subject(model=model, **given)
            with subject.precision():
                path = eg.report(
                    out,
                    subject.function,
                    *subject.args,
                    kwargs=subject.kwargs,
                    of=of,
                    wrt=wrt,
                    title=title,
                    budget=budget,
                )
    show(str(path), {"command": "report", "out": str(path)}, json)
