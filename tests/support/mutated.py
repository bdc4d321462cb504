"""A mutation study: causes injected into models at random modules, and what `eg.audit` says about each."""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import elementgrad as eg


@dataclass(frozen=True)
class Mutation:
    """A change of what a module returns that stops gradients, and what is to be said about it."""

    name: str
    apply: Callable[[Any], Any]
    """Takes what the module returns, and returns something else."""
    causes: Sequence[str]
    """The causes that are right; the first is the likeliest."""
    has_line: bool = True
    """False if there is no line to blame, as for what is not used."""
    right: Callable[[Any], Any] | None = None
    """Returns the same with the right derivative, if the mutation has a wrong one."""

    @property
    def lines(self) -> range:
        """The lines of the code that is to blame."""
        code = self.apply.__code__
        return range(code.co_firstlineno, code.co_firstlineno + 12)


@dataclass(frozen=True)
class Outcome:
    """The judgement on one audit of one mutated model."""

    label: str
    right_set: bool
    right_cause: bool
    text: str


def judge(label: str, mutation: Mutation, audit: eg.Audit, truth: set[str]) -> Outcome:
    """Compare an audit with the parameters that have no usable gradient, and with the cause that was injected."""
    waiting = {name for note in audit.notes if note.problem in ("waits", "cannot move") for name in note.parameters}
    found = {name for finding in audit.findings for name in finding.parameters if "[" not in name}
    right_set = truth - waiting <= found <= truth
    if not truth:
        return Outcome(label, right_set, True, str(audit))
    causes = [
        finding
        for finding in audit.findings
        if finding.cause in mutation.causes and (not mutation.has_line or _is_at(finding.where, mutation))
    ]
    return Outcome(label, right_set, bool(causes), str(audit))


def _is_at(where: str | None, mutation: Mutation) -> bool:
    file, _, line = (where or "").rpartition(":")
    return mutation.apply.__code__.co_filename.endswith(file) and line.isdigit() and int(line) in mutation.lines


def score(outcomes: Iterable[Outcome]) -> tuple[float, float, list[Outcome]]:
    """Return the shares of right sets and of right causes with their lines, and the outcomes that miss one."""
    every = list(outcomes)
    missed = [each for each in every if not (each.right_set and each.right_cause)]
    return (
        sum(each.right_set for each in every) / len(every),
        sum(each.right_cause for each in every) / len(every),
        missed,
    )


def study(framework: Any, seeds: Iterable[int], thin: bool) -> Iterator[Outcome]:
    """Audit every model of a framework with every mutation; if `thin`, each mutation in one model only."""
    for seed in seeds:
        for number, mutation in enumerate(framework.MUTATIONS):
            kinds = list(framework.MODELS)
            for kind in kinds[number % len(kinds) :][:1] if thin else kinds:
                yield framework.audited(kind, mutation, seed)


def draw(seed: str, names: Sequence[str]) -> str:
    """Return one of several names, the same each time for the same seed."""
    return random.Random(seed).choice(list(names))
