"""Where a derivative was lost, from the account of a run: no framework, only steps, values and what flows through."""

from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet

import numpy as np

from elementgrad.backends.witness import Pulled, Pushed, Seen, Step
from elementgrad.explaining.operations import GROWS, KILLS, MATRICES, QUOTIENTS, SELECT, SINGULAR
from elementgrad.explaining.trail import Finding, Trail
from elementgrad.explaining.variants import ELSEWHERE

DECISIVE = ("not-tracked", "integer", "freed-graph")
"""Remarks after which nobody need look for a step."""
MASKS = frozenset("masked unused not-selected overwritten dropped clamped dead-relu row-not-used step-function".split())  # noqa: SIM905
"""What takes elements out of a value, so that no gradient comes back to them."""
FLAT = ("discrete", "step-function")
"""Ends of a path at which no slope is lost, since there is none."""


def why_unconnected(trail: Trail, moves: bool | None) -> Finding:
    """Why the framework's derivative has no path. `moves` says whether the target moves with the element, if known."""
    account = trail.account
    for remark in account.remarks:
        if remark.cause in DECISIVE or (remark.cause == "no-rule" and not account.steps):
            finding = Finding.of_remark(remark)
            finding.step = finding.step or next((step for step in account.steps if account.source in step.takes), None)
            return finding
    cuts = trail.cuts()
    exits = trail.exits()
    if cuts:
        return cut_by(cuts, exits if moves else [])
    if trail.joined:
        return _own(trail) or Finding(None, None, ["every step that was seen passes derivatives on"])
    decided = decision(trail, exits)
    if decided is not None:
        if moves:
            return Finding("discrete", decided, ["it only decides which way the code takes"])
        evidence = [f"it only decides which way the code takes, in {spelled(decided)}"]
        if moves is None:
            return Finding(None, decided, [*evidence, "whether the value moves with it was not tried"])
        return Finding("unused", None, [*evidence, "the value did not move with it"])
    if exits and moves is not False:
        if moves is None and not trail.came_back(exits[0]):
            return Finding(None, exits[0], ["its values left the framework, and whether they came back was not tried"])
        return left([step for step in exits if not step.decides])
    if moves:
        return Finding(None, None, ["the value moves with it, though no step was seen that takes it there"])
    closed = trail.closed()
    if closed is not None:
        return closed
    used = [step for step in account.steps if account.source in step.takes]
    if not used:
        return Finding("unused", None, ["no step takes it"])
    evidence = [f"what it goes into, {spelled(used[0])}, is not used for it"]
    return Finding("unused", None, evidence, variant=ELSEWHERE)


def decision(trail: Trail, exits: Sequence[Step]) -> Step | None:
    """The step that only decides which way the code takes, if numbers leave the framework for that alone."""
    if not exits or not all(step.decides for step in exits):
        return None
    return (trail.cuts(trail.before(exits[0])) or exits)[0]


def _own(trail: Trail) -> Finding | None:
    """A rule that somebody wrote: no other step can be part of a path and give no derivative."""
    steps = [remark.step for remark in trail.account.remarks if remark.cause == "custom-rule" and remark.step]
    found = [step for step in steps if trail.between(step)]
    if len(found) == 1:
        return Finding("custom-rule", found[0], ["its rule gives None"])
    ways = Step("one of several rules")
    return Finding("custom-rule", ways, [f"it may be {spelled(step)}" for step in found]) if found else None


def left(exits: Sequence[Step]) -> Finding:
    """Numbers left the framework; which of several ways mattered is not known."""
    if len({step.where for step in exits}) == 1:
        return Finding("left-framework", exits[0], [exits[0].note] if exits[0].note else [])
    ways = Step("one of several ways", path=exits[0].path)
    return Finding("left-framework", ways, [f"they leave in {spelled(step)}" for step in exits])


def cut_by(cuts: Sequence[Step], exits: Sequence[Step]) -> Finding:
    """A step cuts the path; of several one that is not there for a mask, mostly."""
    named = [step for step in cuts if step.stops]
    # comparisons are there for masks, mostly; and what is no step of the user's is to blame where nothing else is
    named.sort(key=lambda step: (step.quiet, step.stops == "discrete"))
    step = named[0] if named else cuts[0]
    evidence = [step.note] if step.note else []
    others = [other for other in (*cuts, *exits) if other is not step]
    if step.stops is None:
        evidence.append("a connected value goes in and one without derivatives comes out, for no reason that is known")
    return Finding(step.stops, step, evidence, others)


def why_nonfinite(
    trail: Trail,
    seen: Sequence[Seen | None] | None,
    pulled: Sequence[Pulled | None] | None,
    finite: bool,
    push: Callable[[], Sequence[Pushed | None] | None] = lambda: None,
    overflows: Callable[[], bool] = lambda: False,
) -> Finding:
    """Why the gradient is not finite; `finite` says whether the value itself is.

    Where several steps may be to blame, those count that the elements asked for move, which takes one more run. So it
    does to know whether the gradient overflows: whether it is finite in higher precision, and too large for this one.
    """
    steps = trail.account.steps
    if not finite and seen is not None:
        step = _first_bad(trail, seen, {trail.account.target})
        if step is not None:
            grows = step.operation in GROWS and any(
                look is not None and look.grows for other, look in zip(steps, seen, strict=True) if other is step
            )
            cause = "singular" if step.operation in SINGULAR and not grows and not overflows() else "overflow"
            for remark in trail.account.remarks:
                if remark.cause == "out-of-range" and remark.step is step:
                    return Finding.of_remark(remark)
            return Finding(cause, step, ["the value itself is not finite from there on"])
        return Finding(None, None, ["the value itself is not finite, and so are numbers that were given"])
    born = [
        (step, flow)
        for step, flow in zip(steps, pulled or (), strict=False)
        if flow is not None and np.isfinite(flow.arrives) and not np.isfinite(flow.leaves)
    ]
    pushed = push() if len(born) > 1 else None
    if pushed is not None:
        moved = {id(step) for step, flow in zip(steps, pushed, strict=True) if flow is not None and flow.arrives != 0}
        born = [pair for pair in born if id(pair[0]) in moved] or born
    if not born:
        return Finding(None, None, ["no step was seen at which it stops being finite"])
    born.sort(key=lambda pair: pair[0].operation in SINGULAR)  # zero times infinity comes from what made infinity
    step, flow = born[-1]
    if seen is not None and any(other is step and it is not None and not it.takes for other, it in _pairs(steps, seen)):
        return _met(step, _first_bad(trail, seen, set(step.takes)))
    if flow.there == 0:
        masks = _masks(trail, step, flow, pulled or ())
        cause = "masked-branch" if masks else "singular" if step.operation in SINGULAR else "overflow"
        return Finding(cause, step, ["the gradient that arrives there is zero, and zero times infinity is NaN"])
    singular = step.operation in SINGULAR and not overflows()
    why = "singular" if singular else "overflow" if step.operation in (*SINGULAR, *KILLS) else None
    return Finding(why, step, [f"a gradient of {flow.arrives:.3g} arrives, and what leaves is {flow.leaves}"])


def _met(step: Step, maker: Step | None) -> Finding:
    """A step meets numbers that are not finite, which a mask takes out of the value and not out of the gradient."""
    if maker is None:
        return Finding("masked-branch", step, ["numbers that were given are not finite"])
    return Finding(
        "masked-branch", maker, [f"what it gives is not finite, and the gradient meets it in {spelled(step)}"]
    )


def _masks(trail: Trail, step: Step, flow: Pulled, pulled: Sequence[Pulled | None]) -> bool:
    """Whether what a step gives is masked afterwards, and not just multiplied by what is zero there, as in a square.

    If no gradient arrives at all, that is for the step behind it to say into which one flows; of some elements, for
    any step on their way.
    """
    behind: set[int] = set(step.gives)
    found = []
    for other, came in zip(trail.account.steps, pulled, strict=False):
        if other is step or behind.isdisjoint(other.takes):
            continue
        alive = came is not None and not came.dead
        found += [other] if alive else []
        if not (flow.dead and alive):
            behind.update(other.gives)
    return any(_is_mask(trail, other, behind) for other in found)


def _is_mask(trail: Trail, step: Step, behind: AbstractSet[int]) -> bool:
    """Whether a step takes elements out, by its name; a product does unless its other factor moves as well."""
    if step.operation in QUOTIENTS:
        return False
    cause = "masked" if step.operation in MATRICES else KILLS.get(step.operation)
    if cause == "masked" and step.operation not in SELECT:
        others = [value for value in step.takes if value not in behind]
        return not any(value in trail.account.connected for value in others) and len(set(step.takes) & behind) < 2
    return cause in MASKS


def _pairs(steps: Sequence[Step], seen: Sequence[Seen | None]) -> Iterator[tuple[Step, Seen | None]]:
    return zip(steps, seen, strict=True)


def _first_bad(trail: Trail, seen: Sequence[Seen | None], wanted: set[int]) -> Step | None:
    """Back from values along those that are not finite, to the step that made the first of them."""
    account = trail.account
    found = None
    for step, look in reversed(list(_pairs(account.steps, seen))):
        if look is not None and not look.gives and not wanted.isdisjoint(step.gives):
            found = step
            if look.takes:
                return step
            wanted |= set(step.takes)
    return found if found is not None and not found.takes else None


def spelled(step: Step) -> str:
    """A step in a few words."""
    return f"{step.operation} at {step.where}" if step.where else step.operation
