"""Where a derivative was lost, from the account of a run: no framework, only steps, values and what flows through."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from elementgrad.backends.witness import Account, Pulled, Pushed, Remark, Seen, Step
from elementgrad.explaining.operations import KILLS, SATURATE, SINGULAR

DECISIVE = ("not-tracked", "integer", "freed-graph")
"""Remarks after which nobody need look for a step."""
DOUBTFUL = (None, "masked", "cancelled")
"""What a zero looks like that may be a number too small for its precision."""
ROUNDING = 64.0
"""So many units of rounding count as nothing where sums cancel."""


@dataclass
class Finding:
    """A cause and the step that it is about, as far as the evidence decides."""

    cause: str | None
    step: Step | None = None
    evidence: list[str] = field(default_factory=list)
    others: list[Step] = field(default_factory=list)
    """Further steps at which other paths end."""

    @classmethod
    def of_remark(cls, remark: Remark) -> "Finding":
        """What a backend knew at once."""
        return cls(remark.cause, remark.step, [remark.evidence] if remark.evidence else [])


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


def why_unconnected(trail: Trail, moves: bool | None) -> Finding:
    """Why the framework's derivative has no path. `moves` says whether the target moves with the element, if known."""
    account = trail.account
    for remark in account.remarks:
        if remark.cause in DECISIVE:
            finding = Finding.of_remark(remark)
            finding.step = finding.step or next((step for step in account.steps if account.source in step.takes), None)
            return finding
    cuts = trail.cuts()
    exits = trail.exits()
    if cuts:
        return _cut(cuts, exits if moves else [])
    if trail.joined:
        return Finding(None, None, ["every step that was seen passes derivatives on"])
    decided = [step for step in exits if step.decides]
    if decided and len(decided) == len(exits):
        cuts = trail.cuts(trail.before(decided[0])) or decided[:1]
        return Finding("discrete", cuts[0], ["it only decides which way the code takes"])
    if exits and moves is not False:
        if moves is None and not trail.came_back(exits[0]):
            return Finding(None, exits[0], ["its values left the framework, and whether they came back was not tried"])
        return Finding("left-framework", exits[0], [exits[0].note] if exits[0].note else [], exits[1:])
    if moves:
        return Finding(None, None, ["the value moves with it, though no step was seen that takes it there"])
    closed = trail.closed()
    if closed is not None:
        return closed
    used = [step for step in account.steps if account.source in step.takes]
    if not used:
        return Finding("unused", None, ["no step takes it"])
    evidence = [f"what it goes into, {_spelled(used[0])}, is not used for it"]
    return Finding("unused", None, evidence)


def _cut(cuts: Sequence[Step], exits: Sequence[Step]) -> Finding:
    named = [step for step in cuts if step.stops]
    step = named[0] if named else cuts[0]
    evidence = [step.note] if step.note else []
    others = [other for other in (*cuts, *exits) if other is not step]
    if step.stops is None:
        evidence.append("a connected value goes in and one without derivatives comes out, for no reason that is known")
    return Finding(step.stops, step, evidence, others)


def why_zero(
    trail: Trail,
    pushed: Sequence[Pushed | None] | None,
    pull: Callable[[], Sequence[Pulled | None] | None],
    reaches: float | None,
    elsewhere: bool,
    epsilon: float,
    precise: Callable[[], float | None],
) -> Finding:
    """Why the gradient is zero. `reaches` is the forward derivative of what was asked for, `elsewhere` whether other
    elements of the target have one.

    What takes further runs is asked for only where it decides: what comes back by each step, and the size of the
    gradient in higher precision; either may be unknown.
    """
    steps = trail.account.steps
    if pushed is None:
        return _by_gradient(trail, pull(), precise)
    flows = [(step, flow) for step, flow in zip(steps, pushed, strict=True) if flow is not None and trail.between(step)]
    if reaches is not None and reaches > 0 and not _tiny(reaches, flows, epsilon):
        finding = _by_gradient(trail, pull(), precise)
        finding.evidence.append("forwards the derivative is not zero")
        return finding
    ended = [(step, flow) for step, flow in flows if flow.arrives > 0 and flow.leaves == 0]
    if not ended:
        ended = [(step, flow) for step, flow in flows if 0 < flow.leaves <= ROUNDING * epsilon * flow.arrives]
        if ended:
            step = ended[-1][0]
            return Finding("cancelled", step, ["what remains is rounding"])
        if elsewhere:
            return Finding("unused", None, ["other elements of the output depend on it, those asked for do not"])
        used = [step for step, flow in flows if flow.leaves > 0]
        if used:
            return Finding("unused", used[-1], ["that part of what it gives is not used"])
        return trail.closed() or Finding(None, None, ["no step was seen at which it ends"])
    ended.sort(key=lambda pair: trail.cut(pair[0]))  # a zero comes from a path that is there
    step, flow = ended[0]
    stops = step.stops if trail.cut(step) else None
    return Finding(
        _ended_by(step, flow, stops, precise),
        step,
        [step.note] if stops and step.note else [],
        [s for s, _ in ended[1:]],
    )


def _kills(step: Step) -> str | None:
    return "custom-rule" if step.own else KILLS.get(step.operation)


def _tiny(reaches: float, flows: Sequence[tuple[Step, Pushed]], epsilon: float) -> bool:
    largest = max([flow.leaves for _, flow in flows], default=0.0)
    return reaches <= ROUNDING * epsilon * largest


def _ended_by(step: Step, flow: Pushed, stops: str | None, precise: Callable[[], float | None]) -> str | None:
    cause = flow.cause or stops or _kills(step)
    return "underflow" if cause in DOUBTFUL and step.operation not in SATURATE and precise() else cause


def _by_gradient(trail: Trail, pulled: Sequence[Pulled | None] | None, precise: Callable[[], float | None]) -> Finding:
    """The last step, going backwards, into which a gradient flows and out of which none does."""
    steps = trail.account.steps
    for remark in trail.account.remarks:
        if remark.cause in ("hook", "custom-rule") and pulled is None:
            return Finding.of_remark(remark)
    ended = [
        (step, flow)
        for step, flow in zip(steps, pulled or (), strict=False)
        if flow is not None and trail.between(step) and flow.arrives > 0 and flow.leaves == 0
    ]
    if not ended:
        hooks = [remark for remark in trail.account.remarks if remark.cause == "hook"]
        if hooks:
            return Finding.of_remark(hooks[0])
        return Finding("underflow" if precise() else None, None, [])
    step = ended[-1][0]
    cause = _kills(step)
    return Finding("underflow" if cause in DOUBTFUL and precise() else cause, step)


def why_nonfinite(
    trail: Trail, seen: Sequence[Seen | None] | None, pulled: Sequence[Pulled | None] | None, finite: bool
) -> Finding:
    """Why the gradient is not finite; `finite` says whether the value itself is."""
    steps = trail.account.steps
    if not finite and seen is not None:
        step = _first_bad(trail, seen)
        if step is not None:
            cause = "singular" if step.operation in SINGULAR else "overflow"
            return Finding(cause, step, ["the value itself is not finite from there on"])
        return Finding(None, None, ["the value itself is not finite, and so are numbers that were given"])
    born = [
        (step, flow)
        for step, flow in zip(steps, pulled or (), strict=False)
        if flow is not None and np.isfinite(flow.arrives) and not np.isfinite(flow.leaves)
    ]
    if not born:
        return Finding(None, None, ["no step was seen at which it stops being finite"])
    born.sort(key=lambda pair: pair[0].operation in SINGULAR)  # zero times infinity comes from what made infinity
    step, flow = born[-1]
    if flow.there == 0:
        return Finding(
            "masked-branch", step, ["the gradient that arrives there is zero, and zero times infinity is NaN"]
        )
    cause = "singular" if step.operation in SINGULAR or step.operation not in KILLS else "overflow"
    return Finding(cause, step, [f"a gradient of {flow.arrives:.3g} arrives, and what leaves is {flow.leaves}"])


def _first_bad(trail: Trail, seen: Sequence[Seen | None]) -> Step | None:
    """Back from the target along values that are not finite, to the step that made the first of them."""
    account = trail.account
    wanted = {account.target}
    found = None
    for step, look in reversed(list(zip(account.steps, seen, strict=True))):
        if look is not None and not look.gives and not wanted.isdisjoint(step.gives):
            found = step
            if look.takes:
                return step
            wanted |= set(step.takes)
    return found if found is not None and not found.takes else None


def _spelled(step: Step) -> str:
    return f"{step.operation} at {step.where}" if step.where else step.operation
