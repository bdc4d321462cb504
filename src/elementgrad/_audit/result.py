"""The answer of an audit: `Audit`, with its groups of parameters (`Finding`)."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from elementgrad._explain.diagnosis import Diagnosis
from elementgrad._html import Tabular, box, grid, never_raise, table

Problem = Literal[
    "no gradient",
    "zero",
    "not finite",
    "dead units",
    "wrong",
    "unused rows",
    "surrogate",
    "waits",
    "cannot move",
    "tiny",
    "huge",
    "remark",
]
COLOURS = {True: "#1a7f37", False: "#cf222e"}


@dataclass(frozen=True)
class Finding:
    """Parameters that share one problem and one cause."""

    __module__ = "elementgrad"

    problem: Problem
    """The problem: `no gradient`, `zero`, `not finite`, `dead units` or `wrong` for findings; `unused rows`,
    `surrogate`, `waits`, `cannot move`, `tiny`, `huge`, `dead units` or `remark` for notes."""
    parameters: tuple[str, ...]
    """Names of parameters; with an index where only some of their rows or channels are concerned."""
    cause: str | None = None
    """The name of the cause, as in `Diagnosis.cause`; None if what was seen does not decide."""
    where: str | None = None
    """The user's line, `model.py:42`."""
    operation: str | None = None
    module: str = ""
    """The module or layer in which the operation ran."""
    reason: str = ""
    """The cause in words."""
    fix: str = ""
    evidence: tuple[str, ...] = ()
    diagnosis: Diagnosis | None = None
    """The diagnosis of `eg.explain` for one of the parameters."""

    def __str__(self) -> str:
        if self.problem == "remark":
            return f"{self.reason}."
        count = len(self.parameters)
        some = f"{count} parameter{'s' if count != 1 else ''}, " if count else ""
        place = ", ".join(
            [part for part in (self.where, f"in {self.module}" if self.module else None) if part is not None]
        )
        text = f"{some}{self.problem}: {self.reason or 'what was seen does not decide why'}"
        text += f" ({place})" if place else ""
        return text + (f". Fix: {self.fix}" if self.fix else "") + "."


@dataclass(frozen=True)
class Audit(Tabular):
    """The parameters of a model that learn, and why others do not, by `eg.audit`. It is true if all do."""

    __module__ = "elementgrad"

    findings: tuple[Finding, ...]
    """Parameters that do not learn: one group for each cause."""
    notes: tuple[Finding, ...]
    """Remarks on what is not a fault: unused rows of embeddings, biases that nothing can move, ..."""
    frozen: tuple[str, ...]
    """Parameters that are meant not to train."""
    excepted: tuple[str, ...]
    """Parameters that `except_` names; nothing is found about them."""
    parameters: tuple[str, ...]
    """All parameters that were looked at: those that train and are not excepted."""

    @property
    def ok(self) -> bool:
        """True if there are no findings."""
        return not self.findings

    def __bool__(self) -> bool:
        return self.ok

    def to_json(self) -> str:
        """Return the audit as JSON text.

        >>> import json, torch, elementgrad as eg
        >>> model = torch.nn.Linear(2, 1)
        >>> audit = eg.audit(model, lambda model: model(torch.ones(1, 2)).sum())
        >>> json.loads(audit.to_json())["ok"]
        True
        """
        fields: dict[str, Any] = {"ok": self.ok}
        fields |= {name: list(map(_to_dict, getattr(self, name))) for name in ("findings", "notes")}
        fields |= {name: list(getattr(self, name)) for name in ("frozen", "excepted", "parameters")}
        return json.dumps(fields, indent=1)

    @property
    def sentence(self) -> str:
        """The result in one sentence."""
        names = {name for each in self.findings for name in each.parameters}
        total = len(self.parameters)
        if self.ok:
            head = f"all {total} parameters learn" if total > 1 else "the parameter learns"
        else:
            count = len(self.findings)
            head = f"{count} finding{'s' if count > 1 else ''} about {len(names)} of {total} parameters"
        more = [("note", len(self.notes)), ("frozen", len(self.frozen)), ("excepted", len(self.excepted))]
        counts = [f"{n} {word}{'s' if word == 'note' and n > 1 else ''}" for word, n in more if n]
        return head + (f" ({', '.join(counts)})" if counts else "") + "."

    def _rows(self) -> list[Sequence[str]]:
        rows: list[Sequence[str]] = [("", "parameter", "gradient", "cause", "where")]
        for number, each in enumerate(self.findings, 1):
            where = each.where or (f"in {each.module}" if each.module else "-")
            rows += [(str(number), name, each.problem, each.cause or "?", where) for name in each.parameters]
        return rows

    def __str__(self) -> str:
        lines = [self.sentence]
        if self.findings:
            lines += ["", table(self._rows()), ""]
            lines += [f"{number}: {each}" for number, each in enumerate(self.findings, 1)]
        lines += [f"note: {_parameters_text(each)}{each}" for each in self.notes]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return str(self)

    @never_raise
    def _repr_html_(self) -> str:
        texts = [f"{number}: {each}" for number, each in enumerate(self.findings, 1)]
        texts += [f"note: {_parameters_text(each)}{each}" for each in self.notes]
        return box(self.sentence, texts, COLOURS[self.ok]) + (grid(self._rows()) if self.findings else "")


def _to_dict(finding: Finding) -> dict[str, Any]:
    """Return the fields of a finding as plain values."""
    names = ("problem", "cause", "where", "operation", "module", "reason", "fix")
    fields = {name: getattr(finding, name) for name in names}
    return fields | {"parameters": list(finding.parameters), "evidence": list(finding.evidence)}


def _parameters_text(note: Finding) -> str:
    """Return the first parameters of a note, of which a table would be too long."""
    names = ", ".join(note.parameters[:3])
    rest = len(note.parameters) - 3
    return f"{names}{f' and {rest} more' if rest > 0 else ''}; " if names else ""
