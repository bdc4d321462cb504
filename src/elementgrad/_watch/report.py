"""`WatchReport`: all that is known of the first bad number of a run, in words and in fields."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from elementgrad._explain.causes import Cause
from elementgrad._explain.diagnosis import Diagnosis
from elementgrad.errors import WatchError

WORDS: Mapping[str, Cause] = {
    "bad-input": Cause(
        "{place} is {value} before the model runs", "look at this batch: where it is read, divided or normalised"
    ),
    "bad-parameter": Cause(
        "{place} is {value} before the model runs",
        "look at what wrote to it since the last step: an initialisation, a checkpoint or an assignment",
    ),
    "update": Cause(
        "the optimizer's update made {place} {value}, from a finite gradient",
        "look at its state of that element: lower the learning rate, raise eps, or clip the gradient",
    ),
    "outside": Cause(
        "it is outside the model, after {place}",
        "look at the loss, or give it as eg.watch(..., loss=fn), so that it is followed too",
    ),
    "masked-row": Cause(
        "{operation} gets a row in which everything is masked by -inf, and makes {value} of it",
        "leave one element of each row unmasked, or mask with a large negative number that is finite",
    ),
    "rule": Cause("the rule for {place} is true", "look at what goes into it; clip the gradient if it is meant to be"),
    "unseen": Cause(
        "no run of the model shows where it comes from",
        "look at parts of the step that are not in the model's forward, or that depend on more than its arguments",
    ),
}
"""The words for causes that only a run has; those inside of the model are eg.explain's."""


@dataclass(frozen=True)
class WatchReport:
    """The first bad number of a run. `WatchError` has the same fields."""

    tripped: str
    """The check that stopped the run: `output[0, 3] is nan`."""
    cause: str | None = None
    place: str | None = None
    """The earliest bad element, `a.weight[3, 7]`. A value inside of the model has the name of its module, or else of
    the operation that made it."""
    value: float | None = None
    where: str | None = None
    module: str = ""
    operation: str | None = None
    clause: str | None = None
    evidence: Sequence[str] = ()
    fix: str | None = None
    step: int = 0
    micro_batch: int = 0
    state: Mapping[str, float] = field(default_factory=dict)
    """The optimizer's state of the element, if the update made it."""
    capture: str | None = None
    rank: int | None = None
    in_gradient: bool = False
    """True if the value is a gradient."""

    @classmethod
    def of_cause(cls, tripped: str, cause: str, place: str | None, value: float | None, **more: Any) -> "WatchReport":
        """Return the report for one of the causes in `WORDS`."""
        words = WORDS[cause]
        texts = {"place": place or "its input", "value": number_text(value), "operation": more.get("operation")}
        return cls(tripped, cause, place, value, clause=words.clause.format(**texts), fix=words.fix_in(""), **more)

    @classmethod
    def of_diagnosis(cls, tripped: str, diagnosis: Diagnosis, place: str, value: float, **more: Any) -> "WatchReport":
        """Return the report for a diagnosis by `eg.explain`."""
        return cls(
            tripped,
            diagnosis.cause,
            place,
            value,
            diagnosis.where,
            diagnosis.module,
            diagnosis.operation,
            diagnosis.clause,
            tuple(diagnosis.evidence),
            diagnosis.fix,
            **more,
        )

    def to_json(self) -> dict[str, Any]:
        content = asdict(self)
        content["value"] = None if self.value is None else number_text(self.value)
        content["state"] = {key: number_text(value) for key, value in self.state.items()}
        return content

    @classmethod
    def from_json(cls, content: Any) -> "WatchReport":
        """Return the report that a file describes; fields of another type raise a ValueError or TypeError."""
        known = {each.name for each in fields(cls)}
        values = {str(key): value for key, value in dict(content).items() if key in known}
        values["value"] = None if values.get("value") is None else float(values["value"])
        values["state"] = {str(key): float(value) for key, value in dict(values.get("state", {})).items()}
        values["evidence"] = tuple(map(str, values.get("evidence", ())))
        return cls(**values)

    def error(self) -> WatchError:
        error = WatchError(str(self))
        for each in fields(self):
            setattr(error, each.name, getattr(self, each.name))
        return error

    def __str__(self) -> str:
        batch = f", micro-batch {self.micro_batch}" if self.micro_batch else ""
        rank = f", rank {self.rank}" if self.rank is not None else ""
        first = f"step {self.step}{batch}{rank}: {self.tripped}"
        lines = [f"{first}; {self.clause}." if self.clause else f"{first}."]
        site = [
            self.where,
            f"in {self.module}" if self.module else "",
            f"at {self.operation}" if self.operation else "",
        ]
        if self.place is not None and self.cause not in ("bad-input", "bad-parameter", "rule", "outside", "unseen"):
            what = "the gradient of " if self.in_gradient else ""
            lines.append(f"first: {what}{self.place} is {number_text(self.value)}")
        if any(site):
            lines.append(f"where: {', '.join([part for part in site if part])}")
        if self.state:
            lines.append("state: " + ", ".join([f"{key} {number_text(value)}" for key, value in self.state.items()]))
        lines += [f"seen: {fact}" for fact in self.evidence[:3]]
        lines += [f"fix: {self.fix}"] if self.fix else []
        lines += [f"capture: {self.capture}"] if self.capture else []
        return "\n".join(lines)


def number_text(value: float | None) -> str:
    return "not finite" if value is None else repr(float(value))
