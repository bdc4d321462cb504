"""`elementgrad explain` and `elementgrad check`."""

from dataclasses import asdict
from typing import Any

import elementgrad as eg
from elementgrad import backends
from elementgrad.cli.failures import FINDING, InputError
from elementgrad.cli.loading import workplace
from elementgrad.cli.results import Gradient, plain, show
from elementgrad.cli.subject import Subject, require_places, step


def explain(
    *, of: str | None, wrt: str | None, no_probe: bool, step: bool, json: bool, model: str, **given: Any
) -> int:
    """Print the diagnosis."""
    require_places(of, wrt)
    with workplace():
        if step:
            diagnosis = _of_step(model, of, wrt, given)
        else:
            subject = Subject(model=model, **given)
            with subject.precision():
                diagnosis = eg.explain(
                    subject.function, *subject.args, kwargs=subject.kwargs, of=of, wrt=wrt, probe=not no_probe
                )
        told = {"command": "explain", **_described(diagnosis)}
    show(str(diagnosis), told, json)
    return 0 if diagnosis else FINDING


def check(*, of: str | None, wrt: str | None, json: bool, **given: Any) -> int:
    """Print how derivatives compare with differences."""
    require_places(of, wrt)
    with workplace():
        subject = Subject(**given)
        with subject.precision():
            found = eg.check(subject.function, *subject.args, kwargs=subject.kwargs, of=of, wrt=wrt)
    told = {
        "command": "check",
        "verdict": found.verdict,
        "dtype": found.dtype,
        "entries": [asdict(entry) for entry in found.entries],
        "diagnosis": None if found.diagnosis is None else _described(found.diagnosis),
    }
    show(str(found), told, json)
    return 0 if found else FINDING


def _of_step(model: str, of: str | None, wrt: str | None, given: dict[str, Any]) -> eg.Diagnosis:
    if of is not None or wrt is not None or any(given.values()):
        raise InputError("--step runs a function as it is; leave inputs, --of, --wrt, --framework and --dtype out")
    return eg.explain(step(model))


def _described(diagnosis: eg.Diagnosis) -> dict[str, Any]:
    """A diagnosis as an object of JSON."""
    names = ("verdict", "cause", "sentence", "where", "operation", "module", "path", "evidence", "fix", "of", "wrt")
    told = {name: getattr(diagnosis, name) for name in names}
    value = diagnosis.value
    owner = None if value is None else backends.owner(value)
    return told | {"value": None if owner is None else plain(Gradient.of("", value, owner).values)}
