"""The way of data through a run, from source to target, and what is found on it."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from elementgrad.backends.witness import STATISTIC, Account, Remark, Step


@dataclass
class Finding:
    """A cause and the step that it is about, as far as the evidence decides."""

    cause: str | None
    step: Step | None = None
    evidence: list[str] = field(default_factory=list)
    others: list[Step] = field(default_factory=list)
    """Further steps at which other paths end."""
    variant: str | None = None
    """What tells more of the cause than the operation does, if something does."""

    @classmethod
    def of_remark(cls, remark: Remark) -> "Finding":
        """What a backend knew at once."""
        evidence = [remark.evidence] if remark.evidence else []
        if remark.step is not None and remark.step.operation == STATISTIC:
            return cls(remark.cause, None, evidence, variant=STATISTIC)
        return cls(remark.cause, remark.step, evidence)


class Trail:
    """The steps of an account that lie between source and target, by their data."""

    def __init__(self, account: Account):
        self.account = account
        self.reached = {account.source}
        """Values computed from the source."""
        for step in account.steps:
            if not self.reached.isdisjoint(step.takes):
                self.reached.update(step.gives)
        self.leading = {account.target}
        """Values that the target is computed from."""
        for step in reversed(account.steps):
            if not self.leading.isdisjoint(step.gives):
                self.leading.update(step.takes)

    @property
    def joined(self) -> bool:
        """Whether the target was computed from the source, however."""
        return self.account.target in self.reached

    def between(self, step: Step) -> bool:
        """Whether data passes the step on its way from source to target."""
        return not self.reached.isdisjoint(step.takes) and any(
            value in self.reached and value in self.leading for value in step.gives
        )

    def cut(self, step: Step) -> bool:
        """Whether nothing that a step gives is connected."""
        return not any(value in self.account.connected for value in step.gives)

    def cuts(self, until: Collection[int] | None = None) -> list[Step]:
        """The steps at which paths end: they take what is connected and give what is not, and is needed."""
        connected = self.account.connected
        needed = self.leading if until is None else until
        return [
            step
            for step in self.account.steps
            if any(value in connected for value in step.takes)
            and any(value in needed and value in self.reached and value not in connected for value in step.gives)
        ]

    def exits(self) -> list[Step]:
        """The steps by which what was computed from the source left the framework."""
        return [
            step
            for step in self.account.steps
            if step.stops == "left-framework" and not self.reached.isdisjoint(step.takes)
        ]

    def came_back(self, exit: Step) -> bool:
        """Whether the target is computed from plain numbers that became a tensor after others had left."""
        later = self.account.steps[_index(self.account.steps, exit) :]
        return any(step.enters and not self.leading.isdisjoint(step.gives) for step in later)

    def before(self, step: Step) -> set[int]:
        """The values that a step was computed from, those it takes included."""
        found = set(step.takes)
        steps = list(self.account.steps)
        for earlier in reversed(steps[: steps.index(step)]):
            if not found.isdisjoint(earlier.gives):
                found.update(earlier.takes)
        return found

    def last_of(self, ended: Sequence[Step]) -> Step:
        """Of several steps that let nothing through the one to which all others lead; if there is none, the first."""
        behind = self.before(ended[-1])
        return ended[-1] if all(not behind.isdisjoint(step.gives) for step in ended[:-1]) else ended[0]

    def closed(self) -> Finding | None:
        """That something takes the source which cannot be looked into, if it does."""
        for step in self.account.steps:
            if step.closed and not self.reached.isdisjoint(step.takes):
                return Finding(None, step, [f"{step.operation} takes it, and cannot be looked into"])
        return None

    def line(self, broken: Step | None = None) -> list[str]:
        """One way from source to target in operations, through a break if there is one."""
        if broken is None or not any(step is broken for step in self.account.steps):
            way = self._behind(self.account.target) if self.joined else []
        else:
            way = [*self._behind(*[value for value in broken.takes if value in self.reached][:1]), broken]
            way += self._ahead(broken)
        return [
            f"{step.operation} (broken here)" if step is broken else step.operation
            for step in way
            if not step.quiet or step is broken
        ]

    def _behind(self, *values: int) -> list[Step]:
        """The steps of one way from the source to a value."""
        made = {value: step for step in self.account.steps for value in step.gives}
        way: list[Step] = []
        ahead = list(values)
        while ahead and ahead[0] in made and ahead[0] != self.account.source:
            step = made[ahead[0]]
            way.append(step)
            ahead = [value for value in step.takes if value in self.reached]
        return way[::-1]

    def _ahead(self, step: Step) -> list[Step]:
        """The steps of one way from a step to the target; none if there is no way."""
        way: list[Step] = []
        here = step
        for other in list(self.account.steps)[_index(self.account.steps, step) + 1 :]:
            if not set(here.gives).isdisjoint(other.takes) and not self.leading.isdisjoint(other.gives):
                way.append(other)
                here = other
        return way


def _index(steps: Sequence[Step], step: Step) -> int:
    return next(number for number, other in enumerate(steps) if other is step)
