"""Why a gradient is zero though there is a path: the steps at which what could move meets a gradient, and none passes.

Forwards go the elements that can move with those asked for, whatever the numbers are; backwards goes the gradient of
what was asked for. A step that gives elements where both meet, and takes none, is where the derivative was lost.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from elementgrad.backends.witness import Met, Pulled, Pushed, Step
from elementgrad.explaining.following import FLAT, cut_by, decision, left, spelled
from elementgrad.explaining.operations import BANDS, KILLS, MATRICES, NORMALISE, SATURATE, SELECT, SUMMANDS
from elementgrad.explaining.trail import Finding, Trail

DOUBTFUL = (None, "masked", "cancelled")
"""What a zero looks like that may be a number too small for its precision."""
APART = ("unused", "row-not-used")
"""Causes that say that the value has nothing to do with the elements."""
SELECTS = (*APART, "not-selected")
"""Causes that only say that other elements are taken, which is no news where another path ends too."""
FOLLOWS = ("stationary", "masked", "kink")
"""Causes that may only follow from a zero that was made before: its square is flat, and so is what it multiplies."""
ROUNDING = 64.0
"""So many units of rounding count as nothing where sums cancel."""
Flows = Sequence[tuple[Step, Pushed]]


@dataclass(frozen=True)
class Asked:
    """What takes further runs, and is asked for only where it decides; each may be unknown."""

    pull: Callable[[], Sequence[Pulled | None] | None] = lambda: None
    """What comes back by each step."""
    precise: Callable[[], float | None] = lambda: None
    """The size of the gradient in higher precision."""
    moves: Callable[[], bool | None] = lambda: None
    """Whether the target moves with the elements."""
    meet: Callable[[], Met | None] = lambda: None
    """Where what can move meets a gradient."""
    rounding: bool = False
    """Whether a gradient arrives that is mere rounding."""


def why_zero(
    trail: Trail,
    pushed: Sequence[Pushed | None] | None,
    reaches: float | None,
    elsewhere: bool,
    epsilon: float,
    asked: Asked,
) -> Finding:
    """Why the gradient is zero. `reaches` is the forward derivative of what was asked for, `elsewhere` whether other
    elements of the target have one.
    """
    if pushed is None:
        return _checked(trail, _by_gradient(trail, asked.pull(), asked.precise), asked, None)
    steps = trail.account.steps
    flows = [(step, flow) for step, flow in zip(steps, pushed, strict=True) if flow is not None and trail.between(step)]
    leaky = any(step.stops == "no-grad" for step in trail.cuts())  # forward derivatives pass there
    if reaches is not None and reaches > 0 and not leaky and not _tiny(reaches, flows, epsilon):
        finding = _by_gradient(trail, asked.pull(), asked.precise)
        finding.evidence.append("forwards the derivative is not zero")
        if finding.cause == "row-not-used" and finding.step is not None:  # it is looked up, and gets no gradient
            finding.step = replace(finding.step, operation="padding_idx")
        return finding
    return _Zero(trail, flows, elsewhere, epsilon, asked).finding()


class _Zero:
    """A derivative that was followed forwards, and does not arrive."""

    def __init__(self, trail: Trail, flows: Flows, elsewhere: bool, epsilon: float, asked: Asked):
        self._trail = trail
        self._flows = flows
        self._elsewhere = elsewhere
        self._epsilon = epsilon
        self._asked = asked
        self._met = asked.meet()
        self._flow = {id(step): flow for step, flow in flows}

    def finding(self) -> Finding:
        ended = [step for step, flow in self._flows if flow.arrives > 0 and flow.leaves == 0]
        lost = self._lost()
        both = [step for step in ended if any(step is other for other in lost)]
        whole = self._chosen(ended) if ended else None
        some = self._asked.rounding or not ended
        rounded = [step for step, flow in self._flows if self._is_rounding(flow)] if some else []
        if both:
            return self._ended(self._chosen(both), ended)
        if whole is not None and not self._trail.cut(whole) and self._cause(whole) not in (None, *SELECTS, *FOLLOWS):
            return self._ended(whole, ended)  # nothing is left of it, and the step says why
        if rounded and (not lost or KILLS.get(rounded[-1].operation) == "cancelled"):
            return Finding("cancelled", rounded[-1], ["what remains is rounding"], ended)
        if lost and not (whole is not None and self._made_before(whole, self._chosen(lost))):
            return self._ended(self._chosen(lost), lost)
        if whole is not None:
            return self._ended(whole, ended)
        bands = [step for step, flow in self._flows if flow.leaves > 0 and step.operation in BANDS]
        if bands:
            return Finding("masked", bands[-1], ["other elements of what it gives depend on it"])
        if self._elsewhere:
            finding = Finding("unused", None, ["other elements of the output depend on it, those asked for do not"])
            return _checked(self._trail, finding, self._asked, self._met)
        used = [step for step, flow in self._flows if flow.leaves > 0]
        if used:
            finding = Finding("unused", used[-1], ["that part of what it gives is not used"])
            return _checked(self._trail, finding, self._asked, self._met)
        return self._trail.closed() or Finding(None, None, ["no step was seen at which it ends"])

    def _lost(self) -> list[Step]:
        """The steps that give what could move and has a gradient, and take nothing of the kind."""
        met = self._met
        if met is None or self._trail.account.source in met.alive:
            return []
        lost = [
            step
            for step in self._trail.account.steps
            if not met.alive.isdisjoint(step.gives) and met.alive.isdisjoint(step.takes)
        ]
        return [self._masking(step) or step for step in lost if not met.touched.isdisjoint(step.takes)]

    def _masking(self, step: Step) -> Step | None:
        """A softmax is flat where a mask has put its smallest number: the mask is meant."""
        if step.operation not in NORMALISE:
            return None
        makers = [other for other in self._trail.account.steps if not set(other.gives).isdisjoint(step.takes)]
        return next((other for other in makers if other.operation in SELECT), None)

    def _made_before(self, step: Step, lost: Step) -> bool:
        """Whether a zero that a step made may be why another loses the gradient."""
        told = not self._trail.cut(step) and self._cause(step) not in (*APART, "kink")  # a kink is not flat
        return told and self._cause(lost) in FOLLOWS and not self._trail.before(lost).isdisjoint(step.gives)

    def _is_rounding(self, flow: Pushed) -> bool:
        return 0 < flow.leaves <= ROUNDING * self._epsilon * flow.arrives

    def _chosen(self, ended: Sequence[Step]) -> Step:
        """Of several steps one that tells most: where a derivative is lost, and not where other elements are taken."""
        rank = {id(step): (self._trail.cut(step), self._cause(step) in SELECTS) for step in ended}
        best = min(rank.values())
        return self._trail.last_of([step for step in ended if rank[id(step)] == best])

    def _cause(self, step: Step) -> str | None:
        flow = self._flow.get(id(step))
        stops = step.stops if self._trail.cut(step) else None
        known = flow.cause if flow is not None else None
        cause = known or stops or _kills(step)
        if known is None and cause == "masked" and self._squares(step):
            return "stationary"
        return "masked" if known is None and cause == "cancelled" and step.operation in MATRICES else cause

    def _squares(self, step: Step) -> bool:
        """Whether a step multiplies what comes from a kink by another number that moves: at a kink no slope is seen."""
        if self._met is None or step.operation in (*SELECT, *BANDS):
            return False
        moving = self._met.touched & set(self._trail.account.connected)
        kinks = [
            other for other, flow in self._flows if flow.arrives > 0 and flow.leaves == 0 and _kills(other) == "kink"
        ]
        behind = self._trail.before(step)
        return set(step.takes) <= moving and any(not behind.isdisjoint(kink.gives) for kink in kinks)

    def _ended(self, step: Step, ended: Sequence[Step]) -> Finding:
        cause = self._cause(step)
        if cause == "masked" and step.operation in NORMALISE:
            seen = f"it is so low that {step.operation} gives it no weight"
            return Finding("masked", self._lowering(step) or step, [seen])
        if cause in (*SELECTS, "masked") or self._only_by_cut(step):
            finding = self._by_cut(step)
            if finding is not None:
                return finding
        if cause in DOUBTFUL and step.operation not in SATURATE:
            scale = max([flow.leaves for _, flow in self._flows], default=0.0)
            cause = "underflow" if _is_left(self._asked.precise(), cause, scale) else cause
        stops = step.stops if self._trail.cut(step) else None
        evidence = [step.note] if step.note and (stops or not step.stops) else []
        finding = Finding(cause, step, evidence, [other for other in ended if other is not step])
        return _checked(self._trail, finding, self._asked, self._met) if cause in APART else finding

    def _lowering(self, step: Step) -> Step | None:
        """The step that adds a mask to what a softmax takes."""
        makers = [other for other in self._trail.account.steps if not set(other.gives).isdisjoint(step.takes)]
        connected = self._trail.account.connected
        added = [other for other in makers if other.operation in SUMMANDS and not set(other.takes) <= set(connected)]
        return added[-1] if added else None

    def _only_by_cut(self, step: Step) -> bool:
        """Whether all that can move comes to a step by ways that are cut."""
        touched = () if self._met is None else self._met.touched
        return not any(value in touched and value in self._trail.account.connected for value in step.takes)

    def _by_cut(self, step: Step) -> Finding | None:
        """A step that takes other elements, or masks them, is no news where the value moves by a way that is cut."""
        cuts = [other for other in _touched_cuts(self._trail, self._met) if other.stops not in FLAT]
        if self._only_by_cut(step):
            before = self._trail.before(step)
            cuts = [cut for cut in _touched_cuts(self._trail, self._met) if not before.isdisjoint(cut.gives)]
            return cut_by(cuts, []) if cuts else None
        if not cuts:
            return None
        moved = self._asked.moves()
        if moved is None:
            return Finding(None, None, [f"it ends in {spelled(other)}" for other in (step, *cuts)])
        return cut_by(cuts, []) if moved else None


def _touched_cuts(trail: Trail, met: Met | None) -> list[Step]:
    """The cuts to which the elements come."""
    return [cut for cut in trail.cuts() if met is None or not met.touched.isdisjoint(cut.takes)]


def _checked(trail: Trail, finding: Finding, asked: Asked, met: Met | None) -> Finding:
    """That the value has nothing to do with the elements is said only if it does not move with them."""
    if finding.cause not in APART:
        return finding
    moved = asked.moves()
    cuts = _touched_cuts(trail, met)
    exits = [step for step in trail.exits() if met is None or not met.touched.isdisjoint(step.takes)]
    if moved is None and (cuts or exits):
        ends = [step for step in (finding.step, *cuts, *exits) if step is not None]
        return Finding(None, None, [f"it ends in {spelled(step)}" for step in ends])
    if not moved:
        return finding
    step = finding.step
    if step is not None and cuts and all(_is_mask_of(cut, step) for cut in cuts):
        return Finding("masked", step, ["a mask takes other elements"])
    if cuts:
        return cut_by(cuts, exits)
    decided = decision(trail, exits)
    if decided is not None:
        return Finding("discrete", decided, ["it only decides which way the code takes"])
    if exits:
        return left([step for step in exits if not step.decides])
    return Finding(
        None, None, [*finding.evidence, "the value moves with it, though no step was seen that takes it there"]
    )


def _meeting(trail: Trail, pulled: Sequence[Pulled | None]) -> Step | None:
    """The first step to which all those lead that bring a gradient to the source, if they are several."""
    account = trail.account
    firsts = [
        step
        for step, flow in zip(account.steps, pulled, strict=False)
        if flow is not None and account.source in step.takes and trail.between(step) and 0 < flow.leaves < float("inf")
    ]
    for step in account.steps if len(firsts) > 1 else ():
        if not trail.between(step):
            continue
        before = trail.before(step)
        if all(first is step or not before.isdisjoint(first.gives) for first in firsts):
            return step
    return None


def _is_left(precise: float | None, cause: str | None, scale: float) -> bool:
    """Whether a gradient is there in float64; of a sum that cancels there may be the rounding of its parts."""
    least = ROUNDING * sys.float_info.epsilon * scale if cause == "cancelled" else 0.0
    return precise is not None and precise > least


def _is_mask_of(cut: Step, step: Step) -> bool:
    """Whether a step takes elements by truths that another gives."""
    return cut.stops == "discrete" and cut.note.startswith("bool") and not set(cut.gives).isdisjoint(step.takes)


def _kills(step: Step) -> str | None:
    return "custom-rule" if step.own else KILLS.get(step.operation)


def _tiny(reaches: float, flows: Flows, epsilon: float) -> bool:
    largest = max([flow.leaves for _, flow in flows], default=0.0)
    return reaches <= ROUNDING * epsilon * largest


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
        hooks = [remark for remark in trail.account.remarks if remark.cause in ("hook", "out-of-range")]
        if hooks:
            return Finding.of_remark(hooks[0])
        meeting = _meeting(trail, pulled or ())
        if meeting is not None:
            return Finding("cancelled", meeting, ["gradients come back by several ways, and add up to zero"])
        return Finding("underflow" if precise() else None, None, [])
    step = ended[-1][0]
    for remark in trail.account.remarks:
        if remark.cause == "out-of-range" and remark.step is step:
            return Finding.of_remark(remark)
    cause = _kills(step)
    left = cause in DOUBTFUL and _is_left(precise(), cause, 1.0)
    return Finding("underflow" if left else cause, step)
