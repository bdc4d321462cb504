"""Where a derivative was lost, from the account of a run: no framework, only steps, values and what flows through.

Why a gradient is zero though there is a path: the steps at which what could move meets a gradient, and none passes.

Forwards go the elements that can move with those asked for, whatever the numbers are; backwards goes the gradient of
what was asked for. A step that gives elements where both meet, and takes none, is where the derivative was lost.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

import numpy as np

from elementgrad._explain.causes import (
    BANDS,
    ELSEWHERE,
    GROWS,
    KILLS,
    MATRICES,
    NORMALISE,
    QUOTIENTS,
    SATURATE,
    SELECT,
    SINGULAR,
    SUMMANDS,
)
from elementgrad._explain.path import CauseFinding, DataPath
from elementgrad._explain.trace import CotangentSizes, FiniteFlags, Op, ReachOverlap, TangentSizes

DECISIVE = ("not-tracked", "integer", "freed-graph")
"""Remarks after which nobody need look for a step."""
MASKS = frozenset("masked unused not-selected overwritten dropped clamped dead-relu row-not-used step-function".split())  # noqa: SIM905
"""What takes elements out of a value, so that no gradient comes back to them."""
FLAT = ("discrete", "step-function")
"""Ends of a path at which no slope is lost, since there is none."""


def why_unconnected(trail: DataPath, moves: bool | None) -> CauseFinding:
    """Why the framework's derivative has no path. `moves` says whether the target moves with the element, if known."""
    account = trail.graph
    for remark in account.hints:
        if remark.cause in DECISIVE or (remark.cause == "no-rule" and not account.ops):
            finding = CauseFinding.of_remark(remark)
            finding.step = finding.step or next((step for step in account.ops if account.source in step.inputs), None)
            return finding
    cuts = trail.cuts()
    exits = trail.exits()
    if cuts:
        return cut_by(cuts, exits if moves else [])
    if trail.joined:
        return _own(trail) or CauseFinding(None, None, ["every step that was seen passes derivatives on"])
    decided = decision(trail, exits)
    if decided is not None:
        if moves:
            return CauseFinding("discrete", decided, ["it only decides which way the code takes"])
        evidence = [f"it only decides which way the code takes, in {spelled(decided)}"]
        if moves is None:
            return CauseFinding(None, decided, [*evidence, "whether the value moves with it was not tried"])
        return CauseFinding("unused", None, [*evidence, "the value did not move with it"])
    if exits and moves is not False:
        if moves is None and not trail.came_back(exits[0]):
            return CauseFinding(
                None, exits[0], ["its values left the framework, and whether they came back was not tried"]
            )
        return left([step for step in exits if not step.branches])
    if moves:
        return CauseFinding(None, None, ["the value moves with it, though no step was seen that takes it there"])
    closed = trail.closed()
    if closed is not None:
        return closed
    used = [step for step in account.ops if account.source in step.inputs]
    if not used:
        return CauseFinding("unused", None, ["no step takes it"])
    evidence = [f"what it goes into, {spelled(used[0])}, is not used for it"]
    return CauseFinding("unused", None, evidence, variant=ELSEWHERE)


def decision(trail: DataPath, exits: Sequence[Op]) -> Op | None:
    """The step that only decides which way the code takes, if numbers leave the framework for that alone."""
    if not exits or not all(step.branches for step in exits):
        return None
    return (trail.cuts(trail.before(exits[0])) or exits)[0]


def _own(trail: DataPath) -> CauseFinding | None:
    """A rule that somebody wrote: no other step can be part of a path and give no derivative."""
    steps = [remark.op for remark in trail.graph.hints if remark.cause == "custom-rule" and remark.op]
    found = [step for step in steps if trail.between(step)]
    if len(found) == 1:
        return CauseFinding("custom-rule", found[0], ["its rule gives None"])
    ways = Op("one of several rules")
    return CauseFinding("custom-rule", ways, [f"it may be {spelled(step)}" for step in found]) if found else None


def left(exits: Sequence[Op]) -> CauseFinding:
    """Numbers left the framework; which of several ways mattered is not known."""
    if len({step.where for step in exits}) == 1:
        return CauseFinding("left-framework", exits[0], [exits[0].note] if exits[0].note else [])
    ways = Op("one of several ways", module=exits[0].module)
    return CauseFinding("left-framework", ways, [f"they leave in {spelled(step)}" for step in exits])


def cut_by(cuts: Sequence[Op], exits: Sequence[Op]) -> CauseFinding:
    """A step cuts the path; of several one that is not there for a mask, mostly."""
    named = [step for step in cuts if step.cut_cause]
    # comparisons are there for masks, mostly; and what is no step of the user's is to blame where nothing else is
    named.sort(key=lambda step: (step.hidden, step.cut_cause == "discrete"))
    step = named[0] if named else cuts[0]
    evidence = [step.note] if step.note else []
    others = [other for other in (*cuts, *exits) if other is not step]
    if step.cut_cause is None:
        evidence.append("a connected value goes in and one without derivatives comes out, for no reason that is known")
    return CauseFinding(step.cut_cause, step, evidence, others)


def why_nonfinite(
    trail: DataPath,
    seen: Sequence[FiniteFlags | None] | None,
    pulled: Sequence[CotangentSizes | None] | None,
    finite: bool,
    push: Callable[[], Sequence[TangentSizes | None] | None] = lambda: None,
    overflows: Callable[[], bool] = lambda: False,
) -> CauseFinding:
    """Why the gradient is not finite; `finite` says whether the value itself is.

    Where several steps may be to blame, those count that the elements asked for move, which takes one more run. So it
    does to know whether the gradient overflows: whether it is finite in higher precision, and too large for this one.
    """
    steps = trail.graph.ops
    if not finite and seen is not None:
        step = _first_bad(trail, seen, {trail.graph.target})
        if step is not None:
            grows = step.operation in GROWS and any(
                look is not None and look.overflows for other, look in zip(steps, seen, strict=True) if other is step
            )
            cause = "singular" if step.operation in SINGULAR and not grows and not overflows() else "overflow"
            for remark in trail.graph.hints:
                if remark.cause == "out-of-range" and remark.op is step:
                    return CauseFinding.of_remark(remark)
            return CauseFinding(cause, step, ["the value itself is not finite from there on"])
        return CauseFinding(None, None, ["the value itself is not finite, and so are numbers that were given"])
    born = [
        (step, flow)
        for step, flow in zip(steps, pulled or (), strict=False)
        if flow is not None and np.isfinite(flow.at_outputs) and not np.isfinite(flow.at_inputs)
    ]
    pushed = push() if len(born) > 1 else None
    if pushed is not None:
        moved = {id(step) for step, flow in zip(steps, pushed, strict=True) if flow is not None and flow.at_inputs != 0}
        born = [pair for pair in born if id(pair[0]) in moved] or born
    if not born:
        return CauseFinding(None, None, ["no step was seen at which it stops being finite"])
    born.sort(key=lambda pair: pair[0].operation in SINGULAR)  # zero times infinity comes from what made infinity
    step, flow = born[-1]
    if seen is not None and any(
        other is step and it is not None and not it.inputs for other, it in _pairs(steps, seen)
    ):
        return _met(step, _first_bad(trail, seen, set(step.inputs)))
    if flow.where_nonfinite == 0:
        masks = _masks(trail, step, flow, pulled or ())
        cause = "masked-branch" if masks else "singular" if step.operation in SINGULAR else "overflow"
        return CauseFinding(cause, step, ["the gradient that arrives there is zero, and zero times infinity is NaN"])
    singular = step.operation in SINGULAR and not overflows()
    why = "singular" if singular else "overflow" if step.operation in (*SINGULAR, *KILLS) else None
    return CauseFinding(
        why, step, [f"a gradient of {flow.at_outputs:.3g} arrives, and what leaves is {flow.at_inputs}"]
    )


def _met(step: Op, maker: Op | None) -> CauseFinding:
    """A step meets numbers that are not finite, which a mask takes out of the value and not out of the gradient."""
    if maker is None:
        return CauseFinding("masked-branch", step, ["numbers that were given are not finite"])
    return CauseFinding(
        "masked-branch", maker, [f"what it gives is not finite, and the gradient meets it in {spelled(step)}"]
    )


def _masks(trail: DataPath, step: Op, flow: CotangentSizes, pulled: Sequence[CotangentSizes | None]) -> bool:
    """Whether what a step gives is masked afterwards, and not just multiplied by what is zero there, as in a square.

    If no gradient arrives at all, that is for the step behind it to say into which one flows; of some elements, for
    any step on their way.
    """
    behind: set[int] = set(step.outputs)
    found = []
    for other, came in zip(trail.graph.ops, pulled, strict=False):
        if other is step or behind.isdisjoint(other.inputs):
            continue
        alive = came is not None and not came.all_zero
        found += [other] if alive else []
        if not (flow.all_zero and alive):
            behind.update(other.outputs)
    return any(_is_mask(trail, other, behind) for other in found)


def _is_mask(trail: DataPath, step: Op, behind: AbstractSet[int]) -> bool:
    """Whether a step takes elements out, by its name; a product does unless its other factor moves as well."""
    if step.operation in QUOTIENTS:
        return False
    cause = "masked" if step.operation in MATRICES else KILLS.get(step.operation)
    if cause == "masked" and step.operation not in SELECT:
        others = [value for value in step.inputs if value not in behind]
        return not any(value in trail.graph.connected for value in others) and len(set(step.inputs) & behind) < 2
    return cause in MASKS


def _pairs(steps: Sequence[Op], seen: Sequence[FiniteFlags | None]) -> Iterator[tuple[Op, FiniteFlags | None]]:
    return zip(steps, seen, strict=True)


def _first_bad(trail: DataPath, seen: Sequence[FiniteFlags | None], wanted: set[int]) -> Op | None:
    """Back from values along those that are not finite, to the step that made the first of them."""
    account = trail.graph
    found = None
    for step, look in reversed(list(_pairs(account.ops, seen))):
        if look is not None and not look.outputs and not wanted.isdisjoint(step.outputs):
            found = step
            if look.inputs:
                return step
            wanted |= set(step.inputs)
    return found if found is not None and not found.inputs else None


def spelled(step: Op) -> str:
    """A step in a few words."""
    return f"{step.operation} at {step.where}" if step.where else step.operation


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
Flows = Sequence[tuple[Op, TangentSizes]]


@dataclass(frozen=True)
class FurtherEvidence:
    """What takes further runs, and is asked for only where it decides; each may be unknown."""

    vjp: Callable[[], Sequence[CotangentSizes | None] | None] = lambda: None
    """What comes back by each step."""
    precise: Callable[[], float | None] = lambda: None
    """The size of the gradient in higher precision."""
    moves: Callable[[], bool | None] = lambda: None
    """Whether the target moves with the elements."""
    meet: Callable[[], ReachOverlap | None] = lambda: None
    """Where what can move meets a gradient."""
    rounding: bool = False
    """Whether a gradient arrives that is mere rounding."""


def why_zero(
    trail: DataPath,
    pushed: Sequence[TangentSizes | None] | None,
    reaches: float | None,
    elsewhere: bool,
    epsilon: float,
    asked: FurtherEvidence,
) -> CauseFinding:
    """Why the gradient is zero. `reaches` is the forward derivative of what was asked for, `elsewhere` whether other
    elements of the target have one.
    """
    if pushed is None:
        return _checked(trail, _by_gradient(trail, asked.vjp(), asked.precise), asked, None)
    steps = trail.graph.ops
    flows = [(step, flow) for step, flow in zip(steps, pushed, strict=True) if flow is not None and trail.between(step)]
    leaky = any(step.cut_cause == "no-grad" for step in trail.cuts())  # forward derivatives pass there
    if reaches is not None and reaches > 0 and not leaky and not _tiny(reaches, flows, epsilon):
        finding = _by_gradient(trail, asked.vjp(), asked.precise)
        finding.evidence.append("forwards the derivative is not zero")
        if finding.cause == "row-not-used" and finding.step is not None:  # it is looked up, and gets no gradient
            finding.step = replace(finding.step, operation="padding_idx")
        return finding
    return _VanishedDerivative(trail, flows, elsewhere, epsilon, asked).finding()


class _VanishedDerivative:
    """A derivative that was followed forwards, and does not arrive."""

    def __init__(self, trail: DataPath, flows: Flows, elsewhere: bool, epsilon: float, asked: FurtherEvidence):
        self._trail = trail
        self._flows = flows
        self._elsewhere = elsewhere
        self._epsilon = epsilon
        self._asked = asked
        self._met = asked.meet()
        self._flow = {id(step): flow for step, flow in flows}

    def finding(self) -> CauseFinding:
        ended = [step for step, flow in self._flows if flow.at_inputs > 0 and flow.at_outputs == 0]
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
            return CauseFinding("cancelled", rounded[-1], ["what remains is rounding"], ended)
        if lost and not (whole is not None and self._made_before(whole, self._chosen(lost))):
            return self._ended(self._chosen(lost), lost)
        if whole is not None:
            return self._ended(whole, ended)
        bands = [step for step, flow in self._flows if flow.at_outputs > 0 and step.operation in BANDS]
        if bands:
            return CauseFinding("masked", bands[-1], ["other elements of what it gives depend on it"])
        if self._elsewhere:
            finding = CauseFinding(
                "unused", None, ["other elements of the output depend on it, those asked for do not"]
            )
            return _checked(self._trail, finding, self._asked, self._met)
        used = [step for step, flow in self._flows if flow.at_outputs > 0]
        if used:
            finding = CauseFinding("unused", used[-1], ["that part of what it gives is not used"])
            return _checked(self._trail, finding, self._asked, self._met)
        return self._trail.closed() or CauseFinding(None, None, ["no step was seen at which it ends"])

    def _lost(self) -> list[Op]:
        """The steps that give what could move and has a gradient, and take nothing of the kind."""
        met = self._met
        if met is None or self._trail.graph.source in met.alive:
            return []
        lost = [
            step
            for step in self._trail.graph.ops
            if not met.alive.isdisjoint(step.outputs) and met.alive.isdisjoint(step.inputs)
        ]
        return [self._masking(step) or step for step in lost if not met.dependent.isdisjoint(step.inputs)]

    def _masking(self, step: Op) -> Op | None:
        """A softmax is flat where a mask has put its smallest number: the mask is meant."""
        if step.operation not in NORMALISE:
            return None
        makers = [other for other in self._trail.graph.ops if not set(other.outputs).isdisjoint(step.inputs)]
        return next((other for other in makers if other.operation in SELECT), None)

    def _made_before(self, step: Op, lost: Op) -> bool:
        """Whether a zero that a step made may be why another loses the gradient."""
        told = not self._trail.cut(step) and self._cause(step) not in (*APART, "kink")  # a kink is not flat
        return told and self._cause(lost) in FOLLOWS and not self._trail.before(lost).isdisjoint(step.outputs)

    def _is_rounding(self, flow: TangentSizes) -> bool:
        return 0 < flow.at_outputs <= ROUNDING * self._epsilon * flow.at_inputs

    def _chosen(self, ended: Sequence[Op]) -> Op:
        """Of several steps one that tells most: where a derivative is lost, and not where other elements are taken."""
        rank = {id(step): (self._trail.cut(step), self._cause(step) in SELECTS) for step in ended}
        best = min(rank.values())
        return self._trail.last_of([step for step in ended if rank[id(step)] == best])

    def _cause(self, step: Op) -> str | None:
        flow = self._flow.get(id(step))
        stops = step.cut_cause if self._trail.cut(step) else None
        known = flow.cause if flow is not None else None
        cause = known or stops or _kills(step)
        if known is None and cause == "masked" and self._squares(step):
            return "stationary"
        return "masked" if known is None and cause == "cancelled" and step.operation in MATRICES else cause

    def _squares(self, step: Op) -> bool:
        """Whether a step multiplies what comes from a kink by another number that moves: at a kink no slope is seen."""
        if self._met is None or step.operation in (*SELECT, *BANDS):
            return False
        moving = self._met.dependent & set(self._trail.graph.connected)
        kinks = [
            other
            for other, flow in self._flows
            if flow.at_inputs > 0 and flow.at_outputs == 0 and _kills(other) == "kink"
        ]
        behind = self._trail.before(step)
        return set(step.inputs) <= moving and any(not behind.isdisjoint(kink.outputs) for kink in kinks)

    def _ended(self, step: Op, ended: Sequence[Op]) -> CauseFinding:
        cause = self._cause(step)
        if cause == "masked" and step.operation in NORMALISE:
            seen = f"it is so low that {step.operation} gives it no weight"
            return CauseFinding("masked", self._lowering(step) or step, [seen])
        if cause in (*SELECTS, "masked") or self._only_by_cut(step):
            finding = self._by_cut(step)
            if finding is not None:
                return finding
        if cause in DOUBTFUL and step.operation not in SATURATE:
            scale = max([flow.at_outputs for _, flow in self._flows], default=0.0)
            cause = "underflow" if _is_left(self._asked.precise(), cause, scale) else cause
        stops = step.cut_cause if self._trail.cut(step) else None
        evidence = [step.note] if step.note and (stops or not step.cut_cause) else []
        finding = CauseFinding(cause, step, evidence, [other for other in ended if other is not step])
        return _checked(self._trail, finding, self._asked, self._met) if cause in APART else finding

    def _lowering(self, step: Op) -> Op | None:
        """The step that adds a mask to what a softmax takes."""
        makers = [other for other in self._trail.graph.ops if not set(other.outputs).isdisjoint(step.inputs)]
        connected = self._trail.graph.connected
        added = [other for other in makers if other.operation in SUMMANDS and not set(other.inputs) <= set(connected)]
        return added[-1] if added else None

    def _only_by_cut(self, step: Op) -> bool:
        """Whether all that can move comes to a step by ways that are cut."""
        touched = () if self._met is None else self._met.dependent
        return not any(value in touched and value in self._trail.graph.connected for value in step.inputs)

    def _by_cut(self, step: Op) -> CauseFinding | None:
        """A step that takes other elements, or masks them, is no news where the value moves by a way that is cut."""
        cuts = [other for other in _touched_cuts(self._trail, self._met) if other.cut_cause not in FLAT]
        if self._only_by_cut(step):
            before = self._trail.before(step)
            cuts = [cut for cut in _touched_cuts(self._trail, self._met) if not before.isdisjoint(cut.outputs)]
            return cut_by(cuts, []) if cuts else None
        if not cuts:
            return None
        moved = self._asked.moves()
        if moved is None:
            return CauseFinding(None, None, [f"it ends in {spelled(other)}" for other in (step, *cuts)])
        return cut_by(cuts, []) if moved else None


def _touched_cuts(trail: DataPath, met: ReachOverlap | None) -> list[Op]:
    """The cuts to which the elements come."""
    return [cut for cut in trail.cuts() if met is None or not met.dependent.isdisjoint(cut.inputs)]


def _checked(trail: DataPath, finding: CauseFinding, asked: FurtherEvidence, met: ReachOverlap | None) -> CauseFinding:
    """That the value has nothing to do with the elements is said only if it does not move with them."""
    if finding.cause not in APART:
        return finding
    moved = asked.moves()
    cuts = _touched_cuts(trail, met)
    exits = [step for step in trail.exits() if met is None or not met.dependent.isdisjoint(step.inputs)]
    if moved is None and (cuts or exits):
        ends = [step for step in (finding.step, *cuts, *exits) if step is not None]
        return CauseFinding(None, None, [f"it ends in {spelled(step)}" for step in ends])
    if not moved:
        return finding
    step = finding.step
    if step is not None and cuts and all(_is_mask_of(cut, step) for cut in cuts):
        return CauseFinding("masked", step, ["a mask takes other elements"])
    if cuts:
        return cut_by(cuts, exits)
    decided = decision(trail, exits)
    if decided is not None:
        return CauseFinding("discrete", decided, ["it only decides which way the code takes"])
    if exits:
        return left([step for step in exits if not step.branches])
    return CauseFinding(
        None, None, [*finding.evidence, "the value moves with it, though no step was seen that takes it there"]
    )


def _meeting(trail: DataPath, pulled: Sequence[CotangentSizes | None]) -> Op | None:
    """The first step to which all those lead that bring a gradient to the source, if they are several."""
    account = trail.graph
    firsts = [
        step
        for step, flow in zip(account.ops, pulled, strict=False)
        if flow is not None
        and account.source in step.inputs
        and trail.between(step)
        and 0 < flow.at_inputs < float("inf")
    ]
    for step in account.ops if len(firsts) > 1 else ():
        if not trail.between(step):
            continue
        before = trail.before(step)
        if all(first is step or not before.isdisjoint(first.outputs) for first in firsts):
            return step
    return None


def _is_left(precise: float | None, cause: str | None, scale: float) -> bool:
    """Whether a gradient is there in float64; of a sum that cancels there may be the rounding of its parts."""
    least = ROUNDING * sys.float_info.epsilon * scale if cause == "cancelled" else 0.0
    return precise is not None and precise > least


def _is_mask_of(cut: Op, step: Op) -> bool:
    """Whether a step takes elements by truths that another gives."""
    return cut.cut_cause == "discrete" and cut.note.startswith("bool") and not set(cut.outputs).isdisjoint(step.inputs)


def _kills(step: Op) -> str | None:
    return "custom-rule" if step.custom_gradient else KILLS.get(step.operation)


def _tiny(reaches: float, flows: Flows, epsilon: float) -> bool:
    largest = max([flow.at_outputs for _, flow in flows], default=0.0)
    return reaches <= ROUNDING * epsilon * largest


def _by_gradient(
    trail: DataPath, pulled: Sequence[CotangentSizes | None] | None, precise: Callable[[], float | None]
) -> CauseFinding:
    """The last step, going backwards, into which a gradient flows and out of which none does."""
    steps = trail.graph.ops
    for remark in trail.graph.hints:
        if remark.cause in ("hook", "custom-rule") and pulled is None:
            return CauseFinding.of_remark(remark)
    ended = [
        (step, flow)
        for step, flow in zip(steps, pulled or (), strict=False)
        if flow is not None and trail.between(step) and flow.at_outputs > 0 and flow.at_inputs == 0
    ]
    if not ended:
        hooks = [remark for remark in trail.graph.hints if remark.cause in ("hook", "out-of-range")]
        if hooks:
            return CauseFinding.of_remark(hooks[0])
        meeting = _meeting(trail, pulled or ())
        if meeting is not None:
            return CauseFinding("cancelled", meeting, ["gradients come back by several ways, and add up to zero"])
        return CauseFinding("underflow" if precise() else None, None, [])
    step = ended[-1][0]
    for remark in trail.graph.hints:
        if remark.cause == "out-of-range" and remark.op is step:
            return CauseFinding.of_remark(remark)
    cause = _kills(step)
    left = cause in DOUBTFUL and _is_left(precise(), cause, 1.0)
    return CauseFinding("underflow" if left else cause, step)
