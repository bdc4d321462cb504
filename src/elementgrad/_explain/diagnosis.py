"""`Diagnosis`, the result of `eg.explain`: a verdict, its cause, the line, and the fix."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from elementgrad._explain.blame import describe
from elementgrad._explain.causes import words_for
from elementgrad._explain.path import CauseFinding, DataPath
from elementgrad._explain.trace import Verdict
from elementgrad._html import box, never_raise

Tensor = Any
SENTENCES: dict[str, str] = {
    "flows": "{of} has a gradient with respect to {wrt}",
    "unconnected": "{of} has no gradient with respect to {wrt}",
    "zero": "the gradient of {of} with respect to {wrt} is zero",
    "nonfinite": "the gradient of {of} with respect to {wrt} is not finite",
    "mismatch": "the gradient of {of} with respect to {wrt} is not what its values say",
}
COLOURS = {
    "flows": "#1a7f37",
    "unconnected": "#cf222e",
    "zero": "#9a6700",
    "nonfinite": "#cf222e",
    "mismatch": "#8250df",
}


@dataclass(frozen=True)
class Diagnosis:
    """The explanation of a gradient, by `eg.explain`. `print` it; it is true if nothing is wrong.

    >>> import torch, elementgrad as eg
    >>> diagnosis = eg.explain(lambda x: x.detach().sum(), torch.ones(2), wrt="x[0]")
    >>> diagnosis.verdict, diagnosis.cause, diagnosis.operation
    ('unconnected', 'detached', 'detach')
    """

    __module__ = "elementgrad"

    verdict: Verdict
    cause: str | None = None
    """One of the names in the documentation; None if the evidence does not decide, or if nothing is wrong."""
    where: str | None = None
    """The user's line, `model.py:42`."""
    operation: str | None = None
    module: str = ""
    """The path of the module or layer in which it happens."""
    path: Sequence[str] = ()
    """Operations on one way from the source to the target, with the break marked."""
    evidence: Sequence[str] = ()
    fix: str | None = None
    value: Tensor | None = None
    """The gradient, if there is one."""
    of: str = "output"
    wrt: str = "the input"
    variant: str | None = field(default=None, repr=False)
    """Chooses the words for the cause in place of the operation, if it is set."""

    @classmethod
    def made(
        cls,
        verdict: Verdict,
        finding: CauseFinding,
        trail: DataPath | None,
        framework: str,
        of: str,
        wrt: str,
        **more: Any,
    ) -> "Diagnosis":
        """Put a finding into words.

        Args:
            verdict: What is the matter with the gradient.
            finding: The cause and the operation to blame.
            trail: The run, if it could be followed.
            framework: Chooses the fix.
            of: The name of what is differentiated.
            wrt: The name of what it is differentiated by.
            **more: Further fields, such as `value`.

        Returns:
            The diagnosis, with line, path, evidence and fix.
        """
        op, cause = finding.op, finding.cause
        operation = op.operation if op is not None else None
        words = {"operation": operation or "a step", "of": of, "wrt": wrt}
        evidence = [*finding.evidence, *[f"another path ends in {describe(other)}" for other in finding.others]]
        return cls(
            verdict,
            cause,
            op.where if op is not None else None,
            operation,
            op.module if op is not None else "",
            tuple(trail.operations(op)) if trail is not None else (),
            tuple(dict.fromkeys(evidence)),
            words_for(cause, finding.variant or operation).fix_in(framework).format(**words),
            of=of,
            wrt=wrt,
            variant=finding.variant,
            **more,
        )

    @property
    def clause(self) -> str | None:
        """The clause that says what is wrong."""
        if self.fix is None:
            return None
        clause = words_for(self.cause, self.variant or self.operation).clause
        return clause.format(operation=self.operation or "a step", of=self.of, wrt=self.wrt)

    @property
    def reason(self) -> tuple[str, str] | None:
        """The clause with its line, and the fix, for an error message that goes on from there."""
        if self.clause is None or self.fix is None:
            return None
        location = ", in ".join([part for part in (self.where, self.module) if part])
        return self.clause + (f" ({location})" if location else ""), self.fix

    @property
    def sentence(self) -> str:
        """The verdict in one sentence."""
        verdict = SENTENCES[self.verdict].format(of=self.of, wrt=self.wrt)
        return f"{verdict}." if self.clause is None else f"{verdict}: {self.clause}."

    @property
    def place(self) -> str | None:
        """Line, module and operation in a few words."""
        parts = [
            self.where,
            f"in {self.module}" if self.module else None,
            f"at {self.operation}" if self.operation else None,
        ]
        return ", ".join([part for part in parts if part]) or None

    def __bool__(self) -> bool:
        """Return True if nothing is wrong."""
        return self.verdict == "flows" and self.cause is None

    def __str__(self) -> str:
        lines = [self.sentence]
        if self.fix is not None and self.place is not None:
            lines.append(f"where: {self.place}")
        if self.cause is None:
            lines += [f"evidence: {fact}" for fact in self.evidence]
        if self.fix is not None:
            lines.append(f"fix: {self.fix}")
        return "\n".join(lines)

    @never_raise
    def _repr_html_(self) -> str:
        head, *rest = str(self).split("\n")
        return box(head, rest, COLOURS[self.verdict])
